"""Reports: one list of records, printed as a table and written as JSON.

A record is `{case, metric, value, unit, against, ratio}`: what was measured, of what, and, where it was measured beside
something else in the same run, beside what (`against`, a case) and the quotient of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.table import Table


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `value` is in `unit`; `ratio` is `value` over that of the case `against`."""

    case: str
    metric: str
    value: float
    unit: str
    against: str | None = None
    ratio: float | None = None


def write(path: Path, records: Sequence[Record]) -> None:
    """Writes the records as JSON, making the folder where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(records), indent=1) + b"\n")


def table(records: Sequence[Record], columns: Mapping[str, tuple[str, str]], title: str = "") -> Table:
    """A table with a row per case and a column per metric of `columns`: `{metric: (heading, format spec)}`."""
    made = Table(title=title, title_justify="left")
    made.add_column("case")
    for heading, _ in columns.values():
        made.add_column(heading, justify="right")
    cells = {(record.case, record.metric): record for record in records}
    for case in dict.fromkeys(record.case for record in records):
        row = [case]
        for metric, (_, spec) in columns.items():
            record = cells.get((case, metric))
            text = "" if record is None else format(record.value, spec)
            if record is not None and record.ratio is not None:
                text += f" ({record.ratio:.0%})"
            row.append(text)
        made.add_row(*row)
    return made

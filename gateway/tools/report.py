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


def table(records: Sequence[Record], rows: Mapping[str, tuple[str, str]], title: str = "") -> Table:
    """A table with a column per case and a row per metric of `rows`: `{metric: (heading, format spec)}`."""
    made = Table(title=title, title_justify="left")
    made.add_column("")
    cases = list(dict.fromkeys(record.case for record in records))
    for case in cases:
        made.add_column(case, justify="right")
    cells = {(record.case, record.metric): record for record in records}
    for metric, (heading, spec) in rows.items():
        made.add_row(heading, *(_cell(cells.get((case, metric)), spec) for case in cases))
    return made


def _cell(record: Record | None, spec: str) -> str:
    if record is None:
        return ""
    text = format(record.value, spec)
    return text if record.ratio is None else f"{text} ({record.ratio:.0%})"

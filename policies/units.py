"""Durations and sizes as an operator writes them: `250us`, `10ms`, `1.5s`, `2m`, `1h`, `1d`; `64MiB`, `10MB`, `512`.

A duration always has a unit, because a bare number would be read as seconds by one and as milliseconds by the next.
A bare size is bytes. Arithmetic is decimal, so `250us` is exactly the float nearest to 0.00025.
"""

from __future__ import annotations

import re
from decimal import Decimal

from policies.problem import Wrong, clip

SECONDS = {
    "us": Decimal("0.000001"), "ms": Decimal("0.001"), "s": Decimal(1),
    "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400),
}  # fmt: skip
BYTES = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_WRITTEN = ("B", "KiB", "MiB", "GiB", "TiB")  # the units that `format_size` writes
# Digits are bounded (a double holds 17): nothing in a policy is larger, and the arithmetic stays small.
NUMBER = r"[0-9]{1,18}(?:\.[0-9]{1,18})?"
_QUANTITY = re.compile(rf"({NUMBER}) ?([A-Za-z]{{0,16}})")
_LONG_DURATION = {"usec": "us", "msec": "ms", "sec": "s", "min": "m", "hour": "h", "hr": "h", "day": "d"}


def duration(text: str) -> float:
    """Seconds. Raises Wrong."""
    number, unit = _split(text, "duration", f"{', '.join(SECONDS)}, such as 250ms or 2s")
    if not unit:
        raise Wrong(f"'{text}' has no unit", f"write {number}s or {number}ms")
    if unit not in SECONDS:
        meant = _LONG_DURATION.get(unit.lower().removesuffix("s").removesuffix("ond").removesuffix("ute"))
        raise Wrong(
            f"'{text}' has the unknown unit '{unit}'",
            f"write {number}{meant}" if meant else f"expected one of {', '.join(SECONDS)}",
        )
    return float(Decimal(number) * SECONDS[unit])


def size(text: str) -> int:
    """Bytes. Raises Wrong."""
    number, unit = _split(text, "size", "KB, MB, GB, KiB, MiB, GiB, such as 64MiB")
    scale = BYTES.get(unit or "B")
    if scale is None:
        letter = unit[0].upper()
        meant = f"write {number}{letter}iB or {number}{letter}B" if letter in "KMGT" else ""
        raise Wrong(f"'{text}' has the unknown unit '{unit}'", meant or f"expected one of {', '.join(BYTES)}")
    total = Decimal(number) * scale
    if total != int(total):
        raise Wrong(f"'{text}' is not a whole number of bytes")
    return int(total)


def format_duration(seconds: float) -> str:
    """The shortest exact form in the largest fitting unit; `duration` reads it back."""
    exact = Decimal(repr(seconds))
    if not exact:
        return "0s"
    for unit in reversed(SECONDS):
        if exact >= SECONDS[unit] and exact % SECONDS[unit] == 0:
            return f"{int(exact / SECONDS[unit])}{unit}"
    return f"{exact:f}s"


def format_size(count: int) -> str:
    """The largest binary unit that divides it; `size` reads it back."""
    unit = next((unit for unit in reversed(_WRITTEN) if count and count % BYTES[unit] == 0), "B")
    return f"{count // BYTES[unit]}{unit}"


def _split(text: str, what: str, units: str) -> tuple[str, str]:
    if not (match := _QUANTITY.fullmatch(text)):
        raise Wrong(f"{clip(text)!r} is not a {what}", f"write a number and one of {units}")
    return match[1], match[2]

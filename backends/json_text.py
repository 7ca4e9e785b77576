"""What a JSON text hides from a parser that is asked for a few fields: how deep it nests, and keys that occur twice.

Both matter because the text goes on to a backend whose parser differs: deep nesting ends some, and of a key that occurs
twice one parser takes the first and another the last, so that the gateway would judge (and cache) what the backend
never saw. Both checks cost a count or two where there is nothing to find, which is nearly always.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from backends.tensor import shown

# Deeper JSON than any tensor needs is hostile: Triton's parser recurses and dies.
MAX_NESTING = 64
# More keys than any call but an inference needs. Of `generate` each is an input or a parameter, whose time goes by the
# square of their number: 100,000 keep a thread of Triton's busy for minutes.
MAX_KEYS = 1 << 12

_NO_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'[]{}":')
_BLOCK_BYTES = 64 * 1024
_LEVELS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


def too_deep(text: bytes) -> bool:
    """Whether `text` nests beyond MAX_NESTING, as far as a parser would read it."""
    if text.count(b"[") + text.count(b"{") <= MAX_NESTING:
        return False
    level = 0
    for block in _structure(text):
        steps = memoryview(block.translate(_LEVELS, b":")).cast("b")
        levels = list(accumulate(steps, initial=level))
        if max(levels) > MAX_NESTING:
            return True
        level = levels[-1]
    return False


def too_wide(text: bytes) -> bool:
    """Whether `text` has more than MAX_KEYS keys, in all its objects together."""
    return text.count(b":") > MAX_KEYS and _keys(text) > MAX_KEYS


def require_unique_keys(text: bytes, keys: int) -> None:
    """ValueError where an object has a key twice. At least `keys` keys are known to be in `text`, all different."""
    if text.count(b":") > keys and _keys(text) > keys:
        loads_unique(text)


def loads_unique(text: bytes) -> Any:
    """JSON as the standard library reads it, NaN and Infinity included; ValueError where a key occurs twice."""
    return json.loads(text.decode(), object_pairs_hook=_unique)


def _keys(text: bytes) -> int:
    """How many keys all objects of `text` have together."""
    return sum(block.count(b":") for block in _structure(text))


def _structure(text: bytes) -> Iterator[bytes]:
    """The brackets and colons of `text` that are not inside of strings, and nothing else.

    In blocks: a list of what is between quotes could be twenty times as large as a text that is all quotes.
    """
    marks = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_STRUCTURE)
    inside = 0
    for at in range(0, len(marks), _BLOCK_BYTES):
        parts = marks[at : at + _BLOCK_BYTES].split(b'"')
        yield b"".join(parts[inside::2])
        inside = (inside + len(parts) - 1) & 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {shown(next(key for key in keys if keys.count(key) > 1))} occurs twice")
    return made

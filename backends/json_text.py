"""What a JSON text hides from a parser that is asked for a few fields: how deep it nests, and keys that occur twice.

Both matter because the text goes on to a backend whose parser differs: deep nesting ends some, and of a key that occurs
twice one parser takes the first and another the last, so that the gateway would judge (and cache) what the backend
never saw. Both checks cost a count or two where there is nothing to find, which is nearly always.
"""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

from backends.tensor import shown

# Deeper JSON than any tensor needs is hostile: Triton's parser recurses and dies.
MAX_NESTING = 64
# More keys than any call but an inference needs. Of `generate` each is an input or a parameter, whose time goes by the
# square of their number: 100,000 keep a thread of Triton's busy for minutes.
MAX_KEYS = 1 << 12

_NO_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'[]{}":')
_LEVELS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


def too_deep(text: bytes) -> bool:
    """Whether `text` nests beyond MAX_NESTING, as far as a parser would read it."""
    if text.count(b"[") + text.count(b"{") <= MAX_NESTING:
        return False
    steps = memoryview(_structure(text).translate(_LEVELS, b":")).cast("b")
    return max(accumulate(steps), default=0) > MAX_NESTING


def too_wide(text: bytes) -> bool:
    """Whether `text` has more than MAX_KEYS keys, in all its objects together."""
    return text.count(b":") > MAX_KEYS and _structure(text).count(b":") > MAX_KEYS


def require_unique_keys(text: bytes, keys: int) -> None:
    """ValueError where an object has a key twice. At least `keys` keys are known to be in `text`, all different."""
    if text.count(b":") > keys and _structure(text).count(b":") > keys:
        loads_unique(text)


def loads_unique(text: bytes) -> Any:
    """JSON as the standard library reads it, NaN and Infinity included; ValueError where a key occurs twice."""
    return json.loads(text.decode(), object_pairs_hook=_unique)


def _structure(text: bytes) -> bytes:
    """The brackets and colons of `text` that are not inside of strings, and nothing else."""
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(unescaped.translate(None, _NO_STRUCTURE).split(b'"')[::2])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {shown(next(key for key in keys if keys.count(key) > 1))} occurs twice")
    return made

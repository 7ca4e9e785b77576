"""The metadata of gRPC calls: which of them cross a proxy, and in which form."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterable
from typing import Any

from backends.request import HOP_BY_HOP, Metadata

# Of letters, digits and these is a metadata key made, and of visible ASCII its value; gRPC fails the whole call else.
_KEY = re.compile(r"[0-9a-z_.-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")
# A status in full (google.rpc.Status): gRPC's own words, and yet an application's to read and to write.
_DETAILS = "grpc-status-details-bin"
# What a hop says to the next one only, what HTTP/2 or gRPC writes itself, and what would describe another body.
_HOP = HOP_BY_HOP | {"host", "content-type", "content-length", "content-encoding", "user-agent"}


def end_to_end(key: str) -> bool:
    """Whether a key of metadata, in lower case, is one that crosses a proxy."""
    ours = key in _HOP or (key.startswith("grpc-") and key != _DETAILS)
    return not ours and _KEY.fullmatch(key) is not None


def metadata(pairs: Iterable[tuple[str, Any]]) -> Metadata:
    """`pairs` without what belongs to one hop only or has no form in gRPC metadata. Keys come out lower case.

    A tuple is the values of a repeated key. Text under a key that ends in `-bin` is taken for base64, as HTTP/2 has it.
    """
    kept: list[tuple[str, str | bytes]] = []
    for name, value in pairs:
        key = name.lower()
        if not end_to_end(key):
            continue
        for one in value if isinstance(value, tuple) else (value,):
            if key.endswith("-bin"):
                if isinstance(data := _unbase64(one) if isinstance(one, str) else one, bytes):
                    kept.append((key, data))
            elif isinstance(one, str) and _VALUE.fullmatch(one):
                kept.append((key, one))
    return tuple(kept)


def answered(pairs: Iterable[tuple[str, Any]]) -> Metadata:
    """A backend's metadata as its caller is meant to see it: what another gateway says of itself stays here."""
    return tuple(pair for pair in metadata(pairs) if not pair[0].startswith("headrace-"))


def _unbase64(text: str) -> bytes | None:
    try:
        return b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        return None

"""HTTP/1.1 messages as values: a request becomes bytes, a response is a tuple.

Nothing that a caller passes can end a line or a head early (request splitting): method and target are matched whole,
header names too, and the finished head must have exactly the CR and LF that were written here. Headers that concern
one connection are refused, because the connection is the client's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from backends import request
from backends.errors import BadRequest
from backends.tensor import Bytes

Headers = tuple[tuple[bytes, bytes], ...]

HOP_BY_HOP = frozenset(name.encode() for name in request.HOP_BY_HOP)
# Bodies up to here are joined to the head: copying this much costs less than a second buffer in one write.
JOIN_BYTES = 16 * 1024
# Request lines and header names that were checked and are remembered; models and names are few, attackers many.
MEMO_ENTRIES = 512

_METHOD = re.compile(r"[A-Z]+")
_TARGET = re.compile(r"[/*][!-~]*")
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TIMEOUT = re.compile(rb"(?i)\btimeout=([0-9]{1,9})\b")
_OURS = HOP_BY_HOP | {b"host", b"content-length"}
_BODY_EXPECTED = frozenset(("POST", "PUT", "PATCH"))


class HttpResponse(NamedTuple):
    """A whole response. `headers` have lower-case names, in the order they came, end to end only; no trailers."""

    status: int
    headers: Headers
    body: bytes


class RequestWriter:
    """Requests to one authority (`host:port`) as bytes."""

    __slots__ = ("_authority", "_lines", "_names")

    def __init__(self, authority: str) -> None:
        self._authority = authority
        self._lines: dict[tuple[str, str], bytes] = {}
        self._names: set[bytes] = set()

    def write(
        self, method: str, target: str, headers: Sequence[tuple[bytes, bytes]], body: Bytes | Sequence[Bytes]
    ) -> bytes | list[Bytes]:
        """The request in one piece where it is small, else the head and the body's own parts, not copied."""
        lines = [self._lines.get((method, target)) or self._line(method, target)]
        names = self._names
        for pair in headers:
            if pair[0] not in names:
                self._admit(pair[0])
            lines.append(b": ".join(pair))
        parts: list[Bytes]
        if isinstance(body, bytes):
            parts = [body]
            size = len(body)
        else:
            parts = [_flat(body)] if isinstance(body, bytearray | memoryview) else [_flat(part) for part in body]
            size = sum(map(len, parts))
        if size or method in _BODY_EXPECTED:
            lines.append(b"Content-Length: %d" % size)
        lines.append(b"\r\n")
        head = b"\r\n".join(lines)
        # Each line ends with one CRLF, and the first holds another, before Host: any more came from a header's value.
        ends = len(lines) + 1
        if head.count(b"\n") != ends or head.count(b"\r") != ends or b"\0" in head:
            raise BadRequest("expected header values without CR, LF and NUL")
        if size <= JOIN_BYTES:
            return b"".join((head, *parts))
        return [head, *(part for part in parts if part)]

    def _line(self, method: str, target: str) -> bytes:
        """The request line and Host, without the last CRLF."""
        if not _METHOD.fullmatch(method):
            raise BadRequest(f"expected an HTTP method, got {method[:32]!r}")
        if not _TARGET.fullmatch(target):
            raise BadRequest(f"expected a path and query of printable ASCII, got {target[:64]!r}")
        if len(self._lines) >= MEMO_ENTRIES:
            self._lines.clear()
        line = self._lines[method, target] = f"{method} {target} HTTP/1.1\r\nHost: {self._authority}".encode()
        return line

    def _admit(self, name: bytes) -> None:
        if not _TOKEN.fullmatch(name):
            raise BadRequest(f"expected a header name, got {name[:64]!r}")
        if name.lower() in _OURS:
            raise BadRequest(f"header '{name.decode()}' concerns one connection and is not forwarded")
        if len(self._names) < MEMO_ENTRIES:
            self._names.add(name)


def safe_idle(keep_alive: bytes) -> float:
    """For how many seconds a connection may be used again that `Keep-Alive: timeout=N` came on; infinite without one.

    Three quarters: the server's clock began to run before ours.
    """
    found = _TIMEOUT.search(keep_alive)
    return 0.75 * float(found[1]) if found else inf


def _flat(part: Bytes) -> Bytes:
    """`part` with one byte an item, so that its `len` is its size."""
    if not isinstance(part, memoryview) or (part.c_contiguous and part.ndim == 1 and part.itemsize == 1):
        return part
    return part.cast("B") if part.nbytes and part.c_contiguous else part.tobytes()

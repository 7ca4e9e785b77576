"""An HTTP/1.1 response while it comes in: what httptools finds in the bytes, and what of it may be believed.

`Incoming` is one side of a connection: `http_connection` feeds it and hands over what is complete. What is raised in a
parser's callback stops the parser; `_explain` has it back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from httptools import HttpParserCallbackError, HttpResponseParser

from backends.errors import BadReply
from backends.http_message import HOP_BY_HOP
from backends.http_stream import Inflow

# Pieces that one whole response may come in. Each costs a callback, so that 256 MiB of one-byte chunks would hold the
# process for minutes; honest pieces have a kilobyte and more.
MAX_PIECES = 1 << 20
_NOTHING: frozenset[bytes] = frozenset()


class Bounds(Protocol):
    """How large a response may be, and who is told of its peer's keep-alive."""

    origin: str
    max_header_bytes: int
    max_response_bytes: int

    def told(self, keep_alive: bytes) -> None:
        """What the peer says of how long it keeps connections."""


class Incoming:
    """The response to one request at a time; whole in `_body`, or streaming into an `_inflow`."""

    __slots__ = (
        "_body", "_chunked", "_done", "_fed", "_feed", "_head_only", "_headers", "_inflow", "_keep", "_mark", "_named",
        "_parser", "_pieces", "_pool", "_seen", "_size", "_status", "_streaming", "_tail",
    )  # fmt: skip

    _pool: Bounds
    _feed: Callable[[bytes], object]  # takes what has come
    _inflow: Inflow | None
    _head_only: bool
    _streaming: bool
    _headers: list[tuple[bytes, bytes]]
    _body: bytes | bytearray
    _fed: int  # bytes of this response, framing included; `_mark` when the body last grew, to `_seen`
    _mark: int
    _seen: int
    _size: int
    _status: int  # 0 until the final response's head is complete
    _pieces: int
    _tail: bytes
    _done: bool

    # The parser's side. Raising stops it.

    def on_message_begin(self) -> None:
        if self._done:
            raise BadReply(f"{self._pool.origin}: bytes after the end of the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in HOP_BY_HOP:
            self._note(name, value)
        elif not self._status:
            self._headers.append((name, value.strip()))  # the parser leaves white space at the end

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status < 600:
            raise BadReply(f"{self._pool.origin}: expected a status from 100 to 599, got {status}")
        limit = self._pool.max_header_bytes
        if self._fed > limit and sum(len(name) + len(value) + 4 for name, value in self._headers) > limit:
            raise BadReply(f"{self._pool.origin}: response headers above {limit} bytes")
        if status < 200:
            self._chunked = False
            self._headers.clear()
            self._named = _NOTHING
            return
        self._status = status
        self._mark = self._fed
        if self._named:
            # Never Content-Length: without it a cut body would look like one that ends with the connection.
            hidden = self._named - {b"content-length"}
            self._headers = [pair for pair in self._headers if pair[0] not in hidden]
        if self._streaming:
            self._inflow = Inflow(status, tuple(self._headers))
        if self._head_only:
            # The parser, which cannot be told, would now wait for a body; `_finish` takes a new one.
            persistent = self._parser.get_http_version() != "1.0" or b"keep-alive" in self._named
            self._keep = persistent and b"close" not in self._named
            self._done = True

    def on_body(self, data: bytes) -> None:
        before = self._size
        self._size = size = before + len(data)
        if self._inflow is not None:
            self._inflow.parts.append(data)
            self._inflow.size += len(data)
            return
        if size > self._pool.max_response_bytes:
            raise self._too_large()
        if not before:
            self._body = data
            return
        if isinstance(self._body, bytes):
            self._body = bytearray(self._body)
        self._body += data
        self._pieces += 1
        if self._pieces > MAX_PIECES:
            raise BadReply(f"{self._pool.origin}: response body in more than {MAX_PIECES} pieces")

    def on_message_complete(self) -> None:
        if not self._status:
            if self._size:
                raise BadReply(f"{self._pool.origin}: an interim response with a body")
        elif not self._head_only:
            self._keep = self._parser.should_keep_alive()
            self._done = True

    # The response so far.

    def _note(self, name: bytes, value: bytes) -> None:
        """Framing and hop-by-hop headers: kept from the caller, and what matters of them remembered."""
        if name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise BadReply(f"{self._pool.origin}: expected Transfer-Encoding chunked or none, got {value[:64]!r}")
            self._chunked = True
        elif name == b"keep-alive":
            self._pool.told(value)
        elif name == b"connection" and not self._status:
            self._named |= {token.strip().lower() for token in value.split(b",")}

    def _feed_head(self, data: bytes) -> None:
        """Feed the response to a HEAD: not a byte beyond the blank line that ends it."""
        while data and not self._done:
            window = self._tail + data
            found = window.find(b"\r\n\r\n")
            end = len(data) if found < 0 else found + 4 - len(self._tail)
            self._tail = window[-3:] if found < 0 else b""
            self._parser.feed_data(data[:end])
            data = data[end:]
        if data:
            self._keep = False

    def _new_parser(self) -> None:
        self._parser = HttpResponseParser(self)
        self._feed = self._parser.feed_data

    def _forget(self) -> None:
        """Hold nothing of the last response."""
        self._headers = []
        self._named = _NOTHING
        self._body = b""
        self._tail = b""
        self._fed = self._mark = self._seen = self._size = self._status = self._pieces = 0
        self._done = self._keep = self._chunked = False

    def _length(self) -> int:
        """The Content-Length, which the parser has checked; -1 where there is none."""
        for name, value in self._headers:
            if name == b"content-length":
                return int(value)
        return -1

    def _too_large(self) -> BadReply:
        most = self._pool.max_response_bytes
        return BadReply(f"backend {self._pool.origin}: expected a reply of at most {most} bytes, got more")

    def _explain(self, error: Exception) -> BaseException:
        """What stopped the parser: its own complaint, or what was raised in one of our callbacks."""
        if isinstance(error, HttpParserCallbackError) and error.__context__ is not None:
            return error.__context__
        return BadReply(f"{self._pool.origin}: malformed response: {str(error) or type(error).__name__}")

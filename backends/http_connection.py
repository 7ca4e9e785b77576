"""One HTTP/1.1 connection: a request leaves in one write, its response comes back through httptools.

`Connection` is an `asyncio.Protocol` with at most one exchange at a time. The exchange's future is also its token:
`cancel(waiter)` closes the connection only while that exchange is still on it, so that a late cancel can never harm
the next one. A response is complete when its own framing says so (RFC 9112, 6.3): Content-Length, chunked, the end of
the connection where it has neither, or the end of the head for HEAD, 204 and 304. Interim responses (1xx) are skipped.

Whatever goes wrong ends as one `Failure` on the future or in the stream's iterator, also where it was raised inside a
parser's callback. A connection is reused only after a complete response that left nothing unsent and nothing unread.

A `Pool` owns connections; `drop` is the one way out of it. TLS is the transport's business (`backends.secured`), but
for a peer that will not have us: it says so when we may have sent a request already, of which it has read nothing.
"""

from __future__ import annotations

import asyncio
import select
from math import inf
from typing import Protocol, cast

from httptools import HttpParserCallbackError, HttpResponseParser

from backends.errors import BadReply, ConnectionLost, Unreachable
from backends.http_message import HOP_BY_HOP, HttpResponse
from backends.http_stream import Inflow, Waiter
from backends.tcp import nothing_arrived
from backends.tensor import Bytes
from backends.tls import explained, refused

# Bytes that a slow reader of a stream may leave unread before we stop reading: an event loop reads up to 256 KiB at
# once in any case, and less than a socket's buffer would only cost wake-ups.
HIGH_WATER_BYTES = 64 * 1024
# Pieces that one whole response may come in. Each costs a callback, so that 256 MiB of one-byte chunks would hold the
# process for minutes; honest pieces have a kilobyte and more.
MAX_PIECES = 1 << 20
_NOTHING: frozenset[bytes] = frozenset()


class Pool(Protocol):
    """What a connection asks of its owner."""

    origin: str
    max_header_bytes: int
    max_response_bytes: int

    def park(self, connection: Connection) -> None:
        """The connection is free for the next exchange."""

    def leave(self, connection: Connection) -> None:
        """The connection is about to close and no longer counts."""

    def closed(self, connection: Connection) -> None:
        """Its socket is closed."""

    def told(self, keep_alive: bytes) -> None:
        """What the peer says of how long it keeps connections."""


class Connection(asyncio.Protocol):
    """One connection of a pool, once `create_connection` has made it.

    `reused` says that it has served an exchange before, `since` when it was parked, `deadline` when its exchange must
    have ended (the pool calls `fail` then) or, where it is `hurried`, its response begun; `gone` that it has left the
    pool, `lost` that its socket is closed. One to an `address` that is no longer the host's is `retiring`: it serves
    no other exchange. `untouched` says that the peer had ended the connection before a byte of the request reached it.
    """

    __slots__ = (
        "_before", "_body", "_chunked", "_done", "_fed", "_feed", "_head_only", "_headers", "_inflow", "_keep",
        "_loop", "_mark", "_named", "_parser", "_paused", "_pieces", "_poll", "_pool", "_seen", "_sent", "_size",
        "_status", "_streaming", "_tail", "_total", "_transport", "_vetted", "_waiter", "address", "counted",
        "deadline", "gone", "hurried", "lost", "retiring", "reused", "since", "untouched",
    )  # fmt: skip

    _transport: asyncio.Transport
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
    _paused: bool
    _vetted: bool
    _total: float  # the deadline of an exchange that is hurried, once something of its response has come
    hurried: bool

    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self.deadline = inf
        self.since = 0.0
        self.address = ""
        self.reused = self.retiring = self.gone = self.lost = self.counted = self.untouched = False
        self._sent = self._before = 0  # bytes of all requests, and of those before this one
        self._pool = pool
        self._loop = loop
        self._waiter: Waiter | None = None
        self._inflow: Inflow | None = None
        self._new_parser()
        self._forget()

    # The pool's side.

    @property
    def usable(self) -> bool:
        """Nothing is known against a new exchange: still open, and neither an end nor stray bytes wait unread."""
        return not self.gone and not self._transport.is_closing() and not self._poll.poll(0)

    @property
    def unanswered(self) -> bool:
        """A reused connection on which nothing of the last exchange's response has come."""
        return self.reused and not self._fed

    def begin(self, data: bytes | list[Bytes], deadline: float, head_only: bool, streaming: bool) -> Waiter | None:
        """Send one request; the future gives an HttpResponse or, streaming, an Inflow as soon as the head is there.

        None means that the connection turned out to be dead and that not a byte was sent: the first write to an
        empty buffer goes to the kernel at once, and a transport that fails in it is closing when it returns.
        """
        self._waiter = waiter = self._loop.create_future()
        self.deadline = deadline
        self._head_only = head_only
        self._streaming = streaming
        if head_only:
            self._feed = self._feed_head
        transport = self._transport
        self._before = self._sent
        try:
            if isinstance(data, bytes):
                self._sent += len(data)
                transport.write(data)
            else:
                self._sent += sum(map(len, data))
                transport.writelines(data)
        except BaseException:
            self.drop()
            raise
        if transport.is_closing():
            self.drop()
            return None
        return waiter

    def hurry(self, first: float) -> None:
        """Have the exchange end at `first` already, where nothing of its response has come by then."""
        if first < self.deadline:
            self._total, self.deadline, self.hurried = self.deadline, first, True

    def cancel(self, waiter: Waiter) -> None:
        """Close the connection if `waiter`'s exchange is still on it."""
        if self._waiter is waiter:
            self.drop()

    def fail(self, error: BaseException) -> None:
        """Close the connection and end its exchange, if there is one, with `error`."""
        waiter, inflow = self._waiter, self._inflow
        self.drop()
        if inflow is not None:
            inflow.error = error
            inflow.wake()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def resume(self, waiter: Waiter) -> None:
        """The reader of a stream has taken what there was."""
        if self._paused and self._waiter is waiter:
            self._paused = False
            self._transport.resume_reading()

    def drop(self) -> None:
        """Leave the pool and close without flushing. Idempotent."""
        self._waiter = self._inflow = None
        self.deadline = inf
        if not self.gone:
            self.gone = True
            self._transport.abort()
            self._pool.leave(self)

    # The event loop's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's only behave like one
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            self.drop()  # nobody asked
            return
        self._fed += len(data)
        try:
            self._feed(data)
        except Exception as error:
            if not self._done:
                self.fail(self._explain(error))
                return
            self._keep = False  # what came after the response cannot be one
        if self._done:
            self._finish()
        else:
            self._go_on()

    def eof_received(self) -> None:
        if self._waiter is None:
            self.drop()
        elif self._status and not self._chunked and self._length() < 0:
            self._keep = False
            self._finish()
        else:
            socket = self._transport.get_extra_info("socket")
            self.untouched = not self._fed and nothing_arrived(socket, self._before)
            self.fail(self._cut("closed"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiter is None:
            self.drop()
        elif refused(exc) and not self.reused and not self._fed:
            self.fail(Unreachable(f"cannot connect to {self._pool.origin}: {explained(exc)}"))
        else:
            self.fail(self._cut(f"lost ({explained(exc)})" if exc else "closed"))
        self.lost = True
        del self._parser, self._feed, self._poll  # a parser and its protocol hold each other
        self._pool.closed(self)

    # The parser's side. Raising stops it; `data_received` gets what was raised.

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

    def _go_on(self) -> None:
        """The response is not complete: limits, and the reader of a stream."""
        if self.hurried:
            self.deadline, self.hurried = self._total, False
        pool = self._pool
        limit = pool.max_header_bytes
        if not self._status:
            if self._fed > limit:
                self.fail(BadReply(f"{pool.origin}: response headers above {limit} bytes"))
            return
        if self._size != self._seen:
            self._seen = self._size
            self._mark = self._fed
        elif self._fed - self._mark > limit:
            # A chunk's extension or a trailer without end: the parser would swallow it for ever.
            self.fail(BadReply(f"{pool.origin}: more than {limit} bytes of framing without any of the body"))
            return
        inflow = self._inflow
        if inflow is None:
            if not self._vetted and self._length() > pool.max_response_bytes:
                self.fail(self._too_large())
            self._vetted = True
            return
        self._announce(inflow)
        if inflow.size > HIGH_WATER_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _announce(self, inflow: Inflow) -> None:
        """Tell whoever waits for the head, or for more of the body."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(inflow)
        inflow.wake()

    def _finish(self) -> None:
        """The response is complete: hand it over, and the connection back."""
        waiter, inflow = self._waiter, self._inflow
        assert waiter is not None
        if inflow is not None:
            inflow.ended = True
            self._announce(inflow)
        elif not waiter.done():
            waiter.set_result(HttpResponse(self._status, tuple(self._headers), bytes(self._body)))
        if not self._keep or self.retiring or self._transport.get_write_buffer_size():
            self.drop()
            return
        if self._head_only:
            self._new_parser()
        self._waiter = self._inflow = None
        self.deadline = inf
        self.reused = True
        self._forget()
        self._pool.park(self)

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
        self._done = self._keep = self._chunked = self._vetted = self._paused = self.hurried = False

    def _length(self) -> int:
        """The Content-Length, which the parser has checked; -1 where there is none."""
        for name, value in self._headers:
            if name == b"content-length":
                return int(value)
        return -1

    def _too_large(self) -> BadReply:
        most = self._pool.max_response_bytes
        return BadReply(f"backend {self._pool.origin}: expected a reply of at most {most} bytes, got more")

    def _cut(self, how: str) -> ConnectionLost:
        """Why an exchange ended without its whole response."""
        if not self._fed:
            where = "before any of the response"
        elif not self._status:
            where = "within the response's headers"
        elif (length := self._length()) < 0:
            where = f"after {self._size} bytes of the body"
        else:
            where = f"after {self._size} of {length} bytes of the body"
        return ConnectionLost(f"{self._pool.origin}: the connection was {how} {where}")

    def _explain(self, error: Exception) -> BaseException:
        """What stopped the parser: its own complaint, or what was raised in one of our callbacks."""
        if isinstance(error, HttpParserCallbackError) and error.__context__ is not None:
            return error.__context__
        return BadReply(f"{self._pool.origin}: malformed response: {str(error) or type(error).__name__}")

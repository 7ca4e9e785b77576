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

from backends.errors import BadReply, ConnectionLost, Unreachable
from backends.http_incoming import Bounds, Incoming
from backends.http_message import HttpResponse
from backends.http_stream import Inflow, Waiter
from backends.tcp import nothing_arrived
from backends.tensor import Bytes
from backends.tls import explained, refused

# Bytes that a slow reader of a stream may leave unread before we stop reading: an event loop reads up to 256 KiB at
# once in any case, and less than a socket's buffer would only cost wake-ups.
HIGH_WATER_BYTES = 64 * 1024


class Pool(Bounds, Protocol):
    """What a connection asks of its owner."""

    def park(self, connection: Connection) -> None:
        """The connection is free for the next exchange."""

    def leave(self, connection: Connection) -> None:
        """The connection is about to close and no longer counts."""

    def closed(self, connection: Connection) -> None:
        """Its socket is closed."""


class Connection(Incoming, asyncio.Protocol):
    """One connection of a pool, once `create_connection` has made it.

    `reused` says that it has served an exchange before, `since` when it was parked, `deadline` when its exchange must
    have ended (the pool calls `fail` then) or, where it is `hurried`, its response begun; `gone` that it has left the
    pool, `lost` that its socket is closed. One to an `address` that is no longer the host's is `retiring`: it serves
    no other exchange. `untouched` says that the peer had ended the connection before a byte of the request reached it.
    """

    __slots__ = (
        "_before", "_loop", "_paused", "_poll", "_sent", "_total", "_transport", "_vetted", "_waiter", "address",
        "counted", "deadline", "gone", "hurried", "lost", "retiring", "reused", "since", "untouched",
    )  # fmt: skip

    _pool: Pool
    _transport: asyncio.Transport
    _paused: bool
    _vetted: bool
    _total: float  # the deadline of an exchange that is hurried, once something of its response has come
    hurried: bool

    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self.deadline = inf
        self.since = 0.0
        self.address = ""
        self.reused = self.retiring = self.gone = self.lost = self.counted = self.untouched = False
        self._vetted = self._paused = self.hurried = False
        self._sent = self._before = 0  # bytes of all requests, and of those before this one
        self._pool = pool
        self._loop = loop
        self._waiter: Waiter | None = None
        self._inflow = None
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

    # The response so far.

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
        self._vetted = self._paused = self.hurried = False
        self._forget()
        self._pool.park(self)

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

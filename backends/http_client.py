"""The data plane's HTTP/1.1 client: one small pool of connections per endpoint, no task and one write per request.

    client = HttpClient("127.0.0.1", 8000, now=now)
    response = await client.request("POST", "/v2/models/m/infer", headers, body, deadline=now() + 1.0)

A request takes the connection that was used last (so that a pool shrinks when load does), or opens one, or waits for
one under its deadline where `max_connections` are open. Connections leave the pool after `idle_expiry`, and when the
peer ends them or sends what nobody asked for.

What a failure says of the request, so that whoever retries can be honest:

    Unreachable     not a byte of it arrived (except a retry's first try, see below): name, connect, time-out, or a
                    fresh connection that was dead at once
    ConnectionLost  bytes of it were sent and its whole response never came: it may have been executed
    Expired         the deadline passed, or `first_byte_timeout`; the connection is closed, not reused
    BadReply        the response is malformed, or larger than the limits
    BadRequest      the request cannot be written as HTTP; nothing was sent

**Retry.** A server may close an idle connection just as we take it. Where that is seen before the first byte is
written (the transport is closing, an end waits unread in the socket, the kernel refuses the first write), nothing was
sent and the request moves to another connection, whatever its method. Where the two cross on the wire, the kernel tells
what had arrived (`backends.tcp`): if that is nothing of the request, nobody can have executed it, and it is sent once
more, on a fresh connection, whatever its method. Else, and after a reset, which tells nothing, it may have been: GET
and HEAD are sent once more where the connection had served before and not a byte of the response came; everything else
is ConnectionLost. Nothing is ever sent a third time, and nothing after a byte of a response.

**Addresses.** A host that is a name may stand for several, which may change (`backends.addresses`). Connections go to
them in turn; where one refuses, or is late, the next is tried. Those to an address that is gone are closed.

**Time.** Deadlines live on the connections. One timer for the whole pool stands at the earliest and, when it fires,
looks through the open ones: a request whose deadline is not the earliest costs no timer. Grain: milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from typing import Any

from backends.addresses import Resolve
from backends.deadlines import GRAIN
from backends.errors import FIRST_BYTE, ConnectionLost, Expired, Unreachable
from backends.http_connection import Connection
from backends.http_dial import Dialer
from backends.http_message import HttpResponse, RequestWriter, safe_idle
from backends.http_stream import HttpStream
from backends.tensor import Bytes
from backends.tls import ClientTls, explained

__all__ = ["HttpClient", "HttpResponse", "HttpStream"]


class HttpClient:
    """A pool of connections to one endpoint. Belongs to the event loop that it is first used in.

    `now` is the clock of all deadlines. `idle_expiry` must be shorter than the peer's keep-alive (made so where told).
    `max_response_bytes` limits the body of `request`, not of `stream`, whose memory back-pressure bounds. Without
    `resolve` the event loop looks a name up at each connect. `first_byte_timeout` counts in seconds from when a request
    was written. With `tls` the peer must prove to be the host, in the time to connect.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        now: Callable[[], float],
        connect_timeout: float = 2.0,
        first_byte_timeout: float = inf,
        max_connections: int = 1024,
        idle_expiry: float = 4.0,
        max_response_bytes: int = 256 << 20,
        max_header_bytes: int = 64 << 10,
        resolve: Resolve | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self.origin = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.max_response_bytes = max_response_bytes
        self.max_header_bytes = max_header_bytes
        self._now = now
        self._connect_timeout = connect_timeout
        self._first_byte_timeout = first_byte_timeout
        self._max_connections = max_connections
        self._idle_expiry = self._most_idle = idle_expiry
        self._told = b""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._all: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # in the order they were parked
        self._queue: deque[asyncio.Future[Connection | None]] = deque()  # a connection, or a slot to open one in
        self._opening = self._sockets = 0
        self._closed = False
        self._emptied = asyncio.Event()
        self._next_deadline = inf
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._writer = RequestWriter(self.origin)
        self._dialer = Dialer(host, port, now=now, resolve=resolve, tls=tls, moved=self._moved)

    @property
    def in_flight(self) -> int:
        """Connections that serve a request or are being opened for one."""
        return len(self._all) - len(self._idle) + self._opening

    @property
    def idle(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    def request(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: Bytes | Sequence[Bytes] = b"",
        *,
        deadline: float = inf,
    ) -> Coroutine[Any, Any, HttpResponse]:
        """The whole response, whatever its status.

        `headers` are end to end only: Host, Content-Length and what concerns the connection are written here. The
        parts of a `body` go out in order; large ones are not copied, and must not change until the response is there.
        """
        return self._exchange(method, target, headers, body, deadline, False)

    async def stream(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: Bytes | Sequence[Bytes] = b"",
        *,
        deadline: float = inf,
    ) -> HttpStream:
        """The response as soon as its head is there. `deadline` holds until the end of the body."""
        stream: HttpStream = await self._exchange(method, target, headers, body, deadline, True)
        return stream

    def refresh(self) -> None:
        """Ask anew, in the background, what the host's name stands for, where the last answer is old."""
        self._dialer.refresh()

    async def close(self) -> None:
        """Close every connection and wait until their sockets are closed; what is in flight fails."""
        self._closed = True
        self._dialer.close()
        for timer in (self._deadline_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        while self._queue:
            ticket = self._queue.popleft()
            if not ticket.done():
                ticket.set_exception(self._unreachable("the client was closed"))
        for connection in list(self._all):
            connection.fail(ConnectionLost(f"{self.origin}: the client was closed"))
        while self._sockets:
            self._emptied.clear()
            await self._emptied.wait()

    async def _exchange(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: Bytes | Sequence[Bytes],
        deadline: float,
        streaming: bool,
    ) -> Any:
        data = self._writer.write(method, target, headers, body)
        now = self._now()
        if deadline <= now:
            raise Expired("backend")
        head_only = method == "HEAD"
        again = False
        while True:
            connection = None
            while self._idle and not again:
                connection, _ = self._idle.popitem()
                if connection.since + self._idle_expiry > now and connection.usable:
                    break
                connection.drop()
                connection = None
            if connection is None:
                connection = await self._acquire(deadline, again)
                if deadline <= self._now():
                    self.park(connection)
                    raise Expired("backend")
            waiter = connection.begin(data, deadline, head_only, streaming)
            if waiter is None:
                if not connection.reused:
                    raise self._unreachable("the connection was closed before anything could be sent")
                continue
            if (first := self._first_byte_timeout) < inf:
                connection.hurry(self._now() + first)
            if connection.deadline < self._next_deadline:
                self._watch(connection.deadline)
            try:
                result = await waiter
            except ConnectionLost as lost:
                if connection.untouched:
                    if again or not connection.reused:
                        raise self._unreachable("the connection was closed before anything had arrived") from lost
                elif again or not connection.unanswered or (method != "GET" and not head_only):
                    raise
                again = True
            except BaseException:
                connection.cancel(waiter)
                raise
            else:
                return HttpStream(connection, waiter, result) if streaming else result
            finally:
                waiter = None  # else an error would hold this frame, the frame the waiter, and the waiter the error

    # Connections.

    async def _acquire(self, deadline: float, fresh: bool) -> Connection:
        """A connection when none is idle (or when only a fresh one will do), at the latest at `deadline`."""
        self._loop = asyncio.get_running_loop()
        while True:
            if self._closed:
                raise self._unreachable("the client was closed")
            if len(self._all) + self._opening < self._max_connections:
                self._opening += 1
                return await self._open(deadline)
            if fresh and self._idle:
                next(iter(self._idle)).drop()
                continue
            ticket: asyncio.Future[Connection | None] = self._loop.create_future()
            self._queue.append(ticket)
            try:
                async with self._until(deadline):
                    connection = await ticket
            except BaseException as error:
                if ticket.cancelled() or ticket.cancel():
                    with contextlib.suppress(ValueError):
                        self._queue.remove(ticket)
                elif ticket.exception() is None:
                    self._give_back(ticket.result())
                if isinstance(error, TimeoutError):
                    raise Expired("backend") from None
                raise
            if connection is None:
                return await self._open(deadline)
            if connection.usable:
                return connection
            connection.drop()

    async def _open(self, deadline: float) -> Connection:
        """A new connection, in a slot that was counted in `_opening`."""
        limit = self._now() + self._connect_timeout
        until = min(limit, deadline)
        try:
            async with self._until(until):
                connection = await self._dialer.dial(self._connection, until)
        except TimeoutError as error:
            if deadline < limit:
                raise Expired("backend") from None
            raise self._unreachable(f"no answer within {self._connect_timeout:g} s") from error
        except (OSError, UnicodeError, OverflowError) as error:
            raise self._unreachable(explained(error)) from error
        else:
            if not connection.lost:
                self._sockets += 1
                connection.counted = True
            if self._closed:
                connection.drop()
                raise self._unreachable("the client was closed")
            if connection.gone:
                raise self._unreachable("the connection was closed before anything could be sent")
            self._all.add(connection)
            return connection
        finally:
            self._opening -= 1
            self._wake()

    def _connection(self) -> Connection:
        assert self._loop is not None
        return Connection(self, self._loop)

    def _moved(self) -> None:
        """The host has other addresses: connections to those that are gone end."""
        for connection in list(self._all):
            connection.retiring = self._dialer.astray(connection)
            if connection.retiring and connection in self._idle:
                connection.drop()

    def _until(self, deadline: float) -> asyncio.Timeout:
        return asyncio.timeout(None if deadline == inf else max(deadline - self._now(), 0.0) + GRAIN)

    def _unreachable(self, reason: str) -> Unreachable:
        return Unreachable(f"cannot connect to {self.origin}: {reason}")

    def _wake(self) -> None:
        """Give free slots to those who wait for one."""
        while self._queue and len(self._all) + self._opening < self._max_connections:
            ticket = self._queue.popleft()
            if not ticket.done():
                self._opening += 1
                ticket.set_result(None)

    def _give_back(self, given: Connection | None) -> None:
        """What a ticket brought came too late for its owner."""
        if given is not None:
            self.park(given)
        else:
            self._opening -= 1
            self._wake()

    # What connections call.

    def park(self, connection: Connection) -> None:
        """`connection` is free: the one who has waited longest gets it, or it idles."""
        if connection.gone:
            return
        while self._queue:
            ticket = self._queue.popleft()
            if not ticket.done():
                ticket.set_result(connection)
                return
        connection.since = self._now()
        self._idle[connection] = None
        if self._idle_timer is None:
            assert self._loop is not None
            self._idle_timer = self._loop.call_later(self._idle_expiry + GRAIN, self._sweep)

    def leave(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        if connection in self._all:
            self._all.remove(connection)
            self._wake()

    def closed(self, connection: Connection) -> None:
        if connection.counted:
            self._sockets -= 1
            if not self._sockets:
                self._emptied.set()

    def told(self, keep_alive: bytes) -> None:
        if keep_alive != self._told:
            self._told = keep_alive
            self._idle_expiry = min(self._most_idle, safe_idle(keep_alive))

    # Time.

    def _watch(self, deadline: float) -> None:
        """Have `_expire` run at `deadline`, which is the earliest."""
        assert self._loop is not None
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._next_deadline = deadline
        self._deadline_timer = self._loop.call_later(max(deadline - self._now(), 0.0) + GRAIN, self._expire)

    def _expire(self) -> None:
        self._deadline_timer = None
        self._next_deadline = inf
        now = self._now()
        for connection in list(self._all):
            if connection.deadline <= now:
                connection.fail(Expired(FIRST_BYTE if connection.hurried else "backend"))
        soonest = min((connection.deadline for connection in self._all), default=inf)
        if soonest < inf:
            self._watch(soonest)

    def _sweep(self) -> None:
        """Close what has idled too long."""
        self._idle_timer = None
        late = self._now() - self._idle_expiry
        while self._idle:
            oldest = next(iter(self._idle))
            if oldest.since > late:
                assert self._loop is not None
                self._idle_timer = self._loop.call_later(oldest.since - late + GRAIN, self._sweep)
                return
            oldest.drop()

"""An HTTP/1.1 server for one ASGI application: asyncio.Protocol, httptools, one task and one write a request.

Theory of operation. A connection parses what comes and answers its requests in their order, one task at a time; what
was pipelined waits. A request's body usually comes with its head, before its task runs: then `scope[WHOLE]()` is the
body, and nobody has to wait for it. A response whose length is known leaves together with its first bytes, one that is
streamed leaves as it comes. Whoever goes away, be it by half, has its task cancelled.

Bounds: a head in bytes and seconds, a body by what its reader takes (beyond HIGH_WATER_BYTES unread the connection is
read no further), a slow reader of a response by the transport's buffer, idling in seconds; one timer a server looks
after all of them. Trailers are dropped; an upgrade that nobody offers is ignored, its body is not; what is left of a
body that was refused is read and dropped, within bounds, so that the answer is not lost to a reset.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httptools
import msgspec

from gateway.server import WHOLE, Asgi, Message, Scope, listen
from policies.spec import Address

# The largest head that is read; proxies before us allow as much at most.
MAX_HEAD_BYTES = 64 * 1024
# How long a new connection, an unfinished head, or the rest of a refused body may take, in seconds.
HEAD_SECONDS = 30.0
# Longer than clients and load balancers keep idle connections (60 s is common), so that they close first.
KEEP_ALIVE_SECONDS = 75.0
# Bytes of a body that may wait for their reader.
HIGH_WATER_BYTES = 256 * 1024
# Bytes of a refused body that are read for the sake of the answer; a sender that goes on is cut off.
_DISCARD_BYTES = 64 * 1024 * 1024
# Pipelined requests that may wait for the one before them, until no more are read.
_PIPELINED = 16
# How often connections are looked after: what times out does so at most this much later, in seconds.
_SWEEP_SECONDS = 1.0

_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_STATUS = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
_BODILESS = frozenset((204, 304))


class _Exchange:
    """One request and its response: what the application receives from and sends to."""

    __slots__ = (
        "_chunked", "_connection", "_expects", "_head", "_head_only", "_http11", "_left", "_parts", "_size", "_waiter",
        "complete", "done", "keep", "scope", "started", "taken", "task",
    )  # fmt: skip

    def __init__(self, connection: _Connection, scope: Scope, expects: bool, keep: bool) -> None:
        self.scope = scope
        self.complete = False  # the request has come
        self.taken = False  # all of its body has been handed over
        self.started = self.done = False  # the response
        self.keep = keep
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._expects = expects
        self._parts: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._head = b""  # of a response that waits for its first bytes
        self._head_only = scope["method"] == "HEAD"
        self._http11 = scope["http_version"] == "1.1"
        self._chunked = False
        self._left = 0  # bytes of the response that were promised

    # The request.

    def whole(self) -> bytes | None:
        """The whole body where it is there."""
        if not self.complete or self.taken:
            return None
        self.taken = True
        self._connection.unhold()
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def body(self, data: bytes) -> None:
        self._size += len(data)
        if self.done:
            if self._size > _DISCARD_BYTES:
                self._connection.abort()
            return
        self._parts.append(data)
        if self._size > HIGH_WATER_BYTES:
            self._connection.hold()
        if self._waiter is not None:
            self.wake()

    def end(self) -> None:
        self.complete = True
        self.wake()

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def receive(self) -> Message:
        while not self._parts and not (self.complete and not self.taken):
            if self._connection.gone or self.done:
                return {"type": "http.disconnect"}
            if self._expects and not self.started:
                self._expects = False
                self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self.taken = self.complete
        data = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        self._connection.unhold()
        return {"type": "http.request", "body": data, "more_body": not self.complete}

    # The response.

    async def send(self, message: Message) -> None:
        connection = self._connection
        if connection.paused:
            await connection.drained()
        if connection.gone or self.done:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message["headers"])
            return
        data, more = message.get("body", b""), message.get("more_body", False)
        head, self._head = self._head, b""
        if self._head_only:
            data = b""
        elif self._chunked:
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if not more:
                data += b"0\r\n\r\n"
        elif self._left >= 0:
            self._left -= len(data)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the body of a response is not as long as was promised")
        if head or data:
            connection.write(head + data if head else data)
        if not more:
            self.done = True
            connection.answered(self)

    def _start(self, status: int, headers: Any) -> None:
        self.started = True
        if not self.complete:
            self.keep = False  # whatever comes now belongs to a body that nobody reads
        if status in _BODILESS:
            self._head_only = True
        length, lines, dated = -1, [], False
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"date":
                dated = True
            lines.append(b"%b: %b\r\n" % (name, value))
        if not dated:
            lines.append(self._connection.server.date)
        if not self.keep:
            lines.append(b"connection: close\r\n")
        self._left = length
        if length < 0 and not self._head_only:
            if self._http11:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
            elif self.keep:
                self.keep = False  # HTTP/1.0: the end of the connection is the end of the body
                lines.append(b"connection: close\r\n")
        head = b"".join(lines)
        # Each line ends with one CRLF; any more came from a header's name or value.
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head:
            raise RuntimeError("a header of a response has CR, LF or NUL in it")
        self._head = b"%b%b\r\n" % (_STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status, head)
        if length < 0 and not self._head_only:
            self._connection.write(self._head)
            self._head = b""


class _Connection(asyncio.Protocol):
    """One client. `busy` is the exchange that is being answered; others wait."""

    __slots__ = (
        "_begun", "_drain", "_expects", "_fresh", "_head_bytes", "_headers", "_held", "_in_head", "_parser", "_peer",
        "_reading", "_too_large", "_transport", "_url", "_waiting", "busy", "gone", "paused", "server", "since",
    )  # fmt: skip

    _transport: asyncio.Transport
    _headers: list[tuple[bytes, bytes]]

    def __init__(self, server: Http1Server) -> None:
        self.server = server
        self.busy: _Exchange | None = None
        self.gone = self.paused = False
        self.since = server.now()  # when it began to idle, or its head or refused body to come
        self._waiting: deque[_Exchange] = deque()
        self._reading: _Exchange | None = None  # the exchange whose body comes
        self._in_head = self._held = self._too_large = False
        self._begun = 0  # heads that began in the last piece of what came
        self._fresh = True
        self._head_bytes = 0
        self._drain: asyncio.Future[None] | None = None
        self._parser = httptools.HttpRequestParser(self)

    # The event loop's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._peer = transport.get_extra_info("peername")
        self.server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._reading is None and b"pgrade:" in data:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-upgrade-ignored:", head) + end + rest
        # What of it may belong to a head that ends in it, or does not: all, unless a body or another head comes before.
        alone = self._in_head or self._reading is None
        self._head_bytes += len(data)
        self._begun = 0
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._too_large:
                self._refuse(400, "expected an HTTP/1.1 request, got something else")
                return
        if not self._in_head or self._begun > alone:
            self._head_bytes = 0
        if self._too_large or self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"request head: expected at most {MAX_HEAD_BYTES} bytes, got more")

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self.server.connections.discard(self)
        self._waiting.clear()
        self.resume_writing()
        busy, self.busy, self._reading = self.busy, None, None
        if busy is not None:
            busy.wake()
            if busy.task is not None:
                busy.task.cancel()
        del self._parser  # it and its protocol hold each other

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        drain, self._drain = self._drain, None
        if drain is not None and not drain.done():
            drain.set_result(None)

    # The parser's side.

    def on_message_begin(self) -> None:
        self._in_head = True
        self._begun += 1
        self._expects = False
        self._headers = []
        self._url = b""
        if self.busy is None:
            self.since = self.server.now()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self._expects = True
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        parser = self._parser
        url = self._url
        if not url.startswith(b"/"):
            parsed = httptools.parse_url(url)
            url = (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
        path, _, query = url.partition(b"?")
        scope: Scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": parser.get_http_version(),
            "method": parser.get_method().decode("latin-1"),
            "scheme": "http",
            "path": path.decode("latin-1"),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": self._headers,
            "client": self._peer,
        }
        if self._head_bytes > MAX_HEAD_BYTES:
            size = len(url) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if size > MAX_HEAD_BYTES:
                self._too_large = True
                raise ValueError  # ends the parsing
        keep = parser.should_keep_alive() and scope["http_version"] == "1.1" and not self.server.closing
        exchange = _Exchange(self, scope, self._expects, keep)
        scope[WHOLE] = exchange.whole
        self._reading = exchange
        if self.busy is None:
            self._begin(exchange)
        else:
            self._waiting.append(exchange)
            if len(self._waiting) >= _PIPELINED:
                self.hold()

    def on_body(self, data: bytes) -> None:
        assert self._reading is not None
        self._reading.body(data)

    def on_message_complete(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.end()
            if reading.done:
                self._next()

    # The exchange's side.

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def drained(self) -> None:
        """Returns when the client has taken enough of what was written, or is gone."""
        if self.paused and not self.gone:
            if self._drain is None:
                self._drain = asyncio.get_running_loop().create_future()
            await self._drain

    def hold(self) -> None:
        """Reads no further until `unhold`."""
        if not self._held and not self.gone:
            self._held = True
            self._transport.pause_reading()

    def unhold(self) -> None:
        """Reads on, where nothing else speaks against it: only who reads sees that a client leaves."""
        if self._held and len(self._waiting) < _PIPELINED and not self.gone:
            self._held = False
            self._transport.resume_reading()

    def answered(self, exchange: _Exchange) -> None:
        """The response has been written."""
        if self._transport.is_closing():
            return
        if not exchange.complete:
            # What is left is read and dropped, so that closing does not reset what the client has yet to read.
            self.since = self.server.now()
            self.unhold()
        elif exchange.keep and not self.server.closing:
            self._next()
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # Both.

    def _begin(self, exchange: _Exchange) -> None:
        self.busy = exchange
        exchange.task = self.server.loop.create_task(self._run(exchange))

    async def _run(self, exchange: _Exchange) -> None:
        try:
            await self.server.app(exchange.scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self.server.report(error)
        finally:
            # What would hold each other: the garbage collector need not look for it.
            exchange.task = None
            del exchange.scope
            if not exchange.done and not self.gone:
                # Without an answer, or cut in the middle: the client must not take what it has for the whole.
                if exchange.started:
                    self._transport.close()
                else:
                    self._refuse(500, "internal error in the gateway")

    def _next(self) -> None:
        """After an exchange: the one that waits, or none."""
        before, self.busy = self.busy, None
        if before is not None and not before.keep:
            self._transport.close()
            return
        self.since = self.server.now()
        self._fresh = False
        if self._waiting:
            self._begin(self._waiting.popleft())
        self.unhold()

    def sweep(self, now: float) -> None:
        """Closes the connection where it has idled, or its head has come, for too long."""
        busy = self.busy
        if self._in_head and busy is None:
            if now - self.since > self.server.head_seconds:
                self._refuse(408, f"request head: expected all of it within {self.server.head_seconds:g} s")
        elif busy is None:
            if now - self.since > (self.server.head_seconds if self._fresh else self.server.keep_alive_seconds):
                self._transport.close()
        elif busy.done and now - self.since > self.server.head_seconds:
            self.abort()

    def shut(self) -> None:
        """Closes the connection when its exchange is over."""
        if self.busy is None or self.busy.done:
            self._transport.close()
        elif not self.busy.started:
            self.busy.keep = False

    def _refuse(self, status: int, message: str) -> None:
        if self._transport.is_closing():
            return
        body = msgspec.json.encode({"error": message})
        head = b"%bcontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        if self.busy is None or not self.busy.started or self.busy.done:
            self._transport.write(head % (_STATUS[status], len(body)) + body)
        self._transport.close()


_ASGI = {"version": "3.0", "spec_version": "2.4"}


class Http1Server:
    """One listener, of a port alone or `shared` with other processes, or of a Unix socket.

    `report` hears of what the application raises; limits are in seconds.
    """

    def __init__(
        self,
        app: Asgi,
        address: Address | Path,
        drain_seconds: float,
        *,
        shared: bool = False,
        now: Callable[[], float],
        report: Callable[[BaseException], None],
        head_seconds: float = HEAD_SECONDS,
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        self.app = app
        self.now = now
        self.report = report
        self.head_seconds = head_seconds
        self.keep_alive_seconds = keep_alive_seconds
        self.connections: set[_Connection] = set()
        self.closing = False
        self.date = b""
        self.port = 0
        self._address = address
        self._shared = shared
        self._drain_seconds = drain_seconds
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Opens the port. Raises OSError, naming the address, where it is taken."""
        self.loop = asyncio.get_running_loop()
        listener = listen(self._address, shared=self._shared)
        if isinstance(self._address, Address):
            self.port = listener.getsockname()[1]
        self._sweep()
        self._server = await self.loop.create_server(lambda: _Connection(self), sock=listener, backlog=2048)

    async def close(self) -> None:
        """Refuses new connections, answers what is in flight until the drain time is over, then cuts what is left."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.shut()
        until = self.now() + self._drain_seconds
        while self.connections and self.now() < until:  # noqa: ASYNC110 - once in a process's life
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)
        if self._timer is not None:
            self._timer.cancel()

    def _sweep(self) -> None:
        self.date = b"date: %b\r\n" % formatdate(usegmt=True).encode()
        now = self.now()
        for connection in list(self.connections):
            connection.sweep(now)
        self._timer = self.loop.call_later(_SWEEP_SECONDS, self._sweep)

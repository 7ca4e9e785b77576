"""One client's HTTP/1.1 connection: what it sends becomes exchanges, which are answered in their order.

How it ends is half of it. Where its client may still be sending it lingers: what comes is read and dropped, within
bounds, so that the answer is not lost to a reset.

A client that goes away, be it by half, has its task cancelled within the same turn of the loop, also where it is not
read because of what it has sent already (`gateway.departures`). By half, though a Triton answers a client that has only
shut down its writing side: a client that closed altogether looks the same. Either sends a FIN, for which poll, epoll,
SO_ERROR and TCP_INFO (CLOSE_WAIT) say the same; only our next bytes tell the two apart, by the reset that they bring,
and the answer whose bytes these would be is what must not be computed for nobody. So an end counts as having left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from socket import SO_LINGER, SOL_SOCKET
from struct import pack
from typing import TYPE_CHECKING

import httptools
import msgspec

from gateway.exchange import STATUS, Exchange
from gateway.server import MAX_HEAD_BYTES, WHOLE, Scope

if TYPE_CHECKING:
    from gateway.http1 import Http1Server

# Bytes that are read and dropped for the sake of the answer; a sender that goes on is cut off.
_LINGER_BYTES = 64 * 1024 * 1024
# Pipelined requests that may wait for the one before them, until no more are read; and that one read may bring.
_PIPELINED = 16
_MAX_PIPELINED = 256
# That one body may come in. Each costs a callback, so that 64 MiB of one-byte chunks would hold the process for a
# minute; honest chunks have hundreds of bytes.
MAX_PIECES = 1 << 20
_RESET = pack("ii", 1, 0)  # SO_LINGER: on, for no time
_ASGI = {"version": "3.0", "spec_version": "2.4"}


class _Refused(Exception):
    """Ends the parsing: (status, message)."""


_NO_HTTP = (400, "expected an HTTP/1.1 request, got something else")
_LARGE_HEAD = (431, f"request head: expected at most {MAX_HEAD_BYTES} bytes, got more")
_MANY_PIECES = (413, f"request body: expected at most {MAX_PIECES} chunks, got more")
_MANY_WAIT = (400, f"pipelining: expected at most {_MAX_PIPELINED} requests at once, got more")


class Connection(asyncio.Protocol):
    """One client. `busy` is the exchange that is being answered; others wait."""

    __slots__ = (
        "_deaf", "_drain", "_dropped", "_expects", "_fresh", "_headers", "_held", "_in_head", "_parser", "_peer",
        "_reading", "_refusal", "_socket", "_transport", "_unframed", "_unsent", "_unsent_since", "_url", "_waiting",
        "busy", "gone", "paused", "server", "since",
    )  # fmt: skip

    _transport: asyncio.Transport
    _headers: list[tuple[bytes, bytes]]

    def __init__(self, server: Http1Server) -> None:
        self.server = server
        self.busy: Exchange | None = None
        self.gone = self.paused = False
        self.since = server.now()  # when it began to idle or to linger, or its head to come
        self._waiting: deque[tuple[Exchange, Scope]] = deque()
        self._reading: Exchange | None = None  # the exchange whose body comes
        self._in_head = self._held = self._expects = False
        self._url = b""
        self._unframed = 0  # bytes that came since the last of a body, or of a message: those of a head, or of trailers
        self._fresh = True
        self._deaf = False  # what comes is read and dropped
        self._dropped = 0
        self._refusal: tuple[int, str] | None = None  # what is left to say after the last answer
        self._unsent, self._unsent_since = 0, self.since
        self._drain: asyncio.Future[None] | None = None
        self._parser = httptools.HttpRequestParser(self)

    # The event loop's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._peer = transport.get_extra_info("peername")
        self._socket = transport.get_extra_info("socket").fileno()
        server = self.server
        limit = server.limit
        if len(server.connections) >= limit:
            self._say(503, f"too many connections, limit {limit}", close=True)
            return
        server.connections.add(self)
        if server.closing:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._dropped += len(data)
            if self._dropped > _LINGER_BYTES:
                self._transport.abort()
            return
        self._unframed += len(data)
        pieces: list[bytes | memoryview] = [data]
        try:
            while pieces:
                piece = pieces.pop()
                try:
                    self._parser.feed_data(piece)
                except httptools.HttpParserUpgrade as upgrade:
                    pieces += memoryview(piece)[upgrade.args[0] :], self._without_upgrade()
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(*(cause.args if isinstance(cause, _Refused) else _NO_HTTP))
            return
        if self._unframed > MAX_HEAD_BYTES:
            self._refuse(*_LARGE_HEAD)

    def eof_received(self) -> None:
        self._leave()  # and the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        if self._held:
            self.server.departures.forget(self._socket)
        self._leave()
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
        self._expects = False
        self._headers = []
        self._url = b""
        if self.busy is None:
            self.since = self.server.now()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer
            name, value = name.lower(), value.rstrip()
            if name == b"expect" and value.lower() == b"100-continue":
                self._expects = True
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        parser = self._parser
        method = parser.get_method()
        if parser.should_upgrade():
            if method == b"CONNECT":
                raise _Refused(*_NO_HTTP)
            return  # it comes again, without its upgrade
        url = self._url
        if self._unframed > MAX_HEAD_BYTES:  # with what else came at once
            size = len(url) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if size > MAX_HEAD_BYTES:
                raise _Refused(*_LARGE_HEAD)
        self._unframed = 0
        if not url.startswith(b"/"):
            parsed = httptools.parse_url(url)
            url = (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
        path, _, query = url.partition(b"?")
        version = parser.get_http_version()
        http11 = version == "1.1"
        if not http11 and (version != "1.0" or any(name == b"transfer-encoding" for name, _ in self._headers)):
            raise _Refused(*_NO_HTTP)  # the parser knows 0.9 and 2.0 too, and chunks that HTTP/1.0 had not
        exchange = Exchange(
            self,
            head_only=method == b"HEAD",
            http11=http11,
            expects=self._expects and http11,
            keep=parser.should_keep_alive() and not self.server.closing,
        )
        scope: Scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "method": method.decode("latin-1"),
            "scheme": self.server.scheme,
            "path": path.decode("latin-1"),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": self._headers,
            "client": self._peer,
            WHOLE: exchange.whole,
        }
        if self.busy is None:
            self._begin(exchange, scope)
        else:
            if len(self._waiting) >= _MAX_PIPELINED:
                raise _Refused(*_MANY_WAIT)
            self._waiting.append((exchange, scope))
            if len(self._waiting) >= _PIPELINED:
                self.hold()
        self._reading = exchange

    def on_body(self, data: bytes) -> None:
        reading = self._reading
        assert reading is not None
        self._unframed = 0
        reading.pieces += 1
        if reading.pieces > MAX_PIECES:
            raise _Refused(*_MANY_PIECES)
        reading.body(data)

    def on_message_complete(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            self._unframed = 0
            reading.end()

    def _without_upgrade(self) -> bytes:
        """The head of a request whose upgrade the parser stopped at, for a new parser."""
        parser, self._parser = self._parser, httptools.HttpRequestParser(self)
        lines = b"".join(b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade")
        version = parser.get_http_version().encode()
        return b"%b %b HTTP/%b\r\n%b\r\n" % (parser.get_method(), self._url, version, lines)

    # The exchange's side.

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def drained(self) -> None:
        """Returns when the client has taken enough of what was written, or is gone."""
        if self.paused and not self.gone:
            if self._drain is None or self._drain.done():  # whoever waited may have been cancelled
                self._drain = self.server.loop.create_future()
            await self._drain

    def hold(self) -> None:
        """Reads no further until `unhold`."""
        if not self._held and not self.gone:
            self._held = True
            self._transport.pause_reading()
            self.server.departures.watch(self._socket, self._departed)

    def unhold(self) -> None:
        """Reads on, where nothing else speaks against it."""
        if self._held and len(self._waiting) < _PIPELINED and not self.gone:
            self._held = False
            self.server.departures.forget(self._socket)
            self._transport.resume_reading()

    def answered(self, exchange: Exchange) -> None:
        """The response has been written: what waits is next, or nothing."""
        self.busy = None
        if not (exchange.keep and exchange.complete) or self.server.closing:
            self._end()
            return
        self._fresh = False
        self.since = self.server.now()
        if self._waiting:
            self._begin(*self._waiting.popleft())
        elif self._refusal is not None:
            self._say(*self._refusal)
            return
        self.unhold()

    def _begin(self, exchange: Exchange, scope: Scope) -> None:
        self.busy = exchange
        exchange.task = self.server.loop.create_task(self._run(exchange, scope))

    async def _run(self, exchange: Exchange, scope: Scope) -> None:
        try:
            await self.server.app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self.server.report(error)
        finally:
            exchange.task = None  # they hold each other: the garbage collector need not look for them
            if not exchange.done and not self.gone:
                # Without an answer, or cut in the middle: the client must not take what it has for the whole.
                exchange.done = True
                self.busy = None
                self._fail(exchange, 500, "internal error in the gateway")

    # The ends of a connection.

    def _refuse(self, status: int, message: str) -> None:
        """Nothing of what comes is taken any more; `message` is the last answer."""
        self._deaf = True
        broken, self._reading = self._reading, None
        if broken is None or broken is not self.busy:
            if broken is not None:
                self._waiting.pop()  # the last that came
            self._refusal = status, message
            if self.busy is None:
                self._say(status, message)
            self.unhold()
            return
        broken.done = True
        self.busy = None
        broken.cancel()
        self._fail(broken, status, message)

    def _fail(self, exchange: Exchange, status: int, message: str) -> None:
        """Answers in the application's stead where nothing was written, else cuts the answer."""
        if exchange.silent:
            self._say(status, message, exchange.head_only)
        elif exchange.delimited:
            self._end()
        else:
            # The end of the connection would be the end of the body: only a reset tells that it is not.
            self._transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, _RESET)
            self._transport.abort()

    def _say(self, status: int, message: str, head_only: bool = False, close: bool = False) -> None:
        body = msgspec.json.encode({"error": message})
        head = b"%bcontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n"
        head += b"retry-after: 1\r\n\r\n" if status == 503 else b"\r\n"
        self._deaf = True  # where it lives on is not worth telling
        self._transport.write(head % (STATUS[status], len(body)) + (b"" if head_only else body))
        if close:
            self._transport.close()
        else:
            self._end()

    def _end(self) -> None:
        """Closes the connection after what was written; lingers where the client may still be sending."""
        self._waiting.clear()
        self._refusal = None
        if not self._deaf and self._reading is None:
            self._transport.close()
            return
        self._deaf = True
        self._reading = None
        self.since = self.server.now()
        self.unhold()
        if not self._transport.is_closing():
            self._transport.write_eof()

    def _leave(self) -> None:
        """The client is gone, or has nothing more to say."""
        self.gone = True
        self._waiting.clear()
        self.resume_writing()
        busy, self.busy, self._reading = self.busy, None, None
        if busy is not None:
            busy.wake()
            busy.cancel()

    def _departed(self) -> None:
        """The client is gone, and what it sent before was not even read."""
        self._leave()
        self._transport.abort()

    # The server's side.

    def sweep(self, now: float) -> None:
        """Ends the connection where it has idled, or its head has come, or its client has read nothing for too long."""
        unsent, server = self._transport.get_write_buffer_size(), self.server
        if not unsent or unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        elif now - self._unsent_since > server.stall_seconds:
            self._transport.abort()
        if unsent:
            self.since = now  # it does not idle yet
            return
        if self.busy is not None or self._transport.is_closing():
            return
        idle = now - self.since
        for_head = min(server.head_seconds, server.patience)
        if self._deaf:
            if idle > for_head:
                self._transport.abort()
        elif self._in_head:
            if idle > for_head:
                self._refuse(408, f"request head: expected all of it within {for_head:g} s")
        elif idle > (for_head if self._fresh else min(server.keep_alive_seconds, server.patience)):
            self._transport.close()

    def shut(self) -> None:
        """Closes the connection when its exchange is over."""
        if self.busy is None:
            self._transport.close()
        else:
            self.busy.keep = False

    def abort(self) -> asyncio.Task[None] | None:
        """Cuts the connection; the task that this cancels, if any."""
        self._transport.abort()
        return self.busy.task if self.busy is not None else None

"""Our HTTP/1.1 server: how what is sent is split does not matter, and nothing that is sent is its end."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import httptools
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.connection import Connection
from gateway.http1 import Http1Server
from gateway.server import HttpServer, Receive, Scope, Send
from policies.spec import Address
from tests.support.loop import run, settle


class Transport:
    """Keeps what is written; closes as an event loop's does, on its next turn."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.written = b""
        self.closing = self.ended = self.lost = self.paused = False

    def write(self, data: bytes) -> None:
        assert not self.ended, "written after the end"
        assert data, "nothing was written"
        if not self.closing:
            self.written += data

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.lose)

    abort = close

    def lose(self) -> None:
        if not self.lost:
            self.lost = self.closing = True
            self.connection.connection_lost(None)

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, _: str) -> Any:
        return self

    def setsockopt(self, *_: Any) -> None:
        pass

    def fileno(self) -> int:
        return -1


class Unseen:
    """Departures of clients that have no socket."""

    def watch(self, *_: Any) -> None:
        pass

    def forget(self, *_: Any) -> None:
        pass


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Method, target and body; streamed where the path says so."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    body = b"%b %b?%b=" % (scope["method"].encode(), scope["raw_path"], scope["query_string"]) + body
    stream = scope["path"] == "/stream"
    headers = [] if stream else [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if stream:
        for i in range(0, len(body), 7):
            await send({"type": "http.response.body", "body": body[i : i + 7], "more_body": True})
            await asyncio.sleep(0)
        body = b""
    await send({"type": "http.response.body", "body": body})


async def answers(pieces: list[bytes], pauses: list[int], app: Any = echo) -> tuple[bytes, bool]:
    """What comes back, and whether the connection ended."""
    reported: list[BaseException] = []
    server = Http1Server(app, Address("", 0), 1, now=asyncio.get_running_loop().time, report=reported.append)
    server.loop, server.date = asyncio.get_running_loop(), b"date: now\r\n"
    server.departures = Unseen()  # type: ignore[assignment]
    connection = Connection(server)
    transport = Transport(connection)
    connection.connection_made(transport)  # type: ignore[arg-type]
    for i, piece in enumerate(pieces):
        while transport.paused:  # noqa: ASYNC110 - the client sees no more of it
            await asyncio.sleep(0)
        if transport.closing:
            break
        connection.data_received(piece)
        await settle(pauses[i % len(pauses)])
    for _ in range(3000):
        if connection.busy is None:
            break
        await asyncio.sleep(0)
    found = transport.written, transport.ended or transport.closing
    if not transport.closing:
        connection.eof_received()
        transport.close()
    await settle()
    assert not server.connections
    assert not reported
    return found


def split(text: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


HEADERS = st.sampled_from(
    [
        b"host: x\r\n",
        b"X-Empty:\r\n",
        b"x-long: " + b"a" * 300 + b"\r\n",
        b"Connection: keep-alive\r\n",
        b"connection: Upgrade, HTTP2-Settings\r\nUPGRADE: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
        b"upgrade: websocket\r\n",
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A request, and what is to be the answer's body."""
    method = draw(st.sampled_from([b"GET", b"POST", b"PUT", b"OPTIONS", b"DELETE"]))
    path = draw(st.sampled_from([b"/", b"/a/b", b"/stream", b"/%2F"]))
    query = draw(st.sampled_from([b"", b"q=1?2"]))
    target = draw(st.sampled_from([b"", b"http://host:1"])) + path + (b"?" + query if query else b"")
    head = method + b" " + target + b" HTTP/1.1\r\n" + b"".join(draw(st.lists(HEADERS, max_size=3, unique=True)))
    body = draw(st.one_of(st.just(b""), st.binary(max_size=60), st.just(b"GET / HTTP/1.1\r\n\r\n")))
    if draw(st.booleans()):
        chunks = split(body, draw(st.lists(st.integers(0, 60), max_size=5)))
        extension = draw(st.sampled_from([b"", b";a=b"]))
        trailers = draw(st.sampled_from([b"", b"x: y\r\nupgrade: h2c\r\n"]))
        text = b"".join(b"%x%b\r\n%b\r\n" % (len(c), extension, c) for c in chunks if c)
        text = head + b"transfer-encoding: chunked\r\n\r\n" + text + b"0\r\n" + trailers + b"\r\n"
    elif body or method == b"POST":
        text = head + b"content-length: %d\r\n\r\n" % len(body) + body
    else:
        text = head + b"\r\n"
    return draw(st.sampled_from([b"", b"\r\n"])) + text, method + b" " + path + b"?" + query + b"=" + body


class Replies:
    """What a client makes of the bytes that came back."""

    def __init__(self, text: bytes) -> None:
        self.bodies: list[bytes] = []
        httptools.HttpResponseParser(self).feed_data(text)

    def on_message_begin(self) -> None:
        self.bodies.append(b"")

    def on_body(self, data: bytes) -> None:
        self.bodies[-1] += data


@settings(max_examples=50, deadline=None)
@given(
    st.lists(requests(), min_size=1, max_size=20),
    st.lists(st.integers(0, 5000), max_size=40),
    st.lists(st.sampled_from([0, 0, 1, 5]), min_size=1, max_size=7),
    st.booleans(),
)
def test_any_split_gives_the_same_answers(
    asked: list[tuple[bytes, bytes]], cuts: list[int], pauses: list[int], bytewise: bool
) -> None:
    text = b"".join(text for text, _ in asked)
    pieces = [text[i : i + 1] for i in range(len(text))] if bytewise else split(text, cuts)
    found, ended = run(answers(pieces, pauses))
    assert not ended
    assert Replies(found).bodies == [body for _, body in asked]


GARBAGE = st.one_of(
    st.binary(max_size=30),
    requests().map(lambda request: request[0]),
    st.sampled_from(
        [
            b"GET ",
            b"/",
            b" HTTP/1.1\r\n",
            b"\r\n",
            b"\r\n\r\n",
            b"content-length: 5\r\n",
            b"transfer-encoding: chunked\r\n",
            b"upgrade: x\r\n",
            b"connection: upgrade\r\n",
            b"connection: close\r\n",
            b"5\r\nhello\r\n",
            b"0\r\n\r\n",
            b"CONNECT a:1 HTTP/1.1\r\n\r\n",
            b"x" * 70_000,
            b"GET / HTTP/1.0\r\n\r\n",
            b"\0",
            b"PRI * HTTP/2.0\r\n\r\n",
        ]
    ),
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(GARBAGE, max_size=12).map(b"".join),
    st.lists(st.integers(0, 2000), max_size=20),
    st.lists(st.sampled_from([0, 0, 1, 5]), min_size=1, max_size=7),
)
def test_no_garbage_is_more_than_the_end_of_its_connection(text: bytes, cuts: list[int], pauses: list[int]) -> None:
    """Nothing is raised, no task is left (see `run`), and what comes back is HTTP."""
    found, _ = run(answers(split(text, cuts), pauses))
    at_once, _ = run(answers([text], [0])) if text else (b"", False)
    for reply in (found, at_once):
        if reply:
            Replies(reply)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(requests(), min_size=1, max_size=20),
    st.lists(st.integers(0, 5000), max_size=10),
    st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=7),
    st.integers(0, 10),
)
def test_a_client_may_leave_at_any_moment(
    asked: list[tuple[bytes, bytes]], cuts: list[int], pauses: list[int], leaves: int
) -> None:
    async def main() -> None:
        running = 0

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal running
            running += 1
            try:
                await echo(scope, receive, send)
                await asyncio.sleep(0)
            finally:
                running -= 1

        server = Http1Server(app, Address("", 0), 1, now=asyncio.get_running_loop().time, report=_raise)
        server.loop, server.date = asyncio.get_running_loop(), b"date: now\r\n"
        server.departures = Unseen()  # type: ignore[assignment]
        connection = Connection(server)
        transport = Transport(connection)
        connection.connection_made(transport)  # type: ignore[arg-type]
        for i, piece in enumerate(split(b"".join(text for text, _ in asked), cuts)[:leaves]):
            if transport.paused or transport.closing:
                break
            connection.data_received(piece)
            await settle(pauses[i % len(pauses)])
        transport.lose()
        await settle(3)
        assert running == 0
        assert not server.connections

    run(main())


def _raise(error: BaseException) -> None:
    raise error


WELL_FORMED = [
    b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /a/b?q=1&r=%20 HTTP/1.1\r\nhost: x\r\nx: y\r\n\r\n",
    b"GET http://h/a?b HTTP/1.1\r\nhost: h\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"HEAD /stream HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n3;a=b\r\nhey\r\n0\r\nx: y\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: Chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + b"a" * 100_000,
    b"POST / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nUpgrade: h2c\r\ncontent-length: 2\r\n\r\nhi",
    b"DELETE /a HTTP/1.1\r\nhost: x\r\n\r\n",
    b"\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n" * 5,
    b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 50_000 + b"\r\n\r\n",
]


class Framing(Replies):
    """Status, framing headers and bodies; whether the connection was kept."""

    def __init__(self, text: bytes, head_only: bool) -> None:
        self.heads: list[Any] = []
        self.parser = httptools.HttpResponseParser(self)
        self.bodies = []
        if head_only:
            head, _, self.rest = text.partition(b"\r\n\r\n")
            # The parser would wait for a body.
            text = head.replace(b"transfer-encoding: chunked", b"was: chunked").replace(
                b"content-length", b"was-length"
            )
            text += b"\r\ncontent-length: 0\r\n\r\n"
        self.parser.feed_data(text)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding", b"connection", b"was", b"was-length"):
            self.heads.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.heads.append((self.parser.get_status_code(), self.parser.should_keep_alive()))


def test_well_formed_requests_are_answered_as_uvicorn_does() -> None:
    async def asked(port: int, text: bytes) -> tuple[bytes, bool]:
        """What comes back until the server closes, or says nothing more; whether it closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(text)
        found = b""
        try:
            while data := await asyncio.wait_for(reader.read(1_000_000), 0.05):
                found += data
            return found, True
        except TimeoutError:
            return found, False
        finally:
            writer.close()

    async def all_of(server: Any) -> list[Any]:
        await server.start()
        try:
            replies = await asyncio.gather(*(asked(server.port, text) for text in WELL_FORMED))
        finally:
            await server.close()
        found = []
        for text, (reply, closed) in zip(WELL_FORMED, replies, strict=True):
            framing = Framing(reply, text.startswith(b"HEAD"))
            found.append((text[:60], framing.bodies, sorted(framing.heads, key=str), closed))
        return found

    async def both() -> None:
        address = Address("127.0.0.1", 0)
        ours = await all_of(Http1Server(echo, address, 1, now=time.monotonic, report=_raise))
        theirs = await all_of(HttpServer(echo, address, 1))
        for own, other in zip(ours, theirs, strict=True):
            assert own == other

    asyncio.run(both())

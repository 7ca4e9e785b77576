"""Our HTTP/1.1 server under attack: framing, order, clients that leave, memory, and its end. Over real sockets."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvloop

from gateway.connection import MAX_HEAD_BYTES
from gateway.http1 import Http1Server
from gateway.server import WHOLE, Receive, Scope, Send
from policies.spec import Address

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
REFUSED = b'{"error":"expected an HTTP/1.1 request, got something else"}'


class Rig:
    """A server, what it reported, and the clients that the test opened."""

    def __init__(self, server: Http1Server, reported: list[BaseException]) -> None:
        self.server = server
        self.reported = reported
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host = self.server._address.host  # type: ignore[union-attr]
        reader, writer = await asyncio.open_connection(host, self.server.port)
        self._writers.append(writer)
        return reader, writer

    async def ask(self, *parts: bytes, pause: float = 0.0) -> bytes:
        """All that comes back until the server closes."""
        reader, writer = await self.open()
        for part in parts:
            writer.write(part)
            if len(parts) > 1:
                await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 5)

    async def raw(self) -> socket.socket:
        """A socket that reads and sends nothing by itself."""
        client = socket.socket()
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.server.port))
        return client

    def sweep(self) -> None:
        for connection in list(self.server.connections):
            connection.sweep(time.monotonic())

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def serving(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Runs `client(rig)` against `app`, on either event loop; nothing may be left when both are over."""

    def served(app: Any, client: Callable[[Rig], Awaitable[Any]], host: str = "127.0.0.1", **limits: Any) -> Any:
        async def run() -> Any:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
            drain = limits.pop("drain_seconds", 1)
            server = Http1Server(
                app, Address(host, 0), drain, now=time.monotonic, report=reported.append, **limits
            )  # fmt: skip
            await server.start()
            rig = Rig(server, reported)
            try:
                return await client(rig)
            finally:
                rig.close()
                await asyncio.wait_for(server.close(), drain + 3)
                assert not server.connections
                left = asyncio.all_tasks() - {asyncio.current_task()}
                assert not left, left

        told: list[dict[str, Any]] = []
        reported: list[BaseException] = []
        with asyncio.Runner(loop_factory=request.param) as runner:
            result = runner.run(run())
        assert not told, told
        return result

    return served


async def answer(send: Send, body: bytes, *headers: tuple[bytes, bytes], status: int = 200) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        body += message["body"]
        more = message["more_body"]
    return body


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """The path, and the body once it has been read."""
    body = await read(receive)
    await answer(send, scope["raw_path"] + b"=" + body)


async def ignoring(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without reading the body."""
    await answer(send, b"no", status=413)


def bodies(reply: bytes) -> list[bytes]:
    """The bodies of responses that say their length."""
    found = []
    while reply:
        head, _, reply = reply.partition(b"\r\n\r\n")
        if b" 100 Continue" in head:
            continue
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        found.append(reply[:length])
        reply = reply[length:]
    return found


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


async def until(true: Callable[[], Any], seconds: float = 1.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not become true in time"
        await asyncio.sleep(0.002)


# Framing of requests.


@pytest.mark.parametrize(
    "rest",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello",
        b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"content-length: 5, 5\r\n\r\nhello",
        b"content-length: +5\r\n\r\nhello",
        b"content-length: -5\r\n\r\nhello",
        b"content-length:\r\n\r\nhello",
        b"content-length : 5\r\n\r\nhello",
        b"content-length: 99999999999999999999999\r\n\r\n",
        b"transfer-encoding: identity\r\n\r\n",
        b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        b'transfer-encoding: "chunked"\r\n\r\n0\r\n\r\n',
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
        b"x: a\r\n b\r\n\r\n",
        b"x: a\n\r\n",
        b"x: a\rb\r\n\r\n",
        b"x: a\0b\r\n\r\n",
        b"x y: a\r\n\r\n",
        b" x: a\r\n\r\n",
        b": a\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n5;a\nb\r\nhello\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n5 \r\nhello\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n5\r\nhello0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello",
        b"transfer-encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n\r\n",
    ],
)
def test_a_message_that_could_be_read_in_two_ways_is_refused(serving: Any, rest: bytes) -> None:
    async def client(rig: Rig) -> bytes:
        return await rig.ask(HEAD + rest + b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n")

    reply = serving(echo, client)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert bodies(reply) == [REFUSED]


@pytest.mark.parametrize("target", [b"CONNECT a:1", b"CONNECT /x", b"PRI *", b"GET a", b"GET /\xff", b"GET /\0"])
def test_a_target_that_is_none_is_refused_and_asks_nothing(serving: Any, target: bytes) -> None:
    asked = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["raw_path"])
        await answer(send, b"")

    async def client(rig: Rig) -> bytes:
        return await rig.ask(target + b" HTTP/1.1\r\nhost: x\r\n\r\n")

    assert bodies(serving(app, client)) == [REFUSED]
    assert asked == []


def test_absolute_and_asterisk_targets(serving: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, scope["raw_path"] + b" " + scope["query_string"])

    async def client(rig: Rig) -> list[bytes]:
        targets = [b"OPTIONS *", b"GET http://h/a/b?c", b"GET http://h", b"GET http://h?c", b"GET //h/a", b"GET /a?b?c"]
        last = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        return bodies(await rig.ask(b"".join(t + b" HTTP/1.1\r\nhost: x\r\n\r\n" for t in targets) + last))

    assert serving(app, client) == [b"* ", b"/a/b c", b"/ ", b"/ c", b"//h/a ", b"/a b?c", b"/last "]


UPGRADE = HEAD + b"connection: Upgrade, HTTP2-Settings\r\nUPGRADE: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("size", [1, 3, 7, 100, 100_000])
def test_an_upgrade_is_ignored_however_it_is_written_and_split(serving: Any, size: int) -> None:
    upgrade = UPGRADE + b"content-length: 5\r\n\r\nhello"
    text = upgrade + upgrade.replace(b"UPGRADE", b"Upgrade") + upgrade.replace(b"UPGRADE", b"upgrade")
    text += UPGRADE + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nupgrade: x\r\n\r\n"
    text += b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: h2c\r\n\r\n"

    async def client(rig: Rig) -> bytes:
        reader, writer = await rig.open()
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(text), size):
            writer.write(text[at : at + size])
            await asyncio.sleep(0)
        return await asyncio.wait_for(reader.read(), 5)

    assert bodies(serving(echo, client)) == [b"/=hello", b"/=hello", b"/=hello", b"/=hi", b"/last="]


def test_headers_come_without_the_white_space_around_them(serving: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, dict(scope["headers"])[b"content-length"] + b"|" + await read(receive))

    async def client(rig: Rig) -> bytes:
        return await rig.ask(HEAD + b"content-length:\t5 \t\r\nconnection: close\r\n\r\nhello")

    assert bodies(serving(app, client)) == [b"5|hello"]


def test_heads_that_come_in_the_same_piece_are_counted_each_for_itself(serving: Any) -> None:
    big = b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 40_000 + b"\r\n\r\n"

    async def client(rig: Rig) -> list[bytes]:
        last = big.replace(b"host: x", b"connection: close")
        return bodies(await rig.ask(big[:-1], big[-1:] + big[:-1], big[-1:] + last, pause=0.05))

    assert serving(echo, client) == [b"/="] * 3


def test_trailers_and_chunk_extensions_are_bounded(serving: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await echo(scope, receive, send)

    async def client(rig: Rig) -> None:
        for start in (CHUNKED + b"2\r\nhi\r\n0\r\nx: ", CHUNKED + b"2;x="):
            reader, writer = await rig.open()
            writer.write(start)
            with suppress(ConnectionError):
                for _ in range(20):
                    writer.write(b"a" * MAX_HEAD_BYTES)
                    await writer.drain()
            reply = await asyncio.wait_for(reader.read(), 5)
            assert reply.startswith(b"HTTP/1.1 431 "), reply[:200]

    serving(app, client)


def test_empty_lines_before_a_request_are_bounded(serving: Any) -> None:
    async def client(rig: Rig) -> None:
        assert (await rig.ask(b"\r\n\r\n" + HEAD + b"connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        reader, writer = await rig.open()
        with suppress(ConnectionError):
            for _ in range(20):
                writer.write(b"\r\n" * 32_000)
                await writer.drain()
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 431 ")

    serving(echo, client)


# Order.


def test_what_came_before_garbage_is_answered_first(serving: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.02)
        await echo(scope, receive, send)

    async def client(rig: Rig) -> list[bytes]:
        gets = b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\nGET /2 HTTP/1.1\r\nhost: x\r\n\r\n"
        return bodies(await rig.ask(gets + b"\x16\x03\x01 hello\r\n\r\n"))

    assert serving(app, client) == [b"/1=", b"/2=", REFUSED]


def test_what_comes_after_the_last_request_is_dropped(serving: Any) -> None:
    async def client(rig: Rig) -> list[bytes]:
        last = b"GET /1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        old = b"GET /1 HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"
        more = b"GET /2 HTTP/1.1\r\nhost: x\r\n\r\n"
        return bodies(await rig.ask(last + more)) + bodies(await rig.ask(old + more))

    assert serving(echo, client) == [b"/1=", b"/1="]


@pytest.mark.parametrize("count", [15, 16, 17, 200])
def test_pipelined_requests_are_answered_in_order(serving: Any, count: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/0":
            await asyncio.sleep(0.02)
        await echo(scope, receive, send)

    async def client(rig: Rig) -> list[bytes]:
        posts = [b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi" % i for i in range(count)]
        return bodies(await rig.ask(b"".join(posts) + b"GET /last HTTP/1.0\r\n\r\n"))

    assert serving(app, client) == [b"/%d=hi" % i for i in range(count)] + [b"/last="]


def test_one_read_of_pipelined_requests_is_bounded(serving: Any) -> None:
    async def client(rig: Rig) -> list[bytes]:
        return bodies(await rig.ask(b"GET / HTTP/1.1\r\n\r\n" * 3000))

    answers = serving(echo, client)
    assert answers[:-1] == [b"/="] * (len(answers) - 1)
    assert 250 < len(answers) < 3000
    assert b"pipelin" in answers[-1]


def test_what_follows_a_body_that_was_refused_is_not_asked(serving: Any) -> None:
    asked = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])
        await answer(send, b"no", status=413)

    async def client(rig: Rig) -> bytes:
        reader, writer = await rig.open()
        writer.write(HEAD + b"content-length: 5\r\n\r\nhe")
        await reader.readuntil(b"no")
        writer.write(b"llo" + b"GET /2 HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
        return await asyncio.wait_for(reader.read(), 5)

    assert serving(app, client) == b""
    assert asked == ["/"]


# Framing of responses.


def test_http10_is_answered_without_chunks_and_ended(serving: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"hi", "more_body": True})
        await send({"type": "http.response.body"})

    async def client(rig: Rig) -> tuple[bytes, bytes]:
        old = await rig.ask(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        return old, await rig.ask(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")

    old, new = serving(app, client)
    assert b"chunked" not in old
    assert old.endswith(b"connection: close\r\n\r\nhihihi")
    assert b"transfer-encoding: chunked\r\n\r\n" in new
    assert new.endswith(b"2\r\nhi\r\n" * 3 + b"0\r\n\r\n")


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"GET", 204), (b"GET", 304), (b"HEAD", 404)])
@pytest.mark.parametrize("length", [True, False])
def test_responses_without_a_body(serving: Any, method: bytes, status: int, length: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"4")] if length else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"hi", "more_body": True})
        await send({"type": "http.response.body", "body": b"ho"})

    async def client(rig: Rig) -> bytes:
        text = b"%b / HTTP/1.1\r\nhost: x\r\n%%b\r\n" % method
        return await rig.ask(text % b"" + text % b"connection: close\r\n")

    reply = serving(app, client)
    first, second, rest = reply.split(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 %d " % status)
    assert second.startswith(b"HTTP/1.1 %d " % status)
    assert rest == b""
    assert b"transfer-encoding" not in reply
    assert (b"content-length: 4" in first) == (length and status != 204)


@pytest.mark.parametrize(
    "header", [(b"x", b"a\r\nset-cookie: b"), (b"x", b"a\nb"), (b"x", b"a\rb"), (b"x\r\ny", b"a"), (b"x", b"a\0")]
)
def test_a_response_header_cannot_end_its_line(serving: Any, header: tuple[bytes, bytes]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"hi", header)

    async def client(rig: Rig) -> bytes:
        reply = await rig.ask(HEAD + b"\r\n")
        assert [type(error) for error in rig.reported] == [RuntimeError]
        return reply

    reply = serving(app, client)
    assert reply.startswith(b"HTTP/1.1 500 ")
    assert bodies(reply) == [b'{"error":"internal error in the gateway"}']


async def _raises(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("before the start")


async def _raises_after_start(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": [(b"content-length", b"2")]})
    raise ValueError("before any byte")


async def _returns(scope: Scope, receive: Receive, send: Send) -> None:
    return


async def _says_nothing_after_start(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})


async def _too_little(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"h"})


async def _too_much(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def _no_start(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.body", "body": b""})


async def _bad_length(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"-1")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(
    "app",
    [_raises, _raises_after_start, _returns, _says_nothing_after_start, _too_little, _too_much, _no_start, _bad_length],
)
def test_an_application_that_fails_before_its_first_byte_is_500(serving: Any, app: Any) -> None:
    async def client(rig: Rig) -> tuple[bytes, bytes]:
        head = b"HEAD / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        return await rig.ask(HEAD + b"\r\n"), await rig.ask(head)

    post, head = serving(app, client)
    assert post.startswith(b"HTTP/1.1 500 ")
    assert bodies(post) == [b'{"error":"internal error in the gateway"}']
    assert head.startswith(b"HTTP/1.1 ")
    assert head.partition(b"\r\n\r\n")[2] == b""


def test_a_second_answer_in_the_middle_of_one_is_an_error(serving: Any) -> None:
    """An application that catches what `send` raises, and answers 500, must not write that into the body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"12345678", "more_body": True})
        try:
            await send({"type": "http.response.body", "body": b"9abcd", "more_body": True})
        except RuntimeError:
            await answer(send, b"oops", status=500)

    async def client(rig: Rig) -> bytes:
        return await rig.ask(HEAD + b"\r\n")

    assert serving(app, client).endswith(b"\r\n\r\n12345678")


def test_a_stream_that_breaks_can_be_told_from_its_end(serving: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hi", "more_body": True})
        await asyncio.sleep(0.01)
        raise ValueError

    async def client(rig: Rig) -> None:
        assert (await rig.ask(HEAD + b"\r\n")).endswith(b"2\r\nhi\r\n")
        reader, writer = await rig.open()
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)

    serving(app, client)


# Bodies.


@pytest.mark.parametrize("size", [0, 31 << 10, 32 << 10, 33 << 10, 1 << 20])
@pytest.mark.parametrize("pieces", [1, 5])
def test_bodies_of_all_sizes(serving: Any, size: int, pieces: int) -> None:
    body = bytes(range(256)) * (size // 256)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        whole = scope[WHOLE]()
        await answer(send, whole if whole is not None else await read(receive))

    async def client(rig: Rig) -> None:
        text = HEAD + b"content-length: %d\r\nconnection: close\r\n\r\n" % size + body
        step = len(text) // pieces + 1
        assert bodies(await rig.ask(*(text[i : i + step] for i in range(0, len(text), step)))) == [body]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for i in range(0, size, 1000) if (c := body[i : i + 1000]))
        assert bodies(await rig.ask(CHUNKED.replace(b"host: x", b"connection: close") + chunks + b"0\r\n\r\n")) == [
            body
        ]

    serving(app, client)


def test_an_unread_body_of_small_chunks_takes_little_more_than_its_bytes(serving: Any) -> None:
    held = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal held
        await asyncio.sleep(0.2)
        exchange = scope[WHOLE].__self__
        held = sum(map(len, exchange._parts)) + 56 * len(exchange._parts)
        await answer(send, b"%d" % len(await read(receive)))

    async def client(rig: Rig) -> list[bytes]:
        _, writer = opened = await rig.open()
        writer.write(CHUNKED.replace(b"host: x", b"connection: close"))
        for _ in range(20):
            writer.write(b"2\r\nhi\r\n" * 20_000)
        writer.write(b"0\r\n\r\n")
        return bodies(await asyncio.wait_for(opened[0].read(), 10))

    assert serving(app, client) == [b"800000"]
    assert held < 512 * 1024


def test_the_whole_body_is_held_once(serving: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.05)
        whole = scope[WHOLE]()
        assert whole is not None
        assert scope[WHOLE]() is None
        kept = sum(map(len, scope[WHOLE].__self__._parts))
        await answer(send, b"%d %d" % (len(whole), kept))

    async def client(rig: Rig) -> list[bytes]:
        text = HEAD + b"content-length: 2000\r\nconnection: close\r\n\r\n"
        return bodies(await rig.ask(text, b"a" * 1000, b"b" * 1000, pause=0.01))

    assert serving(app, client) == [b"2000 0"]


@pytest.mark.parametrize("http", [b"1.0", b"1.1"])
def test_expect_100_continue(serving: Any, http: bytes) -> None:
    head = (
        b"POST / HTTP/%b\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\nexpect: 100-Continue \r\n\r\n" % http
    )

    async def client(rig: Rig) -> tuple[bytes, bytes]:
        at_once = await rig.ask(head + b"hi")
        late = await rig.ask(head, b"hi", pause=0.05)
        return at_once, late

    at_once, late = serving(echo, client)
    assert at_once.startswith(b"HTTP/1.1 200 ")
    assert bodies(at_once) == bodies(late) == [b"/=hi"]
    assert late.startswith(b"HTTP/1.1 100 Continue\r\n\r\n" if http == b"1.1" else b"HTTP/1.1 200 ")


def test_a_refusal_without_100_continue_ends_the_connection_at_once(serving: Any) -> None:
    async def client(rig: Rig) -> bytes:
        return await rig.ask(HEAD + b"content-length: 100000\r\nexpect: 100-continue\r\n\r\n")

    reply = serving(ignoring, client)
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close\r\n" in reply


@pytest.mark.parametrize("app", [ignoring, _raises], ids=["413", "500"])
@pytest.mark.parametrize("chunked", [True, False])
def test_who_still_sends_can_read_the_answer(serving: Any, app: Any, chunked: bool) -> None:
    async def client(rig: Rig) -> bytes:
        reader, writer = await rig.open()
        chunk = b"a" * 1_000_000
        writer.write(CHUNKED if chunked else HEAD + b"content-length: 20000000\r\n\r\n")
        for _ in range(20):
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunked else chunk)
            await writer.drain()  # raises where the connection was reset
        return await asyncio.wait_for(reader.read(), 5)

    assert serving(app, client)[:12] in (b"HTTP/1.1 413", b"HTTP/1.1 500")


def test_who_sends_garbage_on_and_on_can_read_the_answer(serving: Any) -> None:
    async def client(rig: Rig) -> bytes:
        reader, writer = await rig.open()
        for _ in range(20):
            writer.write(b"\x16\x03\x01" * 100_000)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 5)

    assert bodies(serving(echo, client)) == [REFUSED]


def test_a_sender_that_goes_on_for_ever_is_cut_off(serving: Any) -> None:
    async def client(rig: Rig) -> None:
        _, writer = await rig.open()
        writer.write(CHUNKED)

        async def send() -> None:
            for _ in range(100):
                writer.write(b"%x\r\n" % 1_000_000 + b"a" * 1_000_000 + b"\r\n")
                await writer.drain()

        with pytest.raises(ConnectionError):
            await send()

    serving(ignoring, client)


# Clients that leave.


class Waiting:
    """An application that waits in one way or another; counts how its tasks end."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.started = self.cancelled = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started += 1
        try:
            if self.how == "body":
                await read(receive)
                await asyncio.sleep(0)
            elif self.how in ("stream", "slow reader"):
                await send({"type": "http.response.start", "status": 200, "headers": []})
                size = 10 if self.how == "stream" else 100_000
                while True:
                    await send({"type": "http.response.body", "body": b"a" * size, "more_body": True})
                    await asyncio.sleep(0.005)
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.mark.parametrize("how", ["body", "backend", "stream", "slow reader"])
@pytest.mark.parametrize("leave", ["fin", "rst", "half"])
def test_who_leaves_has_its_task_cancelled(serving: Any, how: str, leave: str) -> None:
    app = Waiting(how)

    async def client(rig: Rig) -> None:
        one = await rig.raw()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(one, HEAD + (b"content-length: 5\r\n\r\nhe" if how == "body" else b"\r\n"))
        await until(lambda: app.started)
        if how == "slow reader":
            await until(lambda: next(iter(rig.server.connections)).paused, 3)
        else:
            await asyncio.sleep(0.02)
        if leave == "rst":
            reset(one)
        elif leave == "fin":
            one.close()
        else:
            one.shutdown(socket.SHUT_WR)
        left = time.monotonic()
        await until(lambda: app.cancelled == 1)
        assert time.monotonic() - left < 0.1
        one.close()
        await until(lambda: not rig.server.connections)

    serving(app, client, stall_seconds=0.1)


OURS = frozenset({"Connection", "Exchange", "HttpRequestParser", "Task"})


def storm(port: int, text: bytes, times: int) -> None:
    for _ in range(times):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(text)
        reset(client)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        HEAD,
        HEAD + b"\r\n",
        HEAD + b"content-length: 5\r\n\r\nhe",
        (HEAD + b"\r\n") * 5,
        UPGRADE + b"\r\n",
        HEAD + b"x y\r\n\r\n",
        HEAD + b"\r\n" + b"\x16",
        HEAD + b"transfer-encoding: identity\r\n\r\n",
    ],
)
def test_resets_leave_nothing_behind(serving: Any, text: bytes) -> None:
    app = Waiting("backend")
    found: Counter[str] = Counter()

    async def client(rig: Rig) -> None:
        await asyncio.to_thread(storm, rig.server.port, text, 20)
        await until(lambda: not rig.server.connections)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        await asyncio.to_thread(storm, rig.server.port, text, 50)
        await until(lambda: not rig.server.connections)
        await asyncio.sleep(0.01)
        gc.collect()
        found.update(type(thing).__name__ for thing in gc.garbage)

    try:
        serving(app, client)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not OURS & found.keys(), found


def test_a_storm_of_resets_takes_no_memory(serving: Any) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    async def client(rig: Rig) -> int:
        texts = (HEAD + b"content-length: 50\r\n\r\nhe", (HEAD + b"\r\n") * 10, HEAD, HEAD + b"\r\n")
        sizes = []
        for times in (250, 500):
            for text in texts:
                await asyncio.to_thread(storm, rig.server.port, text, times)
            await until(lambda: not rig.server.connections)
            gc.collect()
            sizes.append(resident())
        return sizes[1] - sizes[0]

    assert serving(Waiting("backend"), client) < 8 << 20


def test_answered_requests_leave_no_cycles(serving: Any) -> None:
    found: Counter[str] = Counter()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/raises":
            raise ValueError
        await echo(scope, receive, send)

    async def client(rig: Rig) -> None:
        text = HEAD + b"content-length: 2\r\n\r\nhi" + HEAD + b"connection: close\r\n\r\n" + HEAD
        for round_ in range(2):
            if round_:
                gc.collect()
                gc.set_debug(gc.DEBUG_SAVEALL)
            for _ in range(10):
                await rig.ask(text)
                await rig.ask(text.replace(b"/", b"/raises", 1))
                await rig.ask(UPGRADE + b"connection: close\r\n\r\n")
            rig.close()
            rig.reported.clear()
            await until(lambda: not rig.server.connections)
            await asyncio.sleep(0.01)
        gc.collect()
        found.update(type(thing).__name__ for thing in gc.garbage)

    try:
        serving(app, client)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not OURS & found.keys(), found


def test_a_cancelled_send_does_not_poison_the_next(serving: Any) -> None:
    outcome = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"40000000")]})
        await send({"type": "http.response.body", "body": b"a" * 20_000_000, "more_body": True})
        last = {"type": "http.response.body", "body": b"a" * 20_000_000}
        try:
            async with asyncio.timeout(0.02):
                await send(last)
        except TimeoutError:
            outcome.append("late")
        await send(last)
        outcome.append("sent")

    async def client(rig: Rig) -> int:
        reader, writer = await rig.open()
        writer.write(HEAD + b"connection: close\r\n\r\n")
        await until(lambda: outcome)
        return len(await asyncio.wait_for(reader.read(), 5))

    assert serving(app, client) > 40_000_000
    assert outcome == ["late", "sent"]


def test_who_waits_for_a_client_to_leave_is_woken_by_the_answer(serving: Any) -> None:
    heard = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read(receive)

        async def listen() -> None:
            heard.append((await receive())["type"])

        listener = asyncio.create_task(listen())
        await asyncio.sleep(0)
        await answer(send, b"hi")
        await listener

    async def client(rig: Rig) -> None:
        reader, writer = await rig.open()
        writer.write(HEAD + b"\r\n")
        await reader.readuntil(b"hi")
        await until(lambda: heard == ["http.disconnect"])

    serving(app, client)


# Time.


def test_who_reads_nothing_is_cut_off(serving: Any) -> None:
    """Its answer would be held for as long as it likes."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"a" * 20_000_000)

    async def client(rig: Rig) -> None:
        one = await rig.raw()
        await asyncio.get_running_loop().sock_sendall(one, HEAD + b"connection: close\r\n\r\n")
        await until(lambda: any(c._transport.is_closing() for c in rig.server.connections))
        await until(lambda: rig.sweep() or not rig.server.connections, 5)
        one.close()

    serving(app, client, stall_seconds=0.1)


def test_a_slow_reader_is_waited_for_in_bounded_memory(serving: Any) -> None:
    sent = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"a" * 50_000, "more_body": True})
            sent += 50_000
        await send({"type": "http.response.body"})

    async def client(rig: Rig) -> int:
        one = await rig.raw()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(one, HEAD + b"connection: close\r\n\r\n")
        await until(lambda: any(c.paused for c in rig.server.connections))
        await asyncio.sleep(0.05)
        (connection,) = rig.server.connections
        assert connection._transport.get_write_buffer_size() < 200_000
        assert sent < 25_000_000  # what the kernel holds
        got = 0
        while data := await loop.sock_recv(one, 1_000_000):
            got += len(data)
        one.close()
        return got

    assert serving(app, client) > 50_000_000


def test_slow_heads_and_idle_connections_end(serving: Any) -> None:
    async def client(rig: Rig) -> tuple[bytes, bytes, bytes]:
        asking = asyncio.gather(
            rig.ask(HEAD, b"x", b": ", b"y", pause=0.02), rig.ask(), rig.ask(HEAD + b"\r\n", HEAD, pause=0.02)
        )
        await until(lambda: rig.sweep() or asking.done())
        return await asking

    slow, silent, second = serving(echo, client, head_seconds=0.15, keep_alive_seconds=0.15)
    assert slow.startswith(b"HTTP/1.1 408 ")
    assert silent == b""
    assert len(bodies(second)) == 2
    assert b" 408 " in second


def test_keep_alive_expires(serving: Any) -> None:
    async def client(rig: Rig) -> bytes:
        asking = asyncio.create_task(rig.ask(HEAD + b"\r\n"))
        await until(lambda: rig.sweep() or asking.done())
        return await asking

    assert bodies(serving(echo, client, keep_alive_seconds=0.05)) == [b"/="]


def test_responses_are_dated_once(serving: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        own = [(b"date", b"Thu, 01 Jan 1970 00:00:00 GMT")] if scope["path"] == "/own" else []
        await answer(send, b"", *own)

    async def client(rig: Rig) -> bytes:
        return await rig.ask(HEAD + b"\r\nGET /own HTTP/1.1\r\nconnection: close\r\n\r\n")

    first, second, _ = serving(app, client).split(b"\r\n\r\n")
    assert first.count(b"\r\ndate: ") == second.count(b"\r\ndate: ") == 1
    assert b" GMT" in first
    assert b"1970" not in first
    assert b"1970" in second


def test_ipv6(serving: Any) -> None:
    async def client(rig: Rig) -> bytes:
        return await rig.ask(HEAD + b"connection: close\r\n\r\n")

    assert bodies(serving(echo, client, host="::1")) == [b"/="]


# The end.


def test_closing_answers_what_is_in_flight_and_closes_what_idles(serving: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await asyncio.sleep(0.1)
        await echo(scope, receive, send)

    async def client(rig: Rig) -> None:
        reader, writer = await rig.open()
        writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        idle, other = await rig.open()
        other.write(HEAD + b"\r\n")
        await idle.readuntil(b"/=")
        await until(lambda: len(rig.server.connections) == 2)
        began = time.monotonic()
        closing = asyncio.create_task(rig.server.close())
        assert await asyncio.wait_for(idle.read(), 1) == b""
        reply = await asyncio.wait_for(reader.read(), 1)
        assert bodies(reply) == [b"/slow="]
        assert b"connection: close\r\n" in reply
        await closing
        assert time.monotonic() - began < 0.5

    serving(app, client)


def test_what_is_accepted_while_closing_does_not_hold_it_up(serving: Any) -> None:
    async def client(rig: Rig) -> None:
        slow = await rig.raw()
        began = time.monotonic()
        await rig.server.close()
        assert time.monotonic() - began < 0.5
        slow.close()

    serving(echo, client, drain_seconds=2)


def test_closing_ends_in_time_and_leaves_no_task(serving: Any) -> None:
    app = Waiting("backend")
    ended = []

    async def slow_to_end(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)

    async def client(rig: Rig) -> None:
        _, writer = await rig.open()
        writer.write(HEAD + b"\r\n")
        await until(lambda: app.started)
        await rig.server.close()
        assert ended == [True]

    serving(slow_to_end, client, drain_seconds=0.1)
    assert app.cancelled == 1

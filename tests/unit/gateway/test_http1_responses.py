"""Our HTTP/1.1 server: how responses and bodies are framed and bounded. Over real sockets."""

# ruff: noqa: F811 - a fixture is imported under the name that tests ask for it by

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.server import WHOLE, Receive, Scope, Send
from tests.support.http1 import (
    CHUNKED,
    HEAD,
    REFUSED,
    Rig,
    answer,
    bodies,
    echo,
    ignoring,
    read,
    serving,  # noqa: F401
)

# Framing of responses.


def test_http10_is_answered_without_chunks_and_ended(serving: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"hi", "more_body": True})
        await send({"type": "http.response.body"})

    async def client(rig: Rig) -> tuple[bytes, bytes]:
        old = await rig.ask(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")  # in vain
        return old, await rig.ask(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")

    old, new = serving(app, client)
    assert b"chunked" not in old
    assert old.endswith(b"connection: close\r\n\r\nhihihi")
    assert b"transfer-encoding: chunked\r\n\r\n" in new
    assert new.endswith(b"2\r\nhi\r\n" * 3 + b"0\r\n\r\n")


def test_http10_is_kept_alive_where_it_asks_and_can_tell_the_end(serving: Any) -> None:
    async def client(rig: Rig) -> bytes:
        get = b"GET /%b HTTP/1.0\r\n%b\r\n"
        keep = b"Connection: Keep-Alive\r\n"
        head = (get % (b"2", keep)).replace(b"GET", b"HEAD")
        post = b"POST /3 HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nhi"
        return await rig.ask(get % (b"1", keep) + head + post + get % (b"last", b"") + get % (b"never", keep))

    reply = serving(echo, client)
    assert reply.count(b"HTTP/1.1 200 OK") == 4
    assert reply.count(b"connection: keep-alive\r\n") == 3
    assert reply.endswith(b"connection: close\r\n\r\n/last=")
    assert b"/3=hi" in reply


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

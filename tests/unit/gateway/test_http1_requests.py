"""Our HTTP/1.1 server: what it takes for a request, and in which order it answers. Over real sockets."""

# ruff: noqa: F811 - a fixture is imported under the name that tests ask for it by

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any

import pytest

from gateway.server import MAX_HEAD_BYTES, Receive, Scope, Send
from tests.support.http1 import (
    CHUNKED,
    HEAD,
    REFUSED,
    UPGRADE,
    Rig,
    answer,
    bodies,
    echo,
    read,
    serving,  # noqa: F401
)

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


@pytest.mark.parametrize(
    "version", [b"", b" HTTP/0.9", b" HTTP/1.2", b" HTTP/2.0", b" HTTP/1", b" http/1.1", b" HTTP/1.1 "]
)
def test_other_versions_are_refused(serving: Any, version: bytes) -> None:
    async def client(rig: Rig) -> bytes:
        return await rig.ask(b"GET /" + version + b"\r\nhost: x\r\n\r\n")

    assert bodies(serving(echo, client)) == [REFUSED]


def test_http10_has_no_chunks(serving: Any) -> None:
    """What follows could be a body or a request, to each of two servers."""

    async def client(rig: Rig) -> bytes:
        head = b"POST / HTTP/1.0\r\nconnection: keep-alive\r\ntransfer-encoding: chunked\r\n\r\n"
        return await rig.ask(head + b"0\r\n\r\n")

    assert bodies(serving(echo, client)) == [REFUSED]


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


@pytest.mark.parametrize("pieces", [1, 30])
def test_chunks_are_bounded_in_number(serving: Any, monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    monkeypatch.setattr("gateway.connection.MAX_PIECES", 1000)

    async def client(rig: Rig) -> tuple[bytes, bytes]:
        head, end = CHUNKED.replace(b"host: x", b"connection: close"), b"0\r\n\r\n"
        good = await rig.ask(head + b"1\r\nx\r\n" * 1000 + end)
        part = b"1\r\nx\r\n" * (1020 // pieces)
        return good, await rig.ask(head, *([part] * pieces), end, pause=0.001)

    good, bad = serving(echo, client)
    assert bodies(good) == [b"/=" + b"x" * 1000]
    assert bad.startswith(b"HTTP/1.1 413 ")
    assert b"chunks" in bad


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
        old = b"GET /1 HTTP/1.0\r\n\r\n"
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

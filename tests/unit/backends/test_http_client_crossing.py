"""A server that ends a connection while a request is on its way: sent once more where that is certain to be safe."""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Any

import pytest

from backends.errors import ConnectionLost, Unreachable
from backends.http_client import HttpClient
from backends.http_connection import Connection
from backends.http_message import safe_idle
from tests.unit.backends.http_peer import CLOSE, HOLD, OK, REQUEST, RESET, Peer, transcript

BODIES: list[Any] = [b"", b"x" * 100, [b"x" * 40_000] * 50]


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a connection comes just after the client has looked for one."""
    monkeypatch.setattr(Connection, "usable", property(lambda self: not self.gone))


def end(line: Any) -> None:
    """The server's kernel ends the connection, now; its event loop and the client's have not seen it yet."""
    server = line.transport.get_extra_info("socket")
    duplicate = socket.socket(fileno=socket.dup(server.fileno()))
    duplicate.shutdown(socket.SHUT_RDWR)
    duplicate.close()


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("streaming", [False, True])
@transcript
async def test_what_never_arrived_is_sent_once_more(unseen: None, body: Any, streaming: bool) -> None:
    async with Peer([REQUEST, OK, HOLD], [REQUEST, OK, HOLD]) as peer:
        client = peer.client()
        await client.request("POST", "/", ())
        end(peer.lines[0])
        if streaming:
            stream = await client.stream("POST", "/again", (), body)
            assert b"".join([chunk async for chunk in stream]) == b"ok"
        else:
            assert (await client.request("POST", "/again", (), body)).body == b"ok"
        assert [len(line.requests) for line in peer.lines] == [1, 1]
        assert (client.in_flight, client.idle) == (0, 1)


@transcript
async def test_after_more_than_one_exchange_the_count_is_still_right(unseen: None) -> None:
    async with Peer([REQUEST, OK] * 5 + [HOLD], [REQUEST, OK, HOLD]) as peer:
        client = peer.client()
        for body in ([b"x" * 20_000] * 3, b"", b"y", memoryview(b"z" * 30_000), b"x"):
            await client.request("POST", "/", (), body)
        end(peer.lines[0])
        assert (await client.request("POST", "/", (), b"last")).body == b"ok"
        assert [len(line.requests) for line in peer.lines] == [5, 1]


@pytest.mark.parametrize("ending", [CLOSE, RESET])
@transcript
async def test_what_arrived_is_not(ending: str) -> None:
    """The server read it, and may have executed it."""
    async with Peer([REQUEST, OK, REQUEST, ending], [REQUEST, OK]) as peer:
        client = peer.client()
        await client.request("POST", "/", ())
        with pytest.raises(ConnectionLost, match="before any of the response"):
            await client.request("POST", "/", (), b"x")
        assert len(peer.lines) == 1


@transcript
async def test_what_arrived_in_part_is_not() -> None:
    async def read_some(line: Any) -> None:
        while len(line.buffer) < 1000:
            line.news.clear()
            await line.news.wait()
        line.transport.pause_reading()

    async with Peer([REQUEST, OK, read_some, CLOSE], [REQUEST, OK]) as peer:
        client = peer.client()
        await client.request("POST", "/", ())
        with pytest.raises(ConnectionLost):
            await client.request("POST", "/", (), bytes(32 << 20))
        assert len(peer.lines) == 1


@transcript
async def test_a_fresh_connection_that_ends_before_anything_arrives_was_never_used() -> None:
    """A server that is full takes connections and closes them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        client = HttpClient("127.0.0.1", server.getsockname()[1], now=asyncio.get_running_loop().time)

        async def refuse() -> None:
            accepted, _ = await asyncio.get_running_loop().sock_accept(server)
            accepted.close()

        refusing = asyncio.ensure_future(refuse())
        # Either the end is seen before the request is written, or it crosses it: neither has it executed.
        with pytest.raises((Unreachable, ConnectionLost)) as caught:
            await client.request("POST", "/", (), b"x")
        await refusing
        await client.close()
        assert isinstance(caught.value, Unreachable) or "reset" in str(caught.value).lower()


@transcript
async def test_nothing_is_sent_a_third_time(unseen: None) -> None:
    async with Peer([REQUEST, OK, HOLD], [REQUEST, CLOSE], [REQUEST, OK]) as peer:
        client = peer.client()
        await client.request("POST", "/", ())
        end(peer.lines[0])
        with pytest.raises(ConnectionLost):
            await client.request("POST", "/", (), b"x")
        assert len(peer.lines) == 2


@transcript
async def test_who_says_how_long_it_waits_is_believed() -> None:
    clock = [0.0]
    told = OK.replace(b"\r\n\r\n", b"\r\nKeep-Alive: max=9, timeout=2\r\n\r\n")
    async with Peer([REQUEST, told, REQUEST, told, HOLD], [REQUEST, OK, HOLD]) as peer:
        client = peer.client(now=lambda: clock[0], idle_expiry=4.0)
        await client.request("POST", "/", ())
        clock[0] += 1.4
        await client.request("POST", "/", ())
        assert len(peer.lines) == 1
        clock[0] += 1.6
        await client.request("POST", "/", ())
        assert len(peer.lines) == 2


def test_what_a_keep_alive_header_says() -> None:
    for header, seconds in ((b"timeout=5", 3.75), (b"Timeout=60, max=100", 45.0), (b"timeout=0", 0.0)):
        assert safe_idle(header) == seconds
    for header in (b"", b"max=5", b"timeout=", b"timeout=-1", b"timeout=99999999999", b"xtimeout=5", b"timeout=5x"):
        assert safe_idle(header) == math.inf

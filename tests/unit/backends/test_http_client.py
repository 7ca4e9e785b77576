"""The pool: who gets which connection, what is sent twice, and what never."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from backends.errors import BadRequest, ConnectionLost, Expired, Unreachable
from backends.http_client import HttpClient
from backends.http_connection import Connection
from backends.tensor import Bytes
from tests.unit.backends.http_peer import AGAIN, CLOSE, OK, PAUSE, REQUEST, RESET, Peer, echo, transcript, until

# Sending.


@transcript
async def test_the_request_on_the_wire() -> None:
    async with Peer() as peer:
        await peer.client().request("POST", "/a?b", [(b"x-id", b"7")], [b"one", b"two"])
        assert peer.lines[0].requests == [
            b"POST /a?b HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nx-id: 7\r\nContent-Length: 6\r\n\r\nonetwo" % peer.port
        ]


@transcript
async def test_large_bodies_of_several_parts() -> None:
    parts: list[Bytes] = [b"a" * 3_000_000, bytearray(b"b" * 10), memoryview(b"c" * 2_000_000), b""]
    async with Peer([REQUEST, echo, AGAIN]) as peer:
        client = peer.client()
        for _ in range(2):
            response = await client.request("POST", "/", (), parts)
            assert response.body == b"".join(parts)
        assert len(peer.lines) == 1


@transcript
async def test_nothing_is_sent_of_a_request_that_cannot_be_written() -> None:
    async with Peer() as peer:
        client = peer.client()
        for target, value in (("/\r\nX: 1", b""), ("/", b"1\r\nX: 1"), ("/", b"\0"), ("/ HTTP/1.1", b"")):
            with pytest.raises(BadRequest):
                await client.request("GET", target, [(b"a", value)])
        assert peer.lines == []
        assert client.in_flight == 0


# The pool.


@transcript
async def test_the_connection_used_last_is_used_next() -> None:
    async with Peer() as peer:
        client = peer.client()
        await asyncio.gather(*(client.request("GET", "/", ()) for _ in range(5)))
        assert (client.in_flight, client.idle, len(peer.lines)) == (0, 5, 5)
        before = [len(line.requests) for line in peer.lines]
        for _ in range(10):
            await client.request("GET", "/", ())
        used = [len(line.requests) - n for line, n in zip(peer.lines, before, strict=True)]
        assert sorted(used) == [0, 0, 0, 0, 10]


@transcript
async def test_in_a_full_pool_requests_wait_their_turn() -> None:
    order = []

    async def one(client: HttpClient, n: int) -> None:
        await client.request("POST", f"/{n}", ())
        order.append(n)

    async with Peer([REQUEST, PAUSE, OK, AGAIN]) as peer:
        client = peer.client(max_connections=1)
        await asyncio.gather(*(one(client, n) for n in range(10)))
        assert order == list(range(10))
        assert len(peer.lines) == 1
        assert (client.in_flight, client.idle) == (0, 1)


@transcript
async def test_a_slot_that_comes_free_by_a_failure_is_given_on() -> None:
    async with Peer([REQUEST, CLOSE]) as peer:
        client = peer.client(max_connections=2)
        results = await asyncio.gather(*(client.request("POST", "/", ()) for _ in range(9)), return_exceptions=True)
        assert [type(result) for result in results] == [ConnectionLost] * 9
        assert len(peer.lines) == 9
        assert client.in_flight == 0


@transcript
async def test_idle_connections_expire() -> None:
    async with Peer() as peer:
        client = peer.client(idle_expiry=0.03)
        await asyncio.gather(*(client.request("GET", "/", ()) for _ in range(3)))
        assert client.idle == 3
        await until(lambda: client.idle == 0)
        await asyncio.gather(*(line.lost.wait() for line in peer.lines))
        assert len(peer.lines) == 3


@transcript
async def test_an_expired_connection_is_not_used_even_when_the_sweep_is_late() -> None:
    clock = [100.0]
    async with Peer() as peer:
        client = peer.client(now=lambda: clock[0], idle_expiry=4.0)
        await client.request("GET", "/", ())
        clock[0] = 103.9
        await client.request("GET", "/", ())
        assert len(peer.lines) == 1
        clock[0] = 108.0
        await client.request("GET", "/", ())
        assert len(peer.lines) == 2


@pytest.mark.parametrize("end", [CLOSE, RESET])
@transcript
async def test_a_peer_that_ends_an_idle_connection(end: str) -> None:
    async with Peer([REQUEST, OK, PAUSE, end], [REQUEST, OK]) as peer:
        client = peer.client()
        await client.request("GET", "/", ())
        await until(lambda: client.idle == 0)
        assert (await client.request("POST", "/", ())).body == b"ok"
        assert len(peer.lines) == 2


# Retry.


@transcript
async def test_an_end_that_waits_in_the_socket_is_seen_before_anything_is_written() -> None:
    """The loop has no turn between the peer's close and the request: only a look at the socket can tell."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    loop = asyncio.get_running_loop()
    client = HttpClient("127.0.0.1", listener.getsockname()[1], now=time.monotonic)
    requests = []
    for _ in range(3):
        task = asyncio.ensure_future(client.request("POST", "/", ()))
        server, _ = await loop.sock_accept(listener)
        requests.append(await loop.sock_recv(server, 1000))
        await loop.sock_sendall(server, OK)
        assert (await task).body == b"ok"
        assert client.idle == 1
        server.close()
    assert len(requests) == 3
    await client.close()
    listener.close()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("end", [CLOSE, RESET])
@transcript
async def test_get_and_head_are_sent_once_more(method: str, end: str) -> None:
    async with Peer([REQUEST, OK, REQUEST, end], [REQUEST, OK[: -2 if method == "HEAD" else None]]) as peer:
        client = peer.client()
        await client.request("GET", "/", ())
        assert (await client.request(method, "/", ())).status == 200
        assert [len(line.requests) for line in peer.lines] == [2, 1]


@transcript
async def test_the_retry_takes_a_fresh_connection_and_is_the_last() -> None:
    async with Peer(
        [REQUEST, PAUSE, OK, REQUEST, CLOSE], [REQUEST, PAUSE, OK, REQUEST, CLOSE], [REQUEST, CLOSE]
    ) as peer:
        client = peer.client()
        await asyncio.gather(*(client.request("GET", "/", ()) for _ in range(2)))
        with pytest.raises(ConnectionLost, match="before any"):
            await client.request("GET", "/", ())
        assert sorted(len(line.requests) for line in peer.lines) == [1, 1, 2]
        assert (client.in_flight, client.idle) == (0, 1)


@transcript
async def test_the_retry_makes_room_in_a_full_pool() -> None:
    async with Peer([REQUEST, PAUSE, OK, REQUEST, CLOSE], [REQUEST, PAUSE, OK, REQUEST, CLOSE], [REQUEST, OK]) as peer:
        client = peer.client(max_connections=2)
        await asyncio.gather(*(client.request("GET", "/", ()) for _ in range(2)))
        assert (await client.request("GET", "/", ())).body == b"ok"


@pytest.mark.parametrize(
    ("method", "script"),
    [
        ("POST", [REQUEST, OK, REQUEST, CLOSE]),
        ("GET", [REQUEST, OK, REQUEST, b"HTT", PAUSE, CLOSE]),
        ("GET", [REQUEST, OK, REQUEST, b"HTTP/1.1 100 Continue\r\n\r\n", PAUSE, CLOSE]),
    ],
)
@transcript
async def test_what_may_have_been_executed_is_not_sent_again(method: str, script: list[Any]) -> None:
    async with Peer(script) as peer:
        client = peer.client()
        await client.request("GET", "/", ())
        with pytest.raises(ConnectionLost):
            await client.request(method, "/", ())
        assert len(peer.lines) == 1


@transcript
async def test_a_fresh_connection_that_is_cut_is_not_retried() -> None:
    async with Peer([REQUEST, CLOSE]) as peer:
        with pytest.raises(ConnectionLost, match="before any"):
            await peer.client().request("GET", "/", ())
        assert len(peer.lines) == 1


class Refusing:
    """A transport whose first write the kernel refuses."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def write(self, data: bytes) -> None:
        self.transport.abort()


@transcript
async def test_a_refused_first_write_was_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Peer() as peer:
        client = peer.client()
        await client.request("POST", "/", ())
        (connection,) = client._all
        connection._transport = Refusing(connection._transport)  # type: ignore[assignment]
        assert (await client.request("POST", "/", ())).body == b"ok"
        assert [len(line.requests) for line in peer.lines] == [1, 1]
        await client.close()
        made = Connection.connection_made
        monkeypatch.setattr(Connection, "connection_made", lambda self, transport: made(self, Refusing(transport)))  # type: ignore[arg-type]
        client = peer.client()
        with pytest.raises(Unreachable, match="before anything could be sent"):
            await client.request("POST", "/", ())
        assert client.in_flight == 0


# Unreachable.


@transcript
async def test_a_refused_connect() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        client = HttpClient("127.0.0.1", port, now=time.monotonic)
        with pytest.raises(Unreachable, match=f"cannot connect to 127.0.0.1:{port}: connection refused"):
            await client.request("GET", "/", ())
        assert client.in_flight == 0
        await client.close()


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")])
@transcript
async def test_a_name_that_nobody_knows(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop:
        async def create_connection(self, *_: object) -> None:
            raise error

    client = HttpClient("backend", 8000, now=time.monotonic)
    monkeypatch.setattr(asyncio, "get_running_loop", Loop)
    with pytest.raises(Unreachable, match=r"cannot connect to backend:8000: (name or service|label)"):
        await client.request("GET", "/", ())
    monkeypatch.undo()
    assert client.in_flight == 0


@transcript
async def test_a_connect_that_nobody_answers() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        crowd = [socket.socket() for _ in range(4)]
        for one in crowd:
            one.setblocking(False)
            one.connect_ex(address)
        client = HttpClient("127.0.0.1", address[1], now=time.monotonic, connect_timeout=0.03, max_connections=1)
        with pytest.raises(Unreachable, match=r"no answer within 0.03 s"):
            await client.request("GET", "/", ())
        with pytest.raises(Expired):
            await client.request("GET", "/", (), deadline=time.monotonic() + 0.01)
        task = asyncio.ensure_future(client.request("GET", "/", ()))
        await asyncio.sleep(0.005)
        assert client.in_flight == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.in_flight == 0
        for one in crowd:
            one.close()
        await client.close()

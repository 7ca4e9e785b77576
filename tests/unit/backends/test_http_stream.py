"""Responses that are read while they come."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest

from backends.errors import BadReply, ConnectionLost, Expired, Unreachable
from backends.http_stream import Inflow
from tests.unit.backends.http_peer import AGAIN, CLOSE, HOLD, OK, PAUSE, REQUEST, RESET, Peer, transcript, until

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@transcript
async def test_chunks_as_they_arrive() -> None:
    taken = asyncio.Event()

    async def next_one(_: Any) -> None:
        await taken.wait()
        taken.clear()

    script = [REQUEST, CHUNKED, next_one, chunk(b"one"), next_one, chunk(b"two"), chunk(b"three"), next_one, END, AGAIN]
    async with Peer(script) as peer:
        client = peer.client()
        for _ in range(2):
            stream = await client.stream("POST", "/", (), b"x")
            assert stream.status == 200
            assert stream.headers == ((b"content-type", b"text/event-stream"),)
            assert (client.in_flight, client.idle) == (1, 0)
            seen = []
            taken.set()
            async for data in stream:
                seen.append(data)
                taken.set()
            assert b"".join(seen) == b"onetwothree"
            assert seen[0] == b"one"
            assert (client.in_flight, client.idle) == (0, 1)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert len(peer.lines) == 1


@pytest.mark.parametrize("reply", [OK, CHUNKED + chunk(b"ok") + END, b"HTTP/1.0 200 OK\r\n\r\nok"])
@transcript
async def test_a_body_that_is_complete_with_its_head(reply: bytes) -> None:
    script = [REQUEST, reply, CLOSE] if b"1.0" in reply else [REQUEST, reply, AGAIN]
    async with Peer(script) as peer:
        client = peer.client()
        for _ in range(2):
            stream = await client.stream("GET", "/", ())
            await until(lambda: client.in_flight == 0)
            assert [data async for data in stream] == [b"ok"]
            await stream.aclose()
        assert len(peer.lines) == (2 if b"1.0" in reply else 1)


@pytest.mark.parametrize("reply", [b"HTTP/1.1 204 No Content\r\n\r\n", CHUNKED + END])
@transcript
async def test_an_empty_body(reply: bytes) -> None:
    async with Peer([REQUEST, reply, AGAIN]) as peer:
        client = peer.client()
        for _ in range(2):
            async with await client.stream("GET", "/", ()) as stream:
                assert [data async for data in stream] == []
        assert len(peer.lines) == 1


@pytest.mark.parametrize("end", [CLOSE, RESET])
@pytest.mark.parametrize(
    "reply",
    [CHUNKED + chunk(b"part"), b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart", CHUNKED + chunk(b"part")[:-1]],
)
@transcript
async def test_a_cut_body_is_an_error_and_never_an_end(reply: bytes, end: str) -> None:
    async with Peer([REQUEST, reply, PAUSE, end]) as peer:
        client = peer.client()
        stream = await client.stream("GET", "/", ())
        await until(lambda: client.in_flight == 0)
        assert await anext(stream) == b"part", "what did come is not kept back"
        for _ in range(2):
            with pytest.raises(ConnectionLost, match="after 4"):
                await anext(stream)


@transcript
async def test_a_malformed_body() -> None:
    async with Peer([REQUEST, CHUNKED + chunk(b"part"), PAUSE, b"zz\r\n", HOLD]) as peer:
        client = peer.client()
        stream = await client.stream("GET", "/", ())
        assert await anext(stream) == b"part"
        with pytest.raises(BadReply, match="malformed"):
            await anext(stream)
        assert client.in_flight == 0


@transcript
async def test_a_slow_reader_stops_the_sender() -> None:
    async with Peer([REQUEST, CHUNKED, *[chunk(bytes(100_000))] * 300, END]) as peer:
        client = peer.client()
        stream = await client.stream("GET", "/", ())
        await until(lambda: peer.lines[0].transport.get_write_buffer_size() > 0)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert peer.lines[0].transport.get_write_buffer_size() > 0
        assert stream._inflow.size < 1_000_000
        size = 0
        async for data in stream:
            assert len(data) < 1_000_000
            size += len(data)
        assert size == 30_000_000
        assert (client.in_flight, client.idle) == (0, 1)


@transcript
async def test_aclose_closes_the_upstream_at_once() -> None:
    async with Peer([REQUEST, CHUNKED, chunk(b"x"), HOLD]) as peer:
        client = peer.client()
        stream = await client.stream("GET", "/", ())
        assert await anext(stream) == b"x"
        await stream.aclose()
        assert (client.in_flight, client.idle) == (0, 0)
        await peer.lines[0].lost.wait()
        with pytest.raises(ConnectionLost, match="closed by its reader"):
            await anext(stream)
        await stream.aclose()


@transcript
async def test_aclose_wakes_a_reader() -> None:
    async with Peer([REQUEST, CHUNKED, HOLD]) as peer:
        client = peer.client()
        stream = await client.stream("GET", "/", ())
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one reader"):
            await anext(stream)
        await stream.aclose()
        with pytest.raises(ConnectionLost):
            await reader


@transcript
async def test_aclose_of_a_paused_stream() -> None:
    async with Peer([REQUEST, CHUNKED, *[chunk(bytes(100_000))] * 300, END]) as peer:
        client = peer.client()
        stream = await client.stream("GET", "/", ())
        await until(lambda: stream._connection._paused)  # type: ignore[attr-defined]
        await stream.aclose()
        await peer.lines[0].lost.wait()


@transcript
async def test_a_cancelled_reader_closes_the_upstream() -> None:
    async with Peer([REQUEST, CHUNKED, HOLD]) as peer:
        client = peer.client()
        stream = await client.stream("GET", "/", ())
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert client.in_flight == 0
        await peer.lines[0].lost.wait()


@transcript
async def test_a_forgotten_stream_closes_the_upstream() -> None:
    async with Peer([REQUEST, CHUNKED, chunk(b"x"), HOLD]) as peer:
        client = peer.client()
        stream = await client.stream("GET", "/", ())
        assert await anext(stream) == b"x"
        del stream
        gc.collect()
        assert client.in_flight == 0
        await peer.lines[0].lost.wait()


@transcript
async def test_a_caller_cancelled_as_the_head_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Peer([REQUEST, CHUNKED, HOLD]) as peer:
        client = peer.client()
        task = asyncio.ensure_future(client.stream("GET", "/", ()))
        monkeypatch.setattr(Inflow, "wake", lambda _: task.cancel())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.in_flight == 0
        await peer.lines[0].lost.wait()


@transcript
async def test_the_deadline_holds_to_the_end_of_the_body() -> None:
    async with Peer([REQUEST, CHUNKED, chunk(b"x"), HOLD]) as peer:
        client = peer.client()
        deadline = time.monotonic() + 0.03
        stream = await client.stream("GET", "/", (), deadline=deadline)
        assert await anext(stream) == b"x"
        with pytest.raises(Expired, match="backend"):
            await anext(stream)
        assert time.monotonic() >= deadline
        assert client.in_flight == 0
        await peer.lines[0].lost.wait()


@transcript
async def test_a_failed_head_is_raised_by_stream_itself() -> None:
    async with Peer([REQUEST, CHUNKED + b"zz\r\n", HOLD]) as peer:
        with pytest.raises(BadReply):
            await peer.client().stream("GET", "/", ())
    async with Peer([REQUEST, CLOSE]) as peer:
        with pytest.raises(ConnectionLost):
            await peer.client().stream("POST", "/", ())


@transcript
async def test_a_stream_moves_off_a_dead_idle_connection() -> None:
    async with Peer([REQUEST, OK, REQUEST, CLOSE], [REQUEST, CHUNKED + chunk(b"ok") + END]) as peer:
        client = peer.client()
        await client.request("GET", "/", ())
        assert [data async for data in await client.stream("GET", "/", ())] == [b"ok"]


@transcript
async def test_an_endless_stream_has_no_size_limit() -> None:
    async with Peer([REQUEST, CHUNKED, *[chunk(bytes(1000))] * 50, END]) as peer:
        client = peer.client(max_response_bytes=2000)
        assert sum([len(data) async for data in await client.stream("GET", "/", ())]) == 50_000


@transcript
async def test_closing_the_client_ends_its_streams() -> None:
    async with Peer([REQUEST, CHUNKED, HOLD]) as peer:
        client = peer.client()
        stream = await client.stream("GET", "/", ())
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(ConnectionLost, match="client was closed"):
            await reader
        with pytest.raises(Unreachable):
            await client.stream("GET", "/", ())

"""How a request ends that gets no response: deadlines, cancellation, the end of the client. Nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from backends.errors import ConnectionLost, Expired, Failure, Unreachable
from backends.http_client import HttpClient
from backends.http_connection import Connection
from tests.unit.backends.http_peer import AGAIN, HOLD, OK, REQUEST, Peer, echo, transcript, until

# Time.


@transcript
async def test_a_deadline_closes_the_connection() -> None:
    async with Peer([REQUEST, HOLD]) as peer:
        client = peer.client()
        deadline = time.monotonic() + 0.02
        with pytest.raises(Expired) as caught:
            await client.request("POST", "/", (), deadline=deadline)
        assert caught.value.where == "backend"
        assert deadline <= time.monotonic() < deadline + 0.5
        assert (client.in_flight, client.idle) == (0, 0)
        await peer.lines[0].lost.wait()


@transcript
async def test_a_deadline_that_has_passed_sends_nothing() -> None:
    async with Peer() as peer:
        client = peer.client()
        with pytest.raises(Expired):
            await client.request("GET", "/", (), deadline=time.monotonic() - 1)
        assert peer.lines == []


@transcript
async def test_a_deadline_in_the_queue_for_a_connection() -> None:
    async with Peer([REQUEST, HOLD]) as peer:
        client = peer.client(max_connections=1)
        first = asyncio.ensure_future(client.request("GET", "/", (), deadline=time.monotonic() + 0.1))
        await until(lambda: peer.lines)
        with pytest.raises(Expired):
            await client.request("GET", "/", (), deadline=time.monotonic() + 0.01)
        assert len(client._queue) == 0
        with pytest.raises(Expired):
            await first


@transcript
async def test_every_deadline_is_kept_by_one_timer() -> None:
    late = []

    async def one(client: HttpClient, wait: float) -> None:
        deadline = time.monotonic() + wait
        with pytest.raises(Expired):
            await client.request("GET", "/", (), deadline=deadline)
        late.append(time.monotonic() - deadline)

    async with Peer([REQUEST, HOLD]) as peer:
        client = peer.client()
        await asyncio.gather(*(one(client, wait / 1000) for wait in (40, 10, 60, 25, 11, 60, 5)))
        assert len(late) == 7
        assert min(late) >= 0
        assert client._deadline_timer is None


@transcript
async def test_deadlines_follow_the_injected_clock() -> None:
    clock = [50.0]
    async with Peer([REQUEST, HOLD]) as peer:
        client = peer.client(now=lambda: clock[0])
        task = asyncio.ensure_future(client.request("GET", "/", (), deadline=50.005))
        await asyncio.sleep(0.03)
        assert not task.done()
        clock[0] = 50.005
        with pytest.raises(Expired):
            await task


# Cancellation and the end.


@transcript
async def test_a_cancelled_request_closes_its_connection() -> None:
    async with Peer([REQUEST, HOLD], [REQUEST, OK]) as peer:
        client = peer.client()
        task = asyncio.ensure_future(client.request("GET", "/", ()))
        await until(lambda: peer.lines and peer.lines[0].requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (client.in_flight, client.idle) == (0, 0)
        await peer.lines[0].lost.wait()
        assert (await client.request("GET", "/", ())).body == b"ok"


@transcript
async def test_a_cancel_that_comes_too_late_harms_nobody() -> None:
    """The response is there and the connection given on before the cancelled caller has its turn."""
    gate = asyncio.Event()
    async with Peer([REQUEST, lambda _: gate.wait(), echo, AGAIN]) as peer:
        client = peer.client(max_connections=1)
        first = asyncio.ensure_future(client.request("POST", "/", (), b"1"))
        second = asyncio.ensure_future(client.request("POST", "/", (), b"2"))

        def park(connection: Connection) -> None:
            first.cancel()
            HttpClient.park(client, connection)

        client.park = park  # type: ignore[method-assign]
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await second).body == b"2"
        assert len(peer.lines) == 1


@pytest.mark.parametrize("limit", [4, 64])
@transcript
async def test_two_thousand_cancels_at_any_moment(limit: int) -> None:
    chance = random.Random(7)
    outcomes = {"answered": 0, "cancelled": 0}

    async def one(client: HttpClient, n: int) -> None:
        body = b"%d" % n
        if n % 3:
            assert (await client.request("POST", "/", (), body)).body == body
        else:
            async with await client.stream("POST", "/", (), body) as stream:
                assert b"".join([data async for data in stream]) == body

    async def dawdle(_: Any) -> None:
        await asyncio.sleep(chance.choice((0, 0, 0.001)))

    async with Peer([REQUEST, dawdle, echo, AGAIN]) as peer:
        client = peer.client(max_connections=limit)
        for n in range(0, 3000, 75):
            tasks = [asyncio.ensure_future(one(client, n + k)) for k in range(75)]
            for task in chance.sample(tasks, 50):
                if chance.random() < 0.3:
                    await asyncio.sleep(chance.choice((0, 0, 0.002)))
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert result is None or isinstance(result, asyncio.CancelledError), result
                outcomes["answered" if result is None else "cancelled"] += 1
            assert client.in_flight == 0
            assert len(client._queue) == client._opening == 0
        assert min(outcomes.values()) > 50, outcomes
        assert (await client.request("POST", "/", (), b"still here")).body == b"still here"
        await until(lambda: sum(not line.lost.is_set() for line in peer.lines) == client.idle)


@transcript
async def test_close_ends_everything() -> None:
    async with Peer([REQUEST, OK, REQUEST, HOLD]) as peer:
        client = peer.client(max_connections=1)
        await client.request("GET", "/", ())
        flying = asyncio.ensure_future(client.request("POST", "/", (), deadline=time.monotonic() + 60))
        waiting = asyncio.ensure_future(client.request("POST", "/", ()))
        await until(lambda: len(peer.lines[0].requests) == 2)
        await asyncio.gather(client.close(), client.close())
        results = await asyncio.gather(flying, waiting, return_exceptions=True)
        assert [type(result) for result in results] == [ConnectionLost, Unreachable]
        with pytest.raises(Unreachable, match="closed"):
            await client.request("GET", "/", ())
        assert (client.in_flight, client.idle) == (0, 0)


@transcript
async def test_close_while_a_connection_is_being_opened() -> None:
    async with Peer() as peer:
        client = peer.client()
        task = asyncio.ensure_future(client.request("POST", "/", ()))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(Failure):
            await task
        assert client.in_flight == 0

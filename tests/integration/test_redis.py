"""The store before a real redis-server that dies, hangs, and is asked by callers who leave."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cache import redis as under_test
from cache.redis import MAX_VALUE_BYTES, RedisStore
from policies.spec import Redis
from tests.support.redis import Facts, RedisServer, filled, hit, key, redis_server, run, store, until, value

# For a machine that does other things, too: what a lookup may take beyond its limit.
MARGIN = 0.1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as started:
        yield started


class Caller:
    """Looks up random keys, and leaves at a random moment; counts what it found, and checks every bit of it."""

    def __init__(self, kept: RedisStore, count: int, chance: random.Random) -> None:
        self.kept, self.count, self.chance = kept, count, chance
        self.hits = self.misses = self.left = 0

    async def lookups(self, until: float) -> None:
        while time.monotonic() < until:
            numbers = [self.chance.randrange(self.count) for _ in range(self.chance.randint(1, 8))]
            task = asyncio.ensure_future(self.kept.get_many([key(number) for number in numbers]))
            if self.chance.random() < 0.5:
                await asyncio.sleep(self.chance.choice([0, 0, 0.0002, 0.001, 0.003]))
                task.cancel()
            try:
                found = await task
            except asyncio.CancelledError:
                self.left += 1
                continue
            for number, got in zip(numbers, found, strict=True):
                assert got is None or got == value(number), f"the value of {got[:6]!r} for {number}"
                self.hits += got is not None
                self.misses += got is None


async def crowd(kept: RedisStore, count: int, seconds: float) -> tuple[int, int, int]:
    callers = [Caller(kept, count, random.Random(seed)) for seed in range(24)]
    end = time.monotonic() + seconds
    await asyncio.gather(*(caller.lookups(end) for caller in callers))
    return sum(c.hits for c in callers), sum(c.misses for c in callers), sum(c.left for c in callers)


def test_who_leaves_takes_nobody_elses_reply(server: RedisServer) -> None:
    async def main() -> None:
        facts = Facts()
        async with store(server.port, facts) as kept:
            await filled(kept, 300)
            hits, misses, left = await crowd(kept, 300, 1.5)
            assert misses == 0
            assert (hits > 1000, left > 100) == (True, True), (hits, left)
            assert await hit(kept)
        assert facts.states == ["up"], "leaving costs no connection"

    run(main())


class Stalling:
    """A way to `port` that breaks replies into pieces and stops for `stall` seconds within some of them."""

    def __init__(self, port: int, stall: float) -> None:
        self.port, self.stall = port, stall
        self.chance = random.Random(1)
        self.stalling = False
        self.connections = self.stalls = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Stalling:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.here = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            with suppress(ConnectionError):
                await asyncio.gather(self._copy(reader, there_writer, False), self._copy(there_reader, writer, True))
        finally:
            writer.close()
            there_writer.close()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, replies: bool) -> None:
        while data := await source.read(65536):
            if replies and self.stalling and self.chance.random() < 0.05:
                cut = self.chance.randrange(len(data))
                sink.write(data[:cut])
                self.stalls += 1
                await asyncio.sleep(self.stall)
                data = data[cut:]
            sink.write(data)
            await sink.drain()
        sink.close()


@pytest.mark.parametrize("stall", [0.03, 0.2], ids=["a limit and a half", "ten limits"])
def test_a_stall_within_a_reply_gives_nobody_anothers(server: RedisServer, stall: float) -> None:
    async def main() -> None:
        facts = Facts()
        async with Stalling(server.port, stall) as way, store(way.here, facts, timeout=0.02) as kept:
            await filled(kept, 300)
            way.stalling = True
            hits, _, _ = await crowd(kept, 300, 2.0)
            way.stalling = False
            assert way.stalls > 3
            assert hits > 100
            await until(lambda: kept.up)
            found = await kept.get_many([key(i) for i in range(50)])
            assert all(got in (None, value(i)) for i, got in enumerate(found))

    run(main())


def test_one_that_is_killed_and_comes_back_is_told_of_once_each_way(server: RedisServer) -> None:
    async def main() -> None:
        facts = Facts()
        async with store(server.port, facts, timeout=0.05) as kept:
            await filled(kept, 2)
            server.kill()
            longest = 0.0
            for _ in range(300):
                began = time.monotonic()
                assert await kept.get_many([key(1), key(2)]) in ([None, None], [value(1), None])
                await kept.put_many({key(1): value(1)}, 60.0)
                longest = max(longest, time.monotonic() - began)
                await asyncio.sleep(0.001)
            assert longest < 0.05 + MARGIN
            assert facts.states == ["up", "down"]
            assert "Connection refused" in kept.reason
            assert kept.dropped > 200
            await asyncio.sleep(0.5)
            server.start()
            await until(lambda: kept.up, seconds=5)
            await filled_again(kept)
        assert facts.states == ["up", "down", "up"]
        assert facts.told[2] == (True, "")

    async def filled_again(kept: RedisStore) -> None:
        await kept.put_many({key(1): value(1)}, 60.0)
        await kept.settled()
        assert await hit(kept)

    run(main())


def test_one_that_is_silent_costs_three_limits_and_then_nothing(server: RedisServer) -> None:
    async def main() -> None:
        facts = Facts()
        async with store(server.port, facts, timeout=0.04) as kept:
            await filled(kept, 2)
            server.pause()
            slow = 0
            for _ in range(40):
                began = time.monotonic()
                assert await kept.get_many([key(1)]) == [None]
                took = time.monotonic() - began
                assert took < 0.04 + MARGIN
                slow += took > 0.02
            assert slow == 3
            assert facts.told[1:] == [(False, "no reply within 40 ms, 3 times in a row")]
            began = time.monotonic()
            for _ in range(2000):
                await kept.get_many([key(1)])
            assert time.monotonic() - began < 0.1
            server.resume()
            await until(lambda: kept.up, seconds=6)
            assert await hit(kept)
        assert facts.states == ["up", "down", "up"]

    run(main())


def test_a_burst_that_is_late_together_takes_nothing_down(server: RedisServer) -> None:
    async def main() -> None:
        facts = Facts()
        async with store(server.port, facts, timeout=0.04) as kept:
            await filled(kept, 2)
            server.pause()
            await asyncio.gather(*(kept.get_many([key(1)]) for _ in range(200)))
            server.resume()
            await asyncio.sleep(0.1)
            assert await hit(kept)
        assert facts.states == ["up"]

    run(main())


def test_puts_delay_nobody_and_are_bounded(server: RedisServer) -> None:
    async def main() -> None:
        async with store(server.port) as kept:
            await kept.put_many({key(0): bytes(MAX_VALUE_BYTES + 1)}, 60.0)
            assert kept.dropped == 1
            server.pause()
            began = time.monotonic()
            for i in range(64):
                await kept.put_many({key(i): bytes(MAX_VALUE_BYTES)}, 60.0)
            assert time.monotonic() - began < MARGIN
            assert kept.dropped == 1 + 48, "16 MiB are under way"
            server.resume()
            await kept.settled()
            assert kept.dropped == 49
            assert (await kept.get_many([key(0), key(15), key(16)])) == [bytes(MAX_VALUE_BYTES)] * 2 + [None]

    run(main())


def test_it_closes_before_a_server_that_hangs(server: RedisServer) -> None:
    async def main() -> None:
        async with store(server.port, timeout=0.2) as kept:
            server.pause()
            await kept.put_many({key(i): bytes(MAX_VALUE_BYTES) for i in range(8)}, 60.0)
            waiting = asyncio.ensure_future(kept.get_many([key(1)]))
            await asyncio.sleep(0.01)
            began = time.monotonic()
            await kept.close()
            assert time.monotonic() - began < 0.2 + MARGIN
            assert await waiting == [None]
            assert await kept.get_many([key(1)]) == [None]

    run(main())


def test_one_that_is_not_there_yet_is_told_of_and_found_when_it_is(tmp_path: Path) -> None:
    later = RedisServer(tmp_path)

    async def main() -> None:
        facts = Facts()
        async with store(later.port, facts) as kept:
            assert await kept.get_many([key(1)]) == [None]
            await asyncio.sleep(0.5)
            with later:
                await until(lambda: kept.up)
                await filled(kept, 2)
                assert await hit(kept)
        assert facts.states[:2] == ["down", "up"]

    run(main())


def test_a_connection_that_redis_closed_is_replaced_without_a_word(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "_SETTLED_SECONDS", 0.1)

    async def main() -> None:
        facts = Facts()
        async with store(server.port, facts) as kept:
            await filled(kept, 2)
            for kind in ("normal", "normal"):
                await asyncio.sleep(0.15)
                server.do("CLIENT", "KILL", "TYPE", kind)
                await asyncio.sleep(0.05)
                assert await hit(kept)
        assert facts.states == ["up"]

    run(main())


def test_before_it_is_started_it_knows_nothing() -> None:
    async def main() -> None:
        kept = RedisStore(Redis("127.0.0.1", 1), now=time.monotonic, observe=Facts())
        await kept.put_many({key(1): b"x"}, 60.0)
        assert await kept.get_many([key(1)]) == [None]
        assert (kept.up, kept.dropped) == (None, 1)
        await kept.close()

    run(main())

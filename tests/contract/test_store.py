"""What every store promises. Another implementer joins as one more parameter of `subject`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from cache.store import MemoryStore, Store
from tests.support.redis import RedisServer, redis_server, settled


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Subject:
    """A way to open a store, and how its time passes (really, where the store keeps it elsewhere)."""

    opened: Callable[[], AbstractAsyncContextManager[Store]]
    pass_time: Callable[[float], Coroutine[Any, Any, None]]

    def run(self, test: Callable[[Store], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with self.opened() as store:
                await test(store)

        asyncio.run(main())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(params=["memory", "redis"])
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param == "redis":
        started: RedisServer = request.getfixturevalue("server")
        started.do("FLUSHALL")
        return Subject(partial(settled, started.port), asyncio.sleep)
    clock = Clock()

    async def pass_time(seconds: float) -> None:
        clock.seconds += seconds

    @asynccontextmanager
    async def opened() -> AsyncIterator[Store]:
        yield MemoryStore(1000, 10**7, clock)

    return Subject(opened, pass_time)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_what_was_put_is_got_in_the_order_of_the_keys(subject: Subject) -> None:
    async def test(store: Store) -> None:
        await store.put_many({key(i): b"v%d" % i for i in range(3)}, 60.0)
        assert await store.get_many([key(2), key(7), key(0), key(2)]) == [b"v2", None, b"v0", b"v2"]

    subject.run(test)


def test_nothing_is_asked_and_nothing_is_put(subject: Subject) -> None:
    async def test(store: Store) -> None:
        await store.put_many({}, 60.0)
        assert await store.get_many([]) == []
        assert await store.get_many([key(1)]) == [None]

    subject.run(test)


@pytest.mark.parametrize("value", [b"", b"\0\r\n\xff" * 3, b"x" * 2**20], ids=["empty", "binary", "megabyte"])
def test_values_are_any_bytes(subject: Subject, value: bytes) -> None:
    async def test(store: Store) -> None:
        await store.put_many({key(1): value}, 60.0)
        assert await store.get_many([key(1)]) == [value]

    subject.run(test)


def test_keys_are_any_bytes(subject: Subject) -> None:
    keys = [bytes(16), b"\r\n" * 8, b"\xff" * 16, b"{a}* ?[]\\:/%00!!"]

    async def test(store: Store) -> None:
        await store.put_many({each: each for each in keys}, 60.0)
        assert await store.get_many(keys) == keys

    subject.run(test)


def test_a_later_value_replaces_an_earlier_one(subject: Subject) -> None:
    async def test(store: Store) -> None:
        await store.put_many({key(1): b"old", key(2): b"other"}, 60.0)
        await store.put_many({key(1): b"new"}, 60.0)
        assert await store.get_many([key(1), key(2)]) == [b"new", b"other"]

    subject.run(test)


def test_a_value_ends_with_its_time_to_live(subject: Subject) -> None:
    async def test(store: Store) -> None:
        await store.put_many({key(1): b"short"}, 0.1)
        await store.put_many({key(2): b"long"}, 60.0)
        assert await store.get_many([key(1), key(2)]) == [b"short", b"long"]
        await subject.pass_time(0.15)
        assert await store.get_many([key(1), key(2)]) == [None, b"long"]

    subject.run(test)


def test_putting_again_begins_a_new_life(subject: Subject) -> None:
    async def test(store: Store) -> None:
        await store.put_many({key(1): b"a"}, 0.2)
        await subject.pass_time(0.15)
        await store.put_many({key(1): b"b"}, 0.2)
        await subject.pass_time(0.15)
        assert await store.get_many([key(1)]) == [b"b"]

    subject.run(test)


def test_looking_does_not_prolong(subject: Subject) -> None:
    async def test(store: Store) -> None:
        await store.put_many({key(1): b"a"}, 0.2)
        for _ in range(2):
            await subject.pass_time(0.12)
            found = await store.get_many([key(1)])
        assert found == [None]

    subject.run(test)


def test_what_lives_no_time_is_never_seen(subject: Subject) -> None:
    async def test(store: Store) -> None:
        await store.put_many({key(1): b"a"}, 60.0)
        await store.put_many({key(1): b"b"}, 0.0)
        assert await store.get_many([key(1)]) in ([None], [b"a"])

    subject.run(test)


def test_callers_at_the_same_time_get_their_own(subject: Subject) -> None:
    async def test(store: Store) -> None:
        async def one(i: int) -> None:
            await store.put_many({key(i): b"v%d" % i}, 60.0)
            assert await store.get_many([key(i)]) == [b"v%d" % i]

        await asyncio.gather(*(one(i) for i in range(200)))

    subject.run(test)

"""Streams whose end is told exactly once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from backends.deadlines import Deadlines
from backends.errors import ConnectionLost, Expired, TooSlow
from backends.stream import Bound, Watched
from tests.support.loop import run as loop_run


async def chunks(*given: bytes | Exception, wait: float = 0) -> AsyncIterator[bytes]:
    for item in given:
        await asyncio.sleep(wait)
        if isinstance(item, Exception):
            raise item
        yield item


def test_a_stream_that_is_read_to_its_end() -> None:
    async def run() -> None:
        ends: list[BaseException | None] = []
        stream = Watched(chunks(b"a", b"b"), ends.append)
        assert [chunk async for chunk in stream] == [b"a", b"b"]
        await stream.aclose()
        assert ends == [None]

    asyncio.run(run())


def test_a_stream_that_fails_ends_with_its_error() -> None:
    async def run() -> None:
        ends: list[BaseException | None] = []
        lost = ConnectionLost("cut")
        stream = Watched(chunks(b"a", lost), ends.append)
        with pytest.raises(ConnectionLost):
            assert [chunk async for chunk in stream]
        assert ends == [lost]

    asyncio.run(run())


@pytest.mark.parametrize("read", [0, 1])
def test_a_stream_that_is_left_is_closed_and_told_even_if_it_never_began(read: int) -> None:
    async def run() -> None:
        ends: list[BaseException | None] = []
        stream = Watched(chunks(b"a", b"b"), ends.append)
        for _ in range(read):
            await anext(stream)
        await stream.aclose()
        await stream.aclose()
        assert [type(error) for error in ends] == [asyncio.CancelledError]

    asyncio.run(run())


def test_a_stream_that_is_dropped_is_told() -> None:
    ends: list[BaseException | None] = []
    stream = Watched(chunks(b"a"), ends.append)
    del stream
    gc.collect()
    assert [type(error) for error in ends] == [asyncio.CancelledError]


def test_a_chunk_that_does_not_come_in_time() -> None:
    async def run() -> None:
        ends: list[BaseException | None] = []
        loop = asyncio.get_running_loop()
        deadlines = Deadlines(loop.time)
        bound = Bound(lambda: deadlines.until(loop.time() + 1.0), lambda late: TooSlow(f"{type(late).__name__}"))
        stream = Watched(chunks(b"a", b"b", wait=0.6), ends.append, bound)
        assert [chunk async for chunk in stream] == [b"a", b"b"]  # each in time, though not both
        for late, what in ((chunks(b"a", wait=5), "TimeoutError"), (chunks(Expired("backend")), "Expired")):
            with pytest.raises(TooSlow, match=what):
                await anext(Watched(late, ends.append, bound))
        assert [type(error) for error in ends] == [type(None), TooSlow, TooSlow]

    loop_run(run())

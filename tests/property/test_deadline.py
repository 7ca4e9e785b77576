"""`Deadlines` against asyncio.timeout: random blocks, nested, in several tasks, cancelled from outside."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.deadlines import Deadlines
from tests.support.loop import run

# Deadlines and steps fall on different fractions of a second: at the same instant either order would be right.
WAITS = st.integers(0, 6).map(lambda n: n * 0.1 + 0.0101)
LIMITS = st.one_of(st.integers(1, 6).map(lambda n: n * 0.1), st.just(math.inf))
STEPS = st.deferred(
    lambda: st.lists(
        st.one_of(
            st.tuples(st.just("sleep"), WAITS),
            st.tuples(st.just("block"), LIMITS, st.booleans(), STEPS),
            st.tuples(st.just("swallow"), WAITS),
            st.tuples(st.just("raise")),
        ),
        max_size=3,
    )
)
# Steps, and when the task is cancelled from outside.
TASKS = st.lists(st.tuples(STEPS, st.one_of(st.none(), st.integers(0, 8).map(lambda n: n * 0.1 + 0.0953))), max_size=4)


async def steps(plan: list[Any], limit: Any, told: list[Any]) -> None:
    now = asyncio.get_running_loop().time
    for step in plan:
        match step:
            case ["sleep", seconds]:
                await asyncio.sleep(seconds)
            case ["swallow", seconds]:
                try:
                    await asyncio.sleep(seconds)
                except asyncio.CancelledError:
                    told.append("swallowed")
            case ["raise"]:
                raise ValueError
            case ["block", seconds, caught, inner]:
                try:
                    async with limit(now() + seconds):
                        await steps(inner, limit, told)
                except TimeoutError:
                    told.append(("late", int(now() * 10)))
                    if not caught:
                        raise
        told.append(int(now() * 10))


async def outcomes(tasks: list[Any], limit: Any) -> list[Any]:
    loop = asyncio.get_running_loop()
    told: list[list[Any]] = [[] for _ in tasks]

    async def one(plan: list[Any], told: list[Any]) -> None:
        try:
            await steps(plan, limit, told)
        finally:
            task = asyncio.current_task()
            assert task is not None
            told.append(("cancelling", task.cancelling()))

    made = [loop.create_task(one(plan, list_)) for (plan, _), list_ in zip(tasks, told, strict=True)]
    for task, (_, cancelled) in zip(made, tasks, strict=True):
        if cancelled is not None:
            loop.call_later(cancelled, task.cancel)
    ends = await asyncio.gather(*made, return_exceptions=True)
    return [(list_, type(end)) for list_, end in zip(told, ends, strict=True)]


@settings(max_examples=150, deadline=None)
@given(TASKS)
def test_blocks_end_as_those_of_asyncio_do(tasks: list[Any]) -> None:
    async def ours() -> list[Any]:
        deadlines = Deadlines(asyncio.get_running_loop().time)

        @asynccontextmanager
        async def until(when: float) -> Any:
            with deadlines.until(when):
                yield

        found = await outcomes(tasks, until)
        assert not deadlines._open
        return found

    async def theirs() -> list[Any]:
        return await outcomes(tasks, lambda when: asyncio.timeout_at(None if when == math.inf else when))

    assert run(ours()) == run(theirs())


@pytest.mark.parametrize("first", ["deadline", "cancel"])
def test_a_cancel_at_the_instant_of_a_deadline_is_a_cancel(first: str) -> None:
    """As asyncio.timeout has it: who was cancelled from outside too is not told of a timeout."""

    async def main(limit: Any, late: float) -> tuple[str, int]:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        if first == "cancel":
            loop.call_at(0.1 + late, task.cancel)
        try:
            async with limit(0.1):
                if first == "deadline":
                    loop.call_at(0.1 + late, task.cancel)
                await asyncio.sleep(1)
        except asyncio.CancelledError:
            return "cancelled", task.uncancel()
        except TimeoutError:
            return "late", task.cancelling()
        return "", 0

    async def ours() -> tuple[str, int]:
        deadlines = Deadlines(asyncio.get_running_loop().time)

        @asynccontextmanager
        async def until(when: float) -> Any:
            with deadlines.until(when):
                yield

        return await main(until, 0.001)

    assert run(ours()) == run(main(asyncio.timeout_at, 0.0)) == ("cancelled", 0)


def test_the_clock_is_read_once_for_many_blocks() -> None:
    """A block whose deadline is not the earliest costs no timer, and no look at the clock."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        reads = 0

        def now() -> float:
            nonlocal reads
            reads += 1
            return loop.time()

        deadlines = Deadlines(now)
        for i in range(1000):
            with deadlines.until(60.0 + i):
                await asyncio.sleep(0)
        assert reads == 1
        with deadlines.until(0.5):
            assert reads == 2
        assert not deadlines._open

    run(main())


def test_a_cut_ends_what_is_open_and_what_is_entered_later() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        deadlines = Deadlines(loop.time)
        ended: list[float] = []

        async def wait(when: float) -> None:
            try:
                with deadlines.until(when):
                    await asyncio.sleep(60)
            except TimeoutError:
                ended.append(loop.time())

        tasks = [asyncio.create_task(wait(when)) for when in (1.0, 30.0, math.inf)]
        await asyncio.sleep(5)
        assert (len(ended), deadlines.was_cut) == (1, False)
        deadlines.cut()
        await asyncio.gather(*tasks)
        assert [round(at, 2) for at in ended] == [1.0, 5.0, 5.0]
        with pytest.raises(TimeoutError), deadlines.until(math.inf):
            ended.append(loop.time())
        assert (len(ended), deadlines.was_cut, deadlines._open) == (3, True, set())

    run(main())

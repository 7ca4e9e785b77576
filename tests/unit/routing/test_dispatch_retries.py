"""Batches that their endpoint never executed: back to the lane, and to another endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from backends.errors import BackendFailed, ConnectionLost, Failure, Rejected, Unreachable
from backends.request import Reply, Request, Service
from policies.spec import Batch as Limits
from routing.dispatch import Dispatch
from routing.dispatcher import Dispatcher
from routing.retry import RetryBudget
from tests.support.dispatching import ask, first, idle, stall
from tests.support.loop import run, settle
from tests.support.services import Gate, Scripted, refuse
from tests.support.strategies import call


def make(
    *backends: Service, budget: RetryBudget | None = None, unready: set[int] | None = None, **limits: Any
) -> Dispatch:
    dispatcher = Dispatcher(Limits(**{"slots": 1, "max_rows": 4, **limits}), len(backends))
    now = asyncio.get_running_loop().time
    return Dispatch(dispatcher, backends, now, lambda: unready or (), budget or RetryBudget())


def failing(failure: Callable[[], Failure], seconds: float = 0.0) -> Scripted:
    return Scripted(refuse(lambda _: True, failure), seconds)


class Sequence(Scripted):
    """Fails as it is told, one call after the other, at once; then it answers after `seconds`."""

    def __init__(self, *failures: Failure, seconds: float = 0.0) -> None:
        super().__init__(seconds=seconds)
        self._failures = list(failures)

    async def __call__(self, request: Request, /) -> Reply:
        if self._failures:
            raise self._failures.pop(0)
        return await super().__call__(request)


def down() -> Failure:
    return Unreachable("refused")


def full() -> Failure:
    return Rejected("queue full")


def values(backend: Scripted) -> list[float]:
    """The rows that came, in order."""
    return [row for request in backend.requests for row in memoryview(_data(request)).cast("f")]


def _data(request: Request) -> bytes:
    return bytes(request.infer.inputs.decoded[0].data)


@pytest.mark.parametrize("failure", [down, full])
def test_a_batch_that_was_not_taken_goes_to_another_endpoint(failure: Callable[[], Failure]) -> None:
    async def main() -> None:
        bad, good = failing(failure), Scripted()
        dispatch = make(bad, good)
        replies = await asyncio.gather(*(ask(dispatch, call([i])) for i in range(4)))
        assert [first(reply) for reply in replies] == [[[i]] for i in range(4)]
        assert bad.rows == good.rows == [4]
        assert {reply.trail[0].retries for reply in replies} == {1}
        idle(dispatch)

    run(main())


def test_what_goes_back_goes_before_what_came_later() -> None:
    async def main() -> None:
        bad, good = failing(full, seconds=1.0), Scripted(seconds=0.4)
        dispatch = make(bad, good, max_rows=2, queue_time=9.0)
        tasks = [ask(dispatch, call([float(i)])) for i in range(2)]
        await settle()
        assert bad.running == 1
        tasks += [ask(dispatch, call([float(i)])) for i in range(2, 12)]
        await asyncio.gather(*tasks)
        # 2..7 went while the first two were with the bad one; then 0 and 1 went before the rest.
        assert values(good)[:8] == [2, 3, 4, 5, 6, 7, 0, 1]
        assert sorted(values(good)) == [float(i) for i in range(12)]
        idle(dispatch)

    run(main())


def test_it_waits_for_an_endpoint_that_was_not_tried_although_one_that_was_is_free() -> None:
    async def main() -> None:
        gate, bad = Gate(), failing(full)
        dispatch = make(gate, bad)
        stuck = ask(dispatch, call([1.0]))
        await settle()
        task = ask(dispatch, call([2.0]))
        await settle()
        assert bad.rows == [1]
        assert dispatch.dispatcher.waiting_rows == 1
        gate.open()
        assert first(await task) == [[2]]
        await stuck
        assert bad.rows == [1]
        idle(dispatch)

    run(main())


def test_it_ends_when_every_endpoint_was_tried() -> None:
    async def main() -> None:
        backends = [failing(full) for _ in range(3)]
        dispatch = make(*backends)
        with pytest.raises(Rejected):
            await ask(dispatch, call([1.0]))
        assert [backend.rows for backend in backends] == [[1], [1], [1]]
        idle(dispatch)

    run(main())


@pytest.mark.parametrize("known", [{1}, set()])
def test_nothing_is_sent_again_where_no_other_is_ready_or_the_budget_is_empty(known: set[int]) -> None:
    async def main() -> None:
        bad, other = failing(down), Scripted()
        budget = RetryBudget()
        while not known and budget.take():
            pass
        dispatch = make(bad, other, budget=budget, unready=known)
        results = await asyncio.gather(*(ask(dispatch, call([i])) for i in range(3)), return_exceptions=True)
        assert {type(result) for result in results} == {Unreachable}
        assert other.rows == []
        idle(dispatch)

    run(main())


def test_a_batch_that_was_lost_is_not_sent_again() -> None:
    async def main() -> None:
        bad, other = failing(lambda: ConnectionLost("gone")), Scripted()
        dispatch = make(bad, other)
        with pytest.raises(ConnectionLost):
            await ask(dispatch, call([1.0]))
        assert other.rows == []

    run(main())


def test_who_left_or_is_too_late_is_not_sent_again() -> None:
    async def main() -> None:
        bad, good = failing(down, seconds=0.5), Scripted()
        dispatch = make(bad, good)
        stays, leaves = ask(dispatch, call([1.0])), ask(dispatch, call([2.0]))
        late = ask(dispatch, call([3.0]), deadline=0.3)
        await settle()
        leaves.cancel()
        assert first(await stays) == [[1]]
        with pytest.raises(Unreachable):
            await late
        assert good.rows == [1]
        assert leaves.cancelled()
        idle(dispatch)

    run(main())


def test_a_caller_may_leave_after_its_entry_went_back() -> None:
    async def main() -> None:
        gate, bad = Gate(), failing(full)
        dispatch = make(gate, bad)
        stuck = ask(dispatch, call([1.0]))
        await settle()
        leaves, stays = ask(dispatch, call([2.0])), ask(dispatch, call([3.0]))
        await settle()
        leaves.cancel()
        await settle()
        gate.open()
        assert first(await stays) == [[3]]
        await stuck
        assert gate.rows == [1, 1]
        idle(dispatch)

    run(main())


@pytest.mark.parametrize("callers", [1, 2])
def test_a_caller_may_leave_in_the_very_turn_in_which_its_time_is_up(callers: int) -> None:
    """The slot of the batch that it went back from was given back then, and is not given back again."""

    async def main() -> None:
        gate, bad = Gate(), failing(full)
        dispatch = make(gate, bad, queue_time=0.2)
        stuck = ask(dispatch, call([9.0]))
        await settle()
        tasks = [ask(dispatch, call([float(i)])) for i in range(callers)]
        await settle()
        assert (bad.rows, dispatch.dispatcher.waiting_rows) == ([callers], callers)
        for task in tasks:
            asyncio.get_running_loop().call_later(0.3, task.cancel)
        stall(0.4)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        assert dispatch.dispatcher.free == [0, 1]
        gate.open()
        await stuck
        idle(dispatch)

    run(main())


def test_what_the_first_half_of_a_batch_puts_back_does_not_wait_for_the_second() -> None:
    async def main() -> None:
        bad, good = Sequence(BackendFailed("bad", 500), Rejected("full"), seconds=3.0), Scripted()
        dispatch = make(bad, good, queue_time=60.0)
        tasks = [ask(dispatch, call([float(i)])) for i in range(4)]
        await asyncio.gather(*tasks[:2])
        assert asyncio.get_running_loop().time() == 0.0
        assert (bad.running, good.rows) == (1, [2])
        await asyncio.gather(*tasks[2:])
        idle(dispatch)

    run(main())


def test_who_waits_for_another_endpoint_is_in_nobodys_way() -> None:
    async def main() -> None:
        gate, busy = Gate(), Sequence(Rejected("full for a moment"))
        dispatch = make(gate, busy, max_rows=1)
        stuck = ask(dispatch, call([1.0]))
        await settle()
        waits = ask(dispatch, call([2.0]))
        await settle()
        assert dispatch.dispatcher.waiting_rows == 1
        assert first(await ask(dispatch, call([3.0]))) == [[3]]
        assert values(busy) == [3]
        gate.open()
        assert first(await waits) == [[2]]
        await stuck
        idle(dispatch)

    run(main())


def test_an_endpoint_that_is_waited_for_and_found_to_be_down_is_waited_for_no_more() -> None:
    async def main() -> None:
        gate, busy = Gate(), Sequence(Rejected("full for a moment"))
        unready: set[int] = set()
        dispatch = make(gate, busy, unready=unready, queue_time=20.0)
        stuck = ask(dispatch, call([1.0]))
        await settle()
        waits = ask(dispatch, call([2.0]))
        await asyncio.sleep(0.25)
        assert dispatch.dispatcher.waiting_rows == 1
        unready.add(0)
        assert first(await waits) == [[2]]
        assert asyncio.get_running_loop().time() < 0.4
        gate.open()
        await stuck
        idle(dispatch)

    run(main())


def test_retries_earn_no_retries() -> None:
    async def main() -> None:
        spent: list[int] = []
        bad = [failing(full) for _ in range(3)]
        dispatch = make(*bad, Scripted(), budget=RetryBudget(lambda: spent.append(1)), queue_time=9.0)
        for _ in range(500):
            await asyncio.gather(ask(dispatch, call([1.0])), return_exceptions=True)
        assert 100 <= len(spent) <= 500 / 5 + 10
        idle(dispatch)

    run(main())


def test_work_waits_for_the_endpoint_that_is_ready() -> None:
    async def main() -> None:
        gate, dead = Gate(), failing(down)
        dispatch = make(gate, dead, unready={1})
        tasks = [ask(dispatch, call([i])) for i in range(3)]
        await settle()
        more = [ask(dispatch, call([i])) for i in range(3)]
        await settle()
        gate.open()
        await asyncio.gather(*tasks, *more)
        assert dead.rows == []
        assert gate.rows == [3, 3]
        idle(dispatch)

    run(main())


def test_what_waits_finds_an_endpoint_that_is_ready_again() -> None:
    async def main() -> None:
        gate, healed = Gate(), Scripted()
        unready = {1}
        dispatch = make(gate, healed, unready=unready)
        stuck = ask(dispatch, call([1.0]))
        await settle()
        waits = ask(dispatch, call([2.0]))
        await asyncio.sleep(0.25)
        assert healed.rows == []
        unready.clear()
        assert first(await waits) == [[2]]
        assert asyncio.get_running_loop().time() < 0.4
        gate.open()
        await stuck
        idle(dispatch)

    run(main())

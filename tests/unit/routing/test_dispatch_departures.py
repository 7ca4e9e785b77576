"""Callers that leave, at any moment: others keep their answers, slots come back, nothing is left behind."""

import asyncio
import random

import pytest

from backends.errors import BadReply, ConnectionLost, Rejected
from backends.request import Reply, Request
from tests.support.dispatching import ask, busy, first, idle, make, no, short
from tests.support.loop import run, settle
from tests.support.services import Gate, Scripted, echo, refuse, undecodable
from tests.support.strategies import call, rows_of


def test_a_queued_caller_takes_only_its_own_row() -> None:
    async def main() -> None:
        gate = Gate()
        dispatch = make(gate)
        tasks = [await busy(dispatch), *(ask(dispatch, call([i])) for i in range(3))]
        await settle()
        tasks[2].cancel()
        await settle()
        assert dispatch.dispatcher.waiting_rows == 2
        gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [Reply, Reply, asyncio.CancelledError, Reply]
        assert gate.rows == [1, 2]
        idle(dispatch)

    run(main())


def test_a_caller_in_flight_takes_only_its_own_row() -> None:
    async def main() -> None:
        gate = Gate()
        dispatch = make(gate)
        tasks = [ask(dispatch, call([i])) for i in range(3)]
        await settle()
        tasks[1].cancel()
        await settle()
        assert gate.running == 1
        gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [Reply, asyncio.CancelledError, Reply]
        assert first(results[2]) == [[2]]  # type: ignore[arg-type]
        idle(dispatch)

    run(main())


def test_a_batch_that_nobody_waits_for_is_cancelled_at_once() -> None:
    async def main() -> None:
        gate = Gate()
        dispatch = make(gate)
        tasks = [ask(dispatch, call([i])) for i in range(3)]
        await settle()
        for task in tasks:
            task.cancel()
        await settle()
        assert (gate.cancelled, gate.running) == (1, 0)
        idle(dispatch)
        await asyncio.gather(*tasks, return_exceptions=True)
        gate.open()
        assert first(await ask(dispatch, call([5]))) == [[5]]

    run(main())


def test_a_caller_that_leaves_just_as_its_batch_is_made() -> None:
    """The batch's task is cancelled before its first step: its slot must come back all the same."""

    async def main() -> None:
        for turns in range(6):
            backend = Scripted(seconds=1.0)
            dispatch = make(backend)
            tasks = [ask(dispatch, call([i])) for i in range(2)]
            await settle(turns)
            for task in tasks:
                asyncio.get_running_loop().call_soon(task.cancel)
            await asyncio.gather(*tasks, return_exceptions=True)
            await settle()
            idle(dispatch)
            assert backend.running == 0
            assert first(await ask(dispatch, call([5]))) == [[5]]

    run(main())


def test_the_rest_of_a_batch_that_nobody_waits_for_is_cancelled_although_a_part_was_answered() -> None:
    async def main() -> None:
        gate = Gate()

        async def backend(request: Request) -> Reply:
            block = rows_of(request.infer.inputs.decoded[0])
            if len(block) > 1:
                raise no()
            return await gate(request) if block == [[2]] else echo(request)

        dispatch = make(backend)
        answered, left = ask(dispatch, call([1])), ask(dispatch, call([2]))
        assert first(await answered) == [[1]]
        await settle()
        assert gate.running == 1
        left.cancel()
        await settle()
        assert (gate.cancelled, gate.running) == (1, 0)
        idle(dispatch)
        await asyncio.gather(left, return_exceptions=True)

    run(main())


def test_who_left_is_not_run_again() -> None:
    async def main() -> None:
        gate = Gate(refuse(lambda request: len(rows_of(request.infer.inputs.decoded[0])) > 1, no))
        dispatch = make(gate)
        tasks = [ask(dispatch, call([i])) for i in range(4)]
        await settle()
        tasks[0].cancel()
        tasks[3].cancel()
        await settle()
        gate.open()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.rows == [4, 1, 1]
        idle(dispatch)

    run(main())


@pytest.mark.parametrize("seed", range(20))
def test_a_storm_of_departures_leaves_nothing(seed: int) -> None:
    async def main() -> None:
        chance = random.Random(seed)

        def answer(request: Request) -> Reply:
            if chance.random() < 0.2:
                raise chance.choice([no(), Rejected("busy"), ConnectionLost("gone"), BadReply("odd")])
            return short(echo(request)) if chance.random() < 0.1 else echo(request)

        backends = [Scripted(answer, seconds=seconds) for seconds in (0.0, 0.01, 0.05)]
        dispatch = make(*backends, max_rows=4, slots=2, queue_rows=20, queue_time=0.1)
        tasks: list[asyncio.Task[Reply]] = []
        for i in range(200):
            deadline = asyncio.get_running_loop().time() + chance.choice([0.001, 0.02, 0.2])
            infer = undecodable((1, 1)) if chance.random() < 0.05 else call(*[[float(i)]] * chance.randint(1, 5))
            tasks.append(ask(dispatch, infer, deadline=deadline))
            if chance.random() < 0.4:
                asyncio.get_running_loop().call_later(chance.random() * 0.05, chance.choice(tasks).cancel)
            if chance.random() < 0.3:
                await asyncio.sleep(chance.choice([0.0, 0.0, 0.003]))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await settle()
        idle(dispatch)
        assert max(backend.most for backend in backends) <= 2
        assert sum(backend.running for backend in backends) == 0
        for i, result in enumerate(results):
            if isinstance(result, Reply):
                assert {row[0] for row in first(result)} == {i}

    run(main())

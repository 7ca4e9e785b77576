"""Dispatch in virtual time: what callers get, what the backend sees, and that nothing is left behind."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from backends.errors import BackendFailed, BadReply, BadRequest, ConnectionLost, Expired, Rejected, Unreachable
from backends.request import Answer, Infer, Reply, Request, Tensors
from backends.tensor import Tensor
from tests.support.dispatching import ask, bad_row, busy, first, idle, make, no, short
from tests.support.loop import run, settle
from tests.support.services import Gate, Scripted, echo, refuse, undecodable
from tests.support.strategies import by_binary, by_grpc, by_json, call, fp32, plains

# Sharing


def test_callers_of_every_wire_share_a_batch() -> None:
    async def main() -> None:
        backend = Scripted()
        dispatch = make(backend)
        forms = [by_json(call([1, 2])), by_binary(call([3, 4], [5, 6])), by_grpc(call([7, 8])), call([9, 10])]
        replies = await asyncio.gather(*(ask(dispatch, form) for form in forms))
        assert [first(reply) for reply in replies] == [[[1, 2]], [[3, 4], [5, 6]], [[7, 8]], [[9, 10]]]
        assert backend.rows == [5]
        (merged,) = backend.requests
        assert [origin.rows for origin in merged.origins] == [1, 2, 1, 1]
        for reply, rows in zip(replies, (1, 2, 1, 1), strict=True):
            (hop,) = reply.trail
            assert (hop.rows, hop.batch_rows, hop.endpoint) == (tuple(range(rows)), 5, "fake")
        idle(dispatch)

    run(main())


def test_a_call_alone_goes_as_the_very_bytes() -> None:
    async def main() -> None:
        backend = Scripted(lambda _: Reply(Answer(Tensors.of((fp32("y", [[1]]),)))))
        infer = by_json(call([1]))
        await ask(make(backend), infer)
        assert backend.requests[0].infer is infer

    run(main())


@pytest.mark.parametrize(
    "other",
    [
        {"infer": call([1], parameters={"a": 1})},
        {"infer": call([1, 2])},
        {"infer": call([1]), "model": "n"},
        {"infer": call([1]), "version": "2"},
    ],
)
def test_what_differs_never_shares(other: dict[str, Any]) -> None:
    async def main() -> None:
        backend = Scripted()
        dispatch = make(backend)
        infer = other.pop("infer")
        alike = asyncio.ensure_future(dispatch(Request(**{"model": "m", "content": infer, **other})))
        await asyncio.gather(ask(dispatch, call([1])), ask(dispatch, call([1])), alike)
        assert sorted(backend.rows) == [1, 2]
        assert {request.model for request in backend.requests} <= {"m", "n"}

    run(main())


def test_a_merged_request_has_the_latest_deadline_and_no_callers_headers() -> None:
    async def main() -> None:
        backend = Scripted()
        dispatch = make(backend)
        await asyncio.gather(
            ask(dispatch, call([1]), deadline=5.0, headers={"a": "1"}, span="s1"),
            ask(dispatch, call([2]), deadline=9.0, span="s2"),
        )
        (merged,) = backend.requests
        assert (merged.deadline, merged.span) == (9.0, None)
        assert (dict(merged.headers), [origin.span for origin in merged.origins]) == ({}, ["s1", "s2"])

    run(main())


def test_a_batch_grows_while_all_slots_are_busy() -> None:
    async def main() -> None:
        backend = Scripted(seconds=1.0)
        dispatch = make(backend, max_rows=8, queue_time=9.0)
        tasks = [await busy(dispatch)]
        for i in range(10):
            await asyncio.sleep(0.05)
            tasks.append(ask(dispatch, call([i])))
        replies = await asyncio.gather(*tasks)
        assert backend.rows == [1, 8, 2]
        assert [first(reply) for reply in replies[1:]] == [[[i]] for i in range(10)]
        assert replies[1].trail[0].queued == pytest.approx(0.95)
        assert replies[1].trail[0].service == pytest.approx(1.0)
        assert replies[1].trail[0].reason == "full"

    run(main())


def test_a_slow_batch_does_not_delay_the_next() -> None:
    async def main() -> None:
        slow, quick = Gate(), Scripted(seconds=0.1)
        dispatch = make(slow, quick)
        stuck = ask(dispatch, call([1]))
        await settle()
        assert first(await ask(dispatch, call([2]))) == [[2]]
        assert asyncio.get_running_loop().time() == pytest.approx(0.1)
        slow.open()
        assert first(await stuck) == [[1]]
        idle(dispatch)

    run(main())


def test_an_over_size_call_passes_alone() -> None:
    async def main() -> None:
        backend = Scripted()
        dispatch = make(backend, max_rows=4)
        block = [[float(i)] for i in range(11)]
        replies = await asyncio.gather(ask(dispatch, call([1])), ask(dispatch, call(*block)), ask(dispatch, call([2])))
        assert first(replies[1]) == block
        assert backend.rows == [1, 11, 1]

    run(main())


@pytest.mark.parametrize("shape", [(), (0,), (0, 3)])
def test_calls_without_rows_pass_alone(shape: tuple[int, ...]) -> None:
    async def main() -> None:
        backend = Scripted()
        dispatch = make(backend)
        infer = Infer(Tensors.of((Tensor("x", "INT8", shape, b"\1" if shape == () else b""),)))
        replies = await asyncio.gather(*(ask(dispatch, infer) for _ in range(3)))
        assert [plains(reply.answer) for reply in replies] == [plains(infer)] * 3
        assert len(backend.requests) == 3
        idle(dispatch)

    run(main())


def test_a_sequence_is_never_merged() -> None:
    async def main() -> None:
        backend = Scripted()
        dispatch = make(backend)
        await asyncio.gather(*(ask(dispatch, call([i], parameters={"sequence_id": 7})) for i in range(3)))
        assert backend.rows == [1, 1, 1]

    run(main())


# Failures


def test_one_bad_row_fails_alone() -> None:
    async def main() -> None:
        backend = Scripted(refuse(bad_row, no))
        dispatch = make(backend, max_rows=8)
        tasks = [ask(dispatch, call([-1.0 if i == 5 else i])) for i in range(8)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [i for i, result in enumerate(results) if isinstance(result, BaseException)] == [5]
        assert isinstance(results[5], BackendFailed)
        assert backend.rows == [8, 4, 4, 2, 1, 1, 2]
        assert backend.most == 1
        hop = results[4].trail[0]  # type: ignore[union-attr]
        assert hop.batch_rows == 1
        idle(dispatch)

    run(main())


def test_what_a_backend_says_beside_a_failure_is_for_a_single_caller() -> None:
    def down() -> BackendFailed:
        return BackendFailed("down", 503, headers=(("x", "1"),))

    async def main() -> None:
        dispatch = make(Scripted(refuse(lambda request: True, down)), max_rows=2)
        for callers, told in ((1, (("x", "1"),)), (2, ())):
            tasks = [ask(dispatch, call([float(i)])) for i in range(callers)]
            for failure in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(failure, BackendFailed)
                assert failure.headers == told
        idle(dispatch)

    run(main())


def test_a_row_that_only_the_endpoint_can_read_fails_alone() -> None:
    async def main() -> None:
        dispatch = make(Scripted(refuse(bad_row, lambda: BadRequest("input 'x': row 0 is not UTF-8"))), max_rows=4)
        tasks = [ask(dispatch, call([-1.0 if i == 2 else i])) for i in range(4)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, BadRequest) for result in results] == [False, False, True, False]
        idle(dispatch)

    run(main())


def test_a_wrong_row_count_is_run_again_singly() -> None:
    async def main() -> None:
        backend = Scripted(lambda request: short(echo(request)))
        dispatch = make(backend)
        replies = await asyncio.gather(*(ask(dispatch, call([i])) for i in range(4)))
        assert [first(reply) for reply in replies] == [[[i]] for i in range(4)]
        with pytest.raises(BadReply, match="expected 2 rows"):
            await ask(dispatch, call([1], [2]))
        idle(dispatch)

    run(main())


def test_an_undecodable_body_fails_alone() -> None:
    async def main() -> None:
        backend = Scripted()
        dispatch = make(backend)
        tasks = [ask(dispatch, infer) for infer in (call([1, 2]), undecodable(), call([3, 4]))]
        good, bad, fine = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(bad, BadRequest)
        assert first(good) == [[1, 2]]  # type: ignore[arg-type]
        assert first(fine) == [[3, 4]]  # type: ignore[arg-type]
        assert backend.rows == [2]
        idle(dispatch)

    run(main())


@pytest.mark.parametrize(
    "failure",
    [
        lambda: Rejected("busy"),
        lambda: Unreachable("down"),
        lambda: Expired("backend"),
        lambda: ConnectionLost("gone"),
        lambda: KeyError("a defect"),
    ],
)
def test_what_would_not_help_is_not_run_again(failure: Callable[[], Exception]) -> None:
    async def main() -> None:
        backend = Scripted(refuse(lambda _: True, failure))
        dispatch = make(backend)
        tasks = [ask(dispatch, call([i])) for i in range(4)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {type(failure())}
        assert backend.rows == [4]
        idle(dispatch)

    run(main())


# Limits


def test_the_queue_is_bounded() -> None:
    async def main() -> None:
        gate = Gate()
        dispatch = make(gate, queue_rows=3)
        tasks = [await busy(dispatch), *(ask(dispatch, call([i])) for i in range(3))]
        await settle()
        with pytest.raises(Rejected, match="queue full: 3 rows wait, limit 3"):
            await ask(dispatch, call([9]))
        gate.open()
        await asyncio.gather(*tasks)
        idle(dispatch)

    run(main())


def test_limits_fire_on_time_while_the_backend_is_busy() -> None:
    async def main() -> None:
        gate = Gate()
        dispatch = make(gate, queue_time=1.0)
        stuck = await busy(dispatch)
        time = asyncio.get_running_loop().time
        hurried = ask(dispatch, call([1]), deadline=0.25)
        patient = ask(dispatch, call([2]))
        with pytest.raises(Expired, match="deadline exceeded in queue after 250 ms") as caught:
            await hurried
        assert caught.value.where == "queue"
        assert time() == pytest.approx(0.25, abs=0.002)
        with pytest.raises(Rejected, match=r"waited 100[01] ms in the queue, limit 1000 ms"):
            await patient
        assert time() == pytest.approx(1.0, abs=0.002)
        gate.open()
        await stuck
        assert gate.rows == [1]
        idle(dispatch)

    run(main())


def test_a_later_arrival_with_an_earlier_limit_is_in_time() -> None:
    async def main() -> None:
        gate = Gate()
        dispatch = make(gate)
        stuck = await busy(dispatch)
        patient = ask(dispatch, call([1]))
        await asyncio.sleep(0.1)
        with pytest.raises(Expired):
            await ask(dispatch, call([2]), deadline=0.2)
        assert asyncio.get_running_loop().time() == pytest.approx(0.2, abs=0.002)
        gate.open()
        await asyncio.gather(stuck, patient)

    run(main())

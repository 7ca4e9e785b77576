"""The pool: at most so many run and so many wait; deadlines, callers that leave, and the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from backends.errors import Expired, Rejected, Unreachable
from backends.local.pool import Pool
from tests.support.loop import settle

SOON = 0.02


class Work:
    """Jobs that run until they are let go, and what was run by whom."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.ran: list[tuple[str, str]] = []
        self.running = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, name: str) -> Callable[[], str]:
        def job() -> str:
            with self._lock:
                self.ran.append((name, threading.current_thread().name))
                self.running += 1
                self.most = max(self.most, self.running)
            assert self.gate.wait(10)
            with self._lock:
                self.running -= 1
            return name

        return job

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.ran]


def running(test: Callable[[Pool, Work], Coroutine[Any, Any, None]], threads: int = 1, queue: int = 2) -> None:
    async def main() -> None:
        work, pool = Work(), Pool("test-pool", threads, queue, time.monotonic)
        try:
            await test(pool, work)
        finally:
            work.gate.set()
            await asyncio.wait_for(pool.close(), 10)

    asyncio.run(main(), debug=False)


def test_so_many_run_and_the_rest_wait_for_their_turn() -> None:
    async def test(pool: Pool, work: Work) -> None:
        jobs = [asyncio.create_task(pool.run(work(str(i)))) for i in range(4)]
        await settle()
        assert (pool.running, pool.waiting) == (2, 2)
        work.gate.set()
        assert await asyncio.gather(*jobs) == ["0", "1", "2", "3"]
        assert (pool.running, pool.waiting) == (0, 0)
        assert work.most <= 2
        assert sorted(work.names) == ["0", "1", "2", "3"]
        assert {thread for _, thread in work.ran} <= {"test-pool_0", "test-pool_1"}

    running(test, threads=2)


def test_what_the_queue_does_not_hold_is_rejected_and_never_run() -> None:
    async def test(pool: Pool, work: Work) -> None:
        jobs = [asyncio.create_task(pool.run(work(str(i)))) for i in range(3)]
        await settle()
        with pytest.raises(Rejected, match="test-pool: 2 calls wait for a thread, limit 2"):
            await pool.run(work("beyond"))
        work.gate.set()
        await asyncio.gather(*jobs)
        assert work.names == ["0", "1", "2"]

    running(test)


def test_a_job_whose_deadline_passes_in_the_queue_is_not_run() -> None:
    async def test(pool: Pool, work: Work) -> None:
        first = asyncio.create_task(pool.run(work("first")))
        await settle()
        with pytest.raises(Expired) as told:
            await pool.run(work("late"), time.monotonic() + SOON)
        assert told.value.where == "queue"
        assert pool.waiting == 0
        with pytest.raises(Expired):
            await pool.run(work("too late already"), time.monotonic() - 1)
        work.gate.set()
        assert await first == "first"
        assert work.names == ["first"]

    running(test)


def test_a_deadline_that_nobody_had_time_to_notice_is_noticed_when_a_thread_is_free() -> None:
    async def main() -> None:
        now, work = [0.0], Work()
        pool = Pool("test-pool", 1, 2, lambda: now[0])
        first = asyncio.create_task(pool.run(work("first"), 100))
        late = asyncio.create_task(pool.run(work("late"), 50))
        await settle()
        now[0] = 60
        work.gate.set()
        assert await first == "first"
        with pytest.raises(Expired):
            await late
        assert work.names == ["first"]
        await pool.close()

    asyncio.run(main())


def test_a_caller_that_leaves_takes_its_waiting_job_along() -> None:
    async def test(pool: Pool, work: Work) -> None:
        first, left = (asyncio.create_task(pool.run(work(name))) for name in ("first", "left"))
        await settle()
        left.cancel()
        await settle()
        assert left.cancelled()
        assert pool.waiting == 0
        work.gate.set()
        await first
        assert work.names == ["first"]

    running(test)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_running_job_is_not_waited_for_but_keeps_its_thread(leaves: bool) -> None:
    async def test(pool: Pool, work: Work) -> None:
        deadline = float("inf") if leaves else time.monotonic() + SOON
        job = asyncio.create_task(pool.run(work("first"), deadline))
        await settle()
        if leaves:
            job.cancel()
        outcome = (await asyncio.gather(job, return_exceptions=True))[0]
        assert isinstance(outcome, asyncio.CancelledError if leaves else Expired)
        if isinstance(outcome, Expired):
            assert outcome.where == "backend"
        following = asyncio.create_task(pool.run(work("second")))
        await settle()
        assert (pool.running, pool.waiting) == (1, 1)
        work.gate.set()
        assert await following == "second"
        assert pool.running == 0

    running(test)


def test_what_a_job_raises_is_its_callers() -> None:
    async def test(pool: Pool, work: Work) -> None:
        def broken() -> None:
            raise ZeroDivisionError("no")

        with pytest.raises(ZeroDivisionError, match="no"):
            await pool.run(broken)
        work.gate.set()
        assert await pool.run(work("next")) == "next"

    running(test)


def test_an_error_that_nobody_waits_for_is_nobodys() -> None:
    async def test(pool: Pool, work: Work) -> None:
        def broken() -> None:
            work.gate.wait(10)
            raise ZeroDivisionError

        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        with pytest.raises(Expired):
            await pool.run(broken, time.monotonic() + SOON)
        work.gate.set()
        await pool.close()
        assert told == []

    running(test)


def test_closing_waits_for_what_runs_refuses_the_rest_and_leaves_no_thread() -> None:
    async def test(pool: Pool, work: Work) -> None:
        jobs = [asyncio.create_task(pool.run(work(str(i)))) for i in range(3)]
        await settle()
        closing = asyncio.create_task(pool.close())
        await settle()
        assert not closing.done()
        with pytest.raises(Unreachable, match="closed"):
            await pool.run(work("later"))
        work.gate.set()
        await closing
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        assert outcomes[0] == "0"
        assert all(isinstance(outcome, Unreachable) for outcome in outcomes[1:])
        assert work.names == ["0"]
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("test-pool")]

    running(test)


def test_a_pool_that_was_never_used_has_no_thread() -> None:
    async def test(pool: Pool, work: Work) -> None:
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("test-pool")]
        await pool.close()
        await pool.close()

    running(test)

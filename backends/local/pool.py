"""Threads for work that would hold up the event loop, with a bounded queue in front of them.

Theory of operation. The loop decides and the threads compute: a job is given to a thread only when one is free, so that
whatever waits is in a queue of the loop's own, and can be refused, expire or be taken out there without a lock. A job
that runs cannot be stopped: its caller is told at the deadline, or leaves, and the thread stays taken until the job
ends. Each hand-over costs two wake-ups, some tens of microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from backends.errors import Expired, Rejected, Unreachable

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    deadline: float
    result: asyncio.Future[Any]
    started: bool = False
    # Nobody waits for it any more.
    left: bool = False


class Pool:
    """Runs at most `threads` jobs at once, on threads named `name_0` and so on, and keeps at most `queue` waiting."""

    def __init__(self, name: str, threads: int, queue: int, now: Callable[[], float]) -> None:
        self.running = 0
        self._name = name
        self._threads = threads
        self._most = queue
        self._now = now
        self._queue: deque[_Job] = deque()
        # Makes its threads when there is work for them.
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._closed = False
        self._ending = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def run(self, work: Callable[[], _T], deadline: float = math.inf) -> _T:
        """What `work` returns or raises. Raises Rejected where the queue is full, Expired at the deadline.

        A job whose deadline passes, or whose caller leaves, while it waits is never run.
        """
        if self._closed:
            raise Unreachable(f"{self._name}: closed")
        if deadline <= self._now():
            raise Expired("queue")
        job = _Job(work, deadline, asyncio.get_running_loop().create_future())
        if self.running < self._threads:
            self._start(job)
        elif len(self._queue) >= self._most:
            raise Rejected(f"{self._name}: {len(self._queue)} calls wait for a thread, limit {self._most}")
        else:
            self._queue.append(job)
        try:
            done, _ = await asyncio.wait({job.result}, timeout=None if deadline == math.inf else deadline - self._now())
        finally:
            job.left = True
            if not job.started and job in self._queue:
                self._queue.remove(job)
        if not done:
            raise Expired("backend" if job.started else "queue")
        result: _T = job.result.result()
        return result

    async def close(self) -> None:
        """Refuses what waits and what comes; returns when what runs has ended and no thread is left."""
        self._closed = True
        while self._queue:
            _fail(self._queue.popleft(), Unreachable(f"{self._name}: closed"))
        if self.running:
            await self._ending.wait()
        # Every thread is idle: this takes no longer than their ends.
        self._executor.shutdown()

    def _start(self, job: _Job) -> None:
        job.started = True
        self.running += 1
        loop = asyncio.get_running_loop()

        def ended(outcome: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed before the job ended
                loop.call_soon_threadsafe(partial(self._ended, job, outcome))

        self._executor.submit(job.work).add_done_callback(ended)

    def _ended(self, job: _Job, outcome: Future[Any]) -> None:
        self.running -= 1
        error = outcome.exception()
        if error is not None:
            _fail(job, error)
        elif not job.left:
            job.result.set_result(outcome.result())
        while self._queue and self.running < self._threads:
            following = self._queue.popleft()
            if following.deadline <= self._now():
                _fail(following, Expired("queue"))
            else:
                self._start(following)
        if self._closed and not self.running:
            self._ending.set()


def _fail(job: _Job, error: BaseException) -> None:
    if not job.left:
        job.result.set_exception(error)

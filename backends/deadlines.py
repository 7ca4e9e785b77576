"""`asyncio.timeout_at` for very many blocks: one timer for all of them, and one way to end them all."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

# Loop timers have whole-millisecond grain and round: this much later, none fires before its time.
GRAIN = 0.001


class Deadlines:
    """`with deadlines.until(when):` raises TimeoutError where the block is not over at `when`, as asyncio.timeout does.

    One timer for all blocks stands at the earliest deadline and, when it fires, looks through those that are open: a
    block whose deadline is not the earliest costs a comparison, where a timer each would be made and cancelled.

    `cut` ends every block as if its time were over, and each that is entered later at its begin; `was_cut` tells the
    two ends apart.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.was_cut = False
        self._now = now
        self._open: set[_Until] = set()
        self._next = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def until(self, when: float) -> _Until:
        """`when` in seconds on the clock; infinite: never."""
        return _Until(self, when)

    def cut(self) -> None:
        self.was_cut = True
        for block in self._open:
            block.expire()
        self._open.clear()

    def add(self, block: _Until) -> None:
        if self.was_cut:
            raise TimeoutError
        self._open.add(block)
        if block.when < self._next:
            self._set(block.when)

    def drop(self, block: _Until) -> None:
        self._open.discard(block)

    def _set(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = when
        self._timer = asyncio.get_running_loop().call_later(max(0.0, when - self._now()) + GRAIN, self._ring)

    def _ring(self) -> None:
        self._timer, self._next = None, math.inf
        now = self._now()
        for block in [block for block in self._open if block.when <= now]:
            self._open.discard(block)
            block.expire()
        soonest = min((block.when for block in self._open), default=math.inf)
        if soonest < math.inf:
            self._set(soonest)


class _Until:
    __slots__ = ("_all", "_cancelling", "_expired", "_task", "when")

    def __init__(self, deadlines: Deadlines, when: float) -> None:
        self._all = deadlines
        self.when = when
        self._expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._all.add(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._all.drop(self)
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        self._expired = True
        self._task.cancel()

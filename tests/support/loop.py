"""An event loop whose time is virtual: it jumps to the next timer instead of sleeping, so that tests take no time.

    def test_something():
        async def main(): ...
        run(main())

A loop with nothing ready and no timer would sleep for ever: that is an error at once, and so is a task left behind.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Selector(selectors.SelectSelector):
    """Waits for nothing: what it was asked to wait is added to `elapsed`."""

    elapsed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("everything waits for something that nobody will do")
            self.elapsed += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual, in seconds from 0. Only for code without sockets and threads."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.elapsed

    def stall(self, seconds: float) -> None:
        """The loop is held up: all that falls due meanwhile comes late, and in the same turn."""
        self._virtual.elapsed += seconds


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """`main` to its end in virtual time. Fails where tasks are left behind or the loop was told of an error."""
    told: list[dict[str, Any]] = []

    async def checked() -> _T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        result = await main
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"
        return result

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        result = runner.run(checked())
    assert not told, f"the loop was told of errors: {told}"
    return result


async def settle(turns: int = 10) -> None:
    """Lets everything that is ready run, without time passing."""
    for _ in range(turns):
        await asyncio.sleep(0)

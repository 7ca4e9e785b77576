"""Watching the files of a policy, at the price of small reads a few times a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies import Policy

_EVERY_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Source:
    """Where the policy comes from: how it is read (flags included), whether its files say something else now, where."""

    load: Callable[[], Policy]
    changed: Callable[[], bool]
    folder: Path


class Watch:
    """Calls `reload`, which reads the files again, whenever `changed` says so, until `close`.

    `report` hears of a defect in either; the watch goes on.
    """

    def __init__(
        self,
        changed: Callable[[], bool],
        reload: Callable[[], Awaitable[None]],
        report: Callable[[BaseException], None],
    ) -> None:
        self._changed = changed
        self._reload = reload
        self._report = report
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._forever())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """Looks now."""
        if self._changed():
            await self._reload()

    async def _forever(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            try:
                await self.look()
            except Exception as error:
                self._report(error)


def in_background(
    work: Callable[[], Coroutine[Any, Any, None]], report: Callable[[BaseException], None]
) -> Callable[[], None]:
    """A callback that starts `work`, and holds on to it until it has ended; `report` hears of what it raises."""
    running: set[asyncio.Task[None]] = set()

    def ended(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            report(error)

    def start() -> None:
        task = asyncio.get_running_loop().create_task(work())
        running.add(task)
        task.add_done_callback(ended)

    return start

"""Watching the policy file: by its content, so that every way of changing it counts.

An editor renames, Kubernetes swaps a symbolic link, a tool writes in place: reading the file by its name and comparing
what it says sees all of them, and misses none, at the price of one small read a few times a second.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

_EVERY_SECONDS = 0.25


class Watch:
    """Calls `changed` after the file at `path` says something else than `seen` (a `digest`), until `close`."""

    def __init__(self, path: Path, changed: Callable[[], Awaitable[None]], seen: bytes) -> None:
        self._path = path
        self._changed = changed
        self._seen = seen
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._forever())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """Looks now."""
        says = digest(self._path)
        if says != self._seen:
            self._seen = says
            await self._changed()

    async def _forever(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            await self.look()


def digest(path: Path) -> bytes:
    """What the file says, or that it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        return str(error.errno).encode()

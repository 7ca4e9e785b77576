"""Watching the files of a policy: by their content, so that every way of changing it counts.

An editor renames, Kubernetes swaps a symbolic link, a tool writes in place: reading the file by its name and comparing
what it says sees all of them, and misses none, at the price of a small read a few times a second.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

_EVERY_SECONDS = 0.25


class Watch:
    """Calls `changed` after one of the files says something else than it did before, until `close`.

    `files` gives them as they are now: what a policy includes may change with it.
    """

    def __init__(self, files: Callable[[], Iterable[Path]], changed: Callable[[], Awaitable[None]]) -> None:
        self._files = files
        self._changed = changed
        self._seen = self._said()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._forever())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """Looks now."""
        said = self._said()
        if said != self._seen:
            await self._changed()
            # A file that is new since then has just been read; one that changed meanwhile is seen at the next look.
            self._seen = {path: said.get(path, digest) for path, digest in self._said().items()}

    def _said(self) -> dict[Path, bytes]:
        return {path: _digest(path) for path in self._files()}

    async def _forever(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            await self.look()


def _digest(path: Path) -> bytes:
    """What the file says, or that it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        return str(error.errno).encode()

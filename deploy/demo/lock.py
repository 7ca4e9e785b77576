"""One process at a time per folder: a second one that prepares the same thing waits, then finds it done."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Holds an exclusive lock named after `folder` and beside it; the kernel frees it however its holder ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

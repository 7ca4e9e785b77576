"""One turn of load, as a process that its parent steers: it says `ready`, waits for a line, runs, prints the median.

Closed loop: CONCURRENCY callers, each of whom sends its next request when its last is answered. Everything is opened
and used once before `ready`, so that a turn pays for requests and not for connections.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from statistics import median

CONCURRENCY = 32
# Far above what a turn of the slowest stack takes; a turn that is not over by then hangs.
_WARM_SECONDS = 30
_RUN_SECONDS = 180


class Wrong(Exception):
    """A reply was not what the backend said."""


async def turn(warm: Callable[[], Awaitable[object]], run: Callable[[], Awaitable[list[float]]]) -> None:
    """`run` gives the seconds of each of its requests."""
    async with asyncio.timeout(_WARM_SECONDS):
        await warm()
    print("ready", flush=True)
    # Nothing is in the air: the loop may wait as well.
    if not sys.stdin.readline():
        return
    async with asyncio.timeout(_RUN_SECONDS):
        seconds = await run()
    print(median(seconds) * 1e3, flush=True)

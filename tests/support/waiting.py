"""Waiting for what another task, thread or process is about to do, and tells nobody of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(true: Callable[[], object], seconds: float = 5.0) -> float:
    """When `true` became so, on the monotonic clock; an AssertionError where it does not in time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.001)
    return time.monotonic()

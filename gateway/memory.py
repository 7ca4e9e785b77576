"""How the process keeps its memory small and steady: the C library's arenas, and what the cyclic collector looks at."""

from __future__ import annotations

import ctypes
import gc

# Parameters of <malloc.h>, by what they are there.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_SETTINGS = {
    # gRPC's threads would each get an arena, and what one has freed serves no other: under a long mixed load the
    # process grows for hours, with nothing in it. Two are no slower, for one thread does the work.
    _M_ARENA_MAX: 2,
    # Large bodies go back to the system when they are freed. By itself the C library raises this bound to the largest
    # that it has seen, and then keeps a hundred MiB between a few small objects.
    _M_MMAP_THRESHOLD: 1 << 20,
    # What is free at the heap's end, that would be asked for again at once.
    _M_TRIM_THRESHOLD: 8 << 20,
}


def settle() -> None:
    """To be called before there is any thread. Nothing happens where the C library has no such thing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _SETTINGS.items():
            mallopt(parameter, value)


def collect_seldom() -> None:
    """To be called once all that lives as long as the process has been made."""
    # The collector need not walk it for every request's garbage.
    gc.collect()
    gc.freeze()
    # A request leaves no cycles behind (tests/unit/gateway/test_garbage.py); a young generation that holds all that are
    # in flight is not walked again and again for nothing.
    gc.set_threshold(50_000, 10, 10)

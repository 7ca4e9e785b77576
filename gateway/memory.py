"""How the process keeps its memory small and steady: the C library's arenas, and what the cyclic collector looks at."""

from __future__ import annotations

import ctypes
import gc

# M_ARENA_MAX of <malloc.h>. gRPC's threads would each get an arena, and what one has freed serves no other: under a
# long mixed load the process grows for hours, with nothing in it. Two are no slower, for one thread does the work.
_M_ARENA_MAX = -8
_ARENAS = 2


def few_arenas() -> None:
    """To be called before there is any thread. Nothing happens where the C library has no such thing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)


def collect_seldom() -> None:
    """To be called once all that lives as long as the process has been made."""
    # The collector need not walk it for every request's garbage.
    gc.collect()
    gc.freeze()
    # A request leaves no cycles behind (tests/unit/gateway/test_garbage.py); a young generation that holds all that are
    # in flight is not walked again and again for nothing.
    gc.set_threshold(50_000, 10, 10)

"""What the kernel says of a TCP connection: why there is none, and what has arrived of what was sent on one."""

from __future__ import annotations

import os
import sys
from socket import IPPROTO_TCP, gaierror
from typing import Any

# getsockopt(TCP_INFO) of Linux: where the number of bytes that the peer's kernel has acknowledged stands. The first of
# them is the connection's own.
_TCP_INFO = 11
_ACKNOWLEDGED = slice(120, 128)


def nothing_arrived(socket: Any, before: int) -> bool:
    """Whether a peer that has just ended its side in good order had received nothing beyond the first `before` bytes.

    The segment that ends a connection acknowledges everything that had come by then; a reset need not, so this must not
    be asked after one. False also where the kernel does not tell.
    """
    if not sys.platform.startswith("linux"):
        return False
    told = socket.getsockopt(IPPROTO_TCP, _TCP_INFO, _ACKNOWLEDGED.stop)[_ACKNOWLEDGED]
    return len(told) == 8 and int.from_bytes(told, sys.byteorder) <= before + 1


def reason(error: Exception) -> str:
    """The operating system's words for a failed connect; asyncio's own name the address once more."""
    if isinstance(error, OSError) and error.errno and not isinstance(error, gaierror):
        return os.strerror(error.errno).lower()
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)

"""When a caller stops waiting: one rule for both edges.

`headrace-timeout-ms` (a decimal number above 0) and the KServe parameter `timeout` (whole microseconds, 0 for none)
both count from when a request arrives: over HTTP its head, over gRPC its message. The sooner one holds.
"""

from __future__ import annotations

import math
import re

from backends.errors import BadRequest
from backends.tensor import shown

_MILLISECONDS = re.compile(r"\d{1,9}(\.\d{1,6})?", re.ASCII)


def seconds(header: str | None, timeout_us: int | None = None) -> float:
    """How long the caller waits, in seconds; infinite where neither says. Raises BadRequest.

    `timeout_us` has been checked with the other reserved parameters.
    """
    wait = math.inf
    if header is not None:
        if not _MILLISECONDS.fullmatch(header) or float(header) == 0:
            raise BadRequest(f"headrace-timeout-ms: expected milliseconds above 0, got {shown(header)}")
        wait = float(header) / 1e3
    return min(wait, timeout_us / 1e6) if timeout_us else wait

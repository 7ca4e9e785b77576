"""What a caller is told: statuses for every failure, and headers that say what was decided.

One table maps the taxonomy of `backends.errors` to an HTTP status and a gRPC code, and a second one says what of it is
different under `compat: triton`: what a Triton 2.51 answers in that case. A backend's own status is kept on its own
protocol and translated on the other.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass

from backends.errors import (
    BackendFailed,
    BadReply,
    BadRequest,
    ConnectionLost,
    Expired,
    Failure,
    Forbidden,
    Malformed,
    NotFound,
    Rejected,
    SequenceLost,
    ShutDown,
    SlowCaller,
    TooLarge,
    TooSlow,
    UnknownEncoding,
    Unreachable,
    Unsupported,
    WrongMethod,
)
from backends.request import Metadata, Reply

Headers = tuple[tuple[str, str], ...]

_BUSY = (429, 503)  # HTTP statuses after which a client may come again

# failure: (HTTP status, gRPC code number)
_STATUS: dict[type[Failure], tuple[int, int]] = {
    BadRequest: (400, 3),  # INVALID_ARGUMENT
    Forbidden: (403, 7),  # PERMISSION_DENIED
    Malformed: (400, 3),
    NotFound: (404, 5),  # NOT_FOUND
    WrongMethod: (405, 12),  # UNIMPLEMENTED
    TooLarge: (413, 8),  # RESOURCE_EXHAUSTED
    UnknownEncoding: (415, 3),
    Unsupported: (501, 12),
    Rejected: (429, 8),
    Unreachable: (503, 14),  # UNAVAILABLE
    Expired: (504, 4),  # DEADLINE_EXCEEDED
    TooSlow: (504, 4),
    ShutDown: (503, 14),
    SlowCaller: (408, 4),
    ConnectionLost: (502, 14),
    SequenceLost: (409, 10),  # ABORTED: the caller has to begin again further up
    BadReply: (502, 13),  # INTERNAL
}
_INTERNAL = (500, 13)
_GRPC_OF_HTTP = {400: 3, 401: 16, 403: 7, 404: 5, 409: 10, 413: 8, 429: 8, 501: 12, 503: 14, 504: 4}
_HTTP_OF_GRPC = {
    1: 400, 3: 400, 4: 504, 5: 404, 6: 400, 7: 403, 8: 429, 9: 400, 10: 409, 11: 400, 12: 501, 14: 503, 16: 401,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Statuses:
    """How failures are told, on both protocols.

    `of` has an HTTP status and a gRPC code for each class, `http_of_grpc` the status of a gRPC backend's code; other
    classes and codes are internal errors. `unready` is the HTTP status of health where it says no. Error bodies are
    JSON, and said to be, except under the statuses in `as_text`.
    """

    of: Mapping[type[Failure], tuple[int, int]]
    http_of_grpc: Mapping[int, int]
    unready: int = 503
    as_text: frozenset[int] = frozenset()

    def http(self, failure: Failure) -> tuple[int, Headers]:
        """The HTTP status of a failure and the headers that belong to it (Retry-After, Allow)."""
        if isinstance(failure, BackendFailed):
            status = self.http_of_grpc.get(failure.status, 500) if failure.grpc else failure.status
            told = as_headers(failure.headers)
            busy = status in _BUSY and not any(name == "retry-after" for name, _ in told)
            return status, (*told, *((("retry-after", "1"),) if busy else ()), *_arm(failure))
        status = self.of.get(type(failure), _INTERNAL)[0]
        if isinstance(failure, WrongMethod):
            return status, (("allow", failure.allow),)
        return status, (*_retry_after(failure), *_arm(failure))

    def grpc(self, failure: Failure) -> tuple[int, str, Metadata]:
        """The gRPC code number of a failure, its message, and trailing metadata."""
        if isinstance(failure, BackendFailed):
            code = failure.status if failure.grpc else _GRPC_OF_HTTP.get(failure.status, 13)
            text = failure.message if failure.details is None else failure.details
            return code, text, (*failure.headers, *_arm(failure))
        return self.of.get(type(failure), _INTERNAL)[1], failure.message, (*_retry_after(failure), *_arm(failure))

    def content_type(self, status: int) -> bytes:
        """What an error body under an HTTP status is said to be."""
        return b"text/plain" if status in self.as_text else b"application/json"


HEADRACE = Statuses(_STATUS, _HTTP_OF_GRPC)
TRITON = Statuses(
    _STATUS
    | {
        Malformed: (500, 13),
        UnknownEncoding: (501, 12),
        Rejected: (503, 14),  # UNAVAILABLE: a full queue
        Expired: (503, 14),  # a request whose time was over before a model took it
    },
    # What has no place in Triton's own errors is as we have it.
    _HTTP_OF_GRPC | {2: 400},
    unready=400,
    as_text=frozenset({404, 405, 501}),
)
# By `listen.compat`.
STATUSES: Mapping[str, Statuses] = {"headrace": HEADRACE, "triton": TRITON}


# Of metadata, what would be taken for the response's own: that of its body, and gRPC's.
_NOT_HEADERS = ("content-", "inference-header-", "grpc-", "date", "expect", "host")


def as_headers(metadata: Metadata) -> Headers:
    """What a backend said beside its answer, as headers of an HTTP response; bytes become base64, as on HTTP/2."""
    return tuple(
        (name, value if isinstance(value, str) else b64encode(value).decode().rstrip("="))
        for name, value in metadata
        if not name.startswith(_NOT_HEADERS)
    )


def _arm(failure: Failure) -> Headers:
    return (("headrace-arm", failure.arm),) if failure.arm else ()


def _retry_after(failure: Failure) -> Headers:
    if isinstance(failure, Rejected | Unreachable | ShutDown):
        return (("retry-after", str(max(1, math.ceil(failure.retry_after)))),)
    return ()


def decision_headers(reply: Reply) -> Headers:
    """What was decided on the way, grouped: `headrace-tier: distilled=24,heavy=8`.

    Rows are told by the tier that answered them; a call that could not be divided counts as one row of its tier.
    """
    headers = []
    if reply.policy:
        headers.append(("headrace-policy", reply.policy))
    if reply.arm:
        headers.append(("headrace-arm", reply.arm))
    if reply.degraded:
        headers.append(("headrace-degraded", reply.degraded))
    tiers: dict[str, int] = {}
    batches = []
    hits = misses = 0
    queued = 0.0
    for hop in reply.trail:
        rows = len(hop.rows)
        if hop.tier and (rows or not hop.deferred):
            tiers[hop.tier] = tiers.get(hop.tier, 0) + (rows or 1)
        if hop.cached:
            hits += rows
        else:
            misses += rows
        if hop.batch_rows:
            batches.append(hop.batch_rows)
        queued += hop.queued
    if tiers:
        headers.append(("headrace-tier", ",".join([f"{tier}={rows}" for tier, rows in tiers.items()])))
    if hits or (reply.cacheable and reply.trail):
        headers.append(("headrace-cache", f"hit={hits},miss={misses}"))
    if batches:
        headers.append(("headrace-batch", ",".join(map(str, batches))))
        headers.append(("headrace-queue-ms", f"{queued * 1e3:.1f}"))
    return tuple(headers)

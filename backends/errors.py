"""Everything that can go wrong with a request, as one taxonomy.

A message is one line: what was expected, what came, where. `gateway/respond.py` maps each class to an HTTP status,
a gRPC code and the protocol's own error body; nothing else decides a status.
"""

from __future__ import annotations


class Failure(Exception):
    """A request that gets an error for its answer. `message` is one line and safe to show to the caller.

    `arm` is that of the experiment which the request was in, if it was in one.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.arm = ""


# The caller's faults: repeating the same request cannot help.


class BadRequest(Failure):
    """The request is malformed, or contradicts itself."""


class Malformed(BadRequest):
    """What came is not of the type that it must be: no JSON, no protobuf, text or a negative number for a size.

    Told apart because Triton answers it as if it were the server's own fault.
    """


class NotFound(Failure):
    """No such model, version or path."""


class TooLarge(Failure):
    """A body above the limit that the message names."""


class WrongMethod(Failure):
    """The path exists, the method does not fit; `allow` lists those that do."""

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class UnknownEncoding(Failure):
    """The body is encoded in a way that nobody here can undo."""


class Forbidden(Failure):
    """Well formed and known, but not something that the policy lets callers do."""


class Unsupported(Failure):
    """Well formed, but neither the gateway nor the backend offers it."""


# The state of the gateway or of a backend: the same request may succeed later or elsewhere.


class Rejected(Failure):
    """Busy: refused before anything was executed, so that a retry elsewhere is safe. `retry_after` in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unreachable(Failure):
    """Down: the request was never sent, or no backend is ready. `retry_after` in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


# Where a call expires of which nothing had been answered after the time that a policy gives a backend for that.
FIRST_BYTE = "first byte"


class Expired(Failure):
    """The deadline passed; `where` names the stage (`edge`, `queue`, `gateway`, `backend`)."""

    def __init__(self, where: str, message: str = "") -> None:
        super().__init__(message or f"deadline exceeded in {where}")
        self.where = where


class TooSlow(Failure):
    """A backend took longer than the policy gives it, while the caller would still have waited."""


class ShutDown(Failure):
    """The gateway's time to drain was over before the request was: whether it was executed is unknown.

    `retry_after` in seconds.
    """

    retry_after = 1.0


class SlowCaller(Failure):
    """The caller took longer to send its request than the gateway waits."""


class BackendFailed(Failure):
    """The backend answered with an error of its own.

    `status` is its HTTP status or, where `grpc` is true, its gRPC code's number; both are kept as they came, and so
    are `details`, gRPC's text of which `message` is one line (None over HTTP). `body` is the HTTP error body where one
    was sent (empty otherwise), `headers` what came beside it and is meant for the caller (`backends.request.Metadata`).
    """

    def __init__(
        self,
        message: str,
        status: int,
        *,
        grpc: bool = False,
        body: bytes = b"",
        details: str | None = None,
        headers: tuple[tuple[str, str | bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.grpc = grpc
        self.body = body
        self.details = details
        self.headers = headers


class ConnectionLost(Failure):
    """The backend went away after the request had been sent: whether it was executed is unknown."""


class SequenceLost(Failure):
    """The replica that a stateful sequence ran on is lost, and its state with it: only a new sequence can go on."""


class BadReply(Failure):
    """The backend broke the protocol: what it answered cannot be what was asked."""


def malformed(fault: type[Failure]) -> type[Failure]:
    """`fault` (BadRequest, or a reply's BadReply) for what is not even of its type."""
    return Malformed if fault is BadRequest else fault


# What a server may fail with for its own reasons, so that another may do better.
SERVER_FAILURES = (Unreachable, Rejected, TooSlow, ConnectionLost, BadReply, BackendFailed)

# Statuses that blame the content of a call; any other speaks of the server, or of how the gateway uses it.
_HTTP_BLAMES = frozenset({400, 413, 422})
_GRPC_BLAMES = 3  # INVALID_ARGUMENT


def own_fault(failure: BaseException) -> bool:
    """Whether a server failed for its own reasons, which a status may deny: then what it was sent is to blame."""
    if not isinstance(failure, BackendFailed):
        return isinstance(failure, SERVER_FAILURES)
    return failure.status != _GRPC_BLAMES if failure.grpc else failure.status not in _HTTP_BLAMES

"""Requests and replies as values, and the one function type of everything that answers.

    class Service(Protocol):
        async def __call__(self, request: Request, /) -> Reply: ...

A `Request` is frozen and independent of the wire. Its content is an `Infer` (an inference call, whose head is read and
whose tensors are decoded only when somebody asks) or a call that is relayed as it is (`HttpCall`, `RpcCall`). A merged
batch is itself a `Request` with several origins. A `Reply` carries a trail: what happened on the way, hop by hop, from
which headers, metrics and spans are rendered at the edge.

The values are msgspec structs: made and copied several times per request, in a fifth of a dataclass's time. `replace`
copies one with other fields.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Literal, Protocol

import msgspec
from msgspec.structs import replace

from backends import parameters
from backends.errors import Failure
from backends.parameters import Sequence
from backends.tensor import Tensor

__all__ = [
    "HOP_BY_HOP", "Answer", "Head", "Hop", "HttpCall", "Infer", "Metadata", "Origin", "Parameters", "Relay", "Reply",
    "Request", "RpcCall", "Service", "Tensors", "Trail", "Trait", "Wanted", "Wire", "computes", "content", "joint",
    "replace", "sequence",
]  # fmt: skip

Parameters = Mapping[str, Any]
# Keys in lower case; values of keys that end in `-bin` are bytes, all others text. A key may come more than once.
Metadata = tuple[tuple[str, str | bytes], ...]

# Headers that belong to one hop and never cross a proxy (RFC 9110, 7.6.1).
HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip


_WORK = ("/infer", "/generate", "/generate_stream")


class Head(msgspec.Struct, frozen=True):
    """What a body says of one tensor before its data is looked at."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Parameters = msgspec.field(default_factory=dict)


class Wire(msgspec.Struct, frozen=True):
    """The bytes that a body came as, so that an untouched one can be forwarded as it is.

    `header_length` is HTTP's Inference-Header-Content-Length: the bytes of JSON before binary tensors begin, or None
    where the whole body is JSON. gRPC's bytes are one serialised message.
    """

    protocol: Literal["http", "grpc"]
    data: bytes
    header_length: int | None = None


class Tensors:
    """The tensors of a body: heads at once, data on demand. The decode is done once and remembered."""

    __slots__ = ("_decode", "_tensors", "heads", "wire")

    def __init__(
        self, heads: tuple[Head, ...], wire: Wire | None, decode: Callable[[], tuple[Tensor, ...]] | None
    ) -> None:
        self.heads = heads
        self.wire = wire
        self._decode = decode
        self._tensors: tuple[Tensor, ...] | None = None

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> Tensors:
        """Tensors that never were on a wire."""
        made = cls(tuple(Head(t.name, t.datatype, t.shape, t.parameters or {}) for t in tensors), None, None)
        made._tensors = tensors
        return made

    @property
    def decoded(self) -> tuple[Tensor, ...]:
        """The tensors, checked against their heads. Raises BadRequest (a request's) or BadReply (a reply's)."""
        if self._tensors is None:
            assert self._decode is not None
            self._tensors = self._decode()
            self._decode = None
        return self._tensors


class Wanted(msgspec.Struct, frozen=True):
    """One requested output, with its parameters (`classification`, `binary_data`, ...)."""

    name: str
    parameters: Parameters = msgspec.field(default_factory=dict)


class Infer(msgspec.Struct, frozen=True):
    """One inference call. No `outputs` means all of them.

    One with `regions` has tensors in memory that its backend shares with its caller: only its wire form means anything.
    """

    inputs: Tensors
    outputs: tuple[Wanted, ...] = ()
    parameters: Parameters = msgspec.field(default_factory=dict)
    id: str = ""
    regions: bool = False


class HttpCall(msgspec.Struct, frozen=True):
    """An HTTP call that is relayed as it is. `target` is path and query; `headers` are lower case, end to end only."""

    method: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""


class Trait(msgspec.Struct, frozen=True):
    """What a model is like. `told` is False where its server has no configuration to tell.

    An input is `(name, datatype, dimensions)`, without the batch's, which a `batched` model has besides; `outputs` are
    datatypes by name.
    """

    decoupled: bool = False
    stateful: bool = False
    told: bool = True
    batched: bool = False
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    outputs: Mapping[str, str] = {}

    @property
    def divisible(self) -> bool:
        """Whether its calls may be merged, cached and cascaded, where the policy says so."""
        return not (self.decoupled or self.stateful)


class RpcCall(msgspec.Struct, frozen=True):
    """A gRPC call relayed as bytes. `method` is `/package.Service/Method`; `messages` are the caller's.

    A stream of inferences may say which `sequence` its messages belong to. `told` hears what its model is like (None
    where that is not known) and how many seconds the backend may take for an answer, before that gets a message;
    whoever gives it watches over that time. `refused` hears why the last message that was taken does not go on, and the
    call goes on without it; without `refused` the call fails.
    """

    method: str
    messages: AsyncIterator[bytes]
    metadata: Metadata = ()
    sequence: Sequence | None = None
    told: Callable[[Trait | None, float], None] | None = None
    refused: Callable[[Failure], None] | None = None


class Origin(msgspec.Struct, frozen=True):
    """One caller that a request serves: the span that waits for it (opaque here), and how many rows are its own."""

    span: Any = None
    rows: int = 1


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call, on its way.

    `deadline` is in seconds on the injected clock. `headers` are those that the backend is meant to see: by name a
    text, and from gRPC callers also bytes (names that end in `-bin`) and tuples (all values of a repeated name). `span`
    is the trace span that the next hop is a child of, None where nothing is recorded. `origins` has one entry a caller.
    `arrival` is what the edge knows of the call beyond this, for its span alone: an ASGI scope, a gRPC context.
    `regions` says that a relayed inference has tensors in shared memory.
    """

    model: str
    content: Infer | HttpCall | RpcCall
    version: str = ""
    deadline: float = math.inf
    headers: Parameters = msgspec.field(default_factory=dict)
    stream: bool = False
    span: Any = None
    origins: tuple[Origin, ...] = ()
    arrival: Any = None
    regions: bool = False

    @property
    def infer(self) -> Infer:
        assert isinstance(self.content, Infer)
        return self.content


def computes(request: Request) -> bool:
    """Whether a call makes a model work: an inference, or one of the relayed calls that is another form of it."""
    call = request.content
    if isinstance(call, HttpCall):
        return call.method == "POST" and call.target.partition("?")[0].endswith(_WORK)
    return isinstance(call, Infer) or call.method.endswith("Infer")


class Hop(msgspec.Struct, frozen=True):
    """What one tier did for a request. `rows` are the caller's row indices that got their answer here.

    `deferred` counts the rows that the tier was asked for and did not accept, `unscored` those of them whose confidence
    could not be told. `queued` and `service` are seconds;
    `service` is the whole upstream call of the batch, which several callers may share. `retries` counts the endpoints
    that did not take the call before this one did.
    """

    tier: str
    rows: tuple[int, ...]
    deferred: int = 0
    unscored: int = 0
    cached: bool = False
    endpoint: str = ""
    batch_rows: int = 0
    queued: float = 0.0
    service: float = 0.0
    reason: str = ""
    retries: int = 0


Trail = tuple[Hop, ...]


class Answer(msgspec.Struct, frozen=True):
    """One inference answer. `model` and `version` are as the backend named them until the edge renders it.

    `headers` and `trailers` are what the backend said beside it (gRPC's initial and trailing metadata, HTTP's headers),
    without what belongs to its hop: for the one caller whose call it answers untouched. No other answer has any.
    """

    outputs: Tensors
    model: str = ""
    version: str = ""
    parameters: Parameters = msgspec.field(default_factory=dict)
    id: str = ""
    headers: Metadata = ()
    trailers: Metadata = ()


class Relay(msgspec.Struct, frozen=True):
    """A backend's reply to a relayed call: `body` whole, or chunk by chunk as it comes.

    `status` is HTTP's. A gRPC relay has status 200; a failing one raises BackendFailed from the call or the iterator.
    Its `trailers` give the backend's trailing metadata, once the body is over.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes | AsyncIterator[bytes]
    trailers: Callable[[], Metadata] = tuple


class Reply(msgspec.Struct, frozen=True):
    """An answer and how it came about: the `policy` version and the `arm` it was made under, and whether a cache was
    asked.

    `degraded` says what stood in for the route's own answer; empty where nothing did.
    """

    body: Answer | Relay
    trail: Trail = ()
    policy: str = ""
    arm: str = ""
    cacheable: bool = False
    degraded: str = ""

    @property
    def answer(self) -> Answer:
        assert isinstance(self.body, Answer)
        return self.body


class Service(Protocol):
    """Everything that answers: a client, a batcher, a cascade, the whole gateway. Raises `backends.errors.Failure`."""

    async def __call__(self, request: Request, /) -> Reply: ...


def sequence(request: Request) -> Sequence | None:
    """The sequence that a call belongs to, None where that is none, or nobody looked."""
    call = request.content
    if isinstance(call, Infer):
        return parameters.sequence(call.parameters) if call.parameters else None
    return call.sequence if isinstance(call, RpcCall) else None


def joint(name: str) -> str:
    """What joins the values of a repeated header: RFC 9110, 5.3; for cookies RFC 9113, 8.2.3."""
    return "; " if name == "cookie" else ", "


def content(request: Request, infer: Infer) -> Request:
    """`request` with other tensors: what a part of it asks of the next hop."""
    return replace(request, content=infer)

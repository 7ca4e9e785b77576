"""The policy as a value: immutable and complete.

Every default is filled in and every name resolves, so whoever holds a `Policy` never asks whether. Defaults live here
and nowhere else. Durations are seconds, sizes are bytes. Values that are equal configure the same thing: what is
costly to make (pools, dispatchers) is found again after a reload by an equal spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

MIB = 2**20


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """Text that never shows itself: `repr`, `str` and formatting give `***`; `value` is the text."""

    value: str

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__


@dataclass(frozen=True, slots=True)
class Address:
    """Where a listener binds. `host` is a name or an IP address without brackets; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Listen:
    """The listeners; None is off. Ports 8000 to 8002 are Triton's own, so that clients change a host name only."""

    http: Address | None = Address("0.0.0.0", 8000)  # noqa: S104 - a gateway is there to be reached
    grpc: Address | None = Address("0.0.0.0", 8001)  # noqa: S104
    metrics: Address | None = Address("0.0.0.0", 8002)  # noqa: S104
    # Can change and drain the gateway: reachable from outside only by an operator's explicit wish.
    admin: Address | None = Address("127.0.0.1", 8003)
    # Statuses of failures on http and grpc: our own, or Triton's where these differ, for clients that rely on them.
    compat: Literal["headrace", "triton"] = "headrace"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica: `http` is `http://host:port` without a slash at its end, `grpc` is `host:port`; one is set."""

    http: str | None = None
    grpc: str | None = None

    def __str__(self) -> str:
        return self.http or f"grpc://{self.grpc}"


@dataclass(frozen=True, slots=True)
class Batch:
    """How rows of several callers are merged into one call."""

    max_rows: int = 32  # rows of one call; model servers gain little from more, and a failed batch is re-run in halves
    slots: int = 2  # batches an endpoint runs at once: one computes while the next is on the wire
    queue_rows: int = 1024  # rows waiting in all; 32 full batches, beyond which waiting outlasts most deadlines
    queue_time: float = 1.0  # seconds a row may wait for a slot, then it is refused while its caller can still go on


@dataclass(frozen=True, slots=True)
class Local:
    """A model that runs inside the gateway."""

    path: str  # an ONNX file, or a folder with a static-embedding text classifier
    threads: int = 1  # calls that run at once, each on one thread: beside the event loop a small machine has one core


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One model (or, with `model` empty, every model) on a set of replicas that answer alike, or in this process."""

    name: str
    kind: Literal["triton"] = "triton"
    endpoints: tuple[Endpoint, ...] = ()  # at least one, each with an address for `protocol`; none with `local`
    local: Local | None = None
    protocol: Literal["http", "grpc", "local"]
    model: str = ""  # the model's name on the server; empty: the public name (the route's) is passed on
    version: str = ""  # the model's version on the server; empty: the caller's wish, else the server's choice
    batch: Batch | None = None  # None: calls are never merged; merging needs a model whose axis 0 is rows
    timeout: float = 30.0  # seconds for one call; the model servers' own clients wait about as long
    connect_timeout: float = 2.0  # seconds; one lost SYN is sent again after 1 s, a second one means that it is down
    headers: Mapping[str, Secret] = field(default_factory=dict, hash=False)  # added to each call; lower-case names

    def __post_init__(self) -> None:
        object.__setattr__(self, "headers", MappingProxyType(dict(self.headers)))


@dataclass(frozen=True, slots=True)
class Accept:
    """When a tier's answer is final: a row is accepted if and only if score >= threshold, else the next tier decides.

    `output` is the tensor of shape `[rows, classes]` that is judged; `values` says what it holds. Each score is a
    confidence in [0, 1], higher is surer: `max_probability` is the largest p, `margin` the largest less the second
    largest, `entropy` is 1 - H(p) / ln(classes).
    """

    output: str
    values: Literal["logits", "probabilities"]
    score: Literal["max_probability", "margin", "entropy"]
    threshold: float


@dataclass(frozen=True, slots=True)
class Tier:
    """One step of a cascade. `accept` is None on the last tier, which answers whatever reaches it, and only there."""

    name: str
    backend: str  # a key of Policy.backends
    accept: Accept | None = None


@dataclass(frozen=True, slots=True)
class Redis:
    """The Redis that caches may share with other gateways."""

    host: str
    port: int
    database: int = 0
    tls: bool = False
    user: str = ""
    password: Secret | None = None
    ca_file: str = ""  # PEM, for `tls`; empty: the system's authorities
    timeout: float = 0.02  # seconds for a command; twenty times a healthy one, and less than a model call

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' if self.tls else ''}://{host}:{self.port}/{self.database}"


@dataclass(frozen=True, slots=True)
class Cache:
    """Answers kept per row. A memory is full when either bound is reached; then the least recently used entry goes."""

    store: Literal["memory", "redis"] = "memory"
    entries: int = 100_000  # about 1 KiB an entry for a small classifier's answer: both bounds meet in practice
    bytes: int = 256 * MIB  # a tenth of a small container's memory
    ttl: float = 3600.0  # seconds; how long a model that was changed in place may still be answered from its past


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of answering a route: its tiers, cheapest first, and its cache.

    `weight` is relative to those of the other arms; an arm of weight 0 gets nothing.
    """

    tiers: tuple[Tier, ...]
    cache: Cache | None = None
    name: str = ""
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Unit:
    """What an experiment randomises by: a header's (or metadata's) value, a cookie's, or the tenant."""

    kind: Literal["header", "cookie", "tenant"]
    name: str = ""  # the header's, in lower case, or the cookie's

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip()


@dataclass(frozen=True, slots=True)
class Experiment:
    """How the requests of a route are divided among its arms: by a keyed hash of their unit."""

    unit: Unit
    salt: str  # experiments with different salts divide independently
    otherwise: str  # the arm of requests without a unit


@dataclass(frozen=True, slots=True)
class Route:
    """A public model name and the arms that answer it: one, or with an `experiment` several."""

    name: str
    arms: tuple[Arm, ...]
    experiment: Experiment | None = None
    fallback: str | None = None  # a key of Policy.backends, asked when the arm could not answer
    timeout: float | None = None  # seconds for a request without a deadline of its own; None: Limits.timeout


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the whole gateway."""

    in_flight: int = 4096  # requests; far above what keeps backends busy, and bounds memory with body_bytes
    body_bytes: int = 64 * MIB  # one request's body: a batch of 100 images of 224 x 224 x 3 FP32 is 57 MiB
    timeout: float = 30.0  # seconds for a request that brings no deadline


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What the gateway says of its work."""

    response_headers: bool = True  # `headrace-*` headers on replies: which tier answered, cache hits, time queued
    access_log: bool = True  # one line a request
    traces_per_second: float = 10.0  # requests recorded in full; a recorded span costs about 100 us
    traces_kept: int = 256  # recent traces that admin can show; a few KiB each


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """All that configures a gateway.

    `proxy` names the backend that answers every model that no route claims; None: such a model is not found.
    `version` is the first 12 hex digits of the SHA-256 of the file as written: it names the text, and tells nothing
    of what `${NAME}` stood for.
    """

    backends: Mapping[str, Backend] = field(hash=False)
    routes: Mapping[str, Route] = field(default_factory=dict, hash=False)
    proxy: str | None = None  # a key of `backends`
    redis: Redis | None = None
    tenant_header: str = ""  # the header (or metadata) that names a request's tenant, in lower case; empty: no tenants
    listen: Listen = Listen()
    limits: Limits = Limits()
    telemetry: Telemetry = Telemetry()
    version: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "backends", MappingProxyType(dict(self.backends)))
        object.__setattr__(self, "routes", MappingProxyType(dict(self.routes)))

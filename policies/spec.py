"""The policy as a value: immutable and complete.

Every default is filled in and every name resolves, so whoever holds a `Policy` never asks whether. Defaults live here
and nowhere else. Durations are seconds, sizes are bytes. Values that are equal configure the same thing: what is
costly to make (pools, dispatchers) is found again after a reload by an equal spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
class Pem:
    """A PEM file: its absolute `path`, and what it said when the policy was read. It shows its path alone."""

    path: str
    text: Secret

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class ListenTls:
    """How the listeners that callers reach, http and grpc, speak TLS."""

    certificate: Pem  # the server's own first, then those between it and its authority
    key: Pem
    client_ca: Pem | None = None  # whose certificates callers must have; None: they need none


@dataclass(frozen=True, slots=True)
class BackendTls:
    """How a backend's TLS addresses are called."""

    ca_file: Pem | None = None  # whose certificates servers must have; None: those that the system trusts
    certificate: Pem | None = None  # ours, for servers that want one; with `key`, or neither
    key: Pem | None = None
    server_name: str = ""  # whom certificates must name; empty: the host of the address


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
    tls: ListenTls | None = None  # of http and grpc; None: they are plain text, as metrics and admin always are

    @property
    def addresses(self) -> dict[str, Address]:
        """Where each listener that is not off binds, by its name."""
        bound = {"http": self.http, "grpc": self.grpc, "metrics": self.metrics, "admin": self.admin}
        return {name: address for name, address in bound.items() if address is not None}

    @property
    def opened(self) -> tuple[Listen, bool, bool]:
        """What a process settles when it opens its ports: all but what the files of `tls` say."""
        return replace(self, tls=None), self.tls is not None, bool(self.tls and self.tls.client_ca)

    # Statuses of failures on http and grpc: our own, or Triton's where these differ, for clients that rely on them.
    compat: Literal["headrace", "triton"] = "headrace"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica, by one address or two.

    `http` is `http://host:port` or `https://host:port`, without a slash at its end; `grpc` is `host:port`, or
    `grpcs://host:port` where it speaks TLS.
    """

    http: str | None = None
    grpc: str | None = None

    def __str__(self) -> str:
        return self.http or (f"{self.grpc}" if self.grpc_tls else f"grpc://{self.grpc}")

    @property
    def grpc_target(self) -> str:
        """The gRPC address as `host:port`, empty where there is none."""
        return (self.grpc or "").removeprefix("grpcs://")

    @property
    def grpc_tls(self) -> bool:
        return (self.grpc or "").startswith("grpcs://")

    @property
    def tls(self) -> bool:
        """Whether one of its addresses is for TLS."""
        return self.grpc_tls or (self.http or "").startswith("https://")


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
    # Seconds for one call, or until a stream begins; the model servers' own clients wait about as long.
    timeout: float = 30.0
    connect_timeout: float = 2.0  # seconds; one lost SYN is sent again after 1 s, a second one means that it is down
    first_byte_timeout: float | None = None  # seconds from a request sent to its answer's first; None: as `timeout`
    idle_timeout: float = 30.0  # seconds between two chunks of a stream; a model that computes for longer is rare
    stream_timeout: float | None = None  # seconds for the whole of a stream; None: as long as it goes on
    reply_bytes: int = 64 * MIB  # `limits.reply_bytes` of its policy, which sets it: a client is made with its bound
    headers: Mapping[str, Secret] = field(default_factory=dict, hash=False)  # added to each call; lower-case names
    tls: BackendTls = BackendTls()  # for the addresses that are https:// or grpcs://
    ready_replicas: int = 1  # replicas that must have a model ready for it to be called ready; one can answer
    # Whether callers may change the servers: load and unload models, set tracing and logging. On all replicas, or none.
    control: bool = False
    # Whether the one replica shares the callers' machine, so that tensors may stay in memory that both see.
    shared_memory: bool = False

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
    # One answer of a backend, or one message of its stream, which is held whole: as large as what is asked.
    reply_bytes: int = 64 * MIB
    timeout: float = 30.0  # seconds for a request that brings no deadline
    drain: float = 25.0  # seconds that what is in flight may take after SIGTERM; Kubernetes kills 30 s after it
    drain_delay: float = 0.0  # seconds of going on as before it, but not ready: until balancers send nobody any more
    connections: int = 10_000  # of HTTP callers; an idle one takes 4 KiB, and a file descriptor


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
        limit = self.limits.reply_bytes
        backends = {name: replace(backend, reply_bytes=limit) for name, backend in self.backends.items()}
        object.__setattr__(self, "backends", MappingProxyType(backends))
        object.__setattr__(self, "routes", MappingProxyType(dict(self.routes)))

"""A policy's text, or a command line's few words, as a `Policy`.

Each section is a table of its keys (`policies.schema`), its defaults stand in `policies.spec`, and what must hold
between keys is a function next to the table. To add a section: a dataclass there, a table here, a line in `POLICY`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from policies import address
from policies.address import RedisUrl, redis_url
from policies.files import Files
from policies.headers import HEADER_VALUE, PASSWORD, header_name, unit
from policies.include import gathered
from policies.problem import Findings, Place, Wrong, suggest
from policies.reader import Either, Scalar
from policies.schema import (
    choice,
    duration,
    either,
    flag,
    items,
    mapping,
    name,
    number,
    parsed,
    path,
    reference,
    section,
    size,
    text,
    whole,
)
from policies.source import Entry, Items, Keys, Leaf, Node, leaf
from policies.spec import (
    Accept,
    Address,
    Arm,
    Backend,
    Batch,
    Cache,
    Endpoint,
    Experiment,
    Limits,
    Listen,
    Local,
    Policy,
    Redis,
    Route,
    Secret,
    Telemetry,
    Tier,
    Unit,
)

FREE = "x-"  # top-level keys that begin so are places for anchors


def load(path: str | Path, environ: Mapping[str, str], files: Files | None = None) -> Policy:
    """The policy in a UTF-8 file. Raises PolicyError with every problem; a file that cannot be read is one, too.

    `files` gets to know every file that the policy was read from.
    """
    files = files or Files()
    return parse(files.text(path), str(path), environ, files)


def parse(content: str, file: str, environ: Mapping[str, str], files: Files | None = None) -> Policy:
    """The policy that `content` describes. Raises PolicyError with every problem.

    `file` is its name in problems, and what the names of other files are relative to.
    """
    made = gathered(content, file, environ, files or Files())
    found = Findings(made.problems, failed=bool(made.problems))
    with found.reading(Place(file), made.root.line):
        policy = POLICY(made.root, Place(file, names=_defined(made.root)))
    found.close()
    return replace(policy, version=_digest("\0".join(made.texts)))


def implicit(http: str | None = None, grpc: str | None = None, *, listen: Mapping[str, str] | None = None) -> Policy:
    """The policy of `headrace serve --backend URL`: one backend, named `backend`, that answers every model.

    `http` is `http://host:port`, or `grpc://host:port` for a server that speaks gRPC alone; `grpc` is the gRPC address
    of the same server. `listen` has the forms and defaults of the section `listen`. Raises PolicyError.
    """
    found = Findings()
    address_of = {"http": http, "grpc": grpc} if grpc else http or ""
    with found.reading(Place("command line", "--backend"), 0):
        where = ENDPOINT(_plain(address_of), Place("command line", "--backend", line=0))
    with found.reading(Place("command line", "--listen"), 0):
        listeners = LISTEN(_plain(listen or {}), Place("command line", "--listen", line=0))
    found.close()
    backend = Backend(name="backend", endpoints=(where,), protocol=_protocol((where,)))
    version = _digest(repr((where, listeners)))
    return Policy(backends={"backend": backend}, proxy="backend", listen=listeners, version=version)


# Listeners.


def _listener(host: str) -> Scalar[Address | None]:
    expected = f"host:port, a port on {host}, or off"
    return parsed(expected, lambda text: address.listener(text, host), lambda at: str(at) if at else "off")


def _distinct(listen: Listen) -> Iterator[Wrong]:
    bound = {key: at for key in ("http", "grpc", "metrics", "admin") if (at := getattr(listen, key)) is not None}
    for (key, at), (other, its) in combinations(bound.items(), 2):
        everywhere = {at.host, its.host} & {"0.0.0.0", "::"}  # noqa: S104
        if at.port == its.port and at.port and (at.host == its.host or everywhere):
            yield Wrong(f"{key} and {other} cannot listen on one address", "give each a port of its own, or off", other)
    if listen.http is None and listen.grpc is None:
        yield Wrong("neither http nor grpc listens", "switch one of them on", "http")


LISTEN = section(
    Listen,
    {
        "http": _listener("0.0.0.0"),  # noqa: S104
        "grpc": _listener("0.0.0.0"),  # noqa: S104
        "metrics": _listener("0.0.0.0"),  # noqa: S104
        "admin": _listener("127.0.0.1"),
    },
    _distinct,
)


# Backends.

_ENDPOINT_URL = parsed("http://host:port or grpc://host:port", address.endpoint)
_ENDPOINT = section(
    Endpoint,
    {
        "http": parsed("http://host:port", address.http_url).absent("no calls over HTTP"),
        "grpc": parsed("host:port", address.grpc_target).absent("no calls over gRPC"),
    },
    lambda made: () if made.http or made.grpc else [Wrong("has no address", "write http: or grpc:, or both")],
)
ENDPOINT = either("http://host:port, grpc://host:port or a mapping with http, grpc", _ENDPOINT_URL, _ENDPOINT)


def _protocol(endpoints: tuple[Endpoint, ...]) -> Any:
    """gRPC where every replica speaks it: tensors travel as they are."""
    return "grpc" if all(endpoint.grpc for endpoint in endpoints) else "http"


_MODEL = path()
LOCAL: Either[Local] = either(
    "the name of a model's file or folder, or a mapping with path, threads",
    Scalar(
        read=lambda node, at: Local(_MODEL(node, at)),
        expected=_MODEL.expected,
        form=_MODEL.form,
        write=lambda local: local.path,
    ),
    section(Local, {"path": _MODEL, "threads": whole(1, 256)}),
)
# What is said of a server, and means nothing for a model in this process.
_OF_SERVERS = ("kind", "protocol", "version", "connect_timeout", "headers")


def _backend(name: str, endpoints: Any = (), local: Any = None, protocol: Any = None, **rest: Any) -> Backend:
    if endpoints and local:
        raise Wrong("'endpoints' and 'local' exclude each other", "a model is on servers, or in this process", "local")
    if local is None:
        if not endpoints:
            raise Wrong(
                "has no endpoints", "write 'endpoints:' with a list, or 'local: PATH' for a model in this process"
            )
        return Backend(name=name, endpoints=endpoints, protocol=protocol or _protocol(endpoints), **rest)
    for key in _OF_SERVERS:
        if key in rest or (key == "protocol" and protocol):
            raise Wrong("a model in this process has no server", f"delete '{key}'", key)
    return Backend(name=name, local=local, protocol="local", **rest)


def _addressed(backend: Backend) -> Iterator[Wrong]:
    for index, endpoint in enumerate(backend.endpoints):
        if getattr(endpoint, backend.protocol) is None:
            example = "http: http://host:port" if backend.protocol == "http" else "grpc: host:port"
            wrong = f"endpoints[{index}] has no {backend.protocol} address, and the protocol is {backend.protocol}"
            yield Wrong(wrong, f"write {example}, or choose another protocol", "endpoints")
        if (first := backend.endpoints.index(endpoint)) < index:
            yield Wrong(f"endpoints[{index}] is endpoints[{first}] again", "write each replica once", "endpoints")


def _queue_holds_a_batch(batch: Batch) -> Iterator[Wrong]:
    if batch.queue_rows < batch.max_rows:
        yield Wrong("queue_rows is less than max_rows", "a queue must hold one full batch", "queue_rows")


BATCH = section(
    Batch,
    {
        "max_rows": whole(1, 65536),
        "slots": whole(1, 1024),
        "queue_rows": whole(1, 1_000_000),
        "queue_time": duration("1ms", "1h"),
    },
    _queue_holds_a_batch,
)

BACKEND = section(
    _backend,
    {
        "kind": choice("triton"),
        "endpoints": items("endpoint", ENDPOINT),
        "local": LOCAL,
        "protocol": choice("http", "grpc").absent("grpc where every endpoint has an address for it, else http"),
        "model": name().absent("the name that was asked for"),
        "version": text("a version, such as 1", re.compile(r"[A-Za-z0-9_.-]{1,64}")).absent(
            "the caller's or the server's"
        ),
        "batch": BATCH.absent("calls are never merged"),
        "timeout": duration("1ms", "1d"),
        "connect_timeout": duration("1ms", "5m"),
        "headers": mapping("value", HEADER_VALUE, header_name),
    },
    _addressed,
    rest=Backend,
    one_of=("endpoints", "local"),
    moot={"local": _OF_SERVERS},
)


# Redis.


def _redis(url: RedisUrl, user: str = "", password: Secret | None = None, **rest: Any) -> Redis:
    for key, given, its in (("user", user, url.user), ("password", password, url.password)):
        if given and its:
            raise Wrong(f"'{key}' stands in the url, too", "write it once", key)
    if rest.get("ca_file") and not url.tls:
        raise Wrong("'ca_file' is for rediss://, and the url is redis://", "write rediss://, or delete it", "ca_file")
    return Redis(url.host, url.port, url.database, url.tls, user or url.user, password or url.password, **rest)


REDIS = section(
    _redis,
    {
        "url": parsed("redis://host:port/database or rediss://host:port/database", redis_url),
        "user": text("a user's name", re.compile(r"[!-~]{1,128}")).absent("Redis' default user"),
        "password": PASSWORD.absent("no password"),
        "ca_file": path().absent("the system's authorities"),
        "timeout": duration("1ms", "10s"),
    },
    rest=Redis,
)


# Routes.

ACCEPT = section(
    Accept,
    {
        "output": text("the name of an output tensor", re.compile(r"[!-~]{1,256}")),
        "values": choice("logits", "probabilities"),
        "score": choice("max_probability", "margin", "entropy"),
        "threshold": number(0, 1),
    },
)

TIER = section(
    lambda backend, name=None, accept=None: Tier(name or backend, backend, accept),
    {
        "name": name().absent("the backend's"),
        "backend": reference("backends"),
        "accept": ACCEPT.absent("every row is answered here"),
    },
    rest=Tier,
)


def _judged(tiers: Items) -> Iterator[tuple[int, Wrong]]:
    """Every tier but the last says when its answer is final; names are unique."""
    last, seen = len(tiers.children) - 1, dict[str, int]()
    for index, tier in enumerate(tiers.children):
        if not isinstance(tier, Keys):
            continue
        if index < last and "accept" not in tier.entries:
            yield index, Wrong("the key 'accept' is missing", "without it no row goes on to the next tier")
        if index == last and "accept" in tier.entries:
            yield index, Wrong("the last tier has 'accept'", "delete it: there is no tier to go on to")
        named = tier.entries.get("name") or tier.entries.get("backend")
        if not named or not isinstance(named.node, Leaf):
            continue
        if (first := seen.setdefault(named.node.text, index)) < index:
            yield index, Wrong(f"has the name of tiers[{first}]", "give it a 'name' of its own")


def _cache(store: Any = "memory", **rest: Any) -> Cache:
    for key in ("entries", "bytes"):
        if store == "redis" and key in rest:
            raise Wrong("Redis bounds its own memory", f"delete '{key}', and see Redis' maxmemory", key)
    return Cache(store, **rest)


CACHE = section(
    _cache,
    {
        "store": choice("memory", "redis"),
        "entries": whole(1, 1_000_000_000),
        "bytes": size("1KiB", "1TiB"),
        "ttl": duration("1ms", "365d"),
    },
    rest=Cache,
)

TIERS = items("tier", TIER, _judged)


def _tiers(backend: Any, tiers: Any) -> tuple[Tier, ...]:
    if backend and tiers:
        raise Wrong("'backend' and 'tiers' exclude each other", "'backend: NAME' is short for one tier", "backend")
    if not backend and not tiers:
        raise Wrong("has no backend", "write 'backend: NAME', or 'tiers:' with a list")
    return tiers or (Tier(backend, backend),)


def _arm(name: str, weight: float, backend: Any = None, tiers: Any = None, cache: Any = None) -> Arm:
    return Arm(_tiers(backend, tiers), cache, name, weight)


ARM = section(
    _arm,
    {
        "weight": number(0, 1_000_000),
        "backend": reference("backends"),
        "tiers": TIERS,
        "cache": CACHE.absent("nothing is kept"),
    },
    rest=Arm,
    one_of=("backend", "tiers"),
)


class _Divided(NamedTuple):
    """Requests divided among arms by a keyed hash of their unit: the same unit always gets the same arm."""

    arms: dict[str, Arm]
    unit: Unit
    otherwise: str
    salt: str | None


def _divided(arms: Any, unit: Any, otherwise: Any = None, salt: Any = None) -> _Divided:
    if len(arms) < 2:
        raise Wrong("has fewer than two arms", "without an experiment, write 'backend' or 'tiers' in the route", "arms")
    if not any(arm.weight for arm in arms.values()):
        raise Wrong("every weight is 0", "give one of the arms a weight", "arms")
    if otherwise and otherwise not in arms:
        raise Wrong(f"there is no arm '{otherwise}'", suggest(otherwise, arms), "otherwise")
    return _Divided(arms, unit, otherwise or next(iter(arms)), salt)


EXPERIMENT = section(
    _divided,
    {
        "unit": parsed("header NAME, cookie NAME or tenant", unit),
        "arms": mapping("arm", ARM),
        "otherwise": name().absent("the first arm"),
        "salt": text("a text", re.compile(r"[ -~]{1,128}")).absent("the route's name"),
    },
    rest=_Divided,
)


def _route(
    name: str, backend: Any = None, tiers: Any = None, experiment: Any = None, cache: Any = None, **rest: Any
) -> Route:
    if experiment is None:
        return Route(name, (Arm(_tiers(backend, tiers), cache),), **rest)
    for key, given in (("backend", backend), ("tiers", tiers), ("cache", cache)):
        if given:
            raise Wrong(f"'{key}' and 'experiment' exclude each other", f"write '{key}' in the arms", key)
    divided = Experiment(experiment.unit, experiment.salt or name, experiment.otherwise)
    return Route(name, tuple(experiment.arms.values()), divided, **rest)


ROUTE = section(
    _route,
    {
        "backend": reference("backends"),
        "tiers": TIERS,
        "experiment": EXPERIMENT,
        "cache": CACHE.absent("nothing is kept"),
        "fallback": reference("backends").absent("an error is the answer"),
        "timeout": duration("1ms", "1d").absent("limits.timeout"),
    },
    rest=Route,
    one_of=("backend", "tiers", "experiment"),
    moot={"experiment": ("cache",)},
)


# The rest.

LIMITS = section(
    Limits,
    {
        "in_flight": whole(1, 1_000_000),
        "body_bytes": size("1KiB", "2047MiB"),  # gRPC's messages have lengths below 2 GiB
        "timeout": duration("1ms", "1d"),
    },
)


def _traces(
    per_second: float = Telemetry().traces_per_second, keep: int = Telemetry().traces_kept
) -> Mapping[str, float]:
    """Which requests are recorded in full, and how many recent ones are kept."""
    return {"traces_per_second": per_second, "traces_kept": keep}


TRACES = section(
    _traces,
    {"per_second": number(0, 100_000), "keep": whole(0, 100_000)},
)

TELEMETRY = section(
    lambda traces=_traces(), **rest: Telemetry(**rest, **traces),  # noqa: B008 - a constant
    {"response_headers": flag(), "access_log": flag(), "traces": TRACES},
    rest=Telemetry,
)


def _policy(backends: dict[str, Backend], proxy: str | None = None, include: Any = None, **rest: Any) -> Policy:
    if proxy is None and not rest.get("routes"):
        raise Wrong("no model would be answered", "add a route, or 'proxy: BACKEND' to answer every model")
    if proxy is not None and backends[proxy].model:
        wrong = "the proxy's backend has a 'model', which would answer in every model's name"
        raise Wrong(wrong, "name a backend without 'model'", "proxy")
    if proxy is not None and backends[proxy].local:
        raise Wrong("the proxy's backend is one model in this process", "name a backend with endpoints", "proxy")
    return Policy(backends=backends, proxy=proxy, **rest)


def _complete(policy: Policy) -> Iterator[Wrong]:
    """What routes need of other sections."""
    for route in policy.routes.values():
        if policy.redis is None and any(arm.cache and arm.cache.store == "redis" for arm in route.arms):
            yield Wrong(
                f"'{route.name}' keeps its rows in redis, and there is none", "add 'redis:' with a url", "routes"
            )
        if route.experiment and route.experiment.unit.kind == "tenant" and not policy.tenant_header:
            wrong = f"'{route.name}' divides by tenant, and nothing names one"
            yield Wrong(wrong, "add 'tenant_header: NAME'", "routes")


_INCLUDED = path()
INCLUDE = items("file", _INCLUDED)


POLICY = section(
    _policy,
    {
        "include": INCLUDE.absent("this file is the whole policy"),
        "listen": LISTEN,
        "proxy": reference("backends").absent("a model without a route is not found"),
        "backends": mapping("backend", BACKEND),
        "routes": mapping("route", ROUTE),
        "redis": REDIS.absent("caches are in memory"),
        "tenant_header": parsed("a header's name", header_name).absent("requests have no tenant"),
        "limits": LIMITS,
        "telemetry": TELEMETRY,
    },
    _complete,
    free=FREE,
    rest=Policy,
)


def _defined(root: Node) -> dict[str, frozenset[str]]:
    """What each top-level section names, whether or not it can be read: a reference to it is not dangling."""
    entries = root.entries if isinstance(root, Keys) else {}
    return {key: frozenset(entry.node.entries) for key, entry in entries.items() if isinstance(entry.node, Keys)}


def _plain(value: Mapping[str, str | None] | str) -> Node:
    if isinstance(value, str):
        return leaf(value)
    return Keys(0, 0, {key: Entry(0, leaf(text)) for key, text in value.items() if text is not None})


def _digest(content: str) -> str:
    return sha256(content.encode(errors="surrogatepass")).hexdigest()[:12]

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
from typing import Any

from policies import address
from policies.headers import HEADER_VALUE, header_name
from policies.problem import Findings, Place, PolicyError, Problem, Wrong
from policies.reader import Scalar
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
    reference,
    section,
    size,
    text,
    whole,
)
from policies.source import MAX_BYTES, Entry, Items, Keys, Leaf, Node, leaf, tree
from policies.spec import (
    Accept,
    Address,
    Backend,
    Batch,
    Cache,
    Endpoint,
    Limits,
    Listen,
    Policy,
    Route,
    Telemetry,
    Tier,
)

FREE = "x-"  # top-level keys that begin so are places for anchors


def load(path: str | Path, environ: Mapping[str, str]) -> Policy:
    """The policy in a UTF-8 file. Raises PolicyError with every problem; a file that cannot be read is one, too."""
    return parse(written(path), str(path), environ)


def written(path: str | Path) -> str:
    """The text of a policy's file. Raises PolicyError."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        return data.decode()
    except OSError as error:
        raise PolicyError([Problem(str(path), 0, "", f"cannot be read: {error.strerror or error}")]) from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PolicyError([Problem(str(path), line, "", "not UTF-8 text", "save the file as UTF-8")]) from None


def parse(content: str, file: str, environ: Mapping[str, str]) -> Policy:
    """The policy that `content` describes; `file` is its name in problems. Raises PolicyError with every problem."""
    root, problems = tree(content, file, environ)
    found = Findings(problems, failed=bool(problems))
    with found.reading(Place(file), root.line):
        policy = POLICY(root, Place(file, names=_names(root)))
    found.close()
    return replace(policy, version=_digest(content))


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


def _backend(name: str, endpoints: tuple[Endpoint, ...], protocol: Any = None, **rest: Any) -> Backend:
    return Backend(name=name, endpoints=endpoints, protocol=protocol or _protocol(endpoints), **rest)


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


def _route(name: str, backend: Any = None, tiers: Any = None, cache: Any = None, timeout: Any = None) -> Route:
    if backend and tiers:
        raise Wrong("'backend' and 'tiers' exclude each other", "'backend: NAME' is short for one tier", "backend")
    if not backend and not tiers:
        raise Wrong("has no backend", "write 'backend: NAME', or 'tiers:' with a list")
    return Route(name, tiers or (Tier(backend, backend),), cache, timeout)


CACHE = section(
    Cache,
    {
        "store": choice("memory"),
        "entries": whole(1, 1_000_000_000),
        "bytes": size("1KiB", "1TiB"),
        "ttl": duration("1ms", "365d"),
    },
)

ROUTE = section(
    _route,
    {
        "backend": reference("backends"),
        "tiers": items("tier", TIER, _judged),
        "cache": CACHE.absent("nothing is kept"),
        "timeout": duration("1ms", "1d").absent("limits.timeout"),
    },
    rest=Route,
    one_of=("backend", "tiers"),
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


def _policy(backends: dict[str, Backend], proxy: str | None = None, **rest: Any) -> Policy:
    if proxy is None and not rest.get("routes"):
        raise Wrong("no model would be answered", "add a route, or 'proxy: BACKEND' to answer every model")
    if proxy is not None and backends[proxy].model:
        wrong = "the proxy's backend has a 'model', which would answer in every model's name"
        raise Wrong(wrong, "name a backend without 'model'", "proxy")
    return Policy(backends=backends, proxy=proxy, **rest)


POLICY = section(
    _policy,
    {
        "listen": LISTEN,
        "proxy": reference("backends").absent("a model without a route is not found"),
        "backends": mapping("backend", BACKEND),
        "routes": mapping("route", ROUTE),
        "limits": LIMITS,
        "telemetry": TELEMETRY,
    },
    free=FREE,
    rest=Policy,
)


def _names(root: Node) -> dict[str, frozenset[str]]:
    """What each top-level section names, whether or not it can be read: a reference to it is not dangling."""
    entries = root.entries if isinstance(root, Keys) else {}
    return {key: frozenset(entry.node.entries) for key, entry in entries.items() if isinstance(entry.node, Keys)}


def _plain(value: Mapping[str, str | None] | str) -> Node:
    if isinstance(value, str):
        return leaf(value)
    return Keys(0, 0, {key: Entry(0, leaf(text)) for key, text in value.items() if text is not None})


def _digest(content: str) -> str:
    return sha256(content.encode(errors="surrogatepass")).hexdigest()[:12]

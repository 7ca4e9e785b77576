"""A policy's text, or a command line's few words, as a `Policy`.

Each section is a table of its keys (`policies.schema`), its defaults stand in `policies.spec`, and what must hold
between keys is a function next to the table. To add a section: a dataclass there, a table here, a line in `POLICY`.
The two large ones stand in `policies.backends` and `policies.routes`.
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
from policies.address import RedisUrl, redis_url
from policies.backends import BACKEND, ENDPOINT, protocol_of
from policies.files import Files
from policies.headers import PASSWORD, heard
from policies.include import MOST, gathered
from policies.problem import Findings, Place, Wrong
from policies.reader import Scalar
from policies.routes import ROUTE
from policies.schema import (
    choice,
    duration,
    flag,
    items,
    mapping,
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
    Address,
    Backend,
    Limits,
    Listen,
    Policy,
    Redis,
    Secret,
    Telemetry,
)
from policies.tls import LISTEN_TLS

FREE = "x-"  # top-level keys that begin so are places for anchors


def load(path: str | Path, environ: Mapping[str, str], files: Files | None = None) -> Policy:
    """The policy in a UTF-8 file. Raises PolicyError with every problem; a file that cannot be read is one, too.

    `files` gets to know every file that the policy was read from.
    """
    files = files or Files()
    return parse(files.text(path, pipe=True), str(path), environ, files)


def parse(content: str, file: str, environ: Mapping[str, str], files: Files | None = None) -> Policy:
    """The policy that `content` describes. Raises PolicyError with every problem.

    `file` is its name in problems, and what the names of other files are relative to.
    """
    files = files or Files()
    made = gathered(content, file, environ, files)
    found = Findings(made.problems, failed=bool(made.problems))
    with found.reading(Place(file), made.root.line):
        policy = POLICY(made.root, Place(file, names=_defined(made.root), files=files))
    found.close()
    return replace(policy, version=_digest("\0".join(made.texts)))


def implicit(http: str | None = None, grpc: str | None = None, *, listen: Mapping[str, str] | None = None) -> Policy:
    """The policy of `headrace serve --backend URL`: one backend, named `backend`, that answers every model.

    Its callers may do to the server what they could without the gateway (`control`), but not share its memory.

    `http` is `http://host:port`, or `grpc://host:port` for a server that speaks gRPC alone; `grpc` is the gRPC address
    of the same server. With https:// and grpcs:// they are for TLS, by the authorities that the system trusts. `listen`
    has the forms and defaults of the section `listen`. Raises PolicyError.
    """
    found = Findings()
    address_of = {"http": http, "grpc": grpc} if grpc else http or ""
    with found.reading(Place("command line", "--backend"), 0):
        where = ENDPOINT(_plain(address_of), Place("command line", "--backend", line=0))
    with found.reading(Place("command line", "--listen"), 0):
        listeners = LISTEN(_plain(listen or {}), Place("command line", "--listen", line=0))
    found.close()
    backend = Backend(name="backend", endpoints=(where,), protocol=protocol_of((where,)), control=True)
    version = _digest(repr((where, listeners)))
    return Policy(backends={"backend": backend}, proxy="backend", listen=listeners, version=version)


# Listeners.


def _listener(host: str) -> Scalar[Address | None]:
    expected = f"host:port, a port on {host}, or off"
    return parsed(expected, lambda text: address.listener(text, host), lambda at: str(at) if at else "off")


def _distinct(listen: Listen) -> Iterator[Wrong]:
    for (key, at), (other, its) in combinations(listen.addresses.items(), 2):
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
        "tls": LISTEN_TLS.absent("callers speak plain text"),
        "compat": choice("headrace", "triton"),
    },
    _distinct,
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


# The rest.

LIMITS = section(
    Limits,
    {
        "in_flight": whole(1, 1_000_000),
        "body_bytes": size("1KiB", "2047MiB"),  # gRPC's messages have lengths below 2 GiB
        "reply_bytes": size("1KiB", "2047MiB"),
        "timeout": duration("1ms", "1d"),
        "drain": duration("0s", "1d"),
        "drain_delay": duration("0s", "1h"),
        "connections": whole(1, 1_000_000),
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


def _included(node: Node, at: Place) -> str:
    # A message of a file that is not there would show the variable's value.
    if isinstance(node, Leaf) and node.interpolated:
        raise Wrong("a variable in an included file's name", "write the name itself")
    return _INCLUDED(node, at)


def _few(names: Items) -> Iterator[tuple[int, Wrong]]:
    if len(names.children) > MOST:
        yield MOST, Wrong(f"more than {MOST} files", "put some of them together")


INCLUDE = items("file", replace(_INCLUDED, read=_included), _few)


POLICY = section(
    _policy,
    {
        "include": INCLUDE.absent("this file is the whole policy"),
        "listen": LISTEN,
        "proxy": reference("backends").absent("a model without a route is not found"),
        "backends": mapping("backend", BACKEND),
        "routes": mapping("route", ROUTE),
        "redis": REDIS.absent("caches are in memory"),
        "tenant_header": parsed("a header's name", heard).absent("requests have no tenant"),
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

"""The tables of backends: servers with a model or with all of them, and models in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from policies import address
from policies.headers import HEADER_VALUE, header_name
from policies.problem import Wrong
from policies.reader import Either, Scalar
from policies.schema import choice, duration, either, flag, items, mapping, name, parsed, path, section, text, whole
from policies.spec import Backend, Batch, Endpoint, Local
from policies.tls import BACKEND_TLS

_ENDPOINT_URL = parsed("http://host:port or grpc://host:port; https:// or grpcs:// for TLS", address.endpoint)
_ENDPOINT = section(
    Endpoint,
    {
        "http": parsed("http://host:port or https://host:port", address.http_url).absent("no calls over HTTP"),
        "grpc": parsed("host:port or grpcs://host:port", address.grpc_target).absent("no calls over gRPC"),
    },
    lambda made: () if made.http or made.grpc else [Wrong("has no address", "write http: or grpc:, or both")],
)
ENDPOINT = either("http://host:port, grpc://host:port or a mapping with http, grpc", _ENDPOINT_URL, _ENDPOINT)


def protocol_of(endpoints: tuple[Endpoint, ...]) -> Any:
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
_OF_SERVERS = (
    "kind", "protocol", "version", "connect_timeout", "first_byte_timeout", "idle_timeout", "stream_timeout", "headers",
    "tls", "ready_replicas", "control", "shared_memory",
)  # fmt: skip


def _backend(name: str, endpoints: Any = (), local: Any = None, protocol: Any = None, **rest: Any) -> Backend:
    if endpoints and local:
        raise Wrong("'endpoints' and 'local' exclude each other", "a model is on servers, or in this process", "local")
    if local is None:
        if not endpoints:
            raise Wrong(
                "has no endpoints", "write 'endpoints:' with a list, or 'local: PATH' for a model in this process"
            )
        if "tls" in rest and not any(endpoint.tls for endpoint in endpoints):
            right = "write https:// or grpcs:// in 'endpoints', or delete it"
            raise Wrong("'tls' says how TLS is spoken, and no endpoint speaks it", right, "tls")
        return Backend(name=name, endpoints=endpoints, protocol=protocol or protocol_of(endpoints), **rest)
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
    replicas = max(1, len(backend.endpoints))
    if backend.ready_replicas > replicas:
        wrong = f"ready_replicas is {backend.ready_replicas}, and there are {replicas} endpoints"
        yield Wrong(wrong, f"write {replicas} or less", "ready_replicas")
    if backend.shared_memory and replicas > 1:
        wrong = f"shared_memory is for one replica, and there are {replicas} endpoints"
        yield Wrong(wrong, "a region is registered with one server: make each a backend of its own", "shared_memory")


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
        "first_byte_timeout": duration("1ms", "1d").absent("the timeout"),
        "idle_timeout": duration("1ms", "1d"),
        "stream_timeout": duration("1ms", "30d").absent("a stream may last"),
        "headers": mapping("value", HEADER_VALUE, header_name),
        "tls": BACKEND_TLS,
        "ready_replicas": whole(1, 65536),
        "control": flag(),
        "shared_memory": flag(),
    },
    _addressed,
    rest=Backend,
    one_of=("endpoints", "local"),
    moot={"local": _OF_SERVERS},
)

"""What a call is called in a trace: OpenTelemetry's semantic conventions for the calls that come in and go out.

Names are those of schema 1.44.0 as opentelemetry-semantic-conventions 0.66b2 spells them; its RPC pages have replaced
`rpc.system`, `rpc.service` and `rpc.grpc.status_code` by `rpc.system.name`, a fully qualified `rpc.method` and
`rpc.response.status_code`. KServe v2 has no conventions of its own: whatever is not HTTP's or RPC's begins with
`headrace.`. Nothing a client sent stands in a span's name. Only what is recorded gets here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from backends.errors import BackendFailed, ConnectionLost, Expired, Failure, TooSlow, Unreachable
from backends.request import HttpCall, Relay, Reply, Request, RpcCall
from gateway import respond
from policies.spec import Endpoint

SCHEMA = "https://opentelemetry.io/schemas/1.44.0"

Attributes = dict[str, str | int | float | bool]

# Longer texts of clients tell nothing more.
_MAX_TEXT = 256
_METHODS = frozenset(("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"))
_OTHER = "_OTHER"

_SERVICE = "inference.GRPCInferenceService"
_RPC_METHODS = frozenset((
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStreamInfer",
    "ModelConfig", "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload",
    "SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister", "TraceSetting", "LogSettings",
))  # fmt: skip
_CODES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
# The codes that are a server's failure; the others are its caller's affair.
_SERVER_FAULTS = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"))

# Paths under /v2 that name no model, and what may stand behind one that does.
_PATHS = frozenset(("", "models/stats", "repository/index", "logging", "trace/setting", "health/live", "health/ready"))
_OF_A_MODEL = frozenset(("", "infer", "generate", "generate_stream", "ready", "config", "stats", "trace/setting"))


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call ended. `error` is its `error.type`, empty where the convention sees no error; `message` is for it."""

    attributes: Attributes = field(default_factory=dict)
    error: str = ""
    message: str = ""


def came(protocol: str, request: Request) -> tuple[str, Attributes]:
    """Name and attributes of the span of a call that came over `protocol`."""
    if protocol == "grpc":
        name, attributes = _rpc(request)
        # As gRPC writes it: `ipv4:127.0.0.1:4242`, `ipv6:%5B::1%5D:4242`.
        peer = request.arrival.peer() if request.arrival is not None else ""
        if peer.startswith("ipv"):
            host = peer.partition(":")[2].rpartition(":")[0]
            attributes["client.address"] = host.replace("%5B", "").replace("%5D", "").strip("[]")
    else:
        name, attributes, _, path, template = _http(request)
        attributes |= {"url.path": path[:_MAX_TEXT], "url.scheme": (request.arrival or {}).get("scheme", "http")}
        if template:
            attributes["http.route"] = template
        attributes |= _arrived(request.arrival or {})
    return name, attributes | _model(request)


def goes(protocol: str, request: Request, to: Endpoint) -> tuple[str, Attributes]:
    """Name and attributes of the span of a call that goes `to` a server over `protocol`."""
    if protocol == "grpc":
        name, attributes = _rpc(request)
        address = to.grpc_target
    else:
        name, attributes, _, path, template = _http(request)
        address = (to.http or "").partition("://")[2]
        # Without the query, which is the caller's and may hold a secret. An address has no credentials.
        attributes["url.full"] = f"{to.http}{path}"
        if template:
            attributes["url.template"] = template
    attributes |= _server(address)
    return name, attributes | _model(request)


def answered(
    protocol: str, reply: Reply | None, error: BaseException | None, statuses: respond.Statuses = respond.HEADRACE
) -> Ending:
    """The end of a call that came in: what the caller was told. `reply` and `error` both: a stream that was cut."""
    if protocol == "grpc":
        code = _CODES[_grpc_code(error, statuses)]
        attributes: Attributes = {"rpc.response.status_code": code}
        if code not in _SERVER_FAULTS:
            return Ending(attributes | _told(error))
        return Ending(attributes, code if isinstance(error, BackendFailed) else type(error).__name__, _message(error))
    sent = (reply.body.status if isinstance(reply.body, Relay) else 200) if reply is not None else None
    if isinstance(error, asyncio.CancelledError):
        return Ending(_status(sent) | _told(error))
    outcome = (sent or 200) if error is None else _http_code(error, statuses)
    attributes = _status(sent or outcome)
    if outcome < 500:
        return Ending(attributes | _told(error))
    own = error is not None and not isinstance(error, BackendFailed)
    return Ending(attributes, type(error).__name__ if own else str(outcome), _message(error))


def got(protocol: str, reply: Reply | None, error: BaseException | None) -> Ending:
    """The end of a call that went out: what the server said, if it did."""
    attributes: Attributes = {}
    if protocol == "grpc":
        if error is None:
            # A relayed call goes on when its first message is there, and may fail yet.
            whole = reply is None or not isinstance(reply.body, Relay)
            return Ending({"rpc.response.status_code": "OK"} if whole else {})
        said = isinstance(error, BackendFailed) and error.grpc
        if said or isinstance(error, Expired | TooSlow | Unreachable | ConnectionLost | asyncio.CancelledError):
            attributes = {"rpc.response.status_code": _CODES[_grpc_code(error, respond.HEADRACE)]}
        kind = str(attributes["rpc.response.status_code"]) if said else type(error).__name__
        return Ending(attributes, kind, _message(error))
    if error is None:
        status = reply.body.status if reply is not None and isinstance(reply.body, Relay) else 200
        return Ending(_status(status), str(status) if status >= 400 else "")
    if isinstance(error, BackendFailed) and not error.grpc:
        return Ending(_status(error.status), str(error.status), _message(error))
    return Ending({}, type(error).__name__, _message(error))


def carrier(request: Request) -> Mapping[str, Any]:
    """Every header (or metadata) of a call, those included that a relayed call carries by itself."""
    content = request.content
    if isinstance(content, HttpCall):
        return {k.decode("latin-1"): v.decode("latin-1") for k, v in content.headers} | dict(request.headers)
    if isinstance(content, RpcCall):
        return {k: v for k, v in content.metadata if isinstance(v, str)} | dict(request.headers)
    return request.headers


def _http(request: Request) -> tuple[str, Attributes, str, str, str]:
    """Name, attributes, method, path and the path's template, which is empty where the path is none that is known."""
    content = request.content
    if isinstance(content, HttpCall):
        method, path = content.method, content.target.partition("?")[0]
    else:
        version = f"/versions/{quote(request.version, safe='')}" if request.version else ""
        method, path = "POST", f"/v2/models/{quote(request.model, safe='')}{version}/infer"
    template = _template(path)
    known = method in _METHODS
    attributes: Attributes = {"http.request.method": method if known else _OTHER}
    if not known:
        attributes["http.request.method_original"] = method[:_MAX_TEXT]
    return f"{method if known else 'HTTP'} {template}".strip(), attributes, method, path, template


def _rpc(request: Request) -> tuple[str, Attributes]:
    content = request.content
    method = content.method.removeprefix("/") if isinstance(content, RpcCall) else f"{_SERVICE}/ModelInfer"
    service, _, short = method.rpartition("/")
    if service == _SERVICE and short in _RPC_METHODS:
        return method, {"rpc.system.name": "grpc", "rpc.method": method}
    original = {"rpc.method_original": method[:_MAX_TEXT]}
    return "grpc", {"rpc.system.name": "grpc", "rpc.method": _OTHER, **original}


def _template(path: str) -> str:
    """`/v2/models/m/versions/1/infer` as `/v2/models/{model}/versions/{version}/infer`."""
    match path.strip("/").split("/"):
        case ["v2", *rest] if "/".join(rest) in _PATHS:
            return path.rstrip("/")
        case ["v2", "models", _, "versions", _, *rest] if "/".join(rest) in _OF_A_MODEL:
            return "/".join(("/v2/models/{model}/versions/{version}", *rest))
        case ["v2", "models", _, *rest] if "/".join(rest) in _OF_A_MODEL:
            return "/".join(("/v2/models/{model}", *rest))
        case ["v2", "repository", "models", _, ("load" | "unload") as action]:
            return f"/v2/repository/models/{{model}}/{action}"
    return ""


def _arrived(scope: Mapping[str, Any]) -> Attributes:
    """What an ASGI scope tells beside the call."""
    attributes: Attributes = {}
    if version := scope.get("http_version"):
        attributes["network.protocol.version"] = version
    if client := scope.get("client"):
        attributes["client.address"] = client[0]
    for name, value in scope.get("headers", ()):
        if name == b"host":
            attributes |= _server(value.decode("latin-1"))
        elif name == b"user-agent":
            attributes["user_agent.original"] = value.decode("latin-1")[:_MAX_TEXT]
    return attributes


def _server(address: str) -> Attributes:
    """`host:port`; empty where it is something else, for a client may say anything."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return {}
    made: Attributes = {"server.address": host[:_MAX_TEXT]} if host else {}
    return made | {"server.port": port} if host and port else made


def _model(request: Request) -> Attributes:
    return {"headrace.model": request.model[:128]} if request.model else {}


def _status(status: int | None) -> Attributes:
    return {} if status is None else {"http.response.status_code": status}


def _told(error: BaseException | None) -> Attributes:
    """A failure that is no error of this side's."""
    return {} if error is None else {"headrace.failure": _message(error)}


def _message(error: BaseException | None) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "the caller left"
    return error.message[:500] if isinstance(error, Failure) else type(error).__name__ if error else ""


def _http_code(error: BaseException, statuses: respond.Statuses) -> int:
    return statuses.http(error)[0] if isinstance(error, Failure) else 500


def _grpc_code(error: BaseException | None, statuses: respond.Statuses) -> int:
    if error is None:
        return 0
    code = 1 if isinstance(error, asyncio.CancelledError) else 13
    if isinstance(error, Failure):
        code = statuses.grpc(error)[0]
    return code if 0 <= code < len(_CODES) else 2

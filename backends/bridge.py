"""Calls of one protocol for a server that has the other: an HTTP caller before a gRPC server, and the reverse.

What servers and models say of themselves has one meaning and two forms; a raw body becomes an inference. Whatever else
is relayed has a form in one protocol only, and is Unsupported.
"""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import quote, unquote

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from backends.errors import BackendFailed, BadReply, BadRequest, NotFound, Unsupported, WrongMethod
from backends.interface import Told, raw
from backends.kserve_grpc_relayed import named
from backends.kserve_json import error_text, write_reply
from backends.proto import management_pb2 as pb
from backends.proto import wire
from backends.proto.document import document
from backends.request import HttpCall, Relay, Reply, Request, RpcCall, Service, replace
from backends.stream import once, whole
from backends.tensor import shown

_SERVICE = "/inference.GRPCInferenceService"
# Statistics of a thousand models are half a megabyte.
_MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
_JSON = (b"content-type", b"application/json")

_REPLIES: dict[str, type[Message]] = {
    "ServerMetadata": pb.ServerMetadataResponse, "ModelMetadata": pb.ModelMetadataResponse,
    "ModelConfig": pb.ModelConfigResponse, "ModelReady": pb.ModelReadyResponse,
    "ModelStatistics": pb.ModelStatisticsResponse, "RepositoryIndex": pb.RepositoryIndexResponse,
}  # fmt: skip
# What stands behind the model in a path.
_OF_A_MODEL = {"": "ModelMetadata", "config": "ModelConfig", "ready": "ModelReady", "stats": "ModelStatistics"}

_Reply = TypeVar("_Reply", bound=Message)


class HttpOverGrpc:
    """HTTP calls, by `grpc`, which is the one client of the replica `name`; `told` is of its models."""

    def __init__(self, grpc: Service, name: str, told: Told) -> None:
        self._grpc = grpc
        self._name = name
        self._told = told

    async def __call__(self, request: Request, /) -> Reply:
        call = request.content
        assert isinstance(call, HttpCall)
        method, version, verb = self._asked(call)
        if call.method not in verb:
            raise WrongMethod(f"expected {' or '.join(verb)}, got {call.method}", ", ".join(verb))
        if version and not version.isdecimal():
            raise NotFound("Not Found")
        request = replace(request, version=request.version or version, headers=_headers(call, request))
        if method == "ModelInfer":
            if request.regions:
                raise Unsupported(f"tensors in shared memory need HTTP here, and '{self._name}' has no http address")
            return await self._raw(request, call)
        message = _message(method, request.model, request.version, call.body)
        reply = await self._ask(request, method, message, _REPLIES[method])
        if isinstance(reply, pb.ModelReadyResponse):
            return Reply(_relay(b"") if reply.ready else _relay(b'{"error":"Model version not ready"}', 400))
        return Reply(_relay(msgspec.json.encode(_said(reply))))

    def _asked(self, call: HttpCall) -> tuple[str, str, tuple[str, ...]]:
        """The method that a path stands for, the version that it names, and how it is asked for."""
        rest = [unquote(segment) for segment in call.target.partition("?")[0].split("/") if segment][1:]
        version = ""
        if not rest:
            return "ServerMetadata", version, ("GET", "HEAD")
        if rest == ["models", "stats"]:
            return "ModelStatistics", version, ("GET", "HEAD")
        if rest == ["repository", "index"]:
            return "RepositoryIndex", version, ("POST",)
        if rest[0] == "models":
            tail = rest[2:]
            if tail[:1] == ["versions"] and len(tail) > 1:
                version, tail = tail[1], tail[2:]
            if tail == ["infer"]:
                return "ModelInfer", version, ("POST",)
            if (method := _OF_A_MODEL.get("/".join(tail))) is not None:
                return method, version, ("GET", "HEAD")
        raise Unsupported(f"this call needs HTTP, and the policy gives '{self._name}' no http address")

    async def _raw(self, request: Request, call: HttpCall) -> Reply:
        infer = raw(call.body, await self._told(request), request.model)
        reply = await self._grpc(replace(request, content=infer))
        length, parts = write_reply(reply.answer, infer, reply.answer.model)
        body = b"".join(parts)
        if length is None:
            return Reply(_relay(body))
        return Reply(_relay(body, 200, (b"inference-header-content-length", b"%d" % length)))

    async def _ask(self, request: Request, method: str, message: bytes, kind: type[_Reply]) -> _Reply:
        call = RpcCall(f"{_SERVICE}/{method}", once(message))
        reply = await self._grpc(replace(request, content=call, stream=False))
        assert isinstance(reply.body, Relay)
        body = await whole(reply.body, _MAX_DOCUMENT_BYTES)
        try:
            return kind.FromString(body)
        except DecodeError as error:
            raise BadReply(f"{method}: expected a {kind.DESCRIPTOR.name}: {error}"[:300]) from None


class GrpcOverHttp:
    """gRPC calls, by `http`, which is the one client of the replica `name`."""

    def __init__(self, http: Service, name: str) -> None:
        self._http = http
        self._name = name

    async def __call__(self, request: Request, /) -> Reply:
        call = request.content
        assert isinstance(call, RpcCall)
        method = call.method.rpartition("/")[2]
        if method not in _REPLIES:
            raise Unsupported(f"this call needs gRPC, and '{self._name}' has no known grpc address")
        message = await anext(call.messages, b"")
        headers = tuple((k.encode(), v.encode()) for k, v in call.metadata if isinstance(v, str))
        said = await self._ask(request, method, message, headers)
        return Reply(Relay(200, (), once(said.SerializeToString())))

    async def _ask(
        self, request: Request, method: str, message: bytes, headers: tuple[tuple[bytes, bytes], ...]
    ) -> Message:
        verb, body = "GET", b""
        if method == "ServerMetadata":
            target = "/v2"
        elif method == "RepositoryIndex":
            asked = _parsed(method, message, pb.RepositoryIndexRequest)
            if asked.repository_name:
                raise Unsupported("'repository_name' specification is not supported")
            verb, target, body = "POST", "/v2/repository/index", msgspec.json.encode({"ready": asked.ready})
        else:
            model, version = named(method, message)
            if version and not version.isdecimal():
                raise BadRequest(f"{method}: expected a model version that is a whole number, got {shown(version)}")
            target = _target(method, model, version)
        call = HttpCall(verb, target, headers, body)
        reply = await self._http(replace(request, content=call, stream=False))
        assert isinstance(reply.body, Relay)
        status, text = reply.body.status, await whole(reply.body, _MAX_DOCUMENT_BYTES)
        if method == "ModelReady" and status in (200, 400, 404):
            return pb.ModelReadyResponse(ready=status == 200)
        if status != 200:
            raise BackendFailed((error_text(text) or "")[:1000] or f"{target} answered {status}", status, body=text)
        return _heard(method, text)


def _message(method: str, model: str, version: str, body: bytes = b"") -> bytes:
    """A method's request."""
    if method == "ServerMetadata":
        return b""
    if method != "RepositoryIndex":
        return wire.text(1, model) + wire.text(2, version)
    try:
        ready = msgspec.json.decode(body or b"{}", type=_Index).ready
    except msgspec.MsgspecError as error:
        raise BadRequest(f"repository index: expected a JSON object with 'ready': {error}"[:300]) from None
    return pb.RepositoryIndexRequest(ready=ready).SerializeToString()


class _Index(msgspec.Struct):
    ready: bool = False


def _target(method: str, model: str, version: str) -> str:
    """The path of a call about a model; statistics without one are of all."""
    tail = next(tail for tail, known in _OF_A_MODEL.items() if known == method)
    if method == "ModelStatistics" and not model:
        return "/v2/models/stats"
    of = f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
    return f"{of}/{tail}" if tail else of


def _said(reply: Message) -> Any:
    """What a gRPC reply says as HTTP's document: two are not the message itself."""
    made = document(reply)
    if isinstance(reply, pb.ModelConfigResponse):
        return made["config"]
    if isinstance(reply, pb.RepositoryIndexResponse):
        return [{key: value for key, value in model.items() if value} for model in made["models"]]
    return made


def _heard(method: str, text: bytes) -> Message:
    """What HTTP's document says as a gRPC reply."""
    message = _REPLIES[method]()
    try:
        if method == "RepositoryIndex":
            said: dict[str, Any] = {"models": msgspec.json.decode(text, type=list[dict[str, Any]])}
        else:
            said = msgspec.json.decode(text, type=dict[str, Any])
        json_format.ParseDict(
            {"config": said} if method == "ModelConfig" else said,
            message,
            ignore_unknown_fields=True,
            max_recursion_depth=32,
        )
    except (
        msgspec.MsgspecError,
        json_format.ParseError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        why = " ".join(str(error).split())
        raise BadReply(f"{method}: expected Triton's JSON: {why}"[:300]) from None
    return message


def _parsed(method: str, message: bytes, kind: type[_Reply]) -> _Reply:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise BadRequest(f"{method}: expected its protobuf message: {error}"[:300]) from None


def _headers(call: HttpCall, request: Request) -> dict[str, Any]:
    """The caller's headers that say something of the call, and not of its HTTP form."""
    kept = {k.decode("latin-1"): v.decode("latin-1") for k, v in call.headers if k not in _OF_THE_FORM}
    return {**kept, **request.headers}


_OF_THE_FORM = frozenset({b"accept", b"accept-encoding", b"content-type", b"inference-header-content-length"})


def _relay(body: bytes, status: int = 200, *headers: tuple[bytes, bytes]) -> Relay:
    kind = (b"content-type", b"application/octet-stream") if headers else _JSON
    return Relay(status, (kind, *headers, (b"content-length", b"%d" % len(body))), once(body))

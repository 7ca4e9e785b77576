"""A Triton (or any KServe v2 server) over HTTP, as a service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from urllib.parse import quote

import msgspec

from backends.errors import BackendFailed, BadReply, Failure, Rejected
from backends.http_client import HttpClient, HttpResponse
from backends.kserve_json import read_reply, write_request
from backends.request import HttpCall, Infer, Relay, Reply, Request, Trait
from backends.tensor import Bytes

# Set here from the body that is really sent, or private to the caller's own connection.
_OURS = frozenset({"content-type", "content-length", "inference-header-content-length", "accept-encoding", "host"})

# Longer messages than this are a model's stack trace.
_MAX_MESSAGE = 1000
# How servers say that a queue of theirs is full: busy, not down.
_QUEUE_FULL = ("exceeds maximum queue size", "queue is full", "queue full")


class _Transaction(msgspec.Struct):
    decoupled: bool = False


class _Configuration(msgspec.Struct):
    """What is asked of a model's configuration; Triton leaves out what does not apply."""

    name: str
    model_transaction_policy: _Transaction | None = None
    sequence_batching: msgspec.Raw = msgspec.Raw()


_configuration = msgspec.json.Decoder(_Configuration)


class TritonHttp:
    """Answers inference calls (`Infer`) and relays HTTP ones (`HttpCall`) through `client`."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def __call__(self, request: Request, /) -> Reply:
        if isinstance(request.content, Infer):
            return await self._infer(request, request.content)
        if isinstance(request.content, HttpCall):
            return await self._relay(request, request.content)
        raise BadReply("a gRPC call cannot be relayed over HTTP")

    async def unready(self, model: str, deadline: float, headers: Mapping[str, str]) -> str:
        """Why the server, or `model` on it, is not ready; empty where it is."""
        target = f"/v2/models/{quote(model, safe='')}/ready" if model else "/v2/health/ready"
        try:
            response = await self._client.request("GET", target, _encoded(headers), deadline=deadline)
        except Failure as failure:
            return failure.message
        return "" if response.status == 200 else f"{target} answered {response.status}"

    async def trait(self, model: str, version: str, deadline: float, headers: Mapping[str, str]) -> Trait:
        """What `model` is like. Raises Failure where the server does not tell."""
        target = _infer_target(model, version).removesuffix("/infer") + "/config"
        response = await self._client.request("GET", target, _encoded(headers), deadline=deadline)
        if response.status != 200:
            raise _failure(response)
        try:
            told = _configuration.decode(response.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise BadReply(f"{target}: expected a model's configuration as JSON") from None
        policy = told.model_transaction_policy
        return Trait(decoupled=policy is not None and policy.decoupled, stateful=bool(told.sequence_batching))

    def refresh(self) -> None:
        self._client.refresh()

    async def close(self) -> None:
        await self._client.close()

    async def _infer(self, request: Request, infer: Infer) -> Reply:
        target = _infer_target(request.model, request.version)
        header_length, parts = write_request(infer)
        headers = _encoded(request.headers)
        if header_length is None:
            headers.append((b"content-type", b"application/json"))
        else:
            headers.append((b"content-type", b"application/octet-stream"))
            headers.append((b"inference-header-content-length", b"%d" % header_length))
        body: bytes | Sequence[Bytes] = parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else parts
        response = await self._client.request("POST", target, headers, body, deadline=request.deadline)
        if response.status != 200:
            if response.status >= 500:
                # Triton answers 500 to data that does not fit its shape. A body that went unread is read now: what
                # raises BadRequest here was the caller's fault.
                infer.inputs.decoded  # noqa: B018
            if response.status < 400:
                raise BadReply(f"backend answered an inference with status {response.status}")
            raise _failure(response)
        answer = read_reply(response.body, _header_length(response))
        return Reply(answer)

    async def _relay(self, request: Request, call: HttpCall) -> Reply:
        headers = _encoded(request.headers)
        named = {name for name, _ in headers}
        headers += [(name, value) for name, value in call.headers if name not in named]
        stream = await self._client.stream(call.method, call.target, headers, call.body, deadline=request.deadline)
        return Reply(Relay(stream.status, stream.headers, stream))


@lru_cache(512)
def _infer_target(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}/infer" if version else f"{path}/infer"


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(k.encode(), str(v).encode("latin-1", "replace")) for k, v in headers.items() if k not in _OURS]


def _header_length(response: HttpResponse) -> int | None:
    for name, value in response.headers:
        if name == b"inference-header-content-length":
            if not value.isdigit():
                raise BadReply(f"inference-header-content-length: expected a number, got {value[:32]!r}")
            return int(value)
    return None


def _failure(response: HttpResponse) -> Failure:
    """The backend's own words and status; a full queue is busy, which is no failure of the backend."""
    try:
        body = msgspec.json.decode(response.body)
        message = str(body["error"]) if isinstance(body, dict) and "error" in body else ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        message = ""
    message = " ".join(message.split())[:_MAX_MESSAGE] or f"backend answered {response.status}"
    if response.status in (429, 503) and any(words in message.lower() for words in _QUEUE_FULL):
        return Rejected(message)
    return BackendFailed(message, response.status, body=response.body)

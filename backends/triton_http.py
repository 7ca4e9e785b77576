"""A Triton (or any KServe v2 server) over HTTP, as a service."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Any
from urllib.parse import quote

from backends.configuration import read_document
from backends.errors import BackendFailed, BadReply, Failure, Rejected
from backends.http_client import HttpClient, HttpResponse
from backends.kserve_json import error_text, read_reply, write_request
from backends.request import HOP_BY_HOP, HttpCall, Infer, Metadata, Relay, Reply, Request, Trait, joint, replace
from backends.tensor import Bytes

# Set here from the body that is really sent, or private to the caller's own connection.
_OURS = frozenset({"content-type", "content-length", "inference-header-content-length", "accept-encoding", "host"})

# Of a response's headers: those of its hop and its body. Those that begin with content- are its body's, too.
_ITS_OWN = frozenset(name.encode() for name in HOP_BY_HOP) | {
    b"inference-header-content-length", b"date", b"server", b"alt-svc",
}  # fmt: skip

# Longer messages than this are a model's stack trace.
_MAX_MESSAGE = 1000
# How servers say that a queue of theirs is full: busy, not down.
_QUEUE_FULL = ("exceeds maximum queue size", "queue is full", "queue full")


class TritonHttp:
    """Answers inference calls (`Infer`) and relays HTTP ones (`HttpCall`) through `client`, on whose clock it is.

    The backend is told what is left of a deadline in the header `headrace-timeout-ms`, which another gateway hears. A
    KServe parameter `timeout` stays as its caller wrote it: to Triton it is how long a call may wait in a queue.
    """

    def __init__(self, client: HttpClient, now: Callable[[], float]) -> None:
        self._client = client
        self._now = now

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

    async def trait(self, model: str, version: str, deadline: float, headers: Mapping[str, Any]) -> Trait:
        """What `model` is like. Raises Failure where the server does not tell."""
        target = _infer_target(model, version).removesuffix("/infer") + "/config"
        response = await self._client.request("GET", target, _encoded(headers), deadline=deadline)
        if response.status != 200:
            raise _failure(response)
        return read_document(response.body, target)

    def refresh(self) -> None:
        self._client.refresh()

    async def close(self) -> None:
        await self._client.close()

    async def _infer(self, request: Request, infer: Infer) -> Reply:
        target = _infer_target(request.model, request.version)
        header_length, parts = write_request(infer)
        headers = self._headers(request)
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
        told = _told(response)
        return Reply(replace(answer, headers=told) if told else answer)

    async def _relay(self, request: Request, call: HttpCall) -> Reply:
        headers = self._headers(request)
        named = {name for name, _ in headers}
        headers += [(name, value) for name, value in call.headers if name not in named]
        stream = await self._client.stream(call.method, call.target, headers, call.body, deadline=request.deadline)
        return Reply(Relay(stream.status, stream.headers, stream))

    def _headers(self, request: Request) -> list[tuple[bytes, bytes]]:
        headers = _encoded(request.headers)
        if request.deadline < inf:
            # Never 0, which would not be a time; whoever has less than a millisecond is told of one.
            headers.append((b"headrace-timeout-ms", b"%d" % max(1, int((request.deadline - self._now()) * 1e3))))
        return headers


@lru_cache(512)
def _infer_target(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}/infer" if version else f"{path}/infer"


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [
        (k.encode(), (v if isinstance(v, str) else _text(k, v)).encode("latin-1", "replace"))
        for k, v in headers.items()
        if k not in _OURS
    ]


def _text(name: str, value: str | bytes | tuple[str | bytes, ...]) -> str:
    """A value of gRPC metadata as a header's: bytes as base64, which they are on HTTP/2, and repeated ones joined."""
    if isinstance(value, tuple):
        return joint(name).join(_text(name, one) for one in value)
    return b64encode(value).decode().rstrip("=") if isinstance(value, bytes) else value


def _told(response: HttpResponse) -> Metadata:
    """What the server says beside its answer that is meant for the caller."""
    told = [
        (name, value)
        for name, value in response.headers
        if name not in _ITS_OWN and not name.startswith((b"content-", b"headrace-"))
    ]
    if not told:
        return ()
    connection = [value for name, value in response.headers if name == b"connection"]
    hop = {part.strip().lower() for part in b",".join(connection).split(b",")}
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in told if name not in hop)


def _header_length(response: HttpResponse) -> int | None:
    for name, value in response.headers:
        if name == b"inference-header-content-length":
            if not value.isdigit():
                raise BadReply(f"inference-header-content-length: expected a number, got {value[:32]!r}")
            return int(value)
    return None


def _failure(response: HttpResponse) -> Failure:
    """The backend's own words and status; a full queue is busy, which is no failure of the backend."""
    message = (error_text(response.body) or "")[:_MAX_MESSAGE] or f"backend answered {response.status}"
    if response.status in (429, 503) and any(words in message.lower() for words in _QUEUE_FULL):
        return Rejected(message)
    return BackendFailed(message, response.status, body=response.body, headers=_told(response))

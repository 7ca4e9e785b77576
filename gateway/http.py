"""The HTTP edge: KServe v2 as plain ASGI.

Bytes become a `Request`, a `Reply` becomes bytes; nothing is decided here. Infer calls are read by
`backends.kserve_json`; other calls under /v2 are relayed as they are. Every error leaves as `{"error": "<one line>"}`
with the status of `gateway.respond`, and the connection lives on.
"""

from __future__ import annotations

import asyncio
import math
import re
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote_to_bytes

from backends.errors import BadRequest, Failure, NotFound, TooLarge, UnknownEncoding, WrongMethod
from backends.kserve_json import error_body, read_request, write_reply
from backends.request import Answer, HttpCall, Infer, Relay, Reply, Request, Service
from gateway import respond
from gateway.server import TASK, Message, Receive, Scope, Send

RawHeaders = tuple[tuple[bytes, bytes], ...]

# Never cross a proxy (RFC 9110, 7.6.1), or are written anew from the body that is really sent.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
    }
    | {b"transfer-encoding", b"upgrade", b"content-length", b"host", b"expect"}
)
# Ours, or about the encoding of a body that a backend gets decoded.
_NOT_FORWARDED = HOP_BY_HOP | {b"content-encoding", b"accept-encoding", b"content-type"}
# Longer numbers are no length and no time; int() itself refuses them only from 4,300 digits on.
_NUMBER = re.compile(rb"[0-9]{1,18}")
_ASKED = "headrace.asked"
_JSON: RawHeaders = ((b"content-type", b"application/json"),)


class HttpEdge:
    """The ASGI application in front of `service`.

    `ready` says whether the gateway can answer at all. `refused` is told of failures that `service` never saw, `report`
    of defects, with the exception.
    """

    def __init__(
        self,
        service: Service,
        *,
        now: Callable[[], float],
        max_body_bytes: Callable[[], int],
        ready: Callable[[], bool],
        decision_headers: Callable[[Reply], respond.Headers],
        refused: Callable[[Failure], None],
        report: Callable[[BaseException], None],
    ) -> None:
        self._service = service
        self._now = now
        self._max_body_bytes = max_body_bytes
        self._ready = ready
        self._decision_headers = decision_headers
        self._refused = refused
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[TASK] = asyncio.current_task()
        try:
            await self._answer(scope, receive, send)
        except Failure as failure:
            if _ASKED not in scope:
                self._refused(failure)
            status, headers = respond.http_status(failure)
            await _send(send, status, (*_JSON, *_raw(headers)), error_body(failure.message))
        except asyncio.CancelledError:
            # The client has left: there is nobody to answer. A shutdown ends in the same way.
            pass
        except Exception as error:
            self._report(error)
            await _send(send, 500, _JSON, error_body("internal error in the gateway"))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        segments = _segments(scope["raw_path"])
        match segments:
            case ["livez"] | ["healthz"] | ["v2", "health", "live"]:
                _allow(scope, "GET", "HEAD")
                await _send(send, 200, (), b"")
            case ["readyz"] | ["v2", "health", "ready"]:
                _allow(scope, "GET", "HEAD")
                ready = self._ready()
                await _send(send, 200 if ready else 503, () if ready else ((b"retry-after", b"1"),), b"")
            case ["v2", "models", model, "infer"]:
                await self._infer(scope, receive, send, model, "")
            case ["v2", "models", model, "versions", version, "infer"]:
                await self._infer(scope, receive, send, model, version)
            case ["v2", *rest]:
                model = rest[1] if len(rest) > 1 and rest[0] == "models" and rest[1] != "stats" else ""
                await self._relay(scope, receive, send, model)
            case _:
                raise NotFound(f"no such path: {scope['path'][:200]!r}; models are under /v2/models")

    async def _infer(self, scope: Scope, receive: Receive, send: Send, model: str, version: str) -> None:
        _allow(scope, "POST")
        headers = dict(scope["headers"])
        length = headers.get(b"inference-header-content-length")
        if length is not None and not _NUMBER.fullmatch(length):
            raise BadRequest(
                f"Inference-Header-Content-Length: expected a number, got {length[:32].decode('latin-1')!r}"
            )
        if length is not None and int(length) == 0:
            # A raw body has no names: only the backend knows what it means.
            await self._relay(scope, receive, send, model)
            return
        body = await self._body(scope, receive, headers)
        infer = read_request(body, int(length) if length is not None else None)
        request = Request(
            model=model,
            version=version,
            content=infer,
            deadline=self._deadline(headers, infer),
            headers=_forwarded(scope["headers"]),
        )
        scope[_ASKED] = True
        reply = await self._service(request)
        assert isinstance(reply.body, Answer)
        header_length, parts = write_reply(reply.body, infer, model)
        kind: RawHeaders = _JSON
        if header_length is not None:
            kind = (
                (b"content-type", b"application/octet-stream"),
                (b"inference-header-content-length", b"%d" % header_length),
            )
        payload = parts[0] if len(parts) == 1 else b"".join(parts)
        await _send(send, 200, (*kind, *_raw(self._decision_headers(reply))), bytes(payload))

    async def _relay(self, scope: Scope, receive: Receive, send: Send, model: str) -> None:
        headers = dict(scope["headers"])
        if b"content-encoding" in headers:
            body = await self._read(scope, receive, headers)
        else:
            body = await self._body(scope, receive, headers)
        query = scope["query_string"]
        target = scope["raw_path"].decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
        named = _named_in_connection(headers)
        call = HttpCall(
            scope["method"],
            target,
            tuple((k, v) for k, v in scope["headers"] if k not in HOP_BY_HOP and k not in named),
            body,
        )
        request = Request(
            model=model,
            content=call,
            deadline=self._deadline(headers, None),
            headers=_forwarded(scope["headers"]),
            stream=True,
        )
        scope[_ASKED] = True
        reply = await self._service(request)
        assert isinstance(reply.body, Relay)
        relayed = _send_relay(send, reply.body, scope["method"], _raw(self._decision_headers(reply)))
        try:
            await relayed
        except Failure:
            # Cut in the middle: returning without the end makes the server abort the connection, so that the caller
            # cannot take what it has for the whole. The failure is recorded where the stream was made.
            return

    def _deadline(self, headers: dict[bytes, bytes], infer: Infer | None) -> float:
        """When the caller stops waiting, from `headrace-timeout-ms` and the KServe parameter `timeout` (in us)."""
        deadline = math.inf
        given = headers.get(b"headrace-timeout-ms")
        if given is not None:
            if not _NUMBER.fullmatch(given) or int(given) == 0:
                raise BadRequest(
                    f"headrace-timeout-ms: expected a whole number above 0, got {given[:32].decode('latin-1')!r}"
                )
            deadline = self._now() + int(given) / 1e3
        timeout = infer.parameters.get("timeout") if infer is not None else None
        if isinstance(timeout, int) and not isinstance(timeout, bool) and timeout > 0:
            deadline = min(deadline, self._now() + timeout / 1e6)
        return deadline

    async def _body(self, scope: Scope, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        """The body, decoded where it is compressed, within the limit both before and after."""
        body = await self._read(scope, receive, headers)
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding == b"identity":
            return body
        if encoding not in (b"gzip", b"deflate"):
            raise UnknownEncoding(
                f"content-encoding: expected gzip or deflate, got {encoding[:32].decode('latin-1')!r}"
            )
        return _inflated(body, encoding, self._max_body_bytes())

    async def _read(self, scope: Scope, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        limit = self._max_body_bytes()
        length = headers.get(b"content-length")
        if length is not None and _NUMBER.fullmatch(length) and int(length) > limit:
            raise TooLarge(f"request body: expected at most {limit} bytes, got {int(length)}")
        message = await receive()
        if not message.get("more_body") and message["type"] == "http.request":
            body: bytes = message.get("body", b"")
            if len(body) > limit:
                raise TooLarge(f"request body: expected at most {limit} bytes, got {len(body)}")
            return body
        # One buffer however many chunks: a table of a million one-byte chunks would cost a hundred times their bytes.
        whole = bytearray()
        while True:
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            whole += message.get("body", b"")
            if len(whole) > limit:
                raise TooLarge(f"request body: expected at most {limit} bytes, got more")
            if not message.get("more_body"):
                return bytes(whole)
            message = await receive()


def _segments(raw_path: bytes) -> list[str]:
    """The path's segments, each decoded on its own, so that a model name may hold an encoded slash."""
    try:
        return [unquote_to_bytes(segment).decode() for segment in raw_path.split(b"/") if segment]
    except UnicodeDecodeError:
        raise BadRequest("path: expected UTF-8") from None


def _allow(scope: Scope, *methods: str) -> None:
    if scope["method"] not in methods:
        raise WrongMethod(f"expected {' or '.join(methods)}, got {scope['method']}", ", ".join(methods))


def _named_in_connection(headers: dict[bytes, bytes]) -> frozenset[bytes]:
    connection = headers.get(b"connection")
    if connection is None:
        return frozenset()
    return frozenset(name.strip().lower() for name in connection.split(b","))


def _forwarded(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """The caller's headers that the backend is meant to see beside an infer call."""
    return {
        k.decode("latin-1"): v.decode("latin-1")
        for k, v in headers
        if k not in _NOT_FORWARDED and k != b"inference-header-content-length" and not k.startswith(b"headrace-")
    }


def _inflated(body: bytes, encoding: bytes, limit: int) -> bytes:
    # gzip has its own frame; deflate means zlib's (RFC 9110), though some clients send it bare.
    bare = encoding == b"deflate" and (len(body) < 2 or (body[0] & 0x0F) != 8 or (body[0] << 8 | body[1]) % 31 != 0)
    inflater = zlib.decompressobj(-15 if bare else 47)
    try:
        data = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadRequest(f"content-encoding {encoding.decode()}: {error}") from None
    if len(data) > limit:
        raise TooLarge(f"request body: expected at most {limit} bytes after decompression, got more")
    if not inflater.eof:
        raise BadRequest(f"content-encoding {encoding.decode()}: the compressed body is cut short")
    return data


def _raw(headers: respond.Headers) -> RawHeaders:
    return tuple((k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in headers)


async def _send(send: Send, status: int, headers: RawHeaders, body: bytes) -> None:
    start: Message = {
        "type": "http.response.start",
        "status": status,
        "headers": [*headers, (b"content-length", b"%d" % len(body))],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})


async def _send_relay(send: Send, relay: Relay, method: str, extra: RawHeaders) -> None:
    headers: list[Any] = [(k, v) for k, v in relay.headers if k not in HOP_BY_HOP]
    if isinstance(relay.body, bytes):
        await _send(send, relay.status, (*headers, *extra), relay.body)
        return
    length = [(k, v) for k, v in relay.headers if k == b"content-length"]
    await send({"type": "http.response.start", "status": relay.status, "headers": [*headers, *length, *extra]})
    chunks: AsyncIterator[bytes] = relay.body
    async with aclosing(chunks):  # type: ignore[type-var]
        async for chunk in chunks:
            if method != "HEAD":
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})

"""The HTTP edge: KServe v2 as plain ASGI.

Bytes become a `Request`, a `Reply` becomes bytes; nothing is decided here. Infer calls are read by
`backends.kserve_json`; other calls under /v2 are relayed as they are. Every error leaves as `{"error": "<one line>"}`
with a status of `gateway.respond`'s tables, and the connection lives on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from functools import lru_cache
from math import inf
from typing import Any
from urllib.parse import unquote_to_bytes

from backends.errors import BadRequest, Failure, NotFound, WrongMethod
from backends.events import are_events, error_event
from backends.json_text import MAX_KEYS, MAX_NESTING, too_deep, too_wide
from backends.kserve_json import error_body, read_request, write_reply
from backends.request import HOP_BY_HOP, Answer, HttpCall, Relay, Reply, Request, Service, joint, replace
from backends.tensor import shown
from gateway import respond
from gateway.body import NUMBER, Bodies
from gateway.deadline import seconds
from gateway.encoding import accepted, deflated
from gateway.server import Message, Receive, Scope, Send

RawHeaders = tuple[tuple[bytes, bytes], ...]

# Belongs to the caller's own connection, or is written anew for the body that is really sent.
_NOT_RELAYED = frozenset(name.encode() for name in HOP_BY_HOP) | {b"content-length", b"host", b"expect"}
# About a body that the backend gets written anew, or decoded.
_OF_THE_BODY = frozenset({b"content-encoding", b"accept-encoding", b"content-type", b"inference-header-content-length"})
_NOT_FORWARDED = _NOT_RELAYED | _OF_THE_BODY
_ASKED = "headrace.asked"
# Longer paths are split each time: a thousand of 64 KiB, remembered in their segments, would be a gigabyte.
_REMEMBERED_BYTES = 256
_JSON: RawHeaders = ((b"content-type", b"application/json"),)
# Two values of these would be two requests in one.
_SINGLE = frozenset({b"content-encoding", b"inference-header-content-length"})


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
        bodies: Bodies,
        ready: Callable[[], bool],
        decision_headers: Callable[[Reply], respond.Headers],
        statuses: respond.Statuses = respond.HEADRACE,
        refused: Callable[[Failure], None],
        report: Callable[[BaseException], None],
    ) -> None:
        self._service = service
        self._now = now
        self._bodies = bodies
        self._ready = ready
        self._decision_headers = decision_headers
        self._statuses = statuses
        self._refused = refused
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except Failure as failure:
            if _ASKED not in scope:
                self._refused(failure)
            status, headers = self._statuses.http(failure)
            kind = (b"content-type", self._statuses.content_type(status))
            await _send(send, status, (kind, *_raw(headers)), error_body(failure.message))
        except asyncio.CancelledError:
            # The client has left: there is nobody to answer. A shutdown ends in the same way.
            pass
        except Exception as error:
            self._report(error)
            await _send(send, 500, _JSON, error_body("internal error in the gateway"))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw_path = scope["raw_path"]
        match _segments(raw_path) if len(raw_path) <= _REMEMBERED_BYTES else _split(raw_path):
            case ["livez"] | ["healthz"] | ["v2", "health", "live"]:
                _allow(scope, "GET", "HEAD")
                await _send(send, 200, (), b"")
            case ["readyz"] | ["v2", "health", "ready"]:
                _allow(scope, "GET", "HEAD")
                ready = self._ready()
                status = 200 if ready else self._statuses.unready
                await _send(send, status, () if ready else ((b"retry-after", b"1"),), b"")
            case ["v2", "models", model, "infer"]:
                await self._infer(scope, receive, send, model, "")
            case ["v2", "models", model, "versions", version, "infer"]:
                await self._infer(scope, receive, send, model, version)
            case ["v2", *rest]:
                await self._relay(scope, receive, send, _model_of(rest), stream=rest[-1:] == ["generate_stream"])
            case _:
                raise NotFound(f"no such path: {shown(scope['path'])}; models are under /v2/models")

    async def _infer(self, scope: Scope, receive: Receive, send: Send, model: str, version: str) -> None:
        _allow(scope, "POST")
        headers = _fields(scope["headers"])
        length = headers.get(b"inference-header-content-length")
        if length is not None and not NUMBER.fullmatch(length):
            raise BadRequest(
                f"Inference-Header-Content-Length: expected a number, got {shown(length.decode('latin-1'))}"
            )
        if length is not None and int(length) == 0:
            # A raw body has no names: only the backend knows what it means.
            await self._relay(scope, receive, send, model, raw=True)
            return
        began, wait = self._now(), _wait(headers)
        body = await self._bodies.decoded(scope, headers, receive, wait)
        infer = read_request(body, int(length) if length is not None else None)
        timeout_us = infer.parameters.get("timeout")
        deadline = began + (min(wait, timeout_us / 1e6) if timeout_us else wait)
        if infer.regions:
            await self._forward(scope, send, model, body, deadline, regions=True)
            return
        request = Request(
            model=model,
            version=version,
            content=infer,
            deadline=deadline,
            headers=_forwarded(scope["headers"]),
            arrival=scope,
        )
        scope[_ASKED] = True
        reply = await self._service(request)
        del scope[_ASKED]
        assert isinstance(reply.body, Answer)
        header_length, parts = write_reply(reply.body, infer, model)
        kind: RawHeaders = _JSON
        if header_length is not None:
            kind = (
                (b"content-type", b"application/octet-stream"),
                (b"inference-header-content-length", b"%d" % header_length),
            )
        payload = bytes(parts[0] if len(parts) == 1 else b"".join(parts))
        if b"accept-encoding" in headers and (encoding := accepted(headers[b"accept-encoding"])):
            payload = await deflated(payload, encoding)
            kind = (*kind, (b"content-encoding", encoding))
        told = self._decision_headers(reply)
        if reply.body.headers or reply.body.trailers:
            told = (*respond.as_headers(reply.body.headers + reply.body.trailers), *told)
        await _send(send, 200, (*kind, *_raw(told)), payload)

    async def _relay(
        self, scope: Scope, receive: Receive, send: Send, model: str, *, stream: bool = False, raw: bool = False
    ) -> None:
        """Passes a call on as it is, but for what would end the backend; a `raw` body is no JSON."""
        if scope["method"] == "TRACE":
            # Its answer is the request as the backend got it, with the credentials that the policy adds.
            raise WrongMethod("TRACE is not passed on", "GET, HEAD, POST")
        headers = _fields(scope["headers"])
        began, wait = self._now(), _wait(headers)
        body = await self._bodies.decoded(scope, headers, receive, wait)
        if not raw and too_deep(body):
            raise BadRequest(f"JSON is nested more than {MAX_NESTING} levels deep")
        if not raw and too_wide(body):
            raise BadRequest(f"JSON has more than {MAX_KEYS} keys")
        await self._forward(scope, send, model, body, began + wait, stream=stream)

    async def _forward(
        self,
        scope: Scope,
        send: Send,
        model: str,
        body: bytes,
        deadline: float,
        *,
        stream: bool = False,
        regions: bool = False,
    ) -> None:
        """Relays a call whose body has been read."""
        query = scope["query_string"]
        target = scope["raw_path"].decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
        request = Request(
            model=model,
            content=HttpCall(scope["method"], target, _uncoded(_end_to_end(scope["headers"])), body),
            deadline=deadline,
            # The call carries its own headers; here stands only what a hop may change.
            headers=_joined((k, v) for k, v in scope["headers"] if k == b"traceparent"),
            stream=stream,
            arrival=scope,
            regions=regions,
        )
        scope[_ASKED] = True
        reply = await self._service(request)
        assert isinstance(reply.body, Relay)
        relay = await _begun(reply.body)
        try:
            await self._send_relay(send, relay, scope["method"], _raw(self._decision_headers(reply)))
        except Failure:
            # Cut in the middle: returning without the end makes the server abort the connection, so that the caller
            # cannot take what it has for the whole. The failure was recorded where the stream was made.
            return

    async def _send_relay(self, send: Send, relay: Relay, method: str, extra: RawHeaders) -> None:
        headers: list[Any] = [(k, v) for k, v in relay.headers if k not in _NOT_RELAYED]
        if isinstance(relay.body, bytes):
            await _send(send, relay.status, (*headers, *extra), relay.body)
            return
        length = [(k, v) for k, v in relay.headers if k == b"content-length"]
        await send({"type": "http.response.start", "status": relay.status, "headers": [*headers, *length, *extra]})
        chunks: AsyncIterator[bytes] = relay.body
        events = not length and method != "HEAD" and are_events(relay)
        last = b""
        try:
            async with aclosing(chunks):  # type: ignore[type-var]
                async for chunk in chunks:
                    if method != "HEAD":
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                        if events:
                            last = (last + chunk)[-4:] if len(chunk) < 4 else chunk[-4:]
        except Failure as failure:
            if events:
                event = error_event(failure.message, last)
                await send({"type": "http.response.body", "body": event, "more_body": True})
            raise
        await send({"type": "http.response.body", "body": b""})


async def _begun(relay: Relay) -> Relay:
    """`relay`, of which the first chunk is there: what fails before it is told by a status.

    A stream whose length is not known begins with its head: its caller waits for that.
    """
    chunks = relay.body
    if isinstance(chunks, bytes) or not any(name == b"content-length" for name, _ in relay.headers):
        return relay
    first = await anext(chunks, b"")

    async def rest() -> AsyncIterator[bytes]:
        async with aclosing(chunks):  # type: ignore[type-var]
            yield first
            async for chunk in chunks:
                yield chunk

    return replace(relay, body=rest())


def _wait(headers: dict[bytes, bytes]) -> float:
    """How long the caller waits, as far as its headers say, in seconds."""
    given = headers.get(b"headrace-timeout-ms")
    return inf if given is None else seconds(given.decode("latin-1"))


def _model_of(path: list[str]) -> str:
    """The model that a path under /v2 is about; empty where it is about the server."""
    match path:
        case ["models", "stats"]:
            return ""
        case ["models", model, *_] | ["repository", "models", model, *_]:
            return model
    return ""


def _split(raw_path: bytes) -> tuple[str, ...]:
    """The path's segments, each decoded on its own, so that a model name may hold an encoded slash."""
    try:
        return tuple(unquote_to_bytes(segment).decode() for segment in raw_path.split(b"/") if segment)
    except UnicodeDecodeError:
        raise NotFound("no such path: expected UTF-8") from None


_segments = lru_cache(1024)(_split)


def _allow(scope: Scope, *methods: str) -> None:
    if scope["method"] not in methods:
        raise WrongMethod(f"expected {' or '.join(methods)}, got {scope['method']}", ", ".join(methods))


def _fields(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Headers by name; of one that is repeated the first, as Triton reads them.

    Raises BadRequest where those contradict each other that say how the body is to be read.
    """
    fields = dict(headers)
    if len(fields) < len(headers):
        for name, value in reversed(headers):
            if name in _SINGLE and fields[name] != value:
                raise BadRequest(f"{name.decode()}: expected one value, got two that differ")
            fields[name] = value
    return fields


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """Without what belongs to one hop (RFC 9110, 7.6.1, those that Connection names included), and without ours."""
    headers = tuple(headers)
    named = {name.strip().lower() for k, v in headers if k == b"connection" for name in v.split(b",")}
    return tuple(
        (k, v) for k, v in headers if k not in _NOT_RELAYED and k not in named and not k.startswith(b"headrace-")
    )


def _uncoded(headers: RawHeaders) -> RawHeaders:
    """Without the encoding of a body that has been decoded."""
    return tuple((k, v) for k, v in headers if k != b"content-encoding")


def _forwarded(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The caller's headers that the backend is meant to see beside an infer call, by name.

    The values of one that is repeated are joined, as RFC 9110 allows.
    """
    named: set[bytes] = set()
    made: dict[str, str] = {}
    for name, value in headers:
        if name in _NOT_FORWARDED:
            if name == b"connection" and value != b"keep-alive":
                named.update(part.strip().lower() for part in value.split(b","))
        elif not name.startswith(b"headrace-"):
            key, text = name.decode("latin-1"), value.decode("latin-1")
            made[key] = f"{made[key]}{joint(key)}{text}" if key in made else text
    for token in named:
        made.pop(token.decode("latin-1"), None)
    return made


def _joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """By name; the values of one that is repeated are joined, as RFC 9110 allows."""
    made: dict[str, str] = {}
    for name, value in headers:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        made[key] = f"{made[key]}{joint(key)}{text}" if key in made else text
    return made


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

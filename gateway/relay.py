"""Relayed calls of a route: the public name becomes the backend's on the way in, and back on the way out.

A call that is not an inference (metadata, configuration, statistics, readiness, generate) goes to the route's last
tier, whose interface is the route's. Names are the only thing that is touched, and only where they differ.
Statistics name their model in a list, and are read for that; errors keep the backend's own words.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from backends import combined, events
from backends.calls import Ask, asks
from backends.kserve_grpc_relayed import rename, rename_reply
from backends.request import HttpCall, Relay, Reply, Request, RpcCall, Service, replace
from backends.stream import whole

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Renamed:
    """`inner` under another name: `model` and `version` are the backend's ("" keeps the caller's).

    A document of at most `max_bytes` is held whole to be renamed; a raw inference's answer is the largest.
    """

    def __init__(self, inner: Service, model: str, version: str, max_bytes: int) -> None:
        self._inner = inner
        self._model = model
        self._version = version
        self._max_bytes = max_bytes

    async def __call__(self, request: Request, /) -> Reply:
        public, model = request.model, self._model or request.model
        if model == public and not self._version:
            return await self._inner(request)
        call = request.content
        if isinstance(call, HttpCall):
            target, tail = _target(call.target, model, self._version)
            # A compressed document could not be renamed on its way back.
            headers = tuple((k, v) for k, v in call.headers if k != b"accept-encoding")
            content = replace(call, target=target, headers=headers)
            reply = await self._inner(replace(request, model=model, content=content))
            assert isinstance(reply.body, Relay)
            if asks(content) is Ask.STATISTICS:
                return replace(reply, body=await _renamed_statistics(reply.body, content, public, self._max_bytes))
            if tail == "generate_stream":
                return replace(reply, body=events.renamed(reply.body, public))
            if tail not in ("", "config", "infer", "generate"):
                return reply
            if call.method == "HEAD":
                # There is no document to tell how long it would be under another name.
                told = tuple((k, v) for k, v in reply.body.headers if k != b"content-length")
                return replace(reply, body=replace(reply.body, headers=told))
            field = "model_name" if tail in ("infer", "generate") else "name"
            return replace(reply, body=await _renamed(reply.body, field, public, self._max_bytes))
        assert isinstance(call, RpcCall)
        messages = _renamed_messages(call, model, self._version)
        reply = await self._inner(replace(request, model=model, content=replace(call, messages=messages)))
        assert isinstance(reply.body, Relay)
        if asks(call) is Ask.STATISTICS:
            return replace(reply, body=await _renamed_statistics(reply.body, call, public, self._max_bytes))
        chunks = reply.body.body
        if isinstance(chunks, bytes):
            return replace(reply, body=replace(reply.body, body=rename_reply(call.method, chunks, public)))
        return replace(reply, body=replace(reply.body, body=_renamed_chunks(call.method, chunks, public)))


def _target(target: str, model: str, version: str) -> tuple[str, str]:
    """The target with the backend's names, and what follows them (`config`, `generate_stream`, or nothing)."""
    path, _, query = target.partition("?")
    segments = [segment for segment in path.split("/") if segment]
    plain = [unquote(segment) for segment in segments]
    at = plain.index("models") + 1
    rest = segments[at + 1 :]
    given = ""
    if plain[at + 1 : at + 2] == ["versions"] and len(rest) > 1:
        given, rest = rest[1], rest[2:]
    # Load and unload name no version.
    wanted = (quote(version, safe="") or given) if plain[1] == "models" else ""
    segments = [*segments[:at], quote(model, safe=""), *(["versions", wanted] if wanted else []), *rest]
    return "/" + "/".join(segments) + (f"?{query}" if query else ""), unquote("/".join(rest))


async def _renamed(relay: Relay, field: str, public: str, max_bytes: int) -> Relay:
    """A JSON document, binary tensors behind it included, under the public name; anything else passes as it is."""
    if relay.status != 200:
        return relay
    headers = dict(relay.headers)
    length = headers.get(b"inference-header-content-length", b"")
    if not length.isdigit() and not headers.get(b"content-type", b"").startswith(b"application/json"):
        return relay
    body = await whole(relay, max_bytes)
    end = int(length) if length.isdigit() else len(body)
    try:
        document: dict[str, Any] = dict(_fields.decode(body[:end]))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return replace(relay, body=body)
    if field in document:
        document[field] = public
    head = msgspec.json.encode(document)
    changed = tuple((k, b"%d" % len(head) if k == b"inference-header-content-length" else v) for k, v in relay.headers)
    return Relay(relay.status, changed, head + body[end:])


async def _renamed_statistics(relay: Relay, call: HttpCall | RpcCall, public: str, max_bytes: int) -> Relay:
    if relay.status != 200:
        return relay
    body = await whole(relay, max_bytes)
    document = combined.named(combined.read(call, Ask.STATISTICS, body), public)
    return replace(relay, body=combined.write(call, Ask.STATISTICS, document))


async def _renamed_messages(call: RpcCall, model: str, version: str) -> AsyncIterator[bytes]:
    async for message in call.messages:
        yield rename(call.method, message, model, version)


async def _renamed_chunks(method: str, chunks: AsyncIterator[bytes], public: str) -> AsyncIterator[bytes]:
    async with aclosing(chunks):  # type: ignore[type-var]
        async for chunk in chunks:
            yield rename_reply(method, chunk, public)

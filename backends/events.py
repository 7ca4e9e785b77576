"""Server-sent events as they pass: nothing is changed or held back, but an error among them is noticed.

A server that has begun a stream with 200 can only tell of a failure inside it. Triton writes `data: {"error":"..."}`
and ends the stream as if nothing had happened; so the stream ends cleanly for its reader, too, and counts as a failure
for whoever keeps count (`failure`, which `backends.stream.Watched` asks for).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import msgspec

from backends.errors import BackendFailed
from backends.kserve_json import error_text
from backends.request import HttpCall, Relay, Reply, Request, replace

# An event's data whose object begins with an error.
_ERROR = re.compile(rb'(?:^|[\r\n])data: ?(\{\s*"error"\s*:[^\r\n]*)')
# One that may name a model, in one line.
_OBJECT = re.compile(rb"^(data: ?)(\{[^\r\n]*\})(?=\r?$)", re.MULTILINE)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MAX_OBJECT_BYTES = 1 << 20
# Of a line that has not ended so much is kept: what may become an error, and what it says.
_LINE_BYTES = 2048


class Listened:
    """The chunks of `inner`; `failure` is the last error that was told among them."""

    def __init__(self, inner: AsyncIterator[bytes]) -> None:
        self.failure: BackendFailed | None = None
        self._inner = inner
        self._line = b""  # the beginning of the line that has not ended

    def __aiter__(self) -> Listened:
        return self

    async def __anext__(self) -> bytes:
        chunk = await anext(self._inner)
        text = self._line + chunk if self._line else chunk
        # Which most text has not, so that most is looked through by memchr alone.
        if b'"error"' in text:
            for found in _ERROR.finditer(text):
                self.failure = BackendFailed(_message(found[1]), 500)
        ends = max(chunk.rfind(b"\n"), chunk.rfind(b"\r"))
        if ends >= 0:
            self._line = chunk[ends + 1 : ends + 1 + _LINE_BYTES]
        elif len(self._line) < _LINE_BYTES:
            self._line = text[:_LINE_BYTES]
        return chunk

    async def aclose(self) -> None:
        if close := getattr(self._inner, "aclose", None):
            await close()


class Renamed:
    """The chunks of `inner`, with `model` for the `model_name` of each event's object.

    A line is passed on when it is whole, or has become so long that it can be no object of this kind.
    """

    def __init__(self, inner: AsyncIterator[bytes], model: str) -> None:
        self._inner = inner
        self._name = msgspec.Raw(msgspec.json.encode(model))
        self._line = b""

    @property
    def failure(self) -> BaseException | None:
        failure: BaseException | None = getattr(self._inner, "failure", None)
        return failure

    def __aiter__(self) -> Renamed:
        return self

    async def __anext__(self) -> bytes:
        while True:
            try:
                chunk = await anext(self._inner)
            except StopAsyncIteration:
                if not self._line:
                    raise
                line, self._line = self._line, b""
                return line
            text = self._line + chunk
            whole = len(text) if len(text) > _MAX_OBJECT_BYTES else text.rfind(b"\n") + 1
            self._line = text[whole:]
            if whole:
                return _OBJECT.sub(self._renamed, text[:whole])

    async def aclose(self) -> None:
        if close := getattr(self._inner, "aclose", None):
            await close()

    def _renamed(self, found: re.Match[bytes]) -> bytes:
        try:
            fields = _fields.decode(found[2])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return found[0]
        if "model_name" not in fields:
            return found[0]
        return found[1] + msgspec.json.encode({**fields, "model_name": self._name})


def renamed(relay: Relay, model: str) -> Relay:
    """`relay` under the name `model`, where it is a stream of events."""
    if isinstance(relay.body, bytes) or not are_events(relay):
        return relay
    return replace(relay, body=Renamed(relay.body, model))


def listened(request: Request, reply: Reply) -> Reply:
    """`reply` with its stream as a `Listened` where it is one of events."""
    relay = reply.body
    if not request.stream or not isinstance(request.content, HttpCall) or not isinstance(relay, Relay):
        return reply
    # Another status than success has said so already.
    if isinstance(relay.body, bytes) or relay.status >= 400 or not are_events(relay):
        return reply
    return replace(reply, body=replace(relay, body=Listened(relay.body)))


def are_events(relay: Relay) -> bool:
    """Whether a relayed answer is a stream of server-sent events that can be read as it is."""
    headers = dict(relay.headers)
    return (
        headers.get(b"content-type", b"").lower().startswith(b"text/event-stream")
        and b"content-encoding" not in headers
    )


def error_event(message: str, before: bytes) -> bytes:
    """An event that tells of an error, as Triton writes it; `before` are the last bytes of what was sent.

    Where those are no whole event its end is written first: what came of it is then an event, and not a part of ours.
    """
    body = b"data: %b\n\n" % msgspec.json.encode({"error": message})
    if not before or before.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")):
        return body
    return b"\n\n" + body


def _message(data: bytes) -> str:
    said = error_text(data)
    return (said if said is not None else " ".join(data[:200].decode(errors="replace").split()))[:1000]

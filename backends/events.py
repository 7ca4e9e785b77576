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
from backends.request import HttpCall, Relay, Reply, Request, replace

# An event's data whose object begins with an error.
_ERROR = re.compile(rb'(?:^|[\r\n])data: ?(\{\s*"error"\s*:[^\r\n]*)')
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
    try:
        error = msgspec.json.decode(data)["error"]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, KeyError):
        error = data[:200].decode(errors="replace")
    return " ".join(str(error).split())[:1000]

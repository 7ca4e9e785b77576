"""Streams of server-sent events through the whole stack on real sockets: as they come, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from backends.errors import ConnectionLost, Failure
from backends.request import HttpCall, Relay, Reply, Request
from tests.support.gateway import FakeServer, Rig
from tests.support.http1 import serving, until

__all__ = ["serving"]

POLICY = """
backends:
  any: {endpoints: [http://127.0.0.1:1], idle_timeout: 300ms}
  chat: {endpoints: [http://127.0.0.1:1], model: chat}
routes:
  talk: {backend: chat}
proxy: any
"""
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
Step = bytes | Failure | float


class Streaming(FakeServer):
    """Answers each call with a stream of the steps: bytes, a failure, or a pause in seconds."""

    def __init__(self, steps: Sequence[Step], *headers: tuple[bytes, bytes], status: int = 200) -> None:
        super().__init__({})
        self.steps = steps
        self.headers = headers or (EVENTS,)
        self.status = status
        self.closed = 0

    async def __call__(self, request: Request, /) -> Reply:
        self.requests.append(request)
        assert isinstance(request.content, HttpCall)
        return Reply(Relay(self.status, self.headers, self._chunks()))

    async def _chunks(self) -> AsyncIterator[bytes]:
        try:
            for step in self.steps:
                if isinstance(step, Failure):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    yield step
        finally:
            self.closed += 1


def asking(model: str = "m", version: str = "HTTP/1.1") -> bytes:
    return b"POST /v2/models/%b/generate_stream %b\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}" % (
        model.encode(),
        version.encode(),
    )


def chunks(reply: bytes) -> tuple[list[bytes], bool]:
    """The chunks of a response, and whether it came to its end."""
    left = reply.partition(b"\r\n\r\n")[2]
    found = []
    while left:
        size, _, left = left.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return found, True
        found.append(left[:length])
        left = left[length + 2 :]
    return found, False


def streamed(serving: Callable[..., Any], server: FakeServer, model: str = "m") -> tuple[list[bytes], bool, Rig]:
    """The chunks of one stream, whether it came to its end, and the stack that it came through."""
    stack = Rig(POLICY, server)

    async def client(rig: Any) -> bytes:
        reader, writer = await rig.open()
        writer.write(asking(model).replace(b"host: x", b"host: x\r\nconnection: close"))
        reply: bytes = await asyncio.wait_for(reader.read(), 5)
        return reply

    reply = serving(stack.app, client)
    assert not stack.defects
    return *chunks(reply), stack


def outcome(stack: Rig, status: str, model: str = "proxy") -> float:
    return stack.metric(f'headrace_requests_total{{protocol="http",route="{model}",status="{status}"}}')


WILD = {
    "comments": [b": hello\n\n", b"data: 1\n\n", b":\n"],
    "carriage returns": [b"data: 1\r\n\r\n", b"data: 2\r\rdata: 3\r\n\r\n"],
    "split UTF-8": [b"data: \xe4", b"\xb8", b"\x96\n\n"],
    "several data lines": [b"event: x\nid: 7\ndata: {\ndata: 1}\n\n", b"retry: 10\n\n"],
    "split in the middle of everything": [bytes([byte]) for byte in b'id: 1\r\ndata: {"a":"b"}\r\n\r\n'],
    "an event beyond 64 KiB": [b"data: " + b"x" * 70_000, b"y" * 70_000, b"\n\n"],
    "no blank line at the end": [b"data: 1\n\n", b"data: 2"],
    "heart-beats": [b":\n\n"] * 200 + [b"data: 1\n\n"],
    "bytes that are no text": [bytes(range(256))],
    "nothing": [],
}


@pytest.mark.parametrize("case", WILD)
def test_every_chunk_as_it_came(serving: Callable[..., Any], case: str) -> None:
    got, whole, stack = streamed(serving, Streaming(WILD[case]))
    assert (got, whole) == (WILD[case], True)
    assert outcome(stack, "200") == 1


def test_a_chunk_leaves_when_it_comes(serving: Callable[..., Any]) -> None:
    stack = Rig(POLICY.replace("300ms", "10s"), Streaming([b"data: 1\n\n", 60.0, b"data: 2\n\n"]))

    async def client(rig: Any) -> None:
        reader, writer = await rig.open()
        writer.write(asking())
        await asyncio.wait_for(reader.readuntil(b"data: 1\n\n"), 2)
        writer.close()
        await until(lambda: outcome(stack, "499") == 1)  # whoever leaves is no failure of the backend

    serving(stack.app, client)


@pytest.mark.parametrize(
    ("steps", "ending"),
    [
        ([b"data: 1\n\n"], b""),
        ([b"data: 1\r\n", b"\r\n"], b""),
        ([b"data: 1\r", b"\r"], b""),
        ([], b""),
        ([b"data: 1\n"], b"\n\n"),
        ([b"data: {", b'"te'], b"\n\n"),
        ([b"data: \xe4\xb8"], b"\n\n"),
    ],
)
def test_a_stream_that_is_cut_ends_as_an_error_and_aborted(
    serving: Callable[..., Any], steps: list[bytes], ending: bytes
) -> None:
    server = Streaming([*steps, ConnectionLost('peer "gone"')])
    got, whole, stack = streamed(serving, server)
    assert (got, whole) == ([*steps, ending + b'data: {"error":"peer \\"gone\\""}\n\n'], False)
    assert outcome(stack, "502") == 1
    assert server.closed == 1


def test_a_stream_that_stalls_ends_as_an_error_too(serving: Callable[..., Any]) -> None:
    got, whole, _ = streamed(serving, Streaming([b"data: 1\n\n", 60.0]))
    assert got[0] == b"data: 1\n\n"
    assert got[1].startswith(b'data: {"error":"')
    assert not whole


def test_other_streams_are_just_cut(serving: Callable[..., Any]) -> None:
    server = Streaming([b"[1", ConnectionLost("gone")], (b"content-type", b"application/json"))
    assert streamed(serving, server)[:2] == ([b"[1"], False)
    packed = Streaming([b"\x1f\x8b", ConnectionLost("gone")], EVENTS, (b"content-encoding", b"gzip"))
    assert streamed(serving, packed)[:2] == ([b"\x1f\x8b"], False)


@pytest.mark.parametrize(
    "steps",
    [
        [b"data: 1\n\n", b'data: {"error":"no word"}\n\n'],
        [b'data: 1\r\n\r\ndata:{ "error" : "no word"}\r\n\r\n', b": over\r\n\r\n"],
        [bytes([byte]) for byte in b'data: {"error":"no word"}\n\n'],
        [b"data: " + b"x" * 70_000, b'\ndata: {"error":"no word"}'],
        [b'data: {"error":"no wor'],
    ],
)
def test_an_error_that_a_stream_tells_of_by_itself_is_a_failure_and_a_clean_end(
    serving: Callable[..., Any], steps: list[bytes]
) -> None:
    got, whole, stack = streamed(serving, Streaming(steps))
    assert (b"".join(got), whole) == (b"".join(steps), True)
    assert outcome(stack, "500") == 1


@pytest.mark.parametrize(
    "steps",
    [
        [b'data: {"text":"{\\"error\\":1}"}\n\n'],
        [b'data: {"text":"data: {\\"error\\":1}"}\n\n'],
        [b'event: {"error":1}\n\n', b'{"error":1}\n\n', b'data: "error"\n\n'],
        [b"data: " + b"x" * 5000, b'data: {"error":1}\n\n'],
    ],
)
def test_what_only_looks_like_an_error_is_none(serving: Callable[..., Any], steps: list[bytes]) -> None:
    _, whole, stack = streamed(serving, Streaming(steps))
    assert whole
    assert outcome(stack, "200") == 1


def test_events_bear_the_routes_name(serving: Callable[..., Any]) -> None:
    steps = [
        b'data: {"model_na', b'me":"chat","n":1.50}\n', b"\n", b'data: {"text":"\\"model_name\\":\\"chat\\""}\r\n\r\n',
        b": model_name chat\n\ndata: {no JSON}\n\n", b'data: {"error":"x"}\n\ndata: {"model_name":"chat"}\n',
        b'data: {"model_name":',
    ]  # fmt: skip
    got, whole, stack = streamed(serving, Streaming(steps), "talk")
    expected = b"".join(steps).replace(b'{"model_name":"chat"', b'{"model_name":"talk"')
    assert b"".join(got) == expected
    assert whole
    assert outcome(stack, "500", "talk") == 1


def test_a_cut_tells_every_stream(serving: Callable[..., Any]) -> None:
    stack = Rig(POLICY.replace("300ms", "10s"), Streaming([b"data: 1\n\n", 60.0]))

    async def client(rig: Any) -> list[bytes]:
        readers = []
        for _ in range(3):
            reader, writer = await rig.open()
            writer.write(asking())
            await asyncio.wait_for(reader.readuntil(b"data: 1\n\n"), 2)
            readers.append(reader)
        assert stack.things.deadlines is not None
        stack.things.deadlines.cut()
        return [await asyncio.wait_for(reader.read(), 2) for reader in readers]

    for said in serving(stack.app, client):
        assert b'data: {"error":"the gateway is shutting down' in said
        assert said.endswith(b"\n\n\r\n")


def test_connection_headers_of_the_backend_do_not_cross(serving: Callable[..., Any]) -> None:
    server = Streaming([b"data: 1\n\n"], EVENTS, (b"transfer-encoding", b"chunked"), (b"keep-alive", b"timeout=5"))
    stack = Rig(POLICY, server)

    async def client(rig: Any) -> bytes:
        reply: bytes = await rig.ask(asking(version="HTTP/1.0"))
        return reply

    reply = serving(stack.app, client)
    assert reply.endswith(b"\r\n\r\ndata: 1\n\n")
    assert b"chunked" not in reply
    assert b"timeout=5" not in reply

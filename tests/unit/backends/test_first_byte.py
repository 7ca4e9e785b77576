"""What a backend is told of a deadline, and how long it may take to begin an answer: both clients, real sockets."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from backends.errors import FIRST_BYTE, Expired
from backends.request import HttpCall, Relay, Request
from backends.triton_http import TritonHttp
from tests.unit.backends.grpc_peer import REPLY, ask, backend, relay, told
from tests.unit.backends.http_peer import AGAIN, HOLD, OK, REQUEST, Line, Peer, transcript

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


async def late_end(line: Line) -> None:
    line.transport.write(HEAD)
    await asyncio.sleep(0.3)
    line.transport.write(b"ok")


@transcript
async def test_an_http_answer_must_begin_in_time_and_may_then_take_longer() -> None:
    async with Peer([REQUEST, OK, REQUEST, late_end, REQUEST, HOLD], [REQUEST, HOLD]) as peer:
        client = peer.client(first_byte_timeout=0.1)
        for _ in range(2):
            assert (await client.request("GET", "/", ())).body == b"ok"
        for asking in (client.request, client.stream):
            began = time.monotonic()
            with pytest.raises(Expired) as caught:
                await asking("POST", "/", (), deadline=time.monotonic() + 5)
            assert caught.value.where == FIRST_BYTE
            assert 0.1 <= time.monotonic() - began < 2.0
        # A deadline that is sooner is a deadline.
        with pytest.raises(Expired, match="deadline exceeded in backend"):
            await client.request("POST", "/", (), deadline=time.monotonic() + 0.02)


@transcript
async def test_an_http_answer_that_began_ends_by_its_deadline() -> None:
    async with Peer([REQUEST, HEAD, HOLD]) as peer:
        client = peer.client(first_byte_timeout=0.1)
        began = time.monotonic()
        with pytest.raises(Expired) as caught:
            await client.request("POST", "/", (), deadline=time.monotonic() + 0.3)
        assert caught.value.where == "backend"
        assert time.monotonic() - began >= 0.3


@transcript
async def test_an_http_backend_is_told_what_is_left_of_a_deadline() -> None:
    async with Peer([REQUEST, OK, AGAIN]) as peer:
        backend = TritonHttp(peer.client(), time.monotonic)
        for left in (5.0, 0.02, math.inf):
            call = Request(model="m", content=HttpCall("GET", "/v2"), deadline=time.monotonic() + left)
            body = (await backend(call)).body
            assert isinstance(body, Relay)
            assert not isinstance(body.body, bytes)
            assert [chunk async for chunk in body.body] == [b"ok"]
        heads = [dict(line.split(b": ") for line in sent.split(b"\r\n")[1:-2]) for sent in peer.lines[0].requests]
        told = [int(head[b"headrace-timeout-ms"]) for head in heads[:2]]
        assert 4000 < told[0] <= 5000
        assert 1 <= told[1] <= 20
        assert b"headrace-timeout-ms" not in heads[2]


@pytest.mark.parametrize("call", [ask(), relay("ModelStreamInfer", told(b""))], ids=["unary", "stream"])
def test_a_grpc_answer_must_begin_in_time(call: Request) -> None:
    async def main() -> None:
        cancelled = asyncio.Event()
        left: list[float | None] = []

        async def silent(messages: AsyncIterator[bytes], context: Any) -> None:
            left.append(context.time_remaining())
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

        async with backend(silent, first_byte=0.2) as client:
            with pytest.raises(Expired) as caught:
                await client(call)
            assert caught.value.where == FIRST_BYTE
            await asyncio.wait_for(cancelled.wait(), 1.0)
            if not call.stream:
                (told_left,) = left
                assert told_left is not None
                assert told_left <= 0.25, "a unary call's backend knows the time that it really has"

    asyncio.run(main())


def test_a_grpc_stream_that_has_begun_may_take_longer() -> None:
    async def main() -> None:
        async def slow(messages: AsyncIterator[bytes], context: Any) -> None:
            await context.write(REPLY)
            await asyncio.sleep(0.4)
            await context.write(REPLY)

        async with backend(slow, first_byte=0.2) as client:
            body = (await client(relay("ModelStreamInfer", told(b"")))).body
            assert isinstance(body, Relay)
            assert not isinstance(body.body, bytes)
            assert [chunk async for chunk in body.body] == [REPLY, REPLY]

    asyncio.run(main())

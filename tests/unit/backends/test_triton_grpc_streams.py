"""Calls that the gRPC client relays as streams both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from backends.errors import BackendFailed, Rejected
from backends.request import Relay
from backends.triton_grpc import TritonGrpc
from tests.unit.backends.grpc_peer import (
    backend,
    echoing,
    hanging,
    relay,
    told,
)


def test_relay_both_ways() -> None:
    async def main() -> None:
        async def script(messages: AsyncIterator[bytes], context: Any) -> None:
            seen.update(context.invocation_metadata())
            await context.send_initial_metadata((("a", "1"), ("b-bin", b"\xff")))
            await echoing(messages, context)

        seen: dict[str, Any] = {}
        asked: asyncio.Queue[bytes] = asyncio.Queue()

        async def conversation() -> AsyncIterator[bytes]:
            while message := await asked.get():
                yield message

        async with backend(script) as client:
            asked.put_nowait(b"0")
            given = (("traceparent", "old"), ("k-bin", b"\0"))
            reply = await client(
                relay("ModelStreamInfer", conversation(), metadata=given, headers={"traceparent": "new"})
            )
            assert isinstance(reply.body, Relay)
            assert (reply.body.status, reply.body.headers) == (200, ((b"a", b"1"), (b"b-bin", b"\xff")))
            assert not isinstance(reply.body.body, bytes)
            chunks = reply.body.body
            for i in range(5):
                assert await anext(chunks) == str(i).encode()
                asked.put_nowait(str(i + 1).encode())
            assert await anext(chunks) == b"5"
            asked.put_nowait(b"")
            assert [chunk async for chunk in chunks] == []
        assert (seen["traceparent"], seen["k-bin"]) == ("new", b"\0")

    asyncio.run(main())


@pytest.mark.parametrize("finishes", [False, True])
def test_an_answer_before_all_was_said_is_not_masked(finishes: bool) -> None:
    async def main() -> None:
        async def script(messages: AsyncIterator[bytes], context: Any) -> None:
            if not finishes:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
            await context.write(b"enough")

        async def talkative() -> AsyncIterator[bytes]:
            for _ in range(20):
                await asyncio.sleep(0.0001)
                yield b"x"

        async def one(client: TritonGrpc) -> Any:
            reply = await client(relay("ModelStreamInfer", talkative()))
            assert isinstance(reply.body, Relay)
            assert not isinstance(reply.body.body, bytes)
            return [chunk async for chunk in reply.body.body]

        async with backend(script) as client:
            for _ in range(10):
                for outcome in await asyncio.gather(*(one(client) for _ in range(20)), return_exceptions=True):
                    if finishes:
                        assert outcome == [b"enough"]
                    else:
                        assert isinstance(outcome, Rejected), outcome

    asyncio.run(main())


def test_a_slow_reader_gets_all_of_a_stream_that_is_over() -> None:
    async def main() -> None:
        over = asyncio.Event()

        async def script(messages: AsyncIterator[bytes], context: Any) -> None:
            for i in range(50):
                await context.write(str(i).encode() * 100)
            over.set()

        async with backend(script) as client:
            reply = await client(relay("ModelStreamInfer", told(b"x")))
            assert isinstance(reply.body, Relay)
            assert not isinstance(reply.body.body, bytes)
            await asyncio.wait_for(over.wait(), 2)
            await asyncio.sleep(0.2)  # the status has come long before the last message is read
            assert [c async for c in reply.body.body] == [str(i).encode() * 100 for i in range(50)]

    asyncio.run(main())


def test_a_stream_that_breaks_after_some_chunks_fails() -> None:
    async def main() -> None:
        async def script(messages: AsyncIterator[bytes], context: Any) -> None:
            await context.write(b"1")
            await context.abort(grpc.StatusCode.INTERNAL, "broke")

        async with backend(script) as client:
            reply = await client(relay("ModelStreamInfer", told()))
            assert isinstance(reply.body, Relay)
            assert not isinstance(reply.body.body, bytes)
            assert await anext(reply.body.body) == b"1"
            with pytest.raises(BackendFailed, match="broke"):
                await anext(reply.body.body)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_relay_that_is_left_alone_is_cancelled(how: str) -> None:
    async def main() -> None:
        cancelled = asyncio.Event()

        async def script(messages: AsyncIterator[bytes], context: Any) -> None:
            await context.write(b"1")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async def forever() -> AsyncIterator[bytes]:
            await asyncio.sleep(60)
            yield b""

        async with backend(script) as client:
            reply = await client(relay("ModelStreamInfer", forever()))
            if how == "close":
                await reply.body.body.aclose()  # type: ignore[union-attr]
            del reply
            await asyncio.wait_for(cancelled.wait(), 2)
            await asyncio.sleep(0)
            assert len(asyncio.all_tasks()) < 10

    asyncio.run(main())


def test_a_fault_in_the_callers_messages_ends_the_call_with_it() -> None:
    async def main() -> None:
        async def faulty() -> AsyncIterator[bytes]:
            yield b"1"
            raise LookupError("mine")

        async with backend(hanging) as client:
            with pytest.raises(LookupError, match="mine"):
                await asyncio.wait_for(client(relay("ModelStreamInfer", faulty())), 2)

    asyncio.run(main())

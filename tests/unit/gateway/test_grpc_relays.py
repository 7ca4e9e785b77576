"""Calls that the gRPC edge relays, unary ones and streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from backends.errors import BackendFailed
from backends.request import Relay, Reply, Request, RpcCall
from tests.unit.gateway.grpc_edge import SERVICE, echo, edge, infer_message


def test_unary_calls_are_relayed() -> None:
    async def main() -> None:
        seen: list[Request] = []

        async def service(request: Request) -> Reply:
            seen.append(request)
            return await echo(request)

        async with edge(service) as setup:
            asked = b"\x0a\x01m\x12\x013"
            sent = (("traceparent", "00-1"), ("k-bin", b"\xff"), ("headrace-tenant", "t"))
            for method in (
                "ModelReady",
                "ModelMetadata",
                "ModelConfig",
                "ModelStatistics",
                "ServerMetadata",
                "Unheard",
            ):
                call = setup.call(method, asked, metadata=sent, timeout=5)
                assert await call == asked
                assert dict(tuple(await call.initial_metadata())) == {"from-backend": "yes"}
                assert dict(tuple(await call.trailing_metadata()))["headrace-policy"] == ""
                content = seen[-1].content
                assert isinstance(content, RpcCall)
                assert content.method == SERVICE + method
                assert content.metadata == (("traceparent", "00-1"), ("k-bin", b"\xff"))
            assert [(r.model, r.version) for r in seen] == [("m", "3")] * 4 + [("", "")] * 2
            assert not any(request.stream for request in seen)
            assert seen[0].headers == {"traceparent": "00-1"}
            assert 0 < seen[0].deadline - time.monotonic() <= 5 * 1.01  # as gRPC rounds it
            assert await setup.call("/inference.Other/Thing", b"1") == b"1"

    asyncio.run(main())


def test_streams_are_relayed_message_by_message() -> None:
    async def main() -> None:
        async with edge(echo) as setup:
            call = setup.channel.stream_stream(SERVICE + "ModelStreamInfer")(timeout=10)
            for i in range(5):
                await call.write(infer_message(id=str(i)))
                assert await call.read() == infer_message(id=str(i))
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK

    asyncio.run(main())


def test_a_stream_through_client_edge_client_edge() -> None:
    async def main() -> None:
        async with edge(echo) as inner, edge(inner.client) as outer:
            call = outer.channel.stream_stream(SERVICE + "ModelStreamInfer")(timeout=10)
            await call.write(infer_message())
            assert await call.read() == infer_message()
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await outer.call("ModelReady", b"\x0a\x01m", timeout=5) == b"\x0a\x01m"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "expected a message, got none"),
        ([b"\x0a\x01m", b"\x0a\x01o"], "to be for model 'm' version '', got 'o'"),
        ([b"\x0b"], "expected its protobuf message"),
    ],
)
def test_relayed_calls_that_are_refused(messages: list[bytes], words: str) -> None:
    async def main() -> None:
        async with edge(echo) as setup:
            call = setup.channel.stream_stream(SERVICE + "ModelReady")(iter(messages), timeout=5)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                [chunk async for chunk in call]
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in (raised.value.details() or "")

    asyncio.run(main())


def test_a_relay_is_closed_and_its_failure_told() -> None:
    async def main() -> None:
        closed = asyncio.Event()

        async def chunks(fault: Exception | None) -> AsyncIterator[bytes]:
            try:
                yield b"1"
                if fault:
                    raise fault
                await asyncio.sleep(60)
            finally:
                closed.set()

        async def service(request: Request) -> Reply:
            return Reply(Relay(200, (), chunks(faults.get(request.model))))

        faults = {"fails": BackendFailed("cut", 14, grpc=True), "bug": ValueError("secret")}
        async with edge(service) as setup:
            for model, expected in [
                ("fails", (grpc.StatusCode.UNAVAILABLE, "cut")),
                ("bug", (grpc.StatusCode.INTERNAL, "internal error")),
                ("stays", None),
            ]:
                closed.clear()
                asked = b"\x0a" + bytes([len(model)]) + model.encode()
                call = setup.channel.stream_stream(SERVICE + "ModelReady")(iter([asked]), timeout=5)
                assert await call.read() == b"1"
                if expected is None:
                    call.cancel()
                else:
                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        await call.read()
                    assert (raised.value.code(), raised.value.details()) == expected
                await asyncio.wait_for(closed.wait(), 2)
            assert [type(e) for e in setup.reported] == [ValueError]

    asyncio.run(main())


def test_a_relayed_reply_may_be_whole() -> None:
    async def main() -> None:
        async def service(request: Request) -> Reply:
            return Reply(Relay(200, ((b"a", b"1"),), b"whole"))

        async with edge(service) as setup:
            call = setup.call("ServerMetadata")
            assert await call == b"whole"
            assert dict(tuple(await call.initial_metadata())) == {"a": "1"}

    asyncio.run(main())

"""Inference calls to the gRPC edge on real sockets, before scripted services."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import grpc
import pytest

from backends.errors import BackendFailed, BadRequest, Expired, Rejected, TooLarge
from backends.proto import kserve_pb2 as pb
from backends.request import Infer, Reply, Request, Tensors
from backends.tensor import Tensor, join_elements
from tests.unit.gateway.grpc_edge import echo, edge, infer_message, refusal, twice


def test_infer_becomes_a_request_and_its_answer_a_message() -> None:
    async def main() -> None:
        seen: list[Request] = []

        async def service(request: Request) -> Reply:
            seen.append(request)
            return await twice(request)

        async with edge(service) as setup:
            sent = (
                ("traceparent", "00-1"), ("headrace-tenant", "t"), ("twice", "1"), ("twice", "2"), ("k-bin", b"\0"),
                ("headrace-timeout-ms", "1500.5"),
            )  # fmt: skip
            call = setup.call(data=infer_message(model_version="3"), metadata=sent, timeout=60)
            reply = pb.ModelInferResponse.FromString(await call)
            assert (reply.model_name, reply.model_version, reply.id) == ("m", "9", "7")
            assert (reply.outputs[0].name, reply.raw_output_contents[0]) == ("x-out", b"\1\2")
            assert reply.parameters["p"].uint64_param == 1 << 63
            assert dict(tuple(await call.trailing_metadata()))["headrace-policy"] == "p1"
        (request,) = seen
        assert (request.model, request.version, request.stream) == ("m", "3", False)
        assert request.headers == {"traceparent": "00-1", "twice": ("1", "2"), "k-bin": b"\0"}
        assert 1.3 < request.deadline - time.monotonic() <= 1.5005

    asyncio.run(main())


def test_every_datatype_through_edge_and_client() -> None:
    async def main() -> None:
        async with edge(twice) as setup:
            for datatype, data in [
                ("BYTES", join_elements([b"", b"\0\xff"])),
                ("FP16", b"abcd"),
                ("UINT64", b"\xff" * 16),
            ]:
                asked = Infer(Tensors.of((Tensor("x", datatype, (2, 1), data), Tensor("z", datatype, (0, 3), b""))))
                answer = (await setup.client(Request(model="m", content=asked))).answer
                assert [bytes(t.data) for t in answer.outputs.decoded] == [data, b""]
                assert [t.shape for t in answer.outputs.decoded] == [(2, 1), (0, 3)]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "parameters", "least", "most"),
    [
        ({}, {}, math.inf, math.inf),
        ({"timeout": 5}, {}, 4, 5),
        ({"metadata": (("headrace-timeout-ms", "2000"),), "timeout": 5}, {}, 1.5, 2),
        ({"timeout": 5}, {"timeout": pb.InferParameter(int64_param=1_000_000)}, 0.5, 1),
        ({}, {"timeout": pb.InferParameter(int64_param=0)}, math.inf, math.inf),
    ],
)
def test_the_soonest_deadline_counts(options: Any, parameters: Any, least: float, most: float) -> None:
    async def main() -> None:
        left: list[float] = []

        async def service(request: Request) -> Reply:
            left.append(request.deadline - time.monotonic())
            return await twice(request)

        async with edge(service) as setup:
            await setup.call(data=infer_message(parameters=parameters), **options)
        assert least <= left[0] <= most * 1.01  # gRPC rounds a timeout up when it writes it

    asyncio.run(main())


def test_malformed_requests() -> None:
    async def main() -> None:
        async with edge(twice) as setup:
            for data, metadata, words in [
                (b"\x0b", (), "expected a ModelInferRequest"),
                (infer_message(raw_input_contents=[b"\1"]), (), "is 2 bytes, got 1"),
                (infer_message(), (("headrace-timeout-ms", "soon"),), "headrace-timeout-ms: expected milliseconds"),
                (infer_message(), (("headrace-timeout-ms", "-1"),), "expected milliseconds"),
                (infer_message(), (("headrace-timeout-ms", "nan"),), "expected milliseconds"),
                (infer_message(parameters={"timeout": pb.InferParameter(string_param="1")}), (), "'timeout'"),
                (infer_message(parameters={"timeout": pb.InferParameter(bool_param=True)}), (), "'timeout'"),
                (infer_message(parameters={"timeout": pb.InferParameter(int64_param=-1)}), (), "'timeout'"),
            ]:
                code, text = await refusal(setup.call(data=data, metadata=metadata))
                assert (code, words in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), text
            assert not setup.reported
            assert len(setup.refused) == 8

    asyncio.run(main())


def test_failures_become_statuses() -> None:
    async def main() -> None:
        async def service(request: Request) -> Reply:
            raise faults[request.model]

        faults: dict[str, BaseException] = {
            "busy": Rejected("full\nqueue"),
            "late": Expired("queue"),
            "backend": BackendFailed("its own", 9, grpc=True),
            "odd": BackendFailed("no such code", 99, grpc=True),
            "long": BadRequest("ü\ud800" * 5000),
            "bug": RuntimeError("secret"),
            "stray": asyncio.CancelledError(),
        }
        async with edge(service) as setup:
            got = {}
            for model in faults:
                got[model] = await refusal(setup.call(data=infer_message(model_name=model), timeout=2))
            assert got["busy"] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full\nqueue")
            assert got["late"] == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded in queue")
            assert got["backend"] == (grpc.StatusCode.FAILED_PRECONDITION, "its own")
            assert got["odd"] == (grpc.StatusCode.UNKNOWN, "no such code")
            assert got["long"] == (grpc.StatusCode.INVALID_ARGUMENT, "ü?" * 1024)
            assert got["bug"] == got["stray"] == (grpc.StatusCode.INTERNAL, "internal error")
            assert [type(e) for e in setup.reported] == [RuntimeError, asyncio.CancelledError]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await setup.call(data=infer_message(model_name="busy"))
            assert dict(tuple(raised.value.trailing_metadata() or ())) == {"retry-after": "1"}

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancel", "deadline", "disconnect"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_ends_cancels_the_service(how: str, streamed: bool) -> None:
    async def main() -> None:
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def service(request: Request) -> Reply:
            began.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            raise AssertionError

        async with edge(service) as setup:
            method = "ModelStreamInfer" if streamed else "ModelInfer"
            call = setup.call(method, infer_message(), timeout=0.2 if how == "deadline" else None)
            await asyncio.wait_for(began.wait(), 2)
            if how == "cancel":
                call.cancel()
            if how == "disconnect":
                await setup.channel.close()
            await asyncio.wait_for(cancelled.wait(), 2)
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await call
            assert not setup.reported

    asyncio.run(main())


def test_a_message_over_the_limit_names_it() -> None:
    async def main() -> None:
        async with edge(twice) as setup:
            large = infer_message(id="7" * (1 << 20))
            for method in ("ModelInfer", "ModelStreamInfer"):
                code, text = await refusal(setup.call(method, large, timeout=5))
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert str(1 << 20) in text
            setup.most = 1000
            code, text = await refusal(setup.call("ModelInfer", infer_message(id="7" * 1000), timeout=5))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "request message: expected at most 1000 bytes, got 10" in text
            assert isinstance(setup.refused.pop(), TooLarge)
            told = pb.ModelStreamInferResponse.FromString(
                await setup.call("ModelStreamInfer", infer_message(id="7" * 1000), timeout=5)
            )
            assert "request message: expected at most 1000 bytes, got 10" in told.error_message
            assert isinstance(setup.refused.pop(), TooLarge)
            assert await setup.call(data=infer_message(), timeout=5)
            assert not setup.reported
        async with edge(echo) as setup:
            setup.most = 2  # what names no model is bounded as it passes
            assert await setup.call("ServerMetadata", b"12", timeout=5) == b"12"
            assert (await refusal(setup.call("ServerMetadata", b"123", timeout=5)))[
                0
            ] is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(main())


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages_are_bounded_by_what_they_become(compression: grpc.Compression) -> None:
    async def main() -> None:
        async with edge(twice) as setup:
            sent = infer_message(id="7" * 100_000)
            reply = pb.ModelInferResponse.FromString(await setup.call(data=sent, compression=compression))
            assert reply.id == "7" * 100_000
            for size in (1 << 20, 1 << 24):  # 16 MiB are 16 KiB on the wire
                for method in ("ModelInfer", "ModelStreamInfer"):
                    bomb = setup.call(method, infer_message(id="7" * size), compression=compression, timeout=5)
                    assert (await refusal(bomb))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert not setup.reported

    asyncio.run(main())

"""The gRPC edge on real sockets, before scripted services, asked by grpcio and by our own client."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from backends.errors import BackendFailed, BadRequest, Expired, Failure, Malformed, NotFound, Rejected
from backends.proto import kserve_pb2 as pb
from backends.request import Answer, Infer, Relay, Reply, Request, RpcCall, Tensors, replace
from backends.tensor import Tensor, join_elements
from backends.triton_grpc import TritonGrpc
from gateway.grpc import GrpcEdge

SERVICE = "/inference.GRPCInferenceService/"
CODES = {BadRequest: 3, Malformed: 3, Expired: 4, NotFound: 5, Rejected: 8}


def status(failure: Failure) -> tuple[int, str, tuple[tuple[str, str], ...]]:
    if isinstance(failure, BackendFailed):
        return failure.status, failure.message, ()
    trailing = (("retry-after", "1"), ("bad", "ü")) if isinstance(failure, Rejected) else ()
    return CODES[type(failure)], failure.message, trailing


def decision(reply: Reply) -> tuple[tuple[str, str], ...]:
    return (("headrace-policy", reply.policy),)


@dataclass
class Setup:
    edge: GrpcEdge
    port: int
    channel: Any
    client: TritonGrpc
    reported: list[BaseException] = field(default_factory=list)
    refused: list[Failure] = field(default_factory=list)
    ready: bool = True

    def call(self, method: str = "ModelInfer", data: bytes = b"", **options: Any) -> Any:
        return self.channel.unary_unary(method if method[0] == "/" else SERVICE + method)(data, **options)


Service = Callable[[Request], Awaitable[Reply]]


@asynccontextmanager
async def edge(service: Service) -> AsyncIterator[Setup]:
    setup: Any = None
    reported: list[BaseException] = []
    refused: list[Failure] = []
    made = GrpcEdge(
        service,
        now=time.monotonic,
        max_message_bytes=1 << 20,
        ready=lambda: setup.ready,
        grpc_status=status,
        decision_headers=decision,
        refused=refused.append,
        report=reported.append,
    )
    port = await made.start(["127.0.0.1:0"])
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    client = TritonGrpc(f"127.0.0.1:{port}", now=time.monotonic, connect_timeout=2, max_message_bytes=1 << 22)
    setup = Setup(made, port, channel, client, reported, refused)
    try:
        yield setup
    finally:
        await client.close()
        await channel.close()
        await made.stop(0)


def infer_message(**fields: Any) -> bytes:
    one = pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT8", shape=[2])
    given = {"model_name": "m", "id": "7", "inputs": [one], "raw_input_contents": [b"\1\2"], **fields}
    return pb.ModelInferRequest(**given).SerializeToString()


async def twice(request: Request) -> Reply:
    """Answers each input with itself, under a backend's name."""
    outputs = tuple(replace(t, name=f"{t.name}-out", parameters=None) for t in request.infer.inputs.decoded)
    return Reply(Answer(Tensors.of(outputs), "backend", "9", {"p": 1 << 63}, "batch"), policy="p1")


async def echo(request: Request) -> Reply:
    """Relays a call's messages back to it."""
    assert isinstance(request.content, RpcCall)
    return Reply(Relay(200, ((b"from-backend", b"yes"), (b"te", b"x")), request.content.messages))


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), raised.value.details() or ""


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
        assert request.headers == {"traceparent": "00-1", "twice": "1, 2"}
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
            assert got["busy"] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full queue")
            assert got["late"] == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded in queue")
            assert got["backend"] == (grpc.StatusCode.FAILED_PRECONDITION, "its own")
            assert got["odd"] == (grpc.StatusCode.UNKNOWN, "no such code")
            assert got["long"] == (grpc.StatusCode.INVALID_ARGUMENT, "ü?" * 512)
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
            assert await setup.call(data=infer_message(), timeout=5)
            assert not setup.reported

    asyncio.run(main())


# Relays


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
            await call.write(infer_message(raw_input_contents=[b"\1"]))
            with pytest.raises(grpc.aio.AioRpcError, match="is 2 bytes, got 1"):
                await call.read()
            assert await outer.call("ModelReady", b"\x0a\x01m", timeout=5) == b"\x0a\x01m"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "expected a message, got none"),
        ([infer_message(), infer_message(model_name="other")], "to be for model 'm' version '', got 'other'"),
        ([infer_message(inputs=[])], "at least one input"),
        ([b"\x0b"], "expected a ModelInferRequest"),
    ],
)
def test_streams_that_are_refused(messages: list[bytes], words: str) -> None:
    async def main() -> None:
        async with edge(echo) as setup:
            call = setup.channel.stream_stream(SERVICE + "ModelStreamInfer")(iter(messages), timeout=5)
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
                call = setup.channel.stream_stream(SERVICE + "ModelStreamInfer")(
                    iter([infer_message(model_name=model)]), timeout=5
                )
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


# Health, and the server itself


def test_health() -> None:
    async def main() -> None:
        async with edge(twice) as setup:
            serving = pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVING).SerializeToString()
            not_serving = pb.HealthCheckResponse(status=pb.HealthCheckResponse.NOT_SERVING).SerializeToString()
            check = "/grpc.health.v1.Health/Check"
            named = pb.HealthCheckRequest(service="inference.GRPCInferenceService").SerializeToString()
            unknown = pb.HealthCheckRequest(service="other").SerializeToString()
            assert await setup.call(check) == await setup.call(check, named) == serving
            assert await setup.client.unready("", time.monotonic() + 2, {}) == ""
            setup.ready = False
            assert await setup.call(check) == not_serving
            assert await setup.client.unready("", time.monotonic() + 2, {})
            assert pb.ServerLiveResponse.FromString(await setup.call("ServerLive")).live
            assert (await refusal(setup.call(check, unknown)))[0] is grpc.StatusCode.NOT_FOUND
            assert (await refusal(setup.call(check, b"\x0b")))[0] is grpc.StatusCode.INVALID_ARGUMENT
            for method in ("/grpc.health.v1.Health/List", "/other.Service/Call", "/inference"):
                assert (await refusal(setup.call(method)))[0] is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(main())


def test_watch_follows_and_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.grpc._WATCH_S", 0.01)

    async def main() -> None:
        async with edge(twice) as setup:
            watch = setup.channel.unary_stream("/grpc.health.v1.Health/Watch")

            async def status(call: Any) -> int:
                return pb.HealthCheckResponse.FromString(await asyncio.wait_for(call.read(), 2)).status

            call, unknown = watch(b""), watch(pb.HealthCheckRequest(service="other").SerializeToString())
            assert (await status(call), await status(unknown)) == (1, 3)
            setup.ready = False
            assert await status(call) == 2
            setup.ready = True
            assert await status(call) == 1
            last = asyncio.ensure_future(status(call))
            began = time.monotonic()
            await setup.edge.stop(30)
            assert time.monotonic() - began < 5
            assert await last == 2
            assert await call.read() is grpc.aio.EOF

    asyncio.run(main())


def test_watch_tells_of_a_stop_that_comes_while_it_writes() -> None:
    async def main() -> None:
        async with edge(twice) as setup:
            assert setup.edge._stopping is not None
            written: list[int] = []

            class Context:
                async def write(self, status: bytes) -> None:
                    written.append(pb.HealthCheckResponse.FromString(status).status)
                    setup.edge._stopping.set()  # type: ignore[union-attr]

            await asyncio.wait_for(setup.edge._watched(b"", Context()), 2)
            assert written == [1, 2]

    asyncio.run(main())


def test_a_port_in_use_is_an_error() -> None:
    async def main() -> None:
        async with edge(twice) as setup:
            taken = f"127.0.0.1:{setup.port}"
            second = GrpcEdge(
                twice, now=time.monotonic, max_message_bytes=1, ready=lambda: True, grpc_status=status,
                decision_headers=decision, refused=lambda failure: None, report=lambda error: None,
            )  # fmt: skip
            with pytest.raises(OSError, match=taken):
                await second.start(["127.0.0.1:0", taken])
            await second.stop(0)

    asyncio.run(main())


def test_stop_lets_calls_finish_within_its_grace() -> None:
    async def main() -> None:
        async def service(request: Request) -> Reply:
            await asyncio.sleep(0.1 if request.model == "quick" else 60)
            return await twice(request)

        async with edge(service) as setup:
            quick = asyncio.ensure_future(_result(setup.call(data=infer_message(model_name="quick"))))
            slow = asyncio.ensure_future(_result(setup.call(data=infer_message(model_name="slow"))))
            await asyncio.sleep(0.03)
            await setup.edge.stop(0.4)
            assert isinstance(await quick, bytes)
            assert isinstance(await asyncio.wait_for(slow, 2), grpc.aio.AioRpcError)
            assert not setup.reported

    asyncio.run(main())


async def _result(call: Any) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return error

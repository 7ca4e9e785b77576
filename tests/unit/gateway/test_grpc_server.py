"""The gRPC edge as a server: health, its port, its end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from backends.proto import kserve_pb2 as pb
from backends.request import Reply, Request
from gateway.grpc import GrpcEdge
from gateway.grpc_health import Health
from tests.unit.gateway.grpc_edge import decision, edge, infer_message, refusal, status, twice

# Triton has none either.
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


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
            for method in ("/grpc.health.v1.Health/List", "/other.Service/Call", "/inference", REFLECTION):
                assert (await refusal(setup.call(method)))[0] is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(main())


def test_watch_follows_and_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.grpc_health._WATCH_S", 0.01)

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
        health = Health(lambda: True, "inference.GRPCInferenceService")
        written: list[int] = []
        async with asyncio.timeout(2):
            async for status in health.watch(b""):
                written.append(pb.HealthCheckResponse.FromString(status).status)
                health.stopping.set()
        assert written == [1, 2]

    asyncio.run(main())


def test_a_port_in_use_is_an_error() -> None:
    async def main() -> None:
        async with edge(twice) as setup:
            taken = f"127.0.0.1:{setup.port}"
            second = GrpcEdge(
                twice, now=time.monotonic, max_message_bytes=lambda: 1, ready=lambda: True, grpc_status=status,
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

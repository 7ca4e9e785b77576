"""A thousand and three thousand gRPC streams open at once: each is answered or refused, and memory stays bounded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from backends.proto import kserve_pb2 as pb
from tests.support.serve import Served, served, within
from tests.unit.backends.grpc_peer import SERVICE, Methods
from tests.unit.gateway.grpc_edge import infer_message

POLICY = """
backends: {{b: {{endpoints: [grpc://127.0.0.1:{port}]}}}}
proxy: b
limits: {{in_flight: {most}}}
telemetry: {{access_log: false}}
"""


# As the gateway has it: gRPC's servers cancel calls that come faster than they are looked at.
UNBOUNDED = (("grpc.server.max_pending_requests", 1 << 16), ("grpc.server.max_pending_requests_hard_limit", 1 << 16))


def resident_bytes(gateway: Served) -> int:
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


class Crowd:
    """Streams through the gateway which all stay open until every one has its first answer, or its refusal."""

    def __init__(self, channel: Any, count: int) -> None:
        self._call = channel.stream_stream(SERVICE + "ModelStreamInfer")
        self._count = self._awaited = count
        self.outcomes: Counter[str] = Counter()
        self.all_told = asyncio.Event()
        self.release = asyncio.Event()

    async def run(self) -> None:
        await asyncio.gather(*(self._one(i) for i in range(self._count)))

    async def _one(self, number: int) -> None:
        message = infer_message(id=str(number))
        call = self._call(timeout=100)
        try:
            await call.write(message)
            first = await call.read()
        except grpc.aio.AioRpcError:
            first = None
        self._awaited -= 1
        if not self._awaited:
            self.all_told.set()
        await self.release.wait()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        code = (await call.code()).name
        if first == message:
            self.outcomes[code] += 1
        else:
            told = pb.ModelStreamInferResponse.FromString(first or b"").error_message
            self.outcomes["refused" if "too many requests in flight" in told else f"another's {told}"] += 1


@pytest.mark.parametrize(("count", "most"), [(1000, 4096), (3000, 4096), (1000, 400)])
def test_many_streams_at_once(count: int, most: int, tmp_path: Path) -> None:
    async def main() -> None:
        server = grpc.aio.server(options=UNBOUNDED)
        server.add_generic_rpc_handlers((Methods(ready_or_echoing),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        policy = tmp_path / "policy.yaml"
        policy.write_text(POLICY.format(port=port, most=most))
        try:
            await asyncio.to_thread(serve, str(policy), asyncio.get_running_loop())
        finally:
            await server.stop(0)

    def serve(policy: str, loop: asyncio.AbstractEventLoop) -> None:
        with served(tmp_path, policy) as gateway:
            asyncio.run_coroutine_threadsafe(crowd(gateway), loop).result(150)
            assert within(10, lambda: gateway.counters()["headrace_requests_in_flight"] == 0)
            assert not [
                k for k, v in gateway.counters().items() if k.startswith("headrace_internal_errors_total") and v
            ]

    async def crowd(gateway: Served) -> None:
        async with grpc.aio.insecure_channel(gateway.grpc) as channel:
            before = resident_bytes(gateway)
            many = Crowd(channel, count)
            running = asyncio.create_task(many.run())
            await many.all_told.wait()
            held = resident_bytes(gateway) - before
            many.release.set()
            await running
            expected = {"OK": count} if count <= most else {"OK": most, "refused": count - most}
            assert many.outcomes == expected
            assert held < 100 * 1024 * min(count, most) + 30 * 1024 * 1024, f"{held / count / 1024:.0f} KiB a stream"
            again = Crowd(channel, 10)
            again.release.set()
            await again.run()
            assert again.outcomes == {"OK": 10}

    asyncio.run(main())


async def ready_or_echoing(messages: AsyncIterator[bytes], context: Any) -> None:
    """Every call is echoed; ServerReady's empty message is answered with yes."""
    async for message in messages:
        await context.write(message or b"\x08\x01")

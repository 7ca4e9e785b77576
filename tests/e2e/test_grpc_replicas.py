"""One gRPC connection of a caller is not one replica: each call goes where the gateway chooses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from tests.support.serve import served
from tests.unit.backends.grpc_peer import REPLY, SERVICE, Methods
from tests.unit.gateway.grpc_edge import infer_message

POLICY = """
backends: {{b: {{endpoints: [grpc://127.0.0.1:{}, grpc://127.0.0.1:{}]}}}}
routes: {{m: {{backend: b}}}}
telemetry: {{access_log: false}}
"""


def test_a_callers_connection_pins_it_to_no_replica(tmp_path: Path) -> None:
    calls: Counter[int] = Counter()

    def replica(number: int) -> Any:
        async def answer(messages: AsyncIterator[bytes], context: Any) -> None:
            async for message in messages:
                calls[number] += bool(message)
                await context.write(REPLY if message else b"\x08\x01")  # or to ServerReady: yes

        return answer

    async def ask(gateway: str) -> None:
        async with grpc.aio.insecure_channel(gateway) as channel:
            infer = channel.unary_unary(SERVICE + "ModelInfer")
            for _ in range(100):
                await infer(infer_message(), timeout=20)

    def serve(policy: str, loop: asyncio.AbstractEventLoop) -> None:
        with served(tmp_path, policy) as gateway:
            asyncio.run_coroutine_threadsafe(ask(gateway.grpc), loop).result(60)

    async def main() -> None:
        servers = [grpc.aio.server(), grpc.aio.server()]
        ports = []
        for number, server in enumerate(servers):
            server.add_generic_rpc_handlers((Methods(replica(number)),))
            ports.append(server.add_insecure_port("127.0.0.1:0"))
            await server.start()
        policy = tmp_path / "policy.yaml"
        policy.write_text(POLICY.format(*ports))
        try:
            await asyncio.to_thread(serve, str(policy), asyncio.get_running_loop())
        finally:
            for server in servers:
                await server.stop(0)

    asyncio.run(main())
    assert sum(calls.values()) == 100
    assert min(calls[0], calls[1]) >= 20

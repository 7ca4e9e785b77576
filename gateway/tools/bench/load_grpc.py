"""The gRPC callers: `python -m gateway.tools.bench.load_grpc HOST:PORT grpc REQUESTS` (see `load`); plain bytes."""

from __future__ import annotations

import asyncio
import sys
import time

import grpc
import uvloop

from gateway.tools.bench.exchanges import METHOD, grpc_infer
from gateway.tools.bench.load import CONCURRENCY, Wrong, turn

# Calls share connections in gRPC; a few, so that a proxy sees several.
_CONNECTIONS = 4


async def _main(address: str, requests: int) -> None:
    exchange = grpc_infer()
    seconds: list[float] = []
    numbers = iter(range(requests))
    channels = [
        grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(_CONNECTIONS)
    ]
    methods = [channels[i % _CONNECTIONS].unary_unary(METHOD) for i in range(CONCURRENCY)]

    async def ask(number: int) -> None:
        reply = await methods[number](exchange.request)
        if len(reply) < len(exchange.reply):
            raise Wrong(f"expected at least {len(exchange.reply)} bytes, got {len(reply)}")

    async def warm() -> None:
        await asyncio.gather(*map(ask, range(CONCURRENCY)))

    async def loop_of(number: int) -> None:
        for _ in numbers:
            began = time.perf_counter()
            await ask(number)
            seconds.append(time.perf_counter() - began)

    async def run() -> list[float]:
        await asyncio.gather(*map(loop_of, range(CONCURRENCY)))
        return seconds

    try:
        await turn(warm, run)
    finally:
        for channel in channels:
            await channel.close()


if __name__ == "__main__":
    try:
        uvloop.run(_main(sys.argv[1], int(sys.argv[3])))
    except (Wrong, TimeoutError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except grpc.aio.AioRpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")

"""The gRPC backend of the benchmark: `python -m gateway.tools.bench.stub_grpc PORT`; fixed bytes, in and out.

ModelInfer gets the fixed reply; whatever else is asked is whether it is ready, and it is. It ends at a message that is
surely more than one caller's (see `stub_http`); a few bytes more are a proxy's own spelling of the model's name.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import grpc
import uvloop

from gateway.tools.bench.exchanges import METHOD, grpc_infer

_YES = b"\x08\x01"  # ServerReadyResponse(ready=True), and every message like it


class _Stub(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self) -> None:
        exchange = grpc_infer()
        self._reply, self._limit = exchange.reply, 2 * len(exchange.request)
        self._infer = grpc.unary_unary_rpc_method_handler(self._answer)
        self._ready = grpc.unary_unary_rpc_method_handler(self._yes)

    def service(self, details: Any) -> Any:
        return self._infer if details.method == METHOD else self._ready

    async def _answer(self, data: bytes, context: Any) -> bytes:
        if len(data) >= self._limit:
            print(f"expected a message of less than {self._limit} bytes, got {len(data)}", file=sys.stderr, flush=True)
            os._exit(1)
        return self._reply

    async def _yes(self, data: bytes, context: Any) -> bytes:
        return _YES


async def _main(port: int) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((_Stub(),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1])))

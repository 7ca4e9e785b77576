"""A scripted gRPC server on 127.0.0.1 behind our client, and what the client is asked with."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from backends.proto import kserve_pb2 as pb
from backends.request import Infer, Request, RpcCall, Tensors
from backends.tensor import Tensor
from backends.triton_grpc import TritonGrpc

SERVICE = "/inference.GRPCInferenceService/"
REPLY = pb.ModelInferResponse(
    model_name="m", outputs=[{"name": "y", "datatype": "INT8", "shape": [1]}], raw_output_contents=[b"\7"]
).SerializeToString()

Script = Callable[[AsyncIterator[bytes], Any], Awaitable[None]]


class Methods:
    """Serves every method by one script."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self.script)


@asynccontextmanager
async def backend(
    script: Script, *, limit: int = 1 << 20, timeout: float = 2.0, first_byte: float = math.inf, options: Any = ()
) -> AsyncIterator[TritonGrpc]:
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((Methods(script),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = TritonGrpc(
        f"127.0.0.1:{port}",
        now=time.monotonic,
        connect_timeout=timeout,
        max_message_bytes=limit,
        first_byte_timeout=first_byte,
    )
    try:
        yield client
    finally:
        await client.close()
        await server.stop(None)


def ask(**fields: Any) -> Request:
    infer = Infer(Tensors.of((Tensor("x", "INT8", (1,), b"\1"),)), id="7")
    return Request(**{"model": "m", "version": "2", "content": infer, **fields})


async def told(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


def relay(method: str, messages: AsyncIterator[bytes], **fields: Any) -> Request:
    call = RpcCall(SERVICE + method, messages, fields.pop("metadata", ()))
    return Request(model="", content=call, stream=True, **fields)


def aborting(code: grpc.StatusCode, text: str) -> Script:
    async def script(messages: AsyncIterator[bytes], context: Any) -> None:
        await context.abort(code, text)

    return script


async def answering(messages: AsyncIterator[bytes], context: Any) -> None:
    async for _ in messages:
        await context.write(REPLY)


async def echoing(messages: AsyncIterator[bytes], context: Any) -> None:
    async for message in messages:
        await context.write(message)


async def hanging(messages: AsyncIterator[bytes], context: Any) -> None:
    await asyncio.sleep(60)

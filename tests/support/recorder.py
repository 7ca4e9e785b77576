"""A small model server that speaks KServe v2 over gRPC, in the test's own loop, and records how every call ended.

Every model answers `Y`, which is `X` (FP32), after `seconds`; a stream gives an answer every `seconds`, for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from backends.proto import kserve_pb2 as pb

_SERVICE = "/inference.GRPCInferenceService/"


@dataclass
class Call:
    """One call as its server saw it: `end` is empty while it runs, then `answered` or `cancelled`, at `ended`."""

    id: str
    rows: int
    left: float | None  # seconds until its deadline, when it came
    end: str = ""
    ended: float = 0.0
    answers: int = 0


@dataclass
class Recorder:
    """The server at `address`; `calls` are those that make a model work, in the order they came."""

    seconds: float = 0.0
    address: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def running(self) -> int:
        return sum(not call.end for call in self.calls)

    def ends(self, end: str) -> int:
        return sum(call.end == end for call in self.calls)

    def service(self, details: Any) -> Any:
        name = details.method.removeprefix(_SERVICE)
        if name == "ModelInfer":
            return grpc.unary_unary_rpc_method_handler(self._infer)
        if name == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self._stream)
        if name == "ModelConfig":
            return None  # it has none to tell, as a server that is no Triton
        return grpc.unary_unary_rpc_method_handler(_yes if name in ("ServerReady", "ModelReady") else _nothing)

    async def _infer(self, data: bytes, context: Any) -> bytes:
        request = pb.ModelInferRequest.FromString(data)
        call = self._began(request, context)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self._over(call, "cancelled")
            raise
        self._over(call, "answered")
        return answer(request).SerializeToString()

    async def _stream(self, messages: AsyncIterator[bytes], context: Any) -> None:
        request = pb.ModelInferRequest.FromString(await anext(messages))
        call = self._began(request, context)
        reply = pb.ModelStreamInferResponse(infer_response=answer(request)).SerializeToString()
        try:
            while True:
                await asyncio.sleep(self.seconds)
                await context.write(reply)
                call.answers += 1
        finally:  # by a cancellation, or because it can write no more
            self._over(call, "cancelled")

    def _began(self, request: pb.ModelInferRequest, context: Any) -> Call:
        call = Call(request.id, request.inputs[0].shape[0], context.time_remaining())
        self.calls.append(call)
        return call

    @staticmethod
    def _over(call: Call, end: str) -> None:
        call.end, call.ended = end, time.monotonic()


def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    (given,) = request.inputs
    reply = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    reply.outputs.add(name="Y", datatype="FP32", shape=given.shape)
    reply.raw_output_contents[:] = request.raw_input_contents
    return reply


async def _yes(data: bytes, context: Any) -> bytes:
    return pb.ServerReadyResponse(ready=True).SerializeToString()


async def _nothing(data: bytes, context: Any) -> bytes:
    return b""


@asynccontextmanager
async def recording(seconds: float = 0.0, port: int = 0) -> AsyncIterator[Recorder]:
    """A server, on a free port where none is given."""
    recorder = Recorder(seconds)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((recorder,))
    recorder.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield recorder
    finally:
        await server.stop(0)

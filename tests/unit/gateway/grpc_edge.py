"""A gRPC edge on a real socket before a scripted service, and what it is asked with."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from backends.errors import BackendFailed, Failure, Rejected
from backends.proto import kserve_pb2 as pb
from backends.request import Answer, Relay, Reply, Request, RpcCall, Tensors, replace
from backends.triton_grpc import TritonGrpc
from gateway import respond
from gateway.grpc import GrpcEdge

SERVICE = "/inference.GRPCInferenceService/"


def status(failure: Failure) -> tuple[int, str, tuple[tuple[str, str], ...]]:
    if isinstance(failure, BackendFailed):
        return failure.status, failure.message, ()
    trailing = (("retry-after", "1"), ("bad", "ü")) if isinstance(failure, Rejected) else ()
    return respond.HEADRACE.grpc(failure)[0], failure.message, trailing


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
    most: int = 1 << 20

    def call(self, method: str = "ModelInfer", data: bytes = b"", **options: Any) -> Any:
        return self.channel.unary_unary(method if method[0] == "/" else SERVICE + method)(data, **options)


Service = Callable[[Request], Awaitable[Reply]]


@asynccontextmanager
async def edge(service: Service, grpc_status: Any = status) -> AsyncIterator[Setup]:
    setup: Any = None
    reported: list[BaseException] = []
    refused: list[Failure] = []
    made = GrpcEdge(
        service,
        now=time.monotonic,
        max_message_bytes=lambda: setup.most if setup else 1 << 20,
        ready=lambda: setup.ready,
        grpc_status=grpc_status,
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

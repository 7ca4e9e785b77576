"""Callers that leave: over HTTP by a closed or reset connection, over gRPC by a cancelled call."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from backends.proto import kserve_pb2 as pb
from tests.support.serve import Served, served


@asynccontextmanager
async def gateway(folder: Path, policy: str) -> AsyncIterator[Served]:
    """`served` for tests whose own loop has the backend in it."""
    path = folder / "policy.yaml"
    path.write_text(policy)
    with ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, served(folder, str(path)))
        await asyncio.to_thread(stack.close)


def post(model: str, id: str = "", *headers: str, **parameters: Any) -> bytes:
    """An inference of one row as HTTP/1.1."""
    inputs = [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1.5]}]
    body = json.dumps({"id": id, "inputs": inputs, **({"parameters": parameters} if parameters else {})})
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


def message(model: str, id: str = "") -> bytes:
    """The same over gRPC."""
    request = pb.ModelInferRequest(model_name=model, id=id, raw_input_contents=[struct.pack("<f", 1.5)])
    request.inputs.add(name="X", datatype="FP32", shape=[1, 1])
    return request.SerializeToString()


class HttpCaller:
    """One request on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def ask(cls, address: str, request: bytes) -> HttpCaller:
        host, _, port = address.rpartition(":")
        caller = cls(*await asyncio.open_connection(host, int(port)))
        caller.writer.write(request)
        return caller

    async def answer(self) -> tuple[int, Any]:
        """The status, and the JSON body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head[9:12]), json.loads(await self.reader.readexactly(length))

    def leave(self, *, reset: bool = False) -> None:
        if reset:
            linger = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort() if reset else self.writer.close()


def infer(channel: grpc.aio.Channel, model: str, id: str = "", **options: Any) -> Any:
    """A unary call; `cancel()` leaves."""
    return channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message(model, id), **options)


def stream(channel: grpc.aio.Channel, model: str, id: str = "") -> Any:
    """A stream with one message; `cancel()` leaves, `read()` gives an answer."""

    async def messages() -> AsyncIterator[bytes]:
        yield message(model, id)
        await asyncio.sleep(3600)

    return channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(messages())

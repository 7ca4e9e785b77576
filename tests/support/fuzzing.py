"""What a differential fuzz asks with, and what it compares: clients that send any bytes, and answers as values."""

from __future__ import annotations

import asyncio
import json
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from backends.proto import kserve_pb2 as pb

# Of one answer. A busy machine is slow, but nothing here takes a model long.
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class Answer:
    """`status` is HTTP's, or gRPC's by its number; `body` as it came; `line` is the error's, if there is one."""

    ok: bool
    status: int
    kind: str = ""
    body: bytes = b""
    line: str = ""
    header_length: int | None = None


class Http:
    """One keep-alive connection at a time to `host:port`; `ended` has the statuses that one was ended with."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.ended: list[int] = []

    async def ask(self, raw: bytes) -> Answer:
        """The answer to these bytes. Raises OSError or EOFError where the server closes without one."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        reader, writer = self._streams
        try:
            async with asyncio.timeout(_PATIENCE_S):
                writer.write(raw)
                sending = asyncio.ensure_future(writer.drain())
                try:
                    return await self._answer(reader)
                finally:
                    with suppress(OSError):
                        await sending
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
            with suppress(OSError):
                await streams[1].wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> Answer:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ")[1])
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        else:
            body = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection", "").lower() == "close":
            self.ended.append(status)
            await self.close()
        length = headers.get("inference-header-content-length")
        if headers.get("content-encoding") in ("gzip", "deflate"):
            body = zlib.decompress(body, 47)
        line = _line(body) if status >= 400 else ""
        return Answer(
            status < 400, status, headers.get("content-type", ""), body, line, int(length) if length else None
        )


class Grpc:
    """One channel to `host:port`."""

    def __init__(self, address: str) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(address, options=options)

    async def ask(self, method: str, data: bytes) -> Answer:
        try:
            call = self._channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            return Answer(True, 0, body=await call(data, timeout=_PATIENCE_S))
        except grpc.aio.AioRpcError as error:
            return Answer(False, error.code().value[0], line=error.details() or "")

    async def close(self) -> None:
        await self._channel.close()


def _line(body: bytes) -> str:
    """The line of an error's body; empty where it is no such body."""
    try:
        document = json.loads(body.decode(errors="surrogateescape"))
    except ValueError:
        return ""
    return str(document["error"]) if isinstance(document, dict) and list(document) == ["error"] else ""


def http_content(answer: Answer) -> Any:
    """What an inference answer says, whatever form it has: all but tensors by itself, and tensors by their names.

    Any other answer is its bytes.
    """
    end = len(answer.body) if answer.header_length is None else answer.header_length
    try:
        document = json.loads(answer.body[:end].decode(errors="surrogateescape"))
        outputs = document.pop("outputs")
    except (ValueError, KeyError, TypeError, AttributeError):
        return answer.body
    at, tensors = end, {}
    for tensor in outputs:
        size = tensor.get("parameters", {}).get("binary_data_size")
        if size is not None:
            tensor["data"] = answer.body[at : at + size]
            at += size
        tensors[tensor["name"]] = repr(sorted(tensor.items()))  # by repr: NaN equals itself
    return document, tensors, answer.body[at:]


def grpc_content(method: str, answer: Answer) -> Any:
    """What a ModelInfer's answer says; any other is its bytes."""
    if method != "ModelInfer":
        return answer.body
    message = pb.ModelInferResponse.FromString(answer.body)
    raw = message.raw_output_contents
    tensors = {o.name: (o.datatype, tuple(o.shape), raw[i]) for i, o in enumerate(message.outputs)}
    return message.model_name, message.model_version, message.id, tensors

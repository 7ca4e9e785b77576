"""Callers of a soak: each kind of request asks one thing and knows the only right answer.

A `Caller` has one HTTP connection of its own, plain bytes on a socket, because it must be able to leave in the middle
and to send what no client would; its gRPC calls share a few channels. Every kind raises `Wrong` where the answer is not
the right one.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import numpy as np

from backends.proto import kserve_pb2 as pb
from tests.support.serve import Served

# What the model `rowsum` multiplies by: binary fractions, so that every sum is exact.
MATRIX = (np.arange(64, dtype=np.float32).reshape(16, 4) % 7 - 3) / 8
WORDS = (b"", b"a", b"\0", b"\xff\xfe", "größer".encode(), b"x" * 5000)
_PATIENCE_S = 60.0
Headers = dict[bytes, bytes]
Kind = Callable[[], Awaitable[None]]


class Wrong(Exception):
    """An answer that is not the right one."""


class Caller:
    """Asks one request after the other, of kinds drawn by lot; `seen` counts what was asked for, by kind."""

    def __init__(self, gateway: Served, channel: grpc.aio.Channel, seed: int, seen: Counter[str]) -> None:
        self._gateway = gateway
        self._chance = random.Random(seed)
        self._seen = seen
        self._infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        self._stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._sequence = seed << 32
        self._kinds: list[tuple[float, Kind]] = [
            (30, self.json),
            (25, self.binary),
            (25, self.rpc),
            (4, self.bytes_json),
            (4, self.bytes_rpc),
            (3, self.metadata),
            (2, self.stream),
            (1, self.sequence),
            (1, self.malformed_http),
            (0.3, self.malformed_rpc),
            (2.5, self.leaves_http),
            (2.5, self.leaves_rpc),
            (0.3, self.leaves_stream),
        ]

    async def ask(self) -> None:
        (kind,) = self._chance.choices([k for _, k in self._kinds], [w for w, _ in self._kinds])
        try:
            await asyncio.wait_for(kind(), _PATIENCE_S)
        except Exception as error:
            self.hang_up()
            raise Wrong(f"{kind.__name__}: {type(error).__name__}: {error}") from error
        self._seen[kind.__name__] += 1

    def hang_up(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    # What is asked.

    async def json(self) -> None:
        x = self._rows()
        body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": x.shape, "data": x.ravel().tolist()}]}
        status, _, answer = await self._post(self._route(), json.dumps(body).encode())
        _equal(status, 200, answer)
        (output,) = json.loads(answer)["outputs"]
        _equal(output["data"], (x @ MATRIX).ravel().tolist(), x)

    async def binary(self) -> None:
        x = self._rows()
        head, tail = self._binary(x)
        length = b"inference-header-content-length"
        status, headers, answer = await self._post(self._route(), head + tail, ((length, b"%d" % len(head)),))
        _equal(status, 200, answer)
        _equal(answer[int(headers[length]) :], (x @ MATRIX).astype("<f4").tobytes(), x)

    async def rpc(self) -> None:
        x = self._rows()
        reply = pb.ModelInferResponse.FromString(await self._infer(_request(self._route(), x), timeout=_PATIENCE_S))
        _equal(reply.raw_output_contents[0], (x @ MATRIX).astype("<f4").tobytes(), x)

    async def bytes_json(self) -> None:
        words = [self._chance.choice(WORDS[:2] + WORDS[4:]).decode() for _ in range(self._chance.randint(0, 3))]
        body = {"inputs": [{"name": "IN_BYTES", "datatype": "BYTES", "shape": [1, len(words)], "data": words}]}
        status, _, answer = await self._post("text", json.dumps(body).encode())
        _equal(status, 200, answer)
        (output,) = json.loads(answer)["outputs"]
        _equal((output["data"], output["shape"]), (words, [1, len(words)]), words)

    async def bytes_rpc(self) -> None:
        words = [self._chance.choice(WORDS) for _ in range(self._chance.randint(0, 3))]
        data = b"".join(struct.pack("<I", len(word)) + word for word in words)
        request = pb.ModelInferRequest(model_name="text", raw_input_contents=[data])
        request.inputs.add(name="IN_BYTES", datatype="BYTES", shape=[1, len(words)])
        reply = pb.ModelInferResponse.FromString(await self._infer(request.SerializeToString(), timeout=_PATIENCE_S))
        _equal(reply.raw_output_contents[0], data, words)

    async def metadata(self) -> None:
        status, _, answer = await self._exchange(b"GET", b"/v2/models/alone")
        _equal((status, json.loads(answer)["name"]), (200, "alone"), answer)

    async def stream(self) -> None:
        asked = [self._rows() for _ in range(self._chance.randint(1, 5))]
        call = self._stream((_request("alone", x) for x in asked), timeout=_PATIENCE_S)
        for x in asked:
            answer = pb.ModelStreamInferResponse.FromString(await call.read())
            _equal(answer.error_message, "", x)
            _equal(answer.infer_response.raw_output_contents[0], (x @ MATRIX).astype("<f4").tobytes(), x)
        _equal(await call.read(), grpc.aio.EOF, "the end")

    async def sequence(self) -> None:
        self._sequence += 1
        total = 0
        for turn in range(3):
            value = self._chance.randint(0, 99)
            total += value
            parameters = {"sequence_id": self._sequence, "sequence_start": turn == 0, "sequence_end": turn == 2}
            given = {"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [value]}
            body = json.dumps({"inputs": [given], "parameters": parameters}).encode()
            status, _, answer = await self._post("accumulate", body)
            _equal(status, 200, answer)
            _equal(json.loads(answer)["outputs"][0]["data"], [total], parameters)

    async def malformed_http(self) -> None:
        headers: tuple[tuple[bytes, bytes], ...] = ()
        good = {"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}
        body = self._chance.choice(
            [
                b"",
                b"{",
                b"[" * 100_000,
                b'{"inputs": []}',
                json.dumps({"inputs": [good | {"shape": [-1, 16]}]}).encode(),
                json.dumps({"inputs": [good | {"shape": [2**62, 2**62]}]}).encode(),
                json.dumps({"inputs": [good | {"shape": [2, 16]}]}).encode(),
                json.dumps({"inputs": [good | {"datatype": "FP33"}]}).encode(),
                json.dumps({"inputs": [good | {"data": ["a"] * 16}]}).encode(),
                json.dumps({"inputs": [good, good]}).encode(),
                b'{"inputs": [{"name": "\xff"}]}',
                b"binary",
            ]
        )
        if body == b"binary":
            head, tail = self._binary(self._rows())
            body = head + tail[:-1]
            headers = ((b"inference-header-content-length", b"%d" % self._chance.choice([len(head), 10**9])),)
        status, _, answer = await self._post(self._route(), body, headers)
        if not 400 <= status < 500:
            raise Wrong(f"{body[:80]!r} was answered {status}: {answer[:200]!r}")
        (line,) = json.loads(answer).values()
        _equal((bool(line), "\n" in line), (True, False), line)

    async def malformed_rpc(self) -> None:
        x = self._rows()
        message = self._chance.choice(
            [
                b"\xff" * 10,
                _request(self._route(), x)[:-1],
                pb.ModelInferRequest().SerializeToString(),
                _request(self._route(), x[:, :3], shape=[1, 16]),
                _request(self._route(), x, shape=[-1, 16]),
            ]
        )
        try:
            answer = await self._infer(message, timeout=_PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            # No name is no model, as Triton has it.
            expected = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
            _equal(error.code() in expected, True, error.details())
        else:
            raise Wrong(f"{message[:80]!r} was answered {answer[:80]!r}")

    async def leaves_http(self) -> None:
        x = self._rows()
        head, tail = self._binary(x)
        leaving = asyncio.ensure_future(
            self._post(self._route(), head + tail, ((b"inference-header-content-length", b"%d" % len(head)),))
        )
        await asyncio.sleep(self._chance.uniform(0, 0.01))
        leaving.cancel()
        await asyncio.wait({leaving})
        self.hang_up()

    async def leaves_rpc(self) -> None:
        call = self._infer(_request(self._route(), self._rows()), timeout=_PATIENCE_S)
        await asyncio.sleep(self._chance.uniform(0, 0.01))
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call

    async def leaves_stream(self) -> None:
        call = self._stream(timeout=_PATIENCE_S)
        for _ in range(self._chance.randint(0, 3)):
            await call.write(_request("alone", self._rows()))
        await asyncio.sleep(self._chance.uniform(0, 0.01))
        call.cancel()

    # How.

    def _rows(self) -> Any:
        rows = self._chance.choice([1, 1, 1, 2, 3])
        return np.array([[self._chance.randint(0, 9)] * 16 for _ in range(rows)], "<f4")

    def _route(self) -> str:
        return self._chance.choice(["http", "grpc", "kept", "alone"])

    @staticmethod
    def _binary(x: Any) -> tuple[bytes, bytes]:
        given = {"name": "X", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}
        return json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode(), x.tobytes()

    async def _post(
        self, model: str, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> tuple[int, Headers, bytes]:
        return await self._exchange(b"POST", b"/v2/models/%b/infer" % model.encode(), body, headers)

    async def _exchange(
        self, method: bytes, target: bytes, body: bytes = b"", headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> tuple[int, Headers, bytes]:
        if self._writer is None:
            host, _, port = self._gateway.http.rpartition(":")
            self._reader, self._writer = await asyncio.open_connection(host, int(port))
        assert self._reader is not None
        lines = [b"%b %b HTTP/1.1" % (method, target), b"host: soak", b"content-length: %d" % len(body)]
        self._writer.write(b"\r\n".join((*lines, *(b"%b: %b" % each for each in headers), b"", body)))
        await self._writer.drain()
        head = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        given = dict(line.lower().split(b": ", 1) for line in head[1:-2])
        answer = await self._reader.readexactly(int(given[b"content-length"]))
        if given.get(b"connection") == b"close":
            self.hang_up()
        return int(head[0].split()[1]), given, answer


def _request(model: str, x: Any, shape: list[int] | None = None) -> bytes:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[x.tobytes()])
    request.inputs.add(name="X", datatype="FP32", shape=shape or x.shape)
    return request.SerializeToString()


def _equal(got: Any, expected: Any, asked: Any) -> None:
    if got != expected:
        raise Wrong(f"asked {str(asked)[:200]}, expected {str(expected)[:200]}, got {str(got)[:200]}")

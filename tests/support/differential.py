"""The same inference straight at a server and through the gateway: what is sent, in every form, and what came back.

Nothing here uses the gateway's codecs: bodies are written and read by hand, messages by tritonclient's protobuf.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import grpc
import httpx
import tritonclient.grpc.service_pb2 as pb

PLAIN = {"accept-encoding": "identity"}
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
LIMIT = 64 * 2**20


@dataclass(frozen=True)
class Peer:
    """A server or a gateway; addresses are `host:port`."""

    http: str
    grpc: str


@dataclass(frozen=True)
class Case:
    """One tensor: its bytes, and where JSON or typed contents can have it, its values."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes
    values: Sequence[Any] | None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Said:
    """What an HTTP peer answered. `decisions` are the gateway's own headers."""

    status: int
    header_length: str | None
    body: bytes
    decisions: Mapping[str, str] = field(default_factory=dict, compare=False)

    def called(self, model: str) -> Said:
        """The same under another model name."""
        body = re.sub(rb'"model_name":"[^"]*"', b'"model_name":' + json.dumps(model).encode(), self.body, count=1)
        length = None if self.header_length is None else str(int(self.header_length) + len(body) - len(self.body))
        return Said(self.status, length, body)

    @property
    def numbers(self) -> str:
        """The document, with each number as the double that it stands for: Triton prints more digits than it takes."""
        return repr(json.loads(self.body))

    @property
    def error(self) -> str:
        """The message of an error, without what Triton says of an id that nobody gave."""
        return str(json.loads(self.body)["error"]).removeprefix("[request id: <id_unknown>] ")


def packed(*elements: bytes) -> bytes:
    """BYTES elements as the wire has them."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


_INTEGERS = {
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
}
_INF = float("inf")


def _number(name: str, datatype: str, code: str, shape: tuple[int, ...], values: Sequence[Any]) -> Case:
    return Case(name, datatype, shape, struct.pack(f"<{len(values)}{code}", *values), values)


def cases() -> list[Case]:
    """Every datatype: its ends, its special values, and nothing at all."""
    made = [_number("BOOL", "BOOL", "?", (2, 2), [True, False, False, True])]
    for datatype, code in _INTEGERS.items():
        bits = 8 * struct.calcsize(code)
        least, most = (0, 2**bits - 1) if datatype[0] == "U" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        made.append(_number(datatype, datatype, code, (2, 2), [least, most, 1, most - 1]))
    made += [
        _number("FP32", "FP32", "f", (2, 3), [1.5, -0.0, 1e-45, 3.4028234663852886e38, 0.1, -16777217.0]),
        _number("FP64", "FP64", "d", (2, 3), [0.1, -0.0, 5e-324, 1.7976931348623157e308, 2.0**53 + 2, 1e22]),
        _number("FP32 not finite", "FP32", "f", (1, 4), [float("nan"), _INF, -_INF, 2.0]),
        _number("FP64 not finite", "FP64", "d", (1, 4), [float("nan"), _INF, -_INF, 2.0]),
        Case("FP32 of odd NaNs", "FP32", (1, 2), b"\x01\x00\xa0\x7f\xff\xff\xff\xff", None),
        # 1.0, the smallest subnormal, infinity, a NaN with a payload: none of them survives a wider type unchanged.
        Case("FP16", "FP16", (2, 2), b"\x00\x3c\x01\x00\x00\x7c\x01\x7d", None),
        Case("BF16", "BF16", (2, 2), b"\x80\x3f\x01\x00\x80\x7f\x81\x7f", None),
        _text("BYTES", (2, 2), "", "größe", 'tab\t"quoted" \\ / \u2028', "x" * 300),
        _text("BYTES with NUL", (1, 3), "\0", "a\0b", ""),
        Case("BYTES beyond UTF-8", "BYTES", (1, 3), packed(b"\xff\xfe", b"\x80", b"ok"), None),
        _text("BYTES of a megabyte", (2, 1), "m" * 2**20, ""),
    ]
    kinds = ["BOOL", *_INTEGERS, "FP32", "FP64", "BYTES"]
    made += [Case(f"{kind} without elements", kind, (1, 0), b"", []) for kind in kinds]
    made += [Case(f"{kind} without elements", kind, (2, 0), b"", None) for kind in ("FP16", "BF16")]
    return made


def _text(name: str, shape: tuple[int, ...], *texts: str) -> Case:
    return Case(name, "BYTES", shape, packed(*(text.encode() for text in texts)), texts)


# Forms


def as_json(case: Case, **more: Any) -> tuple[bytes, int | None]:
    """All JSON, and no header length."""
    assert case.values is not None
    tensor = {"name": f"IN_{case.datatype}", "datatype": case.datatype, "shape": case.shape, "data": case.values}
    return json.dumps({"inputs": [tensor], **more}).encode(), None


def as_binary(case: Case, **more: Any) -> tuple[bytes, int | None]:
    """JSON and the tensor behind it, and the header length."""
    size = {"binary_data_size": len(case.data)}
    tensor = {"name": f"IN_{case.datatype}", "datatype": case.datatype, "shape": case.shape, "parameters": size}
    head = json.dumps({"inputs": [tensor], **more}).encode()
    return head + case.data, len(head)


def as_raw_contents(case: Case, model: str) -> pb.ModelInferRequest:
    message = _message(case, model)
    message.raw_input_contents.append(case.data)
    return message


_CONTENTS = {
    "BOOL": "bool_contents", "INT64": "int64_contents", "UINT64": "uint64_contents", "FP32": "fp32_contents",
    "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


def as_typed_contents(case: Case, model: str) -> pb.ModelInferRequest:
    assert case.values is not None
    message = _message(case, model)
    contents = message.inputs[0].contents
    contents.SetInParent()
    name = _CONTENTS.get(case.datatype) or ("uint_contents" if case.datatype[0] == "U" else "int_contents")
    values = [text.encode() for text in case.values] if case.datatype == "BYTES" else case.values
    getattr(contents, name).extend(values)
    return message


def _message(case: Case, model: str) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model)
    message.inputs.add(name=f"IN_{case.datatype}", datatype=case.datatype, shape=case.shape)
    return message


# Peers


def length_header(header_length: int | None) -> dict[str, str]:
    return {} if header_length is None else {"inference-header-content-length": str(header_length)}


def said(response: httpx.Response) -> Said:
    decisions = {name: value for name, value in response.headers.items() if name.startswith("headrace-")}
    length = response.headers.get("inference-header-content-length")
    return Said(response.status_code, length, response.content, decisions)


def post(client: httpx.Client, peer: Peer, model: str, body: bytes, header_length: int | None, **headers: str) -> Said:
    """An infer call over HTTP."""
    return said(
        client.post(
            f"http://{peer.http}/v2/models/{model}/infer",
            content=body,
            headers={**PLAIN, **length_header(header_length), **headers},
        )
    )


def call(peer: Peer, message: bytes, method: str = MODEL_INFER) -> bytes | tuple[grpc.StatusCode, str]:
    """A unary gRPC call as bytes: the reply, or its code and message."""
    try:
        reply: bytes = _channel(peer.grpc).unary_unary(method)(message, timeout=60)
        return reply
    except grpc.RpcError as error:
        return error.code(), error.details().removeprefix("[request id: <id_unknown>] ")


@cache
def _channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)])

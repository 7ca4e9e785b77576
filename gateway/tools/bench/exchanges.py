"""What is sent in each case, and what comes back: fixed bytes, so that neither end costs more than reading them."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

MODEL = {"http": "over_http", "grpc": "over_grpc"}
METHOD = "/inference.GRPCInferenceService/ModelInfer"

# A row of 128 FP32 is 2.6 KB of JSON, and one of 640 is 2.6 KB of gRPC; a reply is a classifier's, with 16 classes.
_JSON_VALUES = 128
_GRPC_VALUES = 640
_REPLY_VALUES = 16


@dataclass(frozen=True, slots=True)
class Exchange:
    """A body and its reply. The lengths of their JSON heads are set where binary tensors follow."""

    request: bytes
    reply: bytes
    header_length: int | None = None
    reply_header_length: int | None = None


def http_json() -> Exchange:
    """KServe v2, all JSON."""
    return Exchange(_json("inputs", "INPUT", _JSON_VALUES), _json("outputs", "OUTPUT", _REPLY_VALUES))


def http_binary() -> Exchange:
    """The tensors of `http_json`, as raw bytes behind the JSON."""
    header_length, request = _binary("inputs", "INPUT", _JSON_VALUES)
    reply_header_length, reply = _binary("outputs", "OUTPUT", _REPLY_VALUES)
    return Exchange(request, reply, header_length, reply_header_length)


def grpc_infer() -> Exchange:
    """ModelInfer with raw contents, as the real clients send it."""
    from backends.proto import kserve_pb2 as pb

    request = pb.ModelInferRequest(model_name=MODEL["grpc"], raw_input_contents=[_raw(_GRPC_VALUES)])
    request.inputs.add(name="INPUT", datatype="FP32", shape=[1, _GRPC_VALUES])
    reply = pb.ModelInferResponse(
        model_name=MODEL["grpc"], model_version="1", raw_output_contents=[_raw(_REPLY_VALUES)]
    )
    reply.outputs.add(name="OUTPUT", datatype="FP32", shape=[1, _REPLY_VALUES])
    return Exchange(request.SerializeToString(), reply.SerializeToString())


HTTP: dict[str, Callable[[], Exchange]] = {"http-json": http_json, "http-binary": http_binary}


def _raw(count: int) -> bytes:
    chance = random.Random(count)
    return struct.pack(f"<{count}f", *(chance.random() for _ in range(count)))


def _json(side: str, name: str, count: int) -> bytes:
    values = struct.unpack(f"<{count}f", _raw(count))
    return _document(side, {"name": name, "datatype": "FP32", "shape": [1, count], "data": values})


def _binary(side: str, name: str, count: int) -> tuple[int, bytes]:
    raw = _raw(count)
    parameters = {"binary_data_size": len(raw)}
    head = _document(side, {"name": name, "datatype": "FP32", "shape": [1, count], "parameters": parameters})
    return len(head), head + raw


def _document(side: str, tensor: dict[str, object]) -> bytes:
    if side == "inputs":
        asked = {"parameters": {"binary_data_output": True}} if "parameters" in tensor else {}
        return msgspec.json.encode({**asked, side: [tensor]})
    return msgspec.json.encode({"model_name": MODEL["http"], "model_version": "1", side: [tensor]})

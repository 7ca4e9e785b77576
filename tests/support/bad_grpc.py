"""Messages for the differential fuzz over gRPC: sound ones, and what can be wrong with them, each fault by its name.

    call = made(seed)          # the same call for the same seed

The message is built as protobuf, and its bytes may be spoilt after that. See `bad_http` for the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from backends.proto import kserve_pb2 as pb
from backends.proto import wire
from tests.support.faults import Faults
from tests.support.http_calls import DATATYPES, output, packed, values

_CONTENTS = {
    "FP32": "fp32_contents", "INT64": "int64_contents", "BYTES": "bytes_contents", "BOOL": "bool_contents",
    "UINT8": "uint_contents",
}  # fmt: skip


@dataclass
class GrpcCall:
    """One unary call, until it is written."""

    seed: int
    message: pb.ModelInferRequest
    method: str = "ModelInfer"
    edits: list[Callable[[bytes], bytes]] = field(default_factory=list)
    faults: tuple[str, ...] = ()
    kills: bool = False

    def raw(self) -> bytes:
        data = self.message.SerializeToString()
        for edit in self.edits:
            data = edit(data)
        return data

    def __str__(self) -> str:
        raw = self.raw()
        return f"gRPC seed {self.seed}, faults {list(self.faults)}: {self.method} {raw[:800]!r} ({len(raw)} bytes)"


def _sound(seed: int, chance: random.Random) -> GrpcCall:
    model = chance.choice(["echo", "echo", "echo", "rowsum"])
    message = pb.ModelInferRequest(model_name=model, model_version=chance.choice(["", "1"]))
    rows, columns = chance.randint(1, 3), chance.randint(1, 3) if model == "echo" else 16
    raw = chance.random() < 0.6
    kinds = chance.sample(DATATYPES, chance.randint(1, 3)) if model == "echo" else ["FP32"]
    for datatype in kinds if raw else [kind for kind in kinds if kind != "FP16"] or ["INT64"]:
        name = f"IN_{datatype}" if model == "echo" else "X"
        tensor = message.inputs.add(name=name, datatype=datatype, shape=[rows, columns])
        given = values(chance, datatype, rows * columns)
        if raw:
            message.raw_input_contents.append(packed(datatype, given))
        else:
            texts = [text.encode() for text in given] if datatype == "BYTES" else given
            getattr(tensor.contents, _CONTENTS[datatype]).extend(texts)
    if chance.random() < 0.3:
        message.id = chance.choice(["1", "größe", "a" * 200])
    if chance.random() < 0.2:
        message.parameters["a"].CopyFrom(
            chance.choice([_of(bool_param=True), _of(int64_param=7), _of(double_param=0.5)])
        )
    if chance.random() < 0.2:
        for tensor in message.inputs:
            message.outputs.add(name=output(tensor.name))
    return GrpcCall(seed, message)


FAULTS = Faults(_sound, killing=("grpc_shape_whose_product_overflows", "grpc_classification_of_text"))
made, fault = FAULTS.made, FAULTS.fault


def _of(**choice: Any) -> pb.InferParameter:
    return pb.InferParameter(**choice)


def _in_first(name: str, field_name: str, *choices: Any) -> None:
    def spoil(call: GrpcCall, chance: random.Random) -> None:
        value = chance.choice(choices)
        first = call.message.inputs[0] if call.message.inputs else call.message.inputs.add()
        if isinstance(value, list):
            first.ClearField(field_name)
            getattr(first, field_name).extend(value)
        else:
            setattr(first, field_name, value)

    FAULTS.add(name, spoil)


def _set(name: str, field_name: str, *choices: Any) -> None:
    def spoil(call: GrpcCall, chance: random.Random) -> None:
        setattr(call.message, field_name, chance.choice(choices))

    FAULTS.add(name, spoil)


def _parameter(name: str, key: str, *choices: pb.InferParameter) -> None:
    def spoil(call: GrpcCall, chance: random.Random) -> None:
        call.message.parameters[key].CopyFrom(chance.choice(choices))

    FAULTS.add(name, spoil)


def _of_output(name: str, key: str, *choices: pb.InferParameter) -> None:
    def spoil(call: GrpcCall, chance: random.Random) -> None:
        del call.message.outputs[:]
        wanted = call.message.outputs.add(name=output(call.message.inputs[0].name if call.message.inputs else "X"))
        wanted.parameters[key].CopyFrom(chance.choice(choices))

    FAULTS.add(name, spoil)


def _bytes(name: str, *edits: Callable[[bytes], bytes]) -> None:
    def spoil(call: GrpcCall, chance: random.Random) -> None:
        call.edits.append(chance.choice(edits))

    FAULTS.add(name, spoil)


def _method(name: str, method: str, *messages: bytes) -> None:
    def spoil(call: GrpcCall, chance: random.Random) -> None:
        call.method = method
        message = chance.choice(messages)
        call.edits = [lambda _: message]

    FAULTS.add(name, spoil)


_in_first("grpc_shape_negative", "shape", [-1, 16], [1, -3], [-1, -1])
_in_first("grpc_shape_of_another_rank", "shape", [], [1], [1, 1, 1, 1])
_in_first("grpc_shape_of_rank_17", "shape", [1] * 17, [1] * 1000)
_in_first("grpc_shape_other_than_the_data", "shape", [1, 2**34], [2**40, 1], [7, 7])
_in_first("grpc_shape_whose_product_overflows", "shape", [1, 2**62], [2**63 - 1, 1], [2**32, 2**32])
_in_first("grpc_datatype_unknown", "datatype", "FP33", "", "fp32", "BYTES\0")
_in_first("grpc_datatype_of_another_input", "datatype", "INT32", "UINT16", "FP64", "BF16")
_in_first("grpc_name_unknown", "name", "Q", "IN_", "x" * 1000, "x" * 5000)
_in_first("grpc_name_empty", "name", "")
_set("grpc_model_unknown", "model_name", "nope", "n" * 3000)
_set("grpc_model_empty", "model_name", "")
_set("grpc_version_unknown", "model_version", "9")
_set("grpc_version_no_number", "model_version", "x", "-2", "1.5", "9" * 20)
_set("grpc_id_long", "id", "i" * 100_000)
_parameter("grpc_parameter_without_value", "a", _of())
_parameter("grpc_parameter_reserved_by_triton", "triton_x", _of(int64_param=1))
_parameter("grpc_priority_wrong", "priority", _of(string_param="1"), _of(int64_param=-1), _of(double_param=1.0))
_parameter("grpc_timeout_wrong", "timeout", _of(string_param="1"), _of(bool_param=True))
_parameter("grpc_timeout_negative", "timeout", _of(int64_param=-1))
_parameter("grpc_timeout_unsigned", "timeout", _of(uint64_param=10**7))
_parameter("grpc_sequence_wrong", "sequence_id", _of(bool_param=True), _of(double_param=1.0))
_parameter("grpc_sequence_flag_wrong", "sequence_start", _of(int64_param=1), _of(string_param="true"))
_parameter("grpc_encoding_parameters", "binary_data_output", _of(string_param="x"), _of(int64_param=1))
_of_output("grpc_classification_wrong", "classification", _of(int64_param=-1), _of(string_param="1"))
_of_output("grpc_binary_data", "binary_data", _of(string_param="x"), _of(bool_param=True))
_bytes("grpc_cut", lambda data: data[:-1], lambda data: data[: len(data) // 2], lambda data: data + b"\x0a")
_bytes("grpc_noise", lambda _: b"\xff\xff\xff", lambda _: b"\x0b\x0c", lambda data: b"\x0a\xff\x01" + data)
_bytes("grpc_no_utf8", lambda data: data + wire.field(3, b"\xff\xfe"), lambda data: data + wire.field(1, b"\xff"))
_bytes("grpc_field_unknown", lambda data: data + wire.field(15, b"abc"), lambda data: data + b"\x78\x01")
_bytes("grpc_wrong_wire_type", lambda data: data + b"\x08\x01", lambda data: data + b"\x28\x01")
_bytes("grpc_empty", lambda _: b"")
_method("grpc_ready_of_what", "ModelReady", b"", wire.text(1, "nope"), b"\xff\xff", wire.text(1, "echo") * 2)
_method("grpc_metadata_of_what", "ModelMetadata", b"", wire.text(1, "nope"), b"\xff\xff", wire.text(1, "\0"))
_method("grpc_config_of_what", "ModelConfig", wire.text(1, "nope"), b"\xff", wire.text(1, "echo") + wire.text(2, "x"))
_method("grpc_index", "RepositoryIndex", b"\xff\xff", wire.text(1, "x"))
_method("grpc_method_unknown", "Nope", b"", b"\xff")


@fault
def grpc_inputs_none(call: GrpcCall, chance: random.Random) -> None:
    del call.message.inputs[:]
    del call.message.raw_input_contents[:]


@fault
def grpc_input_twice(call: GrpcCall, chance: random.Random) -> None:
    if call.message.inputs:
        call.message.inputs.add().CopyFrom(call.message.inputs[0])
    if call.message.raw_input_contents:
        call.message.raw_input_contents.append(call.message.raw_input_contents[0])


@fault
def grpc_output_unknown(call: GrpcCall, chance: random.Random) -> None:
    call.message.outputs.add(name=chance.choice(["Q", ""]))


@fault
def grpc_output_twice(call: GrpcCall, chance: random.Random) -> None:
    del call.message.outputs[:]
    for _ in range(2):
        call.message.outputs.add(name=output(call.message.inputs[0].name if call.message.inputs else "X"))


def _rowsum(call: GrpcCall, shape: list[int], *raw: bytes) -> Any:
    """The call becomes one of `rowsum`; its input."""
    call.message.CopyFrom(pb.ModelInferRequest(model_name="rowsum", raw_input_contents=raw))
    return call.message.inputs.add(name="X", datatype="FP32", shape=shape)


@fault
def grpc_raw_of_another_size(call: GrpcCall, chance: random.Random) -> None:
    _rowsum(call, [1, 16], bytes(chance.choice([0, 63, 65, 128])))


@fault
def grpc_raw_one_too_many(call: GrpcCall, chance: random.Random) -> None:
    _rowsum(call, [1, 16], bytes(64), bytes(chance.choice([0, 64])))


@fault
def grpc_raw_and_typed(call: GrpcCall, chance: random.Random) -> None:
    _rowsum(call, [1, 16], bytes(64)).contents.fp32_contents.extend([1.0] * 16)


@fault
def grpc_typed_fewer_or_more(call: GrpcCall, chance: random.Random) -> None:
    _rowsum(call, [1, 16]).contents.fp32_contents.extend([1.0] * chance.choice([0, 1, 15, 17]))


@fault
def grpc_typed_of_another_type(call: GrpcCall, chance: random.Random) -> None:
    contents = _rowsum(call, [1, 16]).contents
    getattr(contents, chance.choice(["int_contents", "fp64_contents", "uint64_contents"])).extend([1] * 16)


@fault
def grpc_bytes_lengths_that_lie(call: GrpcCall, chance: random.Random) -> None:
    raw = chance.choice([b"\xff\xff\xff\xffa", b"\2\0\0\0a", b"\1\0", b"\0\0\0\0" * 3, b"\1\0\0\0a" * 2, b""])
    call.message.CopyFrom(pb.ModelInferRequest(model_name="echo", raw_input_contents=[raw]))
    call.message.inputs.add(name="IN_BYTES", datatype="BYTES", shape=[1, 1])


@fault
def grpc_very_many(call: GrpcCall, chance: random.Random) -> None:
    for i in range(2000):
        if i % 2:
            call.message.parameters[f"p{i}"].int64_param = i
        else:
            call.message.outputs.add(name=f"o{i}")


@fault
def grpc_classification_of_text(call: GrpcCall, chance: random.Random) -> None:
    message = pb.ModelInferRequest(model_name="echo", raw_input_contents=[b"\1\0\0\0a"])
    message.inputs.add(name="IN_BYTES", datatype="BYTES", shape=[1, 1])
    message.outputs.add(name="OUT_BYTES").parameters["classification"].int64_param = 1
    call.message.CopyFrom(message)

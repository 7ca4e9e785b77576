"""KServe v2 over gRPC as bytes: every datatype raw and typed, and rewriting by append."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import kserve_grpc as codec
from backends import kserve_json
from backends.errors import BadReply, BadRequest
from backends.proto import kserve_pb2 as pb
from backends.proto import wire
from backends.request import Answer, Tensors, Wanted
from backends.tensor import ITEM_BYTES, Tensor, join_elements
from tests.unit.backends.kserve_messages import infer, message, parameters, refused, tensor_message, tensors

TYPED = {
    "INT8": ("int_contents", "b"), "INT16": ("int_contents", "h"), "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"), "UINT8": ("uint_contents", "B"), "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"), "UINT64": ("uint64_contents", "Q"), "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"), "BOOL": ("bool_contents", "?"),
}  # fmt: skip


def plain(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data), tensor.parameters


# Round trips


@given(st.lists(tensors(), min_size=1, max_size=3), parameters, st.text(max_size=5), st.lists(st.text(max_size=3)))
def test_request_round_trip(inputs: list[Tensor], given_parameters: Any, request_id: str, outputs: list[str]) -> None:
    inputs = [Tensor(f"x{i}", t.datatype, t.shape, t.data, t.parameters) for i, t in enumerate(inputs)]
    asked = infer(*inputs, parameters=given_parameters, id=request_id, outputs=tuple(Wanted(o) for o in outputs))
    data = codec.write_request("m", "3", asked)
    model, version, read = codec.read_request(data)
    assert (model, version, read.id) == ("m", "3", request_id)
    doubles = {k: float(v) for k, v in given_parameters.items() if not isinstance(v, str) and v >= 1 << 63}
    assert read.parameters == given_parameters | doubles
    assert [o.name for o in read.outputs] == outputs
    assert [plain(t) for t in read.inputs.decoded] == [plain(t) for t in inputs]
    parsed = pb.ModelInferRequest.FromString(data)
    assert list(parsed.raw_input_contents) == [bytes(t.data) for t in inputs]


@given(st.lists(tensors(), max_size=3), parameters)
def test_reply_round_trip(outputs: list[Tensor], given_parameters: Any) -> None:
    outputs = [Tensor(f"y{i}", t.datatype, t.shape, t.data, t.parameters) for i, t in enumerate(outputs)]
    answer = Answer(Tensors.of(tuple(outputs)), "backend", "1", given_parameters)
    read = codec.read_reply(codec.write_reply(answer, "public", "id"))
    assert (read.model, read.version, read.id, read.parameters) == ("public", "1", "id", given_parameters)
    assert [plain(t) for t in read.outputs.decoded] == [plain(t) for t in outputs]
    assert codec.read_reply(codec.write_reply(answer, "public", "id", "7")).version == "7"


@given(st.data(), st.sampled_from(sorted(TYPED)))
def test_typed_contents_are_the_same_bytes_as_raw(data: st.DataObject, datatype: str) -> None:
    field, code = TYPED[datatype]
    size = struct.calcsize(f"<{code}")
    raw = data.draw(st.binary(max_size=8 * size).map(lambda b: b[: len(b) // size * size]))
    if datatype == "BOOL":
        raw = bytes(byte & 1 for byte in raw)
    values = list(struct.unpack(f"<{len(raw) // size}{code}", raw))
    if datatype in ("FP32", "FP64"):
        raw = struct.pack(f"<{len(values)}{code}", *values)  # Python's floats quiet a signalling NaN
    request = tensor_message(datatype, [len(values), 1], **{field: values})
    (tensor,) = codec.read_request(request.SerializeToString())[2].inputs.decoded
    assert plain(tensor) == ("x", datatype, (len(values), 1), raw, None)


@given(st.lists(st.binary(max_size=5), max_size=5))
def test_typed_bytes(elements: list[bytes]) -> None:
    request = tensor_message("BYTES", [len(elements)], bytes_contents=elements)
    (tensor,) = codec.read_request(request.SerializeToString())[2].inputs.decoded
    assert tensor.data == join_elements(elements)


@pytest.mark.parametrize("elements", [[b""], [b"\0"], [b"\xff\xfe", b"", b"a\0b"], ["ü".encode()]])
def test_bytes_of_any_content(elements: list[bytes]) -> None:
    sent = Tensor("x", "BYTES", (len(elements),), join_elements(elements))
    (tensor,) = codec.read_request(codec.write_request("m", "", infer(sent)))[2].inputs.decoded
    assert tensor.data == sent.data


@pytest.mark.parametrize("datatype", [*ITEM_BYTES, "BYTES"])
def test_zero_rows(datatype: str) -> None:
    sent = Tensor("x", datatype, (0, 4), b"")
    for data in (
        codec.write_request("m", "", infer(sent)),
        tensor_message(datatype, [0, 4]).SerializeToString(),
    ):
        (tensor,) = codec.read_request(data)[2].inputs.decoded
        assert plain(tensor) == plain(sent)


def test_64_bits_are_exact() -> None:
    for datatype, field, value in [
        ("INT64", "int64_contents", -(1 << 63)),
        ("INT64", "int64_contents", (1 << 53) + 1),
        ("UINT64", "uint64_contents", (1 << 64) - 1),
    ]:
        request = tensor_message(datatype, [1], **{field: [value]})
        (tensor,) = codec.read_request(request.SerializeToString())[2].inputs.decoded
        assert int.from_bytes(tensor.data, "little", signed=datatype == "INT64") == value


def test_typed_integers_wrap_as_triton_has_it() -> None:
    request = tensor_message("INT8", [3], int_contents=[300, -1, -129])
    (tensor,) = codec.read_request(request.SerializeToString())[2].inputs.decoded
    assert bytes(tensor.data) == bytes([44, 255, 127])


def test_raw_contents_are_views_of_the_message() -> None:
    data = message().SerializeToString()
    (tensor,) = codec.read_request(data)[2].inputs.decoded
    assert isinstance(tensor.data, memoryview)
    assert tensor.data.obj is data


def test_raw_contents_may_stand_anywhere() -> None:
    parts = message(inputs=[], raw_input_contents=[b"\1\0\0\0"]).SerializeToString()
    rest = message(raw_input_contents=[]).SerializeToString()
    (tensor,) = codec.read_request(parts + rest)[2].inputs.decoded
    assert bytes(tensor.data) == b"\1\0\0\0"


# Parameters


def test_parameters_of_all_kinds() -> None:
    kinds = {
        "no": False, "yes": True, "zero": 0, "least": -(1 << 63), "most": (1 << 63) - 1, "beyond": 1 << 63,
        "limit": (1 << 64) - 1, "float": 0.1, "whole": 2.0, "text": "ü\0", "empty": "",
    }  # fmt: skip
    x = Tensor("x", "INT32", (1,), bytes(4), dict(kinds))
    data = codec.write_request("m", "", infer(x, parameters=kinds, outputs=(Wanted("y", kinds),)))
    parsed = pb.ModelInferRequest.FromString(data)
    assert parsed.inputs[0].parameters["most"].WhichOneof("parameter_choice") == "int64_param"
    assert parsed.inputs[0].parameters["beyond"].WhichOneof("parameter_choice") == "uint64_param"
    read = codec.read_request(data)[2]
    reply = codec.read_reply(codec.write_reply(Answer(Tensors.of((x,)), parameters=kinds), "m", ""))
    for found in (
        read.inputs.decoded[0].parameters, read.outputs[0].parameters, reply.parameters,
        reply.outputs.decoded[0].parameters,
    ):  # fmt: skip
        assert found == kinds
        assert [type(found[name]) for name in kinds] == [type(value) for value in kinds.values()]
    # A call's own are what Triton takes: no uint64.
    expected = kinds | {"beyond": float(1 << 63), "limit": float((1 << 64) - 1)}
    assert read.parameters == expected
    assert [type(read.parameters[name]) for name in kinds] == [type(value) for value in expected.values()]


def test_unsigned_parameters_are_what_they_are_to_triton() -> None:
    x = Tensor("x", "INT32", (1,), bytes(4))
    largest = (1 << 64) - 1
    given = {"sequence_id": largest, "timeout": largest, "priority": largest}
    data = codec.write_request("m", "", infer(x, parameters=given))
    parsed = pb.ModelInferRequest.FromString(data).parameters
    assert parsed["sequence_id"].int64_param == -1
    assert parsed["timeout"].int64_param == (1 << 63) - 1
    assert parsed["priority"].uint64_param == largest
    assert codec.read_request(data)[2].parameters == given | {"timeout": (1 << 63) - 1}


def test_http_encoding_is_not_passed_on() -> None:
    body = (
        b'{"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [7], "parameters": {"keep": 1}}],'
        b'"outputs": [{"name": "y", "parameters": {"binary_data": true, "classification": 2}}],'
        b'"parameters": {"binary_data_output": true, "priority": 1}}'
    )
    parsed = pb.ModelInferRequest.FromString(codec.write_request("m", "", kserve_json.read_request(body, None)))
    assert set(parsed.parameters) == {"priority"}
    assert set(parsed.inputs[0].parameters) == {"keep"}
    assert set(parsed.outputs[0].parameters) == {"classification"}
    assert parsed.raw_input_contents[0] == b"\7\0\0\0"


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, None, [1], {"a": 1}, "\ud800"])
def test_parameters_without_a_grpc_form(value: Any) -> None:
    x = Tensor("x", "INT32", (1,), bytes(4))
    with pytest.raises(BadRequest, match="parameter 'p': expected a bool, a 64-bit integer"):
        codec.write_request("m", "", infer(x, parameters={"p": value}))
    with pytest.raises(BadReply, match="parameter 'p'"):
        codec.write_reply(Answer(Tensors.of((x,)), parameters={"p": value}), "m", "")


def test_parameter_without_a_value() -> None:
    assert "parameter 'p'" in refused(message(parameters={"p": pb.InferParameter()}))


# Forwarding and rewriting


def test_untouched_bytes_are_forwarded_as_they_are() -> None:
    data = message(id="7", model_version="2").SerializeToString() + b"\xfa\x3f\x03abc"  # and a field we do not know
    assert codec.write_request("m", "2", codec.read_request(data)[2]) is data
    reply = pb.ModelInferResponse(model_name="m", id="7").SerializeToString()
    assert codec.write_reply(codec.read_reply(reply), "m", "7") is reply


@given(st.text(min_size=1, max_size=300), st.text(max_size=3), st.text(max_size=3))
def test_rewriting_by_append_parses_as_if_rewritten(model: str, version: str, was: str) -> None:
    sent = message(model_version=was, id="7", parameters={"a": pb.InferParameter(int64_param=1)})
    data = sent.SerializeToString()
    written = codec.write_request(model, version, codec.read_request(data)[2])
    assert written.startswith(data)
    sent.model_name, sent.model_version = model, version
    assert pb.ModelInferRequest.FromString(written) == sent
    # A second hop may rewrite it once more.
    again = codec.write_request("m", "", codec.read_request(written)[2])
    sent.model_name, sent.model_version = "m", ""
    assert pb.ModelInferRequest.FromString(again) == sent


def test_reply_is_renamed_by_append() -> None:
    sent = pb.ModelInferResponse(model_name="backend", model_version="1", id="batch", raw_output_contents=[b"\1" * 300])
    sent.outputs.add(name="y", datatype="UINT8", shape=[300])
    data = sent.SerializeToString()
    written = codec.write_reply(codec.read_reply(data), "public", "")
    sent.model_name, sent.id = "public", ""
    assert pb.ModelInferResponse.FromString(written) == sent
    assert written.startswith(data)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 1 << 21, 1 << 35])
def test_opening_is_what_protobuf_writes(size: int) -> None:
    key, at = wire._varint(wire.opening(7, size), 0)
    assert (key, wire._varint(wire.opening(7, size), at)[0]) == (58, size)


def test_typed_reply() -> None:
    reply = pb.ModelInferResponse(model_name="m")
    reply.outputs.add(name="y", datatype="FP32", shape=[2]).contents.fp32_contents.extend([0.5, -1.0])
    (tensor,) = codec.read_reply(reply.SerializeToString()).outputs.decoded
    assert bytes(tensor.data) == struct.pack("<2f", 0.5, -1.0)

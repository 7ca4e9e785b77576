"""KServe v2 over gRPC as bytes: every datatype raw and typed, rewriting by append, and what is refused."""

from __future__ import annotations

import contextlib
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import kserve_grpc as codec
from backends import kserve_json
from backends.errors import BadReply, BadRequest, Failure, Malformed, NotFound
from backends.parameters import RESERVED
from backends.proto import kserve_pb2 as pb
from backends.proto import wire
from backends.request import Answer, Infer, Tensors, Wanted
from backends.tensor import ITEM_BYTES, Tensor, join_elements

TYPED = {
    "INT8": ("int_contents", "b"), "INT16": ("int_contents", "h"), "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"), "UINT8": ("uint_contents", "B"), "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"), "UINT64": ("uint64_contents", "Q"), "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"), "BOOL": ("bool_contents", "?"),
}  # fmt: skip

parameters = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name not in RESERVED),
    st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    max_size=4,
)


@st.composite
def tensors(draw: st.DrawFn, name: str = "x") -> Tensor:
    datatype = draw(st.sampled_from([*ITEM_BYTES, "BYTES"]))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = math.prod(shape)
    if datatype == "BYTES":
        data = join_elements(draw(st.lists(st.binary(max_size=6), min_size=count, max_size=count)))
    else:
        data = draw(st.binary(min_size=count * ITEM_BYTES[datatype], max_size=count * ITEM_BYTES[datatype]))
    return Tensor(name, datatype, shape, data, draw(parameters) or None)


def infer(*inputs: Tensor, **rest: Any) -> Infer:
    return Infer(inputs=Tensors.of(inputs), **rest)


def plain(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data), tensor.parameters


def message(**fields: Any) -> pb.ModelInferRequest:
    one = pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[1])
    return pb.ModelInferRequest(**{"model_name": "m", "inputs": [one], "raw_input_contents": [bytes(4)], **fields})


def tensor_message(datatype: str, shape: list[int], **contents: Any) -> pb.ModelInferRequest:
    one = pb.ModelInferRequest.InferInputTensor(name="x", datatype=datatype, shape=shape)
    if contents:
        one.contents.CopyFrom(pb.InferTensorContents(**contents))
    return pb.ModelInferRequest(model_name="m", inputs=[one])


def refused(request: pb.ModelInferRequest, fault: type[Failure] = BadRequest) -> str:
    with pytest.raises(fault) as raised:
        codec.read_request(request.SerializeToString())[2].inputs.decoded  # noqa: B018
    assert "\n" not in raised.value.message
    return raised.value.message


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


# What is refused


@pytest.mark.parametrize(
    ("request_message", "words"),
    [
        (message(inputs=[], raw_input_contents=[]), "expected at least one input"),
        (message(raw_input_contents=[bytes(3)]), "INT32 of shape [1] is 4 bytes, got 3"),
        (message(raw_input_contents=[bytes(4), b""]), "expected one for each of 1 tensors, or none at all, got 2"),
        (message(raw_input_contents=[]), "asks for 1 elements in int_contents, got 0"),
        (message(inputs=[message().inputs[0]] * 2, raw_input_contents=[bytes(4)] * 2), "the same name"),
        (message(inputs=[message().inputs[0], {"name": "z", "datatype": "INT8"}]), "or none at all, got 1"),
        (tensor_message("INT32", [2], int_contents=[1]), "asks for 2 elements in int_contents, got 1"),
        (tensor_message("INT32", [1], int64_contents=[1]), "belongs into int_contents, got int64_contents"),
        (tensor_message("INT32", [1], int_contents=[1], fp32_contents=[1]), "got int_contents, fp32_contents"),
        (tensor_message("FP16", [1], fp32_contents=[1]), "FP16 belongs into raw_input_contents"),
        (tensor_message("BF16", [1]), "asks for 1 elements in raw_input_contents"),
        (tensor_message("INT4", [1]), "unknown datatype 'INT4'"),
        (tensor_message("INT32", [-1]), "negative size in shape [-1]"),
        (tensor_message("INT32", [0, -1]), "negative size"),
        (tensor_message("INT32", [1 << 31, 1 << 31]), "absurdly large"),
        (tensor_message("INT32", [0, 1 << 62]), "absurdly large"),
        (tensor_message("INT32", [1] * 17), "at most 16 dimensions, got 17"),
        (pb.ModelInferRequest(model_name="m", inputs=[{"datatype": "INT32", "shape": [0]}]), "expected a name"),
    ],
)
def test_contradictions(request_message: pb.ModelInferRequest, words: str) -> None:
    assert words in refused(request_message)


def test_a_call_that_names_no_model() -> None:
    assert "expected a model_name" in refused(message(model_name=""), NotFound)


def test_mixed_raw_and_typed() -> None:
    mixed = tensor_message("INT32", [1], int_contents=[1])
    mixed.raw_input_contents.append(bytes(4))
    assert "got both" in refused(mixed)


REGION = {"shared_memory_region": pb.InferParameter(string_param="r")}


def placed(name: str = "x", **fields: Any) -> pb.ModelInferRequest.InferInputTensor:
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype="INT32", shape=[1], parameters=REGION, **fields)


def test_tensors_in_shared_memory_are_noticed() -> None:
    sent = pb.ModelInferRequest.InferInputTensor(name="z", datatype="INT32", shape=[1])
    for request, names in (
        (message(inputs=[placed()], raw_input_contents=[]), []),
        (message(inputs=[placed(), sent]), ["z"]),  # raw contents are those of the others
        (message(outputs=[{"name": "y", "parameters": REGION}]), ["x"]),
    ):
        infer = codec.read_request(request.SerializeToString())[2]
        assert infer.regions
        assert [tensor.name for tensor in infer.inputs.decoded] == names
    assert not codec.read_request(message().SerializeToString())[2].regions


def test_a_tensor_in_shared_memory_that_is_sent_too() -> None:
    typed = placed(contents=pb.InferTensorContents(int_contents=[1]))
    assert "got both" in refused(message(inputs=[typed], raw_input_contents=[]))
    assert "expected one for each of 0 tensors" in refused(message(inputs=[placed()]))


@pytest.mark.parametrize("raw", [b"abcde", b"\xff\xff\xff\xff", b"\1\0\0\0", b"\0\0\0\0" * 2])
def test_lying_length_prefixes_are_found_by_the_decode(raw: bytes) -> None:
    one = pb.ModelInferRequest.InferInputTensor(name="x", datatype="BYTES", shape=[1])
    data = message(inputs=[one], raw_input_contents=[raw]).SerializeToString()
    infer_read = codec.read_request(data)[2]
    with pytest.raises(BadRequest, match="BYTES"):
        infer_read.inputs.decoded  # noqa: B018


@given(st.binary(max_size=80))
def test_noise_is_refused_or_read(data: bytes) -> None:
    with pytest.raises((BadRequest, NotFound)) as raised:
        codec.read_request(data)[2].inputs.decoded  # noqa: B018
    assert "\n" not in raised.value.message
    with contextlib.suppress(BadReply):
        codec.read_reply(data).outputs.decoded  # noqa: B018


@given(st.data())
def test_damaged_messages(data: st.DataObject) -> None:
    whole = bytearray(codec.write_request("model", "1", infer(data.draw(tensors()), parameters={"a": 1})))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        codec.read_request(damaged)[2].inputs.decoded  # noqa: B018
    except (BadRequest, NotFound):
        return
    # What we take, protobuf takes too.
    pb.ModelInferRequest.FromString(damaged)


@pytest.mark.parametrize("data", [b"\x0b", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0a\x05m", b"\x80"])
def test_what_is_no_protobuf(data: bytes) -> None:
    with pytest.raises(Malformed, match="expected a ModelInferRequest as protobuf"):
        codec.read_request(data)
    with pytest.raises(BadReply, match="expected a ModelInferResponse as protobuf"):
        codec.read_reply(data)


def test_hosts_of_fields_are_refused() -> None:
    with pytest.raises(BadRequest, match="more than 16384 fields"):
        codec.read_request(b"\x3a\x00" * 20_000)
    many = {f"p{i}": pb.InferParameter(bool_param=True) for i in range(1025)}
    assert "at most 1024 parameters, got 1025" in refused(message(inputs=[{"name": "x", "parameters": many}]))


def test_replies_that_contradict_themselves() -> None:
    reply = pb.ModelInferResponse(model_name="m")
    reply.outputs.add(name="y", datatype="INT32", shape=[-1])
    for words, change in [
        ("negative size", lambda: None),
        ("asks for 1 elements", lambda: reply.outputs[0].shape.__setitem__(0, 1)),
        ("is 4 bytes, got 3", lambda: reply.raw_output_contents.append(b"abc")),
        ("got 2", lambda: reply.raw_output_contents.append(b"abcd")),
    ]:
        change()
        with pytest.raises(BadReply, match=words):
            codec.read_reply(reply.SerializeToString())


def test_typed_reply() -> None:
    reply = pb.ModelInferResponse(model_name="m")
    reply.outputs.add(name="y", datatype="FP32", shape=[2]).contents.fp32_contents.extend([0.5, -1.0])
    (tensor,) = codec.read_reply(reply.SerializeToString()).outputs.decoded
    assert bytes(tensor.data) == struct.pack("<2f", 0.5, -1.0)

"""KServe v2 over gRPC: messages that are refused, and why."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import kserve_grpc as codec
from backends.errors import BadReply, BadRequest, Malformed, NotFound
from backends.proto import kserve_pb2 as pb
from tests.unit.backends.kserve_messages import infer, message, refused, tensor_message, tensors


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

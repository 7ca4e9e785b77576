"""Whatever comes is read, or refused in one line, in time and memory that go with its size."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import kserve_grpc, kserve_json
from backends.errors import BadRequest, Failure, NotFound, Unsupported
from backends.json_text import too_deep, too_wide
from backends.proto import kserve_pb2 as pb
from backends.proto import wire
from tests.support import bad_grpc, bad_http

MIB = 1 << 20


def read_http(body: bytes, header_length: int | None = None) -> str:
    return _line(lambda: kserve_json.read_request(body, header_length).inputs.decoded)


def read_grpc(data: bytes) -> str:
    return _line(lambda: kserve_grpc.read_request(data)[2].inputs.decoded)


def _line(read: Callable[[], Any]) -> str:
    """Why something is refused; empty where it is not."""
    try:
        read()
    except (BadRequest, NotFound, Unsupported) as failure:
        return _checked(failure)
    return ""


def _checked(failure: Failure) -> str:
    assert failure.message.isprintable()
    assert 0 < len(failure.message) < 400
    return failure.message


@given(st.binary(max_size=300))
def test_any_bytes_as_a_message(data: bytes) -> None:
    read_grpc(data)


@given(st.integers(0, 2**32), st.integers(0, 2**16), st.binary(max_size=4))
def test_any_spoilt_message_that_is_cut_and_patched(seed: int, at: int, piece: bytes) -> None:
    data = bad_grpc.made(seed).raw()
    at %= len(data) + 1
    read_grpc(data)
    read_grpc(data[:at])
    read_grpc(data[:at] + piece + data[at + len(piece) :])


@given(st.integers(0, 2**32), st.integers(0, 2**16), st.binary(max_size=4))
def test_any_spoilt_body_that_is_cut_and_patched(seed: int, at: int, piece: bytes) -> None:
    headers, body = bad_http.made(seed).parts()
    body = body[:20_000]
    given = headers.get("Inference-Header-Content-Length", "")
    length = int(given) if given.isdigit() and given != "0" else None
    at %= len(body) + 1
    read_http(body, length)
    read_http(body[:at], length)
    read_http(body[:at] + piece + body[at + len(piece) :], length)


def tensor(**fields: Any) -> pb.ModelInferRequest.InferInputTensor:
    return pb.ModelInferRequest.InferInputTensor(**{"name": "x", "datatype": "FP32", "shape": [1], **fields})


def inputs(*tensors: pb.ModelInferRequest.InferInputTensor, **fields: Any) -> bytes:
    return pb.ModelInferRequest(model_name="m", inputs=tensors, **fields).SerializeToString()


def head(text: bytes, datatype: bytes = b"FP32", shape: bytes = b"1") -> bytes:
    return b'{"inputs":[{"name":"x","datatype":"%b","shape":[%b],"data":%b}]}' % (datatype, shape, text)


BODIES = {
    "brackets": b"[" * MIB,
    "brackets in data": head(b"[" * MIB),
    "flat brackets": head(b"[" + b"[]," * (MIB // 3) + b"[]]"),
    "objects": b'{"inputs":[' + b"{}," * (MIB // 3) + b"{}]}",
    "colons": b":" * MIB,
    "quotes": b'"' * MIB,
    "quotes and brackets": b'[{"' * (MIB // 3),
    "quotes and colons": b'"[":' * (MIB // 4),
    "backslashes": b'{"id":"' + b"\\" * MIB + b'"}',
    "keys": b"{" + b",".join(b'"%d":0' % i for i in range(MIB // 10)) + b"}",
    "one key": b"{" + b'"a":0,' * (MIB // 6) + b'"a":0}',
    "parameters": head(b"[1]")[:-1] + b',"parameters":{' + b",".join(b'"%d":0' % i for i in range(MIB // 10)) + b"}}",
    "outputs": head(b"[1]")[:-1] + b',"outputs":[' + b'{"name":"a"},' * (MIB // 13) + b'{"name":"a"}]}',
    "shape": head(b"[1]", shape=b"1," * (MIB // 2) + b"1"),
    "shape's product": head(b"[]", shape=b"9223372036854775807," * 15 + b"9223372036854775807"),
    "a giant number": head(b"[" + b"9" * MIB + b"]"),
    "a giant integer": head(b"[" + b"9" * MIB + b"]", b"INT64"),
    "NaN": head(b"[" + b"NaN," * (MIB // 4) + b"NaN]"),
    "a name": b'{"inputs":[{"name":"%b","datatype":"FP32","shape":[1],"data":[1]}]}' % (b"x" * MIB),
    "surrogates": head(b'["' + b"\\ud800" * (MIB // 6) + b'"]', b"BYTES"),
    "no UTF-8": head(b'["' + b"\xff" * MIB + b'"]', b"BYTES"),
}
MESSAGES = {
    "fields": b"\x78\x01" * (MIB // 2),
    "raw contents": b"\x3a\x00" * (MIB // 2),
    "inputs": b"\x2a\x00" * (MIB // 2),
    "one input's fields": wire.field(5, b"\x78\x01" * (MIB // 2)),
    "one input's groups": wire.field(5, b"\x0b" * MIB),
    "parameters": wire.field(5, b"\x22\x00" * (MIB // 2)),
    "shape": inputs(tensor(shape=[1] * MIB)),
    "shape's product": inputs(tensor(shape=[2**63 - 1] * 16)),
    "a length that lies": b"\x2a\xff\xff\xff\xff\x0f" + bytes(MIB),
    "BYTES that are empty": inputs(tensor(datatype="BYTES", shape=[1]), raw_input_contents=[bytes(MIB)]),
    "a name": inputs(tensor(name="x" * MIB)),
    "a model's name of no text": wire.field(1, b"\xff" * MIB),
}


def within_bounds(read: Callable[[bytes], object], data: bytes) -> None:
    """At most some seconds and sixty bytes for each byte: what one object of Python's costs."""
    began = time.process_time()
    read(data)
    assert time.process_time() - began < 5
    tracemalloc.start()
    try:
        read(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 60 * len(data) + MIB, f"{peak / len(data):.0f} bytes for each byte"


@pytest.mark.parametrize("name", BODIES)
def test_a_mebibyte_of_hostile_json(name: str) -> None:
    within_bounds(read_http, BODIES[name])
    within_bounds(too_deep, BODIES[name])
    within_bounds(too_wide, BODIES[name])


@pytest.mark.parametrize("name", MESSAGES)
def test_a_mebibyte_of_hostile_protobuf(name: str) -> None:
    within_bounds(read_grpc, MESSAGES[name])

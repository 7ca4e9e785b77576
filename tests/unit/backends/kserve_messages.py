"""What the codec of KServe v2 over gRPC is tested with: tensors at random, and messages to be read or refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import strategies as st

from backends import kserve_grpc as codec
from backends.errors import BadRequest, Failure
from backends.proto import kserve_pb2 as pb
from backends.request import Infer, Tensors
from backends.tensor import ITEM_BYTES, Tensor, join_elements
from tests.support.strategies import RESERVED

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

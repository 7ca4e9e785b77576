"""Hypothesis strategies for tensors and inference calls, and the bodies that carry them."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from backends import kserve_grpc, kserve_json
from backends.parameters import OF_OUTPUT, OF_REQUEST
from backends.request import Answer, Infer, Tensors, Wanted
from backends.tensor import DATATYPES, ITEM_BYTES, Tensor, join_elements, split_elements

# Parameters that are not the caller's to choose: they mean something to a server, or to us.
RESERVED = frozenset(OF_REQUEST) | frozenset(OF_OUTPUT) | {"binary_data_size"}
JSON_DATATYPES = sorted(DATATYPES - {"FP16", "BF16"})
DTYPES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
datatypes = st.sampled_from(sorted(DATATYPES))
sizes = st.integers(0, 3)


def data(datatype: str, elements: int, *, text: bool = False) -> st.SearchStrategy[bytes]:
    """Bytes of that many elements; `text` keeps to what JSON can carry: UTF-8, and no NaN but the plain one."""
    if datatype == "BYTES":
        element = st.text(st.characters(codec="utf-8"), max_size=8).map(str.encode) if text else st.binary(max_size=8)
        return st.lists(element, min_size=elements, max_size=elements).map(join_elements)
    if datatype == "BOOL":
        return st.lists(st.booleans(), min_size=elements, max_size=elements).map(bytes)
    if text and datatype in ("FP32", "FP64"):
        code, width = ("f", 32) if datatype == "FP32" else ("d", 64)
        floats = st.lists(st.floats(width=width), min_size=elements, max_size=elements)  # type: ignore[arg-type]
        return floats.map(lambda values: struct.pack(f"<{elements}{code}", *(v if v == v else np.nan for v in values)))
    size = elements * ITEM_BYTES[datatype]
    return st.binary(min_size=size, max_size=size)


@st.composite
def tensors(
    draw: st.DrawFn,
    name: str | None = None,
    datatype: str | None = None,
    shape: Sequence[int] | None = None,
    rows: int | None = None,
    text: bool = False,
) -> Tensor:
    """A sound tensor; `rows` fixes axis 0 and leaves the rest to chance (a size of 0 included)."""
    kinds = JSON_DATATYPES if text else sorted(DATATYPES)
    datatype = datatype if datatype is not None else draw(st.sampled_from(kinds))
    if shape is None:
        shape = draw(st.lists(sizes, max_size=3))
        if rows is not None:
            shape = [rows, *shape[:2]]
    body = draw(data(datatype, prod(shape), text=text))
    return Tensor(name if name is not None else draw(names), datatype, tuple(shape), body)


parameter_values = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(codec="utf-8"), max_size=4)
parameters = st.dictionaries(names.filter(lambda name: name not in RESERVED), parameter_values, max_size=2)


@st.composite
def infers(draw: st.DrawFn, rows: int | None = None, text: bool = False) -> Infer:
    """A call of one to three inputs, which agree on `rows` where it is given."""
    inputs = tuple(
        draw(tensors(name=name, rows=rows, text=text))
        for name in draw(st.lists(names, min_size=1, max_size=3, unique=True))
    )
    outputs = tuple(Wanted(name) for name in draw(st.lists(names, max_size=2, unique=True)))
    return Infer(Tensors.of(inputs), outputs, draw(parameters), draw(names | st.just("")))


def plain(tensor: Tensor) -> tuple[str, str, tuple[int, ...], bytes]:
    """What two equal tensors have in common."""
    return tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)


def plains(holder: Infer | Answer) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    held = holder.inputs if isinstance(holder, Infer) else holder.outputs
    return [plain(tensor) for tensor in held.decoded]


def values(tensor: Tensor) -> list[Any]:
    """The elements as Python values, by way of numpy (BYTES as text)."""
    if tensor.datatype == "BYTES":
        return [element.decode() for element in split_elements(tensor.data)]
    return list(np.frombuffer(bytes(tensor.data), DTYPES[tensor.datatype]).tolist())


def nested(flat: list[Any], shape: Sequence[int]) -> Any:
    """`flat` in lists of lists of that shape."""
    if len(shape) < 2:
        return flat
    size = prod(shape[1:])
    return [nested(flat[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def json_body(infer: Infer, *, nest: bool = False, **fields: Any) -> bytes:
    """The call as a JSON body, by the standard library."""
    inputs = []
    for tensor in infer.inputs.decoded:
        flat = values(tensor)
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if tensor.parameters:
            entry["parameters"] = tensor.parameters
        inputs.append({**entry, "data": nested(flat, tensor.shape) if nest else flat})
    document: dict[str, Any] = {"inputs": inputs, **fields}
    if infer.id:
        document["id"] = infer.id
    if infer.parameters:
        document["parameters"] = dict(infer.parameters)
    if infer.outputs:
        document["outputs"] = [{"name": o.name, "parameters": dict(o.parameters)} for o in infer.outputs]
    return json.dumps(document).encode()


def by_json(infer: Infer, *, nest: bool = False) -> Infer:
    """The call as it arrives from an HTTP client that sends JSON."""
    return kserve_json.read_request(json_body(infer, nest=nest), None)


def by_binary(infer: Infer) -> Infer:
    """The call as it arrives from an HTTP client that sends binary tensors."""
    length, parts = kserve_json.write_request(infer)
    return kserve_json.read_request(b"".join(parts), length)


def by_grpc(infer: Infer) -> Infer:
    """The call as it arrives from a gRPC client."""
    return kserve_grpc.read_request(kserve_grpc.write_request("m", "", infer))[2]


def fp32(name: str, rows: Sequence[Sequence[float]]) -> Tensor:
    block = np.array(rows, "<f4")
    return Tensor(name, "FP32", block.shape, block.tobytes())


def rows_of(tensor: Tensor) -> list[list[float]]:
    """An FP32 tensor `[rows, n]` as lists."""
    return np.frombuffer(bytes(tensor.data), "<f4").reshape(tensor.shape).tolist()  # type: ignore[no-any-return]


def call(*rows: Sequence[float], name: str = "x", **fields: Any) -> Infer:
    """A call with one FP32 input of these rows."""
    return Infer(Tensors.of((fp32(name, rows),)), **fields)


@st.composite
def spoiled(draw: st.DrawFn, good: bytes, pieces: st.SearchStrategy[bytes]) -> bytes:
    """`good` with a few pieces put in or cut out."""
    text = bytearray(good)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(text)))
        if draw(st.booleans()):
            text[at:at] = draw(pieces)
        else:
            del text[at : at + draw(st.integers(1, 6))]
    return bytes(text)

"""A tensor as its bytes: row-major, little-endian, never widened.

Merging rows joins bytes and splitting them slices views, so nothing here copies what it need not, and nothing needs
numpy. BYTES elements are a 4-byte little-endian length and that many bytes each, as KServe v2's binary form has them.
"""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec

from backends.errors import BadRequest, Failure, malformed

# Bytes per element; BYTES has no fixed size.
ITEM_BYTES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
DATATYPES = frozenset(ITEM_BYTES) | {"BYTES"}

# A shape beyond these is an attack on whoever multiplies it; no model that we know comes near.
MAX_RANK = 16
MAX_ELEMENTS = 1 << 40
# Of an input's or an output's name. Servers quote it, and gRPC drops an error that is longer than 16 KiB.
MAX_NAME = 1024
# Of inputs, and of outputs. Triton's time for a request goes by the square of their number.
MAX_TENSORS = 1 << 10

Bytes = bytes | bytearray | memoryview


class Tensor(msgspec.Struct, frozen=True):
    """One named input or output.

    `shape` has non-negative sizes; `data` holds exactly the bytes that `datatype` and `shape` ask for (`check`
    verifies it). `parameters` are the tensor's own KServe parameters, without the ones that describe encoding.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Bytes
    parameters: dict[str, Any] | None = None

    @property
    def rows(self) -> int:
        """Size of axis 0; a scalar has no rows and gives 0."""
        return self.shape[0] if self.shape else 0

    @property
    def elements(self) -> int:
        return prod(self.shape)


def shown(value: object) -> str:
    """`value` as Python writes it, for a message: one printable line of at most 64 characters, whatever it holds."""
    text = repr(value)
    return text if len(text) <= 64 else text[:61] + "..."


def check_name(what: str, name: str, fault: type[Failure] = BadRequest) -> None:
    """`fault` where the name of a tensor is absurdly long. `what` is `input` or `output`."""
    if len(name) > MAX_NAME:
        raise fault(f"{what} {shown(name)}: expected a name of at most {MAX_NAME} characters, got {len(name)}")


def check_shape(what: str, name: str, datatype: str, shape: tuple[int, ...], fault: type[Failure] = BadRequest) -> None:
    """`fault` where a tensor of this head cannot exist. `what` is `input` or `output`."""
    if not name:
        raise fault(f"{what}: expected a name, got an empty one")
    check_name(what, name, fault)
    if datatype not in DATATYPES:
        raise fault(f"{what} {shown(name)}: unknown datatype {shown(datatype)}")
    if len(shape) > MAX_RANK:
        raise fault(f"{what} {shown(name)}: expected at most {MAX_RANK} dimensions, got {len(shape)}")
    elements = 1
    for size in shape:
        if size < 0:
            raise malformed(fault)(f"{what} {shown(name)}: negative size in shape {shown(list(shape))}")
        elements *= size or 1
    if elements > MAX_ELEMENTS:
        raise fault(f"{what} {shown(name)}: shape {shown(list(shape))} is absurdly large")


def check(tensor: Tensor, fault: type[Failure] = BadRequest) -> Tensor:
    """`tensor` itself, or `fault` where datatype, shape and bytes do not agree."""
    if tensor.datatype not in DATATYPES:
        raise fault(f"{shown(tensor.name)}: unknown datatype {shown(tensor.datatype)}")
    if tensor.datatype == "BYTES":
        found = count_elements(tensor.data)
        if found != tensor.elements:
            raise fault(
                f"{shown(tensor.name)}: shape {shown(list(tensor.shape))} asks for {tensor.elements} BYTES elements, "
                + (f"got {found}" if found >= 0 else "their length prefixes do not add up")
            )
    elif len(tensor.data) != (want := tensor.elements * ITEM_BYTES[tensor.datatype]):
        what = f"{shown(tensor.name)}: {tensor.datatype} of shape {shown(list(tensor.shape))}"
        raise fault(f"{what} is {want} bytes, got {len(tensor.data)}")
    return tensor


def count_elements(data: Bytes) -> int:
    """How many BYTES elements `data` holds; -1 where a length prefix points past the end."""
    at, end, count = 0, len(data), 0
    while at < end:
        if at + 4 > end:
            return -1
        at += 4 + int.from_bytes(data[at : at + 4], "little")
        count += 1
    return count if at == end else -1


def split_elements(data: Bytes) -> list[bytes]:
    """The BYTES elements of `data` (checked before), as copies."""
    elements, at, end = [], 0, len(data)
    while at < end:
        start = at + 4
        at = start + int.from_bytes(data[at:start], "little")
        elements.append(bytes(data[start:at]))
    return elements


def join_elements(elements: list[bytes]) -> bytes:
    """BYTES elements with their length prefixes."""
    parts: list[bytes] = []
    for element in elements:
        parts.append(len(element).to_bytes(4, "little"))
        parts.append(element)
    return b"".join(parts)


def row_offsets(tensor: Tensor) -> list[int]:
    """Where each row of axis 0 begins in `data`, and its end: `rows + 1` offsets. `tensor` has been checked."""
    rows = tensor.rows
    if tensor.datatype != "BYTES":
        size = len(tensor.data) // rows if rows else 0
        return [size * i for i in range(rows + 1)]
    per_row = prod(tensor.shape[1:])
    offsets, at, data = [0], 0, tensor.data
    for _ in range(rows):
        for _ in range(per_row):
            at += 4 + int.from_bytes(data[at : at + 4], "little")
        offsets.append(at)
    return offsets

"""A tensor's data as JSON has it, and back to bytes.

Data may be flat or nested in any way, integers that are out of their datatype's range wrap as long as they fit 64 bits
with or without a sign as their datatype has it (as in Triton), NaN and Infinity pass, FP32 is printed as the double it
is, and what is written is flat. FP16 and BF16 have no JSON form, and are refused in Triton's words.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from typing import Any

import msgspec

from backends.errors import BadRequest, Failure, malformed
from backends.request import Head
from backends.tensor import ITEM_BYTES, Tensor, join_elements, shown, split_elements

# array typecodes of the machine's own sizes, which on every platform that we run on are these widths, little-endian.
_TYPECODES = {
    "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
    "FP32": "f", "FP64": "d",
}  # fmt: skip
_BINARY_ONLY = frozenset({"FP16", "BF16"})


def from_json(head: Head, part: Any, fault: type[Failure]) -> bytes:
    """The bytes of a tensor whose data is `part`: raw JSON, or nested lists.

    `fault` where its datatype has no JSON form, and where the values do not fit it (a request's are then Malformed).
    """
    if head.datatype in _BINARY_ONLY and 0 not in head.shape:
        raise fault(
            f"receiving {head.datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {shown(head.name)[1:-1]}"
        )
    item = _item_type(head.datatype)
    try:
        values = _typed(head, part, item) if isinstance(part, msgspec.Raw) else None
        return _pack(head.datatype, values if values is not None else _loosely(part, item))
    except (msgspec.MsgspecError, ValueError) as error:
        what = f"{shown(head.name)}: data does not fit {head.datatype} {shown(list(head.shape))}"
        raise malformed(fault)(f"{what}: {str(error)[:150]}") from None


def _typed(head: Head, raw: msgspec.Raw, item: type) -> list[Any] | None:
    """The values of data that is flat, or nested as its shape says; None where it is neither."""
    text = bytes(raw)
    depth = max(len(head.shape), 1) if text[1:64].lstrip()[:1] == b"[" else 1
    try:
        values: Iterable[Any] = _list_decoder(item, depth).decode(text)
    except msgspec.ValidationError:
        return None
    for _ in range(depth - 1):
        values = chain.from_iterable(values)
    return list(values)


def _loosely(part: Any, item: type) -> list[Any]:
    """The values of data nested in any way: they count, and only the shape says what they are."""
    leaves: list[Any] = []
    _collect(msgspec.json.decode(part) if isinstance(part, msgspec.Raw) else part, leaves)
    return msgspec.convert(leaves, list[item])  # type: ignore[valid-type]


def _collect(part: Any, leaves: list[Any]) -> None:
    if not isinstance(part, list):
        raise ValueError(f"expected an array, got {shown(part)}")
    if list not in set(map(type, part)):
        leaves += part
        return
    for value in part:
        if isinstance(value, list):
            _collect(value, leaves)
        else:
            leaves.append(value)


def _item_type(datatype: str) -> type:
    if datatype == "BYTES":
        return str
    if datatype == "BOOL":
        return bool
    return float if datatype in ("FP32", "FP64") else int


@lru_cache(maxsize=256)
def _list_decoder(item: type, depth: int) -> msgspec.json.Decoder[Any]:
    kind: Any = item
    for _ in range(depth):
        kind = list[kind]
    return msgspec.json.Decoder(kind)


def _pack(datatype: str, flat: list[Any]) -> bytes:
    if datatype == "BYTES":
        return join_elements([text.encode() for text in flat])
    if datatype == "BOOL":
        return bytes(flat)
    if datatype in _BINARY_ONLY:
        if flat:
            raise ValueError("expected no elements")
        return b""
    code = _TYPECODES[datatype]
    try:
        return array(code, flat).tobytes()
    except OverflowError:
        low, high = (0, 1 << 64) if datatype.startswith("U") else (-(1 << 63), 1 << 63)
        if any(not low <= value < high for value in flat):
            raise ValueError(f"expected integers from {low} to {high - 1}") from None
        bits = 8 * ITEM_BYTES[datatype]
        wrapped = [value & ((1 << bits) - 1) for value in flat]
        return array(code.upper(), wrapped).tobytes()


def to_json(tensor: Tensor) -> Any:
    """What `tensor` is under the key `data`, for msgspec to encode. Raises BadRequest where it has no JSON form."""
    if tensor.datatype == "BYTES":
        return _texts(split_elements(tensor.data))
    if tensor.datatype == "BOOL":
        return [byte != 0 for byte in bytes(tensor.data)]
    code = _TYPECODES.get(tensor.datatype)
    if code is None:
        raise BadRequest(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format for output"
        )
    values = array(code)
    values.frombytes(tensor.data)
    flat = values.tolist()
    if code in "fd" and not math.isfinite(sum(flat)):
        # msgspec would write null for what is not finite; Triton writes NaN and Infinity.
        return msgspec.Raw(json.dumps(flat, separators=(",", ":")).encode())
    return flat


def _texts(elements: list[bytes]) -> Any:
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        # Bytes that are not UTF-8 stand in the JSON as they are, which is what Triton does.
        texts = [element.decode(errors="surrogateescape") for element in elements]
        document = json.dumps(texts, ensure_ascii=False, separators=(",", ":"))
        return msgspec.Raw(document.encode(errors="surrogateescape"))

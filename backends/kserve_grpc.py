"""KServe v2 over gRPC: messages as bytes in and bytes out.

Theory of operation. Raw tensor contents are the bulk of a message and are the tensors' bytes already, so protobuf never
parses them: the message's top-level fields are walked, raw contents become views of the message, and what is left (the
head) is parsed. Names are rewritten by appending: of a field that occurs twice every parser takes the last, and merges
a message field that occurs twice, so that a few bytes at the end rename a message whatever its size and whatever
fields it has that we do not know.

Heads are checked always and tensors when `Tensors.decoded` is asked for, except that lengths which cost nothing to
compare are compared at once. Deliberately as Triton does: typed integers wider than their datatype wrap, raw contents
are all or nothing, FP16 and BF16 exist only raw.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from backends.errors import BadReply, BadRequest, Failure, NotFound, malformed
from backends.parameters import (
    ENCODING,
    MAX_PARAMETERS,
    OF_INPUT,
    OF_OUTPUT,
    OF_REQUEST,
    REGION,
    check_parameters,
    passed_on,
)
from backends.proto import kserve_pb2 as pb
from backends.proto import wire
from backends.request import Answer, Head, Infer, Parameters, Tensors, Wanted, Wire
from backends.tensor import MAX_RANK, MAX_TENSORS, Bytes, Tensor, check, check_name, check_shape, join_elements, shown

_OF_REQUEST = {name: what for name, what in OF_REQUEST.items() if name not in ENCODING}
_OF_OUTPUT = {name: what for name, what in OF_OUTPUT.items() if name not in ENCODING}

# Field numbers of both messages alike, then those of the raw contents.
_MODEL, _VERSION, _ID = 1, 2, 3
_RAW_INPUTS, _RAW_OUTPUTS = 7, 6

_Message = TypeVar("_Message", pb.ModelInferRequest, pb.ModelInferResponse)
_WireTensor = pb.ModelInferRequest.InferInputTensor | pb.ModelInferResponse.InferOutputTensor


def read_request(data: bytes) -> tuple[str, str, Infer]:
    """Model name, version and content of a serialised ModelInferRequest.

    Raises BadRequest where the head is malformed, now; where tensor data is, from `inputs.decoded`.
    """
    message, raw = _parse(data, _RAW_INPUTS, pb.ModelInferRequest, BadRequest)
    if not message.model_name:
        raise NotFound("ModelInferRequest: expected a model_name, got an empty one")
    if not message.inputs:
        raise BadRequest("ModelInferRequest: expected at least one input, got none")
    if max(len(message.inputs), len(message.outputs)) > MAX_TENSORS:
        raise BadRequest(f"ModelInferRequest: expected at most {MAX_TENSORS} inputs and as many outputs, got more")
    heads = _heads("input", message.inputs, BadRequest)
    if len({head.name for head in heads}) < len(heads):
        raise BadRequest("ModelInferRequest: two inputs have the same name")
    outputs = tuple(Wanted(o.name, _parameters(o.parameters, BadRequest)) for o in message.outputs)
    call_parameters = _parameters(message.parameters, BadRequest)
    sequence = call_parameters.get("sequence_id", 0)
    if isinstance(sequence, int) and sequence < 0:
        call_parameters["sequence_id"] = sequence % (1 << 64)  # Triton takes the bits of an int64 for those of a uint64
    check_parameters(call_parameters, _OF_REQUEST, BadRequest)
    regions = False
    for head in heads:
        check_parameters(head.parameters, OF_INPUT, BadRequest)
        regions = regions or REGION in head.parameters
    for output in outputs:
        check_parameters(output.parameters, _OF_OUTPUT, BadRequest)
        check_name("output", output.name)
        regions = regions or REGION in output.parameters
    inputs: Sequence[_WireTensor] = message.inputs
    sent = heads
    if regions:
        # What is in shared memory has no contents, not even raw ones.
        inputs = [i for i in inputs if REGION not in i.parameters or i.HasField("contents")]
        sent = tuple(head for head in heads if REGION not in head.parameters)
        if len(inputs) > len(sent):
            raise BadRequest("ModelInferRequest: expected an input's data or a shared memory region, got both")
    _compare("raw_input_contents", sent, inputs, raw, BadRequest)
    infer = Infer(
        inputs=Tensors(heads, Wire("grpc", data), lambda: _decode(sent, inputs, raw, BadRequest)),
        outputs=outputs,
        parameters=call_parameters,
        id=message.id,
        regions=regions,
    )
    return message.model_name, message.model_version, infer


def read_reply(data: bytes) -> Answer:
    """A backend's serialised ModelInferResponse. Raises BadReply, now or from `outputs.decoded`."""
    message, raw = _parse(data, _RAW_OUTPUTS, pb.ModelInferResponse, BadReply)
    heads = _heads("output", message.outputs, BadReply)
    _compare("raw_output_contents", heads, message.outputs, raw, BadReply)
    return Answer(
        outputs=Tensors(heads, Wire("grpc", data), lambda: _decode(heads, message.outputs, raw, BadReply)),
        model=message.model_name,
        version=message.model_version,
        parameters=_parameters(message.parameters, BadReply),
        id=message.id,
    )


def write_request(model: str, version: str, infer: Infer) -> bytes:
    """A ModelInferRequest for a backend that knows the model as `model`.

    An untouched gRPC body goes as the very bytes it came as, with the names appended where they differ; anything else
    is written with raw contents. Raises BadRequest where a tensor or a parameter has no gRPC form.
    """
    came = infer.inputs.wire
    if came is not None and came.protocol == "grpc":
        return _renamed(came.data, {_MODEL: model, _VERSION: version})
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=infer.id)
    _put(message.parameters, _signed(infer.parameters), BadRequest)
    for wanted in infer.outputs:
        _put(message.outputs.add(name=wanted.name).parameters, wanted.parameters, BadRequest)
    return _written(message, message.inputs, infer.inputs.decoded, _RAW_INPUTS, BadRequest)


def write_reply(answer: Answer, model: str, request_id: str, version: str | None = None) -> bytes:
    """A ModelInferResponse for a caller that knows the model as `model`; `version` None is the backend's own.

    Raises BadReply where a tensor or a parameter has no gRPC form.
    """
    came = answer.outputs.wire
    shown = answer.version if version is None else version
    if came is not None and came.protocol == "grpc":
        return _renamed(came.data, {_MODEL: model, _VERSION: shown, _ID: request_id})
    message = pb.ModelInferResponse(model_name=model, model_version=shown, id=request_id)
    _put(message.parameters, answer.parameters, BadReply)
    return _written(message, message.outputs, answer.outputs.decoded, _RAW_OUTPUTS, BadReply)


# Reading


def _parse(
    data: bytes, raw_field: int, kind: type[_Message], fault: type[Failure]
) -> tuple[_Message, list[memoryview]]:
    """The message without its raw contents, and these."""
    view, raw, pieces, at = memoryview(data), [], [], 0
    raw_key = raw_field << 3 | wire.LENGTH_DELIMITED
    try:
        for key, begin, start, end in wire.walk(data):
            if key == raw_key:
                raw.append(view[start:end])
                pieces.append(view[at:begin])
                at = end
        pieces.append(view[at:])
        return kind.FromString(b"".join(pieces)), raw
    except (ValueError, DecodeError) as error:
        text = " ".join(str(error).split())[:200]
        raise malformed(fault)(f"expected a {kind.DESCRIPTOR.name} as protobuf: {text}") from None


def _heads(what: str, tensors: Sequence[_WireTensor], fault: type[Failure]) -> tuple[Head, ...]:
    heads = []
    for tensor in tensors:
        head = Head(
            tensor.name, tensor.datatype, tuple(tensor.shape[: MAX_RANK + 1]), _parameters(tensor.parameters, fault)
        )
        try:
            check_shape(what, head.name, head.datatype, head.shape)
        except BadRequest as error:
            raise fault(error.message) from None
        heads.append(head)
    return tuple(heads)


def _parameters(entries: Mapping[str, pb.InferParameter], fault: type[Failure]) -> dict[str, Any]:
    if len(entries) > MAX_PARAMETERS:
        raise fault(f"expected at most {MAX_PARAMETERS} parameters, got {len(entries)}")
    parameters = {}
    for name, value in entries.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise fault(f"parameter {shown(name)}: expected a bool, an integer, a double or a string, got no value")
        parameters[name] = getattr(value, choice)
    return parameters


_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


def _compare(
    field: str, heads: tuple[Head, ...], tensors: Sequence[_WireTensor], raw: list[memoryview], fault: type[Failure]
) -> None:
    """`fault` where heads and contents contradict each other; BYTES' length prefixes are left to the decode."""
    if raw and len(raw) != len(heads):
        raise fault(f"{field}: expected one for each of {len(heads)} tensors, or none at all, got {len(raw)}")
    for i, (head, tensor) in enumerate(zip(heads, tensors, strict=True)):
        given = (
            [descriptor.name for descriptor, _ in tensor.contents.ListFields()] if tensor.HasField("contents") else []
        )
        if raw:
            if given:
                raise fault(f"{shown(head.name)}: expected either {field} or typed contents, got both")
            if head.datatype == "BYTES" and len(raw[i]) < 4 * math.prod(head.shape):
                raise fault(
                    f"{shown(head.name)}: shape {shown(list(head.shape))} asks for more BYTES elements than "
                    f"{len(raw[i])} bytes can hold"
                )
            if head.datatype != "BYTES":
                check(Tensor(head.name, head.datatype, head.shape, raw[i]), fault)
            continue
        expected = _CONTENTS.get(head.datatype, field)
        if given and given != [expected]:
            raise fault(f"{shown(head.name)}: {head.datatype} belongs into {expected}, got {', '.join(given)}")
        want, got = math.prod(head.shape), len(getattr(tensor.contents, expected)) if given else 0
        if want != got:
            raise fault(
                f"{shown(head.name)}: {head.datatype} of shape {list(head.shape)} asks for {want} elements "
                f"in {expected}, got {got}"
            )


def _decode(
    heads: tuple[Head, ...], tensors: Sequence[_WireTensor], raw: list[memoryview], fault: type[Failure]
) -> tuple[Tensor, ...]:
    decoded = []
    for i, head in enumerate(heads):
        data = raw[i] if raw else _pack(head.datatype, tensors[i].contents)
        parameters = passed_on(head.parameters) or None
        decoded.append(check(Tensor(head.name, head.datatype, head.shape, data, parameters), fault))
    return tuple(decoded)


# Typecodes and, where the field is wider than the datatype, the bits that are kept.
_INTEGERS = {
    "INT8": ("B", 0xFF), "INT16": ("H", 0xFFFF), "UINT8": ("B", 0xFF), "UINT16": ("H", 0xFFFF),
    "INT32": ("i", 0), "UINT32": ("I", 0), "INT64": ("q", 0), "UINT64": ("Q", 0),
}  # fmt: skip


def _pack(datatype: str, contents: pb.InferTensorContents) -> Bytes:
    field = _CONTENTS.get(datatype)
    if field is None:
        return b""  # FP16 or BF16 without elements
    if datatype == "BYTES":
        return join_elements(list(contents.bytes_contents))
    if datatype in _INTEGERS:
        code, mask = _INTEGERS[datatype]
        values = getattr(contents, field)
        return array(code, [value & mask for value in values] if mask else values).tobytes()
    # What protobuf packs of bool, float and double is the tensor's bytes already: nothing goes through Python's floats.
    packed = contents.SerializeToString()
    key = pb.InferTensorContents.DESCRIPTOR.fields_by_name[field].number << 3 | wire.LENGTH_DELIMITED
    return b"".join(packed[start:end] for found, _, start, end in wire.walk(packed) if found == key)


# Writing


_LARGEST = (1 << 63) - 1


def _signed(parameters: Parameters) -> Parameters:
    """A call's parameters without integers beyond int64, which Triton refuses over gRPC (but for `priority`).

    They become what they are to it over HTTP: a sequence's bits, for ever, or a double.
    """
    large = {k: v for k, v in parameters.items() if isinstance(v, int) and _LARGEST < v < 1 << 64 and k != "priority"}
    if not large:
        return parameters
    signed: dict[str, int | float] = {name: float(value) for name, value in large.items()}
    if "sequence_id" in large:
        signed["sequence_id"] = large["sequence_id"] - (1 << 64)
    if "timeout" in large:
        signed["timeout"] = _LARGEST
    return {**parameters, **signed}


def _put(entries: Mapping[str, pb.InferParameter], parameters: Parameters, fault: type[Failure]) -> None:
    """Puts KServe parameters into a message's map, without those that describe HTTP's encoding."""
    for name, value in passed_on(parameters).items():
        try:
            entry = entries[name]
            if isinstance(value, bool):
                entry.bool_param = value
            elif isinstance(value, int) and value >= 1 << 63:
                entry.uint64_param = value
            elif isinstance(value, int):
                entry.int64_param = value
            elif isinstance(value, float):
                entry.double_param = value
            else:
                entry.string_param = value
        except (TypeError, ValueError):  # protobuf's own: another type, 65 bits, or text that is not Unicode
            raise fault(
                f"parameter {shown(name)}: expected a bool, a 64-bit integer, a double or a string, got {value!a:.40}"
            ) from None


def _written(
    message: pb.ModelInferRequest | pb.ModelInferResponse, entries: Any, tensors: Iterable[Tensor], raw_field: int,
    fault: type[Failure],
) -> bytes:  # fmt: skip
    """`message` with `tensors` put into its `entries`, and their bytes behind it: copied once, into the result."""
    parts: list[Bytes] = [b""]
    for tensor in tensors:
        entry = entries.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        _put(entry.parameters, tensor.parameters or {}, fault)
        parts += (wire.opening(raw_field, len(tensor.data)), tensor.data)
    parts[0] = message.SerializeToString()
    return b"".join(parts)


def _renamed(data: bytes, names: dict[int, str]) -> bytes:
    """`data` with those text fields appended whose value differs from what it has; an empty text is written out."""
    has = dict.fromkeys(names, b"")
    for key, _, start, end in wire.walk(data):
        if key & 7 == wire.LENGTH_DELIMITED and key >> 3 in has:
            has[key >> 3] = data[start:end]
    tail = b"".join(wire.text(number, text) for number, text in names.items() if has[number] != text.encode())
    return data + tail if tail else data

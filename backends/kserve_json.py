"""KServe v2 over HTTP: JSON bodies, and JSON with binary tensors behind it.

A request's head (names, datatypes, shapes, parameters) is always read: it decides the route, and it keeps from the
backend what would harm it (absurd nesting, negative or overflowing shapes, lengths that lie) or mislead it (keys that
occur twice). Tensor data stays as raw JSON or raw bytes until `Tensors.decoded` is asked for. What is written is binary
towards backends, and whatever the caller asked for towards callers.

What is deliberately as Triton has it stands in `json_data`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from backends.errors import BadReply, BadRequest, Failure, malformed
from backends.json_data import from_json, to_json
from backends.json_text import MAX_NESTING, loads_unique, require_unique_keys, too_deep
from backends.parameters import OF_INPUT, OF_OUTPUT, OF_REQUEST, REGION, check_parameters, passed_on
from backends.request import Answer, Head, Infer, Tensors, Wanted, Wire
from backends.tensor import ITEM_BYTES, MAX_TENSORS, Bytes, Tensor, check, check_name, check_shape, shown


class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Request(msgspec.Struct):
    inputs: list[_Tensor]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[_Output] = []


class _Reply(msgspec.Struct):
    outputs: list[_Tensor]
    model_name: str = ""
    model_version: str = ""
    id: str = ""
    parameters: dict[str, Any] = {}


_request_decoder = msgspec.json.Decoder(_Request)
_reply_decoder = msgspec.json.Decoder(_Reply)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()

_Doc = TypeVar("_Doc", _Request, _Reply)


def read_request(data: bytes, header_length: int | None) -> Infer:
    """An inference request's body. `header_length` as the header gave it (None: all JSON).

    Raises BadRequest where the head is malformed, now; where tensor data is, from `inputs.decoded`.
    """
    text = _text(data, header_length, BadRequest)
    doc, given = _read(text, _request_decoder, _Request, BadRequest)
    if not doc.inputs:
        raise BadRequest("request body: expected at least one input in 'inputs', got none")
    if max(len(doc.inputs), len(doc.outputs)) > MAX_TENSORS:
        raise BadRequest(f"request body: expected at most {MAX_TENSORS} inputs and as many outputs, got more")
    heads = tuple([Head(i.name, i.datatype, tuple(i.shape), i.parameters) for i in doc.inputs])
    if len(heads) > 1 and len({head.name for head in heads}) < len(heads):
        raise BadRequest("request body: two inputs have the same name")
    for head in heads:
        check_shape("input", head.name, head.datatype, head.shape)
    parts = _locate(doc.inputs, given, data, header_length, "input", BadRequest)
    check_parameters(doc.parameters, OF_REQUEST)
    regions = False
    for tensor in doc.inputs:
        check_parameters(tensor.parameters, OF_INPUT)
        regions = regions or REGION in tensor.parameters
    for output in doc.outputs:
        check_parameters(output.parameters, OF_OUTPUT)
        check_name("output", output.name)
        regions = regions or REGION in output.parameters
    inputs = Tensors(heads, Wire("http", data, header_length), lambda: _decode(heads, doc.inputs, parts, BadRequest))
    if given is not None:
        inputs.decoded  # noqa: B018 - its data is in Python's lists already, and nothing has compared it with its shape
    return Infer(
        inputs=inputs,
        outputs=tuple([Wanted(o.name, o.parameters) for o in doc.outputs]) if doc.outputs else (),
        parameters=doc.parameters,
        id=doc.id,
        regions=regions,
    )


def read_reply(data: bytes, header_length: int | None) -> Answer:
    """A backend's answer to an inference request. Raises BadReply, now or from `outputs.decoded`."""
    doc, given = _read(_text(data, header_length, BadReply), _reply_decoder, _Reply, BadReply)
    heads = tuple([Head(o.name, o.datatype, tuple(o.shape)) for o in doc.outputs])
    for head in heads:
        check_shape("output", head.name, head.datatype, head.shape, BadReply)
    parts = _locate(doc.outputs, given, data, header_length, "output", BadReply)
    return Answer(
        outputs=Tensors(heads, Wire("http", data, header_length), lambda: _decode(heads, doc.outputs, parts, BadReply)),
        model=doc.model_name,
        version=doc.model_version,
        parameters=doc.parameters,
        id=doc.id,
    )


def write_request(infer: Infer) -> tuple[int | None, list[Bytes]]:
    """A request's body for a backend: its header length and its parts, to be sent one after the other.

    An untouched HTTP body goes as the very bytes it came as; anything else is written with binary tensors and asks for
    binary outputs.
    """
    wire = infer.inputs.wire
    if wire is not None and wire.protocol == "http":
        return wire.header_length, [wire.data]
    document: dict[str, Any] = {
        "inputs": [
            {
                "name": t.name,
                "datatype": t.datatype,
                "shape": t.shape,
                "parameters": {**passed_on(t.parameters or {}), "binary_data_size": len(t.data)},
            }
            for t in infer.inputs.decoded
        ],
        "parameters": {**passed_on(infer.parameters), "binary_data_output": True},
    }
    if infer.id:
        document["id"] = infer.id
    if infer.outputs:
        document["outputs"] = [
            {"name": o.name, "parameters": {**passed_on(o.parameters), "binary_data": True}} for o in infer.outputs
        ]
    head = _encoder.encode(document)
    return len(head), [head, *(t.data for t in infer.inputs.decoded)]


def write_reply(answer: Answer, asked: Infer, model: str) -> tuple[int | None, list[Bytes]]:
    """An answer in the form that the caller of `asked` wants, under the public name `model`."""
    wire = answer.outputs.wire
    if wire is not None and wire.protocol == "http":
        if answer.model == model and answer.id == asked.id:
            return wire.header_length, [wire.data]
        return _renamed(wire, model, asked.id)
    document: dict[str, Any] = {"id": asked.id} if asked.id else {}
    document |= {"model_name": model, "model_version": answer.version}
    if answer.parameters:
        document["parameters"] = answer.parameters
    outputs, tail = [], []
    # As Triton has it: the default is for calls that name no outputs, and of an output named twice the first counts.
    binary_by_default = asked.parameters.get("binary_data_output") is True and not asked.outputs
    flags = {o.name: o.parameters.get("binary_data") is True for o in reversed(asked.outputs)}
    for tensor in answer.outputs.decoded:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if flags.get(tensor.name, binary_by_default):
            output["parameters"] = {**(tensor.parameters or {}), "binary_data_size": len(tensor.data)}
            if len(tensor.data):  # where all are empty there is no binary part, and no header length
                tail.append(tensor.data)
        else:
            if tensor.parameters:
                output["parameters"] = tensor.parameters
            output["data"] = to_json(tensor)
        outputs.append(output)
    document["outputs"] = outputs
    head = _encoder.encode(document)
    return (len(head), [head, *tail]) if tail else (None, [head])


def error_body(message: str) -> bytes:
    return _encoder.encode({"error": message})


def error_text(body: bytes) -> str | None:
    """What an error's body says, in one line; None where it is none."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return " ".join(str(document["error"]).split()) if isinstance(document, dict) and "error" in document else None


def _renamed(wire: Wire, model: str, request_id: str) -> tuple[int | None, list[Bytes]]:
    """The same body under another model name: everything else stays as it was."""
    end = wire.header_length if wire.header_length is not None else len(wire.data)
    text = wire.data[:end]
    names = {"model_name": model, "id": request_id} if request_id else {"model_name": model}
    try:
        head = _encoder.encode({**_fields_decoder.decode(text), **names})
    except msgspec.DecodeError as error:
        try:  # NaN or Infinity, which only the standard library reads and writes
            head = json.dumps({**json.loads(text), **names}).encode()
        except ValueError:
            _malformed(error, BadReply)
    if wire.header_length is None:
        return None, [head]
    return len(head), [head, memoryview(wire.data)[end:]]


# Reading


def _text(data: bytes, header_length: int | None, fault: type[Failure]) -> bytes:
    """The JSON of a body, which is known to be shallow from here on."""
    if header_length is not None and not 0 < header_length <= len(data):
        got = shown(header_length)
        raise fault(f"Inference-Header-Content-Length: expected 1 to {len(data)} (the body), got {got}")
    text = data if header_length is None else data[:header_length]
    if not text:
        raise fault("expected a KServe v2 JSON body, got an empty one")
    if too_deep(text):
        raise fault(f"JSON is nested more than {MAX_NESTING} levels deep")
    return text


def _read(
    text: bytes, decoder: msgspec.json.Decoder[_Doc], kind: type[_Doc], fault: type[Failure]
) -> tuple[_Doc, list[Any] | None]:
    """The typed head, and the tensors' data as Python lists where stdlib JSON had to read it (NaN, Infinity)."""
    try:
        doc = decoder.decode(text)
        if isinstance(doc, _Request):
            require_unique_keys(text, _keys(doc))
        return doc, None
    except (msgspec.MsgspecError, ValueError) as error:
        if b"NaN" not in text and b"Infinity" not in text:
            _malformed(error, fault)
    try:
        loose = loads_unique(text)
        given = [
            tensor.pop("data", msgspec.UNSET) for tensor in loose.get("inputs" if kind is _Request else "outputs", ())
        ]
        doc = msgspec.convert(loose, kind)
        _encoder.encode(doc)  # fails on lone surrogates, which only the standard library lets in
        return doc, given
    except (ValueError, TypeError, AttributeError, msgspec.MsgspecError) as error:
        _malformed(error, fault)


def _keys(doc: _Request) -> int:
    """How many keys the JSON of `doc` has at the least."""
    keys = 1 + (doc.id != "") + (doc.outputs != []) + len(doc.outputs)
    keys += sum(3 + (tensor.data is not msgspec.UNSET) for tensor in doc.inputs)
    holders: tuple[_Request | _Tensor | _Output, ...] = (doc, *doc.inputs, *doc.outputs)
    return keys + sum(1 + len(holder.parameters) for holder in holders if holder.parameters)


def _malformed(error: Exception, fault: type[Failure]) -> NoReturn:
    whose = "the backend's reply: " if fault is BadReply else ""
    raise malformed(fault)(f"{whose}expected a KServe v2 JSON body: {str(error)[:200]}") from None


def _locate(
    tensors: list[_Tensor], given: list[Any] | None, data: bytes, header_length: int | None, what: str,
    fault: type[Failure],
) -> list[Any]:  # fmt: skip
    """Where each tensor's data is: raw JSON, a Python list, or a view of the binary part. Lengths must add up.

    UNSET stands for a region of shared memory.
    """
    parts: list[Any] = []
    at = header_length if header_length is not None else len(data)
    for i, tensor in enumerate(tensors):
        named = what, tensor.name
        size = tensor.parameters.get("binary_data_size")
        inline = tensor.data if given is None else given[i]
        if REGION in tensor.parameters:
            if size is not None or inline is not msgspec.UNSET:
                raise fault(f"{_named(named)}: expected its data or a shared memory region, got both")
            parts.append(msgspec.UNSET)
            continue
        if size is None:
            if inline is msgspec.UNSET:
                raise fault(f"{_named(named)}: expected 'data' or a 'binary_data_size' parameter, got neither")
            _large_enough(named, tensor, inline, fault)
            parts.append(inline)
            continue
        if inline is not msgspec.UNSET:
            raise fault(f"{_named(named)}: expected either 'data' or a 'binary_data_size' parameter, got both")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            what = f"{_named(named)}: expected binary_data_size to be an integer >= 0"
            raise malformed(fault)(f"{what}, got {shown(size)}")
        if size > (left := len(data) - at):
            raise fault(f"{_named(named)}: binary_data_size is {shown(size)}, but only {left} bytes are left")
        item = ITEM_BYTES.get(tensor.datatype)
        if item is None and size < 4 * math.prod(tensor.shape):
            raise fault(
                f"{_named(named)}: shape {shown(tensor.shape)} asks for more BYTES elements than {size} bytes can hold"
            )
        if item is not None and size != (want := item * math.prod(tensor.shape)):
            raise fault(
                f"{_named(named)}: {tensor.datatype} of shape {shown(tensor.shape)} is {want} bytes, got {size}"
            )
        parts.append(memoryview(data)[at : at + size])
        at += size
    if at != len(data):
        raise fault(f"binary part: {len(data) - at} bytes are left over after the last {what}")
    return parts


def _large_enough(named: tuple[str, str], tensor: _Tensor, inline: Any, fault: type[Failure]) -> None:
    """`fault` where data is too short for its shape, however it is written: Triton would make room for all of it."""
    if not isinstance(inline, msgspec.Raw):
        return
    elements = math.prod(tensor.shape)
    # An element is a character and a comma at the least; the brackets make up for the comma that the last one lacks.
    if len(memoryview(inline)) < 2 * elements:
        raise malformed(fault)(
            f"{_named(named)}: shape {shown(tensor.shape)} asks for {elements} elements, 'data' is too short for them"
        )


def _named(tensor: tuple[str, str]) -> str:
    what, name = tensor
    return f"{what} {shown(name)}"


def _decode(
    heads: Sequence[Head], tensors: Sequence[_Tensor], parts: Sequence[Any], fault: type[Failure]
) -> tuple[Tensor, ...]:
    decoded = []
    for head, tensor, part in zip(heads, tensors, parts, strict=True):
        if part is msgspec.UNSET:
            continue  # it is in shared memory
        binary = isinstance(part, memoryview)
        data = part if binary else from_json(head, part, fault)
        parameters = passed_on(tensor.parameters) or None
        made = Tensor(head.name, head.datatype, head.shape, data, parameters)
        # To Triton text that was read and then miscounted is a contradiction, as it is in binary.
        decoded.append(check(made, fault if binary or head.datatype == "BYTES" else malformed(fault)))
    return tuple(decoded)

"""What a model in this process says of itself when a caller asks for something other than an inference.

Metadata and readiness have an answer, over HTTP and over gRPC; there is no server that the rest would be about.
"""

from __future__ import annotations

from importlib.metadata import version as installed
from typing import Literal
from urllib.parse import unquote

import msgspec

from backends.errors import Unsupported, WrongMethod
from backends.local.model import VERSION, Model, Spec
from backends.proto import kserve_pb2 as pb
from backends.proto import wire
from backends.request import HttpCall, Relay, RpcCall
from backends.stream import once

Call = HttpCall | RpcCall
Subject = Literal["ready", "model", "server"]

_EXTENSIONS = ("binary_tensor_data",)
_JSON = ((b"content-type", b"application/json"),)
_METHODS: dict[str, Subject] = {"ModelReady": "ready", "ModelMetadata": "model", "ServerMetadata": "server"}


def subject(call: Call, version: str) -> tuple[Subject, str]:
    """What a call asks for and the version that it names, which for gRPC is known. Raises Unsupported for the rest."""
    if isinstance(call, RpcCall):
        found, rest = _METHODS.get(call.method.rpartition("/")[2]), [call.method]
    else:
        found, version, rest = _subject(call)
    if found is None:
        what = "/".join(rest)[:128]
        raise Unsupported(f"{what}: a model in this process answers inference, metadata and readiness only")
    if isinstance(call, HttpCall) and call.method not in ("GET", "HEAD"):
        raise WrongMethod(f"expected GET or HEAD, got {call.method}", "GET, HEAD")
    return found, version


def readiness(call: Call, ready: bool) -> Relay:
    if isinstance(call, RpcCall):
        return Relay(200, (), once(pb.ServerReadyResponse(ready=ready).SerializeToString()))
    return Relay(200 if ready else 503, (), once(b""))


def server(call: Call) -> Relay:
    """What a server would say of itself, of whom there is none."""
    name, version = "headrace", installed("headrace")
    if isinstance(call, RpcCall):
        parts = [wire.text(1, name), wire.text(2, version), *(wire.text(3, extension) for extension in _EXTENSIONS)]
        return Relay(200, (), once(b"".join(parts)))
    return _document({"name": name, "version": version, "extensions": _EXTENSIONS})


def metadata(call: Call, model: Model, name: str) -> Relay:
    """The model's inputs and outputs, under its `name`."""
    if isinstance(call, RpcCall):
        parts = [wire.text(1, name), wire.text(2, VERSION), wire.text(3, model.platform)]
        for number, specs in ((4, model.inputs), (5, model.outputs)):
            parts += (wire.field(number, _tensor_message(spec)) for spec in specs)
        return Relay(200, (), once(b"".join(parts)))
    tensors = {
        key: [{"name": spec.name, "datatype": spec.datatype, "shape": spec.shape or ()} for spec in specs]
        for key, specs in (("inputs", model.inputs), ("outputs", model.outputs))
    }
    return _document({"name": name, "versions": [VERSION], "platform": model.platform, **tensors})


def _subject(call: HttpCall) -> tuple[Subject | None, str, list[str]]:
    """What a path asks for, the version that it names, and what of it is behind the model."""
    rest = [unquote(segment) for segment in call.target.partition("?")[0].split("/") if segment][1:]
    if not rest:
        return "server", "", rest
    version = ""
    if rest[0] == "models" and rest[1:] != ["stats"]:
        rest = rest[2:]
        if rest[:1] == ["versions"] and len(rest) > 1:
            version, rest = rest[1], rest[2:]
        if not rest:
            return "model", version, rest
    return "ready" if rest == ["ready"] else None, version, rest


def _tensor_message(spec: Spec) -> bytes:
    shape = b"".join(wire.varint(size % (1 << 64)) for size in spec.shape or ())
    return wire.text(1, spec.name) + wire.text(2, spec.datatype) + wire.field(3, shape)


def _document(document: object) -> Relay:
    return Relay(200, _JSON, once(msgspec.json.encode(document)))

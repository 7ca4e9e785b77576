"""KServe v2 over gRPC: calls that are relayed as bytes, and what has to be known or said of them all the same.

Which model a message is for is read from its top-level fields, and another written by appending, as in `kserve_grpc`.
"""

from __future__ import annotations

from backends.errors import BadReply, Malformed
from backends.proto import wire

# Field numbers of a ModelInferRequest and of its response alike.
_MODEL, _ID = 1, 3

# Where a method's request names its model, and its version (0: nowhere).
_NAMED = {
    "ModelReady": (1, 2), "ModelMetadata": (1, 2), "ModelConfig": (1, 2), "ModelStatistics": (1, 2),
    "ModelInfer": (1, 2), "ModelStreamInfer": (1, 2), "RepositoryModelLoad": (2, 0), "RepositoryModelUnload": (2, 0),
    "TraceSetting": (2, 0),
}  # fmt: skip
# Where its reply does: the fields to go down through. Statistics name models in a list, which appending cannot reach.
_REPLY_NAMED = {"ModelMetadata": (1,), "ModelConfig": (1, 1), "ModelInfer": (1,), "ModelStreamInfer": (2, 1)}


def names_model(method: str) -> bool:
    """Whether the messages of `method` (`/package.Service/Method`) say which model they are for."""
    return method.rpartition("/")[2] in _NAMED


def named(method: str, message: bytes) -> tuple[str, str]:
    """The model and version that a message of a method which `names_model` is for; empty where it leaves them out."""
    model, version = _NAMED[method.rpartition("/")[2]]
    found = {model: b"", version: b""}
    try:
        for key, _, start, end in wire.walk(message):
            if key & 7 == wire.LENGTH_DELIMITED and key >> 3 in found:
                found[key >> 3] = message[start:end]
        return found[model].decode(), found[version].decode()
    except ValueError as error:
        raise Malformed(f"{method}: expected its protobuf message: {error}"[:300]) from None


def rename(method: str, message: bytes, model: str, version: str) -> bytes:
    """A relayed request's message, for `model` and, if not empty, `version`; as it came where its method names none."""
    fields = _NAMED.get(method.rpartition("/")[2])
    if fields is None:
        return message
    return message + wire.text(fields[0], model) + (wire.text(fields[1], version) if version and fields[1] else b"")


def stream_error(message: str, request_id: bytes) -> bytes:
    """A ModelStreamInferResponse for a request that failed, as Triton has it: its id is all that the answer holds."""
    answer = wire.field(_ID, request_id) if request_id else b""
    return wire.text(1, message) + wire.field(2, answer)


def model_error(message: bytes) -> str:
    """The error in a ModelStreamInferResponse that a model gave; empty where it holds none, or the server refused.

    Triton names the model in the answer of a request that ran, and only there.
    """
    try:
        error = b"".join(message[start:end] for key, _, start, end in wire.walk(message) if key >> 3 == 1)
        ran = error and any(key >> 3 == _MODEL for key, *_ in wire.walk(_messages(message, 2)))
    except ValueError as fault:
        raise BadReply(f"ModelStreamInfer: expected its reply as protobuf: {fault}"[:300]) from None
    return error.decode(errors="replace") if ran else ""


def request_id(message: bytes) -> bytes:
    """The id of a serialised ModelInferRequest, empty where it has none; of one that is malformed, what can be read."""
    found = b""
    try:
        for key, _, start, end in wire.walk(message):
            if key == _ID << 3 | wire.LENGTH_DELIMITED:
                found = message[start:end]
        found.decode()
    except ValueError:
        return b""
    return found


def rename_reply(method: str, message: bytes, model: str) -> bytes:
    """A relayed reply's message, from `model`; as it came where its method names none, or in a list."""
    path = _REPLY_NAMED.get(method.rpartition("/")[2])
    if path is None:
        return message
    try:
        if len(path) > 1 and not any(key >> 3 == path[0] for key, *_ in wire.walk(message)):
            return message  # a stream's error: appending would add an empty answer to it
    except ValueError as error:
        raise BadReply(f"{method}: expected its reply as protobuf: {error}"[:300]) from None
    tail = wire.text(path[-1], model)
    for number in reversed(path[:-1]):
        tail = wire.field(number, tail)
    return message + tail


def _messages(data: bytes, number: int) -> bytes:
    """The message in a field of `data`; one that occurs twice is merged, by the rules of protobuf."""
    return b"".join(data[start:end] for key, _, start, end in wire.walk(data) if key >> 3 == number)

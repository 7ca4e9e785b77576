"""A model's configuration, as Triton tells it over either protocol, and what of it matters here: a `Trait`."""

from __future__ import annotations

import msgspec
from google.protobuf.message import DecodeError

from backends.errors import BadReply
from backends.proto.management_pb2 import ModelConfigResponse
from backends.proto.model_config_pb2 import DataType
from backends.request import Trait


class _Transaction(msgspec.Struct):
    decoupled: bool = False


class _Tensor(msgspec.Struct):
    name: str = ""
    data_type: str = ""
    dims: tuple[int, ...] = ()


class _Configuration(msgspec.Struct):
    """Triton leaves out what does not apply."""

    name: str
    max_batch_size: int = 0
    input: list[_Tensor] = []
    output: list[_Tensor] = []
    model_transaction_policy: _Transaction | None = None
    sequence_batching: msgspec.Raw = msgspec.Raw()


# Not strict: protobuf's JSON has 64-bit integers as text.
_configuration = msgspec.json.Decoder(_Configuration, strict=False)


def read_document(body: bytes, where: str) -> Trait:
    """What a configuration as JSON says. Raises BadReply, naming `where` it came from, if it is none."""
    try:
        told = _configuration.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadReply(f"{where}: expected a model's configuration as JSON") from None
    policy = told.model_transaction_policy
    return Trait(
        decoupled=policy is not None and policy.decoupled,
        stateful=bool(told.sequence_batching),
        batched=told.max_batch_size > 0,
        inputs=tuple((each.name, _datatype(each.data_type), each.dims) for each in told.input),
        outputs={each.name: _datatype(each.data_type) for each in told.output},
    )


def read_message(data: bytes) -> Trait:
    """What a serialised ModelConfigResponse says. Raises BadReply where it is none."""
    try:
        told = ModelConfigResponse.FromString(data).config
    except DecodeError as error:
        raise BadReply(f"ModelConfig: expected a ModelConfigResponse: {error}"[:300]) from None
    return Trait(
        decoupled=told.model_transaction_policy.decoupled,
        stateful=told.HasField("sequence_batching"),
        batched=told.max_batch_size > 0,
        inputs=tuple((each.name, _named(each.data_type), tuple(each.dims)) for each in told.input),
        outputs={each.name: _named(each.data_type) for each in told.output},
    )


def _named(kind: int) -> str:
    return _datatype(DataType.Name(kind)) if kind in DataType.values() else str(kind)


def _datatype(name: str) -> str:
    """A datatype of KServe by its name in a configuration; one that is unknown goes by its own."""
    return "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")

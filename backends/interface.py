"""What a model takes and gives, as its server's configuration says: asked for where a call cannot be sent without.

Two calls need it. A raw body (`Inference-Header-Content-Length: 0`) is one input's bytes without its name, datatype and
shape. And `classification` of an output without classes ends the whole server (2.51): of text, or of a tensor that is
empty, which it is where an input is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from math import prod

import msgspec

from backends.errors import BadReply, BadRequest
from backends.kserve_grpc import read_request
from backends.proto.management_pb2 import ModelConfigResponse
from backends.proto.model_config_pb2 import DataType, ModelConfig
from backends.request import Infer, Reply, Request, RpcCall, Service, Tensors, replace
from backends.tensor import ITEM_BYTES, Tensor, join_elements, shown

# A model that is replaced by another under its name is not what is remembered; nobody waits longer for it to be known.
_KEPT_SECONDS = 30.0
_MOST = 256


class Interface(msgspec.Struct, frozen=True):
    """Inputs `(name, datatype, dimensions without the batch's)`, whether there is one, and each output's datatype."""

    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    batched: bool
    outputs: dict[str, str]


class Interfaces:
    """Remembers what `ask` says of a model, the configuration of the one that a request is for; it raises Failure."""

    def __init__(self, ask: Callable[[Request], Awaitable[ModelConfigResponse]], now: Callable[[], float]) -> None:
        self._ask = ask
        self._now = now
        self._known: dict[tuple[str, str], tuple[float, Interface]] = {}

    async def of(self, request: Request) -> Interface:
        key, now = (request.model, request.version), self._now()
        until, found = self._known.get(key, (now, None))
        if found is None or until <= now:
            found = _interface((await self._ask(request)).config)
            self._known.pop(key, None)
            while len(self._known) >= _MOST:
                self._known.pop(next(iter(self._known)))
            self._known[key] = self._now() + _KEPT_SECONDS, found
        return found


class Classified:
    """`inner` for calls that ask for classes, or may (the messages of a stream), of outputs that have any."""

    def __init__(self, inner: Service, interfaces: Interfaces) -> None:
        self._inner = inner
        self._interfaces = interfaces

    async def __call__(self, request: Request, /) -> Reply:
        call = request.content
        if isinstance(call, RpcCall):
            request = replace(request, content=replace(call, messages=self._checked(request, call.messages)))
        else:
            await self._check(request)
        return await self._inner(request)

    async def _checked(self, request: Request, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for message in messages:
            if b"classification" in message:
                model, version, infer = read_request(message)
                if asks_classes(infer):
                    await self._check(replace(request, model=model, version=version, content=infer, stream=False))
            yield message

    async def _check(self, request: Request) -> None:
        infer = request.infer
        for head in infer.inputs.heads:
            if 0 in head.shape:
                raise BadRequest(f"classification: expected inputs with elements, got {shown(list(head.shape))}")
        datatypes = (await self._interfaces.of(request)).outputs
        for output in infer.outputs:
            if output.parameters.get("classification") and datatypes.get(output.name) == "BYTES":
                raise BadRequest("class result not available for output due to unsupported type 'BYTES'")


def asks_classes(infer: Infer) -> bool:
    return any(output.parameters.get("classification") for output in infer.outputs)


def raw(body: bytes, interface: Interface, model: str) -> Infer:
    """A raw body as a call, by Triton's rules and in its words: one input, of one row, with one size to be found."""
    if len(interface.inputs) != 1:
        raise BadRequest(
            "Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(interface.inputs)} inputs in {shown(model)} model configuration"
        )
    ((name, datatype, dims),) = interface.inputs
    if datatype == "BYTES":
        if prod(dims) != 1:
            raise BadRequest(f"For BYTE datatype raw input {shown(name)}, the model must have input shape [1]")
        shape, data = dims, join_elements([body])
    else:
        if dims.count(-1) > 1:
            raise BadRequest(
                f"The shape of the raw input {shown(name)} can not be deduced because there are more than one "
                "variable-sized dimension"
            )
        row = ITEM_BYTES[datatype] * prod(size for size in dims if size != -1)
        found = len(body) // row if row else 0
        shape, data = tuple(found if size == -1 else size for size in dims), body
        if (want := ITEM_BYTES[datatype] * prod(shape)) != len(body):
            raise BadRequest(
                f"input byte size mismatch for input 'raw_input' for model {shown(model)}. "
                f"Expected {want}, got {len(body)}"
            )
    tensor = Tensor(name, datatype, (1, *shape) if interface.batched else shape, data)
    return Infer(Tensors.of((tensor,)), parameters={"binary_data_output": True})


def _interface(config: ModelConfig) -> Interface:
    inputs = tuple((each.name, _datatype(each.data_type), tuple(each.dims)) for each in config.input)
    return Interface(
        inputs, config.max_batch_size > 0, {each.name: _datatype(each.data_type) for each in config.output}
    )


def _datatype(kind: int) -> str:
    name = DataType.Name(kind).removeprefix("TYPE_") if kind in DataType.values() else str(kind)
    if name == "STRING":
        return "BYTES"
    if name not in ITEM_BYTES:
        raise BadReply(f"model configuration: unknown datatype {name}")
    return name

"""Calls that cannot be sent without what a model takes and gives, as its server's configuration says (a `Trait`).

There are two. A raw body (`Inference-Header-Content-Length: 0`) is one input's bytes without its name, datatype and
shape. And `classification` of an output without classes ends the whole server (2.51): of text, or of a tensor that is
empty, which it is where an input is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from math import prod

from backends import kserve_json
from backends.errors import BadReply, BadRequest, Failure
from backends.kserve_grpc import read_request
from backends.request import HttpCall, Infer, Reply, Request, RpcCall, Service, Tensors, Trait, replace
from backends.tensor import ITEM_BYTES, Tensor, join_elements, shown

# What is known of the model that a request is for, or its server says now. Raises Failure.
Told = Callable[[Request], Awaitable[Trait]]


class Classified:
    """`inner` for calls that ask for classes, or may (those that are relayed), of outputs that have any."""

    def __init__(self, inner: Service, told: Told) -> None:
        self._inner = inner
        self._told = told

    async def __call__(self, request: Request, /) -> Reply:
        call = request.content
        if isinstance(call, RpcCall):
            request = replace(request, content=replace(call, messages=self._checked(request, call)))
        elif isinstance(call, HttpCall):
            given = dict(call.headers).get(b"inference-header-content-length", b"")
            infer = kserve_json.read_request(call.body, int(given) if given.isdigit() else None)
            if asks_classes(infer):
                await self._check(replace(request, content=infer))
        else:
            await self._check(request)
        return await self._inner(request)

    async def _checked(self, request: Request, call: RpcCall) -> AsyncIterator[bytes]:
        async for message in call.messages:
            if b"classification" in message:
                model, version, infer = read_request(message)
                if asks_classes(infer):
                    try:
                        await self._check(replace(request, model=model, version=version, content=infer, stream=False))
                    except Failure as failure:
                        if call.refused is None:
                            raise
                        call.refused(failure)
                        continue
            yield message

    async def _check(self, request: Request) -> None:
        infer = request.infer
        for head in infer.inputs.heads:
            if 0 in head.shape:
                raise BadRequest(f"classification: expected inputs with elements, got {shown(list(head.shape))}")
        datatypes = (await self._told(request)).outputs
        for output in infer.outputs:
            if output.parameters.get("classification") and datatypes.get(output.name) == "BYTES":
                raise BadRequest("class result not available for output due to unsupported type 'BYTES'")


def asks_classes(infer: Infer) -> bool:
    return any(output.parameters.get("classification") for output in infer.outputs)


def raw(body: bytes, trait: Trait, model: str) -> Infer:
    """A raw body as a call, by Triton's rules and in its words: one input, of one row, with one size to be found."""
    if len(trait.inputs) != 1:
        raise BadRequest(
            "Raw request must only have 1 input (found 1) to be deduced but got "
            f"{len(trait.inputs)} inputs in {shown(model)} model configuration"
        )
    ((name, datatype, dims),) = trait.inputs
    if datatype == "BYTES":
        if prod(dims) != 1:
            raise BadRequest(f"For BYTE datatype raw input {shown(name)}, the model must have input shape [1]")
        shape, data = dims, join_elements([body])
    elif datatype not in ITEM_BYTES:
        raise BadReply(f"model configuration: unknown datatype {shown(datatype)}")
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
    tensor = Tensor(name, datatype, (1, *shape) if trait.batched else shape, data)
    return Infer(Tensors.of((tensor,)), parameters={"binary_data_output": True})

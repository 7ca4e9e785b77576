"""Keeps from a Triton what would end it: a classification of an output that holds no numbers, or nothing at all.

Triton 2.51 takes the bytes of a BYTES output for numbers to be sorted and dies, and over HTTP it dies of an empty
output that is classified. What an output holds only the server knows, so it is asked, each time: a model may be loaded
with another configuration at any moment, and hardly anybody classifies. An output that is empty although no input is
cannot be foreseen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from urllib.parse import quote

import msgspec

from backends.errors import BackendFailed, BadReply, BadRequest
from backends.kserve_grpc import read_request
from backends.proto import wire
from backends.request import HttpCall, Infer, Relay, Request, RpcCall, Service, replace
from backends.tensor import shown

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_METADATA = "/inference.GRPCInferenceService/ModelMetadata"
_MAX_METADATA_BYTES = 1 << 20
_OUTPUTS = 5  # of ModelMetadataResponse; a tensor's name and datatype are its fields 1 and 2


class _Output(msgspec.Struct):
    name: str
    datatype: str


class _Metadata(msgspec.Struct):
    outputs: list[_Output] = []


def classifies(infer: Infer) -> bool:
    """Whether any of the requested outputs is to be classified."""
    return any("classification" in wanted.parameters for wanted in infer.outputs)


async def check(client: Service, request: Request, infer: Infer, *, grpc: bool) -> None:
    """BadRequest where `infer` classifies what would end the server behind `client`; what the metadata call raises."""
    names = {wanted.name for wanted in infer.outputs if "classification" in wanted.parameters}
    if not grpc and any(0 in head.shape for head in infer.inputs.heads):
        raise BadRequest("classification: expected inputs with elements, got one without any")
    outputs = await (_over_grpc if grpc else _over_http)(client, request)
    for name in sorted(names):
        if outputs.get(name) == "BYTES":
            raise BadRequest(f"output {shown(name)}: only numbers can be classified, and it holds BYTES")


async def checked(client: Service, request: Request, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The messages of a stream of inferences; BadRequest at the first one that must not go on."""
    async for message in messages:
        if b"classification" in message:
            model, version, infer = read_request(message)
            if classifies(infer):
                await check(client, replace(request, model=model, version=version, stream=False), infer, grpc=True)
        yield message


async def _over_http(client: Service, request: Request) -> dict[str, str]:
    path = f"/v2/models/{quote(request.model, safe='')}"
    target = f"{path}/versions/{quote(request.version, safe='')}" if request.version else path
    reply = await client(replace(request, content=HttpCall("GET", target)))
    assert isinstance(reply.body, Relay)
    body = await _whole(reply.body)
    if reply.body.status != 200:
        raise BackendFailed(_error(body) or "the backend does not describe the model", reply.body.status, body=body)
    try:
        return {output.name: output.datatype for output in msgspec.json.decode(body, type=_Metadata).outputs}
    except msgspec.MsgspecError:
        raise BadReply("expected the model's metadata, got something else") from None


async def _over_grpc(client: Service, request: Request) -> dict[str, str]:
    async def one() -> AsyncIterator[bytes]:
        yield wire.text(1, request.model) + wire.text(2, request.version)

    reply = await client(replace(request, content=RpcCall(_METADATA, one())))
    assert isinstance(reply.body, Relay)
    body = await _whole(reply.body)
    outputs: dict[str, str] = {}
    try:
        for key, _, start, end in wire.walk(body):
            if key == _OUTPUTS << 3 | wire.LENGTH_DELIMITED:
                tensor = body[start:end]
                fields = {
                    key >> 3: tensor[begin:stop].decode()
                    for key, _, begin, stop in wire.walk(tensor)
                    if key in (10, 18)
                }
                outputs[fields.get(1, "")] = fields.get(2, "")
    except ValueError:
        raise BadReply("expected the model's metadata, got something else") from None
    return outputs


async def _whole(relay: Relay) -> bytes:
    if isinstance(relay.body, bytes):
        return relay.body
    whole = bytearray()
    async with aclosing(relay.body) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            whole += chunk
            if len(whole) > _MAX_METADATA_BYTES:
                raise BadReply(f"model metadata: expected at most {_MAX_METADATA_BYTES} bytes, got more")
    return bytes(whole)


def _error(body: bytes) -> str:
    try:
        return " ".join(msgspec.json.decode(body, type=dict[str, str]).get("error", "").split())[:200]
    except (msgspec.MsgspecError, ValueError):
        return ""

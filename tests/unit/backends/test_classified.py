"""What must not be classified: outputs that hold no numbers, and what is empty. The server says what they hold."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping

import pytest

from backends.classified import STREAM
from backends.endpoint import Endpoint
from backends.errors import BackendFailed, BadReply, BadRequest, Failure
from backends.proto import kserve_pb2 as pb
from backends.proto import wire
from backends.request import Answer, HttpCall, Infer, Relay, Reply, Request, RpcCall, Tensors, Wanted
from tests.support.strategies import call, fp32

NUMBERS = Wanted("Y", {"classification": 2})
TEXT = Wanted("LABEL", {"classification": 1})
OUTPUTS = [{"name": "Y", "datatype": "FP32", "shape": [-1, 4]}, {"name": "LABEL", "datatype": "BYTES", "shape": [1]}]


class Server:
    """Describes its model, and remembers what it was asked."""

    def __init__(self, status: int = 200, metadata: bytes = b"") -> None:
        self.asked: list[str] = []
        self.messages: list[bytes] = []
        self._status = status
        self._http = metadata or json.dumps({"name": "m", "outputs": OUTPUTS}).encode()
        self._grpc = metadata or wire.text(1, "m") + b"".join(
            wire.field(5, wire.text(1, output["name"]) + wire.text(2, output["datatype"])) for output in OUTPUTS
        )

    async def __call__(self, request: Request, /) -> Reply:
        content = request.content
        if isinstance(content, Infer):
            self.asked.append("infer")
            return Reply(Answer(Tensors.of(())))
        if isinstance(content, HttpCall):
            self.asked.append(content.target)
            return Reply(Relay(self._status, (), _one(self._http)))
        assert isinstance(content, RpcCall)
        self.asked.append(content.method.rpartition("/")[2])
        if content.method == STREAM:
            async for message in content.messages:
                self.messages.append(message)
            return Reply(Relay(200, (), _one(b"")))
        return Reply(Relay(200, (), _one(self._grpc)))

    async def unready(self, model: str, deadline: float, headers: Mapping[str, str]) -> str:
        return ""

    def refresh(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def _one(body: bytes) -> AsyncIterator[bytes]:
    yield body


def endpoint(server: Server, protocol: str) -> Endpoint:
    return Endpoint(
        "e", **{protocol: server}, prefer_grpc=protocol == "grpc", timeout=5, headers={}, now=time.monotonic
    )  # type: ignore[arg-type]


def ask(server: Server, protocol: str, infer: Infer, version: str = "") -> Failure | None:
    request = Request(model="m", version=version, content=infer)
    try:
        asyncio.run(endpoint(server, protocol)(request))  # type: ignore[arg-type]
    except Failure as failure:
        return failure
    return None


@pytest.mark.parametrize(("protocol", "asked"), [("http", "/v2/models/m/versions/3"), ("grpc", "ModelMetadata")])
def test_text_is_not_classified_and_numbers_are(protocol: str, asked: str) -> None:
    server = Server()
    refused = ask(server, protocol, call([1.0], outputs=(NUMBERS, TEXT)), "3")
    assert isinstance(refused, BadRequest)
    assert refused.message == "output 'LABEL': only numbers can be classified, and it holds BYTES"
    assert server.asked == [asked]
    assert ask(server, protocol, call([1.0], outputs=(NUMBERS, Wanted("LABEL"))), "3") is None
    assert server.asked[1:] == [asked, "infer"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_who_does_not_classify_costs_no_second_call(protocol: str) -> None:
    server = Server()
    assert ask(server, protocol, call([1.0], outputs=(Wanted("LABEL", {"binary_data": True}),))) is None
    assert server.asked == ["infer"]


def test_nothing_is_classified_over_http() -> None:
    empty = Infer(Tensors.of((fp32("x", [[]]),)), (NUMBERS,))
    server = Server()
    assert isinstance(ask(server, "http", empty), BadRequest)
    assert server.asked == []
    assert ask(server, "grpc", empty) is None


def test_a_model_that_is_not_described_is_not_asked() -> None:
    server = Server(404, b'{"error":"no\\nsuch model"}')
    failure = ask(server, "http", call([1.0], outputs=(TEXT,)))
    assert isinstance(failure, BackendFailed)
    assert (failure.status, failure.message, server.asked) == (404, "no such model", ["/v2/models/m"])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("metadata", [b"\xff\xff", b"[1]", b"x" * (2 << 20)])
def test_what_describes_no_model_is_a_bad_reply(protocol: str, metadata: bytes) -> None:
    failure = ask(Server(metadata=metadata), protocol, call([1.0], outputs=(TEXT,)))
    assert isinstance(failure, BadReply)
    assert len(failure.message) < 100


def test_a_stream_goes_on_until_it_classifies_text() -> None:
    plain = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(4)])
    plain.inputs.add(name="x", datatype="FP32", shape=[1])
    bad = pb.ModelInferRequest()
    bad.CopyFrom(plain)
    bad.outputs.add(name="LABEL").parameters["classification"].int64_param = 1

    async def messages() -> AsyncIterator[bytes]:
        yield plain.SerializeToString()
        yield bad.SerializeToString()

    server = Server()
    request = Request(model="m", content=RpcCall(STREAM, messages()), stream=True)
    with pytest.raises(BadRequest, match="only numbers can be classified"):
        asyncio.run(endpoint(server, "grpc")(request))  # type: ignore[arg-type]
    assert server.messages == [plain.SerializeToString()]
    assert server.asked == ["ModelStreamInfer", "ModelMetadata"]

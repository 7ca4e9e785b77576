from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from backends.bridge import GrpcOverHttp, HttpOverGrpc
from backends.configuration import read_message
from backends.errors import BackendFailed, BadReply, BadRequest, Failure, NotFound, Unsupported, WrongMethod
from backends.proto import management_pb2 as pb
from backends.proto.model_config_pb2 import DataType, ModelConfig
from backends.request import Answer, HttpCall, Infer, Relay, Reply, Request, RpcCall, Tensors, Trait
from tests.support.loop import run

SERVICE = "/inference.GRPCInferenceService"
CONFIG = ModelConfig(name="m", max_batch_size=4)
CONFIG.input.add(name="X", data_type=DataType.TYPE_FP32, dims=[-1])
CONFIG.output.add(name="Y", data_type=DataType.TYPE_STRING, dims=[1])


async def once(body: bytes) -> AsyncIterator[bytes]:
    yield body


class Server:
    """A client whose relayed calls are answered by `answer`; inferences come back as they are, named `m`."""

    def __init__(self, answer: Callable[[Any, bytes], Relay]) -> None:
        self.answer = answer
        self.asked: list[Request] = []

    async def __call__(self, request: Request, /) -> Reply:
        self.asked.append(request)
        call = request.content
        if isinstance(call, Infer):
            return Reply(Answer(call.inputs, "m", "1"))
        body = call.body if isinstance(call, HttpCall) else b"".join([message async for message in call.messages])
        return Reply(self.answer(call, body))


def over_grpc(reply: Any = b"", config: ModelConfig = CONFIG) -> tuple[HttpOverGrpc, Server]:
    data = reply if isinstance(reply, bytes) else reply.SerializeToString()
    server = Server(lambda call, body: Relay(200, (), once(data)))

    async def told(request: Request) -> Trait:
        assert request.model == "m"
        return read_message(pb.ModelConfigResponse(config=config).SerializeToString())

    return HttpOverGrpc(server, "e", told), server


def over_http(status: int, body: bytes) -> tuple[GrpcOverHttp, Server]:
    server = Server(lambda call, _: Relay(status, (), once(body)))
    return GrpcOverHttp(server, "e"), server


def get(target: str, method: str = "GET", body: bytes = b"", **headers: str) -> Request:
    pairs = tuple((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items())
    model = "" if target in ("/v2", "/v2/models/stats") else "m"
    return Request(model=model, content=HttpCall(method, target, pairs, body))


def rpc(method: str, message: bytes = b"\n\1m") -> Request:
    return Request(model="m", content=RpcCall(f"{SERVICE}/{method}", once(message), (("x-own", "1"), ("a-bin", b"\0"))))


async def body_of(reply: Reply) -> bytes:
    assert isinstance(reply.body, Relay)
    assert not isinstance(reply.body.body, bytes)
    return b"".join([chunk async for chunk in reply.body.body])


def failed(bridge: Any, request: Request, kind: type[Failure]) -> str:
    async def main() -> str:
        with pytest.raises(kind) as caught:
            await body_of(await bridge(request))
        assert len(caught.value.message.splitlines()) == 1
        return caught.value.message

    return run(main())


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_document_says_what_the_message_does(method: str) -> None:
    reply = pb.ModelMetadataResponse(name="m", versions=["1"])
    reply.inputs.add(name="X", datatype="FP32", shape=[-1, 2**40])

    async def main() -> None:
        bridge, server = over_grpc(reply)
        answer = await bridge(get("/v2/models/m/versions/3?x=y", method, x_own="1", accept="*/*"))
        assert await body_of(answer) == (
            b'{"name":"m","versions":["1"],"platform":"",'
            b'"inputs":[{"name":"X","datatype":"FP32","shape":[-1,1099511627776]}],"outputs":[]}'
        )
        (asked,) = server.asked
        assert isinstance(asked.content, RpcCall)
        assert asked.content.method == f"{SERVICE}/ModelMetadata"
        assert (asked.version, asked.headers) == ("3", {"x-own": "1"})

    run(main())


def test_readiness_has_a_status() -> None:
    async def main() -> None:
        for ready, status, body in ((True, 200, b""), (False, 400, b'{"error":"Model version not ready"}')):
            bridge, _ = over_grpc(pb.ModelReadyResponse(ready=ready))
            answer = await bridge(get("/v2/models/m/ready"))
            assert isinstance(answer.body, Relay)
            assert (answer.body.status, await body_of(answer)) == (status, body)

    run(main())


def test_an_index_leaves_out_what_is_not_known() -> None:
    reply = pb.RepositoryIndexResponse()
    reply.models.add(name="a")
    reply.models.add(name="b", version="1", state="UNAVAILABLE", reason="unloaded")
    expected = b'[{"name":"a"},{"name":"b","version":"1","state":"UNAVAILABLE","reason":"unloaded"}]'
    bridge, _ = over_grpc(reply)

    async def main() -> None:
        assert (
            await body_of(await bridge(get("/v2/repository/index", "POST", b'{"ready":false,"more":[1]}'))) == expected
        )

    run(main())
    assert "'ready'" in failed(bridge, get("/v2/repository/index", "POST", b"{"), BadRequest)


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (get("/v2/models/m/generate", "POST"), Unsupported), (get("/v2/logging"), Unsupported),
        (get("/v2/repository/models/m/load", "POST"), Unsupported), (get("/v2/models/m/trace/setting"), Unsupported),
        (get("/v2/models/m/versions/1/ready/x"), Unsupported), (get("/v2/models/m/versions/x"), NotFound),
        (get("/v2/models/m/config", "POST"), WrongMethod), (get("/v2/models/m/infer"), WrongMethod),
        (get("/v2/repository/index"), WrongMethod), (get("/v2/models/m"), BadReply),
    ],
)  # fmt: skip
def test_what_http_callers_cannot_have(request_: Request, kind: type[Failure]) -> None:
    bridge, _ = over_grpc(b"\xff")
    failed(bridge, request_, kind)


def test_a_raw_body_is_an_inference() -> None:
    async def main() -> None:
        bridge, server = over_grpc()
        for data in (bytes(8), bytes(12)):
            answer = await bridge(get("/v2/models/m/infer", "POST", data))
            assert isinstance(answer.body, Relay)
            headers, body = dict(answer.body.headers), await body_of(answer)
            length = int(headers[b"inference-header-content-length"])
            assert body[length:] == data
            assert b'"shape":[1,%d]' % (len(data) // 4) in body[:length]
            assert int(headers[b"content-length"]) == len(body)
        assert [type(asked.content) for asked in server.asked] == [Infer, Infer]

    run(main())


@pytest.mark.parametrize(
    ("datatype", "dims", "data", "words"),
    [
        (DataType.TYPE_STRING, [2], b"a", "must have input shape [1]"),
        (DataType.TYPE_STRING, [-1], b"a", "must have input shape [1]"),
        (DataType.TYPE_FP32, [-1, -1], bytes(4), "more than one variable-sized dimension"),
        (DataType.TYPE_FP16, [-1, 2], bytes(6), "Expected 4, got 6"),
        (DataType.TYPE_INT64, [0], b"a", "Expected 0, got 1"),
        (DataType.TYPE_INT64, [-1, 0], b"a", "Expected 0, got 1"),
    ],
)
def test_raw_bodies_that_do_not_fit(datatype: DataType, dims: list[int], data: bytes, words: str) -> None:
    config = ModelConfig(name="m")
    config.input.add(name="X", data_type=datatype, dims=dims)
    bridge, _ = over_grpc(config=config)
    assert words in failed(bridge, get("/v2/models/m/infer", "POST", data), BadRequest)
    config.input.add(name="Z", data_type=datatype, dims=dims)
    bridge, _ = over_grpc(config=config)
    assert "2 inputs in 'm'" in failed(bridge, get("/v2/models/m/infer", "POST", data), BadRequest)


@pytest.mark.parametrize("kind", [DataType.TYPE_INVALID, 99])
def test_a_configuration_of_unknown_datatypes(kind: Any) -> None:
    config = ModelConfig(name="m")
    config.input.add(name="X", data_type=kind, dims=[1])
    bridge, _ = over_grpc(config=config)
    assert "unknown datatype" in failed(bridge, get("/v2/models/m/infer", "POST"), BadReply)


def test_a_message_says_what_the_document_does() -> None:
    async def main() -> None:
        document = (
            b'{"name":"m","versions":["1"],"inputs":[{"name":"X","datatype":"FP32","shape":[-1,2]}],"new":{"x":1}}'
        )
        bridge, server = over_http(200, document)
        message = pb.ModelMetadataResponse.FromString(
            await body_of(await bridge(rpc("ModelMetadata", b"\n\3a/b\x12\0012")))
        )
        assert (message.name, message.versions, list(message.inputs[0].shape)) == ("m", ["1"], [-1, 2])
        (asked,) = server.asked
        assert asked.content == HttpCall("GET", "/v2/models/a%2Fb/versions/2", ((b"x-own", b"1"),))
        bridge, server = over_http(200, b'[{"name":"a","state":"READY"}]')
        index = await body_of(await bridge(rpc("RepositoryIndex", b"\x10\1")))
        assert pb.RepositoryIndexResponse.FromString(index).models[0].state == "READY"
        assert isinstance(server.asked[0].content, HttpCall)
        assert server.asked[0].content.body == b'{"ready":true}'

    run(main())


@pytest.mark.parametrize(("status", "ready"), [(200, True), (400, False), (404, False)])
def test_readiness_has_no_error(status: int, ready: bool) -> None:
    async def main() -> None:
        bridge, _ = over_http(status, b"")
        assert pb.ModelReadyResponse.FromString(await body_of(await bridge(rpc("ModelReady")))).ready is ready

    run(main())


def test_a_servers_error_keeps_its_status_and_words() -> None:
    bridge, _ = over_http(404, b'{"error":"Request for unknown model:\\n \'m\' is not found"}')
    assert failed(bridge, rpc("ModelConfig"), BackendFailed) == "Request for unknown model: 'm' is not found"
    bridge, _ = over_http(503, b"<html>")
    assert failed(bridge, rpc("ModelReady"), BackendFailed) == "/v2/models/m/ready answered 503"


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"name":1}',
        b'{"inputs":{}}',
        b'{"inputs":[{"shape":["x"]}]}',
        b"[" * 10**5,
        b"null",
    ],
)
def test_documents_that_are_none(document: bytes) -> None:
    bridge, _ = over_http(200, document)
    assert "expected Triton's JSON" in failed(bridge, rpc("ModelMetadata"), BadReply)


def test_a_document_is_bounded() -> None:
    bridge, _ = over_http(200, b" " * (16 * 2**20 + 1))
    assert "at most 16777216 bytes" in failed(bridge, rpc("ModelMetadata"), BadReply)


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (rpc("RepositoryModelLoad"), Unsupported), (rpc("ModelStreamInfer"), Unsupported),
        (rpc("RepositoryIndex", b"\n\1x"), Unsupported), (rpc("RepositoryIndex", b"\xff"), BadRequest),
        (rpc("ModelConfig", b"\n\1m\x12\1x"), BadRequest),
    ],
)  # fmt: skip
def test_what_grpc_callers_cannot_have(request_: Request, kind: type[Failure]) -> None:
    bridge, server = over_http(200, b"{}")
    failed(bridge, request_, kind)
    assert not server.asked


def test_an_empty_answer_has_no_header_length() -> None:
    async def empty(request: Request) -> Reply:
        return Reply(Answer(Tensors.of(()), "m", "1"))

    async def told(request: Request) -> Trait:
        return read_message(pb.ModelConfigResponse(config=CONFIG).SerializeToString())

    async def main() -> None:
        answer = await HttpOverGrpc(empty, "e", told)(get("/v2/models/m/infer", "POST"))
        assert isinstance(answer.body, Relay)
        assert dict(answer.body.headers)[b"content-type"] == b"application/json"

    run(main())

from __future__ import annotations

import asyncio
from math import prod
from typing import Any

import pytest
from google.protobuf import json_format

from backends.configuration import read_document, read_message
from backends.endpoint import Client, Endpoint
from backends.errors import FIRST_BYTE, BadRequest, ConnectionLost, Expired, Failure, Rejected, TooSlow, Unreachable
from backends.proto.management_pb2 import ModelConfigResponse
from backends.proto.model_config_pb2 import ModelConfig
from backends.request import Answer, HttpCall, Infer, Relay, Reply, Request, Tensors, Trait, Wanted, replace
from backends.tensor import Tensor
from tests.support.loop import run
from tests.support.strategies import call

INFER = Request(model="m", content=call([1.0]))
RELAYED = Request(model="m", content=HttpCall("GET", "/v2"))


class Server:
    """A client that fails with `failure` where there is one."""

    def __init__(self, failure: Failure | None = None) -> None:
        self.failure = failure

    async def __call__(self, request: Request, /) -> Reply:
        if self.failure is not None:
            raise self.failure
        return Reply(Relay(200, (), b"") if isinstance(request.content, HttpCall) else Answer(Tensors.of(())))

    async def unready(self, model: str, deadline: float, headers: Any) -> str:
        return self.failure.message if self.failure is not None else ""

    async def trait(self, model: str, version: str, deadline: float, headers: Any) -> Trait:
        return Trait()

    def refresh(self) -> None: ...

    async def close(self) -> None: ...


def endpoint(http: Client | None, grpc: Client | None = None) -> Endpoint:
    return Endpoint(
        "e",
        http=http,
        grpc=grpc,
        prefer_grpc=grpc is not None,
        tentative=False,
        timeout=30.0,
        headers={},
        now=lambda: asyncio.get_running_loop().time(),
    )


def test_a_call_that_cannot_reach_it_says_that_it_is_down_and_a_probe_that_it_is_back() -> None:
    async def main() -> None:
        server = Server()
        replica = endpoint(server)
        assert await replica.probe(1.0)
        await replica(INFER)
        assert replica.ready
        server.failure = Unreachable("cannot connect to e:1: connection refused")
        with pytest.raises(Unreachable):
            await replica(INFER)
        assert (replica.ready, replica.reason) == (False, "cannot connect to e:1: connection refused")
        server.failure = None
        await replica(INFER)  # an answer is not a probe: it may have been on its way for long
        assert replica.ready is False
        assert await replica.probe(1.0)
        assert (replica.ready, replica.reason, replica.in_flight) == (True, "", 0)

    run(main())


@pytest.mark.parametrize("failure", [Rejected("queue full"), ConnectionLost("gone")])
def test_no_other_failure_says_so(failure: Failure) -> None:
    async def main() -> None:
        replica = endpoint(Server(failure))
        with pytest.raises(type(failure)):
            await replica(INFER)
        assert replica.ready is None

    run(main())


def test_the_protocol_of_the_tensors_decides() -> None:
    async def main() -> None:
        http, grpc = Server(Unreachable("refused")), Server()
        replica = endpoint(http, grpc)
        await replica.probe(1.0)
        with pytest.raises(Unreachable):
            await replica(RELAYED)
        assert replica.ready
        grpc.failure = Unreachable("refused")
        with pytest.raises(Unreachable):
            await replica(INFER)
        assert replica.ready is False

    run(main())


def classes(shape: tuple[int, ...], asked: Any = 1) -> Request:
    inputs = Tensors.of((Tensor("X", "FP32", shape, bytes(4 * prod(shape))),))
    return Request(model="m", content=Infer(inputs, (Wanted("Y", {"classification": asked}),)))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_classes_are_asked_of_what_has_some_only(protocol: str) -> None:
    """Of text, and of nothing, they end the server."""

    class Configured(Server):
        def __init__(self, datatype: str) -> None:
            super().__init__()
            self.config = ModelConfig(name="m", output=[{"name": "Y", "data_type": datatype}])

        async def trait(self, model: str, version: str, deadline: float, headers: Any) -> Trait:
            if protocol == "grpc":
                return read_message(ModelConfigResponse(config=self.config).SerializeToString())
            document = json_format.MessageToJson(self.config, preserving_proto_field_name=True)
            return read_document(document.encode(), "/config")

    def replica(datatype: str) -> Endpoint:
        server = Configured(datatype)
        return endpoint(None, server) if protocol == "grpc" else endpoint(server)

    async def main() -> None:
        assert isinstance((await replica("TYPE_FP32")(classes((1, 2)))).body, Answer)
        assert isinstance((await replica("TYPE_STRING")(classes((1, 2), 0))).body, Answer)
        with pytest.raises(BadRequest, match="unsupported type 'BYTES'"):
            await replica("TYPE_STRING")(classes((1, 2)))
        with pytest.raises(BadRequest, match="expected inputs with elements"):
            await replica("TYPE_FP32")(classes((2, 0)))

    run(main())


def test_a_call_crosses_to_the_protocol_that_there_is() -> None:
    async def main() -> None:
        with pytest.raises(Unreachable):
            await (replica := endpoint(None, Server(Unreachable("refused"))))(RELAYED)
        assert replica.ready is False

    run(main())


class Streaming(Server):
    """Begins an answer after `first` seconds; its chunks come after the others."""

    def __init__(self, first: float, *chunks: float) -> None:
        super().__init__()
        self.first = first
        self.chunks = chunks
        self.deadlines: list[float] = []

    async def __call__(self, request: Request, /) -> Reply:
        self.deadlines.append(request.deadline)
        await asyncio.sleep(self.first)
        return Reply(Relay(200, (), self._chunks()))

    async def _chunks(self) -> Any:
        for seconds in self.chunks:
            await asyncio.sleep(seconds)
            yield b"."


STREAM = Request(model="m", content=HttpCall("POST", "/v2/models/m/generate_stream"), stream=True)


@pytest.mark.parametrize(
    ("server", "request_", "why"),
    [
        (Streaming(9, 4, 4), STREAM, ""),
        (Streaming(11), STREAM, "'e' sent nothing for 10 s"),
        (Streaming(1, 4, 6), STREAM, "'e' sent nothing for 5 s in the middle of its stream"),
        (Streaming(1, 6), RELAYED, ""),
        (Server(Expired(FIRST_BYTE)), INFER, "'e' began no answer within 2 s"),
        (Server(Expired("backend")), INFER, "'e' did not answer within 10 s"),
        (Server(Expired("backend")), STREAM, "'e' did not end its stream within 60 s"),
        (Server(Expired("backend")), replace(INFER, deadline=1.0), "deadline exceeded in backend 'e'"),
        (Server(Expired("backend")), replace(STREAM, deadline=1.0), "deadline exceeded in backend 'e'"),
    ],
)
def test_each_limit_has_its_own_words(server: Server, request_: Request, why: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        replica = Endpoint(
            "e",
            http=server,
            timeout=10.0,
            first_byte_timeout=2.0,
            idle_timeout=5.0,
            stream_timeout=60.0,
            headers={},
            now=loop.time,
        )
        message = ""
        try:
            relay = (await replica(request_)).body
            assert isinstance(relay, Relay)
            assert not isinstance(relay.body, bytes)
            assert [chunk async for chunk in relay.body]
        except (TooSlow, Expired) as failure:
            message = failure.message
        assert message == why
        assert replica.in_flight == 0
        if isinstance(server, Streaming):
            assert server.deadlines == [60.0 if request_.stream else 10.0]

    run(main())


@pytest.mark.parametrize(
    ("value", "fits"),
    [("x" * 6999, True), ("x" * 7000, False), (b"x" * 5247, True), (b"x" * 5250, False),
     (("x" * 3500, "y" * 3499), True), (("x" * 3500, "y" * 3500), False)],
)  # fmt: skip
def test_metadata_count_as_long_as_they_are_on_the_wire(value: Any, fits: bool) -> None:
    async def main() -> None:
        sent = replace(INFER, headers={"k": value})
        if fits:
            await endpoint(Server())(sent)
        else:
            with pytest.raises(BadRequest, match="at most 7000 bytes"):
                await endpoint(Server())(sent)

    run(main())

"""ModelStreamInfer at the edge, before scripted services: order, errors, flows, back-pressure, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest

from backends.errors import BackendFailed, ConnectionLost, Failure, NotFound
from backends.proto import kserve_pb2 as pb
from backends.request import Relay, Reply, Request, RpcCall, Trait
from gateway import grpc_stream
from tests.support.waiting import until
from tests.unit.gateway.grpc_edge import SERVICE, Setup, edge, infer_message

PLAIN, DECOUPLED = Trait(), Trait(decoupled=True)
Answers = Callable[[str, str], Sequence[bytes | Failure]]
Message = tuple[str, str]  # a model's name and a request's id


class Models:
    """A service whose models answer each message by its id, when they are let.

    A model has a trait; `answers(model, id)` gives what one message is answered with. A message waits for its gate,
    where there is one.
    """

    def __init__(self, traits: dict[str, Trait | None], answers: Answers) -> None:
        self.traits = traits
        self.answers = answers
        self.gates: dict[str, asyncio.Event] = {}
        self.calls: list[RpcCall] = []
        self.open = 0
        self.seen: list[Message] = []

    async def __call__(self, request: Request) -> Reply:
        call = request.content
        assert isinstance(call, RpcCall)
        assert request.stream
        self.calls.append(call)
        if request.model not in self.traits:
            raise NotFound(f"no '{request.model}'")
        assert call.told is not None
        call.told(self.traits[request.model], 30.0)
        return Reply(Relay(200, (), self._chunks(request.model, call)))

    async def _chunks(self, model: str, call: RpcCall) -> AsyncIterator[bytes]:
        self.open += 1
        try:
            async for message in call.messages:
                id = pb.ModelInferRequest.FromString(message).id
                self.seen.append((model, id))
                if id in self.gates:
                    await self.gates[id].wait()
                for answer in self.answers(model, id):
                    if isinstance(answer, Failure):
                        raise answer
                    yield answer
        finally:
            self.open -= 1


def told(model: str, id: str) -> bytes:
    answer = pb.ModelInferResponse(model_name=model, id=id)
    return pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()


def once(model: str, id: str) -> list[bytes | Failure]:
    return [told(model, id)]


def stream(setup: Setup, **options: Any) -> Any:
    return setup.channel.stream_stream(SERVICE + "ModelStreamInfer")(timeout=10, **options)


async def said(call: Any) -> tuple[str, str, str]:
    """The next message: model, id, and the error without what is after its colon."""
    data = await asyncio.wait_for(call.read(), 5)
    if data is grpc.aio.EOF:
        return "", "", "EOF"
    message = pb.ModelStreamInferResponse.FromString(data)
    assert message.HasField("infer_response")
    return message.infer_response.model_name, message.infer_response.id, message.error_message


async def ask(call: Any, model: str, id: str, **fields: Any) -> None:
    await call.write(infer_message(model_name=model, id=id, **fields))


def sequence(id: int | str, *, start: bool = False, end: bool = False) -> dict[str, pb.InferParameter]:
    name = pb.InferParameter(int64_param=id) if isinstance(id, int) else pb.InferParameter(string_param=id)
    flags = {"sequence_start": start, "sequence_end": end}
    return {"sequence_id": name, **{k: pb.InferParameter(bool_param=v) for k, v in flags.items()}}


def test_answers_of_models_come_in_the_order_of_requests_whatever_flow_they_belong_to() -> None:
    async def main() -> None:
        models = Models({"a": PLAIN, "b": PLAIN}, once)
        models.gates["1"] = asyncio.Event()
        async with edge(models) as setup:
            call = stream(setup)
            for model, id in [("a", "1"), ("b", "2"), ("nosuch", "3"), ("b", "4"), ("a", "5")]:
                await ask(call, model, id)
            await call.write(infer_message(model_name="a", id="6", inputs=[]))
            await call.done_writing()
            await until(lambda: ("b", "2") in models.seen)
            models.gates["1"].set()
            got = [await said(call) for _ in range(6)]
            assert [id for _, id, _ in got] == ["1", "2", "3", "4", "5", "6"]
            assert got[2] == ("", "3", "no 'nosuch'")
            assert got[5] == ("", "6", "ModelInferRequest: expected at least one input, got none")
            assert (await said(call))[2] == "EOF"
            assert await call.code() is grpc.StatusCode.OK
        assert models.open == 0

    asyncio.run(main())


@pytest.mark.parametrize("trait", [DECOUPLED, None, Trait(told=False)])
def test_nobody_waits_for_a_decoupled_model_or_an_unknown_one(trait: Trait | None) -> None:
    async def main() -> None:
        counts = {"1": 0, "3": 3}
        models = Models({"a": PLAIN, "d": trait}, lambda model, id: once(model, id) * counts.get(id, 1))
        models.gates["2"] = asyncio.Event()
        async with edge(models) as setup:
            call = stream(setup)
            for model, id in [("d", "1"), ("a", "2"), ("d", "3"), ("a", "4")]:
                await ask(call, model, id)
            assert [await said(call) for _ in range(3)] == [("d", "3", "")] * 3
            models.gates["2"].set()
            assert [await said(call) for _ in range(2)] == [("a", "2", ""), ("a", "4", "")]
            await call.done_writing()
            assert (await said(call))[2] == "EOF"

    asyncio.run(main())


def test_one_flow_for_each_model_version_and_sequence() -> None:
    async def main() -> None:
        models = Models({"a": PLAIN}, once)
        async with edge(models) as setup:
            call = stream(setup, metadata=(("headrace-tenant", "t"), ("k", "v")))
            asked: list[dict[str, Any]] = [
                {}, {"model_version": "2"}, {"parameters": sequence(5, start=True)}, {"parameters": sequence("5")},
                {"parameters": sequence(0)}, {"parameters": sequence("")}, {"parameters": sequence(5)}, {},
            ]  # fmt: skip
            for i, fields in enumerate(asked):
                await ask(call, "a", str(i), **fields)
            assert [(await said(call))[1] for _ in asked] == [str(i) for i in range(len(asked))]
            found = [(c.sequence.id, c.sequence.starts) if c.sequence else None for c in models.calls]
            assert found == [None, None, (5, True), ("5", False)]
            assert {c.metadata for c in models.calls} == {(("k", "v"),)}
            await call.done_writing()
            assert (await said(call))[2] == "EOF"

    asyncio.run(main())


def test_the_end_of_a_sequence_closes_its_flow_and_the_next_one_waits_for_that() -> None:
    async def main() -> None:
        models = Models({"a": PLAIN}, once)
        models.gates["2"] = asyncio.Event()
        async with edge(models) as setup:
            call = stream(setup)
            await ask(call, "a", "1", parameters=sequence(5, start=True))
            await ask(call, "a", "2", parameters=sequence(5, end=True))
            await ask(call, "a", "3", parameters=sequence(5, start=True))
            assert await said(call) == ("a", "1", "")
            await until(lambda: ("a", "2") in models.seen)
            (first,) = models.calls
            assert first.sequence is not None
            assert first.sequence.ends
            models.gates["2"].set()
            assert [(await said(call))[1] for _ in range(2)] == ["2", "3"]
            assert len(models.calls) == 2
            assert models.open == 1
            call.cancel()
            await until(lambda: models.open == 0)

    asyncio.run(main())


def test_a_flow_that_breaks_is_told_for_each_request_that_it_owes_and_the_stream_goes_on() -> None:
    async def main() -> None:
        lost = ConnectionLost("backend: socket closed")
        models = Models({"a": PLAIN, "b": PLAIN}, lambda model, id: [lost] if id == "2" else once(model, id))
        models.gates["2"] = asyncio.Event()
        async with edge(models) as setup:
            call = stream(setup)
            for model, id in [("a", "1"), ("a", "2"), ("b", "3"), ("a", "4")]:
                await ask(call, model, id)
            assert await said(call) == ("a", "1", "")
            models.gates["2"].set()
            assert await said(call) == ("", "2", lost.message)
            assert await said(call) == ("b", "3", "")
            assert await said(call) == ("", "4", lost.message)
            await ask(call, "a", "5")
            assert await said(call) == ("a", "5", "")
            await call.done_writing()
            assert (await said(call))[2] == "EOF"
            assert await call.code() is grpc.StatusCode.OK

    asyncio.run(main())


def test_a_decoupled_flow_that_breaks_ends_the_stream_after_its_error() -> None:
    async def main() -> None:
        cut = BackendFailed("cut", 14, grpc=True)
        models = Models({"d": DECOUPLED}, lambda model, id: [told(model, id), cut])
        async with edge(models) as setup:
            call = stream(setup)
            await ask(call, "d", "1")
            assert await said(call) == ("d", "1", "")
            assert await said(call) == ("", "1", "cut")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await said(call)
            assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.UNAVAILABLE, "cut")
            assert not setup.reported

    asyncio.run(main())


def test_a_backend_that_ends_the_stream_too_early_has_failed() -> None:
    async def main() -> None:
        async def service(request: Request) -> Reply:
            assert isinstance(request.content, RpcCall)
            assert request.content.told is not None
            request.content.told(PLAIN, 30.0)

            async def chunks() -> AsyncIterator[bytes]:
                for _ in ():
                    yield b""

            return Reply(Relay(200, (), chunks()))

        async with edge(service) as setup:
            call = stream(setup)
            await ask(call, "a", "1")
            assert await said(call) == ("", "1", "the backend ended the stream, and has not answered all requests")
            call.cancel()

    asyncio.run(main())


def test_real_statuses_where_they_are_asked_for() -> None:
    async def main() -> None:
        answer = pb.ModelInferResponse(model_name="a", id="3")
        failed = pb.ModelStreamInferResponse(error_message="13 is refused", infer_response=answer)
        refused = pb.ModelStreamInferResponse(error_message="no such input", infer_response={"id": "4"})
        given = {"3": failed.SerializeToString(), "4": refused.SerializeToString()}
        models = Models({"a": PLAIN}, lambda model, id: [given.get(id) or told(model, id)])
        models.gates["5"] = asyncio.Event()
        async with edge(models) as setup:
            call = stream(setup, metadata=(("triton_grpc_error", "true"), ("k", "v")))
            await ask(call, "nosuch", "1")
            assert await said(call) == ("", "1", "no 'nosuch'")  # as Triton does
            await call.write(infer_message(model_name="a", id="2", inputs=[]))
            assert (await said(call))[1] == "2"
            await ask(call, "a", "4")
            assert await said(call) == ("", "4", "no such input")
            await ask(call, "a", "5", parameters=sequence(5))
            await ask(call, "a", "3")
            await until(lambda: len(models.seen) == 3)
            models.gates["5"].set()
            assert await said(call) == ("a", "5", "")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await said(call)
            assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.INTERNAL, "13 is refused")
            assert [made.metadata for made in models.calls[1:]] == [(("k", "v"),)] * 2  # it would end a Triton

    asyncio.run(main())


def test_errors_of_malformed_messages_have_the_id_where_it_can_be_read() -> None:
    async def main() -> None:
        models = Models({"a": PLAIN}, once)
        async with edge(models) as setup:
            call = stream(setup)
            for message, id, words in [
                (b"\x0b", "", "expected a ModelInferRequest as protobuf"),
                (b"\x1a\x017\x0b", "", "expected a ModelInferRequest as protobuf"),
                (b"", "", "expected a model_name"),
                (infer_message(model_name=""), "7", "expected a model_name"),
                (infer_message(raw_input_contents=[b"\1"]), "7", "is 2 bytes, got 1"),
                (infer_message(id="7" * 1000, inputs=[]), "", "at least one input"),
            ]:
                await call.write(message)
                _, got, error = await said(call)
                assert (got, words in error) == (id, True), error
            await ask(call, "a", "8")
            assert await said(call) == ("a", "8", "")
            assert len(setup.refused) == 6
            assert not setup.reported
            call.cancel()

    asyncio.run(main())


def test_a_stream_without_a_message_ends_well_and_one_that_says_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "_FIRST_MESSAGE_S", 0.05)

    async def main() -> None:
        async with edge(Models({}, once)) as setup:
            call = stream(setup)
            await call.done_writing()
            assert (await said(call))[2] == "EOF"
            assert await call.code() is grpc.StatusCode.OK
            silent = stream(setup)
            assert await silent.code() is not grpc.StatusCode.OK
            assert "no message came within 0.05 s" in await silent.details()

    asyncio.run(main())

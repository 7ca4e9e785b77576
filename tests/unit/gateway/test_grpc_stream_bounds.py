"""ModelStreamInfer at the edge: what bounds a stream, how long backends may take, and how a stream is cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from backends.errors import Unreachable
from backends.proto import kserve_pb2 as pb
from backends.request import Relay, Reply, Request, RpcCall, Trait
from gateway import grpc_stream
from tests.support.waiting import until
from tests.unit.gateway.test_grpc import edge, infer_message
from tests.unit.gateway.test_grpc_stream import DECOUPLED, PLAIN, Models, ask, once, said, sequence, stream, told


def test_a_slow_backend_stops_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "_QUEUED_BYTES", 100_000)

    async def main() -> None:
        models = Models({"a": PLAIN}, once)
        models.gates["0"] = asyncio.Event()
        async with edge(models) as setup:
            call = stream(setup)
            size, count, sent = 500_000, 100, 0

            async def send() -> None:
                nonlocal sent
                for i in range(count):
                    pad = {"pad": pb.InferParameter(string_param="x" * size)}
                    await call.write(infer_message(model_name="a", id=str(i), parameters=pad))
                    sent = i + 1

            sending = asyncio.create_task(send())
            await until(lambda: models.seen == [("a", "0")])
            stalled = -1
            while stalled != sent:  # the sockets between hold some
                stalled = sent
                await asyncio.sleep(0.1)
            assert stalled < count / 2
            models.gates["0"].set()
            assert [(await said(call))[1] for _ in range(count)] == [str(i) for i in range(count)]
            await sending
            call.cancel()

    asyncio.run(main())


def test_a_slow_caller_stops_the_backend() -> None:
    async def main() -> None:
        given = 0

        async def service(request: Request) -> Reply:
            assert isinstance(request.content, RpcCall)
            assert request.content.told is not None
            request.content.told(DECOUPLED, 30.0)
            return Reply(Relay(200, (), chunks()))

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal given
            while given < 3000:
                given += 1
                yield told("d", "x" * 10_000)

        async with edge(service) as setup:
            call = stream(setup)
            await ask(call, "d", "1")
            await said(call)
            stalled = -1
            while stalled != given:
                stalled = given
                await asyncio.sleep(0.1)
            assert stalled < 1500  # what the sockets between hold
            for _ in range(2999):
                await said(call)
            assert given == 3000
            call.cancel()

    asyncio.run(main())


def test_no_more_is_read_while_too_much_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "_MAX_OWED", 10)

    async def main() -> None:
        models = Models({"a": PLAIN, "b": PLAIN}, once)
        models.gates["first"] = asyncio.Event()
        async with edge(models) as setup:
            call = stream(setup)
            await ask(call, "a", "first")
            for i in range(50):
                await ask(call, "b", str(i))
            await until(lambda: len(models.seen) > 1)
            await asyncio.sleep(0.05)
            assert len(models.seen) <= 12
            models.gates["first"].set()
            assert [(await said(call))[1] for _ in range(51)] == ["first", *map(str, range(50))]
            call.cancel()

    asyncio.run(main())


def test_flows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "_MAX_FLOWS", 3)

    async def main() -> None:
        models = Models({"a": PLAIN}, once)
        async with edge(models) as setup:
            call = stream(setup)
            for i in range(1, 5):
                await ask(call, "a", str(i), parameters=sequence(i, start=True))
            got = [await said(call) for _ in range(4)]
            assert [id for _, id, _ in got] == ["1", "2", "3", "4"]
            assert "may have 3 models and sequences open at once" in got[3][2]
            await ask(call, "a", "5", parameters=sequence(1, end=True))
            assert (await said(call)) == ("a", "5", "")
            await until(lambda: models.open == 2)
            await ask(call, "a", "6", parameters=sequence(4, start=True))
            assert (await said(call)) == ("a", "6", "")
            call.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("opened", [False, True])
def test_a_backend_that_does_not_answer_in_time(opened: bool) -> None:
    """An idle stream is nobody's fault; one that owes an answer has its backend's time for it."""

    async def main() -> None:
        models = Models({"a": PLAIN}, once)
        ever = models.gates["never"] = asyncio.Event()

        async def impatient(request: Request) -> Reply:
            call = request.content
            assert isinstance(call, RpcCall)
            reply = await models(request)
            assert call.told is not None
            call.told(PLAIN, 0.1)
            if not opened:
                await ever.wait()
            return reply

        async with edge(impatient) as setup:
            call = stream(setup)
            if opened:
                await ask(call, "a", "1")
                assert await said(call) == ("a", "1", "")
                await asyncio.sleep(0.25)
                await ask(call, "a", "2")
                assert await said(call) == ("a", "2", "")
                assert len(models.calls) == 1
            await ask(call, "a", "never")
            assert await said(call) == ("", "never", "the backend did not answer within 0.1 s")
            call.cancel()

    asyncio.run(main())


def test_streams_that_are_cut_tell_what_they_owe() -> None:
    async def main() -> None:
        models = Models({"a": PLAIN, "b": PLAIN, "d": DECOUPLED}, once)
        models.gates["2"] = asyncio.Event()
        async with edge(models) as setup:
            call = stream(setup)
            await ask(call, "a", "1")
            assert await said(call) == ("a", "1", "")
            for model, id in [("a", "2"), ("b", "3"), ("d", "4")]:
                await ask(call, model, id)
            assert await said(call) == ("d", "4", "")
            await until(lambda: len(models.seen) == 4)
            setup.edge.cut(Unreachable("shutting down"))
            assert {await said(call) for _ in range(3)} == {("", id, "shutting down") for id in "234"}
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await said(call)
            assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.UNAVAILABLE, "shutting down")
            await until(lambda: models.open == 0)
            assert not setup.reported

    asyncio.run(main())


def test_a_caller_that_leaves_ends_all_of_its_flows() -> None:
    async def main() -> None:
        traits: dict[str, Trait | None] = {"a": PLAIN, "b": PLAIN, "d": DECOUPLED}
        models = Models(traits, once)
        models.gates = {id: asyncio.Event() for id in traits}
        async with edge(models) as setup:
            call = stream(setup)
            for model in traits:
                await ask(call, model, model)
            await until(lambda: len(models.seen) == 3)
            call.cancel()
            await until(lambda: models.open == 0)
            assert not setup.edge._streams
            assert not setup.reported

    asyncio.run(main())

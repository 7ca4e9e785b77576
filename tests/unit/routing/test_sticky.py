"""Calls of sequences through a balancer and through a dispatcher: to one replica, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from backends.endpoint import Endpoint
from backends.errors import BackendFailed, ConnectionLost, Failure, Rejected, SequenceLost, Unreachable
from backends.parameters import Sequence
from backends.request import Answer, Infer, Relay, Reply, Request, RpcCall, Service, Tensors, Trait, replace
from policies.spec import Batch
from routing.balancer import Balancer
from routing.dispatch import Dispatch
from routing.dispatcher import Dispatcher
from routing.fallback import Fallback
from routing.retry import RetryBudget
from routing.sequence import Sequences
from routing.sticky import Sticky
from tests.support.loop import run
from tests.support.strategies import call


class Server:
    """A client that records the sequences it was asked for; `failure` is raised for each call."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.asked: list[Any] = []
        self.cut: asyncio.Event | None = None

    async def __call__(self, request: Request, /) -> Reply:
        content = request.content
        if isinstance(content, RpcCall):
            assert content.sequence is not None
            self.asked.append(content.sequence.id)
            return Reply(Relay(200, (), self._chunks()))
        assert isinstance(content, Infer)
        self.asked.append(content.parameters.get("sequence_id"))
        if self.failure is not None:
            raise self.failure
        return Reply(Answer(Tensors.of(())))

    async def _chunks(self) -> AsyncIterator[bytes]:
        yield b"1"
        if self.cut is not None:
            await self.cut.wait()
            raise ConnectionLost("socket closed")

    async def unready(self, model: str, deadline: float, headers: Any) -> str:
        return ""

    async def trait(self, model: str, version: str, deadline: float, headers: Any) -> Trait:
        return Trait(stateful=True)

    def refresh(self) -> None: ...

    async def close(self) -> None: ...


class Rig:
    """Three servers behind a balancer and a dispatcher, which know of each other's sequences."""

    def __init__(self) -> None:
        now = asyncio.get_running_loop().time
        self.servers = [Server() for _ in range(3)]
        self.endpoints = [
            Endpoint(str(i), http=s, grpc=s, timeout=30.0, headers={}, now=now) for i, s in enumerate(self.servers)
        ]
        self.sequences = Sequences()
        budget = RetryBudget()
        sticky = Sticky(self.sequences, self.endpoints, budget, now)
        self.balancer = Balancer(self.endpoints, self.endpoints, Random(1), budget, sticky)
        self.dispatch = Dispatch(
            Dispatcher(Batch(slots=1), 3),
            tuple(self.endpoints),
            now,
            lambda: [i for i, endpoint in enumerate(self.endpoints) if endpoint.ready is False],
            budget,
            sticky=sticky,
        )

    def where(self, id: Any) -> list[int]:
        """The servers that were asked for a sequence."""
        return [i for i, server in enumerate(self.servers) if id in server.asked]

    @property
    def services(self) -> tuple[Service, Service]:
        return self.balancer, self.dispatch


def of(id: Any, *, start: bool = False, end: bool = False) -> Request:
    parameters = {"sequence_id": id, "sequence_start": start, "sequence_end": end}
    return Request(model="m", content=replace(call([1.0]), parameters=parameters))


def test_a_sequence_stays_on_one_replica_by_whatever_way_its_calls_come() -> None:
    async def main() -> None:
        rig = Rig()
        for id in (*range(1, 20), "a", "b"):
            for i in range(6):
                await rig.services[i % 2](of(id, start=i == 0, end=i == 5))
            assert len(rig.where(id)) == 1
        assert len(rig.sequences) == 0
        assert all(server.asked for server in rig.servers)

    run(main())


@pytest.mark.parametrize("none", [0, ""])
def test_no_sequence_goes_anywhere(none: Any) -> None:
    async def main() -> None:
        rig = Rig()
        for _ in range(30):
            await rig.balancer(of(none))
        assert len(rig.where(none)) > 1
        assert len(rig.sequences) == 0

    run(main())


@pytest.mark.parametrize("path", [0, 1])
@pytest.mark.parametrize("loss", [Unreachable("refused"), ConnectionLost("reset"), None])
def test_a_replica_that_is_lost_fails_its_sequences_until_they_begin_anew(path: int, loss: Failure | None) -> None:
    async def main() -> None:
        rig = Rig()
        service = rig.services[path]
        await service(of(5, start=True))
        (home,) = rig.where(5)
        rig.servers[home].failure = loss
        if loss is None:
            rig.endpoints[home].ready = False
        for _ in range(2):
            with pytest.raises(SequenceLost, match="begin anew"):
                await service(of(5))
        assert rig.where(5) == [home]
        rig.endpoints[home].ready = False
        await service(of(5, start=True))
        await service(of(5, end=True))
        assert len(rig.where(5)) == 2

    run(main())


@pytest.mark.parametrize("path", [0, 1])
def test_a_sequence_begins_elsewhere_where_its_first_call_was_never_executed(path: int) -> None:
    async def main() -> None:
        rig = Rig()
        for server in rig.servers[:2]:
            server.failure = Unreachable("refused")
        for id in range(1, 4):
            await rig.services[path](of(id, start=True))
            await rig.services[path](of(id, end=True))
            assert 2 in rig.where(id)

    run(main())


@pytest.mark.parametrize("path", [0, 1])
@pytest.mark.parametrize("failure", [Rejected("busy"), BackendFailed("wrong", 400)])
def test_a_refused_call_loses_nothing(path: int, failure: Failure) -> None:
    async def main() -> None:
        rig = Rig()
        service = rig.services[path]
        await service(of(5, start=True))
        (home,) = rig.where(5)
        rig.servers[home].failure = failure
        with pytest.raises(type(failure)):
            await service(of(5))
        rig.servers[home].failure = None
        await service(of(5))
        assert rig.where(5) == [home]

    run(main())


def test_a_stream_of_a_sequence_is_on_its_replica_and_loses_it_when_it_is_cut() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.balancer(of(5, start=True))
        (home,) = rig.where(5)
        cut = rig.servers[home].cut = asyncio.Event()

        async def nothing() -> AsyncIterator[bytes]:
            for _ in ():
                yield b""

        content = RpcCall("/S/ModelStreamInfer", nothing(), (), Sequence(5))
        reply = await rig.balancer(Request(model="m", content=content, stream=True))
        assert rig.where(5) == [home]
        assert isinstance(reply.body, Relay)
        assert not isinstance(reply.body.body, bytes)
        assert await anext(reply.body.body) == b"1"
        cut.set()
        with pytest.raises(ConnectionLost):
            await anext(reply.body.body)
        with pytest.raises(SequenceLost):
            await rig.balancer(of(5))

    run(main())


def test_a_call_waits_for_a_slot_of_its_own_replica_and_for_nobody_else() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.dispatch(of(5, start=True))
        (home,) = rig.where(5)
        dispatcher = rig.dispatch.dispatcher
        dispatcher.free[home] = 0
        waiting = asyncio.ensure_future(rig.dispatch(of(5)))
        for _ in range(4):
            await rig.dispatch(Request(model="m", content=call([1.0])))
        assert not waiting.done()
        assert None not in rig.servers[home].asked
        dispatcher.free[home] = 1
        await rig.dispatch(Request(model="m", content=call([1.0])))
        await waiting
        assert rig.where(5) == [home]

    run(main())


def test_a_sequence_has_no_fallback() -> None:
    async def main() -> None:
        async def fails(request: Request) -> Reply:
            raise BackendFailed("its own", 500)

        async def other(request: Request) -> Reply:
            return Reply(Answer(Tensors.of(())))

        service = Fallback(fails, other, "spare", asyncio.get_running_loop().time)
        assert (await service(Request(model="m", content=call([1.0])))).degraded
        with pytest.raises(BackendFailed):
            await service(of(5))

    run(main())

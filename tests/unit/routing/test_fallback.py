from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from backends.errors import (
    BackendFailed,
    BadReply,
    BadRequest,
    ConnectionLost,
    Expired,
    Failure,
    NotFound,
    Rejected,
    TooSlow,
    Unreachable,
)
from backends.request import Hop, HttpCall, Relay, Reply, Request, RpcCall
from cache.cached import Cached
from cache.store import MemoryStore
from gateway.metrics import Metrics
from gateway.respond import decision_headers
from routing.cascade import Cascade, Rung
from routing.fallback import Fallback
from tests.support.loop import run
from tests.support.services import Scripted, echo, refuse
from tests.support.strategies import call

ASKED = Request(model="m", content=call([1.0], [2.0]))


def failing(failure: Failure, seconds: float = 0.0) -> Scripted:
    return Scripted(refuse(lambda _: True, lambda: failure), seconds)


def fallback(inner: Scripted, other: Scripted) -> Fallback:
    return Fallback(inner, other, "spare", asyncio.get_running_loop().time)


OWN = [
    Unreachable("down"),
    Rejected("busy"),
    TooSlow("slow"),
    ConnectionLost("gone"),
    BadReply("nonsense"),
    BackendFailed("no", 500),
    BackendFailed("no", 13, grpc=True),
]
CALLERS = [BackendFailed("no", 400), BackendFailed("no", 3, grpc=True), BadRequest("no"), NotFound("no"), Expired("x")]


@pytest.mark.parametrize("failure", OWN)
def test_a_failure_of_the_routes_own_is_repaired_and_told(failure: Failure) -> None:
    async def main() -> None:
        other = Scripted()
        reply = await fallback(failing(failure), other)(ASKED)
        assert other.requests == [ASKED]
        assert reply.degraded == "fallback"
        assert reply.trail == (Hop("spare", (), endpoint="fake", reason="fallback"),)
        assert dict(decision_headers(reply))["headrace-degraded"] == "fallback"

    run(main())


@pytest.mark.parametrize("failure", CALLERS)
def test_a_fault_of_the_callers_is_not(failure: Failure) -> None:
    async def main() -> None:
        other = Scripted()
        with pytest.raises(type(failure)):
            await fallback(failing(failure), other)(ASKED)
        assert other.requests == []

    run(main())


def test_what_succeeds_is_left_as_it_is() -> None:
    async def main() -> None:
        other = Scripted()
        reply = await fallback(Scripted(), other)(ASKED)
        assert (reply.degraded, reply.trail, other.requests) == ("", echo(ASKED).trail, [])
        assert "headrace-degraded" not in dict(decision_headers(reply))

    run(main())


def test_where_both_fail_the_first_failure_is_told() -> None:
    async def main() -> None:
        first = TooSlow("the route's own")
        for second in (Unreachable("down"), BackendFailed("no", 400), Expired("backend")):
            with pytest.raises(TooSlow) as caught:
                await fallback(failing(first), failing(second))(ASKED)
            assert caught.value is first

    run(main())


@pytest.mark.parametrize(("deadline", "asked"), [(0.5, 0), (1.5, 1), (math.inf, 1)])
def test_who_cannot_wait_any_more_gets_no_other_answer(deadline: float, asked: int) -> None:
    async def main() -> None:
        other = Scripted()
        request = Request(model="m", content=call([1.0]), deadline=deadline)
        task = asyncio.ensure_future(fallback(failing(Unreachable("down"), seconds=1.0), other)(request))
        await asyncio.wait([task])
        assert isinstance(task.exception(), Unreachable) is not bool(asked)
        assert len(other.requests) == asked

    run(main())


async def messages() -> AsyncIterator[bytes]:
    yield b""


@pytest.mark.parametrize("failure", OWN)
def test_relayed_calls(failure: Failure) -> None:
    async def main() -> None:
        other = Scripted(lambda _: Reply(Relay(200, (), b"")))
        http = Request(model="m", content=HttpCall("GET", "/v2"))
        if isinstance(failure, Unreachable | Rejected):
            reply = await fallback(failing(failure), other)(http)
            assert (reply.degraded, reply.trail) == ("fallback", (Hop("spare", (), reason="fallback"),))
        else:
            with pytest.raises(type(failure)):
                await fallback(failing(failure), other)(http)
            assert other.requests == []
        other.requests.clear()
        with pytest.raises(type(failure)):
            await fallback(failing(failure), other)(Request(model="m", content=RpcCall("/s/m", messages())))
        assert other.requests == []

    run(main())


def test_a_degraded_answer_is_never_stored_and_is_counted() -> None:
    async def main() -> None:
        now = asyncio.get_running_loop().time
        inner = failing(Unreachable("down"))
        store = MemoryStore(100, 1 << 20, now)
        route = Cascade([Rung("own", Cached(inner, store, lambda: ("r",), 60.0), "", "", None)], cacheable=True)
        spare = Cascade([Rung("other", Scripted(), "", "", None)])
        metrics = Metrics()
        for _ in range(2):
            reply = await Fallback(route, spare, "spare", now)(ASKED)
            metrics.reply("r", reply)
            assert (reply.degraded, reply.cacheable, reply.trail[0].rows) == ("fallback", False, (0, 1))
            assert dict(decision_headers(reply))["headrace-tier"] == "spare=2"
        assert len(inner.requests) == 2
        inner.answer = echo
        reply = await Fallback(route, spare, "spare", now)(ASKED)
        assert (reply.degraded, reply.trail[0].tier, reply.trail[0].cached) == ("", "own", False)
        assert b'headrace_fallbacks_total{route="r"} 2.0' in metrics.text()

    run(main())

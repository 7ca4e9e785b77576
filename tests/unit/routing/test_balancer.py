from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from backends.endpoint import Endpoint
from backends.errors import BackendFailed, ConnectionLost, Expired, Failure, Rejected, TooSlow, Unreachable
from backends.outlier import FAILURES
from backends.request import Answer, HttpCall, Infer, Relay, Reply, Request, RpcCall, Tensors, Trait, replace
from routing.balancer import Balancer
from routing.retry import RetryBudget
from tests.support.loop import run, settle
from tests.support.strategies import call

ASKED = Request(model="m", content=call([1.0]))


class Server:
    """A client that answers after `seconds`, or fails with `failure`; `asked` counts its calls."""

    def __init__(self, failure: Failure | None = None, seconds: float = 0.0) -> None:
        self.failure = failure
        self.seconds = seconds
        self.asked = 0

    async def __call__(self, request: Request, /) -> Reply:
        self.asked += 1
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure
        infer = isinstance(request.content, Infer)
        return Reply(Answer(Tensors.of(())) if infer else Relay(200, (), b""))

    async def unready(self, model: str, deadline: float, headers: Any) -> str:
        return self.failure.message if self.failure is not None else ""

    async def trait(self, model: str, version: str, deadline: float, headers: Any) -> Trait:
        return Trait()

    def refresh(self) -> None: ...

    async def close(self) -> None: ...


def endpoint(server: Server, name: str, grpc: bool) -> Endpoint:
    return Endpoint(
        name,
        http=server,
        grpc=server if grpc else None,
        prefer_grpc=False,
        tentative=False,
        timeout=30.0,
        headers={},
        now=lambda: asyncio.get_running_loop().time(),
    )


def balanced(
    *servers: Server, seed: int = 1, budget: RetryBudget | None = None, grpc: bool = False
) -> tuple[Balancer, list[Endpoint]]:
    endpoints = [endpoint(server, str(i), grpc) for i, server in enumerate(servers)]
    return Balancer(endpoints, endpoints, Random(seed), budget or RetryBudget()), endpoints


def test_the_less_loaded_of_two() -> None:
    async def main() -> None:
        servers = Server(seconds=9.0), Server(seconds=1.0)
        balancer, endpoints = balanced(*servers)
        endpoints[0].in_flight = 3
        tasks = [asyncio.ensure_future(balancer(ASKED)) for _ in range(3)]
        await settle()
        assert [server.asked for server in servers] == [0, 3]
        await asyncio.gather(*tasks)

    run(main())


def test_the_most_loaded_of_many_is_never_chosen_and_the_rest_share() -> None:
    async def main() -> None:
        servers = [Server() for _ in range(5)]
        balancer, endpoints = balanced(*servers)
        endpoints[2].in_flight = 7
        for _ in range(400):
            await balancer(ASKED)
        counts = [server.asked for server in servers]
        assert counts[2] == 0
        assert all(count > 60 for i, count in enumerate(counts) if i != 2)

    run(main())


def test_equals_take_turns_by_chance() -> None:
    async def main() -> None:
        servers = Server(), Server()
        balancer, _ = balanced(*servers)
        for _ in range(200):
            await balancer(ASKED)
        assert all(60 < server.asked < 140 for server in servers)

    run(main())


def test_what_is_known_to_be_down_is_left_out_and_unknown_is_not_down() -> None:
    async def main() -> None:
        servers = Server(), Server(), Server()
        balancer, endpoints = balanced(*servers)
        endpoints[0].ready, endpoints[1].ready = False, True
        endpoints[1].in_flight = endpoints[2].in_flight = 50
        for _ in range(20):
            await balancer(ASKED)
        assert servers[0].asked == 0
        assert min(servers[1].asked, servers[2].asked) > 0

    run(main())


def test_who_fails_a_model_gets_other_models_and_that_one_only_where_nobody_else_is_up() -> None:
    async def main() -> None:
        broken, sound, down = Server(), Server(), Server()
        balancer, endpoints = balanced(broken, sound, down)
        endpoints[2].ready = False
        for _ in range(FAILURES):
            endpoints[0].outliers.failed("m", 0.0, "no")
        for _ in range(20):
            await balancer(ASKED)
        assert (broken.asked, sound.asked, down.asked) == (0, 20, 0)
        for _ in range(40):
            await balancer(replace(ASKED, model="other"))
        assert broken.asked >= 5
        endpoints[1].ready = False
        asked = broken.asked
        await balancer(ASKED)
        assert (broken.asked, down.asked) == (asked + 1, 0)

    run(main())


def test_where_all_are_down_the_least_loaded_is_tried() -> None:
    async def main() -> None:
        servers = Server(), Server(), Server()
        balancer, endpoints = balanced(*servers)
        for each, load in zip(endpoints, (3, 1, 2), strict=True):
            each.ready, each.in_flight = False, load
        await balancer(ASKED)
        assert [server.asked for server in servers] == [0, 1, 0]

    run(main())


# What was never executed


@pytest.mark.parametrize("failure", [Unreachable("refused"), Rejected("queue full")])
def test_what_was_never_executed_goes_to_another_once_each(failure: Failure) -> None:
    async def main() -> None:
        servers = Server(failure), Server(failure), Server()
        for _ in range(12):
            balancer, _ = balanced(*servers, seed=5)
            reply = await balancer(ASKED)
            assert reply.trail[0].endpoint == "2"
        assert servers[2].asked == 12
        spent = [0]
        balancer, endpoints = balanced(*servers[:2], budget=RetryBudget(lambda: spent.append(1)))
        with pytest.raises(type(failure)):
            await balancer(ASKED)
        assert sum(spent) == 1
        assert all(each.in_flight == 0 for each in endpoints)

    run(main())


def test_the_trail_counts_retries() -> None:
    async def main() -> None:
        balancer, endpoints = balanced(Server(Unreachable("refused")), Server())
        endpoints[1].in_flight = 1  # so that the other one is chosen first
        assert (await balancer(ASKED)).trail[0].retries == 1
        assert (await balancer(ASKED)).trail[0].retries == 0  # it is known to be down now
        assert endpoints[0].ready is False

    run(main())


def test_an_endpoint_that_is_known_to_be_down_gets_no_retry() -> None:
    async def main() -> None:
        servers = Server(Rejected("queue full")), Server()
        balancer, endpoints = balanced(*servers)
        endpoints[1].ready = False
        with pytest.raises(Rejected):
            await balancer(ASKED)
        assert servers[1].asked == 0

    run(main())


@pytest.mark.parametrize("failure", [ConnectionLost("gone"), TooSlow("slow"), BackendFailed("no", 500)])
def test_what_may_have_been_executed_is_not_sent_again(failure: Failure) -> None:
    async def main() -> None:
        servers = Server(failure), Server(failure)
        balancer, _ = balanced(*servers)
        with pytest.raises(type(failure)):
            await balancer(ASKED)
        assert servers[0].asked + servers[1].asked == 1

    run(main())


def test_a_grpc_relay_is_never_sent_again_and_an_http_relay_is() -> None:
    async def messages() -> AsyncIterator[bytes]:
        yield b""

    async def main() -> None:
        servers = Server(Unreachable("refused")), Server()
        for content, asked in ((RpcCall("/s/m", messages()), 0), (HttpCall("GET", "/v2"), 1)):
            balancer, endpoints = balanced(*servers, grpc=True)
            endpoints[1].in_flight = 1
            request = Request(model="m", content=content)
            if asked:
                await balancer(request)
            else:
                with pytest.raises(Unreachable):
                    await balancer(request)
            assert servers[1].asked == asked

    run(main())


def test_no_retry_beyond_the_budget_or_the_deadline() -> None:
    async def main() -> None:
        budget = RetryBudget()
        while budget.take():
            pass
        servers = Server(Rejected("queue full")), Server()
        balancer, endpoints = balanced(*servers, budget=budget)
        endpoints[1].in_flight = 1
        for _ in range(4):
            with pytest.raises(Rejected):
                await balancer(ASKED)
        assert (await balancer(ASKED)).trail[0].retries == 1  # five calls have earned one
        slow = Server(Unreachable("refused"), seconds=2.0), Server()
        balancer, endpoints = balanced(*slow)
        endpoints[1].in_flight = 1
        with pytest.raises(Expired):
            await balancer(Request(model="m", content=call([1.0]), deadline=1.0))
        assert slow[1].asked == 0

    run(main())

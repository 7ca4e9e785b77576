from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from backends.endpoint import Endpoint
from backends.errors import Failure
from backends.request import Answer, Reply, Request, Tensors
from routing.balancer import Balancer
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
        return Reply(Answer(Tensors.of(())))

    async def unready(self, model: str, deadline: float, headers: Any) -> str:
        return self.failure.message if self.failure is not None else ""

    async def close(self) -> None: ...


def endpoint(server: Server, name: str = "e") -> Endpoint:
    return Endpoint(
        name,
        http=server,
        grpc=None,
        prefer_grpc=False,
        tentative=False,
        timeout=30.0,
        headers={},
        now=lambda: asyncio.get_running_loop().time(),
    )


def balanced(*servers: Server, seed: int = 1) -> tuple[Balancer, list[Endpoint]]:
    endpoints = [endpoint(server, str(i)) for i, server in enumerate(servers)]
    return Balancer(endpoints, endpoints, Random(seed)), endpoints


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


def test_where_all_are_down_the_least_loaded_is_tried() -> None:
    async def main() -> None:
        servers = Server(), Server(), Server()
        balancer, endpoints = balanced(*servers)
        for each, load in zip(endpoints, (3, 1, 2), strict=True):
            each.ready, each.in_flight = False, load
        await balancer(ASKED)
        assert [server.asked for server in servers] == [0, 1, 0]

    run(main())

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from backends.endpoint import Client, Endpoint
from backends.errors import ConnectionLost, Failure, Rejected, Unreachable
from backends.request import Answer, HttpCall, Relay, Reply, Request, Tensors, Trait
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

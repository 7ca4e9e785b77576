"""Readiness as it is told: one fact per change of state, whoever found it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import pytest

from backends.endpoint import Endpoint
from backends.errors import Unreachable
from backends.request import Request
from gateway.probe import Probing
from tests.support.gateway import FakeServer
from tests.support.loop import run
from tests.support.strategies import call


class Hanging(FakeServer):
    """Never says whether it is ready."""

    async def unready(self, model: str, deadline: float, headers: Mapping[str, str]) -> str:
        await asyncio.sleep(deadline - asyncio.get_running_loop().time())
        return "no answer in time"


def endpoint(name: str, server: FakeServer) -> Endpoint:
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


def probed(caplog: pytest.LogCaptureFixture, *endpoints: Endpoint, test: Callable[[], Awaitable[None]]) -> list[str]:
    """What was told, as `name: message`, while `test` ran."""

    async def main() -> None:
        probing = Probing(lambda: [("b", each) for each in endpoints])
        await probing.start()
        await test()
        await probing.close()

    with caplog.at_level(logging.INFO, "headrace.backends"):
        run(main())
    return [f"{record.fields['endpoint']}: {record.message}" for record in caplog.records]  # type: ignore[attr-defined]


def test_a_change_is_told_once_whoever_found_it(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer({})
    replica = endpoint("e", server)

    async def test() -> None:
        await asyncio.sleep(2.5)
        server.failure = Unreachable("connection refused")
        for _ in range(3):
            with pytest.raises(Unreachable):
                await replica(Request(model="m", content=call([1.0])))
        assert replica.ready is False
        await asyncio.sleep(1.0)
        assert replica.ready
        server.is_ready = False
        await asyncio.sleep(3.0)

    told = probed(caplog, replica, test=test)
    assert told == ["e: endpoint ready", "e: endpoint not ready", "e: endpoint ready", "e: endpoint not ready"]
    assert caplog.records[1].fields["reason"] == "connection refused"  # type: ignore[attr-defined]
    assert caplog.records[3].fields["reason"] == "it said no"  # type: ignore[attr-defined]
    assert server.refreshed == 7, "every round has it follow its name"


def test_one_that_hangs_does_not_keep_another_from_being_found_again(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer({})
    well, hangs = endpoint("well", server), endpoint("hangs", Hanging({}))

    async def test() -> None:
        for _ in range(4):
            server.is_ready = not server.is_ready
            await asyncio.sleep(1.01)
            assert well.ready is server.is_ready
        assert hangs.ready is False

    told = probed(caplog, well, hangs, test=test)
    assert told.count("hangs: endpoint not ready") == 1
    assert told.count("well: endpoint ready") == 3

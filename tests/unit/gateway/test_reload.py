"""Another policy for a running gateway: all of it, or nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from backends.request import Reply, Request
from gateway.metrics import Metrics
from gateway.reload import Reload, Snapshot
from gateway.stack import Things, Tools, build
from gateway.telemetry import Tracing
from policies import Policy, PolicyError, parse
from tests.support.gateway import FakeServer, Rig, double, fp32

BASE = """
backends:
  a: {endpoints: [http://127.0.0.1:1], model: twice, batch: {max_rows: 4}}
routes:
  r: {backend: a}
  c: {backend: a, cache: {ttl: 1h}}
"""
EDITED = BASE.replace("max_rows: 4", "max_rows: 8")
MOVED = BASE.replace("127.0.0.1:1]", "127.0.0.1:2]")


class Harness(Rig):
    """A rig whose policy can be replaced."""

    def __init__(self) -> None:
        super().__init__(BASE, FakeServer({"twice": double}), {"http://127.0.0.1:2": FakeServer({"twice": double})})
        tracing = Tracing(per_second=0, keep=1, now=time.monotonic)
        tools = Tools(time.monotonic, tracing, Metrics(), self._connect, random.Random(1))

        def make(policy: Policy, things: Things) -> Snapshot:
            return Snapshot(policy, build(policy, things, tools), things)

        self.reload = Reload(make(self.policy, Things()), make)

    @property
    def snapshot(self) -> Snapshot:
        return self.reload.current


def running(test: Callable[[Harness], Any]) -> None:
    async def run() -> None:
        harness = Harness()
        try:
            await test(harness)
        finally:
            await harness.reload.close()

    asyncio.run(run())


def policy(text: str) -> Policy:
    return parse(text, "policy.yaml", {})


def test_what_is_equal_survives_and_the_rest_is_new() -> None:
    async def test(h: Harness) -> None:
        before = h.snapshot.things
        assert await h.reload.apply(policy(EDITED))
        after = h.snapshot.things
        assert h.snapshot.policy == policy(EDITED)
        assert after.endpoints["a"][1] is before.endpoints["a"][1]
        assert after.dispatchers["a"][1] is not before.dispatchers["a"][1]
        assert after.stores == before.stores
        assert after.in_flight is before.in_flight

    running(test)


def test_another_bound_on_replies_makes_clients_anew() -> None:
    async def test(h: Harness) -> None:
        before = h.snapshot.things
        assert await h.reload.apply(policy(BASE + "limits: {reply_bytes: 1MiB}"))
        assert h.snapshot.policy.backends["a"].reply_bytes == 2**20
        assert h.snapshot.things.endpoints["a"][1] is not before.endpoints["a"][1]

    running(test)


def test_messages_larger_than_the_grpc_port_takes_need_a_restart() -> None:
    async def test(h: Harness) -> None:
        with pytest.raises(PolicyError, match=r"limits\.body_bytes: the gRPC port .* at most 67108864 bytes"):
            await h.reload.apply(policy(BASE + "limits: {body_bytes: 65MiB}"))
        assert await h.reload.apply(policy(BASE + "limits: {body_bytes: 1MiB}"))
        assert await h.reload.apply(policy(BASE + "limits: {body_bytes: 64MiB}"))

    running(test)


def test_the_same_policy_again_changes_nothing() -> None:
    async def test(h: Harness) -> None:
        before = h.snapshot
        assert not await h.reload.apply(policy(BASE))
        assert h.snapshot is before
        assert not h.reload.history

    running(test)


def test_an_endpoint_that_is_new_and_not_ready_refuses_the_policy_unless_forced() -> None:
    async def test(h: Harness) -> None:
        h.others["http://127.0.0.1:2"].is_ready = False
        before = h.snapshot
        with pytest.raises(PolicyError, match=r"backends\.a\.endpoints: http://127\.0\.0\.1:2 is not ready"):
            await h.reload.apply(policy(MOVED))
        assert h.snapshot is before
        assert "not ready" in h.reload.refused[0]
        assert await h.reload.apply(policy(MOVED), force=True)
        assert h.reload.refused == ()

    running(test)


def test_a_replica_that_is_down_refuses_no_policy_that_changes_how_it_is_called() -> None:
    async def test(h: Harness) -> None:
        (endpoint,) = h.snapshot.things.endpoints["a"][1]
        h.server.is_ready = False
        await endpoint.probe(1)
        assert await h.reload.apply(policy(BASE.replace("model:", "timeout: 7s, model:")))
        assert h.snapshot.things.endpoints["a"][1][0] is not endpoint
        # One that was ready must not get worse.
        h.server.is_ready = True
        assert await h.reload.apply(policy(BASE))
        h.server.is_ready = False
        with pytest.raises(PolicyError, match="not ready"):
            await h.reload.apply(policy(BASE.replace("model:", "timeout: 7s, model:")))

    running(test)


def test_listeners_cannot_move() -> None:
    async def test(h: Harness) -> None:
        with pytest.raises(PolicyError, match="listen"):
            await h.reload.apply(policy(BASE + "listen: {http: 127.0.0.1:9999}\n"))

    running(test)


def test_rollback_goes_back_one_step_at_a_time() -> None:
    async def test(h: Harness) -> None:
        with pytest.raises(PolicyError, match="no earlier policy"):
            await h.reload.rollback()
        await h.reload.apply(policy(EDITED))
        await h.reload.apply(policy(MOVED))
        assert (await h.reload.rollback()) == policy(EDITED)
        assert (await h.reload.rollback()) == policy(BASE)
        assert h.snapshot.policy == policy(BASE)
        assert not h.reload.history

    running(test)


def test_a_request_keeps_its_snapshot_and_its_endpoint_is_closed_after_it() -> None:
    async def test(h: Harness) -> None:
        gate, closed = asyncio.Event(), asyncio.Event()

        class Slow(FakeServer):
            async def __call__(self, request: Request, /) -> Reply:
                await gate.wait()
                return await super().__call__(request)

            async def close(self) -> None:
                closed.set()

        h.server.__class__ = Slow
        old = h.snapshot
        from backends.request import Infer, Tensors

        call = Request(model="r", content=Infer(Tensors.of((fp32("X", [[1.0]]),))))
        pending = asyncio.create_task(old.services["http"](call))
        await asyncio.sleep(0.01)
        await h.reload.apply(policy(MOVED))
        await asyncio.sleep(0.25)
        assert not closed.is_set()
        gate.set()
        reply = await pending
        assert reply.policy == old.policy.version
        await asyncio.wait_for(closed.wait(), 1)

    running(test)


def test_what_a_request_holds_outlives_any_number_of_edits() -> None:
    """The second edit drops what the first one kept: a request that began before both still has it."""

    async def test(h: Harness) -> None:
        closed: list[str] = []

        async def close() -> None:
            closed.append("first")

        h.server.close = close  # type: ignore[method-assign]
        old = h.snapshot
        old.active += 1  # as a request does
        await h.reload.apply(policy(EDITED))
        await h.reload.apply(policy(MOVED))
        await asyncio.sleep(0.25)
        assert not closed
        old.active -= 1
        await asyncio.sleep(0.25)
        assert closed == ["first"]

    running(test)


def test_a_rollback_while_a_policy_is_probed_takes_that_one_back() -> None:
    async def test(h: Harness) -> None:
        await h.reload.apply(policy(EDITED))
        asked, go = asyncio.Event(), asyncio.Event()

        async def unready(*_: object) -> str:
            asked.set()
            await go.wait()
            return ""

        h.others["http://127.0.0.1:2"].unready = unready  # type: ignore[method-assign]
        applying = asyncio.create_task(h.reload.apply(policy(MOVED)))
        await asked.wait()
        rolling = asyncio.create_task(h.reload.rollback())
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(applying, rolling)
        assert h.snapshot.policy == policy(EDITED)
        assert list(h.reload.history) == [policy(BASE)]

    running(test)

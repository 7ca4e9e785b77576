"""Dividing a policy between workers, and reserving their ports."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import socket
from contextlib import ExitStack

import pytest

from gateway.app import Gateway
from gateway.sockets import bound
from gateway.workers import Worker, _Supervisor, reserve, scarce, share
from policies import Policy, parse
from policies.spec import Address, Batch, Listen

POLICY = """
backends:
  a: {endpoints: [http://127.0.0.1:1], model: m, batch: {max_rows: 8, slots: 5, queue_rows: 100}}
  b: {endpoints: [http://127.0.0.1:1], model: n, batch: {max_rows: 64, slots: 1, queue_rows: 64}}
  c: {endpoints: [http://127.0.0.1:1]}
routes:
  r: {backend: a}
  s: {backend: b}
  t: {backend: c}
limits: {in_flight: 101}
telemetry: {traces: {per_second: 9}}
"""


def policy(text: str = POLICY) -> Policy:
    return parse(text, "policy.yaml", {})


def batch(policy: Policy, name: str) -> Batch:
    found = policy.backends[name].batch
    assert found is not None
    return found


def test_one_worker_has_the_whole_policy() -> None:
    whole = policy()
    assert share(whole, 0, 1) is whole


def test_parts_sum_to_the_whole_and_remainders_go_to_the_lower_numbers() -> None:
    shares = [share(policy(), index, 3) for index in range(3)]
    assert [batch(part, "a").slots for part in shares] == [2, 2, 1]
    assert [batch(part, "a").queue_rows for part in shares] == [34, 33, 33]
    assert [part.limits.in_flight for part in shares] == [34, 34, 33]
    assert [part.telemetry.traces_per_second for part in shares] == [3.0] * 3


def test_every_worker_has_a_slot_and_a_queue_that_holds_a_full_batch() -> None:
    for index in range(4):
        part = batch(share(policy(), index, 4), "b")
        assert (part.slots, part.queue_rows) == (1, 64)
    assert scarce(policy(), 4) == {"b"}
    assert scarce(policy(), 6) == {"a", "b"}
    assert scarce(policy(), 1) == set()


def test_nothing_else_is_changed_and_equal_policies_have_equal_shares() -> None:
    part, again = share(policy(), 1, 2), share(policy(POLICY), 1, 2)
    assert part == again
    assert part.backends["c"] == policy().backends["c"]
    assert (part.version, part.routes, part.listen) == (policy().version, policy().routes, policy().listen)


def test_a_worker_shows_the_whole_policy_and_keeps_what_is_equal_over_a_reload() -> None:
    async def run() -> None:
        made = Gateway(policy(), worker=Worker(index=1, count=2))
        things = made.reload.current.things
        assert things.dispatchers["a"][1].dispatcher.limits.slots == 2
        assert await made.apply(policy(POLICY + "  # said otherwise\n"), force=True)
        after = made.reload.current.things
        assert made.policy.backends == policy().backends
        assert after.endpoints["a"][1] is things.endpoints["a"][1]
        assert after.dispatchers["a"][1] is things.dispatchers["a"][1]
        assert await made.apply(policy(POLICY.replace("slots: 5", "slots: 6")), force=True)
        assert made.reload.current.things.dispatchers["a"][1].dispatcher.limits.slots == 3
        await made.rollback()
        assert made.reload.current.things.dispatchers["a"][1].dispatcher.limits.slots == 2
        await made.close()

    asyncio.run(run())


def supervisor(monkeypatch: pytest.MonkeyPatch, error: str = "fork") -> _Supervisor:
    """One of a system that has no process (or no pipe) to give at the moment."""

    def nothing_left(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    made = _Supervisor(2, Worker(count=2), lambda _: None, {signal.SIGCHLD}, set(), 25.0, lambda: 100.0)
    monkeypatch.setattr(f"gateway.workers.os.{error}", nothing_left)
    return made


@pytest.mark.parametrize("call", ["fork", "pipe"])
def test_a_worker_that_cannot_be_started_again_is_tried_later_and_later(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = supervisor(monkeypatch, call)
    place, open_before = made._places[1], len(os.listdir("/proc/self/fd"))
    place.lives, pauses = 1, []
    for _ in range(3):
        made._start(place)
        pauses.append(place.due - 100.0)
        assert (place.pid, made._until) == (0, math.inf)
    assert pauses == pytest.approx([0.1, 0.2, 0.4])
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert "worker could not be started" in caplog.text


def test_workers_that_cannot_be_started_at_all_end_the_command_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        supervisor(monkeypatch).run()


def listening(address: Address | None) -> socket.socket:
    assert address is not None
    made = bound(address, shared=True)
    made.listen()
    return made


ONE = Listen(Address("127.0.0.1", 0), None, None, Address("127.0.0.1", 0), compat="triton")


def test_port_0_becomes_a_real_port_that_workers_share_and_nobody_else_gets() -> None:
    with ExitStack() as held:
        real = reserve(ONE, held)
        assert real.http is not None
        assert real.http.port
        assert (real.grpc, real.compat) == (None, "triton")
        assert real.http != real.admin
        with listening(real.http), listening(real.http), pytest.raises(OSError, match="listener 'http'"):
            reserve(real, held)


def test_a_taken_port_is_told_with_its_listener_and_address() -> None:
    with ExitStack() as held, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(OSError, match=f"listener 'admin': cannot listen on {address}"):
            reserve(Listen(None, None, None, address), held)

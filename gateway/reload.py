"""The policy in force, and how another one takes its place.

Theory of operation. A snapshot is a policy and everything that was built for it. Another policy is built beside it, out
of new parts and of those whose spec is equal; endpoints that are new must say that they are ready, but for one that
takes the place of another which is not: a replica that is down keeps no certificate from being renewed. Only then is
it put in force, by one assignment. On any problem the old one stays as it is and the reasons are kept, all of them. A
request holds the snapshot that it began with, to the end; what an old snapshot used is closed once neither the one in
force nor one that a request still holds has it.
A cache in Redis is asked nothing beforehand: without it the gateway serves as well, only slower.

Deliberately not here: listeners, which a process opens once. A policy that moves one is refused; the certificates that
they show may change, and no rollback brings an old one back.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from backends.endpoint import Endpoint
from backends.request import Service
from gateway.stack import Things
from policies import Policy, PolicyError, Problem

_log = logging.getLogger("headrace.policy")
# Policies that can be rolled back to.
_HISTORY = 10
# A new endpoint that does not say so by then is not ready; one in this process loads its model meanwhile.
_PROBE_SECONDS = 2.0
_LOAD_SECONDS = 60.0
# How often a retired snapshot is looked at; nothing waits for it.
_RETIRE_SECONDS = 0.1


class Closable(Protocol):
    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Snapshot:
    """One policy and what was built for it, as a service for each protocol. `active` requests hold it."""

    policy: Policy
    services: dict[str, Service]
    things: Things
    active: int = field(default=0)


class Reload:
    """`current` is the snapshot in force; `refused` says why the last attempt was not taken, and is empty if it was."""

    def __init__(self, first: Snapshot, make: Callable[[Policy, Things], Snapshot]) -> None:
        self.current = first
        self.refused: tuple[str, ...] = ()
        self.history: deque[Policy] = deque(maxlen=_HISTORY)
        self._make = make
        # gRPC's own bound on a message is fixed when its port is opened: with the first policy's.
        self._most = first.policy.limits.body_bytes if first.policy.listen.grpc is not None else math.inf
        self._lock = asyncio.Lock()
        self._living: list[Snapshot] = []  # those not in force any more, which requests still hold
        self._retiring: set[asyncio.Task[None]] = set()

    async def apply(self, policy: Policy, *, force: bool = False) -> bool:
        """Puts `policy` in force; False where it is in force already.

        Raises PolicyError where it cannot be: then nothing has changed. `force` takes it although new endpoints are
        not ready.
        """
        async with self._lock:
            before = self.current.policy
            changed = await self._apply(policy, force=force)
            if changed and replace(before, listen=policy.listen) != policy:
                self.history.append(before)
            return changed

    async def rollback(self) -> Policy:
        """Puts the policy in force that was before this one. Raises PolicyError where there is none."""
        async with self._lock:
            if not self.history:
                raise PolicyError([Problem("rollback", 0, "", "there is no earlier policy in this process")])
            before = replace(self.history[-1], listen=self.current.policy.listen)
            await self._apply(before, force=True)
            self.history.pop()
            return before

    def refuse(self, error: PolicyError) -> None:
        """Keeps the reasons of a policy that is not taken."""
        self.refused = tuple(map(str, error.problems))
        _log.error("policy refused", extra={"fields": {"problems": " | ".join(self.refused)}})

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        for snapshot in self._living:
            await _close(snapshot.things.held_beyond(self.current.things))

    async def _apply(self, policy: Policy, *, force: bool) -> bool:
        if policy == self.current.policy:
            self.refused = ()
            return False
        try:
            made = await self._built(policy, force=force)
        except PolicyError as error:
            self.refuse(error)
            raise
        old, self.current = self.current, made
        self.refused = ()
        self._retire(old)
        _log.info("policy in force", extra={"fields": {"policy": policy.version, "before": old.policy.version}})
        return True

    async def _built(self, policy: Policy, *, force: bool) -> Snapshot:
        now = self.current
        if policy.listen.opened != now.policy.listen.opened:
            wrong = "the listeners of a running gateway cannot change"
            raise PolicyError([Problem("policy", 0, "listen", wrong, "restart it, or leave `listen` as it was")])
        if policy.limits.body_bytes > self._most:
            wrong = f"the gRPC port of a running gateway takes messages of at most {self._most} bytes"
            raise PolicyError([Problem("policy", 0, "limits.body_bytes", wrong, "restart it, or ask for no more")])
        made = self._make(policy, now.things.fork())
        fresh = made.things.endpoints_beyond(now.things)
        if not force:
            try:
                ready = await asyncio.gather(*(endpoint.probe(_patience(endpoint)) for _, endpoint in fresh))
                down = {(name, e.name) for name, e in now.things.all_endpoints() if e.ready is False}
                pairs = [(name, endpoint) for (name, endpoint), yes in zip(fresh, ready, strict=True) if not yes]
                if problems := [_unready(name, e) for name, e in pairs if (name, e.name) not in down]:
                    raise PolicyError(problems)
            except BaseException:
                await _close(made.things.held_beyond(now.things))
                raise
        return made

    def _retire(self, old: Snapshot) -> None:
        self._living.append(old)
        task = asyncio.get_running_loop().create_task(self._after_its_last_request(old))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _after_its_last_request(self, old: Snapshot) -> None:
        """Closes what only `old` used, once no request has it: neither the one in force, nor one that still retires."""
        gone: list[Closable] = []
        try:
            while old.active:  # noqa: ASYNC110
                await asyncio.sleep(_RETIRE_SECONDS)
            self._living.remove(old)
            kept = {id(each) for snapshot in (self.current, *self._living) for each in snapshot.things.held()}
            gone += [each for each in old.things.held() if id(each) not in kept]
            # A stream outlasts the call that began it.
            while any(isinstance(each, Endpoint) and each.in_flight for each in gone):  # noqa: ASYNC110
                await asyncio.sleep(_RETIRE_SECONDS)
        finally:
            await _close(gone)


def _patience(endpoint: Endpoint) -> float:
    return _LOAD_SECONDS if endpoint.protocol == "local" else _PROBE_SECONDS


def _unready(backend: str, endpoint: Endpoint) -> Problem:
    key = "local" if endpoint.protocol == "local" else "endpoints"
    return Problem("policy", 0, f"backends.{backend}.{key}", f"{endpoint.name} is not ready: {endpoint.reason}")


async def _close(these: Sequence[Closable]) -> None:
    await asyncio.gather(*(each.close() for each in these))

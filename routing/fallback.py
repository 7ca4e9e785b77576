"""Fallback: a second service that answers a whole request where the first one fails for reasons of its own.

Theory of operation. It stands outside of everything that a route does, its cache included, so that what it answers is
marked as degraded and is never stored as the route's own answer. The caller's own faults, and its deadline, are not
repaired. A relayed HTTP call falls back only where it was never executed (`routing.retry`), for nobody knows what it
may have changed; a relayed gRPC call never does, for its messages may have been read, nor does one of a stateful
sequence, whose state is not elsewhere. Where both fail, it is the first failure that the caller is told: it says what
is wrong with the route.
"""

from __future__ import annotations

from collections.abc import Callable

from backends.errors import SERVER_FAILURES, Failure, own_fault
from backends.request import Hop, HttpCall, Infer, Reply, Request, Service, replace, sequence
from routing.retry import NEVER_EXECUTED


class Fallback:
    """`inner`, or else `other`, whose part of the trail is named `name`."""

    def __init__(self, inner: Service, other: Service, name: str, now: Callable[[], float]) -> None:
        self._inner = inner
        self._other = other
        self._name = name
        self._now = now

    async def __call__(self, request: Request, /) -> Reply:
        try:
            return await self._inner(request)
        except SERVER_FAILURES as failure:
            if not _repairable(request, failure) or request.deadline <= self._now():
                raise
            try:
                reply = await self._other(request)
            except Failure:
                raise failure from None
        hops = reply.trail or (Hop("", ()),)
        trail = tuple(replace(hop, tier=self._name, reason="fallback") for hop in hops)
        return replace(reply, trail=trail, degraded="fallback")


def _repairable(request: Request, failure: Failure) -> bool:
    if isinstance(request.content, Infer):
        return own_fault(failure) and sequence(request) is None
    return isinstance(request.content, HttpCall) and isinstance(failure, NEVER_EXECUTED)

"""Balancer: the less loaded of two replicas that were drawn by lot, by our own calls in flight.

Theory of operation. Power of two choices (Mitzenmacher 2001): of two endpoints drawn at random the one with fewer calls
in flight answers. That is nearly as even as looking at all of them, and several gateways that choose by the same rule
do not fall upon the same endpoint together. Endpoints that are known to be down (`ready is False`) are not drawn; where
all are, the least loaded is tried all the same, for what is known may be a second old. One that has failed the model
again and again (`backends.outlier`) is drawn only where no other is left that is up. One endpoint costs nothing.

What an endpoint never executed goes to another one that is not known to be down, once to each, as long as the budget
(`routing.retry`) pays for it. What comes of a reply later, a stream that is cut, is its reader's. A call of a stateful
sequence goes to the replica that the sequence runs on (`routing.sticky`), where there is more than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from backends.endpoint import Endpoint
from backends.request import Reply, Request, RpcCall, Service, replace, sequence
from routing.retry import NEVER_EXECUTED, RetryBudget
from routing.sticky import Sticky


class Balancer:
    """Answers through `services[i]`, where `endpoints[i]` is the one that was chosen.

    `sticky` chooses it for calls of stateful sequences; without it any may get them.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        services: Sequence[Service],
        chance: Random,
        budget: RetryBudget,
        sticky: Sticky | None = None,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._services = tuple(services)
        self._chance = chance
        self._budget = budget
        self._sticky = sticky

    async def __call__(self, request: Request, /) -> Reply:
        if len(self._services) == 1:
            return await self._services[0](request)
        self._budget.earn()
        if self._sticky is not None and (running := sequence(request)) is not None:
            return await self._sticky(request, running, lambda i: self._services[i](request))
        left = set(range(len(self._services)))
        chosen = self._choice(request.model)
        while True:
            left.discard(chosen)
            try:
                reply = await self._services[chosen](request)
            except NEVER_EXECUTED:
                again = None if isinstance(request.content, RpcCall) else self._drawn(left, request.model)
                if again is None or not self._budget.take():
                    raise
                chosen = again
                continue
            retries = len(self._services) - len(left) - 1
            return _retried(reply, retries) if retries else reply

    def _choice(self, model: str) -> int:
        endpoints = self._endpoints
        every = range(len(endpoints))
        drawn = self._drawn(every, model)
        if drawn is not None:
            return drawn
        up = [i for i in every if endpoints[i].ready is not False]
        return min(up or every, key=lambda i: endpoints[i].in_flight)

    def _drawn(self, among: Iterable[int], model: str) -> int | None:
        """One of those that are neither known to be down nor avoided for `model`; None where there is none."""
        endpoints = self._endpoints
        drawn = [i for i in among if endpoints[i].ready is not False and not endpoints[i].avoids(model)]
        if len(drawn) > 1:
            drawn = self._chance.sample(drawn, 2)
        return min(drawn, key=lambda i: endpoints[i].in_flight, default=None)


def _retried(reply: Reply, retries: int) -> Reply:
    return replace(reply, trail=tuple(replace(hop, retries=retries) for hop in reply.trail))

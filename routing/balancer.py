"""Balancer: the less loaded of two replicas that were drawn by lot, by our own calls in flight.

Theory of operation. Power of two choices (Mitzenmacher 2001): of two endpoints drawn at random the one with fewer calls
in flight answers. That is nearly as even as looking at all of them, and several gateways that choose by the same rule
do not fall upon the same endpoint together. Endpoints that are known to be down (`ready is False`) are not drawn; where
all are, the least loaded is tried all the same, for what is known may be a second old. One endpoint costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from backends.endpoint import Endpoint
from backends.request import Reply, Request, Service


class Balancer:
    """Answers through `services[i]`, where `endpoints[i]` is the one that was chosen."""

    def __init__(self, endpoints: Sequence[Endpoint], services: Sequence[Service], chance: Random) -> None:
        self._endpoints = tuple(endpoints)
        self._services = tuple(services)
        self._chance = chance

    async def __call__(self, request: Request, /) -> Reply:
        if len(self._services) == 1:
            return await self._services[0](request)
        return await self._services[self._choice()](request)

    def _choice(self) -> int:
        endpoints = self._endpoints
        drawn = [i for i, endpoint in enumerate(endpoints) if endpoint.ready is not False]
        if len(drawn) > 1:
            drawn = self._chance.sample(drawn, 2)
        return min(drawn or range(len(endpoints)), key=lambda i: endpoints[i].in_flight)

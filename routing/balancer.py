"""Balancer: the less loaded of the replicas, by our own calls in the air; replicas that say they are not ready last."""

from __future__ import annotations

from collections.abc import Sequence

from backends.endpoint import Endpoint
from backends.request import Reply, Request, Service


class Balancer:
    """Answers through `services[i]`, where `endpoints[i]` is the least loaded. Ties go round."""

    def __init__(self, endpoints: Sequence[Endpoint], services: Sequence[Service]) -> None:
        self._endpoints = tuple(endpoints)
        self._services = tuple(services)
        self._turn = 0

    async def __call__(self, request: Request, /) -> Reply:
        endpoints = self._endpoints
        if len(endpoints) == 1:
            return await self._services[0](request)
        self._turn += 1
        order = [(i + self._turn) % len(endpoints) for i in range(len(endpoints))]
        best = min(order, key=lambda i: (endpoints[i].ready is False, endpoints[i].in_flight))
        return await self._services[best](request)

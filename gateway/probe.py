"""Probing: asks every endpoint once a second whether it is ready, and tells what changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from backends.endpoint import Endpoint
from gateway.metrics import Metrics

_log = logging.getLogger("headrace.backends")
_EVERY_SECONDS = 1.0
# Longer than a healthy server ever takes, short enough that one that hangs is seen soon.
_PATIENCE_SECONDS = 2.0


class Probing:
    """Keeps `Endpoint.ready` true to life for all that `endpoints` gives, as `(backend's name, endpoint)`."""

    def __init__(self, endpoints: Callable[[], Iterable[tuple[str, Endpoint]]], metrics: Metrics) -> None:
        self._endpoints = endpoints
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Asks once, then goes on in the background."""
        await self._round()
        self._task = asyncio.get_running_loop().create_task(self._forever())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _forever(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            try:
                await self._round()
            except Exception:
                _log.exception("a probe failed in the gateway itself")

    async def _round(self) -> None:
        await asyncio.gather(*(self._probe(backend, endpoint) for backend, endpoint in self._endpoints()))

    async def _probe(self, backend: str, endpoint: Endpoint) -> None:
        before, protocol = endpoint.ready, endpoint.protocol
        ready = await endpoint.probe(_PATIENCE_SECONDS)
        self._metrics.ready(backend, endpoint.name, ready)
        if ready != before or protocol != endpoint.protocol:
            _log.log(
                logging.INFO if ready else logging.WARNING,
                "endpoint ready" if ready else "endpoint not ready",
                extra={
                    "fields": {
                        "backend": backend,
                        "endpoint": endpoint.name,
                        "protocol": endpoint.protocol,
                        **({} if ready else {"reason": endpoint.reason}),
                    }
                },
            )

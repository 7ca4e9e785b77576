"""Probing: asks every endpoint once a second whether it is ready, and tells what changed.

A call that cannot reach an endpoint finds out sooner than any probe, and its finding stands until the next round. So a
round first tells what calls have found, then asks: every change is told once, whoever found it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from backends.endpoint import Endpoint

_log = logging.getLogger("headrace.backends")
_EVERY_SECONDS = 1.0
# Longer than a healthy server ever takes, short enough that one that hangs is seen soon.
_PATIENCE_SECONDS = 2.0


class Probing:
    """Keeps `Endpoint.ready` true to life for all that `endpoints` gives, as `(backend's name, endpoint)`.

    Each is asked in its own time: one that hangs does not keep another from being found again.
    """

    def __init__(self, endpoints: Callable[[], Iterable[tuple[str, Endpoint]]]) -> None:
        self._endpoints = endpoints
        self._task: asyncio.Task[None] | None = None
        self._asking: dict[Endpoint, asyncio.Task[None]] = {}
        self._told: WeakKeyDictionary[Endpoint, tuple[bool, str]] = WeakKeyDictionary()

    async def start(self) -> None:
        """Asks once, then goes on in the background."""
        self._round()
        await asyncio.gather(*self._asking.values())
        self._task = asyncio.get_running_loop().create_task(self._forever())

    async def close(self) -> None:
        tasks = [task for task in (self._task, *self._asking.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _forever(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            self._round()

    def _round(self) -> None:
        for backend, endpoint in self._endpoints():
            if endpoint not in self._asking:
                task = asyncio.get_running_loop().create_task(self._probe(backend, endpoint))
                self._asking[endpoint] = task
                task.add_done_callback(lambda _, endpoint=endpoint: self._asking.pop(endpoint))  # type: ignore[misc]

    async def _probe(self, backend: str, endpoint: Endpoint) -> None:
        try:
            self._tell(backend, endpoint)
            endpoint.refresh()
            await endpoint.probe(_PATIENCE_SECONDS)
            self._tell(backend, endpoint)
        except Exception:
            _log.exception("a probe failed in the gateway itself")

    def _tell(self, backend: str, endpoint: Endpoint) -> None:
        if endpoint.ready is None or (state := (endpoint.ready, endpoint.protocol)) == self._told.get(endpoint):
            return
        self._told[endpoint] = state
        _log.log(
            logging.INFO if endpoint.ready else logging.WARNING,
            "endpoint ready" if endpoint.ready else "endpoint not ready",
            extra={
                "fields": {
                    "backend": backend,
                    "endpoint": endpoint.name,
                    "protocol": endpoint.protocol,
                    **({} if endpoint.ready else {"reason": endpoint.reason}),
                }
            },
        )

"""The IP addresses that a host's name stands for, as they are last known.

Theory of operation. A name is asked for before the first connect (once, however many wait for it) and again whenever
somebody calls `refresh` and the last answer is old; never for a request. An answer that differs is told (`changed`). A
resolver that fails, or knows no address any more, changes nothing once there was an answer: an outage of DNS is none
of the backend's. Times to live are not looked at, for the system's resolver does not tell them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections.abc import Awaitable, Callable
from contextvars import Context

__all__ = ["Addresses", "Resolve"]

# The IP addresses of a host, sorted. Raises OSError where there is none.
Resolve = Callable[[str], Awaitable[tuple[str, ...]]]

# Kubernetes' DNS caches for 5 s or longer.
_OLD_SECONDS = 5.0


class Addresses:
    """What `host` stands for. `known` is empty until the first answer."""

    def __init__(self, host: str, resolve: Resolve, now: Callable[[], float], changed: Callable[[], None]) -> None:
        self.known: tuple[str, ...] = ()
        self._host = host
        self._resolve = resolve
        self._now = now
        self._changed = changed
        self._asked = -math.inf
        self._asking: asyncio.Task[None] | None = None
        self._error: Exception = OSError("the client was closed")

    @classmethod
    def of(
        cls, host: str, resolve: Resolve | None, now: Callable[[], float], changed: Callable[[], None]
    ) -> Addresses | None:
        """None for a host that is an IP address, which stands for itself, and where there is no resolver."""
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return None if resolve is None else cls(host, resolve, now, changed)
        return None

    async def get(self) -> tuple[str, ...]:
        """What is known, after the first answer. Raises what the resolver raised (OSError, UnicodeError)."""
        if not self.known:
            # Not awaited itself: who leaves must not take the others' answer along.
            await asyncio.wait({self._ask()})
            if not self.known:
                raise self._error
        return self.known

    def refresh(self) -> None:
        """Asks again, in the background, where the last answer is old."""
        if self._asked + _OLD_SECONDS <= self._now():
            self._ask()

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    def _ask(self) -> asyncio.Task[None]:
        if self._asking is None:
            self._asked = self._now()
            self._asking = asyncio.get_running_loop().create_task(self._answer(), context=Context())
        return self._asking

    async def _answer(self) -> None:
        try:
            found = await self._resolve(self._host)
            if not found:
                raise OSError("the name has no address")
        except (OSError, UnicodeError) as error:
            self._error = error
            return
        finally:
            self._asking = None
        if found != self.known:
            self.known = found
            self._changed()

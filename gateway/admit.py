"""The door: how many requests may be in the gateway, and for how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backends.deadlines import Deadlines
from backends.errors import Expired, Failure, Rejected, ShutDown, Unreachable
from backends.request import Relay, Reply, Request, Service, replace
from backends.stream import Bound, watched
from policies import Policy

# Inner stages know better where a request is and say so; the door's own timer is there for what they miss.
_GRACE_SECONDS = 0.05


@dataclass(slots=True)
class InFlight:
    """Requests of this process, whatever their policy: those being answered, and those whose body still comes."""

    count: int = 0
    reading: int = 0
    draining: bool = False

    def arrive(self, limit: int) -> None:
        """`check` for a request that has just come. Raises Unreachable, too, while the process ends."""
        if self.draining:
            raise Unreachable("the gateway is shutting down")
        self.check(limit)

    def check(self, limit: int) -> None:
        """Raises Rejected where `limit` requests are in already."""
        if self.count + self.reading >= limit:
            raise Rejected(f"too many requests in flight, limit {limit}")

    @contextmanager
    def receiving(self, limit: int) -> Iterator[None]:
        """While a request's body is read, which may take its sender long: it counts against `limit` already."""
        self.arrive(limit)
        self.reading += 1
        try:
            yield
        finally:
            self.reading -= 1


class Admit:
    """Bounds what is in flight, a stream until its end, and how long anything may take.

    What still runs when `deadlines` are cut ends with ShutDown.
    """

    def __init__(
        self, inner: Service, policy: Policy, in_flight: InFlight, deadlines: Deadlines, now: Callable[[], float]
    ) -> None:
        self._inner = inner
        self._limits = policy.limits
        self._timeouts = {name: route.timeout for name, route in policy.routes.items() if route.timeout is not None}
        self._in_flight = in_flight
        self._deadlines = deadlines
        self._now = now

    async def __call__(self, request: Request, /) -> Reply:
        now = self._now()
        if request.deadline <= now:
            raise Expired("edge")
        self._in_flight.check(self._limits.in_flight)
        # How long a stream may last is its caller's affair; how long a chunk may take is the endpoint's.
        timeout = math.inf if request.stream else self._timeouts.get(request.model, self._limits.timeout)
        deadline = min(request.deadline, now + timeout)
        self._in_flight.count += 1
        streams = False
        try:
            with self._deadlines.until(deadline + _GRACE_SECONDS):
                reply = await self._inner(
                    request if deadline == request.deadline else replace(request, deadline=deadline)
                )
            stream = None
            if isinstance(reply.body, Relay):
                until = request.deadline + _GRACE_SECONDS
                bound = Bound(lambda: self._deadlines.until(until), lambda late: self._late(late, now))
                stream = watched(reply, self._left, bound)
            streams = stream is not None
            return stream or reply
        except TimeoutError as late:
            raise self._late(late, now) from None
        finally:
            if not streams:
                self._in_flight.count -= 1

    def _late(self, late: TimeoutError | Expired, began: float) -> Failure:
        """What it means that a request which began at `began` was not over in time."""
        if isinstance(late, Expired):
            return late
        lasted = self._now() - began
        if self._deadlines.was_cut:
            return ShutDown(f"the gateway is shutting down, and this request was not over after {lasted:.3g} s")
        return Expired("gateway", f"deadline exceeded in gateway after {lasted * 1e3:.0f} ms")

    def _left(self, error: BaseException | None) -> None:
        self._in_flight.count -= 1

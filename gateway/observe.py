"""The outermost and the innermost hop: what is seen of every request, and of every batch.

`Observed` opens the request's span, measures it, counts it by its outcome and writes its access line; `MeasuredBatch`
counts what is sent to a backend. The parts between them hold no span, meter or logger call; what a store has to report
goes to `store_changed`, what an endpoint has to `model_avoided`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from backends.errors import BackendFailed, Failure
from backends.request import Infer, Relay, Reply, Request, Service, computes, replace
from backends.stream import watched
from gateway import respond, semantics, telemetry
from gateway.metrics import Metrics
from gateway.telemetry import Span, Tracing

_log = logging.getLogger("headrace.access")
_LEFT = "499"  # nginx's status for a client that closed the request


class Observed:
    """`inner` as one protocol's edge calls it.

    `routes` holds the names that may become labels; without `headers` the caller is not told what was decided.
    """

    def __init__(
        self,
        inner: Service,
        *,
        protocol: str,
        routes: Mapping[str, Any],
        proxy: bool,
        policy: str,
        tracing: Tracing,
        metrics: Metrics,
        access_log: bool,
        headers: bool,
        statuses: respond.Statuses = respond.HEADRACE,
        now: Callable[[], float],
    ) -> None:
        self._inner = inner
        self._protocol = protocol
        self._statuses = statuses
        self._routes = routes
        self._other = "proxy" if proxy else "unknown"
        self._policy = policy
        self._tracing = tracing
        self._metrics = metrics
        self._access_log = access_log
        self._headers = headers
        self._now = now
        self._warned: set[tuple[str, str]] = set()

    async def __call__(self, request: Request, /) -> Reply:
        began = self._now()
        span = self._tracing.root(self._protocol, request)
        if span is not None:
            request = replace(request, span=span)
            span.set_attribute("headrace.policy", self._policy)
        try:
            reply = replace(await self._inner(request), policy=self._policy)
        except BaseException as error:
            self._end(request, span, began, None, error)
            if isinstance(error, Failure) and not self._headers:
                error.arm = ""
            raise
        # A stream's outcome is recorded when it ends, however it ends.
        stream = watched(reply, lambda error: self._end(request, span, began, reply, error))
        if stream is None:
            self._end(request, span, began, reply, None)
        return self._shown(stream or reply)

    def _shown(self, reply: Reply) -> Reply:
        """What the edge may tell the caller of the reply."""
        return reply if self._headers else replace(reply, policy="", arm="", trail=(), degraded="")

    def _end(
        self, request: Request, span: Span | None, began: float, reply: Reply | None, error: BaseException | None
    ) -> None:
        seconds = self._now() - began
        route = request.model if request.model in self._routes else self._other
        status = self._status(reply, error)
        self._metrics.request(route, self._protocol, status, seconds)
        if reply is not None:
            self._metrics.reply(route, reply)
            self._warn(route, reply)
        if span is not None:
            telemetry.end(span, semantics.answered(self._protocol, reply, error, self._statuses))
        if self._access_log and _log.isEnabledFor(logging.INFO):
            _log.info("request", extra={"fields": self._line(request, span, status, seconds, reply, error)})

    def _warn(self, route: str, reply: Reply) -> None:
        """Says once per tier that a cascade does not decide: it costs both tiers, and callers see nothing of it."""
        for hop in reply.trail:
            what = "rows could not be scored" if hop.unscored else "calls failed" if hop.reason == "failed" else ""
            if what and (hop.tier, what) not in self._warned:
                self._warned.add((hop.tier, what))
                fields = {"route": route, "tier": hop.tier}
                logging.getLogger("headrace").warning(
                    f"{what} and went on to the next tier; said once", extra={"fields": fields}
                )

    def _status(self, reply: Reply | None, error: BaseException | None) -> str:
        if error is None:
            status = reply.body.status if reply is not None and isinstance(reply.body, Relay) else 200
            return str(status if self._protocol == "http" else 0)
        if isinstance(error, asyncio.CancelledError):
            # The caller has left, or its stream was closed before the end.
            return _LEFT if self._protocol == "http" else "1"
        if not isinstance(error, Failure):
            return "500" if self._protocol == "http" else "13"
        told = self._statuses
        return str(told.http(error)[0] if self._protocol == "http" else told.grpc(error)[0])

    def _line(
        self,
        request: Request,
        span: Span | None,
        status: str,
        seconds: float,
        reply: Reply | None,
        error: BaseException | None,
    ) -> dict[str, Any]:
        line: dict[str, Any] = {
            "protocol": self._protocol,
            "model": request.model[:128],
            "status": status,
            "ms": round(seconds * 1e3, 2),
        }
        if isinstance(request.content, Infer) and request.content.id:
            line["id"] = request.content.id[:64]
        if reply is not None:
            line |= {k.removeprefix("headrace-"): v for k, v in respond.decision_headers(reply)}
        if isinstance(error, Failure):
            line["error"] = error.message[:200]
            if error.arm:
                line["arm"] = error.arm
        if span is not None:
            line["trace"] = telemetry.trace_id(span)
        return line


class MeasuredArm:
    """One arm of a route's experiment: what makes its models work is counted by outcome and timed.

    A stream is over when it ends.
    """

    def __init__(self, inner: Service, route: str, arm: str, metrics: Metrics, now: Callable[[], float]) -> None:
        self._inner = inner
        self._route = route
        self._arm = arm
        self._metrics = metrics
        self._now = now

    async def __call__(self, request: Request, /) -> Reply:
        if request.span is not None:
            request.span.set_attribute("headrace.arm", self._arm)
        if not computes(request):
            return await self._inner(request)
        began = self._now()
        try:
            reply = await self._inner(request)
        except BaseException as error:
            self._end(began, error)
            raise
        # A relayed error is one of the backend's own, whatever body it has.
        status = reply.body.status if isinstance(reply.body, Relay) else 200
        told = BackendFailed("", status) if status >= 400 else None
        stream = watched(reply, lambda error: self._end(began, error or told))
        if stream is None:
            self._end(began, told)
        return stream or reply

    def _end(self, began: float, error: BaseException | None) -> None:
        left = isinstance(error, asyncio.CancelledError)
        outcome = "answered" if error is None else "left" if left else type(error).__name__
        self._metrics.arm(self._route, self._arm, outcome, self._now() - began)


class MeasuredBatch:
    """An endpoint whose inference calls are counted under the name of their backend."""

    def __init__(self, inner: Service, backend: str, metrics: Metrics, now: Callable[[], float]) -> None:
        self._inner = inner
        self._backend = backend
        self._metrics = metrics
        self._now = now

    async def __call__(self, request: Request, /) -> Reply:
        if not isinstance(request.content, Infer):
            return await self._inner(request)
        began = self._now()
        try:
            reply = await self._inner(request)
        except Failure as failure:
            self._metrics.batch_failed(self._backend, type(failure).__name__)
            raise
        rows = sum(origin.rows for origin in request.origins) or 1
        self._metrics.batch(self._backend, rows, self._now() - began)
        return reply


def store_changed(store: str, metrics: Metrics) -> Callable[[bool, str], None]:
    """What a store shared by gateways reports its changes of state to."""

    def observe(reachable: bool, reason: str) -> None:
        state = "down" if not reachable else "read_only" if reason else "up"
        metrics.store_changed(store, state)
        fields = {"store": store, **({"reason": reason} if reason else {})}
        level = logging.INFO if state == "up" else logging.WARNING
        said = {"down": "cache store down", "read_only": "cache store refuses writes", "up": "cache store up"}[state]
        logging.getLogger("headrace.cache").log(level, said, extra={"fields": fields})

    return observe


def model_avoided(metrics: Metrics) -> Callable[[str, str, str, str], None]:
    """What tells of a model that an endpoint is avoided for, with the reason; without one, that it no longer is."""

    def observe(backend: str, endpoint: str, model: str, reason: str) -> None:
        fields = {"backend": backend, "endpoint": endpoint, "model": model[:128]}
        log = logging.getLogger("headrace.backends")
        if reason:
            metrics.model_avoided(backend, endpoint)
            log.warning("endpoint avoided for a model", extra={"fields": {**fields, "reason": reason}})
        else:
            log.info("endpoint used again for a model", extra={"fields": fields})

    return observe

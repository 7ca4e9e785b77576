"""Services that put what they hold under a span: tiers and the like, batches, calls to servers.

A batch span is a child of the first origin that is recorded and carries links to all; the other origins' spans carry a
link to it. A request whose `span` is None passes by with one comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from backends.request import Hop, HttpCall, Infer, Reply, Request, Service, replace
from gateway import semantics
from gateway.telemetry import Span, SpanKind, Tracing, end, failed
from policies.spec import Endpoint

Attributes = Mapping[str, str | int | float | bool]


class Traced:
    """`inner` under a span of its own where the request is recorded."""

    def __init__(self, inner: Service, name: str, tracing: Tracing, attributes: Attributes | None = None) -> None:
        self._inner = inner
        self._name = name
        self._tracing = tracing
        self._attributes = dict(attributes or {})

    async def __call__(self, request: Request, /) -> Reply:
        if request.span is None:
            return await self._inner(request)
        span = self._tracing.child(self._name, request.span)
        span.set_attributes(self._attributes)
        try:
            reply = await self._inner(replace(request, span=span))
            _describe(span, reply.trail)
            queued = reply.trail[0].queued if len(reply.trail) == 1 else 0.0
            if self._name == "dispatch" and queued > 0:
                self._tracing.past("queue", span, queued)
            return reply
        except BaseException as error:
            failed(span, error)
            raise
        finally:
            span.end()


class TracedBatch:
    """One batch, under a span that is linked with all of its origins. `inner` is an endpoint."""

    def __init__(self, inner: Service, tracing: Tracing, attributes: Attributes) -> None:
        self._inner = inner
        self._tracing = tracing
        self._attributes = dict(attributes)

    async def __call__(self, request: Request, /) -> Reply:
        recorded = [origin.span for origin in request.origins if origin.span is not None]
        if not recorded:
            return await self._inner(request)
        span = self._tracing.child("batch", recorded[0], links=recorded)
        for other in recorded[1:]:
            other.add_link(span.get_span_context())
        span.set_attributes({**self._attributes, "headrace.batch.rows": sum(origin.rows for origin in request.origins)})
        span.set_attribute("headrace.batch.requests", len(request.origins))
        try:
            return await self._inner(replace(request, span=span))
        except BaseException as error:
            failed(span, error)
            raise
        finally:
            span.end()


class Replica(Protocol):
    """One server as a service, which says how it sends tensors."""

    @property
    def name(self) -> str: ...
    @property
    def protocol(self) -> str: ...
    async def __call__(self, request: Request, /) -> Reply: ...


class TracedCall:
    """One call to a server of that `kind`, whose addresses are `where`: a client span whose context the server gets."""

    def __init__(self, inner: Replica, kind: str, where: Endpoint, tracing: Tracing) -> None:
        self._inner = inner
        self._kind = kind
        self._where = where
        self._tracing = tracing

    async def __call__(self, request: Request, /) -> Reply:
        if request.span is None:
            return await self._inner(request)
        content = request.content
        relayed = "http" if isinstance(content, HttpCall) else "grpc"
        protocol = self._inner.protocol if isinstance(content, Infer) else relayed
        name, attributes = semantics.goes(protocol, request, self._where)
        span = self._tracing.child(name, request.span, SpanKind.CLIENT)
        span.set_attributes({**attributes, "headrace.kind": self._kind, "headrace.endpoint": self._inner.name})
        headers = dict(request.headers)
        self._tracing.inject(headers, span)
        reply, failure = None, None
        try:
            reply = await self._inner(replace(request, span=span, headers=headers))
            return reply
        except BaseException as error:
            failure = error
            raise
        finally:
            end(span, semantics.got(protocol, reply, failure))


def _describe(span: Span, trail: Sequence[Hop]) -> None:
    """A trail as attributes of a span."""
    for hop in trail:
        prefix = f"headrace.{hop.tier}." if hop.tier else "headrace."
        if hop.cached:
            span.set_attribute(prefix + "cached_rows", len(hop.rows))
            continue
        if hop.rows or hop.deferred:  # a call of a batch has none: its batch tells them
            span.set_attribute(prefix + "rows", len(hop.rows))
        if hop.deferred:
            span.set_attribute(prefix + "deferred_rows", hop.deferred)
        if hop.retries:
            span.set_attribute(prefix + "retries", hop.retries)
        if hop.batch_rows:
            span.set_attribute(prefix + "batch_rows", hop.batch_rows)
            span.set_attribute(prefix + "reason", hop.reason)
            span.set_attribute(prefix + "service_ms", round(hop.service * 1e3, 2))

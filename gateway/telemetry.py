"""Traces: spans of every hop, kept in memory and exported over OTLP; the only importer of opentelemetry.

What is recorded. A request whose `traceparent` says sampled is, and of the others as many a second as the policy
allows (a token bucket), so that a quiet gateway records everything and a busy one pays for a few; where
OTEL_TRACES_SAMPLER is set, that sampler decides instead. The rest skip every line here but one comparison:
`Request.span` is None. A collector is named by the standard variables (OTEL_EXPORTER_OTLP_ENDPOINT and its kin), over
HTTP with protobuf, from a thread of the SDK's.

A batch span is a child of the first origin that is recorded and carries links to all; the other origins' spans carry a
link to it, which `Recent.trace` follows, so that each caller's trace shows the batch that served it. Spans are started
and ended by hand, for no context manager survives a generator's yield. `traceparent` goes to the backend with the span
of the call as parent, so that a Triton's own spans join the trace.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock, Thread
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from backends.errors import Failure
from backends.request import Hop, Reply, Request, Service, replace

_PROPAGATOR = TraceContextTextMapPropagator()
# A trace of more spans than this is a defect or an attack; the rest is not kept.
_MAX_SPANS = 512
_FLUSH_SECONDS = 3.0
__all__ = ["Span", "Traced", "TracedBatch", "TracedCall", "Tracing", "describe", "failed", "trace_id"]

Attributes = Mapping[str, str | int | float | bool]


class Recent(SpanProcessor):
    """The spans of the most recent traces, at most `keep` traces."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._traces: OrderedDict[int, list[ReadableSpan]] = OrderedDict()
        self._roots: OrderedDict[int, int] = OrderedDict()
        self._lock = Lock()

    def on_end(self, span: ReadableSpan) -> None:
        trace_id = span.context.trace_id
        with self._lock:
            spans = self._traces.setdefault(trace_id, [])
            if len(spans) < _MAX_SPANS:
                spans.append(span)
            if span.parent is None or span.parent.is_remote:
                self._roots.pop(trace_id, None)
                self._roots[trace_id] = span.end_time or 0
            while len(self._traces) > self._keep:
                old, _ = self._traces.popitem(last=False)
                self._roots.pop(old, None)

    def ids(self) -> list[str]:
        """Trace ids, the most recently finished first."""
        return [trace_id for trace_id, _ in self.ended()]

    def ended(self) -> list[tuple[str, int]]:
        """The same, each with the wall time of its end in ns."""
        with self._lock:
            return [(f"{trace_id:032x}", end) for trace_id, end in reversed(self._roots.items())]

    def trace(self, trace_id: str) -> list[dict[str, Any]]:
        """The spans of a trace in order of their start, with the batches that its spans are linked to; or none."""
        try:
            number = int(trace_id, 16)
        except ValueError:
            return []
        with self._lock:
            own = list(self._traces.get(number, ()))
            linked = {
                (link.context.trace_id, link.context.span_id): span.context.span_id
                for span in own
                for link in span.links
                if link.context.trace_id != number
            }
            others = [s for t in {trace for trace, _ in linked} for s in self._traces.get(t, ())]
        adopted: dict[tuple[int, int], int] = {}
        for span in sorted(others, key=lambda s: s.start_time or 0):
            key = (span.context.trace_id, span.context.span_id)
            parent = span.parent
            if key in linked and span.name == "batch":
                adopted[key] = linked[key]
            elif parent is not None and (span.context.trace_id, parent.span_id) in adopted:
                adopted[key] = parent.span_id
        rows = [_row(span, span.parent.span_id if span.parent else None) for span in own]
        rows += [
            _row(span, adopted[key])
            for span in others
            if (key := (span.context.trace_id, span.context.span_id)) in adopted
        ]
        return sorted(rows, key=lambda row: row["start_unix_ns"])


def _row(span: ReadableSpan, parent: int | None) -> dict[str, Any]:
    start, end = span.start_time or 0, span.end_time or 0
    return {
        "name": span.name,
        "trace_id": f"{span.context.trace_id:032x}",
        "span_id": f"{span.context.span_id:016x}",
        "parent_id": f"{parent:016x}" if parent is not None else None,
        "start_unix_ns": start,
        "duration_ms": (end - start) / 1e6,
        "attributes": dict(span.attributes or {}),
        "error": span.status.description if span.status.status_code is StatusCode.ERROR else None,
        "links": [f"{link.context.trace_id:032x}/{link.context.span_id:016x}" for link in span.links],
    }


def _resource() -> Resource:
    """Who we are: what the environment says, else `headrace`."""
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({} if named else {"service.name": "headrace"})


def _exported() -> bool:
    """Whether the standard variables name a collector."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return bool(os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


class Tracing:
    """Starts spans. `per_second` bounds how many requests are recorded of those that did not come sampled."""

    def __init__(self, *, per_second: float, keep: int, now: Callable[[], float]) -> None:
        self.recent = Recent(keep)
        self.per_second = per_second
        self._now = now
        self._tokens = per_second
        self._filled = now()
        # A sampler that is named in the environment decides instead of the allowance.
        self._sampled_elsewhere = "OTEL_TRACES_SAMPLER" in os.environ
        sampler = None if self._sampled_elsewhere else ALWAYS_ON
        provider = TracerProvider(sampler=sampler, resource=_resource(), shutdown_on_exit=False)
        provider.add_span_processor(self.recent)
        if _exported():
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._provider = provider
        self._tracer = provider.get_tracer("headrace")

    def root(self, name: str, request: Request) -> Span | None:
        """The span of a whole request, or None where it is not recorded."""
        header = request.headers.get("traceparent")
        # The last field's lowest bit is W3C's sampled flag.
        sampled = (
            isinstance(header, str) and header[-2:-1] in tuple("0123456789abcdef") and header[-1:] in tuple("13579bdf")
        )
        if not self._sampled_elsewhere and not sampled and not self._allowed():
            return None
        carrier = {"traceparent": header, "tracestate": request.headers.get("tracestate", "")}
        context = _PROPAGATOR.extract(carrier) if isinstance(header, str) else Context()
        span = self._tracer.start_span(name, context=context, kind=SpanKind.SERVER)
        return span if span.is_recording() else None

    def child(self, name: str, parent: Span, kind: SpanKind = SpanKind.INTERNAL, links: Sequence[Span] = ()) -> Span:
        return self._tracer.start_span(
            name,
            context=set_span_in_context(parent, Context()),
            kind=kind,
            links=[Link(span.get_span_context()) for span in links],
        )

    def past(self, name: str, parent: Span, seconds: float) -> None:
        """A child of `parent` that began with it and lasted `seconds`."""
        start: int = getattr(parent, "start_time", 0)
        span = self._tracer.start_span(name, context=set_span_in_context(parent, Context()), start_time=start)
        span.end(start + int(seconds * 1e9))

    def close(self) -> None:
        """Exports what is left; a collector that does not answer holds up the end of the process for a moment only."""
        ending = Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_FLUSH_SECONDS)

    def _allowed(self) -> bool:
        now = self._now()
        self._tokens = min(max(self.per_second, 1.0), self._tokens + (now - self._filled) * self.per_second)
        self._filled = now
        if self.per_second <= 0 or self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


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
            describe(span, reply.trail)
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


class TracedCall:
    """One call to a server, as a client span whose context the server gets."""

    def __init__(self, inner: Service, name: str, tracing: Tracing, attributes: Attributes) -> None:
        self._inner = inner
        self._name = name
        self._tracing = tracing
        self._attributes = dict(attributes)

    async def __call__(self, request: Request, /) -> Reply:
        if request.span is None:
            return await self._inner(request)
        span = self._tracing.child(f"{self._name} {request.model}".strip(), request.span, SpanKind.CLIENT)
        span.set_attributes(self._attributes)
        headers = dict(request.headers)
        _PROPAGATOR.inject(headers, context=set_span_in_context(span, Context()))
        try:
            return await self._inner(replace(request, span=span, headers=headers))
        except BaseException as error:
            failed(span, error)
            raise
        finally:
            span.end()


def describe(span: Span, trail: Sequence[Hop]) -> None:
    """A trail as attributes of a span."""
    for hop in trail:
        prefix = f"headrace.{hop.tier}." if hop.tier else "headrace."
        if hop.cached:
            span.set_attribute(prefix + "cached_rows", len(hop.rows))
            continue
        span.set_attribute(prefix + "rows", len(hop.rows))
        if hop.deferred:
            span.set_attribute(prefix + "deferred_rows", hop.deferred)
        if hop.retries:
            span.set_attribute(prefix + "retries", hop.retries)
        if hop.batch_rows:
            span.set_attribute(prefix + "batch_rows", hop.batch_rows)
            span.set_attribute(prefix + "reason", hop.reason)
            span.set_attribute(prefix + "service_ms", round(hop.service * 1e3, 2))


def failed(span: Span, error: BaseException) -> None:
    message = error.message if isinstance(error, Failure) else type(error).__name__
    span.set_status(Status(StatusCode.ERROR, message[:500]))
    span.set_attribute("error.type", type(error).__name__)


def trace_id(span: Span) -> str:
    return f"{span.get_span_context().trace_id:032x}"

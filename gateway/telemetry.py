"""Traces: spans of every hop, kept in memory and exported over OTLP; the only importer of opentelemetry.

What is recorded. A request whose `traceparent` says sampled is, and of the others as many a second as the policy
allows (a token bucket), so that a quiet gateway records everything and a busy one pays for a few; where
OTEL_TRACES_SAMPLER is set, that sampler decides instead. The rest skip every line here but one comparison:
`Request.span` is None. A collector is named by the standard variables (OTEL_EXPORTER_OTLP_ENDPOINT and its kin), over
HTTP with protobuf, from a thread of the SDK's. What spans of calls are called is said in `gateway.semantics`.

`gateway.traced` makes the spans inside. Spans are started and ended by hand, for no context manager survives a
generator's yield. A batch that served several callers is shown in each one's trace, by the link that `Recent.trace`
follows. `traceparent`, or the forms of it that OTEL_PROPAGATORS names, goes to the backend with the span of the call as
parent, so that a Triton's own spans join the trace; baggage is a header like others, and passes as they do.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from threading import Lock, Thread
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from backends.errors import Failure
from backends.request import Request
from gateway import semantics

# A trace of more spans than this is a defect or an attack; the rest is not kept.
_MAX_SPANS = 512
_FLUSH_SECONDS = 3.0
__all__ = ["Misconfigured", "Span", "SpanKind", "Tracing", "end", "failed", "trace_id"]


class Misconfigured(OSError):
    """What is wrong with one of the standard variables, in one line: as it is with a port that is taken, no start."""


class Recent(SpanProcessor):
    """The spans of the most recent traces, at most `keep` traces."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
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
            while len(self._traces) > self.keep:
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
        "kind": span.kind.name.lower(),
        "trace_id": f"{span.context.trace_id:032x}",
        "span_id": f"{span.context.span_id:016x}",
        "parent_id": f"{parent:016x}" if parent is not None else None,
        "start_unix_ns": start,
        "duration_ms": (end - start) / 1e6,
        "attributes": dict(span.attributes or {}),
        "error": (span.status.description or "") if span.status.status_code is StatusCode.ERROR else None,
        "links": [f"{link.context.trace_id:032x}/{link.context.span_id:016x}" for link in span.links],
    }


def _resource() -> Resource:
    """Who we are: what the environment says, else `headrace`."""
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({} if named else {"service.name": "headrace"})


def _exporter() -> OTLPSpanExporter | None:
    """To the collector that the standard variables name, if they do."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    if not (os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        return None
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := os.environ.get(name):
            if protocol != "http/protobuf":
                raise Misconfigured(f"{name}: expected http/protobuf (port 4318, mostly), got '{protocol[:64]}'")
            break
    return OTLPSpanExporter()


def _propagators() -> dict[str, TextMapPropagator]:
    """Those that OTEL_PROPAGATORS names, else W3C's."""
    wanted = [name.strip() for name in os.environ.get("OTEL_PROPAGATORS", "").split(",") if name.strip()]
    made: dict[str, TextMapPropagator] = {}
    for name in wanted or ["tracecontext"]:
        if name == "none":
            return {}
        if name == "tracecontext":
            made[name] = TraceContextTextMapPropagator()
        elif name != "baggage":  # a header that passes by itself
            found = entry_points(group="opentelemetry_propagator", name=name)
            if not found:
                known = ", ".join(sorted({"tracecontext", "baggage", "none", *_installed()}))
                raise Misconfigured(
                    f"OTEL_PROPAGATORS: '{name[:64]}' is not installed (b3, for one, is opentelemetry-propagator-b3); "
                    f"there are {known}"
                )
            made[name] = next(iter(found)).load()()
    return made


def _installed() -> set[str]:
    return {found.name for found in entry_points(group="opentelemetry_propagator")}


class Tracing:
    """Starts spans. `per_second` bounds how many requests are recorded of those that did not come sampled.

    Raises Misconfigured.
    """

    def __init__(self, *, per_second: float, keep: int, now: Callable[[], float]) -> None:
        self.recent = Recent(keep)
        self.per_second = per_second
        self._now = now
        self._tokens = per_second
        self._filled = now()
        # A sampler that is named in the environment decides instead of the allowance.
        self._sampled_elsewhere = bool(os.environ.get("OTEL_TRACES_SAMPLER"))
        propagators = _propagators()
        # One form or none can be told from its header without an extraction; that is the common case.
        self._forms_beside_w3c = bool(propagators.keys() - {"tracecontext"})
        self._heeds_w3c = "tracecontext" in propagators
        self._propagator = CompositePropagator(list(propagators.values()))
        sampler = None if self._sampled_elsewhere else ALWAYS_ON
        provider = TracerProvider(sampler=sampler, resource=_resource(), shutdown_on_exit=False)
        provider.add_span_processor(self.recent)
        if exporter := _exporter():
            provider.add_span_processor(BatchSpanProcessor(exporter))
        self._provider = provider
        self._tracer = provider.get_tracer("headrace", schema_url=semantics.SCHEMA)

    def root(self, protocol: str, request: Request) -> Span | None:
        """The span of a whole request that came over `protocol`, or None where it is not recorded."""
        if self._forms_beside_w3c:
            context = self._propagator.extract(semantics.carrier(request), Context())
            if not self._wanted(get_current_span(context).get_span_context().trace_flags.sampled):
                return None
        else:
            header = request.headers.get("traceparent") if self._heeds_w3c else None
            # The last field's lowest bit is W3C's sampled flag.
            sampled = (
                isinstance(header, str)
                and header[-2:-1] in tuple("0123456789abcdef")
                and header[-1:] in tuple("13579bdf")
            )
            if not self._wanted(sampled):
                return None
            carrier = {"traceparent": header, "tracestate": request.headers.get("tracestate", "")}
            context = self._propagator.extract(carrier, Context()) if isinstance(header, str) else Context()
        span = self._tracer.start_span("request", context=context, kind=SpanKind.SERVER)
        if not span.is_recording():
            return None
        # Late, so that a sampler's refusal costs none of it; the standard samplers do not look at it.
        name, attributes = semantics.came(protocol, request)
        span.update_name(name)
        span.set_attributes(attributes)
        return span

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

    def inject(self, headers: dict[str, Any], span: Span) -> None:
        """Makes `span` the parent of whatever is called with these headers."""
        self._propagator.inject(headers, context=set_span_in_context(span, Context()))

    def close(self) -> None:
        """Exports what is left; a collector that does not answer holds up the end of the process for a moment only."""
        ending = Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_FLUSH_SECONDS)

    def _wanted(self, sampled: bool) -> bool:
        """Whether a span is to be started; a named sampler gets to see all of them."""
        return self._sampled_elsewhere or sampled or self._allowed()

    def _allowed(self) -> bool:
        now = self._now()
        self._tokens = min(max(self.per_second, 1.0), self._tokens + (now - self._filled) * self.per_second)
        self._filled = now
        if self.per_second <= 0 or self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


def end(span: Span, ending: semantics.Ending) -> None:
    """Ends the span of a call."""
    span.set_attributes(ending.attributes)
    if ending.error:
        span.set_status(Status(StatusCode.ERROR, ending.message or None))
        span.set_attribute("error.type", ending.error)
    span.end()


def failed(span: Span, error: BaseException) -> None:
    message = error.message if isinstance(error, Failure) else type(error).__name__
    span.set_status(Status(StatusCode.ERROR, message[:500]))
    span.set_attribute("error.type", type(error).__name__)


def trace_id(span: Span) -> str:
    return f"{span.get_span_context().trace_id:032x}"

"""How a request's trace is found, by the standard variables."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, get_current_span, set_span_in_context

from backends.request import HttpCall, Infer, Request, Tensors
from gateway import telemetry
from gateway.telemetry import Misconfigured, Tracing

INFER = Infer(Tensors.of(()))


class Slash(TextMapPropagator):
    """A propagator of one header, `TRACE/SPAN/SAMPLED`."""

    fields = {"slash"}  # noqa: RUF012

    def extract(self, carrier: Any, context: Context | None = None, getter: Any = None) -> Context:
        if "slash" not in carrier:
            return context or Context()
        trace, span, sampled = carrier["slash"].split("/")
        came = SpanContext(int(trace, 16), int(span, 16), True, TraceFlags(int(sampled)))
        return set_span_in_context(NonRecordingSpan(came), context)

    def inject(self, carrier: Any, context: Context | None = None, setter: Any = None) -> None:
        span = get_current_span(context).get_span_context()
        carrier["slash"] = f"{span.trace_id:032x}/{span.span_id:016x}/{span.trace_flags:d}"


class Installed:
    name = "slash"

    def load(self) -> type[Slash]:
        return Slash


def tracing(per_second: float = 0.0) -> Tracing:
    return Tracing(per_second=per_second, keep=8, now=lambda: 0.0)


def test_another_form_of_the_parent_is_heeded_and_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "entry_points", lambda **wanted: [Installed()])
    monkeypatch.setenv("OTEL_PROPAGATORS", "slash, tracecontext,baggage")
    made = tracing()
    assert made.root("http", Request(model="m", content=INFER)) is None
    assert made.root("http", Request(model="m", content=INFER, headers={"slash": "a/b/0"})) is None
    call = HttpCall("GET", "/v2", ((b"slash", b"a/b/1"),))
    for request in (
        Request(model="m", content=INFER, headers={"slash": "a/b/1"}),
        Request(model="", content=call),
        Request(model="m", content=INFER, headers={"traceparent": f"00-{0xA:032x}-{0xB:016x}-01"}),
    ):
        span = made.root("http", request)
        assert span is not None
        assert telemetry.trace_id(span) == f"{0xA:032x}"
        headers: dict[str, Any] = {}
        made.inject(headers, span)
        assert headers["slash"].startswith(f"{0xA:032x}/")
        assert headers["traceparent"].startswith(f"00-{0xA:032x}-")


def test_without_w3c_a_traceparent_is_only_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(model="m", content=INFER, headers={"traceparent": f"00-{0xA:032x}-{0xB:016x}-01"})
    assert tracing().root("http", request) is not None
    monkeypatch.setenv("OTEL_PROPAGATORS", "baggage")
    assert tracing().root("http", request) is None
    span = tracing(per_second=1.0).root("http", request)
    assert span is not None
    assert telemetry.trace_id(span) != f"{0xA:032x}"


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"OTEL_PROPAGATORS": "b3"}, "OTEL_PROPAGATORS: 'b3' is not installed"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: expected http/protobuf"),
    ],
)
def test_a_variable_that_cannot_be_heeded_is_one_line(
    variables: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Misconfigured, match=r"^[^\n]+$") as raised:
        tracing()
    assert str(raised.value).startswith(told)


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_PROPAGATORS", "OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.setenv(name, "")
    made = tracing()
    assert made.root("http", Request(model="m", content=INFER)) is None
    assert made._provider.resource.attributes["service.name"] == "headrace"

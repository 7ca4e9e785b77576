"""Spans in the operator's own collector: ours and Triton's, in one trace."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from deploy.demo.repository import write_test_models
from deploy.demo.triton import Triton, ensure_venv
from tests.support.serve import Served, free_port, served, within
from tests.support.triton import VENV

BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}
POLICY = """
backends:
  b: {{endpoints: [{{http: http://{http}, grpc: {grpc}}}], protocol: {protocol}, model: rowsum, batch: {{max_rows: 8}}}}
routes:
  r: {{backend: b}}
"""


class _Json:
    """What the tests look at in a span that came as JSON."""

    def __init__(self, span: dict[str, Any]) -> None:
        self.trace_id = bytes.fromhex(span["traceId"])
        self.parent_span_id = bytes.fromhex(span.get("parentSpanId", ""))


class Sink:
    """A collector that keeps the spans it is sent: `(service, span)`."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def take(self, body: bytes, kind: str) -> None:
        if kind.startswith("application/json"):  # Triton's form, whose ids are hexadecimal
            for resource in json.loads(body)["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    self.spans += [("triton", _Json(span)) for span in scope["spans"]]
            return
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = next((a.value.string_value for a in resource.resource.attributes if a.key == "service.name"), "")
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]

    def of(self, trace_id: str) -> list[tuple[str, Any]]:
        return [(service, span) for service, span in self.spans if span.trace_id.hex() == trace_id]


@contextmanager
def collector() -> Iterator[tuple[Sink, str]]:
    sink = Sink()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            sink.take(body, self.headers["content-type"])
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield sink, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def rig(
    folder: Path, protocol: str, monkeypatch: pytest.MonkeyPatch, **environment: str
) -> Iterator[tuple[Sink, Served]]:
    with collector() as (sink, url):
        for name, value in {
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            **environment,
        }.items():
            monkeypatch.setenv(name, value)
        models = write_test_models(folder / "models")
        with Triton(
            ensure_venv(VENV), models, log=folder / "triton.log", models=["rowsum"], http=free_port(3),
            otlp=f"{url}/v1/traces",
        ) as server:  # fmt: skip
            policy = folder / "policy.yaml"
            policy.write_text(POLICY.format(http=server.http, grpc=server.grpc, protocol=protocol))
            with served(folder, str(policy)) as gateway:
                yield sink, gateway


def ask(gateway: Served, trace_id: str, flags: str = "01") -> None:
    parent = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-{flags}"}
    httpx.post(f"http://{gateway.http}/v2/models/r/infer", json=BODY, headers=parent).raise_for_status()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritons_spans_join_our_trace(protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(tmp_path, protocol, monkeypatch) as (sink, gateway):
        trace_id = "ab" * 16
        ask(gateway, trace_id)
        assert within(20, lambda: len({service for service, _ in sink.of(trace_id)}) == 2)
        ours = {span.name: span for service, span in sink.of(trace_id) if service == "headrace"}
        theirs = [span for service, span in sink.of(trace_id) if service != "headrace"]
        assert {"edge http", "dispatch", "batch", "triton rowsum"} <= ours.keys()
        assert ours["edge http"].parent_span_id.hex() == "00f067aa0ba902b7"
        assert ours["triton rowsum"].span_id in {span.parent_span_id for span in theirs}
        assert [link.span_id for link in ours["batch"].links] == [ours["dispatch"].span_id]


def test_the_standard_sampler_and_name_are_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"OTEL_TRACES_SAMPLER": "parentbased_always_off", "OTEL_SERVICE_NAME": "front-door"}
    with rig(tmp_path, "http", monkeypatch, **named) as (sink, gateway):
        ask(gateway, "cd" * 16, flags="00")
        httpx.post(f"http://{gateway.http}/v2/models/r/infer", json=BODY).raise_for_status()
        ask(gateway, "ef" * 16)
        assert within(10, lambda: any(service == "front-door" for service, _ in sink.of("ef" * 16)))
        assert {span.trace_id.hex() for service, span in sink.spans if service == "front-door"} == {"ef" * 16}


def test_a_collector_that_is_down_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with served(tmp_path, "--backend", f"http://127.0.0.1:{free_port()}", wait=(503,)) as gateway:
        for _ in range(20):
            assert httpx.post(f"http://{gateway.http}/v2/models/r/infer", json=BODY).status_code == 503
        began = time.monotonic()
        gateway.process.terminate()
        assert gateway.process.wait(15) == 0
        assert time.monotonic() - began < 8

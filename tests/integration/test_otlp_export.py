"""What a collector gets of a whole stack before a fake server, under each of the standard variables."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any

import httpx
import pytest

from tests.support.gateway import FakeServer, Rig, double
from tests.support.otlp import Sink, attributes, collector
from tests.support.serve import HEADRACE

POLICY = """
backends:
  b: {endpoints: ["http://user-facing:8000"], model: double, batch: {max_rows: 8, slots: 1}}
routes:
  r: {backend: b}
"""
IDS = ["1" * 32, "2" * 32, "3" * 32]
SERVER, CLIENT = 2, 3


def body(rows: int = 1) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "datatype": "FP32", "shape": [rows, 1], "data": [1.0] * rows}]}


def run(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    *,
    headers: dict[str, str] | None = None,
    sampled: int = 3,
    others: int = 1,
) -> tuple[Sink, Rig]:
    """So many sampled callers at once, and others that bring no trace; what came to the collector, and the stack."""
    with collector() as (sink, url):
        for name, value in {"OTEL_EXPORTER_OTLP_ENDPOINT": url, **environment}.items():
            monkeypatch.setenv(name, value)
        rig = Rig(POLICY, FakeServer({"double": double}))

        async def ask() -> None:
            async with rig.client() as client:
                parents = [{"traceparent": f"00-{i}-00f067aa0ba902b7-01"} for i in IDS[:sampled]]
                calls = [
                    client.post("/v2/models/r/infer", json=body(), headers={**parent, **(headers or {})})
                    for parent in [*parents, *[{}] * others]
                ]
                for answer in await asyncio.gather(*calls):
                    answer.raise_for_status()

        asyncio.run(ask())
        rig.tracing.close()
    return sink, rig


def test_a_batch_is_linked_with_all_its_members_and_each_member_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, _ = run(monkeypatch, {})
    spans = [span for _, span in sink.spans]
    batches = [span for span in spans if span.name == "batch" and len(span.links) > 1]
    assert len(batches) == 1
    members = {span.span_id: span for span in spans if span.name == "dispatch"}
    assert {link.span_id for link in batches[0].links} <= members.keys()
    adopted = members[batches[0].parent_span_id]
    for link in batches[0].links:
        if link.span_id != adopted.span_id:  # its child shows in its own trace
            assert [back.span_id for back in members[link.span_id].links] == [batches[0].span_id]
    assert attributes(batches[0])["headrace.batch.requests"] == len(batches[0].links)


def test_spans_of_calls_are_named_by_the_conventions(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, _ = run(monkeypatch, {}, headers={"user-agent": "curl/8"})
    assert sink.schemas == {"https://opentelemetry.io/schemas/1.44.0"}
    root = next(span for _, span in sink.of(IDS[0]) if span.kind == SERVER)
    assert root.name == "POST /v2/models/{model}/infer"
    told = attributes(root)
    assert len(told.pop("headrace.policy")) == 12
    assert {k: v for k, v in told.items() if k.startswith("headrace.")} == {"headrace.model": "r"}
    assert {k: v for k, v in told.items() if not k.startswith("headrace.")} == {
        "http.request.method": "POST", "http.route": "/v2/models/{model}/infer", "url.path": "/v2/models/r/infer",
        "url.scheme": "http", "http.response.status_code": 200, "network.protocol.version": "1.1",
        "server.address": "gateway", "client.address": "127.0.0.1", "user_agent.original": "curl/8",
    }  # fmt: skip
    call = next(span for _, span in sink.spans if span.kind == CLIENT)
    assert call.name == "POST /v2/models/{model}/infer"
    assert attributes(call) == {
        "http.request.method": "POST", "url.full": "http://user-facing:8000/v2/models/double/infer",
        "url.template": "/v2/models/{model}/infer", "server.address": "user-facing", "server.port": 8000,
        "http.response.status_code": 200, "headrace.model": "double", "headrace.kind": "triton",
        "headrace.endpoint": "http://user-facing:8000",
    }  # fmt: skip


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_SAMPLER": "always_off"},
        {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"},
        {"OTEL_SDK_DISABLED": "true"},
    ],
)
def test_what_is_switched_off_exports_nothing_and_keeps_nothing(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, rig = run(monkeypatch, environment)
    assert sink.spans == []
    assert rig.tracing.recent.ids() == []


@pytest.mark.parametrize("sampler", ["parentbased_always_off", "parentbased_traceidratio"])
def test_a_parent_based_sampler_follows_the_caller(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, rig = run(monkeypatch, {"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": "0"})
    assert {span.trace_id.hex() for _, span in sink.spans} == set(IDS)
    assert set(rig.tracing.recent.ids()) == set(IDS)


def test_an_exporter_that_is_none_keeps_traces_for_the_admin_port_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, rig = run(monkeypatch, {"OTEL_TRACES_EXPORTER": "none"})
    assert sink.spans == []
    assert len(rig.tracing.recent.ids()) == 4


def test_resource_attributes_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, _ = run(monkeypatch, {"OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=canary,team=edge"})
    assert sink.resource.items() >= {
        "service.name": "headrace", "deployment.environment.name": "canary", "team": "edge",
    }.items()  # fmt: skip
    sink, _ = run(monkeypatch, {"OTEL_RESOURCE_ATTRIBUTES": "service.name=front-door", "OTEL_SERVICE_NAME": ""})
    assert sink.resource["service.name"] == "front-door"


def test_baggage_passes_with_a_call_that_leaves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    environment, headers = {"OTEL_PROPAGATORS": "tracecontext,baggage"}, {"baggage": "tenant=acme"}
    _, rig = run(monkeypatch, environment, headers=headers, sampled=1, others=0)
    sent = rig.server.requests[0].headers
    assert sent["baggage"] == "tenant=acme"
    assert sent["traceparent"].startswith(f"00-{IDS[0]}-")
    # A merged call has several callers, and speaks for none of them.
    _, rig = run(monkeypatch, environment, headers=headers)
    assert len(rig.server.requests) == 1
    assert "baggage" not in rig.server.requests[0].headers


def test_no_propagators_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, rig = run(monkeypatch, {"OTEL_PROPAGATORS": "none", "OTEL_TRACES_SAMPLER": "always_on"})
    assert not {span.trace_id.hex() for _, span in sink.spans} & set(IDS)
    sent = {request.headers.get("traceparent", "") for request in rig.server.requests}
    assert sent <= {"", *(f"00-{i}-00f067aa0ba902b7-01" for i in IDS)}  # as the caller's, or none


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("OTEL_PROPAGATORS", "tracecontext,b3", "OTEL_PROPAGATORS: 'b3' is not installed"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL: expected http/protobuf"),
    ],
)
def test_a_variable_that_cannot_be_heeded_is_one_line_at_start(
    variable: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(variable, value)
    off = [part for name in ("http", "grpc", "metrics", "admin") for part in (f"--{name}", "127.0.0.1:0")]
    answer = subprocess.run(
        [HEADRACE, "serve", "--backend", "http://127.0.0.1:9", *off], capture_output=True, text=True, timeout=30
    )
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(told)
    assert answer.stderr.count("\n") == 1


def test_a_relayed_calls_query_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (sink, url):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        rig = Rig(POLICY, FakeServer({}))

        async def ask() -> httpx.Response:
            async with rig.client() as client:
                return await client.get("/v2/models/r/stats?token=secret")

        assert asyncio.run(ask()).status_code == 200
        rig.tracing.close()
    root, call = (next(span for _, span in sink.spans if span.kind == kind) for kind in (SERVER, CLIENT))
    assert root.name == call.name == "GET /v2/models/{model}/stats"
    assert "secret" not in str(sink.spans)
    assert attributes(call)["url.full"] == "http://user-facing:8000/v2/models/double/stats"

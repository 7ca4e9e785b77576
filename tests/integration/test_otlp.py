"""Spans in the operator's own collector: ours and Triton's, in one trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from backends.proto import kserve_pb2 as pb
from deploy.demo.repository import write_test_models
from deploy.demo.triton import Triton, ensure_venv
from tests.support.otlp import Sink, attributes, collector
from tests.support.serve import Served, free_port, served, within
from tests.support.triton import VENV

SERVICE = "inference.GRPCInferenceService"
IDS = ("a1" * 16, "b2" * 16, "c3" * 16)
BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}
POLICY = """
backends:
  b: {{endpoints: [{{http: http://{http}, grpc: {grpc}}}], protocol: {protocol}, model: rowsum, batch: {{max_rows: 8}}}}
routes:
  r: {{backend: b}}
"""


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
        spans = [span for service, span in sink.of(trace_id) if service == "headrace"]
        kinds = {span.kind: span for span in spans if span.kind != span.SPAN_KIND_INTERNAL}
        root, call = kinds[spans[0].SPAN_KIND_SERVER], kinds[spans[0].SPAN_KIND_CLIENT]
        theirs = [span for service, span in sink.of(trace_id) if service != "headrace"]
        ours = {span.name: span for span in spans}
        assert root.name == "POST /v2/models/{model}/infer"
        assert call.name == {"http": root.name, "grpc": "inference.GRPCInferenceService/ModelInfer"}[protocol]
        assert root.parent_span_id.hex() == "00f067aa0ba902b7"
        assert attributes(root)["client.address"] == "127.0.0.1"
        assert str(attributes(root)["server.port"]) == gateway.http.rpartition(":")[2]
        assert call.span_id in {span.parent_span_id for span in theirs}
        assert [link.span_id for link in ours["batch"].links] == [ours["dispatch"].span_id]


def test_a_call_that_came_over_grpc_is_told_by_rpc_conventions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (sink, url):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        policy = tmp_path / "policy.yaml"
        dead = f"127.0.0.1:{free_port()}"
        policy.write_text(POLICY.format(http=dead, grpc=dead, protocol="grpc"))
        with served(tmp_path, str(policy), wait=(503,)) as gateway, grpc.insecure_channel(gateway.grpc) as channel:
            for trace_id, method, message in (
                (IDS[0], "ModelInfer", infer_of("r")),
                (IDS[1], "ModelInfer", infer_of("nobody")),
                (IDS[2], "ModelMetadata", b"\n\1r"),  # field 1, the model's name
            ):
                parent = (("traceparent", f"00-{trace_id}-00f067aa0ba902b7-01"),)
                with pytest.raises(grpc.RpcError):
                    channel.unary_unary(f"/{SERVICE}/{method}")(message, metadata=parent, timeout=10)
            assert within(20, lambda: all(roots(sink, trace_id) for trace_id in IDS))
    (down,), (unknown,), (relayed,) = (roots(sink, trace_id) for trace_id in IDS)
    assert (down.name, down.status.code) == (f"{SERVICE}/ModelInfer", down.status.STATUS_CODE_ERROR)
    told = attributes(down)
    assert told.items() >= {
        "rpc.system.name": "grpc", "rpc.method": down.name, "rpc.response.status_code": "UNAVAILABLE",
        "error.type": "Unreachable", "client.address": "127.0.0.1", "headrace.model": "r",
    }.items()  # fmt: skip
    assert unknown.status.code == unknown.status.STATUS_CODE_UNSET  # its caller's affair
    assert attributes(unknown)["rpc.response.status_code"] == "NOT_FOUND"
    assert "nobody" in attributes(unknown)["headrace.failure"]
    assert relayed.name == f"{SERVICE}/ModelMetadata"


def infer_of(model: str) -> bytes:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[bytes(64)])
    request.inputs.add(name="X", datatype="FP32", shape=[1, 16])
    return request.SerializeToString()


def roots(sink: Sink, trace_id: str) -> list[Any]:
    return [span for _, span in sink.of(trace_id) if span.kind == span.SPAN_KIND_SERVER]


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

"""Reports and traces for people."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import httpx
import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from gateway.cli import app
from gateway.tools.report import Record, table, write
from gateway.tools.trace_tree import tree


def shown(renderable: object, width: int = 200) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_records_are_a_table_and_json(tmp_path: Path) -> None:
    records = [
        Record(case="heavy", metric="p50_ms", value=10.0, unit="ms"),
        Record(case="cascade", metric="p50_ms", value=2.5, unit="ms", against="heavy", ratio=0.25),
    ]
    text = shown(table(records, {"p50_ms": ("p50 ms", ".1f")}))
    assert "2.5 (25%)" in text
    write(tmp_path / "deep/er/report.json", records)
    document = msgspec.json.decode((tmp_path / "deep/er/report.json").read_bytes())
    assert document[1] == {
        "case": "cascade", "metric": "p50_ms", "value": 2.5, "unit": "ms", "against": "heavy", "ratio": 0.25,
    }  # fmt: skip


def span(name: str, span_id: str, parent: str | None, start: int, ms: float, **more: object) -> dict[str, object]:
    return {
        "name": name, "trace_id": "t1", "span_id": span_id, "parent_id": parent, "start_unix_ns": start,
        "duration_ms": ms, "kind": "internal", "attributes": {}, "error": None, "links": [], **more,
    }  # fmt: skip


def test_a_trace_is_an_indented_tree_with_times() -> None:
    spans = [
        span(
            "POST /v2/models/{model}/infer",
            "a",
            "remote",
            0,
            9.0,
            kind="server",
            attributes={
                "http.request.method": "POST",
                "headrace.model": "m",
                "http.response.status_code": 200,
            },
        ),
        span("batch", "c", "b", 2_000_000, 5.0, trace_id="t2"),
        span("dispatch", "b", "a", 1_000_000, 7.0, error="it [broke]", attributes={"headrace.rows": 3}),
    ]
    lines = shown(tree({"trace_id": "t1", "spans": spans})).splitlines()
    assert lines[0] == "trace t1"
    assert lines[1].rstrip() == "└── edge http  9.00 ms  at 0.00  status=200"
    assert lines[2].startswith("    └── dispatch  7.00 ms  at 1.00  rows=3")
    assert "it [broke]" in lines[2]
    assert lines[3].startswith("        └── batch  5.00 ms  at 2.00")
    assert "(shared batch)" in lines[3]


def test_a_call_in_a_trace_has_a_short_name_and_its_long_one_where_it_is_no_inference() -> None:
    sent = {"headrace.model": "m", "headrace.kind": "triton", "headrace.endpoint": "http://b:1", "url.full": "u"}
    spans = [
        span("GET /v2/models/{model}/stats", "a", None, 0, 9.0, kind="server", attributes={"headrace.policy": "v"}),
        span("GET /v2/models/{model}/stats", "b", "a", 1, 8.0, kind="client", attributes=sent, error=""),
        span("inference.GRPCInferenceService/ModelInfer", "c", None, 9, 1.0, kind="server", attributes={
            "rpc.method": "x", "rpc.response.status_code": "OK",
        }),
    ]  # fmt: skip
    lines = [line.rstrip() for line in shown(tree({"trace_id": "t1", "spans": spans})).splitlines()]
    assert lines[1] == "├── edge http  9.00 ms  at 0.00  call=GET /v2/models/{model}/stats"
    assert lines[2] == ("│   └── triton m  8.00 ms  at 0.00  call=GET /v2/models/{model}/stats endpoint=http://b:1")
    assert lines[3] == "└── edge grpc  1.00 ms  at 0.00  status=OK"


def test_a_policy_is_explained_line_by_line(tmp_path: Path) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text("proxy: b\nbackends:\n  b: {endpoints: ['http://[::1]:8000']}\n")
    answer = CliRunner().invoke(app, ["explain", str(policy)])
    assert answer.exit_code == 0
    lines = [" ".join(line.split()) for line in answer.output.splitlines()]
    assert f"├── proxy: b {policy}:1" in lines
    assert f"│ │ └── [0]: http://[::1]:8000 {policy}:3" in lines
    assert "│ ├── timeout: 30s default" in lines
    policy.write_text("proxy: c")
    assert CliRunner().invoke(app, ["explain", str(policy)]).exit_code == 1


def test_the_schema_command_prints_json() -> None:
    answer = CliRunner().invoke(app, ["schema"])
    assert (answer.exit_code, msgspec.json.decode(answer.output)["title"]) == (0, "Headrace policy")


def test_the_command_waits_as_long_as_models_load_and_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[httpx.Timeout] = []

    def request(method: str, url: str, *, timeout: httpx.Timeout, **_: object) -> httpx.Response:
        asked.append(timeout)
        if len(asked) == 1:
            raise httpx.ReadTimeout("timed out")
        return httpx.Response(504, json={"error": "worker 1: silent", "left": ["worker 1: silent; it may do so yet"]})

    monkeypatch.setattr(httpx, "request", request)
    late, left = (CliRunner().invoke(app, ["policy", "rollback"]) for _ in range(2))
    assert late.output.startswith("http://127.0.0.1:8003: no answer within 300 s; it may do so yet")
    assert left.output.splitlines() == ["http://127.0.0.1:8003: worker 1: silent", "worker 1: silent; it may do so yet"]
    assert (late.exit_code, left.exit_code) == (1, 1)
    assert CliRunner().invoke(app, ["trace", "last"]).exit_code == 1
    assert [limit.read for limit in asked] == [300.0, 300.0, 30.0]

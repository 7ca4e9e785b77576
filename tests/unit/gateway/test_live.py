"""`headrace explain --live` before a fake server on 127.0.0.1: one finding for each way to disagree."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gateway.cli import app
from gateway.tools.live import ask, findings
from gateway.tools.live_tree import live_tree
from policies import parse
from tests.support.models import linear

INPUT = {"name": "X", "datatype": "FP32", "shape": [-1, 16]}


def model(*outputs: tuple[str, str, list[int]], **config: Any) -> dict[str, Any]:
    """A model's metadata and configuration as Triton would tell them; `config=None` means that it does not."""
    tensors = [{"name": n, "datatype": d, "shape": s} for n, d, s in outputs or (("Y", "FP32", [-1, 4]),)]
    settings = {"max_batch_size": 8, "instance_group": [{"kind": "KIND_CPU", "count": 2}]} | config
    return {"metadata": {"versions": ["1"], "platform": "p", "inputs": [INPUT], "outputs": tensors}, "config": settings}


@contextmanager
def server(models: dict[str, Any], about: Any = None, slow: float = 0.0) -> Iterator[tuple[str, list[Any]]]:
    """Its URL, and the headers of what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, dict(self.headers)))
            time.sleep(slow)
            status, said = 200, self._said()
            if said is None:
                # What Triton says to a model that it has not, and another server to an extension that it has not.
                status = 404 if self.path.endswith("/config") else 400
                said = {"error": f"Request for unknown model: {self.path} is not found\x1b[2J"}
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _said(self) -> Any:
            match self.path.strip("/").split("/"):
                case ["v2"]:
                    return about or {"name": "triton", "version": "2.51.0"}
                case ["v2", "health", "ready"]:
                    return {}
                case ["v2", "models", name, "versions", version, *rest] if version == "1":
                    return self._of(name, rest)
                case ["v2", "models", name, *rest] if rest[:1] != ["versions"]:
                    return self._of(name, rest)
            return None

        def _of(self, name: str, rest: list[str]) -> Any:
            kind = {"": "metadata", "config": "config", "ready": "ready"}["/".join(rest)]
            found = models.get(name)
            return {**found, "ready": {}}.get(kind) if found else None

        def log_message(self, *_: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}", asked
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def found(text: str, models: dict[str, Any], **more: Any) -> list[str]:
    """The findings about the policy `text`, in which `AT` stands for the server's address, as it does in them."""
    with server(models, **more) as (url, _):
        policy = parse(text.replace("AT", url), "policy.yaml", {})
        return [line.replace(url, "AT") for line in findings(policy, ask(policy))]


ONE = "backends: {b: {endpoints: [AT], model: m, batch: {max_rows: 8}}}\nroutes: {r: {backend: b}}"


def test_a_policy_that_fits_has_no_findings() -> None:
    assert found(ONE, {"m": model()}) == []


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ({"m": model(max_batch_size=4)}, "backends.b: AT: batch.max_rows is 8, and 'm' has max_batch_size 4"),
        ({"m": model(max_batch_size=0)}, "backends.b: AT: 'm' has max_batch_size 0"),
        ({"m": model(model_transaction_policy={"decoupled": True})}, "backends.b: AT: 'm' is decoupled, and batch"),
        ({"m": model(sequence_batching={})}, "backends.b: AT: 'm' is a sequence model, and batch merges"),
        ({}, "backends.b: AT: model 'm' is unknown or not loaded: Request for unknown model: /v2/models/m is not"),
    ],
)
def test_a_backend_that_the_server_cannot_answer_as_it_is(models: dict[str, Any], told: str) -> None:
    (line,) = found(ONE, models)
    assert line.startswith(told)
    assert line.isprintable()


def test_a_version_that_is_missing() -> None:
    policy = ONE.replace("model: m,", "model: m, version: 7,")
    assert found(policy, {"m": model()}) == ["backends.b: AT: version 7 is missing; the server has 1"]
    assert found(policy.replace("7", "1"), {"m": model()}) == []


CASCADE = """
backends: {s: {endpoints: [AT], model: small}, l: {endpoints: [AT], model: large}}
routes:
  r:
    tiers:
      - {backend: s, accept: {output: Y, values: logits, score: margin, threshold: 0.5}}
      - {backend: l}
"""


@pytest.mark.parametrize(
    ("small", "told"),
    [
        (model(("Z", "FP32", [-1, 4])), "routes.r.s.accept.output: the model has no 'Y'; it has Z"),
        (model(("Y", "INT64", [-1, 4])), "routes.r.s.accept.output: expected FP16, FP32, FP64, and the model has Y"),
        (model(("Y", "FP32", [-1])), "routes.r.s.accept.output: expected the shape [rows, classes]"),
        (model(("Y", "FP32", [-1, 1])), "routes.r.s.accept.output: expected the shape [rows, classes]"),
        (model(("Y", "FP32", [-1, 5])), "routes.r: 's' and 'l' answer differently: Y FP32 [-1, 5] and Y FP32 [-1, 4]"),
        (model(("Y", "FP16", [-1, 4])), "routes.r: 's' and 'l' answer differently: Y FP16 [-1, 4] and Y FP32"),
    ],
)
def test_a_cascade_whose_models_do_not_fit(small: dict[str, Any], told: str) -> None:
    lines = found(CASCADE, {"small": small, "large": model()})
    assert any(line.startswith(told) for line in lines), lines


def test_lengths_that_a_model_leaves_open_are_alike() -> None:
    small = model(("Y", "FP32", [-1, -1]))
    assert found(CASCADE, {"small": small, "large": model(("Y", "FP32", [8, 4]))}) == []


def test_a_cache_before_a_decoupled_model() -> None:
    policy = "backends: {b: {endpoints: [AT], model: m}}\nroutes: {r: {backend: b, cache: {}}}".replace(
        "{}", "{ttl: 1h}"
    )
    (line,) = found(policy, {"m": model(model_transaction_policy={"decoupled": True})})
    assert line == "routes.r.cache: 'm' is decoupled, and what it answers cannot be kept"


def test_a_backend_without_a_model_is_asked_for_the_routes_name_or_for_itself() -> None:
    assert found("backends: {b: {endpoints: [AT]}}\nproxy: b", {}) == []
    policy = "backends: {b: {endpoints: [AT]}}\nroutes: {m: {backend: b}, n: {backend: b}}"
    (line,) = found(policy, {"m": model()})
    assert line.startswith("backends.b: AT: model 'n' is unknown")


def test_what_a_server_does_not_tell_is_not_held_against_the_policy() -> None:
    assert found(ONE, {"m": {**model(), "config": None}}) == []


def test_what_is_no_kserve_server_or_does_not_answer_in_time_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = found(ONE, {}, about=["<html>"])
    assert line.startswith("backends.b: AT: GET /v2 answered something else")
    monkeypatch.setattr("gateway.tools.live._SECONDS", 0.2)
    began = time.monotonic()
    replicas = ", ".join(["AT", "http://127.0.0.1:9"])
    lines = found(ONE.replace("[AT]", f"[{replicas}]"), {"m": model()}, slow=0.5)
    assert lines[0] == "backends.b: AT: no answer within 0.2 s"
    assert lines[1].startswith("backends.b: http://127.0.0.1:9: ")
    assert time.monotonic() - began < 1.5


def test_grpc_alone_is_asked_whether_it_speaks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    policy = parse(ONE.replace("AT", f"'grpc://127.0.0.1:{port}'"), "policy.yaml", {})
    (line,) = findings(policy, ask(policy))
    assert line.endswith(f"nothing speaks gRPC at 127.0.0.1:{port}")


def test_the_policys_headers_go_with_every_question() -> None:
    with server({"m": model()}) as (url, asked):
        text = ONE.replace("AT", url).replace("model: m,", "model: m, headers: {authorization: Bearer x},")
        policy = parse(text, "policy.yaml", {})
        assert list(findings(policy, ask(policy))) == []
    assert {headers.get("authorization") for _, headers in asked} == {"Bearer x"}
    assert len(asked) == 4


def test_local_models_and_redis(tmp_path: Path) -> None:
    linear(tmp_path / "there.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"garbage")
    text = f"""
redis: {{url: "redis://127.0.0.1:9/0", password: hunter2}}
x-rule: &rule {{values: logits, score: margin, threshold: 1}}
backends:
  a: {{local: {tmp_path}/there.onnx}}
  b: {{local: {tmp_path}/gone.onnx}}
  c: {{local: {tmp_path}/broken.onnx}}
routes:
  r: {{tiers: [{{backend: a, accept: {{<<: *rule, output: NOPE}}}}, {{backend: b}}]}}
  s: {{tiers: [{{backend: a, accept: {{<<: *rule, output: LOGITS}}}}, {{backend: c}}]}}
"""
    policy = parse(text, "policy.yaml", {})
    live = ask(policy)
    lines = list(findings(policy, live))
    assert lines[0] == f"backends.b.local: {tmp_path}/gone.onnx: there is no such file or folder"
    assert lines[1].startswith(f"backends.c.local: {tmp_path}/broken.onnx: ")
    assert lines[2].startswith("redis: redis://127.0.0.1:9/0: ")
    assert lines[3] == "routes.r.a.accept.output: the model has no 'NOPE'; it has LOGITS, SUM"
    assert len(lines) == 4
    assert "hunter2" not in "".join(lines)
    told = StringIO()
    Console(file=told, width=200).print(live_tree(policy, live))
    assert "in  X FP32" in told.getvalue()


def test_the_command_prints_what_it_found_and_ends_with_one_where_they_disagree(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    with server({"m": model()}) as (url, _):
        file.write_text(ONE.replace("AT", url))
        answer = CliRunner().invoke(app, ["explain", str(file), "--live"])
        assert answer.exit_code == 0, answer.output
        for told in (
            f"{url}  ready  triton 2.51.0", "m: max_batch_size 8, instances 2", "in  X FP32 [-1, 16]",
            "out Y FP32 [-1, 4]", "findings: none", "max_rows: 8",
        ):  # fmt: skip
            assert told in answer.output, told
        file.write_text(ONE.replace("AT", url).replace("max_rows: 8", "max_rows: 16"))
        answer = CliRunner().invoke(app, ["explain", str(file), "--live"])
        assert answer.exit_code == 1
        assert f"finding: backends.b: {url}: batch.max_rows is 16" in answer.output
        assert answer.output.endswith("findings: 1\n")

"""Policies put in force by signal and by command: the installed command and a real tritonserver."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx

from tests.support.serve import HEADRACE, Served, served, within
from tests.support.triton import triton  # noqa: F401

POLICY = """
backends:
  b: {{endpoints: [{{http: http://{http}, grpc: {grpc}}}], protocol: http, model: rowsum, batch: {{max_rows: {rows}}}}}
routes:
  r: {{backend: b}}
telemetry: {{access_log: false}}
"""
BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}


def version(gateway: Served) -> str:
    return str(httpx.get(f"http://{gateway.admin}/policy").json()["version"])


def test_sighup_apply_diff_and_rollback(triton: Any, tmp_path: Path) -> None:  # noqa: F811
    policy, other = tmp_path / "policy.yaml", tmp_path / "other.yaml"
    policy.write_text(POLICY.format(http=triton.http, grpc=triton.grpc, rows=4))
    other.write_text(POLICY.format(http=triton.http, grpc=triton.grpc, rows=6))

    with served(tmp_path, str(policy)) as gateway:

        def command(*words: str) -> subprocess.CompletedProcess[str]:
            line = [HEADRACE, "policy", *words, "--admin", f"http://{gateway.admin}"]
            return subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)

        first = version(gateway)
        differs = command("diff", str(other))
        assert differs.returncode == 1
        assert differs.stdout.splitlines() == ["- backends.b.batch.max_rows: 4", "+ backends.b.batch.max_rows: 6"]
        assert command("apply", str(other)).returncode == 0
        assert version(gateway) != first
        assert command("diff", str(other)).stdout.strip() == "no difference"
        assert command("rollback").returncode == 0
        assert version(gateway) == first
        nothing = command("rollback")
        assert (nothing.returncode, len(nothing.stderr.strip().splitlines())) == (1, 1)
        other.write_text("backends: {b: {endpoints: [http://127.0.0.1:1], model: rowsum}}\nroutes: {r: {backend: b}}\n")
        unready = command("apply", str(other))
        assert unready.returncode == 1
        assert "http://127.0.0.1:1 is not ready" in unready.stderr
        assert version(gateway) == first
        policy.write_text(policy.read_text() + "# the same, said otherwise\n")
        gateway.process.send_signal(signal.SIGHUP)
        assert within(1, lambda: version(gateway) != first)
        assert httpx.post(f"http://{gateway.http}/v2/models/r/infer", json=BODY).status_code == 200

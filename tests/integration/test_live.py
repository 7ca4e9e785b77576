"""`headrace explain --live` before a real tritonserver and a real redis-server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.demo.repository import write_test_models
from deploy.demo.triton import Triton, ensure_venv
from tests.support.redis import redis_server
from tests.support.serve import HEADRACE, free_port
from tests.support.triton import VENV

GOOD = """
redis: {{url: "redis://127.0.0.1:{redis}/0", password: hunter2, timeout: 2s}}
backends:
  sum: {{endpoints: [{{http: "http://{http}", grpc: "{grpc}"}}], model: rowsum, version: 1, batch: {{max_rows: 64}}}}
  all: {{endpoints: [{{http: "http://{http}"}}]}}
proxy: all
routes:
  sum: {{backend: sum, cache: {{store: redis}}}}
"""
BAD = """
redis: {{url: "redis://127.0.0.1:{redis}/0", password: wrong, timeout: 2s}}
backends:
  sum: {{endpoints: ["http://{http}"], model: rowsum, batch: {{max_rows: 65}}}}
  old: {{endpoints: ["http://{http}"], model: rowsum, version: 7}}
  gone: {{endpoints: ["http://{http}"], model: nobody}}
  stream: {{endpoints: ["http://{http}"], model: stream, batch: {{max_rows: 8}}}}
  chat: {{endpoints: ["http://{http}"], model: chat, batch: {{max_rows: 8}}}}
  echo: {{endpoints: ["http://{http}"], model: echo}}
routes:
  r:
    tiers:
      - {{backend: sum, accept: {{output: LOGITS, values: logits, score: margin, threshold: 0.5}}}}
      - {{backend: echo}}
"""


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Where `echo`, `rowsum` and copies of it are, one decoupled, one a sequence model; and where Redis is."""
    folder = tmp_path_factory.mktemp("live")
    repository = write_test_models(folder / "models")
    for name, more in {
        "stream": "model_transaction_policy { decoupled: true }",
        "chat": "sequence_batching { }",
    }.items():
        shutil.copytree(repository / "rowsum", repository / name)
        config = repository / name / "config.pbtxt"
        config.write_text(config.read_text().replace('name: "rowsum"', f'name: "{name}"') + more)
    with (
        Triton(ensure_venv(VENV), repository, log=folder / "triton.log", http=free_port(3)) as server,
        redis_server(folder, "--requirepass", "hunter2") as redis,
    ):
        yield {"http": server.http, "grpc": server.grpc, "redis": redis.port}


def explain(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    file = folder / "policy.yaml"
    file.write_text(text)
    command = [HEADRACE, "explain", str(file), "--live"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_policy_that_fits(at: dict[str, object], tmp_path: Path) -> None:
    answer = explain(tmp_path, GOOD.format(**at))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for told in ("  ready  triton 2.", "rowsum: max_batch_size 64", "in  X FP32 [-1, 16]", "findings: none"):
        assert told in answer.stdout, told
    assert "hunter2" not in answer.stdout


def test_every_way_to_disagree_is_a_line(at: dict[str, object], tmp_path: Path) -> None:
    answer = explain(tmp_path, BAD.format(**at))
    assert answer.returncode == 1
    lines = [line.replace(f"http://{at['http']}", "AT") for line in answer.stdout.splitlines() if "finding: " in line]
    expected = (
        "finding: backends.sum: AT: batch.max_rows is 65, and 'rowsum' has max_batch_size 64",
        "finding: backends.old: AT: version 7 is missing; the server has 1",
        "finding: backends.gone: AT: model 'nobody' is unknown or not loaded: ",
        "finding: backends.stream: AT: 'stream' is decoupled, and batch",
        "finding: backends.chat: AT: 'chat' is a sequence model, and batch",
        f"finding: redis: redis://127.0.0.1:{at['redis']}/0: WRONGPASS: it refuses the user or the password",
        "finding: routes.r.sum.accept.output: the model has no 'LOGITS'; it has ",
        "finding: routes.r: 'sum' and 'echo' answer differently: ",
    )
    assert len(lines) == len(expected), lines
    for line, begins in zip(lines, expected, strict=True):
        assert line.startswith(begins)

"""`headrace init` before a real tritonserver: what it prints passes `headrace check` and serves."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy.demo.repository import write_test_models
from deploy.demo.triton import Triton, ensure_venv
from policies import load
from tests.support.serve import HEADRACE, free_port, served
from tests.support.triton import VENV

MORE = {
    "stream": "model_transaction_policy { decoupled: true }",
    "chat": "sequence_batching { }",
    "row+sum": "",
}


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HEADRACE, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """`echo` and `rowsum`, and copies of `rowsum` that are decoupled, a sequence model, and have an impossible name."""
    folder = tmp_path_factory.mktemp("mixed")
    repository = write_test_models(folder / "models")
    for name, more in MORE.items():
        shutil.copytree(repository / "rowsum", repository / name)
        config = repository / name / "config.pbtxt"
        config.write_text(config.read_text().replace('name: "rowsum"', f'name: "{name}"') + more)
    with Triton(ensure_venv(VENV), repository, log=folder / "triton.log", http=free_port(3)) as server:
        yield server


def test_the_policy_of_a_live_server_checks_and_serves(mixed: Triton, tmp_path: Path) -> None:
    written = headrace("init", f"http://{mixed.http}")
    assert written.returncode == 0, written.stderr
    file = tmp_path / "policy.yaml"
    file.write_text(written.stdout)
    checked = headrace("check", str(file))
    assert checked.returncode == 0, checked.stderr
    policy = load(file, {})
    assert sorted(policy.routes) == ["chat", "echo", "rowsum", "stream"]
    batches = {name: b.batch and (b.batch.max_rows, b.batch.slots) for name, b in policy.backends.items()}
    assert batches == {"echo": (64, 1), "rowsum": (64, 1), "stream": None, "chat": None}
    assert policy.backends["echo"].endpoints[0].grpc == mixed.grpc  # the next port, which answers
    for told in (
        "it is decoupled",
        "it is a sequence model",
        "in  X FP32 [-1, 16]",
        "#   row+sum: its name is not",
        "# Left out",
    ):
        assert told in written.stdout
    assert "'row+sum' is left out" in written.stderr

    with served(tmp_path, str(file)) as gateway:
        body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}
        answer = httpx.post(f"http://{gateway.http}/v2/models/rowsum/infer", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["headrace-batch"] == "1"
        again = httpx.post(f"http://{mixed.http}/v2/models/rowsum/infer", json=body)
        assert answer.json()["outputs"] == again.json()["outputs"]


def test_grpc_is_left_out_where_nothing_speaks_it(mixed: Triton) -> None:
    # The metrics port takes connections, and speaks HTTP/1.1.
    written = headrace("init", f"http://{mixed.http}", "--grpc", mixed.metrics)
    assert written.returncode == 0
    assert f"  grpc: {mixed.metrics}" not in written.stdout
    assert written.stderr.startswith(f"init: gRPC does not answer at {mixed.metrics}")


def test_a_grpc_address_that_is_not_the_next_port_is_taken(triton: Triton) -> None:
    written = headrace("init", f"http://{triton.http}", "--grpc", triton.grpc)
    assert f"  grpc: {triton.grpc}" in written.stdout
    assert written.stderr == ""


def test_a_server_that_is_down_is_one_line() -> None:
    answer = headrace("init", f"http://127.0.0.1:{free_port()}")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith("init: nothing answers at http://127.0.0.1:")
    assert answer.stderr.count("\n") == 1


def test_a_server_of_another_kind_is_one_line(triton: Triton) -> None:
    answer = headrace("init", f"http://{triton.metrics}")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith(f"init: http://{triton.metrics} is no KServe v2 server: GET /v2 answered ")
    assert answer.stderr.count("\n") == 1


def test_a_server_without_models_is_one_line(tmp_path: Path) -> None:
    repository = write_test_models(tmp_path / "models")
    with Triton(ensure_venv(VENV), repository, log=tmp_path / "triton.log", models=[]) as server:
        answer = headrace("init", f"http://{server.http}")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "has no model that is ready; 2 are in its repository and not loaded" in answer.stderr
    assert answer.stderr.count("\n") == 1

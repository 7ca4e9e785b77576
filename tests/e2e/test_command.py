"""The installed command: what an operator meets before there is a single request."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.support.serve import HEADRACE, free_port, served

ROOT = Path(__file__).parents[2]
BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HEADRACE, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_check_accepts_the_examples_without_a_server() -> None:
    for name in ("demo.yaml", "proxy.yaml"):
        done = headrace("check", str(ROOT / "policies/examples" / name))
        assert (done.returncode, done.stderr) == (0, "")
        assert "good (version " in done.stdout


def test_check_tells_every_problem_with_its_line(tmp_path: Path) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text("backends:\n  a: {endpoint: [http://127.0.0.1:1]}\nroutes:\n  r: {backend: b}\n")
    done = headrace("check", str(policy))
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert any("p.yaml:2" in line and "endpoints" in line for line in lines)
    assert any("p.yaml:4" in line for line in lines)


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve",),
        ("serve", "--backend", "ftp://x"),
        ("serve", "--backend", "http://127.0.0.1:1", "--log-level", "loud"),
    ],
)
def test_bad_arguments_are_one_line_and_a_non_zero_exit(arguments: tuple[str, ...]) -> None:
    done = headrace(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("listener", ["http", "grpc", "metrics", "admin"])
def test_a_port_in_use_is_named_with_its_flag(listener: str) -> None:
    flags = {name: f"127.0.0.1:{free_port()}" for name in ("http", "grpc", "metrics", "admin")}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(flags[listener].rpartition(":")[2])))
        taken.listen()
        arguments = [part for name, address in flags.items() for part in (f"--{name}", address)]
        done = headrace("serve", "--backend", "http://127.0.0.1:1", *arguments)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert f"listener '{listener}'" in last
    assert flags[listener] in last
    assert f"--{listener}" in last


def test_a_backend_that_is_down_at_start_is_503_and_told(tmp_path: Path) -> None:
    backend = f"http://127.0.0.1:{free_port()}"
    with served(tmp_path, "--backend", backend, wait=(503,)) as gateway:
        response = httpx.post(f"http://{gateway.http}/v2/models/m/infer", json=BODY)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "connection refused" in response.json()["error"].lower()
        assert httpx.get(f"http://{gateway.http}/livez").status_code == 200
        assert httpx.get(f"http://{gateway.http}/v2/health/ready").status_code == 503
        (endpoint,) = httpx.get(f"http://{gateway.admin}/backends").json()["backend"]["endpoints"]
        assert (endpoint["name"], endpoint["ready"]) == (backend, False)
        ready = [v for k, v in gateway.counters().items() if k.startswith("headrace_backend_ready{")]
        assert ready == [0.0]


def test_sigterm_ends_the_process_with_exit_code_0(tmp_path: Path) -> None:
    with served(tmp_path, "--backend", f"http://127.0.0.1:{free_port()}", wait=(503,)) as gateway:
        began = time.monotonic()
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(10) == 0
        assert time.monotonic() - began < 5


def test_trace_last_without_a_gateway_is_one_line() -> None:
    done = headrace("trace", "last", "--admin", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "no admin port answers" in done.stderr
    assert "Traceback" not in done.stderr

"""`headrace serve --workers`: several processes behind one set of ports, before a small model server."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest

from backends.proto import kserve_pb2 as pb
from tests.support.kserve import KServe, kserve
from tests.support.serve import HEADRACE, Served, free_port, served, within

# Made once: httpx else reads all certificates for each connection, which takes longer than the rest.
NO_TLS = ssl.create_default_context()
BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
POLICY = """
backends:
  b: {{endpoints: [{url}], model: m, batch: {{max_rows: {rows}, slots: 64}}}}
routes:
  r: {{backend: b}}
"""


@contextmanager
def two(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, KServe]]:
    """Two workers, both up, before a model server; nothing is left in their TMPDIR."""
    temporary = folder / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with kserve() as server:
        (folder / "p.yaml").write_text(POLICY.format(url=server.url, rows=4))
        with served(folder, str(folder / "p.yaml"), "--workers", "2") as gateway:
            assert within(20, lambda: {*up(gateway)} == {0, 1}), gateway.logged()
            yield gateway, server
    assert within(5, lambda: not list(temporary.iterdir()))


def told(gateway: Served, message: str) -> list[dict[str, Any]]:
    """The log's lines of that message."""
    lines = (msgspec.json.decode(line) for line in gateway.logged().splitlines())
    return [line for line in lines if line["message"] == message]


def pids(gateway: Served) -> dict[int, int]:
    """The latest process of each worker."""
    return {line["worker"]: line["pid"] for line in told(gateway, "worker started")}


def up(gateway: Served) -> list[int]:
    """The workers that said that they are up, once each time."""
    return [line["worker"] for line in told(gateway, "headrace is up")]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ask(gateway: Served, **options: float) -> httpx.Response:
    """One request on a connection of its own."""
    url = f"http://{gateway.http}/v2/models/r/infer"
    return httpx.post(url, json=BODY, verify=NO_TLS, **options)  # type: ignore[arg-type]


def ask_grpc(gateway: Served) -> None:
    tensor = pb.ModelInferRequest.InferInputTensor(name="X", datatype="FP32", shape=[1, 1])
    request = pb.ModelInferRequest(model_name="r", inputs=[tensor], raw_input_contents=[b"\0\0\x80\x3f"])
    with grpc.insecure_channel(gateway.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        assert pb.ModelInferResponse.FromString(call(request.SerializeToString(), timeout=10)).model_name == "r"


def answered(gateway: Served, protocol: str) -> list[float]:
    """Requests that each worker answered with success."""
    good = [f'worker="{worker}",protocol="{protocol}",route="r"' for worker in (0, 1)]
    return [sum(v for k, v in gateway.counters().items() if k.startswith("headrace_requests_total{" + w)) for w in good]


def versions(gateway: Served) -> list[str]:
    shown = httpx.get(f"http://{gateway.admin}/policy").json()
    assert shown["workers"][0] == shown["version"]
    return list(shown["workers"])


def test_both_answer_http_and_grpc_and_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two(tmp_path, monkeypatch) as (gateway, server):
        for _ in range(40):
            assert ask(gateway).status_code == 200
            ask_grpc(gateway)
        assert server.inferences == 80
        for protocol in ("http", "grpc"):
            counts = answered(gateway, protocol)
            assert sum(counts) == 40
            assert min(counts) > 0
        assert len(set(httpx.get(f"http://{gateway.admin}/traces").json())) > 1
        assert httpx.get(f"http://{gateway.admin}/traces/last").json()["spans"]
        (endpoint,) = httpx.get(f"http://{gateway.admin}/backends").json()["b"]["endpoints"]
        assert (endpoint["ready"], endpoint["in_flight"]) == (True, 0)
        assert httpx.get(f"http://{gateway.admin}/readyz").status_code == 200


def test_an_edit_a_post_and_a_rollback_reach_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two(tmp_path, monkeypatch) as (gateway, server):
        (first,) = set(versions(gateway))
        (tmp_path / "p.yaml").write_text(POLICY.format(url=server.url, rows=6))
        assert within(1, lambda: first not in versions(gateway))
        (second,) = set(versions(gateway))
        policy = POLICY.format(url=server.url, rows=8)
        yaml = {"content-type": "application/yaml"}
        third = httpx.post(f"http://{gateway.admin}/policy", content=policy, headers=yaml).json()["version"]
        assert versions(gateway) == [third, third]
        wrong = httpx.post(f"http://{gateway.admin}/policy", content=policy.replace("slots", "slot"), headers=yaml)
        assert (wrong.status_code, versions(gateway)) == (400, [third, third])
        (tmp_path / "other.yaml").write_text(policy)
        command = [HEADRACE, "policy", "diff", str(tmp_path / "other.yaml"), "--admin", f"http://{gateway.admin}"]
        assert subprocess.run(command, check=False, capture_output=True, text=True).stdout == "no difference\n"
        assert httpx.post(f"http://{gateway.admin}/policy/rollback", headers=yaml).json() == {"version": second}
        assert versions(gateway) == [second, second]
        (tmp_path / "p.yaml").write_text(POLICY.format(url=server.url, rows=10))
        gateway.process.send_signal(signal.SIGHUP)
        assert within(1, lambda: second not in versions(gateway))
        assert ask(gateway).status_code == 200


def test_sigterm_under_load_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two(tmp_path, monkeypatch) as (gateway, server):
        server.seconds = 0.3
        seen: list[tuple[float, int]] = []  # when a request began, and its status; 0: the connection was refused

        def load() -> None:
            status = 200
            while status == 200:
                began = time.monotonic()
                try:
                    status = ask(gateway, timeout=10).status_code
                except httpx.TransportError:
                    status = 0
                seen.append((began, status))

        threads = [threading.Thread(target=load) for _ in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        ended = time.monotonic()
        gateway.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert gateway.process.wait(10) == 0
        # A request that began in the last moments before may still be on its way to a worker.
        before = [status for began, status in seen if began < ended - 0.05]
        assert len(before) > 32
        assert set(before) == {200}
        assert {status for _, status in seen} <= {200, 503, 0}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_is_healed_while_the_other_serves(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two(tmp_path, monkeypatch) as (gateway, _):
        os.kill(pids(gateway)[victim], signal.SIGKILL)
        assert within(5, lambda: bool(told(gateway, "worker ended by SIGKILL")))
        while up(gateway).count(victim) < 2:
            assert ask(gateway).status_code == 200
            assert gateway.process.poll() is None
        for _ in range(40):
            assert ask(gateway).status_code == 200
        assert min(answered(gateway, "http")) > 0
        assert len(set(versions(gateway))) == 1


def test_no_worker_outlives_its_killed_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two(tmp_path, monkeypatch) as (gateway, server):
        server.seconds = 0.5
        statuses: list[int] = []
        thread = threading.Thread(target=lambda: statuses.append(ask(gateway).status_code))
        thread.start()
        assert within(5, lambda: server.inferences == 1)
        gateway.process.kill()
        gateway.process.wait()
        thread.join()
        assert statuses == [200]
        assert within(5, lambda: not any(lives(pid) for pid in pids(gateway).values()))


@pytest.mark.parametrize("number", ["0", "-1", "257"])
def test_an_absurd_number_is_one_line(number: str) -> None:
    done = headrace("--workers", number)
    assert done.returncode == 2
    assert done.stderr == f"--workers: expected 1 to 256, got {number}\n"


@pytest.mark.parametrize("listener", ["http", "grpc", "metrics", "admin"])
def test_a_port_in_use_is_named_before_there_is_a_worker(listener: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = headrace("--workers", "2", **{listener: address})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"listener '{listener}': cannot listen on {address}" in line


def test_a_worker_that_cannot_start_ends_the_command_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / ("long" * 30)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    done = headrace("--workers", "2")
    assert done.returncode == 2
    assert "AF_UNIX path too long" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert list(temporary.iterdir()) == []


def test_a_worker_that_always_ends_is_started_again_more_and_more_slowly(tmp_path: Path) -> None:
    script = """
import sys, time
from gateway.workers import supervise
from policies.spec import Listen

def serve(worker):
    with open(sys.argv[1], "a") as file:
        file.write("started\\n")
    worker.up()

supervise(1, Listen(None, None, None, None), serve, drain=25, rereads=False, now=time.monotonic)
"""
    starts = tmp_path / "starts"
    with subprocess.Popen([sys.executable, "-c", script, str(starts)]) as process:
        time.sleep(2)
        process.terminate()
        process.wait(10)
    # At 0, 0.1, 0.3, 0.7 and 1.5 s.
    assert 3 <= len(starts.read_text().splitlines()) <= 5


def headrace(*arguments: str, **listeners: str) -> subprocess.CompletedProcess[str]:
    """`headrace serve` on free ports, except those given, until it ends by itself."""
    places = {name: f"127.0.0.1:{free_port()}" for name in ("http", "grpc", "metrics", "admin")} | listeners
    flags = [f"--{name}={place}" for name, place in places.items()]
    line = [HEADRACE, "serve", "--backend", "http://127.0.0.1:1", *arguments, *flags]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)

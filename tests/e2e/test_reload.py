"""Policy edits under load: the installed command, a real tritonserver, files as editors and Kubernetes change them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
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


class Load(threading.Thread):
    """Asks one after the other until it is told to stop; keeps what went wrong and the versions that it saw."""

    def __init__(self, gateway: Served) -> None:
        super().__init__()
        self.url = f"http://{gateway.http}/v2/models/r/infer"
        self.stopped = threading.Event()
        self.answers = 0
        self.failures: list[str] = []
        self.versions: set[str] = set()

    def run(self) -> None:
        with httpx.Client(timeout=10) as client:
            while not self.stopped.is_set():
                try:
                    response = client.post(self.url, json=BODY)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    continue
                self.answers += 1
                if response.status_code != 200:
                    self.failures.append(response.text)
                self.versions.add(response.headers.get("headrace-policy", ""))


def test_edits_of_every_kind_under_load_lose_nothing(triton: Any, tmp_path: Path) -> None:  # noqa: F811
    def text(rows: int) -> str:
        return POLICY.format(http=triton.http, grpc=triton.grpc, rows=rows)

    data = tmp_path / "data"
    data.mkdir()
    real = data / "v0.yaml"
    real.write_text(text(4))
    policy = tmp_path / "policy.yaml"
    policy.symlink_to(real)
    with served(tmp_path, str(policy)) as gateway:
        loads = [Load(gateway) for _ in range(4)]
        for load in loads:
            load.start()
        try:
            seen = {version(gateway)}
            for edit in range(12):
                before = version(gateway)
                if edit % 4 == 0:  # in place
                    policy.write_text(text(5 + edit))
                elif edit % 4 == 1:  # by rename, as editors do
                    (tmp_path / "new.yaml").write_text(text(5 + edit))
                    os.replace(tmp_path / "new.yaml", policy)
                elif edit % 4 == 2:  # a symbolic link that is swapped, as Kubernetes does
                    target = data / f"v{edit}.yaml"
                    target.write_text(text(5 + edit))
                    (tmp_path / "link").symlink_to(target)
                    os.replace(tmp_path / "link", policy)
                else:  # a bad one, and back
                    good = policy.read_text()
                    policy.write_text(good.replace("max_rows", "max_row"))
                    assert within(1, lambda: bool(httpx.get(f"http://{gateway.admin}/policy").json()["refused"]))
                    assert version(gateway) == before
                    policy.write_text(good)
                    continue
                assert within(1, lambda before=before: version(gateway) != before), f"edit {edit} is not in force"  # type: ignore[misc]
                seen.add(version(gateway))
        finally:
            for load in loads:
                load.stopped.set()
                load.join()
        assert [failure for load in loads for failure in load.failures] == []
        assert sum(load.answers for load in loads) > 100
        assert set.union(*(load.versions for load in loads)) <= seen
        counters = gateway.counters()
        assert counters['headrace_policy_reloads_total{result="refused"}'] == 3
        assert len([name for name in counters if name.startswith("headrace_policy_info{")]) == 1


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

"""`make demo ONCE=1` as a newcomer runs it, on other ports: the main job from end to end."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.serve import free_port

ROOT = Path(__file__).parents[2]
METRICS = {
    "accuracy", "deferred", "cpu_s_per_1000", "p50_ms", "p95_ms", "p99_ms", "mean_batch_rows", "cache_hits",
}  # fmt: skip


def running() -> set[str]:
    """Process ids of servers that the demo starts."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if re.search(rb"tritonserver|triton_python_backend_stub", file.read_bytes()):
                found.add(file.parent.name)
    return found


def shared_memory() -> set[str]:
    return {file.name for file in Path("/dev/shm").glob("headrace-*")}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[tuple[str, str], float]]:
    """What the demo printed, and its figures by case and metric."""
    report = tmp_path_factory.mktemp("demo") / "demo.json"
    flags = [f"--{name}=127.0.0.1:{free_port()}" for name in ("http", "grpc", "metrics", "admin")]
    flags.append(f"--triton=127.0.0.1:{free_port(3)}")
    before = running(), shared_memory()
    done = subprocess.run(
        [sys.executable, "-m", "deploy.demo", "--once", *flags, "--json", str(report)],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (running(), shared_memory()) == before
    records = msgspec.json.decode(report.read_bytes())
    assert all(set(record) == {"case", "metric", "value", "unit", "against", "ratio"} for record in records)
    return done.stdout, {(record["case"], record["metric"]): record["value"] for record in records}


def test_every_case_has_every_metric(demo: tuple[str, dict[tuple[str, str], float]]) -> None:
    for case in ("distilled", "heavy", "cascade"):
        assert {metric for name, metric in demo[1] if name == case} >= METRICS
    assert demo[1]["embed", "cache_hits"] == 500


def test_the_cascade_is_not_worse_than_the_heavy_tier_alone(demo: tuple[str, dict[tuple[str, str], float]]) -> None:
    figures = demo[1]
    low, high = figures["cascade", "difference_low"], figures["cascade", "difference_high"]
    assert high >= 0
    assert (high - low) / 2 <= 0.01
    assert figures["cascade", "cpu_s_per_1000"] < figures["heavy", "cpu_s_per_1000"]
    assert 0 < figures["cascade", "deferred"] < 0.4


def test_a_trace_of_every_hop_is_printed(demo: tuple[str, dict[tuple[str, str], float]]) -> None:
    for hop in ("edge http", "tier distilled", "dispatch", "queue", "batch", "local distilled"):
        assert re.search(rf"{hop}\s+\d+\.\d\d ms", demo[0]), hop


def test_a_port_in_use_is_named_with_the_flag_that_changes_it() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "deploy.demo", "--once", f"--grpc=127.0.0.1:{port}"],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stdout
    assert "--grpc" in done.stdout

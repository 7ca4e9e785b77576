"""The benchmark of pass-through, in its smallest form: that it measures, not what it finds.

Needs nginx and haproxy (Debian: nginx-light, haproxy), which `make test` does not install: on a machine with systemd,
installing nginx starts it on port 80. Run it by hand: pytest tests/bench
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from gateway.tools.bench import proxy
from gateway.tools.report import Record

HEADRACE = str(Path(sys.executable).parent / "headrace")


def _command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`headrace bench proxy` whose temporary folders are in `folder`."""
    environment = {**os.environ, "TMPDIR": str(folder), "COLUMNS": "120"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [HEADRACE, "bench", "proxy", *arguments], stdout=pipe, stderr=pipe, text=True, env=environment
    )


def _left_over(folder: Path) -> list[str]:
    """Processes whose command line or environment names the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in told:
            found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def test_one_round_measures_every_stack_in_every_case(tmp_path: Path) -> None:
    file = tmp_path / "figures" / "proxy.json"
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    process = _command(temporary, "--rounds", "1", "--requests", "320", "--json", str(file))
    out, err = process.communicate(timeout=120)

    assert process.returncode == 0, err
    figures = {
        (record.case, record.metric): record for record in msgspec.json.decode(file.read_bytes(), type=list[Record])
    }
    beside = {"http-json": "nginx", "http-binary": "nginx", "grpc": "haproxy"}
    turns = [(stack, case) for stack in ("headrace", "nginx", "haproxy", "starlette") for case in beside]
    turns.remove(("starlette", "grpc"))
    for stack, name in turns:
        case, against = f"{stack}-{name}", f"{beside[name]}-{name}"
        for metric in ("cpu_us_per_request_p20", "cpu_us_per_request_median"):
            assert figures[case, metric].value > 0
            assert figures[case, metric].against == against
        assert figures[case, "p50_ms"].value > 0
        assert case in out
    assert out.count("target at most") == len(proxy.TARGETS)
    assert list(temporary.iterdir()) == []
    assert _left_over(temporary) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_it_ends_what_it_started(tmp_path: Path, number: int) -> None:
    process = _command(tmp_path, "--rounds", "5")
    until = time.monotonic() + 60
    while not (logs := list(tmp_path.glob("*/load.log"))) and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)
    assert logs, process.communicate(timeout=60)

    process.send_signal(number)
    process.communicate(timeout=60)

    until = time.monotonic() + 20
    while (left := _left_over(tmp_path)) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []

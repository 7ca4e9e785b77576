"""When file descriptors run out: connections are refused, the process neither spins nor dies, and comes back."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.support.serve import Served, served, within

FILES = 128
POLICY = "backends: {b: {endpoints: [http://127.0.0.1:1]}}\nproxy: b\n"


@contextmanager
def starved(folder: Path) -> Iterator[Served]:
    (folder / "policy.yaml").write_text(POLICY)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with served(folder, str(folder / "policy.yaml"), wait=(503,)) as gateway:
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (FILES, before[1]))
        yield gateway


def cpu_seconds(gateway: Served) -> float:
    fields = Path(f"/proc/{gateway.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def files(gateway: Served) -> int:
    return len(os.listdir(f"/proc/{gateway.process.pid}/fd"))


def crowd(stack: ExitStack, address: str, count: int) -> list[socket.socket]:
    host, _, port = address.partition(":")
    return [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]


def test_callers_beyond_three_quarters_of_the_files_are_told_so(tmp_path: Path) -> None:
    with starved(tmp_path) as gateway, ExitStack() as stack:
        crowd(stack, gateway.http, FILES * 3 // 4)
        assert within(5, lambda: files(gateway) >= FILES * 3 // 4)
        (one,) = crowd(stack, gateway.http, 1)
        one.settimeout(5)
        reply = one.recv(1000)
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert b"too many connections, limit 96" in reply
        assert httpx.get(f"http://{gateway.metrics}/metrics", timeout=5).status_code == 200
        stack.close()
        assert within(5, lambda: _lives(gateway))


def test_no_file_left_is_no_reason_to_spin_or_to_end(tmp_path: Path) -> None:
    with starved(tmp_path) as gateway, ExitStack() as stack:
        (kept,) = crowd(stack, gateway.http, 1)
        kept.settimeout(5)
        kept.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in kept.recv(1000)
        crowd(stack, gateway.metrics, 2 * FILES)
        crowd(stack, gateway.http, 50)
        assert within(5, lambda: files(gateway) >= FILES - 2), files(gateway)
        began = cpu_seconds(gateway)
        until = time.monotonic() + 1.5
        asked = 0
        while time.monotonic() < until:
            kept.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in kept.recv(1000), "who is in already is answered"
            asked += 1
            time.sleep(0.05)
        assert asked > 5
        assert cpu_seconds(gateway) - began < 0.5
        stack.close()
        assert within(10, lambda: _lives(gateway))
        assert len(gateway.logged()) < 20_000


def _lives(gateway: Served) -> bool:
    try:
        return all(
            httpx.get(f"http://{address}", timeout=2).status_code == 200
            for address in (f"{gateway.http}/livez", f"{gateway.metrics}/metrics")
        )
    except httpx.TransportError:
        return False

"""The installed command `headrace serve` on real ports, as a process of its own."""

from __future__ import annotations

import random
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

HEADRACE = str(Path(sys.executable).parent / "headrace")
LISTENERS = ("http", "grpc", "metrics", "admin")


@dataclass
class Served:
    """A running gateway; addresses are `host:port`."""

    process: subprocess.Popen[bytes]
    http: str
    grpc: str
    metrics: str
    admin: str
    log: Path

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def counters(self) -> dict[str, float]:
        """The metrics page, by sample name with labels."""
        lines = httpx.get(f"http://{self.metrics}/metrics", timeout=10).text.splitlines()
        return {k: float(v) for k, _, v in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def within(seconds: float, true: Callable[[], bool]) -> bool:
    """Whether `true` becomes true before the time is over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if true():
            return True
        time.sleep(0.02)
    return False


def free_port(count: int = 1) -> int:
    """The first of `count` free ports in a row, below those that the system gives to connections."""
    while True:
        first = random.randrange(15000, 30000)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
                return first
            except OSError:
                continue


@contextmanager
def served(
    folder: Path,
    *arguments: str,
    wait: Sequence[int] = (200,),
    first: int = 0,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Served]:
    """`headrace serve ARGUMENTS`, once /readyz answers with one of `wait`; ended with the block.

    On ports from `first` on, or on free ones. With `tls` it is asked by https.
    """
    # In a row: four single ones may be the same.
    first = first or free_port(len(LISTENERS))
    ports = {name: f"127.0.0.1:{first + i}" for i, name in enumerate(LISTENERS)}
    log = folder / "headrace.log"
    flags = [part for name, address in ports.items() for part in (f"--{name}", address)]
    with log.open("wb") as sink:
        process = subprocess.Popen([HEADRACE, "serve", *arguments, *flags], stdout=sink, stderr=sink)
    gateway = Served(process, log=log, **ports)
    try:
        _wait(gateway, wait, tls)
        yield gateway
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"headrace did not end within 30 s of SIGTERM:\n{gateway.logged()[-3000:]}") from None


def _wait(gateway: Served, statuses: Sequence[int], tls: ssl.SSLContext | None) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if gateway.process.poll() is not None:
            raise AssertionError(f"headrace ended with {gateway.process.returncode}:\n{gateway.logged()[-3000:]}")
        try:
            url = f"{'https' if tls else 'http'}://{gateway.http}/readyz"
            if httpx.get(url, timeout=2, verify=tls or True).status_code in statuses:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"/readyz was never one of {list(statuses)}:\n{gateway.logged()[-3000:]}")

"""Replicas that die and come back, and one that takes no connections: the installed command and real backends."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import doubler
from tests.support.serve import Served, free_port, served, within

PAIR = """
backends:
  single: {{endpoints: [http://127.0.0.1:{a}, http://127.0.0.1:{b}], model: m}}
  merged: {{endpoints: [http://127.0.0.1:{a}, http://127.0.0.1:{b}], model: m, batch: {{max_rows: 8}}}}
routes:
  single: {{backend: single}}
  merged: {{backend: merged}}
telemetry: {{access_log: false}}
"""


class Backend:
    """A doubler that can be killed and started again on its port."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.log = folder / f"executed-{self.port}"
        self.log.touch()
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, doubler.__file__, str(self.port), str(self.log)])
        assert within(10, self.listens)

    def listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def executed(self) -> list[str]:
        return self.log.read_text().split()


@contextmanager
def backends(folder: Path) -> Iterator[tuple[Backend, Backend]]:
    pair = Backend(folder), Backend(folder)
    try:
        yield pair
    finally:
        for backend in pair:
            backend.kill()


class Load(threading.Thread):
    """Asks `route` for numbers that nobody else asks for, until it is told to stop; keeps what went wrong."""

    numbers = itertools.count(1)

    def __init__(self, gateway: Served, route: str) -> None:
        super().__init__()
        self.url = f"http://{gateway.http}/v2/models/{route}/infer"
        self.stopped = threading.Event()
        self.answers = 0
        self.failures: list[tuple[int, str]] = []

    def run(self) -> None:
        with httpx.Client(timeout=10) as client:
            while not self.stopped.is_set():
                number = next(self.numbers)
                response = client.post(self.url, json=body(number))
                self.answers += 1
                if response.status_code != 200:
                    self.failures.append((response.status_code, response.text))
                elif response.json()["outputs"][0]["data"] != [2 * number]:
                    self.failures.append((200, response.text))


def body(number: float) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [number]}]}


def test_a_killed_replica_loses_only_what_it_was_executing(tmp_path: Path) -> None:
    with backends(tmp_path) as (a, b):
        policy = tmp_path / "policy.yaml"
        policy.write_text(PAIR.format(a=a.port, b=b.port))
        with served(tmp_path, str(policy)) as gateway:
            loads = [Load(gateway, route) for route in ("single", "merged") for _ in range(4)]
            for load in loads:
                load.start()
            try:
                for _ in range(2):
                    time.sleep(1.0)
                    b.kill()
                    before = len(a.executed())
                    time.sleep(1.5)
                    assert len(a.executed()) > before + 100, "the other replica goes on"
                    b.start()
                    before = len(b.executed())
                    assert within(2, lambda before=before: len(b.executed()) > before + 20), "traffic returns"  # type: ignore[misc]
            finally:
                for load in loads:
                    load.stopped.set()
                    load.join()
            counters = gateway.counters()
        failures = [failure for load in loads for failure in load.failures]
        assert all(status == 502 and "the connection was" in text for status, text in failures), failures
        # Two deaths, of at most four single calls and two batches of two or more rows each.
        assert len(failures) <= 2 * len(loads)
        assert min(load.answers for load in loads) > 100
        executed = Counter(a.executed() + b.executed())
        assert [number for number, times in executed.items() if times > 1] == [], "nothing was executed twice"
        retries = {k: v for k, v in counters.items() if k.startswith("headrace_retries_total")}
        assert sum(retries.values()) <= 2 * (10 + 0.2 * sum(load.answers for load in loads))
        lost = gateway.logged().count("endpoint not ready")
        assert lost == 4, "each backend tells each of two deaths once"


@pytest.mark.parametrize("batch", ["", ", batch: {}"])
def test_a_backend_that_takes_no_connections_is_given_up_after_the_connect_timeout(batch: str, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        crowd = [socket.socket() for _ in range(4)]
        for one in crowd:
            one.setblocking(False)
            one.connect_ex(address)
        policy = tmp_path / "policy.yaml"
        endpoint = f"endpoints: [http://127.0.0.1:{address[1]}], model: m, connect_timeout: 300ms"
        policy.write_text(f"backends:\n  b: {{{endpoint}{batch}}}\nroutes: {{r: {{backend: b}}}}\n")
        with served(tmp_path, str(policy), wait=(503,)) as gateway:
            began = time.monotonic()
            response = httpx.post(f"http://{gateway.http}/v2/models/r/infer", json=body(1), timeout=10)
            assert 0.29 < time.monotonic() - began < 1.5
        assert response.status_code == 503
        assert "no answer within 0.3 s" in response.json()["error"]
        for one in crowd:
            one.close()

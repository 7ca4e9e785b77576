"""Two gateways, the installed command, before one Redis: what one has computed the other one knows."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.redis import RedisServer, redis_server
from tests.support.serve import Served, free_port, served, within

POLICY = """
backends:
  b: {{endpoints: [http://127.0.0.1:{backend}], protocol: http, model: {model}}}
routes:
  r: {{backend: b, cache: {{store: redis, ttl: 1h}}}}
redis: {{url: "redis://127.0.0.1:{redis}", password: "{password}", timeout: 100ms}}
"""
PASSWORD = "s3cret"


class Model(ThreadingHTTPServer):
    """A KServe v2 server whose every model answers Y = [number of calls so far] for each row."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rows: list[int] = []
        self.port = self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Model

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        asked = json.loads(body[: int(self.headers.get("inference-header-content-length", len(body)))])
        rows = asked["inputs"][0]["shape"][0]
        self.server.rows.append(rows)
        output = {"name": "Y", "datatype": "FP32", "shape": [rows, 1], "data": [float(len(self.server.rows))] * rows}
        self._answer({"model_name": self.path.split("/")[3], "model_version": "1", "outputs": [output]})

    def _answer(self, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def model() -> Iterator[Model]:
    with Model() as server:
        yield server
        server.shutdown()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path, "--requirepass", PASSWORD) as server:
        yield server


def write(folder: Path, backend: int, redis: int, model: str = "m") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "policy.yaml"
    file.write_text(POLICY.format(backend=backend, redis=redis, model=model, password=PASSWORD))
    return file


def ask(gateway: Served, *rows: float) -> httpx.Response:
    tensor = {"name": "X", "datatype": "FP32", "shape": [len(rows), 1], "data": list(rows)}
    url = f"http://{gateway.http}/v2/models/r/infer"
    answer = httpx.post(url, json={"inputs": [tensor]}, timeout=10, verify=False)  # no TLS here, nor its start-up
    assert answer.status_code == 200, answer.text
    return answer


def answers(answer: httpx.Response) -> list[float]:
    (output,) = answer.json()["outputs"]
    return list(output["data"])


def up(gateway: Served) -> bool:
    return bool(httpx.get(f"http://{gateway.admin}/cache").json()["redis"]["up"])


def facts(gateway: Served) -> list[str]:
    """What was said of the store, in order."""
    lines = [json.loads(line) for line in gateway.logged().splitlines() if line.startswith("{")]
    return [line["message"] for line in lines if line["logger"] == "headrace.cache"]


def test_a_row_that_one_has_computed_is_a_hit_in_the_other(model: Model, redis: RedisServer, tmp_path: Path) -> None:
    with (
        served(tmp_path, str(write(tmp_path / "a", model.port, redis.port)), "--log-format", "json") as one,
        served(tmp_path / "a", str(write(tmp_path / "b", model.port, redis.port))) as two,
        served(tmp_path / "b", str(write(tmp_path / "c", model.port, redis.port, "other"))) as another,
    ):
        assert within(5, lambda: up(one) and up(two) and up(another))
        assert answers(ask(one, 1.0, 2.0)) == [1.0, 1.0]
        time.sleep(0.2)  # the put is nobody's to wait for
        mixed = ask(two, 3.0, 2.0, 1.0)
        assert answers(mixed) == [2.0, 1.0, 1.0]
        assert mixed.headers["headrace-cache"] == "hit=2,miss=1"
        assert model.rows == [2, 1]
        assert answers(ask(another, 1.0)) == [3.0], "another model's rows are others"
        name = f"redis://127.0.0.1:{redis.port}/0"
        counters = one.counters()
        assert counters[f'headrace_cache_store_up{{store="{name}"}}'] == 1
        assert counters[f'headrace_cache_store_changes_total{{state="up",store="{name}"}}'] == 1
        assert counters[f'headrace_cache_store_dropped_rows_total{{store="{name}"}}'] == 0
        shown = httpx.get(f"http://{one.admin}/cache").json()
        assert shown == {"redis": {"address": name, "up": True, "reason": "", "dropped_rows": 0}}
        assert facts(one) == ["cache store up"]
        assert PASSWORD not in one.logged() + two.logged() + another.logged()


def test_a_redis_that_is_killed_or_hangs_costs_nobody_an_answer(
    model: Model, redis: RedisServer, tmp_path: Path
) -> None:
    file = write(tmp_path / "p", model.port, redis.port)
    with served(tmp_path, str(file), "--log-format", "json") as gateway:
        assert within(5, lambda: up(gateway))
        ask(gateway, 1.0)
        time.sleep(2.1)  # a connection that lasted
        redis.kill()
        for _ in range(50):
            assert ask(gateway, 1.0).elapsed.total_seconds() < 1
        assert facts(gateway) == ["cache store up", "cache store down"]
        redis.start()
        assert within(5, lambda: up(gateway))
        ask(gateway, 5.0)
        time.sleep(0.2)
        assert ask(gateway, 5.0).headers["headrace-cache"] == "hit=1,miss=0"
        redis.pause()
        slowest = [ask(gateway, 5.0).elapsed.total_seconds() for _ in range(50)]
        assert max(slowest) < 1
        assert sum(seconds > 0.1 for seconds in slowest) <= 6, "three limits, and what a busy machine adds"
        assert facts(gateway) == ["cache store up", "cache store down"] * 2
        redis.resume()
        assert within(8, lambda: up(gateway))
        assert facts(gateway) == ["cache store up", "cache store down"] * 2 + ["cache store up"]


def test_a_policy_with_a_redis_that_is_not_there_is_taken_and_one_without_closes_it(
    model: Model, redis: RedisServer, tmp_path: Path
) -> None:
    file = write(tmp_path / "p", model.port, redis.port)
    with served(tmp_path, str(file), "--log-format", "json") as gateway:
        assert within(5, lambda: up(gateway))
        nowhere = free_port()
        write(tmp_path / "p", model.port, nowhere)
        gateway.process.send_signal(signal.SIGHUP)
        assert within(5, lambda: str(nowhere) in httpx.get(f"http://{gateway.admin}/cache").text)
        assert within(5, lambda: facts(gateway) == ["cache store up", "cache store down"])
        assert answers(ask(gateway, 1.0)) == [1.0]
        stores = [name for name in gateway.counters() if name.startswith("headrace_cache_store_up{")]
        assert stores == [f'headrace_cache_store_up{{store="redis://127.0.0.1:{nowhere}/0"}}']
        file.write_text(file.read_text().replace("store: redis, ", "").replace("\nredis:", "\n#"))
        gateway.process.send_signal(signal.SIGHUP)
        assert within(5, lambda: httpx.get(f"http://{gateway.admin}/cache").json() == {})
        assert answers(ask(gateway, 1.0)) == [2.0]
        assert facts(gateway) == ["cache store up", "cache store down"], "nothing asks for the old ones any more"

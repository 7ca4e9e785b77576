"""What must never be seen, and what must not grow: secrets in what the gateway says, clients' words as labels."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.kserve import KServe, kserve
from tests.support.redis import RedisServer
from tests.support.serve import HEADRACE, Served, served, within

SECRETS = ("tok3n-from-env", "tok3n-from-file", "tok3n-in-text", "redis-passw0rd")
POLICY = """\
telemetry: {{traces: {{per_second: 1000}}}}
redis: {{url: "redis://127.0.0.1:{redis}", user: gate, password: "${{file:password}}"}}
backends:
  good:
    endpoints: ["http://127.0.0.1:{good}"]
    headers: {{authorization: "Bearer ${{TOKEN}}", x-key: "${{file:token}}", x-plain: tok3n-in-text}}
  down: {{endpoints: ["http://127.0.0.1:1"], headers: {{authorization: "Bearer ${{TOKEN}}"}}}}
routes:
  r: {{backend: good, cache: {{store: redis, ttl: 1h}}}}
  lost: {{backend: down}}
"""
BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        server.do("ACL", "SETUSER", "gate", "on", ">another", "+@all", "~*")
        yield server


@pytest.fixture
def backend() -> Iterator[KServe]:
    with kserve() as server:
        yield server


@pytest.fixture
def policy(tmp_path: Path, backend: KServe, redis: RedisServer) -> Path:
    (tmp_path / "token").write_text("tok3n-from-file\n")
    (tmp_path / "password").write_text("redis-passw0rd\n")  # which is the wrong one: it is refused
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY.format(redis=redis.port, good=backend.server_port))
    return path


@pytest.fixture
def gateway(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("TOKEN", "tok3n-from-env")
    with served(tmp_path, str(policy), "--log-level", "debug") as made:
        yield made


def test_no_secret_is_ever_said(gateway: Served, policy: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def get(address: str, path: str) -> None:
        response = httpx.get(f"http://{address}{path}", timeout=10)
        said.append(response.text + str(response.headers))

    for model in ("r", "lost", "none"):
        response = httpx.post(f"http://{gateway.http}/v2/models/{model}/infer", json=BODY, timeout=10)
        said.append(response.text + str(response.headers))
    assert within(5, lambda: "WRONGPASS" in gateway.logged() or "password" in gateway.logged())
    # Edits that fail in every way that shows a value, and one that works: a secret file that changes.
    good = policy.read_text()
    for bad in (good.replace("x-plain: tok3n-in-text", "x-plain: [tok3n-in-text]"),
                good.replace('"${file:token}"', '"${file:token}\\x01x"'),
                good.replace("backend: good", 'backend: "${TOKEN}"'),
                good.replace("user: gate", 'user: "${file:password}"')):  # fmt: skip
        policy.write_text(bad)
        assert within(2, lambda: bool(httpx.get(f"http://{gateway.admin}/policy").json()["refused"]))
        get(gateway.admin, "/policy")
        policy.write_text(good)
        assert within(2, lambda: not httpx.get(f"http://{gateway.admin}/policy").json()["refused"])
    applied = 'headrace_policy_reloads_total{result="applied"}'
    before = gateway.counters().get(applied, 0)
    (tmp_path / "token").write_text("tok3n-from-file-2\n")
    assert within(2, lambda: gateway.counters().get(applied, 0) > before)
    for path in ("/", "/policy", "/backends", "/cache", "/traces", "/traces/last"):
        get(gateway.admin, path)
    for trace in httpx.get(f"http://{gateway.admin}/traces").json()[:20]:
        get(gateway.admin, f"/traces/{trace}")
    get(gateway.metrics, "/metrics")
    environ = os.environ | {"TOKEN": "tok3n-from-env"}
    for words in (
        ["explain"],
        ["explain", "--live"],
        ["check"],
        ["policy", "diff", "--admin", f"http://{gateway.admin}"],
    ):
        line = [HEADRACE, *words, str(policy)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False, env=environ)
        said.append(done.stdout + done.stderr)
        assert done.stdout
    # What the file says in plain text may be shown to whoever has the file: `tok3n-in-text` is for the network alone.
    for text in (*said, gateway.logged()):
        for secret in SECRETS:
            assert secret not in text, (secret, text[max(0, text.find(secret) - 300) :][:600])


def test_what_clients_say_is_no_label(gateway: Served) -> None:
    def lines() -> int:
        return len(httpx.get(f"http://{gateway.metrics}/metrics", timeout=10).text.splitlines())

    with httpx.Client(timeout=10) as client:
        for number in range(3):
            client.post(f"http://{gateway.http}/v2/models/warm{number}/infer", json=BODY)
        before = lines()
        for number in range(300):
            path = f"v2/models/model{number}/versions/{number}/infer"
            client.request(("POST", "GET", "PUT")[number % 3], f"http://{gateway.http}/{path}", json=BODY)
            client.get(f"http://{gateway.http}/{number}", headers={"x-user": str(number), "cookie": f"a={number}"})
    # A status that had not come before is a line; there are as many as the README's table has.
    assert lines() - before < 20

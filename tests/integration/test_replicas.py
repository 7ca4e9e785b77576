"""Two real Tritons behind one backend: what is said of both is true of both, and a broken one is found out."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from deploy.demo.repository import write_test_models
from deploy.demo.triton import Triton, ensure_venv
from tests.support.serve import Served, served, within
from tests.support.triton import VENV

POLICY = """
backends:
  sums: {{endpoints: [{both}], model: rowsum, control: true, protocol: http}}
  sums_grpc: {{endpoints: [{both}], model: rowsum, protocol: grpc}}
  strict: {{endpoints: [{both}], model: rowsum, ready_replicas: 2}}
  all: {{endpoints: [{both}], control: true, ready_replicas: 2}}
proxy: all
routes:
  sums: {{backend: sums}}
  sums_grpc: {{backend: sums_grpc}}
  strict: {{backend: strict}}
"""
BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}


class Two:
    """Both servers, and the gateway before them."""

    def __init__(self, folder: Path, one: Triton, two: Triton, gateway: Served) -> None:
        self.folder = folder
        self.servers = (one, two)
        self.gateway = gateway

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://{self.gateway.http}{path}", timeout=30)

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return httpx.post(f"http://{self.gateway.http}{path}", json=body, timeout=30)

    def direct(self, method: str, path: str) -> list[httpx.Response]:
        return [httpx.request(method, f"http://{each.http}{path}", timeout=30) for each in self.servers]

    def endpoints(self, backend: str) -> list[Any]:
        page = httpx.get(f"http://{self.gateway.admin}/backends").json()
        return list(page[backend]["endpoints"])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("replicas")
    venv = ensure_venv(VENV)

    def server(name: str) -> Triton:
        return Triton(venv, write_test_models(folder / name), log=folder / f"{name}.log", models=["rowsum"])

    with server("one") as one, server("two") as two:
        both = ", ".join(f'{{http: "http://{each.http}", grpc: "{each.grpc}"}}' for each in (one, two))
        policy = folder / "policy.yaml"
        policy.write_text(POLICY.format(both=both))
        with served(folder, str(policy)) as gateway:
            yield Two(folder, one, two, gateway)


def counts(documents: list[Any]) -> dict[str, int]:
    """What is summed of statistics of one model, over several documents."""
    totals: dict[str, int] = {}
    for document in documents:
        (model,) = document["model_stats"]
        totals["inference_count"] = totals.get("inference_count", 0) + model["inference_count"]
        totals["execution_count"] = totals.get("execution_count", 0) + model["execution_count"]
        for name, spent in model["inference_stats"].items():
            totals[f"{name} ns"] = totals.get(f"{name} ns", 0) + spent["ns"]
        for batch in model["batch_stats"]:
            key = f"batch {batch['batch_size']}"
            totals[key] = totals.get(key, 0) + batch["compute_infer"]["count"]
    return totals


def test_statistics_are_the_sum_of_both(two: Two) -> None:
    for rows in (1, 1, 2, 3, 1, 2, 1, 1):
        body = {"inputs": [{**BODY["inputs"][0], "shape": [rows, 16], "data": [1.0] * 16 * rows}]}
        assert two.post("/v2/models/sums/infer", body).status_code == 200
    documents = [answer.json() for answer in two.direct("GET", "/v2/models/rowsum/stats")]
    assert all(document["model_stats"][0]["inference_count"] for document in documents)  # both had a share
    summed = two.get("/v2/models/sums/stats").json()
    assert counts([summed]) == counts(documents)
    (model,) = summed["model_stats"]
    latest = max(document["model_stats"][0]["last_inference"] for document in documents)
    assert (model["name"], model["last_inference"]) == ("sums", latest)
    assert counts([two.get("/v2/models/stats").json()]) == counts(documents)
    with grpcclient.InferenceServerClient(two.gateway.grpc) as client:
        for name in ("sums", "rowsum", ""):
            (told,) = client.get_inference_statistics(name).model_stats
            assert told.name == (name or "rowsum")
            assert told.inference_count == model["inference_count"]
            assert told.inference_stats.success.ns == model["inference_stats"]["success"]["ns"]
            assert {b.batch_size: b.compute_infer.count for b in told.batch_stats} == {
                b["batch_size"]: b["compute_infer"]["count"] for b in model["batch_stats"]
            }


def test_loads_and_unloads_reach_both_and_readiness_follows(two: Two) -> None:
    assert two.post("/v2/repository/models/strict/unload").status_code == 403  # its backend allows no control
    assert [answer.status_code for answer in two.direct("GET", "/v2/models/rowsum/ready")] == [200, 200]
    with grpcclient.InferenceServerClient(two.gateway.grpc) as client:
        with pytest.raises(InferenceServerException) as refused:
            client.unload_model("strict")
        assert refused.value.status() == str(grpc.StatusCode.PERMISSION_DENIED)
        client.load_model("echo")
        assert [answer.status_code for answer in two.direct("GET", "/v2/models/echo/ready")] == [200, 200]
        assert client.is_model_ready("echo")
        assert client.is_model_ready("echo", "1")
        assert not client.is_model_ready("echo", "2")
        client.unload_model("echo")
        assert not client.is_model_ready("echo")
    assert two.get("/v2/models/echo/ready").status_code == 400
    assert [answer.status_code for answer in two.direct("GET", "/v2/models/echo/ready")] == [400, 400]


def test_a_model_on_one_replica_is_ready_where_one_is_enough(two: Two) -> None:
    one, _ = two.servers
    states = lambda: {e["name"]: e.get("state") for e in two.post("/v2/repository/index").json()}  # noqa: E731
    assert within(10, lambda: states() == {"rowsum": "READY", "echo": "UNAVAILABLE"})  # unloaded by another test
    httpx.post(f"http://{one.http}/v2/repository/models/echo/load").raise_for_status()
    try:
        assert states()["echo"] == "UNAVAILABLE"
        answer = two.get("/v2/models/echo/ready")
        assert answer.status_code == 503
        assert answer.json()["error"] == "model 'echo' is ready on 1 of 2 replicas, expected 2"
        with grpcclient.InferenceServerClient(two.gateway.grpc) as client:
            assert not client.is_model_ready("echo")
            index = {entry.name: entry.state for entry in client.get_model_repository_index().models}
            assert index == {"rowsum": "READY", "echo": "UNAVAILABLE"}
    finally:
        httpx.post(f"http://{one.http}/v2/repository/models/echo/unload").raise_for_status()
    assert [two.get(f"/v2/models/{name}/ready").status_code for name in ("sums", "strict")] == [200, 200]


def test_a_load_that_fails_on_one_says_what_each_said(two: Two) -> None:
    names = [f"http://{each.http}" for each in two.servers]
    shutil.move(two.folder / "two" / "echo", two.folder / "echo")
    try:
        failed = two.post("/v2/repository/models/echo/load")
        assert failed.status_code == 500
        said = "failed to load 'echo', failed to poll from model repository"
        assert failed.json() == {
            "error": f"load of 'echo' failed on 1 of 2 replicas: {names[0]}: done; {names[1]}: {said}"
        }
        with grpcclient.InferenceServerClient(two.gateway.grpc) as client:
            with pytest.raises(InferenceServerException, match="failed on 1 of 2 replicas") as raised:
                client.load_model("echo")
            assert raised.value.status() == str(grpc.StatusCode.INTERNAL)
    finally:
        shutil.move(two.folder / "echo", two.folder / "two" / "echo")
        two.post("/v2/repository/models/echo/unload").raise_for_status()


def test_settings_are_set_on_both_and_a_difference_is_told(two: Two) -> None:
    # While a model is unloaded, as by another test, its server calls itself not ready, and others are asked.
    assert within(10, lambda: all(each["ready"] for each in two.endpoints("all")))
    changed = two.post("/v2/trace/setting", {"trace_rate": "11"})
    assert changed.json()["trace_rate"] == "11"
    assert [each.json()["trace_rate"] for each in two.direct("GET", "/v2/trace/setting")] == ["11", "11"]
    with grpcclient.InferenceServerClient(two.gateway.grpc) as client:
        client.update_log_settings({"log_verbose_level": 1})
        assert [each.json()["log_verbose_level"] for each in two.direct("GET", "/v2/logging")] == [1, 1]
        client.update_log_settings({"log_verbose_level": 0})
        assert "replicas disagree" not in two.gateway.logged()
        other = two.servers[1]
        httpx.post(f"http://{other.http}/v2/trace/setting", json={"trace_rate": "12"}).raise_for_status()
        for _ in range(5):
            assert two.get("/v2/trace/setting").json()["trace_rate"] == "11"  # always the first one's
        told = [json.loads(line) for line in two.gateway.logged().splitlines() if "replicas disagree" in line]
        assert [line["about"] for line in told] == ["trace settings: /v2/trace/setting"]


def test_many_loads_of_one_model_at_once(two: Two) -> None:
    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=f"http://{two.gateway.http}", timeout=60) as client:
            answers = await asyncio.gather(*(client.post("/v2/repository/models/rowsum/load") for _ in range(8)))
        return [answer.status_code for answer in answers]

    assert asyncio.run(run()) == [200] * 8


# The last one, because it leaves its mark on a server.
def test_a_replica_whose_stub_has_died_is_found_out_and_comes_back(two: Two) -> None:
    broken, _ = two.servers
    # Server first, then its stub; the server goes on to call itself and its model ready.
    for pid in broken.pids()[1:]:
        os.kill(pid, signal.SIGKILL)
    name = f"http://{broken.http}"
    for route in ("sums", "sums_grpc"):
        with httpx.Client(base_url=f"http://{two.gateway.http}", timeout=30) as client:
            statuses = [client.post(f"/v2/models/{route}/infer", json=BODY).status_code for _ in range(60)]
        # Five are what it takes to believe it, then a trial after 2 s, after 4 s more, and so on.
        assert 5 <= sum(status != 200 for status in statuses) <= 9
        (shown,) = [each for each in two.endpoints(route) if each["name"] == name]
        assert shown["ready"] is True
        told = [json.loads(line) for line in two.gateway.logged().splitlines() if "endpoint avoided for" in line]
        (line,) = [line for line in told if line["backend"] == route]
        assert (line["endpoint"], line["model"]) == (name, "rowsum")
        assert "5 failures in a row, the last: " in line["reason"]
        assert "not healthy" in line["reason"]
        series = f'headrace_backend_models_avoided_total{{backend="{route}",endpoint="{name}"}}'
        assert two.gateway.counters()[series] == 1
    assert httpx.get(f"http://{broken.http}/v2/models/rowsum/ready").status_code == 200
    for action in ("unload", "load"):  # a load alone does nothing where no file has changed since the last one
        httpx.post(f"http://{broken.http}/v2/repository/models/rowsum/{action}", timeout=30).raise_for_status()
    for route in ("sums", "sums_grpc"):

        def used(route: str = route) -> bool:
            # The next trial is answered, and no caller pays for it.
            two.post(f"/v2/models/{route}/infer", BODY).raise_for_status()
            lines = [line for line in two.gateway.logged().splitlines() if "endpoint used again for a model" in line]
            return any(json.loads(line)["backend"] == route for line in lines)

        assert within(40, used)

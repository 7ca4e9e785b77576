"""A single Triton whose model is busy or broken while it says that it is ready."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from deploy.demo.triton import Triton
from tests.support.serve import Served, served
from tests.support.triton import triton_with

POLICY = """
backends:
  http: {{endpoints: [{{http: "http://{http}", grpc: "{grpc}"}}], model: narrow, protocol: http, control: true}}
  grpc: {{endpoints: [{{http: "http://{http}", grpc: "{grpc}"}}], model: narrow, protocol: grpc, control: true}}
routes:
  over_http: {{backend: http}}
  over_grpc: {{backend: grpc}}
"""
BODY = {"inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [1]}]}
ROUTES = pytest.mark.parametrize("route", ["over_http", "over_grpc"])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Triton, Served]]:
    folder = tmp_path_factory.mktemp("narrow")
    with triton_with(folder, "narrow") as server:
        policy = folder / "policy.yaml"
        policy.write_text(POLICY.format(http=server.http, grpc=server.grpc))
        with served(folder, str(policy)) as gateway:
            yield server, gateway


@ROUTES
def test_a_full_queue_is_busy_and_no_reason_to_avoid_anyone(both: tuple[Triton, Served], route: str) -> None:
    _, gateway = both

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=f"http://{gateway.http}", timeout=60) as client:
            return await asyncio.gather(*(client.post(f"/v2/models/{route}/infer", json=BODY) for _ in range(16)))

    busy = [answer for answer in asyncio.run(run()) if answer.status_code != 200]
    assert len(busy) >= 10
    assert {answer.status_code for answer in busy} == {429}, busy[0].text
    assert all("xceeds maximum queue size" in answer.json()["error"] for answer in busy)
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in busy)
    page = httpx.get(f"http://{gateway.admin}/backends").json()
    assert page[route.removeprefix("over_")]["endpoints"][0]["avoided"] == {}
    assert httpx.get(f"http://{gateway.http}/v2/models/{route}/ready").status_code == 200


@ROUTES
def test_a_broken_model_is_asked_all_the_same_and_not_called_ready(both: tuple[Triton, Served], route: str) -> None:
    server, gateway = both
    for pid in server.pids()[1:]:  # the stubs
        os.kill(pid, signal.SIGKILL)
    direct, through = f"http://{server.http}/v2", f"http://{gateway.http}/v2"
    answers = [httpx.post(f"{through}/models/{route}/infer", json=BODY, timeout=30) for _ in range(8)]
    own = httpx.post(f"{direct}/models/narrow/infer", json=BODY, timeout=30)
    assert own.status_code == 500
    # In the server's own words, however often.
    assert {(each.status_code, each.json()["error"]) for each in answers[1:]} == {(500, own.json()["error"])}
    assert httpx.get(f"{direct}/models/narrow/ready").status_code == 200
    unready = httpx.get(f"{through}/models/{route}/ready")
    assert unready.status_code == 503
    assert "failures in a row" in unready.json()["error"]
    # A load alone does nothing where no file has changed since the last one.
    for action in ("unload", "load"):
        httpx.post(f"{through}/repository/models/{route}/{action}", timeout=30).raise_for_status()
    assert httpx.get(f"{through}/models/{route}/ready").status_code == 200
    assert httpx.post(f"{through}/models/{route}/infer", json=BODY, timeout=30).status_code == 200

"""The admin application and the metrics page."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx

from gateway.admin import admin, metrics_page, plain
from gateway.app import Gateway
from policies import Policy, parse

POLICY = """
backends:
  a: {endpoints: [http://127.0.0.1:1], model: m, headers: {authorization: "${TOKEN}"}, batch: {}}
routes:
  r: {backend: a}
"""
YAML = {"content-type": "application/yaml"}


def get(app: Any, *paths: str) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
            return [await client.get(path) for path in paths]

    return asyncio.run(run())


def gateway() -> Gateway:
    return Gateway(parse(POLICY, "policy.yaml", {"TOKEN": "Bearer s3cret"}))


def test_what_there_is_to_ask() -> None:
    index, backends, ready, live = get(admin(gateway()), "/", "/backends", "/readyz", "/livez")
    paths = index.json()["paths"]
    assert "/traces/{id}" in paths
    assert len(paths) == len(set(paths))
    (endpoint,) = backends.json()["a"]["endpoints"]
    assert endpoint == {
        "name": "http://127.0.0.1:1",
        "ready": None,
        "reason": "",
        "protocol": "http",
        "in_flight": 0,
        "avoided": {},
    }
    assert backends.json()["a"]["queue"] == {"rows": 0, "batches_running": 0}
    assert (ready.status_code, live.status_code) == (503, 200)


def test_the_policy_is_shown_with_its_defaults_and_without_its_secrets() -> None:
    (policy,) = get(admin(gateway()), "/policy")
    assert "s3cret" not in policy.text
    assert policy.json()["backends"]["a"]["headers"] == {"authorization": "***"}
    assert policy.json()["limits"]["in_flight"] == 4096


def test_a_posted_policy_is_overruled_by_the_flags_of_the_command() -> None:
    def quiet(policy: Policy) -> Policy:
        return replace(policy, telemetry=replace(policy.telemetry, access_log=False))

    made = Gateway(parse(POLICY, "policy.yaml", {"TOKEN": ""}), overruled=quiet)

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(admin(made))
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            text = POLICY.replace("${TOKEN}", "x") + "# another one\n"
            return await client.post("/policy?force=true", content=text, headers=YAML)

    assert asyncio.run(run()).status_code == 200
    assert not made.policy.telemetry.access_log


def test_what_is_larger_than_a_policy_is_refused_for_that() -> None:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(admin(gateway()))
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            headers = {"content-type": "application/yaml"}
            return await client.post("/policy", content=b"\xff" * 5_000_000, headers=headers)

    response = asyncio.run(run())
    assert response.status_code == 400
    assert "larger than 4 MiB" in response.text


def test_no_trace_is_404_with_a_line() -> None:
    last, unknown, nonsense = get(admin(gateway()), "/traces/last", "/traces/" + "1" * 32, "/traces/xyz")
    assert last.json() == {"error": "no trace has been recorded yet"}
    assert {r.status_code for r in (last, unknown, nonsense)} == {404}


def test_the_metrics_page() -> None:
    made = gateway()
    (page,) = get(metrics_page(made.metrics), "/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert f'headrace_policy_info{{version="{made.policy.version}"}} 1.0' in page.text
    assert "headrace_requests_in_flight 0.0" in page.text
    assert "process_cpu_seconds_total" in page.text


def test_plain_says_tuples_and_mappings_as_json_can() -> None:
    assert plain(((1, 2), {"a": None})) == [[1, 2], {"a": None}]


def test_a_policy_is_put_in_force_refused_and_rolled_back() -> None:
    made = gateway()
    app = admin(made)
    first = made.policy.version

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=YAML) as client:
            wrong = await client.post("/policy", content=POLICY.replace("model:", "modle:").encode())
            assert wrong.status_code == 400
            assert any("did you mean 'model'?" in problem for problem in wrong.json()["problems"])
            assert made.policy.version == first
            binary = await client.post("/policy", content=b"\xff")
            assert binary.status_code == 400
            edited = POLICY.replace("batch: {}", "batch: {slots: 7}").replace('"${TOKEN}"', "x")
            forced = await client.post("/policy?force=true", content=edited.encode())
            assert forced.json() == {"version": made.policy.version}
            assert made.policy.version != first
            shown = (await client.get("/policy")).json()
            assert (shown["refused"], shown["history"]) == ([], [first])
            assert (await client.post("/policy/rollback")).json() == {"version": first}
            assert (await client.post("/policy/rollback")).status_code == 409
        await made.close()

    asyncio.run(run())

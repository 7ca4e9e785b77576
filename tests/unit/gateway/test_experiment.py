"""An experiment through the whole stack: arms that differ in backend, tiers, thresholds and cache."""

import asyncio
from collections import Counter
from typing import Any

import httpx

from backends.errors import BackendFailed, Unreachable
from routing.experiment import assign
from tests.support.gateway import FakeServer, Rig, double, fp32

POLICY = """\
backends:
  old: {endpoints: [http://h:1], model: old}
  new: {endpoints: [http://h:1], model: new, batch: {max_rows: 4}}
tenant_header: x-tenant
routes:
  m:
    experiment:
      unit: UNIT
      otherwise: new
      arms:
        stable: {weight: 3, backend: old, cache: {ttl: 1h}}
        candidate:
          weight: 1
          tiers:
            - {backend: old, accept: {output: Y, values: probabilities, score: max_probability, threshold: 1}}
            - {backend: new}
        new: {weight: 0, backend: new, cache: {ttl: 1h}}
"""
BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
WEIGHTS = {"stable": 3.0, "candidate": 1.0, "new": 0.0}


def rig(unit: str) -> Rig:
    return Rig(POLICY.replace("UNIT", unit), FakeServer({"old": double, "new": lambda x: (fp32("Y", [[7, 7]]),)}))


async def post(client: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await client.post("/v2/models/m/infer", json=BODY, headers=headers)


def test_the_arm_is_the_units_and_is_told() -> None:
    made = rig("header x-user")

    async def run() -> dict[str, httpx.Response]:
        async with made.client() as client:
            return {unit: await post(client, **{"x-user": unit}) for unit in map(str, range(40))}

    told: Counter[str] = Counter()
    for unit, response in asyncio.run(run()).items():
        arm = response.headers["headrace-arm"]
        told[arm] += 1
        assert arm == assign("m", unit, WEIGHTS)
        outputs = response.json()["outputs"][0]["data"]
        assert outputs == ([2, 4] if arm == "stable" else [7, 7])
        assert response.headers["headrace-tier"] == ("old=1" if arm == "stable" else "new=1")
    assert told["new"] == 0
    for arm in ("stable", "candidate"):
        sample = f'headrace_arm_requests_total{{arm="{arm}",outcome="answered",route="m"}}'
        assert made.metric(sample) == told[arm] > 0
        assert made.metric(f'headrace_arm_duration_seconds_count{{arm="{arm}",route="m"}}') == told[arm]


def test_cookies_and_tenants() -> None:
    async def run(made: Rig, headers: dict[str, str]) -> str:
        async with made.client() as client:
            return str((await post(client, **headers)).headers["headrace-arm"])

    for n in range(8):
        by_cookie = asyncio.run(run(rig("cookie uid"), {"cookie": f"x=1; uid={n}"}))
        by_tenant = asyncio.run(run(rig("tenant"), {"x-tenant": str(n)}))
        assert by_cookie == by_tenant == assign("m", str(n), WEIGHTS)


def test_repeated_cookie_headers_are_one() -> None:
    made = rig("cookie uid")

    async def run() -> str:
        async with made.client() as client:
            headers = [("cookie", "a=1"), ("cookie", "uid=7")]
            return str((await client.post("/v2/models/m/infer", json=BODY, headers=headers)).headers["headrace-arm"])

    assert asyncio.run(run()) == assign("m", "7", WEIGHTS)


def test_a_request_without_a_unit_gets_the_named_arm_and_is_counted() -> None:
    made = rig("header x-user")

    async def run() -> httpx.Response:
        async with made.client() as client:
            return await post(client)

    assert asyncio.run(run()).headers["headrace-arm"] == "new"
    assert made.metric('headrace_experiment_requests_without_unit_total{route="m"}') == 1


def test_arms_share_no_cache_entry() -> None:
    made = rig("header x-user")
    stable = next(str(n) for n in range(99) if assign("m", str(n), WEIGHTS) == "stable")

    async def run() -> list[str]:
        async with made.client() as client:
            calls: list[dict[str, str]] = [{"x-user": stable}, {}, {"x-user": stable}, {}]
            return [(await post(client, **headers)).headers["headrace-cache"] for headers in calls]

    assert asyncio.run(run()) == ["hit=0,miss=1", "hit=0,miss=1", "hit=1,miss=0", "hit=1,miss=0"]


def test_metadata_and_failures_are_of_the_arm() -> None:
    made = rig("header x-user")

    async def run() -> tuple[Any, httpx.Response]:
        async with made.client() as client:
            metadata = await client.get("/v2/models/m", headers={"x-user": "1"})
            del made.server.models["old"]
            made.server.models["old"] = _broken
            return metadata, await post(client, **{"x-user": next(filter(_stable, map(str, range(99))))})

    metadata, failed = asyncio.run(run())
    assert made.metric('headrace_arm_requests_total{arm="stable",outcome="answered",route="m"}') == 0
    assert failed.headers["headrace-arm"] == "stable"
    assert metadata.headers["headrace-arm"] == assign("m", "1", WEIGHTS)
    assert metadata.json()["name"] == "m"
    assert failed.status_code == 500
    assert made.metric('headrace_arm_requests_total{arm="stable",outcome="BackendFailed",route="m"}') == 1


def _stable(unit: str) -> bool:
    return assign("m", unit, WEIGHTS) == "stable"


def _broken(inputs: object) -> Any:

    raise BackendFailed("it broke", 500)


FALLBACK = """\
backends:
  main: {endpoints: [http://h:1], model: main}
  spare: {endpoints: [http://h:2], model: spare}
routes:
  m: {backend: main, cache: {ttl: 1h}, fallback: spare}
"""


def test_a_fallback_answers_and_is_told_apart_and_not_kept() -> None:
    spare = FakeServer({"spare": lambda x: (fp32("Y", [[7, 7]]),)})
    made = Rig(FALLBACK, FakeServer({"main": double}), {"http://h:2": spare})

    async def run() -> list[httpx.Response]:
        async with made.client() as client:
            made.server.failure = Unreachable("it is down")
            first = await post(client)
            made.server.failure = None
            return [first, await post(client), await post(client)]

    fallen, healed, kept = asyncio.run(run())
    assert fallen.json()["outputs"][0]["data"] == [7, 7]
    assert fallen.json()["model_name"] == "m"
    assert fallen.headers["headrace-degraded"] == "fallback"
    assert fallen.headers["headrace-tier"] == "spare=1"
    assert healed.json()["outputs"][0]["data"] == [2, 4]
    assert "headrace-degraded" not in healed.headers
    assert (healed.headers["headrace-cache"], kept.headers["headrace-cache"]) == ("hit=0,miss=1", "hit=1,miss=0")
    assert made.metric('headrace_fallbacks_total{route="m"}') == 1

"""A policy's Redis in the stack: one store for all, kept while policies are equal, closed when none uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from cache.redis import RedisStore
from gateway.admin import admin
from gateway.app import Gateway
from gateway.metrics import Metrics
from gateway.observe import store_changed
from gateway.reload import Reload, Snapshot
from gateway.stack import Things, build
from policies import Policy, PolicyError, parse
from policies.spec import Redis
from tests.support.gateway import FakeServer, Rig, double

BASE = """
backends:
  a: {endpoints: [http://127.0.0.1:1], model: twice}
  b: {endpoints: [http://127.0.0.1:2], model: twice}
routes:
  r: {backend: a, cache: {store: redis}}
  s: {backend: a, cache: {store: redis, ttl: 5m}}
  m: {backend: a, cache: {ttl: 1h}}
redis: {url: redis://127.0.0.1:1}
"""
WITHOUT = BASE.replace("store: redis", "ttl: 1s").replace("ttl: 1s, ttl: 5m", "ttl: 5m")
ELSEWHERE = BASE.replace("redis://127.0.0.1:1}", "redis://127.0.0.1:1, password: pw}")


class Shared:
    """What several gateways have in common, in place of Redis."""

    name, up, reason, dropped = "redis://shared:1/0", True, "", 0

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.rows.get(key) for key in keys]

    async def put_many(self, values: Mapping[bytes, bytes], ttl: float) -> None:
        self.rows.update(values)


def sharing(policy: str, shared: Shared) -> Rig:
    """A gateway whose Redis is `shared`."""
    servers = {f"http://127.0.0.1:{port}": FakeServer({"twice": double, "other": double}) for port in (1, 2)}
    things = Things(redis=(parse(policy, "policy.yaml", {}).redis, shared))  # type: ignore[arg-type]
    return Rig(policy, servers["http://127.0.0.1:1"], servers, things)


async def cached(rig: Rig, model: str = "r") -> str:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
    async with rig.client() as client:
        answer = await client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})
    assert answer.status_code == 200, answer.text
    return answer.headers["headrace-cache"]


def test_gateways_of_equal_policies_share_and_others_do_not() -> None:
    async def main() -> None:
        shared = Shared()
        assert await cached(sharing(BASE, shared)) == "hit=0,miss=1"
        assert await cached(sharing(BASE, shared)) == "hit=1,miss=0"
        # What does not change the answer keeps it; ttl, too, is the reader's own business.
        assert (
            await cached(sharing(BASE.replace("{store: redis}", "{store: redis, ttl: 9s}"), shared)) == "hit=1,miss=0"
        )
        for other in (
            BASE.replace("backend: a", "backend: b"),
            BASE.replace("model: twice", "model: other"),
            BASE.replace("model: twice", "model: twice, version: '2'"),
            BASE.replace("[http://127.0.0.1:1]", "[http://127.0.0.1:1, http://127.0.0.1:2]"),
        ):
            assert await cached(sharing(other, shared)) == "hit=0,miss=1", other
        several = "[http://127.0.0.1:{}, http://127.0.0.1:{}]"
        turned = BASE.replace("[http://127.0.0.1:1]", several.format(2, 1))
        assert await cached(sharing(turned, shared)) == "hit=1,miss=0", "replicas are the same in any order"
        assert await cached(sharing(BASE, shared), "s") == "hit=0,miss=1", "another route"

    asyncio.run(main())


def test_arms_do_not_answer_for_each_other() -> None:
    arm = "{backend: a, weight: 1, cache: {store: redis}}"
    split = f"{{unit: header x-user, salt: s, arms: {{p: {arm}, q: {arm}}}, otherwise: OTHER}}"
    arms = BASE.replace("r: {backend: a, cache: {store: redis}}", f"r: {{experiment: {split}}}")

    async def main() -> None:
        shared = Shared()
        for name, expected in (("p", "hit=0,miss=1"), ("q", "hit=0,miss=1"), ("p", "hit=1,miss=0")):
            assert await cached(sharing(arms.replace("OTHER", name), shared)) == expected

    asyncio.run(main())


def policy(text: str) -> Policy:
    return parse(text, "policy.yaml", {})


def make(rig: Rig) -> Any:
    def made(policy: Policy, things: Things) -> Snapshot:
        return Snapshot(policy, build(policy, things, rig.tools), things)

    return made


def watched(things: Things, closed: list[RedisStore], monkeypatch: pytest.MonkeyPatch) -> None:
    async def close(self: RedisStore) -> None:
        closed.append(self)

    monkeypatch.setattr(RedisStore, "close", close)


def test_one_store_for_all_that_outlives_reloads_until_nobody_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[RedisStore] = []

    async def main() -> None:
        rig = Rig(BASE, FakeServer({"twice": double}))
        assert rig.things.redis is not None
        assert len(rig.things.stores) == 1
        watched(rig.things, closed, monkeypatch)
        reload = Reload(make(rig)(rig.policy, Things()), make(rig))
        store = reload.current.things.redis[1]  # type: ignore[index]
        await reload.apply(policy(BASE.replace("ttl: 5m", "ttl: 6m")))
        assert reload.current.things.redis[1] is store  # type: ignore[index]
        await reload.apply(policy(ELSEWHERE))
        assert reload.current.things.redis[1] is not store  # type: ignore[index]
        await asyncio.sleep(0.15)
        assert closed == [store]
        other = reload.current.things.redis[1]  # type: ignore[index]
        reload.current.active += 1
        holding = reload.current
        await reload.apply(policy(WITHOUT))
        assert reload.current.things.redis is None
        await asyncio.sleep(0.15)
        assert closed == [store], "a request still holds the policy that used it"
        holding.active -= 1
        await asyncio.sleep(0.15)
        assert closed == [store, other]
        await reload.close()

    asyncio.run(main())


def test_the_store_of_a_refused_policy_is_closed_and_the_one_in_force_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[RedisStore] = []

    async def main() -> None:
        rig = Rig(BASE, FakeServer({"twice": double}))
        watched(rig.things, closed, monkeypatch)
        rig.others["http://127.0.0.1:9"] = unready = FakeServer({})
        unready.is_ready = False
        reload = Reload(make(rig)(rig.policy, Things()), make(rig))
        store = reload.current.things.redis[1]  # type: ignore[index]
        with pytest.raises(PolicyError, match="not ready"):
            await reload.apply(policy(ELSEWHERE.replace("127.0.0.1:1]", "127.0.0.1:9]")))
        assert reload.current.things.redis[1] is store  # type: ignore[index]
        assert (len(closed), store in closed) == (1, False)
        await reload.close()

    asyncio.run(main())


def test_a_redis_that_no_cache_uses_is_none() -> None:
    assert Rig(WITHOUT, FakeServer({"twice": double})).things.redis is None


def test_admin_shows_it_and_never_its_password() -> None:
    async def main(text: str) -> Any:
        gateway = Gateway(policy(text))
        app: Any = admin(gateway)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
            return (await client.get("/cache")).json(), gateway.metrics.text().decode()

    shown, page = asyncio.run(main(ELSEWHERE))
    name = "redis://127.0.0.1:1/0"
    assert shown == {"redis": {"address": name, "up": None, "reason": "", "dropped_rows": 0}}
    assert "headrace_cache_store_up{" not in page, "unknown is not zero"
    assert f'headrace_cache_store_dropped_rows_total{{store="{name}"}} 0.0' in page
    assert asyncio.run(main(WITHOUT))[0] == {}


def test_changes_are_counted_and_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    observe = store_changed("redis://h:1/0", metrics)
    with caplog.at_level("INFO", "headrace.cache"):
        observe(True, "")
        observe(True, "OOM: full")
        observe(False, "gone")
    said = [(record.levelname, record.getMessage(), record.fields) for record in caplog.records]  # type: ignore[attr-defined]
    store = {"store": "redis://h:1/0"}
    assert said == [
        ("INFO", "cache store up", store),
        ("WARNING", "cache store refuses writes", {**store, "reason": "OOM: full"}),
        ("WARNING", "cache store down", {**store, "reason": "gone"}),
    ]
    page = metrics.text().decode()
    for state in ("up", "read_only", "down"):
        assert f'headrace_cache_store_changes_total{{state="{state}",store="redis://h:1/0"}} 1.0' in page


def test_equal_specs_are_one_and_a_password_tells_them_apart() -> None:
    assert policy(BASE).redis == Redis("127.0.0.1", 1)
    assert policy(BASE).redis != policy(ELSEWHERE).redis

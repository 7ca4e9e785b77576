"""The whole stack over HTTP without sockets: what a caller sees of batching, cascading, caching and failing."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from backends.errors import BackendFailed, BadReply, ConnectionLost, Expired, Rejected, Unreachable
from backends.request import HttpCall, Request
from backends.tensor import Tensor
from tests.support.gateway import FakeServer, Rig, double, fp32

POLICY = """
backends:
  small: {endpoints: [http://127.0.0.1:1], model: small, batch: {max_rows: 8, slots: 1}}
  large: {endpoints: [http://127.0.0.1:1], model: large, batch: {max_rows: 8, slots: 1}}
  plain: {endpoints: [http://127.0.0.1:1], model: twice}
  any: {endpoints: [http://127.0.0.1:1]}
routes:
  sure:
    tiers:
      - {backend: small, accept: {output: P, values: probabilities, score: max_probability, threshold: 0.8}}
      - {backend: large}
  twice: {backend: plain}
  cached: {backend: plain, cache: {ttl: 1h}}
  batched: {backend: small}
"""
PROXY = POLICY + "proxy: any\n"


def small(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Sure of what is above a half: P = [x, 1 - x], and who answered."""
    x = np.frombuffer(inputs[0].data, "<f4").reshape(-1, 1)
    return (fp32("P", np.concatenate([x, 1 - x], 1)), fp32("WHO", np.zeros((len(x), 1))))


def large(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x = np.frombuffer(inputs[0].data, "<f4").reshape(-1, 1)
    return (fp32("P", np.concatenate([x, 1 - x], 1)), fp32("WHO", np.ones((len(x), 1))))


def rig(policy: str = POLICY) -> Rig:
    return Rig(policy, FakeServer({"small": small, "large": large, "twice": double, "other": double}))


def body(values: list[float], **fields: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "datatype": "FP32", "shape": [len(values), 1], "data": values}], **fields}


async def post(client: httpx.AsyncClient, model: str, document: Any, **kwargs: Any) -> httpx.Response:
    return await client.post(f"/v2/models/{model}/infer", json=document, **kwargs)


def output(response: httpx.Response, name: str) -> list[float]:
    assert response.status_code == 200, response.text
    return next(o["data"] for o in response.json()["outputs"] if o["name"] == name)


def test_only_rows_that_are_not_sure_go_on_and_answers_keep_their_order() -> None:
    async def run() -> None:
        r = rig()
        async with r.client() as client:
            response = await post(client, "sure", body([0.9, 0.5, 0.95, 0.6], id="q1"))
        assert output(response, "WHO") == [0.0, 1.0, 0.0, 1.0]
        assert response.json()["model_name"] == "sure"
        assert response.json()["id"] == "q1"
        assert response.headers["headrace-tier"] == "small=2,large=2"
        assert response.headers["headrace-policy"] == r.policy.version
        assert r.server.rows("large") == [2]
        assert r.metric('headrace_rows_total{route="sure",tier="large"}') == 2
        assert r.metric('headrace_deferred_rows_total{route="sure",tier="small"}') == 2

    asyncio.run(run())


def test_callers_of_one_turn_share_a_batch() -> None:
    async def run() -> None:
        r = rig()
        async with r.client() as client:
            responses = await asyncio.gather(*(post(client, "batched", body([0.1 * i])) for i in range(1, 9)))
        assert [output(x, "P")[0] for x in responses] == pytest.approx([0.1 * i for i in range(1, 9)])
        assert sum(r.server.rows("small")) == 8
        assert len(r.server.requests) < 8
        assert r.metric('headrace_batch_rows_sum{backend="small"}') == 8

    asyncio.run(run())


def test_known_rows_come_from_the_cache_and_only_the_others_are_asked_for() -> None:
    async def run() -> None:
        r = rig()
        async with r.client() as client:
            first = await post(client, "cached", body([1.0, 2.0]))
            second = await post(client, "cached", body([3.0, 2.0, 3.0, 1.0]))
        assert output(first, "Y") == [2.0, 4.0]
        assert output(second, "Y") == [6.0, 4.0, 6.0, 2.0]
        assert first.headers["headrace-cache"] == "hit=0,miss=2"
        assert second.headers["headrace-cache"] == "hit=2,miss=2"
        assert r.server.rows("twice") == [2, 1]
        assert r.metric('headrace_cache_rows_total{result="hit",route="cached"}') == 2

    asyncio.run(run())


def test_a_model_of_no_route_is_not_found_and_is_the_proxys_where_there_is_one() -> None:
    async def run() -> None:
        async with rig().client() as client:
            response = await post(client, "other", body([1.0]))
            assert response.status_code == 404
            assert response.json() == {"error": "unknown model: 'other' is no route of this gateway"}
        r = rig(PROXY)
        async with r.client() as client:
            assert (await post(client, "n" * 2000, body([1.0]))).status_code == 404  # no server is asked for it
            assert output(await post(client, "other", body([1.0])), "Y") == [2.0]
        assert r.metric('headrace_requests_total{protocol="http",route="proxy",status="200"}') == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (Unreachable("down"), 503),
        (Rejected("queue full", 3.2), 429),
        (ConnectionLost("gone"), 502),
        (BadReply("nonsense"), 502),
        (BackendFailed("model says no", 400), 400),
        (BackendFailed("model broke", 500), 500),
        (BackendFailed("bad argument", 3, grpc=True), 400),
    ],
)
def test_failures_keep_their_meaning(failure: Any, status: int) -> None:
    async def run() -> None:
        r = rig()
        r.server.failure = failure
        async with r.client() as client:
            response = await post(client, "twice", body([1.0]))
        assert response.status_code == status
        assert response.json() == {"error": failure.message}
        assert ("retry-after" in response.headers) == (status in (429, 503))
        assert r.metric(f'headrace_requests_total{{protocol="http",route="twice",status="{status}"}}') == 1
        assert r.defects == []

    asyncio.run(run())


def test_a_defect_is_reported_and_tells_the_caller_nothing() -> None:
    async def run() -> None:
        r = rig()
        r.server.models["twice"] = lambda inputs: 1 / 0  # type: ignore[assignment,return-value]
        async with r.client() as client:
            response = await post(client, "twice", body([1.0]))
        assert (response.status_code, response.json()) == (500, {"error": "internal error in the gateway"})
        assert [type(error) for error in r.defects] == [ZeroDivisionError]

    asyncio.run(run())


def test_an_expired_deadline_is_504_and_nothing_is_sent() -> None:
    async def run() -> None:
        r = rig()

        async def slow(request: Any, /) -> Any:
            await asyncio.sleep(5)

        async with r.client() as client:
            r.server.__class__ = type("Slow", (FakeServer,), {"__call__": lambda self, request: slow(request)})
            response = await post(client, "batched", body([1.0]), headers={"headrace-timeout-ms": "30"})
            assert response.status_code == 504
            assert "deadline exceeded" in response.json()["error"]
            wrong = await post(client, "batched", body([1.0]), headers={"headrace-timeout-ms": "soon"})
            assert wrong.status_code == 400
        dispatch = r.things.dispatchers["small"][1]
        for _ in range(5):  # the cancelled batch ends, then gives its slot back
            await asyncio.sleep(0)
        assert (dispatch.dispatcher.running, dispatch.dispatcher.waiting_rows) == (0, 0)

    asyncio.run(run())


def test_in_flight_requests_are_bounded() -> None:
    async def run() -> None:
        r = rig(POLICY + "limits: {in_flight: 1}\n")
        async with r.client() as client:
            responses = await asyncio.gather(*(post(client, "batched", body([1.0])) for _ in range(3)))
        assert sorted(x.status_code for x in responses) == [200, 429, 429]
        assert r.things.in_flight.count == 0

    asyncio.run(run())


def test_a_draining_gateway_refuses() -> None:
    async def run() -> None:
        r = rig()
        r.things.in_flight.draining = True
        async with r.client() as client:
            response = await post(client, "twice", body([1.0]))
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"

    asyncio.run(run())


def test_relayed_calls_of_a_route_are_for_its_last_tier_under_the_public_name() -> None:
    async def run() -> None:
        r = rig()
        async with r.client() as client:
            metadata = await client.get("/v2/models/sure", headers={"accept-encoding": "gzip"})
            config = await client.get("/v2/models/sure/versions/3/config?x=1")
            stats = await client.get("/v2/models/sure/stats")
            general = await client.get("/v2/repository/index")
        assert metadata.json() == {"name": "sure", "target": "/v2/models/large"}
        assert b"accept-encoding" not in dict(r.server.requests[0].content.headers)  # type: ignore[union-attr]
        assert config.json() == {"name": "sure", "target": "/v2/models/large/versions/3/config?x=1"}
        assert stats.json()["target"] == "/v2/models/large/stats"
        assert general.json() == {"name": "", "target": "/v2/repository/index"}

    asyncio.run(run())


TWO = """
backends:
  pair: {endpoints: [http://127.0.0.1:1, http://127.0.0.1:2], model: twice, batch: {max_rows: 4, slots: 2}}
routes:
  pair: {backend: pair}
"""


def test_a_replica_that_is_known_to_be_dead_attracts_nothing() -> None:
    async def run() -> None:
        dead = FakeServer({})
        dead.failure = Unreachable("connection refused")
        r = Rig(TWO, FakeServer({"twice": double}), {"http://127.0.0.1:2": dead})
        for endpoint in r.endpoints:
            endpoint.ready = endpoint.name.endswith(":1")
        async with r.client() as client:
            for _ in range(20):
                assert output(await post(client, "pair", body([1.0])), "Y") == [2.0]
        assert dead.requests == []

    asyncio.run(run())


def test_replicas_that_are_ready_take_turns() -> None:
    async def run() -> None:
        other = FakeServer({"twice": double})
        r = Rig(TWO, FakeServer({"twice": double}), {"http://127.0.0.1:2": other})
        async with r.client() as client:
            for _ in range(20):
                await post(client, "pair", body([1.0]))
        assert 5 <= len(other.requests) <= 15

    asyncio.run(run())


class Slow(FakeServer):
    """Answers `slow` never, and everything else at once."""

    async def __call__(self, request: Any, /) -> Any:
        if request.model != "slow":
            return await super().__call__(request)
        await asyncio.sleep(max(0.0, min(request.deadline - asyncio.get_running_loop().time(), 5)))
        raise Expired("backend")


SLOW = """
backends:
  slow: {endpoints: [http://127.0.0.1:1], model: slow, timeout: 30ms}
  large: {endpoints: [http://127.0.0.1:1], model: large}
routes:
  cascade:
    tiers:
      - {backend: slow, accept: {output: P, values: probabilities, score: margin, threshold: 0.5}}
      - {backend: large}
  alone: {backend: slow}
"""


def test_a_tier_that_is_slower_than_its_own_limit_passes_its_rows_on() -> None:
    async def run() -> None:
        r = Rig(SLOW, Slow({"large": large}))
        async with r.client() as client:
            answer = await post(client, "cascade", body([0.1, 0.2]))
            assert output(answer, "WHO") == [1.0, 1.0]
            assert answer.headers["headrace-tier"] == "large=2"
            alone = await post(client, "alone", body([0.1]))
            assert alone.status_code == 504
            assert alone.json() == {"error": "'http://127.0.0.1:1' did not answer within 0.03 s"}
            hurried = await post(client, "cascade", body([0.1]), headers={"headrace-timeout-ms": "10"})
            assert hurried.status_code == 504
            assert "deadline exceeded in backend" in hurried.json()["error"]

    asyncio.run(run())


def test_a_stream_is_in_flight_until_it_ends() -> None:
    async def run() -> None:
        r = rig(PROXY)
        call = HttpCall("POST", "/v2/models/other/generate_stream")
        reply = await r.services["http"](Request(model="other", content=call, stream=True))
        assert (r.things.in_flight.count, sum(e.in_flight for e in r.endpoints)) == (1, 1)
        await reply.body.body.aclose()  # type: ignore[union-attr]
        assert (r.things.in_flight.count, sum(e.in_flight for e in r.endpoints)) == (0, 0)
        assert r.metric('headrace_requests_total{protocol="http",route="proxy",status="499"}') == 1

    asyncio.run(run())


def test_control_calls_are_for_models_of_the_gateway() -> None:
    async def run() -> None:
        async with rig().client() as client:
            foreign = await client.post("/v2/repository/models/other/unload")
            own = await client.post("/v2/repository/models/sure/load")
            settings = await client.post("/v2/logging", json={})
        assert (foreign.status_code, own.status_code, settings.status_code) == (404, 403, 403)
        assert own.json() == {"error": "load: the policy does not let callers change the servers of this backend"}
        async with rig(POLICY.replace("model: large", "model: large, control: true")).client() as client:
            own = await client.post("/v2/repository/models/sure/load")
        assert own.json()["target"] == "/v2/repository/models/large/load"

    asyncio.run(run())


def test_equal_cache_settings_are_not_one_cache() -> None:
    r = rig(POLICY + "  second: {backend: plain, cache: {ttl: 1h}}\n")
    assert len(r.things.stores) == 2


def test_a_rule_that_fits_no_output_is_loud_and_costs_no_caller_an_answer() -> None:
    async def run() -> None:
        r = rig(POLICY.replace("output: P,", "output: WHO,"))
        async with r.client() as client:
            answer = await post(client, "sure", body([0.9, 0.1]))
            assert output(answer, "WHO") == [1.0, 1.0]
        assert r.metric('headrace_unscored_rows_total{route="sure",tier="small"}') == 2
        r = rig(POLICY.replace("output: P,", "output: NOPE,"))

        def picky(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            raise BackendFailed("unexpected inference output 'NOPE'", 400)

        r.server.models["small"] = picky
        async with r.client() as client:
            answer = await post(client, "sure", body([0.9], outputs=[{"name": "WHO"}]))
            assert output(answer, "WHO") == [1.0]
        assert r.metric('headrace_tier_failures_total{route="sure",tier="small"}') == 1

    asyncio.run(run())


@pytest.mark.parametrize("batch", [", batch: {max_rows: 4, slots: 2}", ""])
def test_a_replica_that_takes_nothing_costs_no_caller_an_answer(batch: str) -> None:
    async def run() -> None:
        dead = FakeServer({})
        dead.failure = Unreachable("connection refused")
        text = TWO.replace(", batch: {max_rows: 4, slots: 2}", batch)
        r = Rig(text, FakeServer({"twice": double}), {"http://127.0.0.1:2": dead})
        async with r.client() as client:
            for _ in range(20):
                assert output(await post(client, "pair", body([1.0])), "Y") == [2.0]
        assert len(dead.requests) == r.metric('headrace_retries_total{backend="pair"}') == 1
        assert [endpoint.ready for endpoint in r.endpoints] == [None, False]

    asyncio.run(run())

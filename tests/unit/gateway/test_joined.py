"""What worker 0 answers for all workers, over real gateways without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from gateway import joined as under_test
from gateway import reload
from gateway.admin import admin as alone
from gateway.admin import joined_admin, joined_metrics, own
from gateway.app import Gateway
from gateway.joined import Joined, join_backends, join_cache, join_metrics
from gateway.tools import asking as asking_tool
from gateway.workers import Worker
from policies import Policy, PolicyError, Problem, parse

POLICY = """
backends:
  a: {endpoints: [http://127.0.0.1:1], model: m, batch: {slots: 2}}
routes:
  r: {backend: a}
"""
EDITED = POLICY.replace("slots: 2", "slots: 4").encode()
FORCE = {"force": "true"}


class Refusing(Gateway):
    """A gateway that takes no other policy."""

    async def apply(self, policy: Policy, *, force: bool = False) -> bool:
        raise PolicyError([Problem("policy", 0, "backends.a", "this worker will not")])


async def silence(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.Event().wait()


def gateway(index: int, kind: type[Gateway] = Gateway) -> Gateway:
    return kind(parse(POLICY, "policy.yaml", {}), worker=Worker(index=index, count=3))


def asking(
    *workers: Gateway | None, test: Callable[[Joined, httpx.AsyncClient], Awaitable[None]], patience: float = 0.5
) -> None:
    """Runs `test` with the joined answers of `workers` (None: one that is silent), and a client of the admin port."""

    def client(app: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker")

    async def run() -> None:
        joined = Joined([client(own(worker) if worker else silence) for worker in workers], patience)
        assert workers[0] is not None
        try:
            async with client(joined_admin(workers[0], joined)) as admin:
                admin.headers["content-type"] = "application/yaml"
                await test(joined, admin)
        finally:
            await joined.close()
            for worker in workers:
                if worker is not None:
                    await worker.close()

    asyncio.run(run())


def versions(*workers: Gateway) -> set[str]:
    return {worker.policy.version for worker in workers}


def test_a_policy_is_put_in_force_by_all_and_rolled_back_by_all() -> None:
    workers = [gateway(index) for index in range(3)]
    (first,) = versions(*workers)

    async def test(_: Joined, admin: httpx.AsyncClient) -> None:
        posted = await admin.post("/policy", content=EDITED, params=FORCE)
        (second,) = versions(*workers)
        assert second != first
        assert (posted.status_code, posted.json()) == (200, {"version": second})
        shown = (await admin.get("/policy")).json()
        assert (shown["workers"], shown["history"]) == ([second] * 3, [first])
        assert shown["backends"]["a"]["batch"]["slots"] == 4
        assert (await admin.post("/policy/rollback")).json() == {"version": first}
        assert versions(*workers) == {first}
        assert (await admin.post("/policy/rollback")).status_code == 409

    asking(*workers, test=test)


def test_where_one_refuses_the_others_roll_back_and_its_reason_is_told() -> None:
    workers = [gateway(0), gateway(1, Refusing), gateway(2)]
    (first,) = versions(*workers)

    async def test(_: Joined, admin: httpx.AsyncClient) -> None:
        answer = await admin.post("/policy", content=EDITED, params=FORCE)
        assert answer.status_code == 400
        assert "this worker will not" in answer.json()["problems"][0]
        assert versions(*workers) == {first}
        assert [len(worker.reload.history) for worker in workers] == [0, 0, 0]

    asking(*workers, test=test)


def test_who_had_the_policy_already_keeps_it_where_another_refuses() -> None:
    workers = [gateway(0), gateway(1), gateway(2, Refusing)]

    async def test(_: Joined, admin: httpx.AsyncClient) -> None:
        edited = parse(EDITED.decode(), "policy", {})
        await workers[1].apply(edited, force=True)
        assert (await admin.post("/policy", content=EDITED, params=FORCE)).status_code == 400
        assert workers[1].policy.version == edited.version
        assert workers[0].policy.version != edited.version

    asking(*workers, test=test)


def test_a_silent_worker_is_an_error_in_the_answer() -> None:
    workers = [gateway(0), None]
    assert workers[0] is not None
    first = workers[0].policy.version
    silent = "worker 1: no answer within 0.5 s"

    async def test(joined: Joined, admin: httpx.AsyncClient) -> None:
        backends = await admin.get("/backends")
        assert backends.headers["headrace-incomplete"] == silent
        traces = await admin.get("/traces")
        assert (traces.json(), traces.headers["headrace-incomplete"]) == ([], silent)
        assert (await admin.get("/policy")).json()["workers"] == [first, silent]
        assert (await admin.get("/traces/" + "1" * 32)).json() == {"error": silent}
        assert (await admin.get("/traces/last")).json() == {"error": silent}
        rollback = await admin.post("/policy/rollback")
        assert (rollback.status_code, rollback.json()) == (504, {"error": silent})
        assert 'headrace_worker_up{worker="1"} 0.0' in (await joined.metrics()).decode()

    asking(*workers, test=test)


def test_one_ready_worker_is_enough_and_nobody_waits_for_the_silent() -> None:
    worker = gateway(0)
    worker._open = True
    for _, endpoint in worker.reload.current.things.all_endpoints():
        endpoint.ready = True

    async def test(_: Joined, admin: httpx.AsyncClient) -> None:
        async with asyncio.timeout(0.4):
            assert (await admin.get("/readyz")).status_code == 200

    asking(worker, None, test=test)


class Slow(Gateway):
    """A gateway that takes half a second for whatever it changes, as one that loads a model does."""

    async def apply(self, policy: Policy, *, force: bool = False) -> bool:
        await asyncio.sleep(0.5)
        return await super().apply(policy, force=force)

    async def rollback(self) -> None:
        await asyncio.sleep(0.5)
        await super().rollback()


def test_a_change_is_waited_for_longer_than_a_page() -> None:
    workers = [gateway(0), gateway(1, Slow)]
    (first,) = versions(*workers)

    async def test(_: Joined, admin: httpx.AsyncClient) -> None:
        assert (await admin.post("/policy", content=EDITED, params=FORCE)).status_code == 200
        assert len(versions(*workers) - {first}) == 1
        assert (await admin.post("/policy/rollback")).status_code == 200
        assert versions(*workers) == {first}

    asking(*workers, patience=0.2, test=test)


def test_whoever_waits_waits_longer_than_whom_it_asks() -> None:
    # Another edit of that worker's may be loading its own models first.
    assert 2 * reload._LOAD_SECONDS < under_test._APPLY_SECONDS
    assert reload._PROBE_SECONDS < reload._LOAD_SECONDS
    assert under_test._PATIENCE_SECONDS + 2 * under_test._APPLY_SECONDS < asking_tool._CHANGE_SECONDS


def test_a_policy_is_not_begun_where_a_worker_is_silent() -> None:
    worker = gateway(0)
    first = worker.policy.version

    async def test(_: Joined, admin: httpx.AsyncClient) -> None:
        answer = await admin.post("/policy", content=EDITED, params=FORCE)
        assert (answer.status_code, answer.json()) == (504, {"error": "worker 1: no answer within 0.5 s"})
        assert (worker.policy.version, len(worker.reload.history)) == (first, 0)

    asking(worker, None, test=test)


def test_a_policy_that_one_worker_is_too_slow_for_is_rolled_back_and_what_is_left_is_told(monkeypatch: Any) -> None:
    monkeypatch.setattr("gateway.joined._APPLY_SECONDS", 0.2)
    workers = [gateway(0), gateway(1, Slow)]
    (first,) = versions(*workers)

    async def test(_: Joined, admin: httpx.AsyncClient) -> None:
        answer = await admin.post("/policy", content=EDITED, params=FORCE)
        error = "worker 1: no answer within 0.2 s"
        assert (answer.status_code, answer.json()) == (504, {"error": error, "left": [f"{error}; it may do so yet"]})
        assert workers[0].policy.version == first

    asking(*workers, test=test)


class Stuck(Gateway):
    """A gateway that does not go back."""

    async def rollback(self) -> None:
        raise PolicyError([Problem("rollback", 0, "", "not this worker")])


def test_who_does_not_go_back_from_a_policy_that_was_refused_is_told() -> None:
    workers = [gateway(0), gateway(1, Refusing), gateway(2, Stuck)]

    async def test(_: Joined, admin: httpx.AsyncClient) -> None:
        answer = await admin.post("/policy", content=EDITED, params=FORCE)
        new = workers[2].policy.version
        assert (answer.status_code, answer.json()["error"]) == (400, "policy refused")
        assert answer.json()["left"] == [f"worker 2: keeps {new}: rollback: not this worker"]
        assert versions(workers[0], workers[1]) != {new}

    asking(*workers, test=test)


def test_a_rollback_that_one_refuses_says_who_has_what() -> None:
    workers = [gateway(0), gateway(1, Stuck)]
    (first,) = versions(*workers)

    async def test(_: Joined, admin: httpx.AsyncClient) -> None:
        await admin.post("/policy", content=EDITED, params=FORCE)
        new = workers[1].policy.version
        answer = await admin.post("/policy/rollback")
        assert (answer.status_code, answer.json()["error"]) == (409, "rollback: not this worker")
        assert answer.json()["left"] == [f"worker 0: has {first}", f"worker 1: keeps {new}: rollback: not this worker"]

    asking(*workers, test=test)


def test_workers_whose_earlier_policies_differ_do_not_roll_back() -> None:
    workers = [gateway(0), gateway(1)]

    async def test(_: Joined, admin: httpx.AsyncClient) -> None:
        await workers[0].apply(parse(EDITED.decode(), "policy", {}), force=True)
        before = workers[0].policy.version
        answer = await admin.post("/policy/rollback")
        assert answer.status_code == 409
        assert "worker 1: none" in answer.json()["error"]
        assert workers[0].policy.version == before

    asking(*workers, test=test)


def test_traces_of_all_the_most_recent_first() -> None:
    workers = [gateway(index) for index in range(3)]

    async def test(_: Joined, admin: httpx.AsyncClient) -> None:
        made = []
        for index in (0, 2, 1, 0):
            span = workers[index].tracing._tracer.start_span(f"edge {index}")
            span.end()
            made.append(f"{span.get_span_context().trace_id:032x}")
        assert (await admin.get("/traces")).json() == made[::-1]
        assert (await admin.get("/traces/last")).json()["spans"][0]["name"] == "edge 0"
        assert (await admin.get(f"/traces/{made[2]}")).json()["spans"][0]["name"] == "edge 1"
        assert (await admin.get("/traces/" + "1" * 32)).status_code == 404

    asking(*workers, test=test)


def test_the_page_of_all_metrics_and_readiness() -> None:
    workers = [gateway(0), gateway(1)]

    async def test(joined: Joined, admin: httpx.AsyncClient) -> None:
        workers[1].metrics.request("r", "http", "200", 0.1)
        page = (await joined.metrics()).decode()
        assert 'headrace_requests_total{worker="1",protocol="http",route="r",status="200"} 1.0' in page
        assert page.count("# TYPE headrace_requests_total counter") == 1
        assert 'headrace_requests_in_flight{worker="0"} 0.0' in page
        assert (await admin.get("/readyz")).status_code == 503
        workers[1]._open = True
        for _, endpoint in workers[1].reload.current.things.all_endpoints():
            endpoint.ready = True
        assert (await admin.get("/readyz")).status_code == 200
        assert (await admin.get("/livez")).status_code == 200
        assert "/traces/{id}" in (await admin.get("/")).json()["paths"]
        transport = httpx.ASGITransport(joined_metrics(joined))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://metrics") as client:
            answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")

    asking(*workers, test=test)


def test_a_sample_gets_its_label_whatever_its_others_say() -> None:
    page = '# HELP a A {b} c\n# TYPE a gauge\na 1.0\na{} 2.0\na{x="} {\\"\u2028"} 3.0\n'
    lines = join_metrics([page, None]).split("\n")
    assert lines[-4:] == ['a{worker="0"} 1.0', 'a{worker="0"} 2.0', 'a{worker="0",x="} {\\"\u2028"} 3.0', ""]


def page(ready: bool | None, reason: str = "", in_flight: int = 1, avoided: str = "", **more: Any) -> dict[str, Any]:
    endpoint = {"name": "e", "ready": ready, "reason": reason, "protocol": "http", "in_flight": in_flight}
    endpoint["avoided"] = {"m": avoided} if avoided else {}
    return {"a": {"endpoints": [endpoint], **more}}


def test_backends_are_summed_and_ready_only_where_all_say_so() -> None:
    queue = {"queue": {"rows": 2, "batches_running": 1}}
    joined = join_backends([page(True, in_flight=2, **queue), page(False, "refused", avoided="x", **queue), page(None)])
    assert joined["a"]["endpoints"] == [
        {"name": "e", "ready": False, "reason": "refused", "protocol": "http", "in_flight": 4, "avoided": {"m": "x"}}
    ]
    assert joined["a"]["queue"] == {"rows": 4, "batches_running": 2}
    assert join_backends([page(True), page(True)])["a"]["endpoints"][0]["ready"] is True
    (endpoint,) = join_backends([page(True), "worker 1: no answer"])["a"]["endpoints"]
    assert (endpoint["ready"], endpoint["reason"]) == (False, "worker 1: no answer")


def store(up: bool | None, reason: str = "", dropped: int = 1) -> dict[str, Any]:
    return {"redis": {"address": "redis://h:1/0", "up": up, "reason": reason, "dropped_rows": dropped}}


def test_a_store_is_up_only_where_all_say_so_and_its_rows_are_summed() -> None:
    def joined(*pages: dict[str, Any] | str) -> tuple[Any, ...]:
        ((name, one),) = join_cache(pages).items()
        assert (name, one["address"]) == ("redis", "redis://h:1/0")
        return one["up"], one["reason"], one["dropped_rows"]

    assert joined(store(True), store(True)) == (True, "", 2)
    assert joined(store(True), store(False, "gone"), store(False, "late", 5)) == (False, "gone", 7)
    assert joined(store(True), store(None)) == (None, "", 2)
    assert joined(store(True), store(True, "a replica")) == (True, "a replica", 2)
    assert joined(store(True), "worker 1: no answer") == (False, "worker 1: no answer", 1)
    assert joined("worker 0: no answer", store(False, "gone")) == (False, "gone", 1)
    assert join_cache([{}, "worker 1: no answer"]) == {}
    assert joined({}, store(True)) == (True, "", 1)


def test_several_workers_answer_all_that_one_does() -> None:
    workers = [gateway(0), gateway(1)]

    async def test(_: Joined, admin: httpx.AsyncClient) -> None:
        assert (await admin.get("/cache")).json() == {}
        one = httpx.AsyncClient(transport=httpx.ASGITransport(alone(workers[0])), base_url="http://worker")
        async with one:
            assert (await admin.get("/")).json()["paths"] == (await one.get("/")).json()["paths"]

    asking(*workers, test=test)

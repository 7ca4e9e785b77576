"""Relayed calls over several replicas: who is asked, what is put together, what is serialised."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from backends.errors import Failure, Unreachable
from backends.request import HttpCall, Relay, Reply, Request
from tests.support.gateway import FakeServer, Rig, double

POLICY = """
backends:
  b: {endpoints: [http://127.0.0.1:1, http://127.0.0.1:2], model: inner, MORE}
routes:
  m: {backend: b}
"""


class Server(FakeServer):
    """Answers relayed calls with what `said` has for their path: a status and a document, or a failure."""

    def __init__(self, said: Mapping[str, Any] | None = None) -> None:
        super().__init__({"inner": double})
        self.said = dict(said or {})
        self.asked: list[str] = []
        self.hold: Callable[[str], Any] | None = None

    async def __call__(self, request: Request, /) -> Reply:
        if not isinstance(request.content, HttpCall):
            return await super().__call__(request)
        path = request.content.target
        self.asked.append(path)
        if self.hold is not None:
            await self.hold(path)
        answer = self.said.get(path, (200, {}))
        if isinstance(answer, Failure):
            raise answer
        status, document = answer
        body = json.dumps(document).encode() if document is not None else b""
        return Reply(Relay(status, ((b"content-type", b"application/json"),), body))


def rig(one: Server, two: Server, more: str = "timeout: 30s") -> Rig:
    return Rig(POLICY.replace("MORE", more), one, {"http://127.0.0.1:2": two})


def ask(one: Server, two: Server, method: str, path: str, more: str = "timeout: 30s", **kw: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with rig(one, two, more).client() as client:
            return await client.request(method, path, **kw)

    return asyncio.run(run())


READY = "/v2/models/inner/ready"
NO = (400, {"error": "Model version not ready"})


@pytest.mark.parametrize(("one", "two", "wanted", "status"), [
    ((200, None), (200, None), 1, 200), ((200, None), NO, 1, 200), (NO, (200, None), 1, 200), (NO, NO, 1, 400),
    ((200, None), (200, None), 2, 200), ((200, None), NO, 2, 503), (Unreachable("down"), (200, None), 1, 200),
    (Unreachable("down"), (200, None), 2, 503), (Unreachable("down"), Unreachable("down"), 1, 503),
])  # fmt: skip
def test_a_model_is_ready_where_enough_replicas_say_so(one: Any, two: Any, wanted: int, status: int) -> None:
    answer = ask(Server({READY: one}), Server({READY: two}), "GET", "/v2/models/m/ready", f"ready_replicas: {wanted}")
    assert answer.status_code == status, answer.text
    if (one, two, wanted) == ((200, None), NO, 2):
        error = "model 'inner' is ready on 1 of 2 replicas, expected 2"
        assert (answer.json(), answer.headers["retry-after"]) == ({"error": error}, "1")
    if status == 400:
        assert answer.json() == NO[1]  # in the server's own words


def stats(count: int) -> tuple[int, Any]:
    return 200, {"model_stats": [{"name": "inner", "version": "1", "inference_count": count}]}


def test_statistics_are_summed_under_the_public_name() -> None:
    path = "/v2/models/inner/stats"
    answer = ask(Server({path: stats(3)}), Server({path: stats(4)}), "GET", "/v2/models/m/stats")
    assert answer.json() == {"model_stats": [{"name": "m", "version": "1", "inference_count": 7}]}
    assert "headrace-incomplete" not in answer.headers


def test_a_sum_says_whom_it_is_without() -> None:
    path = "/v2/models/inner/stats"
    partly = ask(Server({path: stats(3)}), Server({path: Unreachable("down")}), "GET", "/v2/models/m/stats")
    assert partly.json()["model_stats"][0]["inference_count"] == 3
    assert partly.headers["headrace-incomplete"] == "http://127.0.0.1:2"
    # One that has no such model is missing in nothing.
    whole = ask(Server({path: stats(3)}), Server({path: (400, {"error": "no"})}), "GET", "/v2/models/m/stats")
    assert "headrace-incomplete" not in whole.headers
    none = ask(Server({path: (400, {"error": "no"})}), Server({path: Unreachable("")}), "GET", "/v2/models/m/stats")
    assert (none.status_code, none.json()) == (400, {"error": "no"})


def test_metadata_that_differ_are_told_once_a_change(caplog: pytest.LogCaptureFixture) -> None:
    path = "/v2/models/inner"
    one, two = Server({path: (200, {"versions": ["1"]})}), Server({path: (200, {"versions": ["2"]})})
    caplog.set_level(logging.INFO, "headrace.backends")

    async def run() -> None:
        async with rig(one, two).client() as client:
            for _ in range(3):
                # Always the same one's, while both tell.
                assert (await client.get("/v2/models/m")).json() == {"versions": ["1"]}
            two.said[path] = one.said[path]
            for _ in range(2):
                await client.get("/v2/models/m")
            one.said[path] = Unreachable("down")
            assert (await client.get("/v2/models/m")).status_code == 200

    asyncio.run(run())
    assert [record.message for record in caplog.records] == ["replicas disagree", "replicas agree again"]
    fields: Any = caplog.records[0].__dict__["fields"]
    assert fields["replicas"] == "http://127.0.0.1:1 | http://127.0.0.1:2"


LOAD = "/v2/repository/models/inner/load"


def test_a_change_reaches_every_replica_and_needs_the_policys_word() -> None:
    one, two = Server(), Server()
    refused = ask(one, two, "POST", "/v2/repository/models/m/load", content=b"{}")
    assert refused.status_code == 403
    assert one.asked == two.asked == []
    done = ask(one, two, "POST", "/v2/repository/models/m/load", "control: true", content=b"{}")
    assert done.status_code == 200
    assert one.asked == two.asked == [LOAD]


@pytest.mark.parametrize(("one", "two", "status"), [
    ((200, None), (400, {"error": "no space"}), 400), ((400, {"error": "a"}), (503, {"error": "b"}), 502),
    ((500, {"error": "a"}), (500, {"error": "b"}), 500), ((200, None), Unreachable("down"), 503),
])  # fmt: skip
def test_a_change_that_failed_somewhere_says_what_each_replica_said(one: Any, two: Any, status: int) -> None:
    servers = Server({LOAD: one}), Server({LOAD: two})
    answer = ask(*servers, "POST", "/v2/repository/models/m/load", "control: true")
    assert answer.status_code == status
    said = [each.message if isinstance(each, Failure) else "done" if each[0] == 200 else each[1]["error"]
            for each in (one, two)]  # fmt: skip
    failed = 2 - said.count("done")
    assert answer.json()["error"] == (
        f"load of 'inner' failed on {failed} of 2 replicas: "
        f"http://127.0.0.1:1: {said[0]}; http://127.0.0.1:2: {said[1]}"
    )


def test_two_changes_of_one_model_never_run_at_once_even_if_a_caller_leaves() -> None:
    async def run() -> None:
        one, two = Server(), Server()
        gates = {"load": asyncio.Event(), "begun": asyncio.Event()}

        async def hold(path: str) -> None:
            if path == LOAD:
                gates["begun"].set()
                await gates["load"].wait()

        one.hold = hold
        r = rig(one, two, "control: true")
        service = r.services["http"]

        def call(action: str) -> asyncio.Task[Reply]:
            content = HttpCall("POST", f"/v2/repository/models/m/{action}")
            return asyncio.ensure_future(service(Request(model="m", content=content)))

        first = call("load")
        await gates["begun"].wait()
        first.cancel()
        second = call("unload")
        for _ in range(20):
            await asyncio.sleep(0)
        assert one.asked == [LOAD]  # the load goes on, and the unload waits for it
        gates["load"].set()
        assert (await second).body.status == 200  # type: ignore[union-attr]
        assert one.asked == two.asked == [LOAD, LOAD.replace("load", "unload")]

    asyncio.run(run())


def test_a_change_whose_turn_does_not_come_in_time_was_never_made() -> None:
    async def run() -> None:
        one, two = Server(), Server()
        stop = asyncio.Event()
        begun = asyncio.Event()

        async def hold(path: str) -> None:
            begun.set()
            await stop.wait()

        one.hold = hold
        async with rig(one, two, "control: true").client() as client:
            first = asyncio.ensure_future(client.post("/v2/repository/models/m/load"))
            await begun.wait()
            late = await client.post("/v2/repository/models/m/load", headers={"headrace-timeout-ms": "20"})
            stop.set()
            assert (await first).status_code == 200
        assert (late.status_code, one.asked) == (504, [LOAD])
        assert "another change of the same model" in late.json()["error"]

    asyncio.run(run())


def test_server_metadata_is_what_all_replicas_and_the_gateway_support() -> None:
    def said(*extensions: str) -> tuple[int, Any]:
        return 200, {"name": "triton", "version": "2", "extensions": list(extensions)}

    one = Server({"/v2": said("sequence", "statistics", "trace", "cuda_shared_memory")})
    two = Server({"/v2": said("statistics", "trace", "cuda_shared_memory")})
    assert ask(one, two, "GET", "/v2").json() == said("statistics")[1]
    assert ask(one, two, "GET", "/v2", "control: true").json() == said("statistics", "trace")[1]


def test_the_index_is_a_union_that_says_where_a_model_is_not_ready() -> None:
    one = Server({"/v2/repository/index": (200, [{"name": "a", "version": "1", "state": "READY"}])})
    two = Server({"/v2/repository/index": (200, [{"name": "b", "version": "1", "state": "READY"}])})
    names = [entry["name"] for entry in ask(one, two, "POST", "/v2/repository/index").json()]
    assert names == ["a", "b"]
    index = ask(one, two, "POST", "/v2/repository/index", "ready_replicas: 2").json()
    assert [entry["state"] for entry in index] == ["UNAVAILABLE", "UNAVAILABLE"]


@pytest.mark.parametrize("path", ["/v2/systemsharedmemory/status", "/v2/cudasharedmemory/region/r/register"])
def test_shared_memory_is_not_there_unless_the_policy_says_so(path: str) -> None:
    refused = ask(Server(), Server(), "POST", path)
    assert refused.status_code == 501
    assert "does not reach through the gateway" in refused.json()["error"]


def test_a_replica_that_is_silent_is_not_waited_for_long() -> None:
    async def run() -> None:
        one, two = Server({"/v2/models/inner/stats": stats(3)}), Server()
        two.hold = lambda path: asyncio.Event().wait()
        async with rig(one, two).client() as client:
            answer = await asyncio.wait_for(client.get("/v2/models/m/stats"), 10)
        assert answer.headers["headrace-incomplete"] == "http://127.0.0.1:2"

    asyncio.run(run())

"""Statuses of failures, as the gateway has them and as Triton has them."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from backends import errors
from backends.errors import BackendFailed, BadRequest, Failure, Malformed, NotFound, Rejected, Unreachable, WrongMethod
from gateway.respond import HEADRACE, STATUSES, TRITON
from tests.support.gateway import FakeServer, Rig

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Failure)]
TOLD = [kind for kind in CLASSES if kind not in (Failure, BackendFailed)]


def made(kind: type[Failure]) -> Failure:
    return WrongMethod("line", "POST") if kind is WrongMethod else kind("line")


@pytest.mark.parametrize("compat", STATUSES)
def test_every_failure_has_a_place_in_the_table(compat: str) -> None:
    assert set(TOLD) == set(STATUSES[compat].of)
    for kind in TOLD:
        assert 400 <= STATUSES[compat].http(made(kind))[0] < 600
        code, line, _ = STATUSES[compat].grpc(made(kind))
        assert (1 <= code <= 16, line.endswith("line")) == (True, True)


def test_the_callers_faults_are_4xx_except_to_those_who_expect_triton() -> None:
    for kind in TOLD:
        if issubclass(kind, BadRequest | NotFound):
            assert HEADRACE.http(made(kind))[0] < 500
    assert TRITON.http(Malformed(""))[0] == 500
    assert TRITON.http(BadRequest(""))[0] == 400


def test_a_full_queue_is_busy_to_us_and_unavailable_to_triton() -> None:
    assert HEADRACE.http(Rejected("full", 2.5)) == (429, (("retry-after", "3"),))
    assert HEADRACE.grpc(Rejected("full"))[0] == 8
    assert TRITON.http(Rejected("full", 2.5)) == (503, (("retry-after", "3"),))
    assert TRITON.grpc(Rejected("full"))[0] == 14
    assert TRITON.http(Unreachable("down"))[0] == HEADRACE.http(Unreachable("down"))[0] == 503


@pytest.mark.parametrize(
    ("code", "ours", "tritons"),
    [(1, 400, 400), (2, 500, 400), (3, 400, 400), (5, 404, 404), (6, 400, 400), (12, 501, 501), (13, 500, 500),
     (14, 503, 503)],
)  # fmt: skip
def test_a_grpc_backends_code_over_http(code: int, ours: int, tritons: int) -> None:
    failure = BackendFailed("line", code, grpc=True)
    assert (HEADRACE.http(failure)[0], TRITON.http(failure)[0]) == (ours, tritons)
    assert HEADRACE.grpc(failure)[0] == TRITON.grpc(failure)[0] == code


@pytest.mark.parametrize(
    ("compat", "told"),
    [
        ("headrace", [(400, "application/json"), (415, "application/json"), (405, "application/json"), (503, "")]),
        ("triton", [(500, "application/json"), (501, "text/plain"), (405, "text/plain"), (400, "")]),
    ],
)
def test_the_http_edge_tells_failures_as_its_listener_is_meant_to(compat: str, told: list[tuple[int, str]]) -> None:
    policy = f"{{proxy: b, backends: {{b: {{endpoints: ['http://t:1']}}}}, listen: {{compat: {compat}}}}}"
    rig = Rig(policy, FakeServer({}))
    path = "/v2/models/m/infer"

    async def run() -> list[httpx.Response]:
        async with rig.client() as client:
            answers = [
                await client.post(path, content=b"{"),
                await client.post(path, content=b"{", headers={"content-encoding": "br"}),
                await client.get(path),
            ]
            rig.server.is_ready = False
            return [*answers, await client.get("/v2/health/ready")]

    answers = asyncio.run(run())
    assert [(a.status_code, a.headers.get("content-type", "")) for a in answers] == told
    assert all(list(a.json()) == ["error"] for a in answers[:3])


@pytest.mark.parametrize(("compat", "status"), [("headrace", "429"), ("triton", "503")])
def test_metrics_and_traces_have_the_status_that_was_told(compat: str, status: str) -> None:
    policy = f"{{proxy: b, backends: {{b: {{endpoints: ['http://t:1']}}}}, listen: {{compat: {compat}}}}}"
    rig = Rig(policy, FakeServer({}))
    rig.server.failure = Rejected("queue is full")
    body = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"data":[1]}]}'

    async def run() -> httpx.Response:
        async with rig.client() as client:
            return await client.post("/v2/models/m/infer", content=body)

    assert asyncio.run(run()).status_code == int(status)
    assert rig.metric(f'headrace_requests_total{{protocol="http",route="proxy",status="{status}"}}') == 1

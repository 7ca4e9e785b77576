"""A real tritonserver behind the installed gateway, driven by the real tritonclient.

Every answer through the gateway equals the model run directly, bit by bit: HTTP JSON, HTTP binary and gRPC callers
share batches, with backends over HTTP and over gRPC.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as grpcclient
import tritonclient.http.aio as httpclient
from tritonclient.utils import InferenceServerException

from deploy.demo.repository import write_test_models
from deploy.demo.triton import Triton, ensure_venv
from tests.support.serve import Served, served, within
from tests.support.triton import VENV

REQUESTS = 2000
CONCURRENCY = 64

POLICY = """
x-triton: &triton
  http: http://{http}
  grpc: {grpc}
backends:
  rowsum_grpc: {{endpoints: [*triton], protocol: grpc, model: rowsum, batch: {{max_rows: 16, slots: 2}}}}
  rowsum_http: {{endpoints: [*triton], protocol: http, model: rowsum, batch: {{max_rows: 16, slots: 2}}}}
  echo: {{endpoints: [*triton], protocol: grpc, model: echo, batch: {{max_rows: 16, slots: 2}}}}
  any: {{endpoints: [*triton]}}
routes:
  over_grpc: {{backend: rowsum_grpc}}
  over_http: {{backend: rowsum_http}}
  text: {{backend: echo}}
  remembered: {{backend: rowsum_grpc, cache: {{ttl: 1h}}}}
proxy: any
telemetry: {{access_log: false}}
"""


@pytest.fixture(scope="module")
def gateway(triton: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    policy = folder / "policy.yaml"
    policy.write_text(POLICY.format(http=triton.http, grpc=triton.grpc))
    with served(folder, str(policy)) as running:
        yield running


async def infer(client: Any, module: Any, model: str, name: str, array: Any, *, binary: bool, output: str) -> Any:
    tensor = module.InferInput(name, list(array.shape), "BYTES" if array.dtype == np.object_ else "FP32")
    wanted = module.InferRequestedOutput(output)
    if module is httpclient:
        tensor.set_data_from_numpy(array, binary_data=binary)
        wanted = module.InferRequestedOutput(output, binary_data=binary)
    else:
        tensor.set_data_from_numpy(array)
    reply = await client.infer(model, [tensor], outputs=[wanted])
    assert (reply.get_response()["model_name"] if module is httpclient else reply.get_response().model_name) == model
    return reply.as_numpy(output)


def test_2000_mixed_requests_are_answered_as_the_model_answers(gateway: Served, triton: Any) -> None:
    chance = random.Random(20261130)  # rows of up to 40: beyond the policy's 16, a request passes alone
    numbers = np.random.default_rng(20261130)

    async def run() -> None:
        direct = grpcclient.InferenceServerClient(triton.grpc)
        http = httpclient.InferenceServerClient(gateway.http, conn_limit=CONCURRENCY)
        grpc = grpcclient.InferenceServerClient(gateway.grpc)
        turns = iter(range(REQUESTS))
        seen: dict[tuple[str, str], int] = {}

        async def one() -> None:
            rows = chance.choice([1, 1, 1, 2, 3, 5, 8, 13, 16, 17, 40])
            kind = chance.choice(["json", "binary", "grpc"])
            route = chance.choice(["over_grpc", "over_http", "text", "remembered", "rowsum"])
            client, module = (grpc, grpcclient) if kind == "grpc" else (http, httpclient)
            if route == "text":
                words = ["", "a", "größer", "x" * 5000, "tab\there", "日本語"]
                array = np.array([[chance.choice(words).encode()] for _ in range(rows)], dtype=np.object_)
                name, output, model = "IN_BYTES", "OUT_BYTES", "echo"
            else:
                array = numbers.standard_normal((rows, 16), dtype=np.float32)
                if route == "remembered":
                    array = np.round(array[:, :1].clip(-1, 1)).repeat(16, 1)
                name, output, model = "X", "Y", "rowsum"
            answer = await infer(client, module, route, name, array, binary=kind == "binary", output=output)
            expected = await infer(direct, grpcclient, model, name, array, binary=True, output=output)
            assert answer.shape == expected.shape
            if route == "text":
                # JSON has no bytes: the client gives text back.
                plain = [x.encode() if isinstance(x, str) else x for x in answer.ravel()]
                assert plain == expected.ravel().tolist()
            else:
                assert answer.tobytes() == expected.tobytes()
            seen[route, kind] = seen.get((route, kind), 0) + 1

        async def worker() -> None:
            for _ in turns:
                await one()

        try:
            await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
        finally:
            for client in (direct, http, grpc):
                await client.close()
        assert sum(seen.values()) == REQUESTS
        assert len(seen) == 15

    asyncio.run(run())
    counters = gateway.counters()
    batches = sum(v for k, v in counters.items() if k.startswith("headrace_batch_rows_count"))
    rows = sum(v for k, v in counters.items() if k.startswith("headrace_batch_rows_sum"))
    assert rows / batches > 1
    # They did share: a request of 1 to 16 rows alone would never fill a batch that holds several.
    assert counters['headrace_cache_rows_total{result="hit",route="remembered"}'] > 0
    assert not [k for k, v in counters.items() if k.startswith("headrace_internal_errors_total") and v]
    assert not [k for k, v in counters.items() if k.startswith("headrace_requests_in_flight") and v]


def test_what_is_said_of_a_route_bears_its_name(gateway: Served, triton: Any) -> None:
    """All else that is said of models: test_differential_calls.py."""

    async def run() -> None:
        http = httpclient.InferenceServerClient(gateway.http)
        grpc = grpcclient.InferenceServerClient(gateway.grpc)
        straight = httpclient.InferenceServerClient(triton.http)
        try:
            for client in (http, grpc):
                assert await client.is_model_ready("over_grpc")
            expected = await straight.get_model_metadata("rowsum")
            assert await http.get_model_metadata("over_grpc") == {**expected, "name": "over_grpc"}
            assert (await grpc.get_model_metadata("over_grpc")).name == "over_grpc"
            assert [i.name for i in (await grpc.get_model_metadata("over_grpc")).inputs] == ["X"]
            assert (await grpc.get_model_config("over_grpc")).config.name == "over_grpc"
            assert (await http.get_model_config("over_grpc"))["name"] == "over_grpc"
            # Less what this policy lets no caller use.
            metadata = await straight.get_server_metadata()
            unused = ("model_repository", "trace", "logging", "system_", "cuda_")
            metadata["extensions"] = [name for name in metadata["extensions"] if not name.startswith(unused)]
            assert await http.get_server_metadata() == metadata
            assert await http.get_model_repository_index() == await straight.get_model_repository_index()
            assert (await http.get_inference_statistics("rowsum"))["model_stats"][0]["name"] == "rowsum"
            assert (await grpc.get_inference_statistics("rowsum")).model_stats[0].name == "rowsum"
            assert not await http.is_model_ready("nosuch")
        finally:
            for client in (http, grpc, straight):
                await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"inputs":' + b"[" * 1000 + b"]" * 1000 + b"}", 400),
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,16],"data":[1,2]}]}', 400),
        (b'{"inputs":[{"name":"X","datatype":"INT32","shape":[1,1],"data":[1]}]}', 400),
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,3],"data":[1,2,3]}]}', 400),
        (b'{"inputs":[{"name":"NOPE","datatype":"FP32","shape":[1,1],"data":[1]}]}', 400),
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[-1,16],"data":[1]}]}', 400),
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,16],"parameters":{"binary_data_size":64}}]}', 400),
    ],
)
@pytest.mark.parametrize("route", ["over_grpc", "over_http", "rowsum"])
def test_bad_requests_are_400_and_the_same_connection_lives_on(
    gateway: Served, route: str, body: bytes, status: int
) -> None:
    with httpx.Client(base_url=f"http://{gateway.http}") as client:
        response = client.post(f"/v2/models/{route}/infer", content=body)
        assert response.status_code == status, response.text
        assert len(response.json()["error"].splitlines()) == 1
        good = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}
        assert client.post(f"/v2/models/{route}/infer", json=good).status_code == 200


def test_an_unknown_model_is_404_over_http_and_not_found_over_grpc(gateway: Served) -> None:
    async def run() -> None:
        http = httpclient.InferenceServerClient(gateway.http)
        grpc = grpcclient.InferenceServerClient(gateway.grpc)
        array = np.zeros((1, 16), np.float32)
        try:
            for client, module, code in ((http, httpclient, "404"), (grpc, grpcclient, "StatusCode.NOT_FOUND")):
                with pytest.raises(InferenceServerException) as caught:
                    await infer(client, module, "nosuch", "X", array, binary=True, output="Y")
                assert caught.value.status() in (code, None)
                assert "nosuch" in str(caught.value)
        finally:
            await http.close()
            await grpc.close()

    asyncio.run(run())


def test_a_triton_that_comes_late_is_found(tmp_path: Path) -> None:
    """The gateway starts without its backend, and serves it by itself once it is there."""
    late = Triton(
        ensure_venv(VENV), write_test_models(tmp_path / "models"), log=tmp_path / "triton.log", models=["rowsum"]
    )
    good = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}
    with served(tmp_path, "--backend", f"http://{late.http}", "--backend-grpc", late.grpc, wait=(503,)) as gateway:
        url = f"http://{gateway.http}/v2/models/rowsum/infer"
        response = httpx.post(url, json=good)
        assert response.status_code == 503
        assert "retry-after" in response.headers
        try:
            late.start()
            late.wait_ready()
            assert within(5, lambda: httpx.post(url, json=good, timeout=10).status_code == 200)
            assert within(5, lambda: httpx.get(f"http://{gateway.http}/v2/health/ready").status_code == 200)
        finally:
            late.stop()
        assert within(5, lambda: httpx.get(f"http://{gateway.http}/v2/health/ready").status_code == 503)
        response = httpx.post(url, json=good)
        assert response.status_code == 503
        assert "retry-after" in response.headers

"""`headrace serve --backend` before a real tritonserver: a proxy for every model, without a policy file."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient

from deploy.demo.repository import write_test_models
from deploy.demo.triton import Triton, ensure_venv
from tests.support.serve import Served, free_port, served
from tests.support.triton import VENV


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Triton, Served]]:
    """A server whose gRPC port is the one after its HTTP port, as Triton's defaults are, and the gateway before it."""
    folder = tmp_path_factory.mktemp("proxy")
    with (
        Triton(
            ensure_venv(VENV),
            write_test_models(folder / "models"),
            log=folder / "triton.log",
            models=["echo", "rowsum"],
            http=free_port(3),
        ) as server,
        served(folder, "--backend", f"http://{server.http}") as gateway,
    ):
        yield server, gateway


def test_grpc_is_found_and_preferred(both: tuple[Triton, Served]) -> None:
    _, gateway = both
    (endpoint,) = httpx.get(f"http://{gateway.admin}/backends").json()["backend"]["endpoints"]
    assert (endpoint["ready"], endpoint["protocol"]) == (True, "grpc")


def test_every_datatype_that_the_model_has_passes_over_http_to_a_grpc_backend(both: tuple[Triton, Served]) -> None:
    _, gateway = both
    inputs: list[dict[str, Any]] = [
        {"name": "IN_FP32", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -0.25]},
        {"name": "IN_INT64", "datatype": "INT64", "shape": [1, 2], "data": [2**63 - 1, -(2**63)]},
        {"name": "IN_BYTES", "datatype": "BYTES", "shape": [1, 2], "data": ["", "größe"]},
        {"name": "IN_BOOL", "datatype": "BOOL", "shape": [1, 2], "data": [True, False]},
        {"name": "IN_UINT8", "datatype": "UINT8", "shape": [1, 2], "data": [0, 255]},
    ]
    response = httpx.post(f"http://{gateway.http}/v2/models/echo/infer", json={"id": "7", "inputs": inputs})
    assert response.status_code == 200, response.text
    document = response.json()
    assert (document["model_name"], document["id"]) == ("echo", "7")
    given = {i["name"].replace("IN_", "OUT_"): i["data"] for i in inputs}
    assert {o["name"]: o["data"] for o in document["outputs"]} == given


def test_a_stream_of_inferences_is_relayed_in_order(both: tuple[Triton, Served]) -> None:
    _, gateway = both
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(gateway.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for i in range(10):
            tensor = grpcclient.InferInput("IN_INT64", [1, 1], "INT64")
            tensor.set_data_from_numpy(np.array([[i]], np.int64))
            client.async_stream_infer("echo", [tensor])
        got = [answers.get(timeout=10).as_numpy("OUT_INT64").item() for _ in range(10)]
        client.stop_stream()
    assert got == list(range(10))


def test_other_calls_of_the_inference_service_pass(both: tuple[Triton, Served]) -> None:
    server, gateway = both

    async def run() -> None:
        async with aioclient.InferenceServerClient(gateway.grpc) as client:
            index = await client.get_model_repository_index()
            assert {model.name for model in index.models} == {"echo", "rowsum"}
            assert (await client.get_server_metadata()).name == "triton"
            assert "trace_level" in (await client.get_trace_settings()).settings
            await client.unload_model("echo")
            assert not await client.is_model_ready("echo")
            await client.load_model("echo")
            assert await client.is_model_ready("echo")

    asyncio.run(run())
    direct = httpx.get(f"http://{server.http}/v2/logging")
    assert httpx.get(f"http://{gateway.http}/v2/logging").json() == direct.json()


def test_the_gateway_adds_no_header_where_the_policy_says_so(both: tuple[Triton, Served], tmp_path: Path) -> None:
    server, gateway = both
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}
    answer = httpx.post(f"http://{gateway.http}/v2/models/rowsum/infer", json=body)
    assert [name for name in answer.headers if name.startswith("headrace-")] == ["headrace-policy"]
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        f"backends: {{b: {{endpoints: [http://{server.http}]}}}}\nproxy: b\ntelemetry: {{response_headers: false}}\n"
    )
    with served(tmp_path, str(policy)) as silent:
        answer = httpx.post(f"http://{silent.http}/v2/models/rowsum/infer", json=body)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("headrace-")]

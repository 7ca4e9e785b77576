"""`headrace serve --backend` before a real tritonserver: a proxy for every model, without a policy file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

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

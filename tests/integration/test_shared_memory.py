"""Tensors in system shared memory, by Triton's own client: where the policy says so, and a clear no where not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from deploy.demo.triton import Triton
from tests.support.serve import Served, served
from tests.support.triton import proxied

POLICY = """
backends:
  near: {{endpoints: [{{http: http://{http}, grpc: "{grpc}"}}], shared_memory: true}}
  one: {{endpoints: [{{http: http://{http}, grpc: "{grpc}"}}], model: echo, shared_memory: true,
         batch: {{max_rows: 8}}, protocol: http}}
  far: {{endpoints: [{{http: http://{http}, grpc: "{grpc}"}}], model: echo}}
proxy: near
routes:
  public: {{backend: one, cache: {{ttl: 1h}}}}
  apart: {{backend: far}}
"""
VALUES = np.array([[1, -(2**63), 3]], np.int64)
SIZE = VALUES.nbytes
CLIENTS = pytest.mark.parametrize("client", [httpclient, grpcclient], ids=["http", "grpc"])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Triton, Served]]:
    with proxied(tmp_path_factory.mktemp("memory"), POLICY, "echo") as pair:
        yield pair


@contextmanager
def region(prefix: str) -> Iterator[tuple[str, Any]]:
    """A region of two halves, the first of which holds VALUES."""
    key = f"/headrace_test_{prefix}"
    handle = shm.create_shared_memory_region("r", key, 2 * SIZE)
    try:
        shm.set_shared_memory_region(handle, [VALUES])
        yield key, handle
    finally:
        shm.destroy_shared_memory_region(handle)


def call(client: Any, api: Any, model: str, *, output: bool = True, version: str = "") -> Any:
    tensor = api.InferInput("IN_INT64", [1, 3], "INT64")
    tensor.set_shared_memory("r", SIZE)
    wanted = api.InferRequestedOutput("OUT_INT64")
    if output:
        wanted.set_shared_memory("r", SIZE, SIZE)
    return client.infer(model, [tensor], outputs=[wanted], model_version=version)


@CLIENTS
@pytest.mark.parametrize("model", ["echo", "public"])
def test_tensors_stay_where_they_are(both: tuple[Triton, Served], client: Any, model: str) -> None:
    _, gateway = both
    name = client.__name__.rpartition(".")[2]
    address = gateway.http if client is httpclient else gateway.grpc
    with region(f"{gateway.process.pid}_{name}_{model}") as (key, handle), client.InferenceServerClient(address) as c:
        c.register_system_shared_memory("r", key, 2 * SIZE)
        try:
            status = c.get_system_shared_memory_status()
            assert key in str(status)
            for version in ("", "1"):
                shm.set_shared_memory_region(handle, [np.zeros_like(VALUES)], offset=SIZE)
                result = call(c, client, model, version=version)
                assert result.get_output("OUT_INT64") is not None  # without data
                got = shm.get_contents_as_numpy(handle, np.int64, [2, 3])[1]
                assert got.tolist() == VALUES[0].tolist()
            response = result.get_response()
            assert (response["model_name"] if client is httpclient else response.model_name) == model
            # An answer that comes back as it would without shared memory.
            assert call(c, client, model, output=False).as_numpy("OUT_INT64").tolist() == VALUES.tolist()
            # What is in memory changes behind the gateway's back: it is asked anew, and never out of the cache.
            shm.set_shared_memory_region(handle, [VALUES + 4])
            assert call(c, client, model, output=False).as_numpy("OUT_INT64").tolist() == (VALUES + 4).tolist()
            with pytest.raises(InferenceServerException, match="version 9"):
                call(c, client, model, version="9")
        finally:
            c.unregister_system_shared_memory("r")
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'r'"):
            call(c, client, model)


def test_a_stream_of_calls_with_regions(both: tuple[Triton, Served]) -> None:
    _, gateway = both
    results: list[Any] = []
    with region(f"{gateway.process.pid}_stream") as (key, _), grpcclient.InferenceServerClient(gateway.grpc) as c:
        c.register_system_shared_memory("r", key, 2 * SIZE)
        try:
            c.start_stream(lambda result, error: results.append(error or result.as_numpy("OUT_INT64").tolist()))
            tensor = grpcclient.InferInput("IN_INT64", [1, 3], "INT64")
            tensor.set_shared_memory("r", SIZE)
            c.async_stream_infer("public", [tensor])
            c.stop_stream()
        finally:
            c.unregister_system_shared_memory("r")
    assert results == [VALUES.tolist()]


@CLIENTS
def test_a_backend_that_is_elsewhere_is_not_asked(both: tuple[Triton, Served], client: Any) -> None:
    _, gateway = both
    address = gateway.http if client is httpclient else gateway.grpc
    with client.InferenceServerClient(address) as c:
        with pytest.raises(InferenceServerException, match="does not reach through the gateway") as refused:
            call(c, client, "apart")
        assert str(refused.value.status()) in ("501", "StatusCode.UNIMPLEMENTED")


def test_a_stream_to_a_backend_that_is_elsewhere_ends_with_the_reason(both: tuple[Triton, Served]) -> None:
    _, gateway = both
    errors: list[Any] = []
    with grpcclient.InferenceServerClient(gateway.grpc) as c:
        c.start_stream(lambda result, error: errors.append(error))
        tensor = grpcclient.InferInput("IN_INT64", [1, 3], "INT64")
        tensor.set_shared_memory("r", SIZE)
        c.async_stream_infer("apart", [tensor])
        c.stop_stream()
    assert "does not reach through the gateway" in str(errors[0])


def test_serve_backend_does_not_share_memory(both: tuple[Triton, Served], tmp_path: Any) -> None:
    server, _ = both
    with served(tmp_path, "--backend", f"http://{server.http}", "--backend-grpc", server.grpc) as proxy:
        for path in ("systemsharedmemory/status", "cudasharedmemory/status"):
            refused = httpx.get(f"http://{proxy.http}/v2/{path}")
            assert (refused.status_code, "shared_memory" in refused.text) == (501, False)
        with grpc.insecure_channel(proxy.grpc) as channel, pytest.raises(grpc.RpcError) as failed:
            channel.unary_unary("/inference.GRPCInferenceService/SystemSharedMemoryStatus")(b"")
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
        told = httpx.get(f"http://{proxy.http}/v2").json()["extensions"]
        direct = httpx.get(f"http://{server.http}/v2").json()["extensions"]
        assert told == [name for name in direct if not name.endswith("shared_memory")]

"""What goes beside tensors, with the real tritonclient before a real Triton: compression, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.support.serve import Served, served
from tests.support.triton import triton

__all__ = ["triton"]


@pytest.fixture(scope="module")
def gateway(triton: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    with served(folder, "--backend", f"http://{triton.http}", "--backend-grpc", triton.grpc) as running:
        yield running


def asked(rows: int) -> list[Any]:
    block = np.arange(rows * 16, dtype=np.float32).reshape(rows, 16)
    given = grpcclient.InferInput("X", list(block.shape), "FP32")
    given.set_data_from_numpy(block)
    return [given]


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_callers_may_compress(gateway: Served, triton: Any, compression: str | None) -> None:
    answers = []
    for address in (triton.grpc, gateway.grpc):
        with grpcclient.InferenceServerClient(address) as client:
            reply = client.infer("rowsum", asked(64), compression_algorithm=compression)
            answers.append(reply.get_response().SerializeToString(deterministic=True))
    assert answers[0] == answers[1]


def test_an_error_of_triton_is_the_same_through_the_gateway(gateway: Served, triton: Any) -> None:
    told = []
    for address in (triton.grpc, gateway.grpc):
        with grpcclient.InferenceServerClient(address) as client, pytest.raises(InferenceServerException) as raised:
            client.infer("nosuch", asked(1))
        told.append((raised.value.status(), raised.value.message()))
    assert told[0] == told[1]

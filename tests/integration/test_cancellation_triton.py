"""Callers that leave, before a real Triton: its model saw who had left, also for HTTP callers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.support.leaving import HttpCaller
from tests.support.serve import Served, free_port, served, within
from tests.support.triton import triton_with

# An HTTP caller's departure, Triton's own way to its model, and a slice of the model's sleep.
SEEN = 0.3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Served]]:
    """The folder that the model writes to, and a gateway before its Triton: without a policy, so that gRPC is found."""
    folder = tmp_path_factory.mktemp("slow")
    with (
        triton_with(folder, "slow", http=free_port(3)) as triton,
        served(folder, "--backend", f"http://{triton.http}") as gateway,
    ):
        yield folder, gateway


def ends(folder: Path, id: str) -> list[str]:
    """What the model said of a request."""
    log = folder / "ends"
    return [line.split()[1] for line in log.read_text().splitlines() if line.split()[0] == id] if log.exists() else []


def post(id: str, milliseconds: int, *headers: str) -> bytes:
    inputs = [{"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [milliseconds]}]
    body = json.dumps({"id": id, "inputs": inputs})
    lines = ["POST /v2/models/slow/infer HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_the_model_sees_that_an_http_caller_left(place: tuple[Path, Served], reset: bool) -> None:
    folder, gateway = place
    id = f"http-{reset}"

    async def leave() -> None:
        caller = await HttpCaller.ask(gateway.http, post(id, 20_000))
        assert await asyncio.to_thread(within, 5, lambda: ends(folder, id) == ["began"])
        caller.leave(reset=reset)

    asyncio.run(leave())
    left = time.monotonic()
    assert within(5, lambda: ends(folder, id) == ["began", "cancelled"])
    assert time.monotonic() - left < SEEN


def test_the_model_sees_that_a_grpc_caller_left(place: tuple[Path, Served]) -> None:
    folder, gateway = place
    with grpcclient.InferenceServerClient(gateway.grpc) as client:
        tensor = grpcclient.InferInput("INPUT", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.array([[20_000]], np.int32))
        context = client.async_infer("slow", [tensor], lambda result, error: None, request_id="grpc")
        assert within(5, lambda: ends(folder, "grpc") == ["began"])
        context.cancel()
        left = time.monotonic()
        assert within(5, lambda: ends(folder, "grpc") == ["began", "cancelled"])
        assert time.monotonic() - left < SEEN


def test_the_model_sees_that_a_deadline_passed(place: tuple[Path, Served]) -> None:
    folder, gateway = place

    async def ask() -> tuple[int, dict[str, str]]:
        caller = await HttpCaller.ask(gateway.http, post("late", 20_000, "headrace-timeout-ms: 500"))
        try:
            return await caller.answer()
        finally:
            caller.leave()

    status, body = asyncio.run(ask())
    assert status == 504
    assert body["error"].startswith("deadline exceeded in ")
    assert within(2, lambda: ends(folder, "late") == ["began", "cancelled"])


def test_who_stays_is_answered(place: tuple[Path, Served]) -> None:
    folder, gateway = place

    async def ask() -> int:
        caller = await HttpCaller.ask(gateway.http, post("stays", 50))
        status, _ = await caller.answer()
        caller.leave()
        return status

    assert asyncio.run(ask()) == 200
    assert ends(folder, "stays") == ["began", "answered"]

"""A model in this process, wired into a gateway: found again by its path, and never taken for a server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.request import HttpCall, Infer, Request, Tensors
from gateway.connect import Connect
from gateway.metrics import Metrics
from gateway.reload import Reload, Snapshot
from gateway.stack import Things, Tools, build
from gateway.telemetry import Tracing
from policies import Policy, PolicyError, parse
from tests.support import models
from tests.support.gateway import FakeServer, Rig, double, fp32

POLICY = "backends: {a: {local: one.onnx}}\nroutes: {r: {backend: a, cache: {ttl: 1h}}}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, factor in (("one", 1), ("two", 2)):
        models.graph(
            tmp_path / f"{name}.onnx", [models.node("Mul", ["X", "F"], ["Y"])],
            [("X", "FP32", ("rows", 1))], [("Y", "FP32", ("rows", 1))], F=np.float32(factor),
        )  # fmt: skip
    return tmp_path


def running(folder: Path, test: Callable[[Reload, Callable[[str], Policy]], Coroutine[Any, Any, None]]) -> None:
    tracing = Tracing(per_second=0, keep=1, now=time.monotonic)
    tools = Tools(time.monotonic, tracing, Metrics(), Connect(time.monotonic), random.Random(1))

    def policy(text: str) -> Policy:
        return parse(text, str(folder / "policy.yaml"), {})

    def make(policy: Policy, things: Things) -> Snapshot:
        return Snapshot(policy, build(policy, things, tools), things)

    async def main() -> None:
        reload = Reload(make(policy(POLICY), Things()), make)
        try:
            await test(reload, policy)
        finally:
            await reload.close()
            await reload.current.things.close()

    asyncio.run(main())


async def answer(reload: Reload) -> float:
    call = Request(model="r", content=Infer(Tensors.of((fp32("X", [[3]]),))), deadline=time.monotonic() + 10)
    reply = await reload.current.services["http"](call)
    return float(np.frombuffer(reply.answer.outputs.decoded[0].data, "<f4")[0])


def test_an_edit_of_the_path_is_another_model_whose_answers_are_its_own(folder: Path) -> None:
    async def test(reload: Reload, policy: Callable[[str], Policy]) -> None:
        assert [await answer(reload) for _ in range(2)] == [3, 3]
        before = reload.current.things.endpoints["a"][1]
        assert (before[0].protocol, before[0].name) == ("local", f"local:{folder / 'one.onnx'}")
        assert await reload.apply(policy(POLICY + "\nlimits: {in_flight: 7}"))
        assert reload.current.things.endpoints["a"][1] is before
        assert await reload.apply(policy(POLICY.replace("one", "two")))
        assert [await answer(reload) for _ in range(2)] == [6, 6]

    running(folder, test)


def test_a_changed_file_is_another_model_in_a_store_that_outlives_it(folder: Path) -> None:
    """As with Redis: a gateway that starts anew, or another one, finds the rows of the one before under equal keys."""

    async def test(reload: Reload, policy: Callable[[str], Policy]) -> None:
        assert [await answer(reload) for _ in range(2)] == [3, 3]
        store = reload.current.things.stores
        (folder / "two.onnx").replace(folder / "one.onnx")
        fresh = Things(stores=dict(store))
        again = Reload(reload._make(policy(POLICY), fresh), reload._make)
        try:
            assert fresh.stores == store
            assert [await answer(again) for _ in range(2)] == [6, 6]
        finally:
            await again.close()
            await fresh.close()

    running(folder, test)


def test_an_edit_that_names_a_model_which_cannot_be_loaded_is_refused(folder: Path) -> None:
    async def test(reload: Reload, policy: Callable[[str], Policy]) -> None:
        with pytest.raises(PolicyError) as told:
            await reload.apply(policy(POLICY.replace("one", "three")))
        path = folder / "three.onnx"
        assert str(told.value) == (
            f"policy: backends.a.local: local:{path} is not ready: there is no such file or folder"
        )
        assert await answer(reload) == 3

    running(folder, test)


def test_calls_that_name_no_model_are_a_servers(folder: Path) -> None:
    text = "backends: {a: {local: one.onnx}, b: {endpoints: [http://h:1]}}\nroutes: {r: {backend: a}}"
    server = FakeServer({"twice": double})
    rig = Rig(text, server)

    async def main() -> None:
        async with rig.client() as client:
            assert (await client.get("/v2")).json()["target"] == "/v2"

    asyncio.run(main())
    assert isinstance(server.requests[0].content, HttpCall)

"""What every client of a backend promises: Triton over HTTP and gRPC before a real server, a model in this process.

One model everywhere: SUM is of each row of X, SAME is TEXT; a text `sleep` takes a second, and `fail` fails.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.endpoint import Client
from backends.errors import (
    BackendFailed,
    BadRequest,
    ConnectionLost,
    Expired,
    Failure,
    NotFound,
    Unreachable,
    own_fault,
)
from backends.http_client import HttpClient
from backends.local.client import LocalClient
from backends.local.load import load
from backends.local.model import Model
from backends.request import Answer, Infer, Request, Tensors, Wanted
from backends.tensor import Tensor, join_elements
from backends.triton_grpc import TritonGrpc
from backends.triton_http import TritonHttp
from deploy.demo.triton import Triton
from policies.spec import Local
from tests.support import models
from tests.support.triton import triton_with

PATIENCE = 20.0  # seconds; for what takes no time on a machine that is not busy
LIMIT_BYTES = 1 << 20
NAMES = ["http", "grpc", "local"]


@dataclass
class Subject:
    """One kind of client: of the model, and of nothing that can be reached."""

    name: str
    make: Callable[[], Client]
    nowhere: Callable[[], Client]

    def run(self, test: Callable[[Any], Coroutine[Any, Any, None]], make: Callable[[], Client] | None = None) -> None:
        """Runs a test with a client of its own, which leaves neither task nor thread of its own behind."""

        async def main() -> None:
            client = (make or self.make)()
            try:
                async with asyncio.timeout(PATIENCE):
                    await test(client)
            finally:
                await client.close()
            async with asyncio.timeout(PATIENCE):
                while asyncio.all_tasks() - {asyncio.current_task()}:  # noqa: ASYNC110 - the last step of what was cancelled
                    await asyncio.sleep(0.001)
            assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("local:")]

        asyncio.run(main())


class Told:
    """A model that sleeps and fails by its text, as the one on the server does."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.platform, self.inputs, self.outputs = model.platform, model.inputs, model.outputs

    def run(self, inputs: Mapping[str, Tensor], wanted: Any) -> tuple[Tensor, ...]:
        text = bytes(inputs["TEXT"].data)
        if b"sleep" in text:
            time.sleep(1)
        if b"fail" in text:
            raise RuntimeError("it was told to fail")
        return self._model.run(inputs, wanted)


def onnx(path: Path) -> str:
    nodes = [
        models.node("ReduceSum", ["X", "axes"], ["SUM"], keepdims=1),
        models.node("Identity", ["TEXT"], ["SAME"]),
    ]
    inputs = [("X", "INT32", ("rows", 2)), ("TEXT", "BYTES", ("rows", 1))]
    outputs = [("SUM", "INT32", ("rows", 1)), ("SAME", "BYTES", ("rows", 1))]
    return models.graph(path, nodes, inputs, outputs, axes=np.array([1], np.int64))  # type: ignore[arg-type]


def over_http(address: str) -> Client:
    host, _, port = address.rpartition(":")
    return TritonHttp(HttpClient(host, int(port), now=time.monotonic, max_response_bytes=LIMIT_BYTES), time.monotonic)


def over_grpc(address: str) -> Client:
    return TritonGrpc(address, now=time.monotonic, connect_timeout=2.0, max_message_bytes=LIMIT_BYTES)


def in_process(path: str) -> Client:
    return LocalClient(Local(path, 2), now=time.monotonic, load=lambda path: Told(load(path)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with triton_with(tmp_path_factory.mktemp("triton"), "contract") as triton:
        yield triton


@pytest.fixture(scope="module")
def nowhere() -> Iterator[str]:
    """An address that nobody listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest, server: Triton, nowhere: str, tmp_path: Path) -> Subject:
    match request.param:
        case "http":
            return Subject("http", lambda: over_http(server.http), lambda: over_http(nowhere))
        case "grpc":
            return Subject("grpc", lambda: over_grpc(server.grpc), lambda: over_grpc(nowhere))
        case _:
            path = onnx(tmp_path / "contract.onnx")
            return Subject("local", lambda: in_process(path), lambda: in_process(str(tmp_path / "none.onnx")))


def x(*rows: tuple[int, int]) -> Tensor:
    block = np.array(rows, "<i4").reshape(-1, 2)
    return Tensor("X", "INT32", block.shape, block.tobytes())


def text(*rows: bytes) -> Tensor:
    return Tensor("TEXT", "BYTES", (len(rows), 1), join_elements(list(rows)))


def ask(
    *inputs: Tensor, model: str = "contract", version: str = "", within: float = PATIENCE, **fields: Any
) -> Request:
    infer = Infer(Tensors.of(inputs), **fields)
    return Request(model=model, version=version, content=infer, deadline=time.monotonic() + within)


def one(word: bytes, **fields: Any) -> Request:
    return ask(x((1, 2)), text(word), **fields)


def tensors(answer: Answer) -> dict[str, Any]:
    return {t.name: (t.datatype, t.shape, bytes(t.data)) for t in answer.outputs.decoded}


def expected(rows: list[tuple[int, int]], words: list[bytes]) -> dict[str, Any]:
    sums = np.array([a + b for a, b in rows], "<i4")
    return {
        "SUM": ("INT32", (len(rows), 1), sums.tobytes()),
        "SAME": ("BYTES", (len(words), 1), join_elements(words)),
    }


# Answers.


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(1, 2)], [b"a"]),
        ([(2**31 - 1, 0), (-(2**31), 1), (-1, -1)], [b"", b"a\0b", "\u00e9\U0001f600".encode()]),
        ([(i, -2 * i) for i in range(1000)], [b"x" * (i % 300) for i in range(1000)]),
        ([], []),
    ],
)
def test_answers_are_exact(backend: Subject, rows: list[tuple[int, int]], words: list[bytes]) -> None:
    async def test(client: Client) -> None:
        answer = (await client(ask(x(*rows), text(*words)))).answer
        assert tensors(answer) == expected(rows, words)
        assert (answer.model, answer.version) == ("contract", "1")
        assert not answer.headers + answer.trailers

    backend.run(test)


def test_inputs_in_any_order_and_requested_outputs_only(backend: Subject) -> None:
    async def test(client: Client) -> None:
        given = (text(b"a"), x((1, 2)))
        for names in (["SAME"], ["SUM"], ["SUM", "SAME"], ["SAME", "SUM"]):
            answer = (await client(ask(*given, outputs=tuple(map(Wanted, names))))).answer
            assert tensors(answer) == {name: expected([(1, 2)], [b"a"])[name] for name in names}

    backend.run(test)


def test_an_id_and_the_parameters_of_any_call_change_nothing(backend: Subject) -> None:
    async def test(client: Client) -> None:
        usual = {"priority": 1, "timeout": 5_000_000, "sequence_id": 0}
        answer = (await client(one(b"a", id="caf\u00e9-7", parameters=usual))).answer
        assert tensors(answer) == expected([(1, 2)], [b"a"])
        assert answer.id in ("", "caf\u00e9-7")

    backend.run(test)


def test_many_at_once_get_their_own_answers(backend: Subject) -> None:
    async def test(client: Client) -> None:
        async def mine(i: int) -> None:
            word = b"%d" % i
            assert tensors((await client(ask(x((i, i)), text(word)))).answer) == expected([(i, i)], [word])

        await asyncio.gather(*(mine(i) for i in range(60)))

    backend.run(test)


# Failures.


@pytest.mark.parametrize(
    ("inputs", "outputs", "named"),
    [
        ((x((1, 2)),), (), "TEXT"),
        ((x((1, 2)), text(b"a"), Tensor("NOPE", "INT8", (1,), b"\1")), (), "NOPE"),
        ((Tensor("X", "FP32", (1, 2), bytes(8)), text(b"a")), (), "X"),
        ((Tensor("X", "INT32", (1, 3), bytes(12)), text(b"a")), (), "X"),
        ((Tensor("X", "INT32", (2,), bytes(8)), text(b"a")), (), "X"),
        ((x((1, 2)), text(b"a")), (Wanted("NOPE"),), "NOPE"),
    ],
    ids=["missing", "unknown", "datatype", "dimension", "rank", "output"],
)
def test_what_does_not_fit_the_model_is_the_callers_fault(
    backend: Subject, inputs: tuple[Tensor, ...], outputs: tuple[Wanted, ...], named: str
) -> None:
    async def test(client: Client) -> None:
        with pytest.raises((BadRequest, BackendFailed)) as raised:
            await client(ask(*inputs, outputs=outputs))
        assert not own_fault(raised.value)
        assert named in raised.value.message
        assert "\n" not in raised.value.message
        assert tensors((await client(one(b"a"))).answer) == expected([(1, 2)], [b"a"])

    backend.run(test)


def test_what_is_not_there_is_not_found(backend: Subject) -> None:
    async def test(client: Client) -> None:
        assert (await client(one(b"a", version="1"))).answer.version == "1"
        asked = [one(b"a", version="9")]
        if backend.name != "local":  # which has one model, whatever it is called
            asked.append(one(b"a", model="nosuch"))
        for request in asked:
            with pytest.raises(Failure) as raised:
                await client(request)
            failure = raised.value
            assert isinstance(failure, NotFound | BackendFailed)
            assert not isinstance(failure, BackendFailed) or failure.status == (5 if failure.grpc else 404)

    backend.run(test)


def test_a_model_that_fails_is_to_blame_and_goes_on(backend: Subject) -> None:
    async def test(client: Client) -> None:
        with pytest.raises(BackendFailed, match="told to fail") as raised:
            await client(one(b"fail"))
        assert own_fault(raised.value)
        assert raised.value.status == (13 if raised.value.grpc else 500)
        assert tensors((await client(one(b"a"))).answer) == expected([(1, 2)], [b"a"])

    backend.run(test)


# Time.


def test_a_deadline_that_is_over(backend: Subject) -> None:
    async def test(client: Client) -> None:
        await client(one(b"a"))
        with pytest.raises(Expired):
            await client(one(b"a", within=-1))

    backend.run(test)


def test_a_deadline_that_passes_during_the_call(backend: Subject) -> None:
    async def test(client: Client) -> None:
        await client(one(b"a"))
        began = time.monotonic()
        with pytest.raises(Expired):
            await client(one(b"sleep", within=0.1))
        assert 0.1 <= time.monotonic() - began < 0.9
        assert tensors((await client(one(b"a"))).answer) == expected([(1, 2)], [b"a"])

    backend.run(test)


def test_a_caller_that_leaves_is_let_go_at_once(backend: Subject) -> None:
    async def test(client: Client) -> None:
        await client(one(b"a"))
        left = [asyncio.create_task(client(one(b"sleep"))) for _ in range(2)]  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        for task in left:
            task.cancel()
        done = await asyncio.gather(*left, return_exceptions=True)
        assert [type(outcome) for outcome in done] == [asyncio.CancelledError] * 2
        assert time.monotonic() - began < 0.5
        assert tensors((await client(one(b"a"))).answer) == expected([(1, 2)], [b"a"])

    backend.run(test)


# Connections.


def test_nothing_there_means_never_sent(backend: Subject) -> None:
    async def test(client: Client) -> None:
        for _ in range(2):
            with pytest.raises(Unreachable) as raised:
                await client(one(b"a"))
            assert raised.value.message
            assert await client.unready("contract", time.monotonic() + 2, {})

    backend.run(test, backend.nowhere)


def test_ready_or_the_reason(backend: Subject) -> None:
    async def test(client: Client) -> None:
        for model in ("", "contract"):
            assert await client.unready(model, time.monotonic() + PATIENCE, {}) == ""
        if backend.name != "local":
            reason = await client.unready("nosuch", time.monotonic() + PATIENCE, {})
            assert reason
            assert "\n" not in reason

    backend.run(test)


def test_a_closed_client_sends_nothing(backend: Subject) -> None:
    async def test(client: Client) -> None:
        await client(one(b"a"))
        await client.close()
        with pytest.raises(Unreachable, match="closed"):
            await client(one(b"a"))
        assert await client.unready("contract", time.monotonic() + 2, {})

    backend.run(test)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_server_that_is_killed_during_a_call_may_have_executed_it(protocol: str, tmp_path: Path) -> None:
    with triton_with(tmp_path, "contract") as triton:

        async def test(client: Client) -> None:
            await client(one(b"a"))
            running = asyncio.create_task(client(one(b"sleep")))  # type: ignore[arg-type]
            await asyncio.sleep(0.1)
            os.kill(triton.pids()[0], signal.SIGKILL)
            with pytest.raises(ConnectionLost):
                await running
            with pytest.raises((Unreachable, ConnectionLost)):
                await client(one(b"a"))
            assert await client.unready("", time.monotonic() + 2, {})
            with pytest.raises(Unreachable):
                await client(one(b"a"))

        def make() -> Client:
            return over_http(triton.http) if protocol == "http" else over_grpc(triton.grpc)

        Subject(protocol, make, make).run(test)

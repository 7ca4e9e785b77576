"""The client of a model in this process beyond what every client promises (test_backend.py): datatypes, loading, queue."""
# ruff: noqa: E501 - messages stand beside what causes them

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from backends.endpoint import Endpoint
from backends.errors import BackendFailed, BadRequest, Failure, NotFound, Rejected, TooSlow, Unreachable, Unsupported
from backends.local import client as under_test
from backends.local.client import LocalClient
from backends.local.model import Model, Unusable
from backends.request import Answer, Infer, Request, Tensors, Wanted
from backends.tensor import Tensor, join_elements
from tests.support import models
from tests.support.gateway import fp32
from tests.support.local import Slow, client, using

X = fp32("X", [[1, 2, 3], [4, 5, 6]])


def infer(*inputs: Tensor, outputs: tuple[Wanted, ...] = (), version: str = "", **parameters: Any) -> Request:
    content = Infer(Tensors.of(inputs), outputs, parameters)
    return Request(model="public", version=version, content=content)


def answered(path: str, request: Request) -> Answer:
    answer: Answer = using(path, lambda local: _answer(local, request))
    return answer


async def _answer(local: LocalClient, request: Request) -> Answer:
    return (await local(request)).answer


def outputs(answer: Answer) -> dict[str, Any]:
    return {t.name: (t.datatype, t.shape, bytes(t.data)) for t in answer.outputs.decoded}


def refused(path: str, request: Request) -> Failure:
    with pytest.raises(Failure) as told:
        answered(path, request)
    assert "\n" not in told.value.message
    return told.value


# Values: every datatype goes through bit by bit, no rows as well as some.

DATA = {
    "BOOL": b"\0\1\1\0", "UINT8": bytes([0, 1, 254, 255]), "INT8": bytes([0, 127, 128, 255]),
    "UINT16": np.array([0, 1, 2, 2**16 - 1], "<u2").tobytes(), "INT16": np.array([0, -1, 5, -(2**15)], "<i2").tobytes(),
    "UINT32": np.array([0, 1, 2, 2**32 - 1], "<u4").tobytes(), "INT32": np.array([0, -1, 5, -(2**31)], "<i4").tobytes(),
    "UINT64": np.array([0, 1, 2, 2**64 - 1], "<u8").tobytes(), "INT64": np.array([0, -1, 5, -(2**63)], "<i8").tobytes(),
    "FP16": np.array([0, -0.0, np.nan, 65504], "<f2").tobytes(), "FP32": np.array([0, -0.0, np.nan, 1e-45], "<f4").tobytes(),
    "FP64": np.array([0, -np.inf, np.nan, 5e-324], "<f8").tobytes(),
    "BYTES": join_elements([b"", b"a\0b", "\u00e9\U0001f600".encode(), b" x "]),
}  # fmt: skip


@pytest.mark.parametrize("datatype", DATA)
def test_every_datatype_passes_bit_by_bit(datatype: str, tmp_path: Path) -> None:
    path = models.identity(tmp_path / "m.onnx", datatype)
    data = DATA[datatype]
    answer = answered(path, infer(Tensor("X", datatype, (2, 2), data)))
    assert outputs(answer) == {"Y": (datatype, (2, 2), data)}
    assert (answer.model, answer.version) == ("public", "1")
    assert outputs(answered(path, infer(Tensor("X", datatype, (0, 2), b"")))) == {"Y": (datatype, (0, 2), b"")}


def test_data_that_begins_anywhere(tmp_path: Path) -> None:
    path = models.identity(tmp_path / "m.onnx", "FP64")
    view = memoryview(b"?" + DATA["FP64"])[1:]
    assert outputs(answered(path, infer(Tensor("X", "FP64", (2, 2), view)))) == {"Y": ("FP64", (2, 2), DATA["FP64"])}


def test_any_byte_but_zero_is_true(tmp_path: Path) -> None:
    path = models.identity(tmp_path / "m.onnx", "BOOL")
    answer = answered(path, infer(Tensor("X", "BOOL", (2, 2), b"\0\1\2\xff")))
    assert outputs(answer)["Y"][2] == b"\0\1\1\1"


@pytest.mark.parametrize("shape", [[], None])
def test_a_scalar_and_a_shape_that_is_not_known(shape: Any, tmp_path: Path) -> None:
    path = models.identity(tmp_path / "m.onnx", "FP32", shape)
    assert outputs(answered(path, infer(fp32("X", 1.5)))) == {"Y": ("FP32", (), np.float32(1.5).tobytes())}


# What is asked for.


def test_what_clients_send_with_any_call_is_fine(tmp_path: Path) -> None:
    usual = {"timeout": 5, "priority": 1, "sequence_id": 7, "sequence_start": True, "sequence_end": False}
    request = infer(X, binary_data_output=True, triton_enable_empty_final_response=True, **usual)
    assert outputs(answered(models.linear(tmp_path / "m.onnx"), request)) == {
        "LOGITS": ("FP32", (2, 2), np.array([[4, 5], [10, 11]], "<f4").tobytes()),
        "SUM": ("FP32", (2, 1), np.array([[6], [15]], "<f4").tobytes()),
    }


@pytest.mark.parametrize(
    ("request_", "kind", "told"),
    [
        (infer(X, fp32("Z", [[1]])), BadRequest, "unknown input 'Z': expected X FP32[-1, 3]"),
        (infer(fp32("x", [[1, 2, 3]])), BadRequest, "unknown input 'x': expected X FP32[-1, 3]"),
        (infer(), BadRequest, "missing input: expected X FP32[-1, 3], got no 'X'"),
        (infer(Tensor("X", "FP64", (1, 3), bytes(24))), BadRequest, "input 'X': expected FP32, got FP64"),
        (infer(Tensor("X", "BF16", (1, 3), bytes(6))), BadRequest, "input 'X': expected FP32, got BF16"),
        (infer(fp32("X", [[1, 2]])), BadRequest, "input 'X': expected shape [-1, 3], got [1, 2]"),
        (infer(fp32("X", [1, 2, 3])), BadRequest, "input 'X': expected shape [-1, 3], got [3]"),
        (infer(X, outputs=(Wanted("Y"),)), BadRequest, "unknown output 'Y': expected LOGITS FP32[-1, 2], SUM FP32[-1, 1]"),
        (infer(X, outputs=(Wanted("SUM", {"classification": 2}),)), Unsupported, "output 'SUM': a model in this process has no parameter 'classification'"),
        (infer(X, temperature=0.5), Unsupported, "the call: a model in this process has no parameter 'temperature'"),
        (infer(Tensor("X", "FP32", (1, 3), bytes(12), {"resize": 1})), Unsupported, "input 'X': a model in this process has no parameter 'resize'"),
        (infer(X, version="2"), NotFound, "unknown version '2': this model has '1' only"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model(request_: Request, kind: type[Failure], told: str, tmp_path: Path) -> None:
    failure = refused(models.linear(tmp_path / "m.onnx"), request_)
    assert (type(failure), failure.message) == (kind, told)


def test_text_that_is_not_utf8_names_its_row(tmp_path: Path) -> None:
    path = models.identity(tmp_path / "m.onnx", "BYTES")
    failure = refused(path, infer(Tensor("X", "BYTES", (2, 2), join_elements([b"a", b"b", b"c", b"\xc3("]))))
    assert isinstance(failure, BadRequest)
    assert failure.message == "input 'X': row 1 is not UTF-8: invalid continuation byte at byte 0"


def test_what_the_runtime_raises_is_the_backends_failure(tmp_path: Path) -> None:
    nodes = [models.node("Gather", ["M", "X"], ["Y"])]
    path = models.graph(
        tmp_path / "m.onnx", nodes, [("X", "INT64", ("n",))], [("Y", "FP32", ("n",))], M=np.zeros(3, np.float32)
    )
    failure = refused(path, infer(Tensor("X", "INT64", (1,), (9).to_bytes(8, "little"))))
    assert isinstance(failure, BackendFailed)
    assert (failure.status, failure.grpc) == (500, False)
    assert "indices element out of data bounds" in failure.message


# Loading.


def reason(path: str) -> str:
    told: str = using(path, lambda local: local.unready("", time.monotonic() + 10, {}))
    return told


def test_models_that_cannot_be_loaded_say_why(tmp_path: Path) -> None:
    assert reason(str(tmp_path / "none.onnx")) == "there is no such file or folder"
    (tmp_path / "m.pt").touch()
    assert (
        reason(str(tmp_path / "m.pt")) == "expected an .onnx file, or a folder with a static-embedding text classifier"
    )
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    assert "INVALID_PROTOBUF" in reason(str(tmp_path / "bad.onnx"))
    assert reason(models.identity(tmp_path / "bf16.onnx", "BF16")).endswith("got tensor(bfloat16)")
    (tmp_path / "folder").mkdir()
    assert reason(str(tmp_path / "folder")).startswith("model.json is missing")


def test_an_output_that_is_no_tensor(tmp_path: Path) -> None:
    path = models.graph(
        tmp_path / "m.onnx", [models.node("SequenceConstruct", ["X"], ["Y"])], [("X", "FP32", (1,))], []
    )
    made = onnx.load(path)
    made.graph.output.append(onnx.helper.make_tensor_sequence_value_info("Y", onnx.TensorProto.FLOAT, (1,)))
    Path(path).write_bytes(made.SerializeToString())
    assert "output 'Y': expected a tensor of bool," in reason(path)


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.identity(tmp_path / "m.onnx", "FP32")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert reason(path).endswith("ONNX models need onnxruntime: pip install 'headrace[local]'")


def test_a_model_that_is_mended_is_loaded_at_the_next_probe_and_one_that_is_loaded_stays(tmp_path: Path) -> None:
    path, loads = tmp_path / "m.onnx", []
    path.write_bytes(b"no graph")

    def load(path: str) -> Model:
        from backends.local.load import load

        loads.append(path)
        return load(path)

    async def test(local: LocalClient) -> None:
        async def why() -> str:
            return await local.unready("", time.monotonic() + 10, {})

        assert await why()
        assert await why()
        assert len(loads) == 1
        with pytest.raises(Unreachable, match="INVALID_PROTOBUF"):
            await local(infer(X))
        models.linear(path)
        assert await why() == ""
        path.unlink()
        assert await why() == ""
        assert set(outputs(await _answer(local, infer(X)))) == {"LOGITS", "SUM"}
        assert len(loads) == 2

    using(str(path), test, load=load)


def test_a_mended_model_is_loaded_once_whoever_asks_meanwhile(tmp_path: Path) -> None:
    path, slow, loads = tmp_path / "m.onnx", Slow(), []
    path.write_bytes(b"x")

    def load(path: str) -> Model:
        loads.append(path)
        if len(loads) == 1:
            raise Unusable("broken")
        time.sleep(0.05)
        return slow

    async def test(local: LocalClient) -> None:
        async def why() -> str:
            return await local.unready("", time.monotonic() + 10, {})

        assert await why() == "broken"
        path.write_bytes(b"mended")
        assert await asyncio.gather(*(why() for _ in range(5))) == [""] * 5
        assert len(loads) == 2

    using(str(path), test, load=load, threads=2)


def test_a_broken_model_that_is_too_busy_to_be_looked_at_again_is_still_broken(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"x")

    def load(path: str) -> Model:
        raise Unusable("broken")

    async def test(local: LocalClient) -> None:
        gate = threading.Event()

        async def why() -> str:
            return await local.unready("", time.monotonic() + 10, {})

        assert await why() == "broken"
        busy = [asyncio.create_task(local._pool.run(gate.wait)) for _ in range(1 + under_test._QUEUE)]
        await asyncio.sleep(0)
        try:
            assert await why() == "broken"
        finally:
            gate.set()
            await asyncio.gather(*busy)

    using(str(path), test, load=load)


def test_a_model_that_is_still_being_loaded_is_waited_for_until_the_deadline() -> None:
    slow = Slow()

    def load(path: str) -> Model:
        assert slow.gate.wait(10)
        return slow

    async def test(local: LocalClient) -> None:
        assert await local.unready("", time.monotonic() + 0.01, {}) == "still being loaded"
        waiting = asyncio.create_task(local(infer(fp32("X", [[1]]))))
        await asyncio.sleep(0.01)
        slow.gate.set()
        assert outputs((await waiting).answer)["X"][1] == (1, 1)

    using("m", test, load=load)


def test_a_slow_model_holds_up_nobody_else(tmp_path: Path) -> None:
    slow, path = Slow(), models.linear(tmp_path / "m.onnx")

    async def test(local: LocalClient) -> None:
        other, order = client(path), []

        async def called(name: str, by: LocalClient, request: Request) -> None:
            await by(request)
            order.append(name)
            if name == "quick":
                slow.gate.set()

        await asyncio.gather(called("slow", local, infer(fp32("X", [[1]]))), called("quick", other, infer(X)))
        assert order == ["quick", "slow"]
        await other.close()

    using("slow", test, load=lambda path: slow)


def test_a_model_that_is_slower_than_its_backend_may_be() -> None:
    slow = Slow()

    async def test(local: LocalClient) -> None:
        endpoint = Endpoint("slow", local=local, timeout=0.02, headers={}, now=time.monotonic)
        assert await endpoint.probe(10)
        with pytest.raises(TooSlow, match=r"'slow' did not answer within 0\.02 s"):
            await endpoint(infer(fp32("X", [[1]])))
        assert (endpoint.in_flight, endpoint.protocol) == (0, "local")
        slow.gate.set()

    using("slow", test, load=lambda path: slow)


def test_calls_beyond_the_queue_are_rejected_and_not_run() -> None:
    slow = Slow()

    async def test(local: LocalClient) -> None:
        calls = [asyncio.create_task(local(infer(fp32("X", [[i]])))) for i in range(70)]
        await asyncio.wait(calls[65:])
        slow.gate.set()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(outcome, Rejected) for outcome in done] == [False] * 65 + [True] * 5
        assert slow.runs == 65

    using("slow", test, load=lambda path: slow)

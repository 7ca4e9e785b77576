"""ModelStreamInfer through the installed gateway and straight at a real Triton: the same messages, the same answers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio

from backends.proto import kserve_pb2 as pb
from tests.support.serve import Served, served, within
from tests.support.triton import triton_with

STRICT = ("triton_grpc_error", "true")
METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
POLICY = """
x-triton: &triton
  http: http://{http}
  grpc: {grpc}
backends:
  any: {{endpoints: [*triton], protocol: grpc}}
  decoupled: {{endpoints: [*triton], protocol: grpc, model: repeat, batch: {{max_rows: 16, slots: 2}}}}
routes:
  again: {{backend: decoupled, cache: {{ttl: 1h}}}}
proxy: any
"""

Fields = dict[str, tuple[str, Sequence[int], bytes]]


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with triton_with(tmp_path_factory.mktemp("triton"), "repeat", "delayed", "accumulate") as server:
        yield server


@pytest.fixture(scope="module")
def gateway(triton: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "policy.yaml").write_text(POLICY.format(http=triton.http, grpc=triton.grpc))
    with served(folder, str(folder / "policy.yaml")) as running:
        yield running


def message(model: str, id: str, inputs: Fields, version: str = "", **parameters: bool | int | str) -> bytes:
    made = pb.ModelInferRequest(model_name=model, model_version=version, id=id)
    for name, (datatype, shape, raw) in inputs.items():
        made.inputs.add(name=name, datatype=datatype, shape=shape)
        made.raw_input_contents.append(raw)
    for key, value in parameters.items():
        kind = "bool_param" if isinstance(value, bool) else "int64_param" if isinstance(value, int) else "string_param"
        setattr(made.parameters[key], kind, value)
    return made.SerializeToString()


def repeat(id: str, values: Sequence[int], delay_ms: int = 1, **parameters: bool) -> bytes:
    count = len(values)
    inputs: Fields = {
        "IN": ("INT32", [count], struct.pack(f"<{count}i", *values)),
        "DELAY": ("UINT32", [count], struct.pack(f"<{count}I", *[delay_ms] * count)),
        "WAIT": ("UINT32", [1], struct.pack("<I", 0)),
    }
    return message("repeat", id, inputs, **parameters)


def delayed(id: str, ms: int, model: str = "delayed", version: str = "", count: int = 1, **parameters: bool) -> bytes:
    raw = struct.pack("<I", ms) * count
    return message(model, id, {"DELAY": ("UINT32", [count], raw)}, version, **parameters)


def accumulate(id: str, value: int, sequence: int | str, start: bool = False, end: bool = False) -> bytes:
    inputs: Fields = {"INPUT": ("INT32", [1, 1], struct.pack("<i", value))}
    flags = {"sequence_start": start, "sequence_end": end}
    return message("accumulate", id, inputs, sequence_id=sequence, **flags)


def asked(address: str, messages: Sequence[bytes], *metadata: tuple[str, str]) -> tuple[list[bytes], str, str]:
    """All that a stream of these messages is answered with, its status and the status' message."""

    async def main() -> tuple[list[bytes], str, str]:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(METHOD)(iter(messages), metadata=metadata, timeout=10)
            answers = []
            try:
                async for answer in call:
                    answers.append(answer)  # noqa: PERF401 - those before an error count
            except grpc.aio.AioRpcError:
                pass
            return answers, (await call.code()).name, await call.details() or ""

    return asyncio.run(main())


ORDERED = {
    "in the order of requests": [delayed("1", 150), delayed("2", 1), delayed("3", 1)],
    "model error": [delayed("1", 13), delayed("2", 1)],
    "unknown model": [delayed("1", 100), delayed("2", 1, "nosuch"), delayed("3", 1)],
    "unknown version": [delayed("1", 1, version="9"), delayed("2", 1)],
    "bad version": [delayed("1", 1, version="x"), delayed("2", 1)],
    "bad shape": [delayed("1", 1, count=2), delayed("2", 1)],
    "unknown input": [message("delayed", "1", {"NO": ("UINT32", [1], bytes(4))}), delayed("2", 1)],
    "decoupled": [repeat("1", [5, 6, 7])],
    "decoupled with an error in the middle": [repeat("1", [5, -6, 7])],
    "no answers": [repeat("1", [])],
    "no answers, and an empty final one": [repeat("1", [], triton_enable_empty_final_response=True)],
    "an empty final answer": [repeat("1", [5], triton_enable_empty_final_response=True)],
    "a final answer": [delayed("1", 1, triton_enable_empty_final_response=True)],
    "no message": [],
    "sequences": [
        accumulate("1", 1, 5, start=True), accumulate("2", 10, 6, start=True), accumulate("3", 2, 5),
        accumulate("4", 20, 6, end=True), accumulate("5", 3, 5, end=True), accumulate("6", 4, 8, start=True, end=True),
    ],
    # The model cannot tell them apart by their texts, so that each is one call.
    "named sequences": [accumulate("1", 1, "a", start=True, end=True), accumulate("2", 2, "b", start=True, end=True)],
    "a sequence without a start": [accumulate("1", 1, 77)],
    "no sequence": [accumulate("1", 1, 0, start=True), accumulate("2", 1, "", start=True)],
}  # fmt: skip


@pytest.mark.parametrize("case", ORDERED)
def test_the_same_answers_in_the_same_order(triton: Any, gateway: Served, case: str) -> None:
    assert asked(gateway.grpc, ORDERED[case]) == asked(triton.grpc, ORDERED[case])


@pytest.mark.parametrize("case", ORDERED)
def test_real_statuses_as_triton_gives_them(triton: Any, gateway: Served, case: str) -> None:
    """Of the cases that Triton survives for sure it is asked itself, with nothing behind the failing request."""
    proxied = asked(gateway.grpc, ORDERED[case], STRICT)
    if "decoupled" in case:
        ok = case == "decoupled"
        assert proxied[1:] == (("OK", "") if ok else ("INTERNAL", "refused -6"))
        assert len(proxied[0]) == (3 if ok else 1)
    else:
        assert proxied == asked(triton.grpc, ORDERED[case], STRICT)


def test_a_caller_cannot_end_the_backend_by_asking_for_statuses(triton: Any, gateway: Served) -> None:
    """Sent straight to Triton 2.51 this ends its process, usually before half of them have been sent."""
    for _ in range(60):
        assert asked(gateway.grpc, [repeat("1", [5, -6, 7])], STRICT)[1:] == ("INTERNAL", "refused -6")
    assert asked(triton.grpc, [delayed("1", 1)])[1] == "OK"


def test_models_that_answer_once_are_not_held_up_by_a_decoupled_one(triton: Any, gateway: Served) -> None:
    messages = [repeat("slow", [1, 2, 3], 100), delayed("quick", 1), repeat("s", [4])]
    for address in (triton.grpc, gateway.grpc):
        answers, status, _ = asked(address, messages)
        ids = [pb.ModelStreamInferResponse.FromString(answer).infer_response.id for answer in answers]
        assert (status, sorted(ids), ids[-2:]) == ("OK", ["quick", "s", "slow", "slow", "slow"], ["slow", "slow"])


def test_malformed_messages_are_told_and_the_stream_goes_on(gateway: Served) -> None:
    short = message("delayed", "2", {"DELAY": ("UINT32", [1], b"12")})
    answers, status, _ = asked(gateway.grpc, [b"\x0b", short, delayed("3", 1)])
    told = [pb.ModelStreamInferResponse.FromString(answer) for answer in answers]
    assert status == "OK"
    assert [(t.infer_response.id, bool(t.error_message)) for t in told] == [("", True), ("2", True), ("3", False)]


def test_a_decoupled_model_is_neither_batched_nor_cached(triton: Any, gateway: Served) -> None:
    """A unary call of it gets Triton's own answer, whatever the policy says; a stream goes by the route's name."""

    async def main(address: str, model: str) -> str:
        async with grpcaio.InferenceServerClient(address) as client:
            inputs = []
            for name, datatype in (("IN", "INT32"), ("DELAY", "UINT32"), ("WAIT", "UINT32")):
                tensor = grpcaio.InferInput(name, [1], datatype)
                tensor.set_data_from_numpy(np.ones(1, np.int32 if datatype == "INT32" else np.uint32))
                inputs.append(tensor)
            with pytest.raises(grpcclient.InferenceServerException) as raised:
                await client.infer(model, inputs)
            return str(raised.value)

    expected = asyncio.run(main(triton.grpc, "repeat"))
    assert "decoupled" in expected
    for _ in range(2):
        assert asyncio.run(main(gateway.grpc, "again")) == expected
    assert not [name for name in gateway.counters() if "batch_rows_count" in name and '"decoupled"' in name]
    named = pb.ModelInferRequest.FromString(repeat("1", [7, 8]))
    named.model_name = "again"
    answers, _, _ = asked(gateway.grpc, [named.SerializeToString()])
    got = [pb.ModelStreamInferResponse.FromString(answer).infer_response for answer in answers]
    assert [(a.model_name, a.raw_output_contents[0]) for a in got] == [("again", b"\7\0\0\0"), ("again", b"\10\0\0\0")]


def test_tritons_own_clients(gateway: Served) -> None:
    """The decoupled example of tritonclient, with callbacks and with asyncio; only the port is another."""

    def inputs(module: Any, values: list[int]) -> list[Any]:
        made = []
        for name, datatype, array in (
            ("IN", "INT32", np.array(values, np.int32)), ("DELAY", "UINT32", np.zeros(len(values), np.uint32)),
            ("WAIT", "UINT32", np.zeros(1, np.uint32)),
        ):  # fmt: skip
            tensor = module.InferInput(name, list(array.shape), datatype)
            tensor.set_data_from_numpy(array)
            made.append(tensor)
        return made

    got: list[Any] = []
    with grpcclient.InferenceServerClient(gateway.grpc) as client:
        client.start_stream(callback=lambda result, error: got.append(error or result))
        client.async_stream_infer("repeat", inputs(grpcclient, [4, 2, 0]), request_id="r",
                                  enable_empty_final_response=True)  # fmt: skip
        assert within(5, lambda: len(got) == 4)
        client.async_stream_infer("nosuch", inputs(grpcclient, [1]))
        assert within(5, lambda: len(got) == 5)
        client.async_stream_infer("repeat", inputs(grpcclient, [9]))
        assert within(5, lambda: len(got) == 6)
        client.stop_stream()
    assert [int(r.as_numpy("OUT")[0]) for r in (*got[:3], got[5])] == [4, 2, 0, 9]
    assert got[3].get_response().parameters["triton_final_response"].bool_param
    assert "nosuch" in str(got[4])

    async def main() -> list[int]:
        async def requests() -> Any:
            for number in range(3):
                yield {"model_name": "repeat", "inputs": inputs(grpcaio, [number] * 2)}

        async with grpcaio.InferenceServerClient(gateway.grpc) as client:
            found = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                found.append(int(result.as_numpy("OUT")[0]))
            return found

    assert sorted(asyncio.run(main())) == [0, 0, 1, 1, 2, 2]


def test_a_caller_that_leaves_ends_the_work_of_the_model(triton: Any, gateway: Served) -> None:
    counted = next(Path(triton._repository).rglob("repeat")) / "cancelled.txt"
    before = counted.read_text() if counted.exists() else ""

    async def main() -> None:
        async with grpc.aio.insecure_channel(gateway.grpc) as channel:
            call = channel.stream_stream(METHOD)()
            await call.write(repeat("1", [1] * 100, 50))
            await call.read()
            call.cancel()

    asyncio.run(main())
    assert within(5, lambda: counted.exists() and counted.read_text() != before)

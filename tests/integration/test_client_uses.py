"""What Triton's own Python client is used for, with only the port changed: each use on a real Triton and through us."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from functools import partial
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.grpc.service_pb2 as pb
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.support.differential import Peer

PLAIN = np.array([[1.5, -0.25, 3.0]], np.float32)
TEXT = np.array([[b"", b"\0\xff", "größe".encode()]], np.object_)
KINDS = {np.dtype(np.float32): "FP32", np.dtype(np.object_): "BYTES", np.dtype(np.int32): "INT32"}
both = pytest.mark.parametrize("module", [httpclient, grpcclient], ids=["http", "grpc"])
both_aio = pytest.mark.parametrize("module", [httpaio, grpcaio], ids=["http", "grpc"])


@pytest.fixture(params=["direct", "through"])
def peer(request: pytest.FixtureRequest, direct: Peer, gateways: dict[str, Peer]) -> Peer:
    return direct if request.param == "direct" else gateways["usual"]


def address(module: ModuleType, peer: Peer) -> str:
    return peer.http if "http" in module.__name__ else peer.grpc


def tensor(module: ModuleType, name: str, array: Any) -> Any:
    made = module.InferInput(name, list(array.shape), KINDS[array.dtype])
    made.set_data_from_numpy(array)
    return made


@pytest.fixture
def client(peer: Peer, module: ModuleType) -> Iterator[Any]:
    with module.InferenceServerClient(address(module, peer)) as made:
        yield made


# Plain, string


@both
def test_plain(client: Any, module: ModuleType) -> None:
    wanted = module.InferRequestedOutput("OUT_FP32")
    answer = client.infer(
        "identity", [tensor(module, "IN_FP32", PLAIN)], outputs=[wanted], request_id="7", model_version="1",
        headers={"x-own": "1"}, timeout=5_000_000, parameters={"own": "x"},
    )  # fmt: skip
    assert answer.as_numpy("OUT_FP32").tobytes() == PLAIN.tobytes()
    assert answer.as_numpy("OUT_INT32") is None
    response = answer.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "7"


@both
def test_string(client: Any, module: ModuleType) -> None:
    answer = client.infer("identity", [tensor(module, "IN_BYTES", TEXT)])
    assert answer.as_numpy("OUT_BYTES").tolist() == TEXT.tolist()


def test_json_in_and_out(peer: Peer) -> None:
    with httpclient.InferenceServerClient(peer.http) as client:
        given = httpclient.InferInput("IN_FP32", [1, 3], "FP32")
        given.set_data_from_numpy(PLAIN, binary_data=False)
        wanted = httpclient.InferRequestedOutput("OUT_FP32", binary_data=False)
        answer = client.infer("identity", [given], outputs=[wanted])
        assert "data" in answer.get_output("OUT_FP32")
        assert answer.as_numpy("OUT_FP32").tobytes() == PLAIN.tobytes()


@both
def test_classes(client: Any, module: ModuleType) -> None:
    wanted = module.InferRequestedOutput("OUT_FP32", class_count=2)
    answer = client.infer("labelled", [tensor(module, "IN_FP32", PLAIN)], outputs=[wanted])
    assert answer.as_numpy("OUT_FP32").tolist() == [[b"3.000000:2:cherry", b"1.500000:0:apple"]]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_bodies(peer: Peer, algorithm: str) -> None:
    with httpclient.InferenceServerClient(peer.http) as client:
        answer = client.infer(
            "identity", [tensor(httpclient, "IN_FP32", PLAIN)], request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )  # fmt: skip
        assert answer.as_numpy("OUT_FP32").tobytes() == PLAIN.tobytes()


def test_compressed_messages(peer: Peer) -> None:
    with grpcclient.InferenceServerClient(peer.grpc) as client:
        answer = client.infer("identity", [tensor(grpcclient, "IN_FP32", PLAIN)], compression_algorithm="gzip")
        assert answer.as_numpy("OUT_FP32").tobytes() == PLAIN.tobytes()


@both
def test_what_fails_says_why(client: Any, module: ModuleType) -> None:
    with pytest.raises(InferenceServerException, match="unknown model: 'nosuch'"):
        client.infer("nosuch", [tensor(module, "IN_FP32", PLAIN)])
    with pytest.raises(InferenceServerException, match="unexpected inference output 'NOPE'"):
        client.infer("identity", [tensor(module, "IN_FP32", PLAIN)], outputs=[module.InferRequestedOutput("NOPE")])
    with pytest.raises(InferenceServerException, match="unexpected shape"):
        client.infer("labelled", [tensor(module, "IN_FP32", np.zeros((1, 2, 3), np.float32))])


# Async


def test_async_over_http(peer: Peer) -> None:
    with httpclient.InferenceServerClient(peer.http, concurrency=4) as client:
        arrays = [PLAIN + i for i in range(8)]
        asked = [client.async_infer("identity", [tensor(httpclient, "IN_FP32", array)]) for array in arrays]
        for array, one in zip(arrays, asked, strict=True):
            assert one.get_result().as_numpy("OUT_FP32").tobytes() == array.tobytes()


def test_async_over_grpc(peer: Peer) -> None:
    def done(future: Future[Any], result: Any, error: Exception | None) -> None:
        future.set_exception(error) if error else future.set_result(result)

    with grpcclient.InferenceServerClient(peer.grpc) as client:
        arrays = [PLAIN + i for i in range(8)]
        asked: list[Future[Any]] = [Future() for _ in arrays]
        for array, future in zip(arrays, asked, strict=True):
            client.async_infer("identity", [tensor(grpcclient, "IN_FP32", array)], partial(done, future))
        for array, future in zip(arrays, asked, strict=True):
            assert future.result(30).as_numpy("OUT_FP32").tobytes() == array.tobytes()


@both_aio
def test_asyncio(peer: Peer, module: ModuleType) -> None:
    async def run() -> None:
        async with module.InferenceServerClient(address(module, peer)) as client:
            arrays = [PLAIN + i for i in range(8)]
            answers = await asyncio.gather(
                *(client.infer("identity", [tensor(module, "IN_FP32", array)]) for array in arrays)
            )
            for array, answer in zip(arrays, answers, strict=True):
                assert answer.as_numpy("OUT_FP32").tobytes() == array.tobytes()
            text = await client.infer("identity", [tensor(module, "IN_BYTES", TEXT)])
            assert text.as_numpy("OUT_BYTES").tolist() == TEXT.tolist()
            assert await client.is_server_live()
            assert await client.is_model_ready("identity")
            assert not await client.is_model_ready("nosuch")

    asyncio.run(run())


# Sequences


def step(module: ModuleType, value: int) -> Any:
    return tensor(module, "INPUT", np.array([[value]], np.int32))


@both
def test_sequence(client: Any, module: ModuleType) -> None:
    """Two at once, whose sums do not mix."""
    sums = []
    for i in range(3):
        for sequence in (7, 8):
            answer = client.infer(
                "accumulate", [step(module, i + sequence)], sequence_id=sequence, sequence_start=i == 0,
                sequence_end=i == 2,
            )  # fmt: skip
            sums.append(answer.as_numpy("OUTPUT").item())
    assert sums == [7, 8, 15, 17, 24, 27]


@both
def test_a_sequence_may_have_a_name(client: Any, module: ModuleType) -> None:
    answer = client.infer(
        "told", [tensor(module, "IN", np.array([[1]], np.int32))], sequence_id="a sequence", sequence_start=True
    )
    assert answer.as_numpy("CORRELATION").item() == b"a sequence"
    assert answer.as_numpy("FLAGS").item() == b"1"


def test_sequences_in_a_stream(peer: Peer) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(peer.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for i in range(3):
            for sequence in (1007, 1008):
                client.async_stream_infer(
                    "accumulate", [step(grpcclient, i + sequence)], request_id=f"{sequence}-{i}",
                    sequence_id=sequence, sequence_start=i == 0, sequence_end=i == 2,
                )  # fmt: skip
        got = [answers.get(timeout=30) for _ in range(6)]
        client.stop_stream()
    sums = {answer.get_response().id: answer.as_numpy("OUTPUT").item() for answer in got}
    assert [sums[f"1007-{i}"] for i in range(3)] == [1007, 2015, 3024]
    assert [sums[f"1008-{i}"] for i in range(3)] == [1008, 2017, 3027]


# Streams, decoupled models


def test_a_stream_of_plain_calls_with_one_that_fails(peer: Peer) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(peer.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for array in (PLAIN, PLAIN + 1):
            client.async_stream_infer("labelled", [tensor(grpcclient, "IN_FP32", array)])
        bad = [grpcclient.InferRequestedOutput("NOPE")]
        client.async_stream_infer("labelled", [tensor(grpcclient, "IN_FP32", PLAIN)], outputs=bad)
        client.async_stream_infer("labelled", [tensor(grpcclient, "IN_FP32", PLAIN + 2)])
        got = [answers.get(timeout=30) for _ in range(4)]
        client.stop_stream()
    failed = [error for _, error in got if error is not None]
    assert ["NOPE" in str(error) for error in failed] == [True]
    good = [result.as_numpy("OUT_FP32").tobytes() for result, error in got if error is None]
    assert sorted(good) == sorted((PLAIN + i).tobytes() for i in range(3))


@pytest.mark.parametrize("final", [False, True])
def test_decoupled_repeat(peer: Peer, final: bool) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    values = np.array([4, 2, 0, 1], np.int32)
    with grpcclient.InferenceServerClient(peer.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(
            "repeat_each", [tensor(grpcclient, "IN", values)], request_id="r", enable_empty_final_response=final
        )
        got = [answers.get(timeout=30) for _ in range(4 + final)]
        client.stop_stream()
    assert [answer.as_numpy("OUT").item() for answer in got[:4]] == values.tolist()
    assert [answer.as_numpy("INDEX").item() for answer in got[:4]] == [0, 1, 2, 3]
    finals = [answer.get_response().parameters["triton_final_response"].bool_param for answer in got]
    assert finals == ([False] * 4 + [True] if final else [False] * 4)
    assert {answer.get_response().id for answer in got} == {"r"}


def test_decoupled_repeat_with_asyncio(peer: Peer) -> None:
    async def run() -> None:
        async def asks() -> AsyncIterator[dict[str, Any]]:
            for count in (3, 2):
                values = np.arange(count, dtype=np.int32)
                yield {"model_name": "repeat_each", "inputs": [tensor(grpcaio, "IN", values)], "request_id": str(count)}

        async with grpcaio.InferenceServerClient(peer.grpc) as client:
            got = []
            async for result, error in client.stream_infer(asks()):
                assert error is None
                got.append((result.get_response().id, result.as_numpy("OUT").item()))
            assert sorted(got) == [("2", 0), ("2", 1), ("3", 0), ("3", 1), ("3", 2)]

    asyncio.run(run())


# Health, metadata, control


@both
def test_health_and_metadata(client: Any, module: ModuleType) -> None:
    as_json = {"as_json": True} if module is grpcclient else {}
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("accumulate")
    assert client.is_model_ready("accumulate", "1")
    assert not client.is_model_ready("nosuch")
    assert client.get_server_metadata(**as_json)["name"] == "triton"
    metadata = client.get_model_metadata("accumulate", **as_json)
    assert [each["name"] for each in metadata["inputs"]] == ["INPUT"]
    config = client.get_model_config("accumulate", **as_json)
    assert config.get("config", config)["max_batch_size"] == 8
    statistics = client.get_inference_statistics("accumulate", "1", **as_json)
    assert [each["name"] for each in statistics["model_stats"]] == ["accumulate"]
    index = client.get_model_repository_index(**as_json)
    models = index["models"] if isinstance(index, dict) else index
    assert "accumulate" in {each["name"] for each in models}
    with pytest.raises(InferenceServerException, match="unknown model: 'nosuch'"):
        client.get_model_metadata("nosuch")


@both
def test_control(client: Any, module: ModuleType) -> None:
    client.unload_model("single")
    assert not client.is_model_ready("single")
    client.load_model("single")
    assert client.is_model_ready("single")
    trace, log = client.get_trace_settings("single"), client.get_log_settings()
    assert "trace_level" in (trace if isinstance(trace, dict) else trace.settings)
    assert "log_info" in (log if isinstance(log, dict) else log.settings)


# Without the client's own classes


def test_explicit_contents(peer: Peer) -> None:
    kinds = {
        "BOOL": ("bool_contents", [True, False]), "INT8": ("int_contents", [-128, 127]),
        "UINT16": ("uint_contents", [0, 65535]), "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
        "UINT64": ("uint64_contents", [0, 2**64 - 1]), "FP32": ("fp32_contents", [0.5, -1.0]),
        "FP64": ("fp64_contents", [0.1, 1e300]), "BYTES": ("bytes_contents", [b"", b"\xff"]),
    }  # fmt: skip
    request = pb.ModelInferRequest(model_name="identity", id="explicit")
    for datatype, (field, values) in kinds.items():
        given = request.inputs.add(name=f"IN_{datatype}", datatype=datatype, shape=[1, 2])
        getattr(given.contents, field).extend(values)
    with grpc.insecure_channel(peer.grpc) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=30)
    assert answer.id == "explicit"
    result = grpcclient.InferResult(answer)
    for datatype, (_, values) in kinds.items():
        assert result.as_numpy(f"OUT_{datatype}").ravel().tolist() == values

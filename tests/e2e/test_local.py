"""The installed command with models in its own process: both protocols, metadata, what cannot be loaded, an edit."""
# ruff: noqa: E501 - documents are written as they are read

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support import models
from tests.support.serve import Served, served, within

POLICY = """
backends:
  words: {local: {path: words, threads: 2}, batch: {max_rows: 8, slots: 2}}
  graph: {local: "${GRAPH:-graph.onnx}", model: inside}
routes:
  text:
    tiers:
      - {backend: words, accept: {output: LOGITS, values: logits, score: margin, threshold: 0.2}}
      - {name: again, backend: words}
  linear: {backend: graph}
"""
X = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("local")
    models.static(folder / "words")
    models.linear(folder / "graph.onnx")
    (folder / "policy.yaml").write_text(POLICY)
    with served(folder, str(folder / "policy.yaml")) as running:
        yield running


def clients(gateway: Served) -> list[tuple[object, object]]:
    return [
        (httpclient, httpclient.InferenceServerClient(gateway.http)),
        (grpcclient, grpcclient.InferenceServerClient(gateway.grpc)),
    ]


def test_both_protocols_get_the_same_answer(gateway: Served) -> None:
    texts = np.array([[text] for text in (b"red", b"blue card", b"green green", b"")], np.object_)
    answers = []
    for module, client in clients(gateway):
        with client:
            values = module.InferInput("X", [2, 3], "FP32")
            values.set_data_from_numpy(X)
            wanted = module.InferRequestedOutput("LOGITS")
            reply = client.infer("linear", [values], outputs=[wanted], request_id="7", priority=1, timeout=5_000_000)
            assert (reply.as_numpy("LOGITS") == [[4, 5], [10, 11]]).all()
            assert reply.as_numpy("SUM") is None
            words = module.InferInput("TEXT", [4, 1], "BYTES")
            words.set_data_from_numpy(texts)
            answers.append(client.infer("text", [words]))
    for name in ("LOGITS", "LABEL"):
        assert (answers[0].as_numpy(name) == answers[1].as_numpy(name)).all()


def test_metadata_and_readiness_by_the_public_name(gateway: Served) -> None:
    with httpclient.InferenceServerClient(gateway.http) as http, grpcclient.InferenceServerClient(gateway.grpc) as grpc:
        told = grpc.get_model_metadata("linear", as_json=True)
        assert http.get_model_metadata("linear") == {
            "name": "linear", "versions": ["1"], "platform": "onnxruntime_onnx",
            "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 3]}],
            "outputs": [{"name": "LOGITS", "datatype": "FP32", "shape": [-1, 2]}, {"name": "SUM", "datatype": "FP32", "shape": [-1, 1]}],
        }  # fmt: skip
        assert (told["name"], told["inputs"][0]["shape"]) == ("linear", ["-1", "3"])
        assert http.get_model_metadata("text", "1")["platform"] == "headrace_static"
        assert http.get_server_metadata()["name"] == grpc.get_server_metadata().name == "headrace"
        for client in (http, grpc):
            assert client.is_server_ready()
            assert client.is_model_ready("linear")
            assert client.is_model_ready("text", "1")
            for ask in (
                lambda client=client: client.get_model_config("text"),
                lambda client=client: client.infer("linear", []),
            ):
                with pytest.raises(InferenceServerException):
                    ask()


def test_what_does_not_fit_is_told_in_one_line(gateway: Served) -> None:
    def posted(path: str, **more: object) -> tuple[int, str]:
        tensor = {"name": "X", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]} | more
        reply = httpx.post(f"http://{gateway.http}/v2/models/linear{path}", json={"inputs": [tensor]})
        return reply.status_code, reply.json().get("error", "")

    assert posted("/infer") == (200, "")
    assert posted("/infer", shape=[3]) == (400, "input 'X': expected shape [-1, 3], got [3]")
    assert posted("/versions/2/infer") == (404, "unknown version '2': this model has '1' only")
    status, error = posted("/generate")
    assert (status, error[:9]) == (501, "generate:")


def test_calls_are_traced_and_counted_as_others_are(gateway: Served) -> None:
    tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["card"]}
    reply = httpx.post(
        f"http://{gateway.http}/v2/models/text/infer", json={"inputs": [tensor]}, headers={"traceparent": f"00-{'c' * 32}-{'d' * 16}-01"}
    )  # fmt: skip
    assert reply.headers["headrace-tier"] in ("words=1", "again=1")
    spans = httpx.get(f"http://{gateway.admin}/traces/{'c' * 32}").json()
    call = next(
        span for span in (spans if isinstance(spans, list) else spans["spans"]) if span["name"] == "local words"
    )
    assert call["attributes"]["headrace.local.path"].endswith("/words")
    counters = gateway.counters()
    assert counters['headrace_batch_rows_count{backend="words"}'] > 0
    assert [value for name, value in counters.items() if name.startswith("headrace_backend_ready{")] == [1, 1]


def test_a_model_that_cannot_be_loaded_keeps_nothing_else_from_starting_and_an_edit_from_being_taken(
    tmp_path: Path,
) -> None:
    models.static(tmp_path / "words")
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.replace("${GRAPH:-graph.onnx}", "none.onnx"))
    with served(tmp_path, str(policy)) as gateway:
        admin = f"http://{gateway.admin}"
        down = httpx.get(f"{admin}/backends").json()["graph"]["endpoints"][0]
        assert (down["ready"], down["protocol"]) == (False, "local")
        assert down["reason"] == "there is no such file or folder"
        assert "there is no such file or folder" in gateway.logged()
        reply = httpx.get(f"http://{gateway.http}/v2/models/linear")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert httpx.get(f"http://{gateway.http}/v2/models/text/ready").status_code == 200
        before = httpx.get(f"{admin}/policy").json()["version"]

        (tmp_path / "broken.onnx").write_bytes(b"no graph")
        policy.write_text(POLICY.replace("${GRAPH:-graph.onnx}", "broken.onnx"))
        assert within(10, lambda: bool(httpx.get(f"{admin}/policy").json()["refused"]))
        told = httpx.get(f"{admin}/policy").json()
        assert told["version"] == before
        assert "backends.graph.local: local:" in told["refused"][0]
        assert "INVALID_PROTOBUF" in told["refused"][0]

        models.linear(tmp_path / "graph.onnx")
        policy.write_text(POLICY)
        assert within(10, lambda: httpx.get(f"{admin}/policy").json()["version"] != before)
        assert httpx.get(f"http://{gateway.http}/v2/models/linear/ready").status_code == 200

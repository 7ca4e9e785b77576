"""The demo's policy before its real models: two routes over the same weights, tiers, batches and the cache."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as httpclient
from tokenizers import Tokenizer

from deploy.demo.prepare import BUILD, read_banking77
from tests.support.serve import HEADRACE, Served, served

POLICY = Path(__file__).parents[2] / "policies/examples/demo.yaml"
TEXTS = read_banking77("test")[0][:120:2]


@pytest.fixture(scope="module")
def gateway(triton_demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_HTTP", triton_demo.http)
        patch.setenv("TRITON_GRPC", triton_demo.grpc)
        patch.setenv("INTENT_THRESHOLD", "0.8")
        with served(tmp_path_factory.mktemp("gateway"), str(POLICY)) as running:
            yield running


def classify(address: str, model: str, texts: list[str]) -> Any:
    with httpclient.InferenceServerClient(address) as client:
        tensor = httpclient.InferInput("TEXT", [len(texts), 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text.encode()] for text in texts], dtype=np.object_))
        return client.infer(model, [tensor])


def test_a_cascade_answers_each_row_as_the_tier_that_was_sure(gateway: Served, triton_demo: Any) -> None:
    answer = classify(gateway.http, "intent", TEXTS)
    cheap = classify(triton_demo.http, "intent_distilled", TEXTS)
    heavy = classify(triton_demo.http, "intent_heavy", TEXTS)
    logits = cheap.as_numpy("LOGITS").astype(np.float64)
    p = np.sort(np.exp(logits) / np.exp(logits).sum(1, keepdims=True), 1)
    sure = (p[:, -1] - p[:, -2]) >= 0.8
    assert 0 < sure.sum() < len(TEXTS)
    for name in ("LABEL", "LOGITS"):
        expected = np.where(sure[:, None], cheap.as_numpy(name), heavy.as_numpy(name))
        assert (answer.as_numpy(name) == expected).all()


def test_the_distilled_tier_in_the_gateway_answers_bit_by_bit_as_on_triton(gateway: Served, triton_demo: Any) -> None:
    texts = read_banking77("test")[0]
    for start in range(0, len(texts), 64):
        ours = classify(gateway.http, "intent_distilled", texts[start : start + 64])
        theirs = classify(triton_demo.http, "intent_distilled", texts[start : start + 64])
        for name in ("LABEL", "LOGITS"):
            assert (ours.as_numpy(name) == theirs.as_numpy(name)).all()


def test_token_ids_and_text_are_two_doors_to_the_same_weights(gateway: Served) -> None:
    tokenizer = Tokenizer.from_file(str(next((BUILD / "assets").rglob("*okenizer*.json"))))
    labels = classify(gateway.http, "intent_heavy", TEXTS).as_numpy("LABEL")[:, 0].tolist()
    # Without truncation or padding, as a client that tokenizes would send one text.
    tokenizer.no_padding()
    got, tiers = [], set()
    with httpclient.InferenceServerClient(gateway.http) as client:
        for text in TEXTS[:20]:
            ids = np.array([tokenizer.encode(text).ids], np.int64)
            inputs = []
            for name, array in (("input_ids", ids), ("attention_mask", np.ones_like(ids))):
                tensor = httpclient.InferInput(name, list(array.shape), "INT64")
                tensor.set_data_from_numpy(array)
                inputs.append(tensor)
            reply = client.infer("intent_ids", inputs)
            got.append(reply.as_numpy("LABEL")[0, 0])
            tiers.add(reply.get_response()["model_name"])
    assert tiers == {"intent_ids"}
    assert sum(a == b for a, b in zip(got, labels, strict=False)) >= 18


def test_an_embedding_is_answered_from_the_cache_the_second_time(gateway: Served) -> None:
    body = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [2, 1], "data": ["top up", "lost card"]}]}
    with httpx.Client(base_url=f"http://{gateway.http}") as client:
        first = client.post("/v2/models/embed/infer", json=body)
        body["inputs"][0] |= {"shape": [3, 1], "data": ["lost card", "new text", "top up"]}
        second = client.post("/v2/models/embed/infer", json=body)
    assert (first.headers["headrace-cache"], second.headers["headrace-cache"]) == ("hit=0,miss=2", "hit=2,miss=1")
    size = 384
    once, again = first.json()["outputs"][0]["data"], second.json()["outputs"][0]["data"]
    assert again[:size] == once[size:]
    assert again[2 * size :] == once[:size]
    assert abs(sum(x * x for x in again[size : 2 * size]) - 1) < 1e-4


def test_the_last_trace_is_printed_as_a_tree(gateway: Served) -> None:
    tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": TEXTS[:1]}
    sampled = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    httpx.post(f"http://{gateway.http}/v2/models/intent/infer", json={"inputs": [tensor]}, headers=sampled)
    command = [HEADRACE, "trace", "last", "--admin", f"http://{gateway.admin}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    lines = [line.lstrip(" \xa0│├└─") for line in done.stdout.splitlines()]
    assert lines[0] == f"trace {'a' * 32}"
    assert lines[1].startswith("edge http ")
    assert any(line.startswith("local distilled ") for line in lines)

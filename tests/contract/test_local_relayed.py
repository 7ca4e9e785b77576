"""What a model in this process answers to calls that are no inference: metadata, readiness, and why not the rest."""
# ruff: noqa: E501 - messages stand beside what causes them

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tritonclient.grpc import service_pb2 as triton

from backends.errors import Failure, NotFound, Unsupported, WrongMethod
from backends.local.client import LocalClient
from backends.request import HttpCall, Relay, Request, RpcCall
from tests.support import models
from tests.support.local import using


def relayed(path: str, call: HttpCall | RpcCall, version: str = "") -> tuple[Relay, bytes]:
    async def test(local: LocalClient) -> tuple[Relay, bytes]:
        relay = (await local(Request(model="a/b", version=version, content=call, deadline=time.monotonic() + 10))).body
        assert isinstance(relay, Relay)
        assert not isinstance(relay.body, bytes)
        return relay, b"".join([chunk async for chunk in relay.body])

    answer: tuple[Relay, bytes] = using(path, test)
    return answer


async def _nothing() -> Any:
    return
    yield


def rpc(method: str) -> RpcCall:
    return RpcCall(f"/inference.GRPCInferenceService/{method}", _nothing())


@pytest.mark.parametrize("target", ["/v2/models/a%2Fb", "/v2/models/a%2Fb/versions/1", "/v2/models/a%2Fb?x=y"])
def test_metadata_over_http(target: str, tmp_path: Path) -> None:
    relay, body = relayed(models.linear(tmp_path / "m.onnx"), HttpCall("GET", target))
    assert (relay.status, relay.headers) == (200, ((b"content-type", b"application/json"),))
    assert msgspec.json.decode(body) == {
        "name": "a/b",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [
            {"name": "LOGITS", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "SUM", "datatype": "FP32", "shape": [-1, 1]},
        ],
    }


def test_metadata_over_grpc(tmp_path: Path) -> None:
    _, body = relayed(models.linear(tmp_path / "m.onnx"), rpc("ModelMetadata"), "1")
    told = triton.ModelMetadataResponse.FromString(body)
    assert (told.name, list(told.versions), told.platform) == ("a/b", ["1"], "onnxruntime_onnx")
    assert [(t.name, t.datatype, list(t.shape)) for t in told.inputs] == [("X", "FP32", [-1, 3])]
    assert [(t.name, t.datatype, list(t.shape)) for t in told.outputs] == [
        ("LOGITS", "FP32", [-1, 2]),
        ("SUM", "FP32", [-1, 1]),
    ]


def test_readiness_is_the_models_own(tmp_path: Path) -> None:
    path, none = models.linear(tmp_path / "m.onnx"), str(tmp_path / "none.onnx")
    for target in ("/v2/models/a%2Fb/ready", "/v2/models/a%2Fb/versions/1/ready"):
        assert relayed(path, HttpCall("GET", target))[0].status == 200
        assert relayed(none, HttpCall("GET", target))[0].status == 503
    assert triton.ModelReadyResponse.FromString(relayed(path, rpc("ModelReady"))[1]).ready
    assert not triton.ModelReadyResponse.FromString(relayed(none, rpc("ModelReady"))[1]).ready


def test_a_server_there_is_none_but_it_has_a_name(tmp_path: Path) -> None:
    path = models.linear(tmp_path / "m.onnx")
    told = msgspec.json.decode(relayed(path, HttpCall("GET", "/v2"))[1])
    assert (told["name"], told["extensions"]) == ("headrace", ["binary_tensor_data"])
    over = triton.ServerMetadataResponse.FromString(relayed(path, rpc("ServerMetadata"))[1])
    assert (over.name, over.version, list(over.extensions)) == ("headrace", told["version"], told["extensions"])


ONLY = "a model in this process answers inference, metadata and readiness only"


@pytest.mark.parametrize(
    ("call", "version", "kind", "told"),
    [
        (HttpCall("GET", "/v2/models/a%2Fb/config"), "", Unsupported, f"config: {ONLY}"),
        (HttpCall("GET", "/v2/models/a%2Fb/versions/1/stats"), "", Unsupported, f"stats: {ONLY}"),
        (HttpCall("POST", "/v2/models/a%2Fb/generate"), "", Unsupported, f"generate: {ONLY}"),
        (HttpCall("POST", "/v2/models/a%2Fb/infer"), "", Unsupported, f"infer: {ONLY}"),
        (HttpCall("GET", "/v2/models/stats"), "", Unsupported, f"models/stats: {ONLY}"),
        (HttpCall("POST", "/v2/repository/index"), "", Unsupported, f"repository/index: {ONLY}"),
        (HttpCall("GET", "/v2/models/a%2Fb/versions/3"), "", NotFound, "unknown version '3': this model has '1' only"),
        (HttpCall("GET", "/v2/models/a%2Fb/versions/3/ready"), "", NotFound, "unknown version '3': this model has '1' only"),
        (HttpCall("POST", "/v2/models/a%2Fb"), "", WrongMethod, "expected GET or HEAD, got POST"),
        (rpc("ModelConfig"), "", Unsupported, f"/inference.GRPCInferenceService/ModelConfig: {ONLY}"),
        (rpc("ModelStreamInfer"), "", Unsupported, f"/inference.GRPCInferenceService/ModelStreamInfer: {ONLY}"),
        (rpc("ModelMetadata"), "3", NotFound, "unknown version '3': this model has '1' only"),
        (rpc("ModelReady"), "3", NotFound, "unknown version '3': this model has '1' only"),
    ],
)  # fmt: skip
def test_what_a_model_in_this_process_does_not_answer(
    call: HttpCall | RpcCall, version: str, kind: type[Failure], told: str, tmp_path: Path
) -> None:
    with pytest.raises(Failure) as failure:
        relayed(models.linear(tmp_path / "m.onnx"), call, version)
    assert (type(failure.value), failure.value.message) == (kind, told)

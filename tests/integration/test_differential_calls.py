"""What a call says beside its tensors, and every other call about models, straight at a real Triton and through.

The model `told` answers what reaches it: parameters, id, correlation id, flags, timeout, requested outputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
import tritonclient.grpc.service_pb2 as pb
from google.protobuf.message import Message

from tests.support.differences import DIFFERENCES, RPC_DIFFERENCES, Difference, RpcDifference
from tests.support.differential import PLAIN, Case, Peer, as_binary, as_json, as_raw_contents, call, post

INPUT: dict[str, Any] = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [1]}
SERVICE = "/inference.GRPCInferenceService"
over = pytest.mark.parametrize("over", ["http", "grpc"])


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as made:
        yield made


def told(body: bytes) -> dict[str, Any]:
    """What the model saw; its parameters come in no particular order."""
    document = json.loads(body)
    seen = {output["name"]: output["data"] for output in document.pop("outputs")}
    if "PARAMETERS" in seen:
        seen["PARAMETERS"] = json.loads(seen["PARAMETERS"][0])
    return {**document, **seen}


@over
@pytest.mark.parametrize(
    "more",
    [
        {"id": "7", "parameters": {"b": True, "no": False, "least": -(2**63), "most": 2**63 - 1, "s": "größe"}},
        {"parameters": {"d": 0.1, "whole": 2.0, "beyond": 2**63, "limit": 2**64 - 1, "empty": ""}},
        {"parameters": {"priority": 3, "timeout": 5_000_000, "headers": "x"}},
        {"parameters": {"priority": 2**64 - 1, "timeout": 2**63 - 1}},
        {"parameters": {"sequence_id": 9, "sequence_start": True}}, {"parameters": {"sequence_id": 2**64 - 1}},
        {"parameters": {"sequence_id": "abc", "sequence_start": True, "sequence_end": True}},
        {"outputs": []}, {"outputs": [{"name": "OUTPUTS"}, {"name": "ID", "parameters": {"own": 2.5}}]},
        {"outputs": [{"name": "ID"}], "parameters": {"binary_data_output": True}},
        {"outputs": [{"name": "ID", "parameters": {"binary_data": False}}, {"name": "FLAGS"}], "id": "größe"},
        {"inputs": [{**INPUT, "parameters": {"own": 1, "text": "x"}}]},
    ],
    ids=lambda more: json.dumps(more)[:60],
)  # fmt: skip
def test_a_call_over_http_means_the_same(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, more: dict[str, Any]
) -> None:
    body = json.dumps({"inputs": [INPUT], **more}).encode()
    straight = post(client, direct, "told", body, None)
    through = post(client, gateways[over], "told", body, None)
    assert straight.status == 200
    assert (through.status, through.header_length) == (200, straight.header_length)
    assert told(through.body) == told(straight.body)


@over
@pytest.mark.parametrize(
    "parameters",
    [
        {"b": ("bool_param", True), "i": ("int64_param", -5)},
        {"s": ("string_param", "größe"), "d": ("double_param", 2.0)},
        {"priority": ("uint64_param", 3), "timeout": ("int64_param", 5_000_000)},
        {"sequence_id": ("int64_param", 9), "sequence_start": ("bool_param", True)},
        {"sequence_id": ("int64_param", -5), "sequence_end": ("bool_param", True)},
        {"sequence_id": ("string_param", "abc"), "sequence_start": ("bool_param", True)},
        {"triton_unknown": ("int64_param", 1)},
    ],
    ids=lambda given: ",".join(given),
)  # fmt: skip
def test_a_call_over_grpc_means_the_same(
    direct: Peer, gateways: dict[str, Peer], over: str, parameters: dict[str, tuple[str, Any]]
) -> None:
    def seen(peer: Peer) -> Any:
        answer = call(peer, rpc(parameters))
        if isinstance(answer, tuple):
            return answer[0]
        message = pb.ModelInferResponse.FromString(answer)
        raw = {output.name: data[4:] for output, data in zip(message.outputs, message.raw_output_contents, strict=True)}
        return message.id, json.loads(raw.pop("PARAMETERS")), raw

    assert seen(gateways[over]) == seen(direct)


def rpc(parameters: dict[str, tuple[str, Any]] | Any) -> bytes:
    message = pb.ModelInferRequest(model_name="told", id="g")
    message.inputs.add(name="IN", datatype="INT32", shape=[1, 1]).parameters["own"].double_param = 0.5
    message.raw_input_contents.append(b"\1\0\0\0")
    for name, (field, value) in parameters.items():
        setattr(message.parameters[name], field, value)
    return message.SerializeToString()


@over
def test_a_replys_own_parameters_come_back(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str
) -> None:
    """Ensembles have some."""
    given = {"name": "GIVEN", "datatype": "FP16", "shape": [2, 4], "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    straight = post(client, direct, "ensemble", head + bytes(range(16)), len(head))
    through = post(client, gateways[over], "ensemble", head + bytes(range(16)), len(head))
    assert (through.status, through.header_length) == (200, straight.header_length)
    end = int(str(straight.header_length))
    assert json.loads(straight.body[:end])["parameters"]["sequence_start"] is False
    assert json.loads(through.body[:end]) == json.loads(straight.body[:end])
    assert through.body[end:] == bytes(range(16))
    message = pb.ModelInferRequest(model_name="ensemble", raw_input_contents=[bytes(range(16))])
    message.inputs.add(name="GIVEN", datatype="FP16", shape=[2, 4])
    said, told = (call(peer, message.SerializeToString()) for peer in (direct, gateways[over]))
    assert isinstance(said, bytes)
    assert isinstance(told, bytes)
    assert pb.ModelInferResponse.FromString(told) == pb.ModelInferResponse.FromString(said)


@over
@pytest.mark.parametrize("difference", DIFFERENCES, ids=str)
def test_deliberate_differences_over_http(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, difference: Difference
) -> None:
    body = json.dumps(difference.body).encode()
    assert post(client, direct, difference.model, body, None).status == difference.triton
    expected = difference.ours if over in difference.over else difference.triton
    assert post(client, gateways[over], difference.model, body, None).status == expected


@over
@pytest.mark.parametrize("difference", RPC_DIFFERENCES, ids=str)
def test_deliberate_differences_over_grpc(
    direct: Peer, gateways: dict[str, Peer], over: str, difference: RpcDifference
) -> None:
    def code(peer: Peer) -> int:
        answer = call(peer, rpc(difference.parameters))
        return int(answer[0].value[0]) if isinstance(answer, tuple) else 0

    assert code(direct) == difference.triton
    assert code(gateways[over]) == (difference.ours if over in difference.over else difference.triton)


@over
@pytest.mark.parametrize(
    "code", ["INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED", ""]
)
def test_a_models_error_keeps_its_kind_and_words(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, code: str
) -> None:
    """But for two kinds that HTTP does not tell from a bad argument; over HTTP what was raised comes in one line."""
    body = json.dumps({"inputs": [{"name": "CODE", "datatype": "BYTES", "shape": [1], "data": [code]}]}).encode()
    straight = post(client, direct, "fails", body, None)
    through = post(client, gateways[over], "fails", body, None)
    assert through.status == straight.status
    assert through.error == " ".join(straight.error.split())
    message = pb.ModelInferRequest(model_name="fails")
    message.inputs.add(name="CODE", datatype="BYTES", shape=[1]).contents.bytes_contents.append(code.encode())
    said, told = (call(peer, message.SerializeToString()) for peer in (direct, gateways[over]))
    assert isinstance(said, tuple)
    lost = over == "http" and code in ("ALREADY_EXISTS", "CANCELLED")
    expected = grpc.StatusCode.INVALID_ARGUMENT if lost else said[0]
    assert told == (expected, " ".join(said[1].split()) if over == "http" else said[1])


@over
def test_classes_of_what_has_none_never_reach_the_server(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str
) -> None:
    """They end it: of a text, or of a tensor without elements."""
    text = Case("", "BYTES", (1, 1), b"\1\0\0\0a", ["a"])
    empty = Case("", "FP32", (1, 0), b"", [])
    for case in (text, empty):
        wanted = {"outputs": [{"name": f"OUT_{case.datatype}", "parameters": {"classification": 1}}]}
        for body, length in (as_json(case, **wanted), as_binary(case, **wanted)):
            refused = post(client, gateways[over], "identity", body, length)
            assert (refused.status, "class" in refused.error) == (400, True)
        message = as_raw_contents(case, "identity")
        message.outputs.add(name=f"OUT_{case.datatype}").parameters["classification"].int64_param = 1
        for method in ("ModelInfer", "ModelStreamInfer") if over == "grpc" else ("ModelInfer",):
            answer = call(gateways[over], message.SerializeToString(), f"{SERVICE}/{method}")
            if method == "ModelStreamInfer":
                assert isinstance(answer, bytes)
                assert "class" in pb.ModelStreamInferResponse.FromString(answer).error_message
            else:
                assert isinstance(answer, tuple)
                assert answer[0] is grpc.StatusCode.INVALID_ARGUMENT
    half = Case("", "FP16", (1, 2), bytes(4), None)
    body, length = as_binary(half, outputs=[{"name": "OUT_FP16", "parameters": {"classification": 1}}])
    straight = post(client, direct, "identity", body, length)
    assert straight.status == 400
    assert post(client, gateways[over], "identity", body, length) == straight


CALLS = [
    ("GET", "/v2"), ("GET", "/v2/models/stats"), ("POST", "/v2/repository/index"), ("GET", "/v2/models/nosuch"),
    *(
        ("GET", f"/v2/models/{model}{version}{tail}")
        for model, version in (("accumulate", ""), ("accumulate", "/versions/1"), ("configured", ""), ("identity", ""))
        for tail in ("", "/config", "/ready", "/stats")
    ),
    *(("GET", f"/v2/models/accumulate/versions/9{tail}") for tail in ("", "/config", "/ready", "/stats")),
    *(("GET", f"/v2/models/nosuch{tail}") for tail in ("/config", "/ready", "/stats")),
    ("GET", "/v2/models/accumulate/versions/x"), ("GET", "/v2/models/accumulate/versions/x/config"),
]  # fmt: skip


@over
@pytest.mark.parametrize(("method", "path"), CALLS, ids=lambda part: str(part))
def test_every_call_about_models_over_http(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, method: str, path: str
) -> None:
    straight = client.request(method, f"http://{direct.http}{path}", headers=PLAIN)
    through = client.request(method, f"http://{gateways[over].http}{path}", headers=PLAIN)
    assert through.status_code == straight.status_code
    if path.startswith("/v2/models/configured"):  # whose maps Triton writes in no particular order
        assert json.loads(through.content) == json.loads(straight.content) if straight.content else not through.content
    else:
        assert through.content == straight.content
    if straight.status_code == 200 and straight.content:
        assert through.headers["content-type"] == straight.headers["content-type"]


def test_an_index_of_what_is_ready_and_what_is_no_json(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer]
) -> None:
    url = "http://{}/v2/repository/index"
    body = b'{"ready":true}'
    straight = client.post(url.format(direct.http), content=body, headers=PLAIN)
    assert client.post(url.format(gateways["grpc"].http), content=body, headers=PLAIN).content == straight.content
    for bad in (b"{", b'{"ready":"x"}', b"[]"):
        assert client.post(url.format(gateways["grpc"].http), content=bad).status_code == 400


NAMES = [("accumulate", ""), ("accumulate", "1"), ("accumulate", "9"), ("configured", ""), ("nosuch", "")]
REPLIES: dict[str, tuple[type[Message], type[Message]]] = {
    "ModelReady": (pb.ModelReadyRequest, pb.ModelReadyResponse),
    "ModelMetadata": (pb.ModelMetadataRequest, pb.ModelMetadataResponse),
    "ModelConfig": (pb.ModelConfigRequest, pb.ModelConfigResponse),
    "ModelStatistics": (pb.ModelStatisticsRequest, pb.ModelStatisticsResponse),
}
RPCS: list[tuple[str, Message, type[Message]]] = [
    ("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse),
    ("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse),
    ("RepositoryIndex", pb.RepositoryIndexRequest(ready=True), pb.RepositoryIndexResponse),
    ("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="x"), pb.RepositoryIndexResponse),
    ("ModelStatistics", pb.ModelStatisticsRequest(), pb.ModelStatisticsResponse),
    *(
        (method, request(name=name, version=version), reply)  # type: ignore[call-arg]
        for method, (request, reply) in REPLIES.items()
        for name, version in NAMES
    ),
]


@over
@pytest.mark.parametrize(("method", "message", "kind"), RPCS, ids=lambda part: " ".join(str(part).split())[:50])
def test_every_call_about_models_over_grpc(
    direct: Peer, gateways: dict[str, Peer], over: str, method: str, message: Message, kind: type[Message]
) -> None:
    def answer(peer: Peer) -> Any:
        said = call(peer, message.SerializeToString(), f"{SERVICE}/{method}")
        return kind.FromString(said) if isinstance(said, bytes) else said

    assert answer(gateways[over]) == answer(direct)


@over
def test_a_route_answers_under_its_name_across_protocols(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str
) -> None:
    for tail in ("", "/config", "/ready"):
        straight = client.get(f"http://{direct.http}/v2/models/single{tail}", headers=PLAIN)
        through = client.get(f"http://{gateways[over].http}/v2/models/public{tail}", headers=PLAIN)
        assert through.status_code == 200
        assert through.content == straight.content.replace(b'"name":"single"', b'"name":"public"')
    raw = post(client, gateways[over], "public", bytes(8), 0)
    assert raw == post(client, direct, "single", bytes(8), 0).called("public")
    for method, kind in (("ModelMetadata", pb.ModelMetadataResponse), ("ModelReady", pb.ModelReadyResponse)):
        asked = pb.ModelMetadataRequest(name="public").SerializeToString()
        said = call(gateways[over], asked, f"{SERVICE}/{method}")
        assert isinstance(said, bytes)
        assert method == "ModelReady" or kind.FromString(said).name == "public"
        assert method == "ModelMetadata" or kind.FromString(said).ready
    config = call(gateways[over], pb.ModelConfigRequest(name="public").SerializeToString(), f"{SERVICE}/ModelConfig")
    assert isinstance(config, bytes)
    assert pb.ModelConfigResponse.FromString(config).config.name == "public"

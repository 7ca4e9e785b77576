"""Every endpoint of KServe v2 and Triton's extensions: straight at a real Triton, through a proxy, through a route.

What is proxied is equal byte for byte. A route's name is another one than its model's: there the reply is equal but for
the names, and an error keeps the server's own words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb

from deploy.demo.triton import Triton
from tests.support.serve import Served, within
from tests.support.triton import proxied

POLICY = """
backends:
  all: {{endpoints: [{{http: http://{http}, grpc: "{grpc}"}}], control: true, shared_memory: true}}
  one: {{endpoints: [{{http: http://{http}, grpc: "{grpc}"}}], model: echo, control: true, shared_memory: true}}
proxy: all
routes:
  public: {{backend: one}}
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Triton, Served]]:
    with proxied(tmp_path_factory.mktemp("endpoints"), POLICY, "echo") as pair:
        yield pair


INPUT = {"name": "IN_INT64", "datatype": "INT64", "shape": [1, 2], "data": [1, -(2**63)]}
# What holds the place of a model's name is replaced by one of its names.
M = "MODEL"
OF_A_MODEL: list[tuple[str, str, Any]] = [
    *(
        (method, f"/v2/models/{M}{version}{tail}", body)
        for version in ("", "/versions/1", "/versions/9")
        for method, tail, body in (
            ("GET", "", None),
            ("GET", "/config", None),
            ("GET", "/ready", None),
            ("GET", "/stats", None),
            ("POST", "/infer", {"id": "7", "inputs": [INPUT]}),
            ("POST", "/generate", {"IN_INT64": [[1, 2]]}),
            ("POST", "/generate_stream", {"IN_INT64": [[1, 2]]}),
        )
    ),
    ("GET", f"/v2/models/{M}/trace/setting", None),
    ("POST", f"/v2/models/{M}/trace/setting", {"trace_rate": "7"}),
    ("POST", f"/v2/models/{M}/trace/setting", {"trace_rate": None}),
    ("POST", f"/v2/models/{M}/trace/setting", {"nonsense": "7"}),
    ("POST", f"/v2/repository/models/{M}/load", None),
    ("POST", f"/v2/repository/models/{M}/load", {"parameters": {"config": "{"}}),
    ("POST", f"/v2/repository/models/{M}/unload", {"parameters": {"unload_dependents": True}}),
    ("GET", f"/v2/models/{M}/ready", None),
    ("GET", f"/v2/models/{M}", None),
    ("POST", f"/v2/models/{M}/infer", {"inputs": [INPUT]}),
    ("POST", f"/v2/repository/models/{M}/load", {"parameters": {"unknown": 1}}),
    ("POST", f"/v2/repository/models/{M}/load", {}),
    ("GET", f"/v2/models/{M}/ready", None),
]
OF_THE_SERVER: list[tuple[str, str, Any]] = [
    ("GET", "/v2", None),
    ("GET", "/v2/models/stats", None),
    ("POST", "/v2/repository/index", None),
    ("POST", "/v2/repository/index", {"ready": True}),
    ("GET", "/v2/trace/setting", None),
    ("POST", "/v2/trace/setting", {"trace_rate": "9"}),
    ("POST", "/v2/trace/setting", {"trace_rate": None}),
    ("GET", "/v2/logging", None),
    ("POST", "/v2/logging", {"log_verbose_level": 0}),
    ("POST", "/v2/logging", {"log_verbose_level": "loud"}),
    ("GET", "/v2/models/nope", None),
    ("GET", "/v2/models/nope/ready", None),
    ("POST", "/v2/repository/models/nope/load", None),
    ("POST", "/v2/repository/models/nope/unload", None),
    *(
        (method, f"/v2/{kind}sharedmemory{tail}", body)
        for kind in ("system", "cuda")
        for method, tail, body in (
            ("GET", "/status", None),
            ("GET", "/region/r/status", None),
            ("POST", "/region/r/register", {"key": "/none", "offset": 0, "byte_size": 8}),
            ("POST", "/region/r/unregister", None),
            ("POST", "/unregister", None),
        )
    ),
]


def told(address: str, model: str, method: str, path: str, body: Any) -> tuple[int, str, bytes]:
    content = None if body is None else json.dumps(body)
    response = httpx.request(method, f"http://{address}{path.replace(M, model)}", content=content, timeout=30)
    return response.status_code, response.headers.get("content-type", ""), response.content


def renamed(body: bytes) -> Any:
    """A document of the model's, under the route's name."""
    try:
        document = json.loads(body)
    except ValueError:
        return body.replace(b'"model_name":"echo"', b'"model_name":"public"')  # events
    for holder in (document, *document.get("model_stats", ())):
        for field in ("name", "model_name"):
            if holder.get(field) == "echo":
                holder[field] = "public"
    return document


@pytest.mark.parametrize(("method", "path", "body"), OF_THE_SERVER)
def test_http_about_the_server(both: tuple[Triton, Served], method: str, path: str, body: Any) -> None:
    server, gateway = both
    assert told(gateway.http, "", method, path, body) == told(server.http, "", method, path, body)


# In one test, because calls that change the model stand between others.
def test_http_about_a_model(both: tuple[Triton, Served]) -> None:
    server, gateway = both
    for method, path, body in OF_A_MODEL:
        direct = told(server.http, "echo", method, path, body)
        proxied = told(gateway.http, "echo", method, path, body)
        routed = told(gateway.http, "public", method, path, body)
        case = method, path, body
        if path.endswith("stats") and direct[0] == 200:
            direct = told(server.http, "echo", method, path, body)  # all have been counted
            proxied = told(gateway.http, "echo", method, path, body)
            routed = told(gateway.http, "public", method, path, body)
        if path.endswith("/infer") and direct[0] == 200:
            # Tensors of a backend that is asked over gRPC: equal, and not byte for byte.
            assert json.loads(proxied[2]) == json.loads(direct[2]), case
        elif path.endswith("infer"):
            assert (proxied[0], json.loads(proxied[2])) == (direct[0], json.loads(direct[2])), case
        else:
            assert proxied == direct, case
        assert routed[0] == direct[0], case
        if direct[0] != 200 or not direct[2]:
            assert (routed[2] == direct[2]) or json.loads(routed[2]) == json.loads(direct[2]), case
        elif path.endswith("generate_stream"):
            assert renamed(routed[2]) == renamed(direct[2]), case
        else:
            assert (json.loads(routed[2]), routed[1]) == (renamed(direct[2]), direct[1]), case


def rpc(address: str, method: str, request: Any, reply: Any) -> Any:
    """The reply, or code and details of the failure."""
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}", lambda message: message)
        try:
            return reply.FromString(call(request.SerializeToString(), timeout=30))
        except grpc.RpcError as error:
            return error.code(), error.details()  # type: ignore[attr-defined]


RAW = {"inputs": [{"name": "IN_INT64", "datatype": "INT64", "shape": [1, 1]}], "raw_input_contents": [bytes(8)]}


def about(model: str) -> list[tuple[str, Any, Any]]:
    calls: list[tuple[str, Any, Any]] = []
    for version in ("", "1", "9"):
        both_names = {"name": model, "version": version}
        calls += [
            ("ModelMetadata", pb.ModelMetadataRequest(**both_names), pb.ModelMetadataResponse),
            ("ModelConfig", pb.ModelConfigRequest(**both_names), pb.ModelConfigResponse),
            ("ModelReady", pb.ModelReadyRequest(**both_names), pb.ModelReadyResponse),
            ("ModelStatistics", pb.ModelStatisticsRequest(**both_names), pb.ModelStatisticsResponse),
            (
                "ModelInfer",
                pb.ModelInferRequest(model_name=model, model_version=version, id="7", **RAW),
                pb.ModelInferResponse,
            ),
        ]
    setting = {"trace_rate": {"value": ["3"]}}
    config = {"config": pb.ModelRepositoryParameter(string_param="{")}
    return [
        *calls,
        ("TraceSetting", pb.TraceSettingRequest(model_name=model), pb.TraceSettingResponse),
        ("TraceSetting", pb.TraceSettingRequest(model_name=model, settings=setting), pb.TraceSettingResponse),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=model), pb.RepositoryModelLoadResponse),
        (
            "RepositoryModelLoad",
            pb.RepositoryModelLoadRequest(model_name=model, parameters=config),
            pb.RepositoryModelLoadResponse,
        ),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=model), pb.RepositoryModelUnloadResponse),
        ("ModelReady", pb.ModelReadyRequest(name=model), pb.ModelReadyResponse),
        ("ModelMetadata", pb.ModelMetadataRequest(name=model), pb.ModelMetadataResponse),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=model), pb.RepositoryModelLoadResponse),
        ("ModelReady", pb.ModelReadyRequest(name=model), pb.ModelReadyResponse),
    ]


def back(reply: Any) -> Any:
    """A reply to the route, under the model's own name."""
    for holder in (reply, getattr(reply, "config", None), *getattr(reply, "model_stats", ())):
        for field in ("name", "model_name"):
            if getattr(holder, field, ""):
                assert getattr(holder, field) == "public"
                setattr(holder, field, "echo")
    return reply


def test_grpc_about_a_model(both: tuple[Triton, Served]) -> None:
    server, gateway = both
    for (method, request, reply), (_, routed, _) in zip(about("echo"), about("public"), strict=True):
        direct = rpc(server.grpc, method, request, reply)
        assert rpc(gateway.grpc, method, request, reply) == direct, (method, request)
        through = rpc(gateway.grpc, method, routed, reply)
        if method == "ModelStatistics":
            direct = rpc(server.grpc, method, request, reply)
        assert back(through) == direct, (method, request)


@pytest.mark.parametrize(("method", "request_", "reply"), [
    ("ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse),
    ("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse),
    ("ModelStatistics", pb.ModelStatisticsRequest(), pb.ModelStatisticsResponse),
    ("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse),
    ("RepositoryIndex", pb.RepositoryIndexRequest(ready=True), pb.RepositoryIndexResponse),
    ("TraceSetting", pb.TraceSettingRequest(), pb.TraceSettingResponse),
    ("TraceSetting", pb.TraceSettingRequest(settings={"trace_rate": {"value": ["5"]}}), pb.TraceSettingResponse),
    ("LogSettings", pb.LogSettingsRequest(), pb.LogSettingsResponse),
    ("LogSettings", pb.LogSettingsRequest(settings={"log_verbose_level": {"uint32_param": 0}}), pb.LogSettingsResponse),
    ("LogSettings", pb.LogSettingsRequest(settings={"nonsense": {"uint32_param": 0}}), pb.LogSettingsResponse),
    ("ModelMetadata", pb.ModelMetadataRequest(name="nope"), pb.ModelMetadataResponse),
    ("ModelReady", pb.ModelReadyRequest(name="nope"), pb.ModelReadyResponse),
    ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="nope"), pb.RepositoryModelLoadResponse),
    ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(), pb.SystemSharedMemoryStatusResponse),
    ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r", key="/none", byte_size=8),
     pb.SystemSharedMemoryRegisterResponse),
    ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="r"),
     pb.SystemSharedMemoryUnregisterResponse),
    ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(), pb.CudaSharedMemoryStatusResponse),
    ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="r"), pb.CudaSharedMemoryRegisterResponse),
    ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest(), pb.CudaSharedMemoryUnregisterResponse),
])  # fmt: skip
def test_grpc_about_the_server(both: tuple[Triton, Served], method: str, request_: Any, reply: Any) -> None:
    server, gateway = both
    assert rpc(gateway.grpc, method, request_, reply) == rpc(server.grpc, method, request_, reply)


def test_a_method_that_nobody_knows(both: tuple[Triton, Served]) -> None:
    codes = [rpc(each.grpc, "NoSuchMethod", pb.ServerLiveRequest(), pb.ServerLiveResponse)[0] for each in both]
    assert codes == [grpc.StatusCode.UNIMPLEMENTED] * 2


def test_health(both: tuple[Triton, Served]) -> None:
    server, gateway = both
    # A model was unloaded before, and probes come once a second.
    assert within(10, lambda: httpx.get(f"http://{gateway.http}/v2/health/ready").status_code == 200)
    for each in both:
        assert rpc(each.grpc, "ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse).ready
    for path in ("/v2/health/live", "/v2/health/ready"):
        direct, through = (httpx.get(f"http://{each.http}{path}") for each in both)
        assert (through.status_code, through.content) == (direct.status_code, direct.content) == (200, b"")
    for service in (b"", b"\n\x1einference.GRPCInferenceService"):
        answers = []
        for address in (server.grpc, gateway.grpc):
            with grpc.insecure_channel(address) as channel:
                answers.append(channel.unary_unary("/grpc.health.v1.Health/Check")(service))
        assert answers == [b"\x08\x01", b"\x08\x01"]

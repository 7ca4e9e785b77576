"""Names and attributes of calls in traces, by the conventions' own package."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

from backends.errors import BackendFailed, BadRequest, Expired, Failure, Rejected, Unreachable
from backends.request import Answer, HttpCall, Infer, Relay, Reply, Request, RpcCall, Tensors
from gateway.semantics import SCHEMA, Ending, answered, came, carrier, goes, got
from policies.spec import Endpoint

HERE = Endpoint(http="http://[::1]:8000", grpc="triton:8001")
INFER = Infer(Tensors.of(()))
ANSWER = Reply(Answer(Tensors.of(())))


class Context:
    """A gRPC call, as far as its span is concerned."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer


async def nothing() -> Any:
    return
    yield


def request(content: Any = INFER, arrival: Any = None, **more: Any) -> Request:
    return Request(**{"model": "a/b", "content": content, "arrival": arrival, **more})


def relay(status: int) -> Reply:
    return Reply(Relay(status, (), b""))


def test_every_name_is_one_of_the_conventions_and_not_deprecated() -> None:
    known, deprecated = set(), set()
    for module in ("opentelemetry.semconv.attributes", "opentelemetry.semconv._incubating.attributes"):
        for found in pkgutil.iter_modules(importlib.import_module(module).__path__):
            text = Path(f"{importlib.import_module(module).__path__[0]}/{found.name}.py").read_text()
            for name, doc in re.findall(r'^[A-Z_]+: Final = "([a-z0-9_.]+)"\n(?:"""\n(.*))?', text, re.MULTILINE):
                known.add(name)
                if doc.startswith("Deprecated:"):
                    deprecated.add(name)
    schemas = Path(str(importlib.import_module("opentelemetry.semconv.schemas").__file__)).read_text()
    source = Path(str(importlib.import_module("gateway.semantics").__file__)).read_text()
    used = set(re.findall(r'"((?:http|url|rpc|server|client|network|user_agent|error)\.[a-z_.]+)"', source))
    assert len(used) > 15
    assert used - known == set()
    assert used & deprecated == set()
    assert SCHEMA in schemas


@pytest.mark.parametrize(
    ("method", "target", "name", "route"),
    [
        ("GET", "/v2", "GET /v2", "/v2"),
        ("GET", "/v2/models/stats", "GET /v2/models/stats", "/v2/models/stats"),
        ("GET", "/v2/models/m", "GET /v2/models/{model}", "/v2/models/{model}"),
        ("GET", "/v2/models/m/versions/3/ready", None, "/v2/models/{model}/versions/{version}/ready"),
        ("POST", "/v2/models/m%2Fn/generate_stream?x=1", None, "/v2/models/{model}/generate_stream"),
        ("POST", "/v2/models/m/trace/setting", None, "/v2/models/{model}/trace/setting"),
        ("POST", "/v2/repository/models/m/load", None, "/v2/repository/models/{model}/load"),
        ("POST", "/v2/repository/index", None, "/v2/repository/index"),
        ("GET", "/v2/models/m/secret", "GET", None),
        ("GET", "/v2/anything/of/a/client", "GET", None),
        ("BREW", "/v2", "HTTP /v2", "/v2"),
    ],
)
def test_paths_are_told_by_their_templates(method: str, target: str, name: str | None, route: str | None) -> None:
    call = HttpCall(method, target)
    named, attributes = came("http", request(call))
    assert named == (name or f"{method} {route}")
    assert attributes.get("http.route") == route
    assert attributes["url.path"] == target.partition("?")[0]
    assert attributes["http.request.method"] == (method if method != "BREW" else "_OTHER")
    assert attributes.get("http.request.method_original") == ("BREW" if method == "BREW" else None)
    named, attributes = goes("http", request(call), HERE)
    assert attributes.get("url.template") == route


def test_an_inference_is_told_by_where_it_goes() -> None:
    name, attributes = goes("http", request(version="2"), HERE)
    assert name == "POST /v2/models/{model}/versions/{version}/infer"
    assert attributes["url.full"] == "http://[::1]:8000/v2/models/a%2Fb/versions/2/infer"
    assert (attributes["server.address"], attributes["server.port"]) == ("::1", 8000)
    assert attributes["headrace.model"] == "a/b"
    name, attributes = goes("grpc", request(), HERE)
    assert name == "inference.GRPCInferenceService/ModelInfer"
    assert attributes == {
        "rpc.system.name": "grpc", "rpc.method": name, "server.address": "triton", "server.port": 8001,
        "headrace.model": "a/b",
    }  # fmt: skip


def test_what_a_client_says_of_itself_is_bounded() -> None:
    scope = {
        "http_version": "1.0", "client": ("192.0.2.1", 4242),
        "headers": [(b"host", b"[2001:db8::1]:8000"), (b"user-agent", b"x" * 10_000)],
    }  # fmt: skip
    _, attributes = came("http", request(arrival=scope))
    assert (attributes["server.address"], attributes["server.port"]) == ("2001:db8::1", 8000)
    assert (attributes["client.address"], attributes["network.protocol.version"]) == ("192.0.2.1", "1.0")
    assert attributes["user_agent.original"] == "x" * 256
    for host in (b"", b"[", b"a:b", b"a:99999999"):
        _, attributes = came("http", request(arrival={"headers": [(b"host", host)], "client": None}))
        assert "server.port" not in attributes


def test_grpc_methods_are_told_where_they_are_known() -> None:
    method = "/inference.GRPCInferenceService/ModelStatistics"
    name, attributes = came("grpc", request(RpcCall(method, nothing()), Context("ipv6:%5B::1%5D:4242")))
    assert (name, attributes["rpc.method"], attributes["client.address"]) == (method[1:], method[1:], "::1")
    name, attributes = came("grpc", request(RpcCall("/inference.Other/Thing", nothing()), Context("unix:")))
    assert (name, attributes["rpc.method"]) == ("grpc", "_OTHER")
    assert attributes["rpc.method_original"] == "inference.Other/Thing"
    assert "client.address" not in attributes
    _, attributes = came("grpc", request(arrival=Context("ipv4:192.0.2.1:4242")))
    assert attributes["client.address"] == "192.0.2.1"


@pytest.mark.parametrize(
    ("protocol", "reply", "error", "status", "kind"),
    [
        ("http", ANSWER, None, 200, ""),
        ("http", relay(404), None, 404, ""),
        ("http", relay(503), None, 503, "503"),
        ("http", None, BadRequest("no"), 400, ""),
        ("http", None, Rejected("busy"), 429, ""),
        ("http", None, Unreachable("down"), 503, "Unreachable"),
        ("http", None, BackendFailed("oh", 500), 500, "500"),
        ("http", None, BackendFailed("oh", 5, grpc=True), 404, ""),
        ("http", None, ValueError("defect"), 500, "ValueError"),
        ("http", None, asyncio.CancelledError(), None, ""),
        ("http", relay(200), Unreachable("cut"), 200, "Unreachable"),  # in the middle of a stream
        ("http", relay(200), asyncio.CancelledError(), 200, ""),
        ("grpc", ANSWER, None, "OK", ""),
        ("grpc", None, BadRequest("no"), "INVALID_ARGUMENT", ""),
        ("grpc", None, Rejected("busy"), "RESOURCE_EXHAUSTED", ""),
        ("grpc", None, Expired("queue"), "DEADLINE_EXCEEDED", "Expired"),
        ("grpc", None, BackendFailed("oh", 13, grpc=True), "INTERNAL", "INTERNAL"),
        ("grpc", None, BackendFailed("oh", 99, grpc=True), "UNKNOWN", "UNKNOWN"),
        ("grpc", None, asyncio.CancelledError(), "CANCELLED", ""),
    ],
)
def test_what_a_caller_is_told_is_an_error_where_it_is_the_servers(
    protocol: str, reply: Reply | None, error: BaseException | None, status: Any, kind: str
) -> None:
    ending = answered(protocol, reply, error)
    name = "http.response.status_code" if protocol == "http" else "rpc.response.status_code"
    assert ending.attributes.get(name) == status
    assert ending.error == kind
    if isinstance(error, Failure):
        assert error.message in (ending.message, ending.attributes.get("headrace.failure"))


@pytest.mark.parametrize(
    ("protocol", "reply", "error", "status", "kind"),
    [
        ("http", ANSWER, None, 200, ""),
        ("http", relay(404), None, 404, "404"),
        ("http", None, BackendFailed("oh", 400), 400, "400"),
        ("http", None, Unreachable("down"), None, "Unreachable"),
        ("grpc", ANSWER, None, "OK", ""),
        ("grpc", relay(200), None, None, ""),
        ("grpc", None, BackendFailed("oh", 3, grpc=True), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ("grpc", None, Unreachable("down"), "UNAVAILABLE", "Unreachable"),
        ("grpc", None, Rejected("busy"), None, "Rejected"),
    ],
)
def test_what_a_server_said_is_an_error_of_a_client_where_it_is_one(
    protocol: str, reply: Reply | None, error: BaseException | None, status: Any, kind: str
) -> None:
    ending = got(protocol, reply, error)
    assert set(ending.attributes.values()) == ({status} if status is not None else set())
    assert ending.error == kind


def test_a_calls_own_headers_carry_its_trace() -> None:
    call = HttpCall("GET", "/v2", ((b"b3", b"80f1"), (b"traceparent", b"old")))
    assert carrier(request(call, headers={"traceparent": "new"})) == {"b3": "80f1", "traceparent": "new"}
    metadata = (("b3", "80f1"), ("x-bin", b"\0"))
    assert carrier(request(RpcCall("/a/b", nothing(), metadata))) == {"b3": "80f1"}
    assert carrier(request(headers={"b3": "1"})) == {"b3": "1"}
    assert Ending() == Ending({}, "", "")

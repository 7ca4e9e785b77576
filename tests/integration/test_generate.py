"""`generate` and `generate_stream` through the installed gateway, and straight at a real Triton."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serve import Served, served, within
from tests.support.triton import triton_with

POLICY = """
backends:
  any: {{endpoints: [{{http: "http://{http}", grpc: "{grpc}"}}], protocol: grpc}}
  chat: {{endpoints: [{{http: "http://{http}", grpc: "{grpc}"}}], protocol: http, model: chat, batch: {{}}}}
routes:
  talk: {{backend: chat, cache: {{}}}}
proxy: any
"""
BODIES = {
    "words": {"text_input": "to be or not to be"},
    "one word": {"text_input": "yes"},
    "no word": {"text_input": ""},
    "an id": {"text_input": "a b", "id": "x7"},
    "an error at once": {"text_input": "a b", "fail_at": 0},
    "an error in the middle": {"text_input": "a b c", "fail_at": 1},
    "events beyond 64 KiB": {"text_input": "a b c", "pad": 100_000},
    "text that JSON escapes": {"text_input": 'a"b c\\d \u00e9\u4e16\U0001f600 \u2028'},
    "a missing input": {"nothing": 1},
}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with triton_with(tmp_path_factory.mktemp("triton"), "chat", "delayed") as server:
        yield server


@pytest.fixture(scope="module")
def gateway(triton: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "policy.yaml").write_text(POLICY.format(http=triton.http, grpc=triton.grpc))
    with served(folder, str(folder / "policy.yaml")) as running:
        yield running


def posted(address: str, call: str, body: Any) -> tuple[int, str, bytes]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"http://{address}/v2/models/{call}", content=content, timeout=10)
    return response.status_code, response.headers["content-type"], response.content


@pytest.mark.parametrize("call", ["chat/generate", "chat/generate_stream", "chat/versions/1/generate_stream"])
@pytest.mark.parametrize("case", BODIES)
def test_the_same_bytes(triton: Any, gateway: Served, call: str, case: str) -> None:
    assert posted(gateway.http, call, BODIES[case]) == posted(triton.http, call, BODIES[case])


@pytest.mark.parametrize("call", ["delayed/generate", "delayed/generate_stream", "nosuch/generate_stream"])
def test_other_models(triton: Any, gateway: Served, call: str) -> None:
    assert posted(gateway.http, call, {"DELAY": 2}) == posted(triton.http, call, {"DELAY": 2})


def test_a_route_streams_under_its_own_name(triton: Any, gateway: Served) -> None:
    for case in ("words", "text that JSON escapes", "events beyond 64 KiB", "an error in the middle"):
        status, kind, body = posted(triton.http, "chat/generate_stream", BODIES[case])
        expected = status, kind, body.replace(b'"model_name":"chat"', b'"model_name":"talk"')
        assert posted(gateway.http, "talk/generate_stream", BODIES[case]) == expected


def test_a_unary_call_of_a_decoupled_model_gets_tritons_answer(triton: Any, gateway: Served) -> None:
    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
    status, _, said = posted(triton.http, "chat/infer", body)
    assert status == 501
    assert b"decoupled" in said
    for _ in range(2):
        answered, _, told = posted(gateway.http, "talk/infer", body)
        assert (answered, told) == (501, said)
    status, _, said = posted(gateway.http, "chat/infer", body)  # over gRPC Triton has other words
    assert status == 501
    assert b"decoupled" in said


def test_chunks_come_when_they_are_made(gateway: Served) -> None:
    body = {"text_input": "one two three", "delay_ms": 300}
    times = []
    with httpx.stream("POST", f"http://{gateway.http}/v2/models/chat/generate_stream", json=body) as response:
        for chunk in response.iter_raw():
            assert chunk.count(b"data:") == 1
            times.append(time.monotonic())
    assert len(times) == 3
    assert times[1] - times[0] > 0.2
    assert times[2] - times[1] > 0.2


def test_a_caller_that_leaves_ends_the_work_of_the_model_and_is_no_failure(triton: Any, gateway: Served) -> None:
    counted = next(Path(triton._repository).rglob("chat")) / "cancelled.txt"
    before = counted.read_text() if counted.exists() else ""
    body = {"text_input": "a " * 200, "delay_ms": 50}
    with httpx.stream("POST", f"http://{gateway.http}/v2/models/chat/generate_stream", json=body) as response:
        next(response.iter_raw())
    assert within(5, lambda: counted.exists() and counted.read_text() != before)
    left = 'headrace_requests_total{protocol="http",route="proxy",status="499"}'
    assert within(5, lambda: gateway.counters().get(left, 0) > 0)


def test_an_error_inside_a_stream_counts_as_a_failure(gateway: Served) -> None:
    failed = 'headrace_requests_total{protocol="http",route="proxy",status="500"}'
    before = gateway.counters().get(failed, 0)
    assert posted(gateway.http, "chat/generate_stream", BODIES["an error in the middle"])[0] == 200
    assert gateway.counters()[failed] == before + 1


def raw(address: str, body: dict[str, Any]) -> socket.socket:
    """A connection that has asked for a stream."""
    host, _, port = address.partition(":")
    content = json.dumps(body).encode()
    head = f"POST /v2/models/chat/generate_stream HTTP/1.1\r\nHost: h\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), 10)
    connection.sendall(head.encode() + content)
    return connection


def rest(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def test_a_backend_that_dies_ends_a_stream_as_an_error_and_an_aborted_connection(tmp_path: Path) -> None:
    with triton_with(tmp_path, "chat") as triton:
        arguments = ("--backend", f"http://{triton.http}", "--backend-grpc", triton.grpc)
        with served(tmp_path, *arguments) as gateway, raw(gateway.http, {"text_input": "a " * 99, "delay_ms": 50}) as c:
            assert b"data:" in c.recv(4096) + c.recv(4096)
            os.kill(triton.pids()[0], signal.SIGKILL)
            said = rest(c)
            assert said.count(b'data: {"error":"') == 1
            assert b"\n\n\r\n" in said
            assert not said.endswith(b"0\r\n\r\n")
            lost = 'headrace_requests_total{protocol="http",route="proxy",status="502"}'
            assert within(5, lambda: gateway.counters().get(lost) == 1)


def test_streams_are_told_before_a_drain_cuts_them(triton: Any, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        f"backends: {{b: {{endpoints: [{{http: 'http://{triton.http}', grpc: '{triton.grpc}'}}]}}}}\n"
        "proxy: b\nlimits: {drain: 1s}\n"
    )
    body = {"text_input": "a " * 400, "delay_ms": 50}
    with served(tmp_path, str(policy)) as gateway, raw(gateway.http, body) as c:
        assert b"data:" in c.recv(4096) + c.recv(4096)
        gateway.process.send_signal(signal.SIGTERM)
        said = rest(c)
        assert b'data: {"error":"the gateway is shutting down, and this request was not over' in said
        assert not said.endswith(b"0\r\n\r\n")
        assert gateway.process.wait(10) == 0

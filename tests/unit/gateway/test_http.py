"""The HTTP edge: paths, methods, bodies as they come, errors in KServe's own form."""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from backends.errors import BadRequest, TooLarge
from gateway.encoding import inflated_now
from gateway.http import _forwarded, _segments
from tests.support.gateway import FakeServer, Rig, double

POLICY = """
backends:
  plain: {endpoints: [http://127.0.0.1:1], model: twice}
routes:
  twice: {backend: plain}
  with/slash: {backend: plain}
limits: {body_bytes: 64KiB, timeout: 200ms}
"""
GOOD = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
JSON = msgspec.json.encode(GOOD)


def ask(
    method: str, path: str, content: bytes | AsyncIterator[bytes] = b"", **headers: str
) -> tuple[Rig, httpx.Response]:
    r = Rig(POLICY, FakeServer({"twice": double}))

    async def run() -> httpx.Response:
        async with r.client() as client:
            named = {k.replace("_", "-"): v for k, v in headers.items()}
            return await client.request(method, path, content=content, headers=named)

    return r, asyncio.run(run())


def refused(response: httpx.Response, status: int) -> str:
    """The one line of an error, which must be nothing else."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    document = response.json()
    assert list(document) == ["error"]
    assert "\n" not in document["error"]
    return str(document["error"])


@pytest.mark.parametrize("path", ["/livez", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"])
def test_health_is_answered_here_and_has_no_body(path: str) -> None:
    r, response = ask("GET", path)
    assert (response.status_code, response.content) == (200, b"")
    assert r.server.requests == []


def test_not_ready_is_503() -> None:
    r = Rig(POLICY, FakeServer({}))
    r.server.is_ready = False

    async def run() -> httpx.Response:
        async with r.client() as client:
            return await client.get("/v2/health/ready")

    assert asyncio.run(run()).status_code == 503


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v2/models/twice/infer", "POST"),
        ("PUT", "/v2/models/twice/infer", "POST"),
        ("POST", "/livez", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_405_and_says_which_is_right(method: str, path: str, allow: str) -> None:
    r, response = ask(method, path, JSON)
    assert method in refused(response, 405)
    assert response.headers["allow"] == allow
    assert len(r.refused) == 1


@pytest.mark.parametrize("path", ["/", "/v1/models", "/invocations", "/v22"])
def test_an_unknown_path_is_404(path: str) -> None:
    assert "no such path" in refused(ask("GET", path)[1], 404)


def test_a_percent_encoded_name_is_one_segment() -> None:
    _, response = ask("POST", "/v2/models/with%2Fslash/infer", JSON)
    assert response.json()["model_name"] == "with/slash"
    assert "UTF-8" in refused(ask("POST", "/v2/models/%ff/infer", JSON)[1], 404)


def test_json_in_json_out() -> None:
    _, response = ask("POST", "/v2/models/twice/versions/7/infer", JSON)
    assert response.headers["content-type"] == "application/json"
    assert response.json()["outputs"] == [{"name": "Y", "datatype": "FP32", "shape": [2], "data": [2.0, 4.0]}]


def test_binary_in_binary_out() -> None:
    head = msgspec.json.encode(
        {
            "inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}],
            "parameters": {"binary_data_output": True},
        }
    )
    body = head + np.array([1, 2], "<f4").tobytes()
    _, response = ask("POST", "/v2/models/twice/infer", body, inference_header_content_length=str(len(head)))
    assert response.status_code == 200
    length = int(response.headers["inference-header-content-length"])
    assert response.headers["content-type"] == "application/octet-stream"
    assert np.frombuffer(response.content[length:], "<f4").tolist() == [2.0, 4.0]


@pytest.mark.parametrize("encode", [gzip.compress, zlib.compress, lambda b: zlib.compress(b)[2:-4]])
def test_compressed_bodies(encode: Any) -> None:
    encoding = "gzip" if encode is gzip.compress else "deflate"
    _, response = ask("POST", "/v2/models/twice/infer", encode(JSON), content_encoding=encoding)
    assert response.status_code == 200


def test_a_gzip_body_may_have_several_members_and_nothing_else_behind() -> None:
    path = "/v2/models/twice/infer"
    members = gzip.compress(JSON[:20]) + gzip.compress(JSON[20:])
    assert ask("POST", path, members, content_encoding="gzip")[1].status_code == 200
    refused(ask("POST", path, gzip.compress(JSON) + b"rest", content_encoding="gzip")[1], 400)


def test_a_gzip_body_of_many_members_costs_no_more_than_its_bytes() -> None:
    began = time.process_time()
    members = gzip.compress(b"") * 3000  # each 20 bytes
    path = "/v2/models/twice/infer"
    assert "JSON" in refused(ask("POST", path, members, content_encoding="gzip")[1], 400)
    many = gzip.compress(b"") * 5000
    with pytest.raises(BadRequest, match="members"):
        inflated_now(many * 10, b"gzip", 1 << 20)
    assert time.process_time() - began < 0.5
    large = gzip.compress(bytes(200_000), 0) * 3
    assert inflated_now(large, b"gzip", 600_000) == bytes(600_000)
    with pytest.raises(TooLarge):
        inflated_now(large, b"gzip", 599_999)


def test_long_paths_are_not_remembered() -> None:
    before = _segments.cache_info().currsize
    for i in range(3):
        refused(ask("GET", f"/{i}" + "/ab" * 1000)[1], 404)
    assert _segments.cache_info().currsize == before


def test_a_head_full_of_connection_headers_costs_little() -> None:
    headers = [(b"connection", b"x%d" % i) for i in range(4000)] + [(b"x9", b"no"), (b"y", b"yes")]
    began = time.process_time()
    assert _forwarded(headers) == {"y": "yes"}
    assert time.process_time() - began < 0.1


def test_a_body_that_does_not_come_is_408() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)
        yield b"}"

    _, response = ask("POST", "/v2/models/twice/infer", chunks())
    assert "within 0.2 s" in refused(response, 408)


def test_compression_that_lies_or_explodes_or_is_unknown() -> None:
    path = "/v2/models/twice/infer"
    assert "at most 65536" in refused(ask("POST", path, gzip.compress(b" " * 10**6), content_encoding="gzip")[1], 413)
    assert "cut short" in refused(ask("POST", path, gzip.compress(JSON)[:-9], content_encoding="gzip")[1], 400)
    refused(ask("POST", path, JSON, content_encoding="gzip")[1], 400)
    assert "'br'" in refused(ask("POST", path, JSON, content_encoding="br")[1], 415)


def test_a_body_above_the_limit_is_413_before_it_is_read_and_while_it_comes() -> None:
    path = "/v2/models/twice/infer"
    assert "at most 65536 bytes, got 65537" in refused(ask("POST", path, b" " * 65537)[1], 413)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    assert "at most 65536" in refused(ask("POST", path, chunks())[1], 413)


def test_many_tiny_chunks_are_one_body() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for byte in JSON:
            yield bytes([byte])

    assert ask("POST", "/v2/models/twice/infer", chunks())[1].status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON"),
        (b"[]", "object"),
        (b'{"inputs":[]}', "at least one input"),
        (b'{"inputs":' + b"[" * 1000 + b"]" * 1000 + b"}", "nested more than 64"),
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[-1],"data":[1]}]}', "negative"),
        (b'{"inputs":[{"name":"X","datatype":"FP33","shape":[1],"data":[1]}]}', "FP33"),
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[99999999,99999999],"data":[1]}]}', "absurdly large"),
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1]}]}', "'data'"),
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"data":["a"]}]}', "FP32"),
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[3],"data":[1]}]}', "asks for 3 elements"),
        (b'{"inputs":[{"name":"X","datatype":"FP32","shape":[3],"data":[1,    2]}]}', "12 bytes, got 8"),
        (b'{"inputs":[{"name":"X","datatype":"BYTES","shape":[1],"data":["\xff"]}]}', ""),
    ],
)
def test_malformed_bodies_are_400_with_one_line(body: bytes, words: str) -> None:
    r, response = ask("POST", "/v2/models/twice/infer", body)
    assert words in refused(response, 400)
    assert r.defects == []


@pytest.mark.parametrize("length", ["-1", "abc", "9" * 20, "9" * 5000, "200"])
def test_a_header_length_that_lies_is_400(length: str) -> None:
    _, response = ask("POST", "/v2/models/twice/infer", JSON, inference_header_content_length=length)
    assert "Inference-Header-Content-Length" in refused(response, 400)


def test_hop_by_hop_headers_and_our_own_do_not_reach_the_backend() -> None:
    r, _ = ask(
        "GET",
        "/v2/models/twice/config",
        connection="keep-alive, x-private",
        x_private="1",
        x_public="2",
        transfer_encoding="chunked",
        te="trailers",
    )
    (request,) = r.server.requests
    names = {name for name, _ in request.content.headers}  # type: ignore[union-attr]
    assert b"x-public" in names
    assert not names & {b"connection", b"x-private", b"te", b"transfer-encoding", b"host"}
    assert set(request.headers) == {"traceparent"}
    r, _ = ask("POST", "/v2/models/twice/infer", JSON, connection="keep-alive, x-private", x_private="1")
    assert "x-private" not in r.server.requests[0].headers
    r, _ = ask("POST", "/v2/models/twice/infer", JSON, headrace_timeout_ms="500", x_public="2")
    assert r.server.requests[0].headers["x-public"] == "2"
    assert not [name for name in r.server.requests[0].headers if name.startswith("headrace-")]


def asked(headers: list[tuple[str, str]], content: bytes = JSON, path: str = "/v2/models/twice/infer") -> Any:
    r = Rig(POLICY, FakeServer({"twice": double}))

    async def run() -> httpx.Response:
        async with r.client() as client:
            return await client.post(path, content=content, headers=headers)

    return r, asyncio.run(run())


def test_headers_that_say_how_a_body_is_read_do_not_contradict_each_other() -> None:
    size, name = str(len(JSON)), "inference-header-content-length"
    assert asked([(name, size), (name, size)])[1].status_code == 200
    for values in ([size, "5"], ["5", size], [size, size, "0"], ["0", size]):
        r, response = asked([(name, value) for value in values])
        assert f"{name}: expected one value" in refused(response, 400)
        assert r.server.requests == []
    packed, name = gzip.compress(JSON), "content-encoding"
    assert asked([(name, "gzip"), (name, "gzip")], packed)[1].status_code == 200
    for path in ("/v2/models/twice/infer", "/v2/models/twice/generate"):
        assert "content-encoding" in refused(asked([(name, "gzip"), (name, "identity")], packed, path)[1], 400)
    assert "gzip, gzip" in refused(asked([(name, "gzip, gzip")], packed)[1], 415)


def test_other_repeated_headers_are_joined_for_the_backend() -> None:
    r, response = asked([("x-a", "1"), ("x-a", "2"), ("cookie", "a=1"), ("cookie", "b=2")])
    assert response.status_code == 200
    assert r.server.requests[0].headers["x-a"] == "1, 2"
    assert r.server.requests[0].headers["cookie"] == "a=1; b=2"


def test_trace_would_show_the_credentials_that_the_backend_is_given() -> None:
    r, response = ask("TRACE", "/v2/models/twice/config")
    refused(response, 405)
    assert r.server.requests == []


@pytest.mark.parametrize("path", ["lo%61d", "load/", "%6coa%64", "load%2F"])
def test_what_changes_a_server_is_told_however_it_is_written(path: str) -> None:
    r, response = ask("POST", f"/v2/repository/models/twice/{path}")
    assert "change the servers" in refused(response, 403)
    assert r.server.requests == []


def test_the_head_of_a_renamed_document_promises_no_length() -> None:
    policy = POLICY.replace("twice: {backend", "other: {backend")
    r = Rig(policy, FakeServer({}))

    async def run() -> tuple[httpx.Response, httpx.Response]:
        async with r.client() as client:
            return await client.get("/v2/models/other/config"), await client.head("/v2/models/other/config")

    get, head = asyncio.run(run())
    assert get.json()["name"] == "other"
    assert (head.status_code, head.content) == (200, b"")
    assert "content-length" not in head.headers
    assert head.headers["content-type"] == get.headers["content-type"]


def test_a_raw_body_is_relayed_as_it_is() -> None:
    r, response = ask("POST", "/v2/models/twice/infer", b"\x00\x01", inference_header_content_length="0")
    assert response.status_code == 200
    call = r.server.requests[0].content
    assert call.body == b"\x00\x01"  # type: ignore[union-attr]


@pytest.mark.parametrize("path", ["/v2/models/twice/generate", "/v2/logging", "/v2/repository/index"])
def test_what_would_end_the_backend_is_not_relayed(path: str) -> None:
    deep = b"[" * 20_000 + b"]" * 20_000
    r, response = ask("POST", path, deep)
    assert "nested more than 64" in refused(response, 400)
    refused(ask("POST", path, gzip.compress(deep), content_encoding="gzip")[1], 400)
    assert r.server.requests == []
    r, response = ask("POST", path, b"{" + b",".join(b'"%d":0' % i for i in range(5000)) + b"}")
    assert "more than 4096 keys" in refused(response, 400)
    assert r.server.requests == []


def test_headers_that_the_backend_would_hang_up_on_are_400() -> None:
    r, response = ask("POST", "/v2/models/twice/infer", JSON, cookie="a" * 9000)
    assert "at most 7000 bytes" in refused(response, 400)
    assert r.server.requests == []

"""HTTP as it is in the wild, straight at a real tritonserver and through the gateway: the same, or better for a reason.

What is compared is what a client acts on: status, body, and the headers that say what the body is.
"""

from __future__ import annotations

import gzip
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import tritonclient.http as httpclient

from deploy.demo.triton import Triton
from tests.support.raw import Response, asked
from tests.support.serve import Served, served

DATA = [float(i) for i in range(16)]
DOCUMENT: dict[str, Any] = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": DATA}]}
JSON = msgspec.json.encode(DOCUMENT)
BINARY_OUT = msgspec.json.encode(DOCUMENT | {"outputs": [{"name": "Y", "parameters": {"binary_data": True}}]})
LARGE = msgspec.json.encode(
    {"inputs": [{"name": "X", "datatype": "FP32", "shape": [60, 16], "data": list(range(960))}]}
)
HEAD_JSON = msgspec.json.encode(
    {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}]}
)
BINARY = HEAD_JSON + np.array(DATA, "<f4").tobytes()
INFER, MODEL = "/v2/models/rowsum/infer", "/v2/models/rowsum"
OF_THE_BODY = ("content-encoding", "inference-header-content-length", "content-type")
CLOSE, KEEP = "Connection: close\r\n", "Connection: keep-alive\r\n"


@pytest.fixture(scope="module", params=["http", "grpc"])
def both(triton: Triton, tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[tuple[Triton, Served]]:
    folder = tmp_path_factory.mktemp(f"differential-{request.param}")
    policy = folder / "policy.yaml"
    endpoint = f"{{http: http://{triton.http}, grpc: '{triton.grpc}'}}"
    policy.write_text(
        f"backends: {{b: {{endpoints: [{endpoint}], protocol: {request.param}}}}}\n"
        "proxy: b\nlimits: {body_bytes: 1MiB}\ntelemetry: {response_headers: false}\n"
    )
    with served(folder, str(policy)) as gateway:
        yield triton, gateway


def http(
    method: str, target: str, body: bytes | None = None, headers: str = "", *, version: str = "1.1", host: str = "x"
) -> bytes:
    length = "" if body is None else f"Content-Length: {len(body)}\r\n"
    named = f"Host: {host}\r\n" if host else ""
    return f"{method} {target} HTTP/{version}\r\n{named}{headers}{length}\r\n".encode("latin-1") + (body or b"")


def chunked(body: bytes, size: int, headers: str = "", end: bytes = b"0\r\n\r\n") -> bytes:
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\n{headers}Transfer-Encoding: chunked\r\n\r\n".encode()
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return head + b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in parts]) + end


def bare(body: bytes) -> bytes:
    return zlib.compress(body)[2:-4]


def meaning(response: Response | None) -> Any:
    """What a client makes of it: an inference's tensors come in one spelling of JSON or in another."""
    assert response is not None
    encoding = response.headers.get("content-encoding", "")
    plain = {"gzip": gzip.decompress, "deflate": zlib.decompress, "": bytes}[encoding](response.body)
    return response.status, plain, [response.headers.get(name, "") for name in OF_THE_BODY]


EQUAL = {
    "GET": http("GET", MODEL),
    "GET with a query": http("GET", f"{MODEL}?x=1&y"),
    "a version": http("GET", f"{MODEL}/versions/1"),
    "POST": http("POST", INFER, JSON),
    "binary": http("POST", INFER, BINARY, f"Inference-Header-Content-Length: {len(HEAD_JSON)}\r\n"),
    "raw": http("POST", INFER, BINARY[len(HEAD_JSON) :], "Inference-Header-Content-Length: 0\r\n"),
    "header case": http("POST", INFER, BINARY, f"INFERENCE-header-Content-length: {len(HEAD_JSON)}\r\n"),
    "repeated header length": http("POST", INFER, BINARY, f"Inference-Header-Content-Length: {len(HEAD_JSON)}\r\n" * 2),
    "repeated header": http("POST", INFER, JSON, "X-A: 1\r\nX-A: 2\r\n"),
    "repeated encoding": http("POST", INFER, gzip.compress(JSON), "Content-Encoding: gzip\r\n" * 2),
    "no Host": http("GET", MODEL, host=""),
    "two Hosts": http("GET", MODEL, headers="Host: y\r\n"),
    "HTTP/1.0": http("GET", MODEL, version="1.0"),
    "HTTP/1.0 inference": http("POST", INFER, JSON, version="1.0", host=""),
    "HTTP/1.0 kept alive": http("POST", INFER, JSON, KEEP, version="1.0"),
    "close": http("POST", INFER, JSON, CLOSE),
    "absolute": http("GET", f"http://example.com{MODEL}"),
    "absolute with a port": http("GET", f"HTTP://example.com:80{MODEL}?x=1"),
    "absolute inference": http("POST", f"http://example.com{INFER}", JSON),
    "one chunk": chunked(JSON, len(JSON)),
    "tiny chunks": chunked(JSON, 1),
    "gzip in chunks": chunked(gzip.compress(JSON), 5, "Content-Encoding: gzip\r\n"),
    "gzip": http("POST", INFER, gzip.compress(JSON), "Content-Encoding: gzip\r\n"),
    "deflate": http("POST", INFER, zlib.compress(JSON), "Content-Encoding: deflate\r\n"),
    "gzip called deflate": http("POST", INFER, gzip.compress(JSON), "Content-Encoding: deflate\r\n"),
    "deflate called gzip": http("POST", INFER, zlib.compress(JSON), "Content-Encoding: gzip\r\n"),
    "identity": http("POST", INFER, JSON, "Content-Encoding: identity\r\n"),
    "gzip binary": http(
        "POST",
        INFER,
        gzip.compress(BINARY),
        f"Content-Encoding: gzip\r\nInference-Header-Content-Length: {len(HEAD_JSON)}\r\n",
    ),
    "gzip raw": http(
        "POST",
        INFER,
        gzip.compress(BINARY[len(HEAD_JSON) :]),
        "Content-Encoding: gzip\r\nInference-Header-Content-Length: 0\r\nAccept-Encoding: gzip\r\n",
    ),
    "metadata is not compressed": http("GET", MODEL, headers="Accept-Encoding: gzip\r\n"),
    "an unknown model": http("GET", "/v2/models/nosuch", headers="Accept-Encoding: gzip\r\n"),
    "expect": http("POST", INFER, JSON, "Expect: 100-continue\r\n"),
    "expect something else": http("POST", INFER, JSON, "Expect: 200-ok\r\n"),
    "method of metadata": http("POST", MODEL, b""),
    "OPTIONS": http("OPTIONS", MODEL),
    "DELETE": http("DELETE", MODEL),
    "PROPFIND": http("PROPFIND", MODEL),
    "an encoded slash": http("GET", "/v2/models/row%2Fsum"),
    "an encoded NUL": http("GET", "/v2/models/rowsum%00"),
    "a broken escape": http("GET", "/v2/models/rowsum%"),
    "no escape": http("GET", "/v2/models/%zz"),
    "dots": http("GET", "/v2/models/../models/rowsum"),
    "a doubled slash": http("GET", "/v2//models/rowsum"),
    "a slash at the end": http("GET", f"{MODEL}/"),
    "a large head": http("GET", MODEL, headers=f"X: {'a' * 6000}\r\n"),
} | {
    f"accept {accept}, {kind}": http("POST", INFER, body, f"Accept-Encoding: {accept}\r\n")
    for accept in ("gzip", "deflate", "deflate, gzip", "gzip;q=0.5,deflate", "identity, gzip", "br", "*", "gzip;q=0")
    for kind, body in (("json", JSON), ("binary", BINARY_OUT), ("large", LARGE))
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_the_same_through_the_gateway(both: tuple[Triton, Served], name: str) -> None:
    server, gateway = both
    direct, through = asked(server.http, EQUAL[name]), asked(gateway.http, EQUAL[name])
    assert meaning(through) == meaning(direct)


# What Triton answers, or None where it just closes; what the gateway does; and why that is better.
Case = tuple[tuple[bytes, ...], int | None, int, str]
BETTER: dict[str, Case] = {
    "a head in pieces": (
        (b"GET /v2/mod", b"els/rowsum HTTP/1.1\r\nHo", b"st: x\r\n\r\n"), 404, 200, "a request line may come in pieces",
    ),
    "HEAD of health": ((http("HEAD", "/v2/health/ready"),), 405, 200, "load balancers ask so"),
    "OPTIONS *": ((http("OPTIONS", "*"),), None, 404, "an answer tells more than a closed connection"),
    "lower-case method": ((http("get", MODEL),), None, 400, "an answer tells more than a closed connection"),
    "a space in the target": ((http("GET", f"{MODEL} x"),), None, 400, "the same"),
    "an unknown method": ((http("FOO", MODEL),), 405, 400, "what the parser does not know is not passed on"),
    "CONNECT": ((http("CONNECT", "x:1"),), 404, 400, "this is no tunnel"),
    "HTTP/2.0": ((http("GET", MODEL, version="2.0"),), 200, 400, "HTTP/2 is not spoken in lines"),
    "HTTP/1.2": ((http("GET", MODEL, version="1.2"),), 200, 400, "there is none"),
    "an encoded name": ((http("POST", "/v2/models/row%73um/infer", JSON),), 404, 200, "RFC 3986: it is the same name"),
    "a contradiction": (
        (http("POST", INFER, BINARY, f"Inference-Header-Content-Length: {len(HEAD_JSON)}\r\n"
              "Inference-Header-Content-Length: 0\r\n"),),
        200, 400, "the first counts there, the last elsewhere",
    ),
    "gzip cut short": (
        (http("POST", INFER, gzip.compress(JSON)[:-5], "Content-Encoding: gzip\r\n"),), 200, 400, "no checksum",
    ),
    "gzip and more": (
        (http("POST", INFER, gzip.compress(JSON) + b"rest", "Content-Encoding: gzip\r\n"),), 200, 400, "what is it?",
    ),
    "gzip of two members": (
        (http("POST", INFER, gzip.compress(JSON[:9]) + gzip.compress(JSON[9:]), "Content-Encoding: gzip\r\n"),),
        500, 200, "RFC 1952 allows several",
    ),
    "deflate without a frame": (
        (http("POST", INFER, bare(JSON), "Content-Encoding: deflate\r\n"),), 400, 200, "some clients send it so",
    ),
    "GZIP": ((http("POST", INFER, gzip.compress(JSON), "Content-Encoding: GZIP\r\n"),), 501, 200, "names have no case"),
    "br": ((http("POST", INFER, JSON, "Content-Encoding: br\r\n"),), 501, 415, "RFC 9110's status"),
}  # fmt: skip


@pytest.mark.parametrize("name", BETTER)
def test_better_through_the_gateway(both: tuple[Triton, Served], name: str) -> None:
    server, gateway = both
    parts, theirs, ours, why = BETTER[name]
    direct, through = asked(server.http, *parts), asked(gateway.http, *parts)
    assert (direct.status if direct else None) == theirs
    assert through is not None
    assert through.status == ours, why


@pytest.mark.parametrize(("path", "status"), [(MODEL, 405), (INFER, 405), ("/v2/models/nosuch", 405)])
def test_a_head_has_no_body(both: tuple[Triton, Served], path: str, status: int) -> None:
    """Triton's has one, which is the beginning of the next answer to whoever goes by the RFC."""
    server, gateway = both
    direct = asked(server.http, http("HEAD", path), head_only=True, rest=True)
    assert direct is not None
    assert direct.rest.startswith(b"{")
    through = asked(gateway.http, http("HEAD", path) + http("GET", MODEL, headers=CLOSE), head_only=True, rest=True)
    assert through is not None
    assert (through.status, through.rest[:15]) == (status, b"HTTP/1.1 200 OK")


def test_pipelined_requests_are_all_answered(both: tuple[Triton, Served]) -> None:
    """Triton answers the first."""
    _, gateway = both
    text = http("GET", MODEL) + http("POST", INFER, JSON) + http("POST", INFER, JSON, CLOSE)
    reply = asked(gateway.http, text, rest=True)
    assert reply is not None
    assert reply.closed
    assert reply.rest.count(b"HTTP/1.1 200 OK\r\n") == 2


@pytest.mark.parametrize(
    ("headers", "version", "closed"),
    [
        ("", "1.1", False),
        (CLOSE, "1.1", True),
        ("", "1.0", True),
        (KEEP, "1.0", False),
    ],
)
def test_a_connection_lives_as_long(both: tuple[Triton, Served], headers: str, version: str, closed: bool) -> None:
    server, gateway = both
    for address in (server.http, gateway.http):
        reply = asked(address, http("POST", INFER, JSON, headers, version=version), rest=True)
        assert reply is not None
        assert reply.closed == closed, address


def test_who_expects_to_be_told_to_go_on_is_told_to_or_refused_at_once(both: tuple[Triton, Served]) -> None:
    server, gateway = both
    head = http("POST", INFER, None, f"Expect: 100-continue\r\nContent-Length: {len(JSON)}\r\n")
    for address in (server.http, gateway.http):
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(head)
            assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(JSON)
            assert client.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    large = http("POST", INFER, None, "Expect: 100-continue\r\nContent-Length: 1048577\r\n")
    reply = asked(gateway.http, large, rest=True)
    assert reply is not None
    assert (reply.status, reply.closed, reply.rest) == (413, True, b"")


def test_a_head_that_triton_would_drop_silently_is_refused_with_words(both: tuple[Triton, Served]) -> None:
    server, gateway = both
    text = http("POST", INFER, JSON, f"X: {'a' * 60_000}\r\n")
    assert asked(server.http, text, wait=5) is None
    reply = asked(gateway.http, text)
    assert reply is not None
    assert reply.status == 400
    assert b"expected at most 7000 bytes for the backend" in reply.body
    larger = asked(gateway.http, http("POST", INFER, JSON, f"X: {'a' * 70_000}\r\n"))
    assert larger is not None
    assert larger.status == 431


@pytest.mark.parametrize("sent", [None, "gzip", "deflate"])
@pytest.mark.parametrize("wanted", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_the_real_client_with_compression(
    both: tuple[Triton, Served], sent: str | None, wanted: str | None, binary: bool
) -> None:
    server, gateway = both
    found = []
    for address in (server.http, gateway.http):
        with httpclient.InferenceServerClient(address) as client:
            tensor = httpclient.InferInput("X", [60, 16], "FP32")
            tensor.set_data_from_numpy(np.arange(960, dtype=np.float32).reshape(60, 16), binary_data=binary)
            result = client.infer(
                "rowsum",
                [tensor],
                outputs=[httpclient.InferRequestedOutput("Y", binary_data=binary)],
                request_compression_algorithm=sent,
                response_compression_algorithm=wanted,
            )
            found.append((result.as_numpy("Y").tobytes(), result.get_response()))
    assert found[0] == found[1]

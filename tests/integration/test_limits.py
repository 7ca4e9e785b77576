"""The gateway's limits and refusals over both protocols, before backends over both: the same table for all four."""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import numpy as np
import pytest

from backends import kserve_grpc, kserve_json
from backends.request import Infer, Tensors
from backends.tensor import Tensor, join_elements
from gateway.guard import YAML
from tests.support.serve import Served, served, within
from tests.support.triton import triton_with

BODY, REPLY, FLIGHT, SECONDS = 64 * 1024, 32 * 1024, 2, 0.7
POLICY = """
x-triton: &triton {{http: "http://{http}", grpc: "{grpc}"}}
backends:
  by_http: {{endpoints: [*triton], protocol: http, model: contract}}
  by_grpc: {{endpoints: [*triton], protocol: grpc, model: contract}}
routes:
  http: {{backend: by_http}}
  grpc: {{backend: by_grpc}}
limits: {{body_bytes: {body}, reply_bytes: 32KiB, in_flight: 2, timeout: 700ms}}
telemetry: {{access_log: false}}
"""


class Outcome(NamedTuple):
    """A caller's: an HTTP status or the name of a gRPC code, the error's text, and what came beside it."""

    status: int | str
    text: str
    beside: dict[str, str]


OK = (200, "OK")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    with triton_with(tmp_path_factory.mktemp("triton"), "contract") as triton:
        yield lambda body="64KiB": POLICY.format(http=triton.http, grpc=triton.grpc, body=body)


@pytest.fixture(scope="module")
def gateway(policy: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    (folder / "policy.yaml").write_text(policy())
    with served(folder, str(folder / "policy.yaml")) as running:
        yield running


def asking(word: bytes, **parameters: Any) -> Infer:
    inputs = (
        Tensor("X", "INT32", (1, 2), np.array([[1, 2]], "<i4").tobytes()),
        Tensor("TEXT", "BYTES", (1, 1), join_elements([word]), parameters or None),
    )
    return Infer(Tensors.of(inputs))


class Caller:
    """A client of the gateway over `protocol`, on one connection."""

    def __init__(self, gateway: Served, protocol: str) -> None:
        self.protocol = protocol
        self._http = httpx.Client(base_url=f"http://{gateway.http}", timeout=20)
        self._grpc = grpc.insecure_channel(gateway.grpc)

    def close(self) -> None:
        self._http.close()
        self._grpc.close()

    def infer(self, model: str, infer: Infer, headers: Any = (), encoding: str = "") -> Outcome:
        if self.protocol == "grpc":
            message = kserve_grpc.write_request(model, "", infer)
            coding = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}.get(encoding)
            return self.call("ModelInfer", message, headers, coding)
        length, parts = kserve_json.write_request(infer)
        body = b"".join(parts)
        given = [*headers, ("inference-header-content-length", str(length))]
        if encoding:
            body = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
            given.append(("content-encoding", encoding))
        return self.post(f"/v2/models/{model}/infer", body, given)

    def call(self, method: str, message: bytes, metadata: Any = (), compression: Any = None) -> Outcome:
        call = self._grpc.unary_unary(f"/inference.GRPCInferenceService/{method}")
        try:
            _, done = call.with_call(message, timeout=20, metadata=tuple(metadata), compression=compression)
        except grpc.RpcError as error:
            done = error  # type: ignore[assignment]
        beside = dict(done.trailing_metadata() or ())
        return Outcome(done.code().name, done.details() or "", beside)

    def post(self, path: str, body: bytes, headers: Any = ()) -> Outcome:
        answer = self._http.post(path, content=body, headers=list(headers))
        return Outcome(answer.status_code, answer.text, dict(answer.headers))


@pytest.fixture(params=["http", "grpc"])
def caller(request: pytest.FixtureRequest, gateway: Served) -> Iterator[Caller]:
    made = Caller(gateway, request.param)
    try:
        yield made
    finally:
        made.close()


def unharmed(caller: Caller) -> None:
    """Once Triton has ended what it was not told to end: over HTTP it computes on for those who left."""
    assert within(5, lambda: caller.infer("http", asking(b"a")).status in OK)


both_backends = pytest.mark.parametrize("model", ["http", "grpc"])


@both_backends
@pytest.mark.parametrize("encoding", ["", "gzip", "deflate"])
def test_a_request_may_be_as_large_as_the_policy_says(caller: Caller, model: str, encoding: str) -> None:
    assert caller.infer(model, asking(b"x" * (REPLY - 500)), encoding=encoding).status in OK
    refused = caller.infer(model, asking(b"x" * BODY), encoding=encoding)
    assert refused.status in (413, "RESOURCE_EXHAUSTED")
    if not encoding or caller.protocol == "http":
        assert str(BODY) in refused.text
    unharmed(caller)


@both_backends
@pytest.mark.parametrize("size", [REPLY, BODY - 1000])
def test_an_answer_may_be_as_large_as_the_policy_says(caller: Caller, model: str, size: int) -> None:
    refused = caller.infer(model, asking(b"x" * size))
    assert refused.status in (502, "INTERNAL")
    assert f"expected a reply of at most {REPLY} bytes" in refused.text
    unharmed(caller)


@both_backends
def test_no_more_in_flight_than_the_policy_says_and_no_longer(caller: Caller, model: str, gateway: Served) -> None:
    with ThreadPoolExecutor(FLIGHT) as pool:
        began = time.monotonic()
        slow = [pool.submit(caller.infer, model, asking(b"sleep")) for _ in range(FLIGHT)]
        assert within(5, lambda: gateway.counters()["headrace_requests_in_flight"] == FLIGHT)
        refused = caller.infer(model, asking(b"a"))
        assert refused.status in (429, "RESOURCE_EXHAUSTED")
        assert refused.beside["retry-after"] == "1"
        for each in slow:
            late = each.result()
            assert late.status in (504, "DEADLINE_EXCEEDED")
            assert "deadline exceeded" in late.text
        assert time.monotonic() - began >= SECONDS
    unharmed(caller)


@both_backends
def test_what_the_caller_got_wrong(caller: Caller, model: str) -> None:
    for headers, infer, status, words in [
        ([("headrace-timeout-ms", "soon")], asking(b"a"), (400, "INVALID_ARGUMENT"), "expected milliseconds"),
        ([("x-large", "x" * 7100)], asking(b"a"), (400, "INVALID_ARGUMENT"), "at most 7000 bytes for the backend"),
        ([], asking(b"a", shared_memory_region="r"), (400, "INVALID_ARGUMENT"), "expected"),
        ([("headrace-timeout-ms", "100")], asking(b"sleep"), (504, "DEADLINE_EXCEEDED"), "deadline exceeded"),
    ]:
        refused = caller.infer(model, infer, headers)
        assert refused.status in status, refused
        assert words in refused.text
    assert caller.infer("nosuch", asking(b"a")).status in (404, "NOT_FOUND")
    unharmed(caller)


def test_calls_that_would_change_a_server(caller: Caller) -> None:
    if caller.protocol == "http":
        refused = caller.post("/v2/repository/models/http/unload", b"{}")
    else:
        refused = caller.call("RepositoryModelUnload", b"\x12\x04http")
    assert refused.status in (403, "PERMISSION_DENIED")
    unharmed(caller)


def test_another_limit_is_in_force_for_both_or_refused(caller: Caller, gateway: Served, policy: Any) -> None:
    def put(limit: str) -> httpx.Response:
        text = policy(limit)
        return httpx.post(f"http://{gateway.admin}/policy", content=text, headers={"content-type": YAML}, timeout=20)

    large = asking(b"x" * 2000)
    assert caller.infer("grpc", large).status in OK
    assert put("2000").status_code == 200
    try:
        refused = caller.infer("grpc", large)
        assert refused.status in (413, "RESOURCE_EXHAUSTED")
        assert "at most 2000 bytes" in refused.text
        raised = put("65KiB")
        assert raised.status_code == 400
        assert f"at most {BODY} bytes" in raised.text
    finally:
        assert put("64KiB").status_code == 200
    assert caller.infer("grpc", large).status in OK

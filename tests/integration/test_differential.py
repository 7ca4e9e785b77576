"""The same inference straight at a real Triton and through the gateway: every datatype, in every form, one by one.

What passes unopened is equal byte for byte, and so is what crosses from one protocol to the other: bodies over HTTP
with their header length, messages over gRPC. `test_differential_batches.py` has the same inside of batches.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tritonclient.grpc.service_pb2 as pb

from tests.support.differential import (
    LIMIT,
    Case,
    Peer,
    Said,
    as_binary,
    as_json,
    as_raw_contents,
    as_typed_contents,
    call,
    cases,
    packed,
    post,
)

CASES = cases()
TEXTUAL = [case for case in CASES if case.values is not None]
BINARY_OUT = {"parameters": {"binary_data_output": True}}
over = pytest.mark.parametrize("over", ["http", "grpc"])


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as made:
        yield made


@over
@pytest.mark.parametrize("case", CASES, ids=str)
def test_http_binary(client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, case: Case) -> None:
    for more in (BINARY_OUT, {"outputs": [{"name": f"OUT_{case.datatype}", "parameters": {"binary_data": True}}]}):
        body, length = as_binary(case, **more)
        straight = post(client, direct, "identity", body, length)
        assert straight.status == 200
        assert straight.body.endswith(case.data)
        assert post(client, gateways[over], "identity", body, length) == straight


@over
@pytest.mark.parametrize("case", TEXTUAL, ids=str)
def test_http_json(client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, case: Case) -> None:
    body, length = as_json(case, id="7")
    straight = post(client, direct, "identity", body, length)
    assert straight.status == 200
    through = post(client, gateways[over], "identity", body, length)
    assert through == straight or (over == "grpc" and _same_numbers(case, through, straight))


def _same_numbers(case: Case, through: Said, straight: Said) -> bool:
    return case.datatype in ("FP32", "FP64") and through.numbers == straight.numbers


@over
@pytest.mark.parametrize("case", CASES, ids=str)
def test_binary_in_and_json_out(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, case: Case
) -> None:
    """Text that is not UTF-8 comes as the bytes that it is, FP16 and BF16 with Triton's refusal."""
    body, length = as_binary(case)
    straight = post(client, direct, "identity", body, length)
    through = post(client, gateways[over], "identity", body, length)
    assert straight.status == (400 if case.datatype in ("FP16", "BF16") else 200)
    assert through == straight or (over == "grpc" and _same_numbers(case, through, straight))


@over
@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_have_no_json_form(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, datatype: str
) -> None:
    for values in ([1.0, 2.0], []):
        body, _ = as_json(Case("", datatype, (1, len(values)), b"", values))
        straight = post(client, direct, "identity", body, None)
        assert (straight.status, "not supported" in straight.error) == (400, True)
        assert post(client, gateways[over], "identity", body, None) == straight


@over
@pytest.mark.parametrize("case", CASES, ids=str)
def test_grpc_raw_contents(direct: Peer, gateways: dict[str, Peer], over: str, case: Case) -> None:
    message = as_raw_contents(case, "identity").SerializeToString()
    straight = call(direct, message)
    assert isinstance(straight, bytes)
    assert pb.ModelInferResponse.FromString(straight).raw_output_contents == [case.data]
    assert call(gateways[over], message) == straight


@over
@pytest.mark.parametrize("case", TEXTUAL, ids=str)
def test_grpc_typed_contents(direct: Peer, gateways: dict[str, Peer], over: str, case: Case) -> None:
    message = as_typed_contents(case, "identity").SerializeToString()
    straight = call(direct, message)
    assert isinstance(straight, bytes)
    assert call(gateways[over], message) == straight


@over
@pytest.mark.parametrize(
    ("model", "body"),
    [
        ("single", b"\0\0\x80\x3f\0\0\xc0\x7f"), ("single", b""), ("single", b"\0\0\0"), ("single_text", b"hello"),
        ("single_text", b""), ("single_text", b"\xff\0"), ("single_text", b"m" * 2**20), ("single_half", b"\1\x7d" * 4),
        ("single_half", b"\0\1" * 5), ("single_half", b""), ("labelled", bytes(12)), ("labelled", bytes(24)),
        ("identity", b"abc"), ("accumulate", bytes(4)), ("nosuch", b"a"),
    ],
)  # fmt: skip
def test_http_raw(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, model: str, body: bytes
) -> None:
    straight = post(client, direct, model, body, 0)
    through = post(client, gateways[over], model, body, 0)
    if straight.status == 200 or over == "http":
        assert through == straight
    else:
        assert (through.status, through.error) == (straight.status, straight.error)


@over
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (2, 3)])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BF16"])
def test_sizes_of_nothing_without_a_batch_axis(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, datatype: str, shape: tuple[int, int]
) -> None:
    size = {"FP32": 4, "BF16": 2}.get(datatype)
    count = shape[0] * shape[1]
    case = Case("", datatype, shape, bytes(size * count) if size else packed(*[b"x"] * count), None)
    body, length = as_binary(case, **BINARY_OUT)
    straight = post(client, direct, "dynamic", body, length)
    assert straight.status == 200
    assert post(client, gateways[over], "dynamic", body, length) == straight
    message = as_raw_contents(case, "dynamic").SerializeToString()
    assert call(gateways[over], message) == call(direct, message)


@over
@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_a_batch_of_no_rows_gets_tritons_answer(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, datatype: str
) -> None:
    case = Case("", datatype, (0, 2), b"", [])
    straight = post(client, direct, "identity", *as_json(case))
    assert straight.status == 400
    through = post(client, gateways[over], "identity", *as_json(case))
    assert (through.status, through.error) == (400, straight.error)
    message = as_typed_contents(case, "identity").SerializeToString()
    assert call(gateways[over], message) == call(direct, message)


KIB = 1024


@pytest.mark.parametrize(
    ("over", "size"),
    [
        *((over, size) for over in ("http", "grpc") for size in (31 * KIB, 32 * KIB, 33 * KIB, KIB * KIB)),
        ("http", 63 * KIB * KIB), ("grpc", LIMIT),
    ],
)  # fmt: skip
def test_bodies_of_every_size(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, size: int
) -> None:
    """F17: up to the limit, which a body may just reach."""
    empty = Case("", "UINT8", (1, size), b"", None)
    head = len(as_binary(empty, **BINARY_OUT)[0]) + len(str(size)) - 1  # `binary_data_size` grows by its digits
    count = size - head
    count -= len(as_binary(Case("", "UINT8", (1, count), bytes(count), None), **BINARY_OUT)[0]) - size
    body, length = as_binary(Case("", "UINT8", (1, count), b"\xa5" * count, None), **BINARY_OUT)
    assert len(body) == size
    through = post(client, gateways[over], "identity", body, length)
    assert through.status == 200
    assert through.body[-count:] == b"\xa5" * count
    if size <= KIB * KIB:
        assert through == post(client, direct, "identity", body, length)


@over
def test_a_body_beyond_the_limit_is_413(client: httpx.Client, gateways: dict[str, Peer], over: str) -> None:
    through = post(client, gateways[over], "identity", bytes(65 * KIB * KIB), None)
    assert (through.status, "at most 67108864 bytes" in through.error) == (413, True)


@over
@pytest.mark.parametrize("lie", ["-1", "x", "1e3", "9" * 30, "100000", str(2**32 + 10), ""])
def test_header_lengths_that_lie(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, lie: str
) -> None:
    """F3: 400, whatever the number, and no arithmetic of 32 bits."""
    body, _ = as_binary(TEXTUAL[0])
    given = {"inference-header-content-length": lie}
    assert post(client, gateways[over], "identity", body, None, **given).status == 400


@over
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_body_is_what_it_was(
    client: httpx.Client, direct: Peer, gateways: dict[str, Peer], over: str, encoding: str
) -> None:
    """F1: header and body go as a pair, and a body that says nothing of its compression is no JSON."""
    case = next(case for case in CASES if case.name == "FP16")
    squeeze = gzip.compress if encoding == "gzip" else zlib.compress
    for body, length in (as_binary(case, **BINARY_OUT), as_json(TEXTUAL[0])):
        given = {"content-encoding": encoding}
        straight = post(client, direct, "identity", squeeze(body), length, **given)
        assert straight.status == 200
        assert post(client, gateways[over], "identity", squeeze(body), length, **given) == straight
    assert post(client, gateways[over], "identity", squeeze(body), None).status == 400


def test_a_version_is_named_or_chosen(client: httpx.Client, direct: Peer, gateways: dict[str, Peer]) -> None:
    body, _ = as_json(TEXTUAL[0])

    def answers(peer: Peer, model: str) -> tuple[int, Any]:
        answer = client.post(f"http://{peer.http}/v2/models/{model}/infer", content=body)
        return answer.status_code, json.loads(answer.content)

    for model in ("identity/versions/1", "identity/versions/9", "nosuch", "nosuch/versions/1"):
        straight = answers(direct, model)
        assert answers(gateways["http"], model) == straight
        assert answers(gateways["grpc"], model) == straight
    for version in ("1", "9", "x"):
        message = as_raw_contents(TEXTUAL[0], "identity")
        message.model_version = version
        straight = call(direct, message.SerializeToString())
        assert call(gateways["grpc"], message.SerializeToString()) == straight

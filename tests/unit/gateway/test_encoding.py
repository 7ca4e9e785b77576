"""Content encodings: which one a caller gets, what is compressed, and who waits meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from backends.errors import BadRequest, TooLarge
from backends.tensor import Tensor
from gateway.encoding import accepted, deflated, inflated, inflated_now
from tests.support.gateway import FakeServer, Rig, double, fp32

POLICY = """
backends: {plain: {endpoints: [http://127.0.0.1:1]}}
routes:
  twice: {backend: plain}
  large: {backend: plain}
"""
PATH = "/v2/models/twice/infer"
ROWS = 4000
BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
BINARY = BODY | {"outputs": [{"name": "Y", "parameters": {"binary_data": True}}]}


def large(_: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (fp32("Y", np.arange(4 << 20)),)


def ask(accept: str | list[tuple[str, str]], document: Any = BODY, path: str = PATH) -> tuple[httpx.Response, bytes]:
    """The answer, and its bytes as they went over the wire."""
    rig = Rig(POLICY, FakeServer({"twice": double, "large": large}))
    headers = accept if isinstance(accept, list) else [("accept-encoding", accept)]

    async def run() -> tuple[httpx.Response, bytes]:
        async with rig.client() as client:
            request = client.build_request("POST", path, json=document)
            del request.headers["accept-encoding"]
            request.headers = httpx.Headers([*request.headers.multi_items(), *headers])
            response = await client.send(request, stream=True)
            raw = b"".join([chunk async for chunk in response.aiter_raw()])
            return response, raw

    return asyncio.run(run())


# Each line but the last block as tritonserver 2.51 answers it.
@pytest.mark.parametrize(
    ("header", "encoding"),
    [
        (b"gzip", b"gzip"),
        (b"deflate", b"deflate"),
        (b"gzip, deflate", b"gzip"),
        (b"deflate,gzip", b"deflate"),
        (b"deflate\t,gzip;q=0.5", b"deflate"),
        (b"gzip;q=0.5, deflate;q=0.9", b"deflate"),
        (b"deflate;q=0.5,gzip;q=0.5", b"deflate"),
        (b"gzip;q=1.5, deflate", b"gzip"),
        (b"gzip;foo=1;q=0.1, deflate;q=0.5", b"deflate"),
        (b"gzip;Q=0.1,deflate;q=0.5", b"deflate"),
        (b",,gzip", b"gzip"),
        (b"br, zstd, gzip;q=0.1", b"gzip"),
        (b"*;q=1,gzip;q=0.5", b"gzip"),
        (b"gzip, identity;q=0", b"gzip"),
        (b"gzip;q=0.5,identity;q=0.5", b"gzip"),
        (b"gzip;q=0,deflate", b"deflate"),
        (b"", b""),
        (b"*", b""),
        (b"br", b""),
        (b"GZIP", b""),
        (b"x-gzip", b""),
        (b"gzip;q=0", b""),
        (b"gzip;q=0.000", b""),
        (b"gzip;q=", b""),
        (b"gzip;q=-1", b""),
        (b"gzip;q=abc", b""),
        (b"gzip deflate", b""),
        (b"identity, gzip", b""),
        (b"gzip;q=0.8, identity;q=0.9", b""),
        # It takes white space before a quality for another word, and does not compress.
        (b"gzip; q=0.5, deflate; q=0.7", b"deflate"),
        (b"gzip;q=nan", b""),
        (b"x" * 300 + b", gzip", b""),
        (b"\xff;q=\xff, gzip", b"gzip"),
    ],
)
def test_which_encoding_a_caller_gets(header: bytes, encoding: bytes) -> None:
    assert accepted(header) == encoding


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("document", [BODY, BINARY], ids=["json", "binary"])
def test_an_inference_is_compressed_and_its_header_length_is_not_of_that(encoding: str, document: Any) -> None:
    plain, body = ask("identity", document)
    response, raw = ask(encoding, document)
    assert "content-encoding" not in plain.headers
    assert response.headers["content-encoding"] == encoding
    assert int(response.headers["content-length"]) == len(raw)
    assert (gzip.decompress if encoding == "gzip" else zlib.decompress)(raw) == body
    length = plain.headers.get("inference-header-content-length")
    assert response.headers.get("inference-header-content-length") == length
    assert (length is not None) == (document is BINARY)
    assert "vary" not in response.headers


def test_of_two_headers_the_first_counts() -> None:
    response, _ = ask([("accept-encoding", "deflate"), ("accept-encoding", "gzip")])
    assert response.headers["content-encoding"] == "deflate"


@pytest.mark.parametrize(
    ("document", "path"),
    [({}, PATH), (BODY, "/v2/models/other/infer"), (BODY, "/v1"), (BODY, "/v2/models/twice/config")],
)
def test_errors_and_other_calls_are_not_compressed(document: Any, path: str) -> None:
    response, raw = ask("gzip", document, path)
    assert "content-encoding" not in response.headers
    msgspec.json.decode(raw)


@pytest.mark.parametrize("size", [0, 1, 300, 511, 512, 40_000, 1 << 20])
@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_what_is_compressed_comes_back(size: int, encoding: bytes) -> None:
    body = np.random.default_rng(size).bytes(size // 2) + bytes(size - size // 2)

    async def run() -> None:
        packed = await deflated(body, encoding)
        assert (gzip.decompress if encoding == b"gzip" else zlib.decompress)(packed) == body
        assert await inflated(packed, encoding, size) == body
        if size:
            with pytest.raises(TooLarge, match=f"at most {size - 1} bytes after"):
                await inflated(packed, encoding, size - 1)
            with pytest.raises(BadRequest, match="cut short"):
                await inflated(packed[:-1], encoding, size)

    asyncio.run(run())


def test_one_frame_under_the_name_of_the_other_is_told() -> None:
    assert inflated_now(gzip.compress(b"hi"), b"deflate", 9) == inflated_now(zlib.compress(b"hi"), b"gzip", 9) == b"hi"


def test_a_large_body_keeps_nobody_waiting() -> None:
    """A bomb of a few kilobytes and an answer of 16 MiB: the loop's longest turn is a fraction of the work."""
    bomb = gzip.compress(bytes(64 << 20))
    body = np.arange(4 << 20).astype("<f4").tobytes()

    async def longest(work: Any) -> tuple[float, float]:
        began = last = time.perf_counter()
        most = 0.0
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            most, last = max(most, now - last), now
        task.result()
        return most, last - began

    async def run() -> None:
        for work in (lambda: inflated(bomb, b"gzip", 64 << 20), lambda: deflated(body, b"gzip")):
            turns = [await longest(work()) for _ in range(3)]  # the machine may be busy with something else
            assert min(most / whole for most, whole in turns) < 0.5, turns

    asyncio.run(run())

"""What is refused by bounds, what is not even of its type, and errors that are too long to be told."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any

import grpc
import pytest

from backends.errors import BackendFailed, BadRequest, Malformed
from backends.kserve_json import read_request
from backends.request import Request
from backends.triton_grpc import TritonGrpc
from tests.support.strategies import call

GOOD = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (
            {"inputs": [{"name": f"n{i}", "datatype": "FP32", "shape": [1], "data": [1]} for i in range(1025)]},
            "1024 inputs",
        ),
        ({"inputs": [GOOD], "outputs": [{"name": "y"}] * 1025}, "1024 inputs and as many outputs"),
        ({"inputs": [GOOD], "parameters": {str(i): i for i in range(1025)}}, "at most 1024 parameters, got 1025"),
        ({"inputs": [{**GOOD, "name": "n" * 1025}]}, "a name of at most 1024 characters, got 1025"),
        ({"inputs": [GOOD], "outputs": [{"name": "n" * 1025}]}, "a name of at most 1024 characters, got 1025"),
        ({"inputs": [GOOD], "parameters": {"a": [1]}}, "expected a bool, a number or a string, got [1]"),
        ({"inputs": [{**GOOD, "parameters": {"a": None}}]}, "expected a bool, a number or a string, got None"),
        (
            {"inputs": [{**GOOD, "parameters": {"binary_data_size": 4}}]},
            "expected either 'data' or a 'binary_data_size'",
        ),
    ],
    ids=range(8),
)
def test_what_contradicts_a_bound_is_a_bad_request_and_not_malformed(document: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as raised:
        read_request(json.dumps(document).encode(), None)
    assert words in raised.value.message
    assert not isinstance(raised.value, Malformed)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"inputs": 1},
        {"inputs": [{**GOOD, "shape": [-1]}]},
        {"inputs": [{**GOOD, "shape": ["1"]}]},
        {"inputs": [{**GOOD, "data": ["a"]}]},
        {"inputs": [{**GOOD, "data": [1, 2]}]},
        {"inputs": [GOOD], "parameters": {"priority": "high"}},
        {"inputs": [GOOD], "outputs": [{"name": "y", "parameters": {"classification": -1}}]},
    ],
    ids=range(8),
)
def test_what_is_not_of_its_type_is_malformed(document: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        read_request(json.dumps(document).encode(), None).inputs.decoded  # noqa: B018


def test_reserved_names_mean_something_where_they_do_only() -> None:
    inputs = [{**GOOD, "parameters": {"priority": "high", "classification": "none"}}]
    read_request(json.dumps({"inputs": inputs, "parameters": {"classification": "none"}}).encode(), None)


def test_an_error_that_grpc_drops_for_its_length_is_not_taken_for_busy() -> None:
    class Server(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(self._fail)

        async def _fail(self, data: bytes, context: Any) -> bytes:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "x" * 100_000)
            raise AssertionError("abort raises")

    async def main() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Server(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        client = TritonGrpc(f"127.0.0.1:{port}", now=time.monotonic, connect_timeout=2, max_message_bytes=1 << 20)
        try:
            with pytest.raises(BackendFailed, match="an error too long") as raised:
                await client(Request(model="m", content=call([1.0]), deadline=math.inf))
            assert (raised.value.status, raised.value.grpc) == (grpc.StatusCode.UNKNOWN.value[0], True)
        finally:
            await client.close()
            await server.stop(0)

    asyncio.run(main())


@pytest.mark.parametrize("more", [b"1", b"NaN"])
def test_data_that_is_null_is_malformed_and_not_missing(more: bytes) -> None:
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[3],"data":null}],"more":%b}' % more
    with pytest.raises(Malformed):
        read_request(body, None).inputs.decoded  # noqa: B018

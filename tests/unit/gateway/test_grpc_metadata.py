"""Metadata, trailers and statuses through the edge and our client, compared with the same call straight at it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from backends.request import Request
from backends.triton_grpc import TritonGrpc
from backends.triton_http import TritonHttp
from gateway import respond
from gateway.admit import InFlight
from gateway.body import Bodies
from gateway.http import HttpEdge
from policies.spec import Limits
from tests.support.services import echo
from tests.unit.backends.grpc_peer import REPLY, SERVICE, backend
from tests.unit.backends.http_peer import AGAIN, REQUEST, Peer
from tests.unit.gateway.grpc_edge import edge, infer_message

SENT = (
    ("authorization", "Bearer t"), ("twice", "1"), ("twice", "2, 3"), ("k-bin", b"\0\xff"), ("k-bin", b""),
    ("with-space", "a b"), ("percent", "%41"),
)  # fmt: skip
OURS = (("headrace-tenant", "t"), ("te", "trailers"))
INITIAL = (("endpoint-load-metrics", "cpu=1"), ("i", "1"), ("i", "2"), ("i-bin", b"\xfe"))
TRAILING = (("t", "a"), ("t", "b"), ("t-bin", b"\0\1"), ("grpc-status-details-bin", b"\x08\x03"))


def pairs(metadata: Any) -> list[tuple[str, Any]]:
    """What an application put in, in order: gRPC's own keys and the decision left out."""
    return [
        (k, v)
        for k, v in metadata or ()
        if not k.startswith("headrace-") and (not k.startswith("grpc-") or k == "grpc-status-details-bin")
    ]


async def outcome(channel: Any, method: str, message: bytes, metadata: Any = ()) -> list[Any]:
    """All that a caller sees of a call: replies, code, text, metadata before and after."""
    call = channel.stream_stream(SERVICE + method)(iter([message]), timeout=10, metadata=metadata)
    replies: list[bytes] = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        replies += [reply async for reply in call]
    return [
        len(replies),
        await call.code(),
        await call.details(),
        pairs(await call.initial_metadata()),
        pairs(await call.trailing_metadata()),
    ]


def straight(client: TritonGrpc) -> Any:
    return grpc.aio.insecure_channel(client._address)


# A stream of inferences that fails tells so in a message.
@pytest.mark.parametrize(
    ("method", "fails"),
    [
        ("ModelInfer", False),
        ("ModelConfig", False),
        ("ModelStreamInfer", False),
        ("ModelInfer", True),
        ("ModelConfig", True),
    ],
)
def test_metadata_crosses_both_ways_as_it_is(method: str, fails: bool) -> None:
    async def main() -> None:
        seen: list[list[tuple[str, Any]]] = []

        async def script(messages: AsyncIterator[bytes], context: Any) -> None:
            seen.append(sorted((k, v) for k, v in context.invocation_metadata() if k != "user-agent"))
            await anext(messages)
            await context.send_initial_metadata(INITIAL)
            context.set_trailing_metadata(TRAILING)
            if not fails:
                await context.write(REPLY)
            else:
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such model", TRAILING)

        async with backend(script) as client, edge(client, respond.HEADRACE.grpc) as setup, straight(client) as direct:
            expected = await outcome(direct, method, infer_message(), SENT)
            got = await outcome(setup.channel, method, infer_message(), SENT + OURS)
            if fails:  # a status may come without metadata before it: then all of it comes with the status
                expected[3:] = [sorted(expected[3] + expected[4], key=str)]
                got[3:] = [sorted(got[3] + got[4], key=str)]
            assert got == expected
            assert seen[1] == seen[0] == sorted(SENT)
            assert not setup.reported

    asyncio.run(main())


TEXTS = ["plain", "", "two\nlines\r\n\tand a tab", "100 % %41 \u00fc\u20ac\U0001f600", " around ", "x" * 7000]


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_and_text_is_kept(code: grpc.StatusCode) -> None:
    async def main() -> None:
        async def script(messages: AsyncIterator[bytes], context: Any) -> None:
            await anext(messages)
            await context.abort(code, text, (("grpc-status-details-bin", b"\0"),))

        async with backend(script) as client, edge(client, respond.HEADRACE.grpc) as setup, straight(client) as direct:
            for text in TEXTS:  # noqa: B007 - the script says it
                for method in ("ModelInfer", "ModelConfig"):
                    got = await outcome(setup.channel, method, infer_message())
                    assert got == await outcome(direct, method, infer_message())
            text = "\u00fc" * 4000  # direct, this one is lost with its code
            cut = await outcome(setup.channel, "ModelInfer", infer_message())
            assert (cut[1], cut[2]) == (code, "\u00fc" * 1194)

    asyncio.run(main())


def test_a_head_of_many_entries_is_taken_or_refused_but_not_by_chance() -> None:
    async def main() -> None:
        async def service(request: Request) -> Any:
            return echo(request)

        async with edge(service) as setup:
            many = tuple((f"k{i}", "x" * 90) for i in range(300))  # 38 KiB as HTTP/2 counts them
            for _ in range(20):
                assert (await outcome(setup.channel, "ModelInfer", infer_message(), many))[1] is grpc.StatusCode.OK
            large = (("k", "x" * 70_000),)
            assert (await outcome(setup.channel, "ModelInfer", infer_message(), large))[1] is (
                grpc.StatusCode.RESOURCE_EXHAUSTED
            )

    asyncio.run(main())


# From one protocol to the other.

ASKED = b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[1]}]}'
JSON = b'{"model_name":"m","outputs":[{"name":"y","datatype":"INT8","shape":[1],"data":[7]}]}'


async def asked_over_http(service: Any, headers: dict[str, str]) -> httpx.Response:
    app = HttpEdge(
        service, now=asyncio.get_running_loop().time, bodies=Bodies(Limits, InFlight()), ready=lambda: True,
        decision_headers=respond.decision_headers, refused=lambda failure: None, report=lambda error: None,
    )  # fmt: skip
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as client:  # type: ignore[arg-type]
        return await client.post("/v2/models/m/infer", content=ASKED, headers=headers)


@pytest.mark.parametrize("fails", [False, True])
def test_a_grpc_backends_metadata_are_headers_to_an_http_caller(fails: bool) -> None:
    async def main() -> None:
        seen: list[tuple[str, Any]] = []

        async def script(messages: AsyncIterator[bytes], context: Any) -> None:
            seen.extend(context.invocation_metadata())
            await anext(messages)
            odd = (("content-type", "text/html"), ("inference-header-content-length", "3"), ("date", "never"))
            context.set_trailing_metadata(TRAILING + odd)
            await context.send_initial_metadata(INITIAL)
            if fails:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not\nnow", TRAILING)
            await context.write(REPLY)

        async with backend(script) as client:
            response = await asked_over_http(client, {"x-own": "1", "raw-bin": "AP8"})
        assert response.status_code == (400 if fails else 200)
        assert response.json() == ({"error": "not now"} if fails else response.json())
        assert response.headers["endpoint-load-metrics"] == "cpu=1"
        assert response.headers.get_list("i") == ["1", "2"]
        assert (response.headers["t-bin"], response.headers["i-bin"]) == ("AAE", "/g")
        assert response.headers["content-type"] == "application/json"
        assert not {"inference-header-content-length", "date", "grpc-status-details-bin"} & set(response.headers)
        assert {("x-own", "1"), ("raw-bin", b"\0\xff")} <= set(seen)

    asyncio.run(main())


@pytest.mark.parametrize("status", [200, 404])
def test_an_http_backends_headers_are_metadata_to_a_grpc_caller(status: int) -> None:
    async def main() -> None:
        head = (
            b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: x-hop\r\n"
            b"Endpoint-Load-Metrics: cpu=1\r\nX-Hop: 1\r\nDate: never\r\nServer: s\r\nHeadrace-Tier: x\r\n\r\n"
        )
        async with Peer([REQUEST, head % (status, len(JSON)) + JSON, AGAIN]) as peer:
            async with edge(TritonHttp(peer.client(), time.monotonic), respond.HEADRACE.grpc) as setup:
                told = await outcome(setup.channel, "ModelInfer", infer_message(), SENT + OURS)
            (request,) = peer.lines[0].requests
        lines = request.split(b"\r\n\r\n")[0].split(b"\r\n")
        for line in (b"authorization: Bearer t", b"twice: 1, 2, 3", b"k-bin: AP8, ", b"percent: %41"):
            assert line in lines
        # Ours alone: how long the caller waits still.
        (left,) = [line for line in lines if line.startswith((b"headrace-", b"te:"))]
        name, milliseconds = left.split(b": ")
        assert name == b"headrace-timeout-ms"
        assert 5_000 < int(milliseconds) < 10_200  # of ten seconds, as gRPC rounds them
        assert told[1] is (grpc.StatusCode.OK if status == 200 else grpc.StatusCode.NOT_FOUND)
        assert told[3] + told[4] == [("endpoint-load-metrics", "cpu=1")]

    asyncio.run(main())

"""The gRPC client against scripted servers on real sockets: what each ending of a call means to the caller."""

from __future__ import annotations

import asyncio
import math
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from backends.errors import BackendFailed, BadReply, ConnectionLost, Expired, Rejected, Unreachable, Unsupported
from backends.kserve_grpc import read_request
from backends.proto import kserve_pb2 as pb
from backends.request import HttpCall, Infer, Relay, Request
from backends.triton_grpc import TritonGrpc
from tests.unit.backends.grpc_peer import (
    REPLY,
    aborting,
    answering,
    ask,
    backend,
    hanging,
    relay,
    told,
)


def test_infer_sends_names_headers_and_deadline() -> None:
    async def main() -> None:
        seen: dict[str, Any] = {}

        async def script(messages: AsyncIterator[bytes], context: Any) -> None:
            seen["message"] = await anext(messages)
            seen["metadata"] = dict(context.invocation_metadata())
            seen["left"] = context.time_remaining()
            await context.write(REPLY)

        async with backend(script) as client:
            headers = {"traceparent": "00-1", "Odd": "\n", "a-bin": b"\xff", "te": "trailers"}
            reply = await client(ask(headers=headers, deadline=time.monotonic() + 5))
            assert reply.answer.outputs.decoded[0].data == b"\7"
            await client(ask())
        model, version, infer = read_request(seen["message"])
        assert (model, version, infer.id) == ("m", "2", "7")
        assert seen["left"] is None  # the second call had no deadline

        async with backend(script) as client:
            await client(ask(headers=headers, deadline=time.monotonic() + 5))
        assert 4 < seen["left"] <= 5 * 1.01  # gRPC rounds a timeout up when it writes it
        given = {k: v for k, v in seen["metadata"].items() if k != "user-agent"}
        assert given == {"traceparent": "00-1", "a-bin": b"\xff"}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "text", "fault", "shown"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size", Rejected, "Exceeds maximum queue size"),
        (grpc.StatusCode.UNAVAILABLE, "[request id: 7] Request timeout expired", Rejected, "timeout expired"),
        (grpc.StatusCode.UNAVAILABLE, "model is not ready", BackendFailed, "model is not ready"),
        # A backend that is a proxy itself says this of its own backend: our channel is up, so it is its answer.
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses", BackendFailed, "failed to connect"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", Expired, "deadline exceeded in backend"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "its own deadline", BackendFailed, "its own deadline"),
        (grpc.StatusCode.INVALID_ARGUMENT, "bad\n shape\n", BackendFailed, "bad shape"),
        (grpc.StatusCode.NOT_FOUND, "", BackendFailed, "NOT_FOUND"),
        (grpc.StatusCode.CANCELLED, "by the model", BackendFailed, "by the model"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_a_status_means(
    code: grpc.StatusCode, text: str, fault: type[Exception], shown: str, streamed: bool
) -> None:
    async def main() -> None:
        async with backend(aborting(code, text)) as client:
            with pytest.raises(fault, match=shown) as raised:
                await client(relay("ModelConfig", told(b"")) if streamed else ask())
            if isinstance(raised.value, BackendFailed):
                assert (raised.value.status, raised.value.grpc) == (code.value[0], True)

    asyncio.run(main())


def test_expired_before_it_is_sent_and_while_it_runs() -> None:
    async def main() -> None:
        async with backend(hanging) as client:
            with pytest.raises(Expired, match="backend"):
                await client(ask(deadline=time.monotonic() - 1))
            for request in (ask, lambda **f: relay("ModelStreamInfer", told(b"x"), **f)):
                with pytest.raises(Expired, match="backend"):
                    await client(request(deadline=time.monotonic() + 0.05))

    asyncio.run(main())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_cancelled_caller_cancels_the_call_at_the_backend(streamed: bool) -> None:
    async def main() -> None:
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def script(messages: AsyncIterator[bytes], context: Any) -> None:
            await anext(messages)
            began.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async with backend(script) as client:
            task = asyncio.ensure_future(client(relay("ModelStreamInfer", told(b"x")) if streamed else ask()))
            await asyncio.wait_for(began.wait(), 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(cancelled.wait(), 2)

    asyncio.run(main())


def test_closing_ends_calls_as_lost_not_as_cancelled() -> None:
    async def main() -> None:
        async with backend(hanging) as client:
            calls = [
                asyncio.ensure_future(client(request)) for request in (ask(), relay("ModelStreamInfer", told(b"x")))
            ]
            await asyncio.sleep(0.1)
            await client.close()
            for call in calls:
                with pytest.raises(ConnectionLost, match="closed during the call"):
                    await asyncio.wait_for(call, 2)
            with pytest.raises(Unreachable, match="closed"):
                await client(ask())
            assert await client.unready("", math.inf, {})

    asyncio.run(main())


def test_nobody_listens() -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound but not listening
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            client = TritonGrpc(address, now=time.monotonic, connect_timeout=2, max_message_bytes=1 << 20)
            for request in (ask(), ask(), relay("ModelConfig", told(b""))):
                with pytest.raises(Unreachable, match="failed to connect to all addresses"):
                    await client(request)
            assert await client.unready("", time.monotonic() + 1, {})
            await client.close()

    asyncio.run(main())


def test_a_silent_peer_costs_the_connect_timeout_only() -> None:
    async def main() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            client = TritonGrpc(address, now=time.monotonic, connect_timeout=0.2, max_message_bytes=1024)
            began = time.monotonic()
            faults = await asyncio.gather(*(client(ask()) for _ in range(5)), return_exceptions=True)
            assert {type(fault) for fault in faults} == {Unreachable}
            await client.close()
            client = TritonGrpc(address, now=time.monotonic, connect_timeout=20, max_message_bytes=1024)
            with pytest.raises(Expired):
                await client(ask(deadline=time.monotonic() + 0.05))
            assert time.monotonic() - began < 1
            await client.close()

    asyncio.run(main())


# A server in a process of its own, because only a killed process leaves its connections as a crash does.
DOOMED = """
import asyncio, grpc
class Methods:
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(self.run)
    async def run(self, messages, context):
        async for message in messages:
            await context.write(message)
        await asyncio.sleep(60)
async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Methods(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()
asyncio.run(main())
"""


def test_a_backend_that_dies() -> None:
    async def main() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", DOOMED, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        client = TritonGrpc(f"127.0.0.1:{port}", now=time.monotonic, connect_timeout=2, max_message_bytes=1 << 20)
        infer = asyncio.ensure_future(client(ask()))
        reply = await client(relay("ModelStreamInfer", told(b"x")))
        assert isinstance(reply.body, Relay)
        assert not isinstance(reply.body.body, bytes)
        chunks = reply.body.body
        assert await anext(chunks) == b"x"
        process.kill()
        await process.wait()
        with pytest.raises(ConnectionLost):
            await infer
        with pytest.raises(ConnectionLost):
            await anext(chunks)
        # It takes a moment until the channel knows; whatever is said until then, it never claims success.
        with pytest.raises((ConnectionLost, Unreachable)):
            await client(ask())
        await asyncio.sleep(0.05)
        with pytest.raises(Unreachable):
            await client(ask())
        await client.close()

    asyncio.run(main())


def test_replies_that_break_the_protocol_or_the_limit() -> None:
    async def main() -> None:
        async def garbage(messages: AsyncIterator[bytes], context: Any) -> None:
            await context.write(b"\x0b")

        async def large(messages: AsyncIterator[bytes], context: Any) -> None:
            await context.write(bytes(5000))

        async with backend(garbage) as client:
            with pytest.raises(BadReply, match="ModelInferResponse"):
                await client(ask())
        async with backend(large, limit=4000) as client:
            with pytest.raises(BadReply, match="at most 4000 bytes"):
                await client(ask())

    asyncio.run(main())


def test_ready_and_what_cannot_be_relayed() -> None:
    async def main() -> None:
        async def script(messages: AsyncIterator[bytes], context: Any) -> None:
            await context.write(pb.ServerReadyResponse(ready=ready).SerializeToString())

        async with backend(script) as client:
            for ready in (True, False, True):
                assert (await client.unready("", time.monotonic() + 1, {}) == "") is ready
            assert await client.unready("", time.monotonic() - 1, {})
            with pytest.raises(Unsupported):
                await client(Request(model="m", content=HttpCall("GET", "/v2")))
        async with backend(aborting(grpc.StatusCode.UNAVAILABLE, "starting")) as client:
            assert await client.unready("", math.inf, {})

    asyncio.run(main())


def test_many_at_once_over_one_channel() -> None:
    async def main() -> None:
        async with backend(answering) as client:
            replies = await asyncio.gather(*(client(ask()) for _ in range(300)))
            assert len(replies) == 300

    asyncio.run(main())


def test_a_backend_that_ends_its_connections_by_age_loses_nothing_that_it_did_not_execute() -> None:
    """GOAWAY in the middle of load: gRPC sends again what lies beyond it; a reply that is lost to it was executed."""

    async def main() -> None:
        ran: Counter[bytes] = Counter()

        async def script(messages: AsyncIterator[bytes], context: Any) -> None:
            ran[await anext(messages)] += 1
            peers.add(context.peer())
            await asyncio.sleep(0.01)
            await context.write(REPLY)

        async def one(client: TritonGrpc, number: int) -> None:
            content = ask().infer
            try:
                await client(ask(content=Infer(content.inputs, id=str(number))))
            except ConnectionLost:
                lost.append(number)

        peers: set[str] = set()
        lost: list[int] = []
        async with backend(script, options=[("grpc.max_connection_age_ms", 100)]) as client:
            for i in range(0, 1600, 16):
                await asyncio.gather(*(one(client, i + j) for j in range(16)))
        assert len(peers) > 2
        assert (len(ran), set(ran.values())) == (1600, {1})
        assert len(lost) < 160

    asyncio.run(main())

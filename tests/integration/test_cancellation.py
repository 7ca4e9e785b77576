"""Callers that leave, or whose time is over: a backend that records its calls saw what it should. The real command."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest

from backends.proto import kserve_pb2 as pb
from tests.support.leaving import HttpCaller, infer, post, stream
from tests.support.recorder import Recorder, recording
from tests.support.serve import Served, free_port, served
from tests.support.waiting import until

POLICY = """
backends:
  alone: {{endpoints: ["grpc://{address}"], model: m}}
  merged: {{endpoints: ["grpc://{address}"], model: m, batch: {{max_rows: 8, slots: 1, queue_time: 30s}}}}
  hurried: {{endpoints: ["grpc://{address}"], model: m, first_byte_timeout: 300ms}}
  short: {{endpoints: ["grpc://{address}"], model: m, stream_timeout: 500ms}}
routes:
  alone: {{backend: alone}}
  merged: {{backend: merged}}
  hurried: {{backend: hurried}}
  short: {{backend: short}}
"""
# How soon a departure must be noticed, and what this machine may add while others are busy on it.
NOTICED = 0.1 + 0.1


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Served]]:
    """A gateway before a port at which each test has a recorder of its own."""
    folder, port = tmp_path_factory.mktemp("cancellation"), free_port()
    policy = folder / "policy.yaml"
    policy.write_text(POLICY.format(address=f"127.0.0.1:{port}"))
    with served(folder, str(policy), wait=(503,)) as gateway:
        yield port, gateway


@asynccontextmanager
async def before(place: tuple[int, Served], seconds: float) -> AsyncIterator[tuple[Recorder, Served, grpc.aio.Channel]]:
    """A recorder whose calls take so long behind the gateway, and a gRPC channel to it."""
    port, gateway = place
    async with recording(seconds, port) as recorder, grpc.aio.insecure_channel(gateway.grpc) as channel:
        await channel.channel_ready()
        await until(lambda: all_ready(gateway))
        yield recorder, gateway, channel


def all_ready(gateway: Served) -> bool:
    backends = httpx.get(f"http://{gateway.admin}/backends").json()
    return all(endpoint["ready"] is True for backend in backends.values() for endpoint in backend["endpoints"])


class GrpcCaller:
    def __init__(self, call: Any) -> None:
        self.call = call

    def leave(self) -> None:
        self.call.cancel()


async def ask(how: str, gateway: Served, channel: grpc.aio.Channel, model: str, id: str = "") -> Any:
    if how == "grpc":
        return GrpcCaller(infer(channel, model, id))
    return await HttpCaller.ask(gateway.http, post(model, id))


@pytest.mark.parametrize("model", ["alone", "merged"])
@pytest.mark.parametrize("how", ["http", "grpc"])
def test_a_call_whose_caller_leaves_is_cancelled_at_the_backend(
    how: str, model: str, place: tuple[int, Served]
) -> None:
    async def main() -> None:
        async with before(place, 30) as (recorder, gateway, channel):
            caller = await ask(how, gateway, channel, model, "x")
            await until(lambda: recorder.running)
            left = time.monotonic()
            caller.leave()
            await until(lambda: not recorder.running)
            (call,) = recorder.calls
            assert (call.id, call.end) == ("x", "cancelled")
            assert call.ended - left < NOTICED
            await until(lambda: not in_flight(gateway))

    asyncio.run(main())


def in_flight(gateway: Served) -> float:
    return gateway.counters()["headrace_requests_in_flight"]


def test_a_stream_whose_caller_leaves_is_cancelled_at_the_backend(place: tuple[int, Served]) -> None:
    async def main() -> None:
        async with before(place, 0.02) as (recorder, _, channel):
            call = stream(channel, "alone", "s")
            for _ in range(3):
                await call.read()
            left = time.monotonic()
            call.cancel()
            await until(lambda: not recorder.running)
            assert recorder.calls[0].end == "cancelled"
            assert recorder.calls[0].ended - left < NOTICED

    asyncio.run(main())


@pytest.mark.parametrize("how", ["http", "grpc"])
def test_a_queued_row_whose_caller_leaves_is_never_sent(how: str, place: tuple[int, Served]) -> None:
    async def main() -> None:
        async with before(place, 0.5) as (recorder, gateway, channel):
            first = await ask("http", gateway, channel, "merged", "first")
            await until(lambda: recorder.running)
            gone = [await ask(how, gateway, channel, "merged", f"gone-{i}") for i in range(3)]
            stays = await ask("http", gateway, channel, "merged", "stays")
            await until(lambda: queued(gateway) == 4)
            for caller in gone:
                caller.leave()
            await until(lambda: queued(gateway) == 1)
            assert recorder.running == 1, "the queue was left before its slot was free"
            assert (await first.answer())[0] == (await stays.answer())[0] == 200
            assert [(call.id, call.rows) for call in recorder.calls] == [("first", 1), ("stays", 1)]
            assert recorder.ends("cancelled") == 0
            first.leave()
            stays.leave()

    asyncio.run(main())


def queued(gateway: Served) -> int:
    backends = httpx.get(f"http://{gateway.admin}/backends").json()
    return int(backends["merged"]["queue"]["rows"])


def test_a_shared_batch_goes_on_while_one_waits_and_is_cancelled_with_the_last(place: tuple[int, Served]) -> None:
    async def main() -> None:
        async with before(place, 0.6) as (recorder, gateway, channel):
            for stays in (True, False):
                recorder.calls.clear()
                first = await ask("http", gateway, channel, "merged")
                await until(lambda: recorder.running)
                members = [await ask("http", gateway, channel, "merged", f"{i}") for i in range(3)]
                others = [await ask("grpc", gateway, channel, "merged", f"g{i}") for i in range(3)]
                await until(lambda: len(recorder.calls) == 2)  # in one batch, once the first has ended
                assert recorder.calls[1].rows == 6
                for caller in members[1:] + others:
                    caller.leave()
                await asyncio.sleep(0.1)
                assert recorder.running == 1, "whoever leaves takes only its own row"
                if stays:
                    assert (await members[0].answer())[0] == 200
                left = time.monotonic()
                members[0].leave()
                first.leave()
                await until(lambda: not recorder.running)
                assert recorder.calls[1].end == ("answered" if stays else "cancelled")
                assert stays or recorder.calls[1].ended - left < NOTICED

    asyncio.run(main())


def test_what_is_left_of_a_deadline_reaches_the_backend_and_the_error_says_where_it_passed(
    place: tuple[int, Served],
) -> None:
    async def main() -> None:
        async with before(place, 1.0) as (recorder, gateway, channel):
            cases: list[tuple[tuple[str, ...], dict[str, int]]] = [
                (("headrace-timeout-ms: 300",), {}),
                ((), {"timeout": 300_000}),
                (("headrace-timeout-ms: 60000",), {"timeout": 300_000}),
            ]
            for headers, parameters in cases:
                caller = await HttpCaller.ask(gateway.http, post("alone", "x", *headers, **parameters))
                status, body = await caller.answer()
                caller.leave()
                assert (status, body) == (504, {"error": f"deadline exceeded in backend 'grpc://{recorder.address}'"})
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(channel, "alone", timeout=0.3)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: not recorder.running)
            assert recorder.ends("cancelled") == len(recorder.calls) == 4
            assert all(call.left is not None and 0.1 < call.left < 0.31 for call in recorder.calls), recorder.calls

            # In the queue: it never gets to the backend.
            recorder.calls.clear()
            first = await HttpCaller.ask(gateway.http, post("merged", "first"))
            await until(lambda: recorder.running)
            late = await HttpCaller.ask(gateway.http, post("merged", "late", "headrace-timeout-ms: 200"))
            began = time.monotonic()
            status, body = await late.answer()
            assert 0.1 < time.monotonic() - began < 0.5, "a timer of the gateway's own, while the backend is busy"
            assert status == 504
            assert body["error"].startswith("deadline exceeded in queue after ")
            assert (await first.answer())[0] == 200
            assert [call.id for call in recorder.calls] == ["first"]

            # On its way in: not even its body is waited for.
            slow = await HttpCaller.ask(gateway.http, post("alone", "slow", "headrace-timeout-ms: 150")[:-5])
            status, body = await slow.answer()
            assert (status, body["error"]) == (504, "deadline exceeded in edge, before all of the body had come")
            for caller in (first, late, slow):
                caller.leave()

    asyncio.run(main())


def test_each_limit_of_a_backend_gives_its_own_reason(place: tuple[int, Served]) -> None:
    async def main() -> None:
        async with before(place, 1.0) as (recorder, gateway, channel):
            name = f"'grpc://{recorder.address}'"
            caller = await HttpCaller.ask(gateway.http, post("hurried"))
            assert await caller.answer() == (504, {"error": f"{name} began no answer within 0.3 s"})
            caller.leave()
            # A stream of inferences tells in messages; how long it may be silent is its caller's affair.
            assert await told(stream(channel, "hurried")) == f"{name} began no answer within 0.3 s"
            recorder.seconds = 0.05
            assert await told(stream(channel, "short")) == f"{name} did not end its stream within 0.5 s"
            await until(lambda: not recorder.running)
            assert recorder.ends("cancelled") == 3

    asyncio.run(main())


async def told(call: Any) -> str:
    """The error that a stream of inferences comes to."""
    while True:
        answer = pb.ModelStreamInferResponse.FromString(await call.read())
        if answer.error_message:
            return answer.error_message

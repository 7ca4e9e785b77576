"""How the command ends: not ready first, then nothing new, what is in flight finished or, in the end, cut."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.support.leaving import HttpCaller, gateway, infer, post, stream
from tests.support.recorder import Recorder, recording
from tests.support.serve import Served, served
from tests.support.waiting import until

POLICY = """
backends: {{b: {{endpoints: ["grpc://{address}"], model: m}}}}
routes: {{r: {{backend: b}}}}
limits: {{drain: {drain}, drain_delay: {delay}}}
"""


@asynccontextmanager
async def before(
    folder: Path, seconds: float, drain: str, delay: str = "0s"
) -> AsyncIterator[tuple[Recorder, Served, grpc.aio.Channel]]:
    async with recording(seconds) as recorder:
        policy = POLICY.format(address=recorder.address, drain=drain, delay=delay)
        async with gateway(folder, policy) as served, grpc.aio.insecure_channel(served.grpc) as channel:
            await channel.channel_ready()
            yield recorder, served, channel


def status(served: Served, path: str) -> int:
    try:
        return httpx.get(f"http://{served.http}{path}", timeout=5).status_code
    except httpx.ConnectError:
        return 0


def test_what_is_in_flight_is_finished_and_nothing_new_is_taken(tmp_path: Path) -> None:
    async def main() -> None:
        async with before(tmp_path, 1.5, "20s") as (recorder, served, channel):
            idle = await HttpCaller.ask(served.http, post("r", "before"))
            first = await HttpCaller.ask(served.http, post("r", "http"))
            call = infer(channel, "r", "grpc")
            await until(lambda: recorder.running == 3)
            served.process.send_signal(signal.SIGTERM)
            await until(lambda: status(served, "/readyz") == 503)
            late = await HttpCaller.ask(served.http, post("r", "late"))
            assert await late.answer() == (503, {"error": "the gateway is shutting down"})
            assert await late.reader.read() == b"", "and its connection ends"
            with pytest.raises(grpc.aio.AioRpcError):
                await infer(channel, "r", "late")
            for caller in (idle, first):
                assert (await caller.answer())[0] == 200
                assert await caller.reader.read() == b""
                caller.leave()
            assert await call
            late.leave()
            assert await asyncio.to_thread(served.process.wait, 10) == 0
            assert [(call.id, call.end) for call in recorder.calls if call.id == "late"] == []

    asyncio.run(main())


def test_what_is_not_over_in_time_is_cut_with_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with before(tmp_path, 30, "700ms") as (recorder, served, channel):
            caller = await HttpCaller.ask(served.http, post("r"))
            call = infer(channel, "r")
            await until(lambda: recorder.running == 2)
            recorder.seconds = 0.05
            endless = stream(channel, "r")
            await endless.read()
            began = time.monotonic()
            served.process.send_signal(signal.SIGTERM)
            code, body = await caller.answer()
            assert 0.6 < time.monotonic() - began < 2.0
            assert code == 503
            assert body["error"].startswith("the gateway is shutting down, and this request was not over after ")
            for ending in (asyncio.ensure_future(to_its_end(endless)), call):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ending
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "the gateway is shutting down" in (caught.value.details() or "")
            await until(lambda: not recorder.running)
            assert recorder.ends("cancelled") == 3, "the backend knows, too"
            caller.leave()
            assert await asyncio.to_thread(served.process.wait, 10) == 0
            assert time.monotonic() - began < 5

    asyncio.run(main())


async def to_its_end(call: Any) -> None:
    while await call.read():
        pass


def test_a_stream_that_never_said_what_it_wants_holds_nothing_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with before(tmp_path, 0.01, "20s") as (_, served, channel):
            silent = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
            assert await infer(channel, "r")  # a round trip on the same connection, so that the stream is there, too
            began = time.monotonic()
            served.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(served.process.wait, 15) == 0
            assert time.monotonic() - began < 5
            silent.cancel()

    asyncio.run(main())


def test_a_delay_serves_as_before_but_is_not_ready_and_keeps_no_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with before(tmp_path, 0.01, "5s", "1s") as (_, served, channel):
            kept = await HttpCaller.ask(served.http, post("r"))
            assert (await kept.answer())[0] == 200
            began = time.monotonic()
            served.process.send_signal(signal.SIGTERM)
            await until(lambda: status(served, "/readyz") == 503)
            kept.writer.write(post("r"))
            fresh = await HttpCaller.ask(served.http, post("r"))
            for caller in (kept, fresh):
                assert (await caller.answer())[0] == 200
                assert await caller.reader.read() == b""
                caller.leave()
            assert await infer(channel, "r")
            assert time.monotonic() - began < 1.0
            assert await asyncio.to_thread(served.process.wait, 10) == 0
            assert time.monotonic() - began > 1.0
            assert status(served, "/readyz") == 0

    asyncio.run(main())


def test_a_body_that_still_comes_when_the_time_to_drain_is_over_is_told(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("backends: {b: {endpoints: [http://127.0.0.1:1]}}\nproxy: b\nlimits: {drain: 300ms}\n")
    with served(tmp_path, str(policy), wait=(503,)) as gateway:
        host, _, port = gateway.http.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as caller:
            caller.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            time.sleep(0.2)  # nothing tells that a head has come
            gateway.process.terminate()
            said = b"".join(iter(lambda: caller.recv(4096), b""))
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"not all of the body had come" in said
        assert gateway.process.wait(10) == 0

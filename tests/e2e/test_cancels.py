"""Storms: thousands of callers that leave at any moment, resets, a thousand at once. The installed command.

CI runs a tenth of what HEADRACE_SOAK=1 does.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx

from tests.support.leaving import HttpCaller, gateway, infer, post, stream
from tests.support.recorder import Recorder, recording
from tests.support.serve import Served
from tests.support.waiting import until

CANCELS = 10_000 if os.environ.get("HEADRACE_SOAK") else 1_000
AT_ONCE = 24  # more would be gone before anybody looks at them
# What an allocator keeps, and garbage that waits for its collection: after 20,000 cancels it grows no more. Whatever is
# left of each cancel, a task or a connection, would be more with 10,000 of them.
GROWTH = 16 << 20
POLICY = """
backends:
  alone: {{endpoints: ["grpc://{grpc}"], model: m}}
  merged: {{endpoints: ["grpc://{grpc}"], model: m, batch: {{max_rows: 8, slots: 2, queue_rows: 64}}}}
  plain: {{endpoints: ["http://{http}"], model: m}}
routes:
  alone: {{backend: alone}}
  merged: {{backend: merged}}
  plain: {{backend: plain}}
telemetry: {{access_log: false}}
"""
ANSWER = b'{"model_name":"m","model_version":"1","outputs":[{"name":"Y","datatype":"FP32","shape":[1,1],"data":[1.5]}]}'


class Plain:
    """A model server over HTTP; `running` are the inferences whose caller still waits."""

    def __init__(self) -> None:
        self.running = self.left = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError), closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int((b"0\r\n" + head.lower()).rpartition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                if not head.startswith(b"POST"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                await reader.readexactly(length)
                self.running += 1
                try:
                    async with asyncio.timeout(0.01):
                        await reader.read(1)
                    self.left += 1
                    return
                except TimeoutError:
                    kind = b"content-type: application/json"
                    writer.write(b"HTTP/1.1 200 OK\r\n%b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(ANSWER), ANSWER))
                finally:
                    self.running -= 1


@asynccontextmanager
async def before(folder: Path) -> AsyncIterator[tuple[Recorder, Plain, Served]]:
    plain = Plain()
    server = await asyncio.start_server(plain.serve, "127.0.0.1", 0)
    async with recording(0.01) as recorder:
        port = server.sockets[0].getsockname()[1]
        async with gateway(folder, POLICY.format(grpc=recorder.address, http=f"127.0.0.1:{port}")) as served:
            yield recorder, plain, served
    server.close()


def resident(served: Served) -> int:
    """Bytes of memory of the gateway's process."""
    return int(Path(f"/proc/{served.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sockets(served: Served) -> int:
    folder = Path(f"/proc/{served.process.pid}/fd")
    found = 0
    for entry in folder.iterdir():
        with suppress(OSError):
            found += os.readlink(entry).startswith("socket:")
    return found


def busy(served: Served) -> dict[str, float]:
    """What of the gateway is not at rest."""
    backends: dict[str, Any] = httpx.get(f"http://{served.admin}/backends").json()
    counts: dict[str, float] = {"requests": served.counters()["headrace_requests_in_flight"]}
    for name, backend in backends.items():
        counts[f"{name} in flight"] = sum(endpoint["in_flight"] for endpoint in backend["endpoints"])
        counts |= {f"{name} {key}": value for key, value in backend.get("queue", {}).items()}
    return {key: value for key, value in counts.items() if value}


async def leave(chance: random.Random, served: Served, channel: grpc.aio.Channel) -> str:
    """One caller that leaves; what it was, and when."""
    kind = chance.choice(("http", "http", "grpc", "grpc", "stream"))
    model = chance.choice(("alone", "merged", "plain")) if kind == "http" else chance.choice(("alone", "merged"))
    # At once, a moment later, in the middle of it all, or when it may be over.
    moment = chance.choice((0.0, 0.0, chance.uniform(0, 0.003), chance.uniform(0, 0.02), chance.uniform(0, 0.05)))
    if kind == "http":
        caller = await HttpCaller.ask(served.http, post(model))
        await asyncio.sleep(moment)
        caller.leave(reset=chance.random() < 0.5)
        return kind
    call = infer(channel, model) if kind == "grpc" else stream(channel, model)
    if kind == "stream" and chance.random() < 0.5:
        await call.read()
    await asyncio.sleep(moment)
    call.cancel()
    return kind


def test_a_storm_of_cancels_leaves_nothing_behind(tmp_path: Path) -> None:
    chance = random.Random(4)

    async def storm(served: Served, channel: grpc.aio.Channel, count: int) -> Counter[str]:
        left = [count]
        kinds: Counter[str] = Counter()

        async def callers() -> None:
            while left[0] > 0:
                left[0] -= 1
                kinds[await leave(chance, served, channel)] += 1

        await asyncio.gather(*(callers() for _ in range(AT_ONCE)))
        return kinds

    async def main() -> None:
        async with before(tmp_path) as (recorder, plain, served), grpc.aio.insecure_channel(served.grpc) as channel:
            await storm(served, channel, CANCELS // 5)
            at_first = resident(served)
            kinds = await storm(served, channel, CANCELS)
            assert min(kinds.values()) > CANCELS // 10
            rest = await asyncio.to_thread(settled, served)
            assert rest == {}, rest
            await until(lambda: not recorder.running and not plain.running)
            assert recorder.ends("cancelled") > CANCELS // 20, "departures were told on over gRPC"
            assert plain.left > CANCELS // 100, "and over HTTP"
            # Idle connections to the backends go after 4 s; what the gateway keeps is its listeners and a few.
            await until(lambda: sockets(served) < 40, 15)
            grown = resident(served) - at_first
            assert grown < GROWTH, f"{grown} bytes more than after the first fifth"

            for model in ("alone", "merged", "plain"):
                caller = await HttpCaller.ask(served.http, post(model))
                assert (await asyncio.wait_for(caller.answer(), 5))[0] == 200
                caller.leave()
            assert await asyncio.wait_for(infer(channel, "alone"), 5)
            log = served.logged()
            assert "internal error" not in log, log[-3000:]
            assert "Traceback" not in log, log[-3000:]
            assert sum(v for k, v in served.counters().items() if k.startswith("headrace_internal_errors_total")) == 0

    asyncio.run(main())


def settled(served: Served) -> dict[str, float]:
    end = time.monotonic() + 10
    while (left := busy(served)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def test_a_thousand_at_once_are_all_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with before(tmp_path) as (recorder, _, served), grpc.aio.insecure_channel(served.grpc) as channel:
            recorder.seconds = 2.0
            callers = [asyncio.create_task(HttpCaller.ask(served.http, post("alone"))) for _ in range(500)]
            calls = [infer(channel, "alone") for _ in range(500)]
            waiting = await asyncio.gather(*callers)
            answers = await asyncio.gather(*(caller.answer() for caller in waiting), *calls)
            assert [status for status, _ in answers[:500]] == [200] * 500
            assert all(answers[500:])
            for caller in waiting:
                caller.leave()

            # More than a queue holds: who is refused is told why, and when to come again; nobody is forgotten.
            recorder.seconds = 0.05
            replies = await asyncio.to_thread(asked_at_once, served)
            assert set(replies) == {200, 429}
            assert await asyncio.to_thread(settled, served) == {}

    asyncio.run(main())


def asked_at_once(served: Served) -> Counter[int]:
    """Statuses of 300 requests at the same time to a queue of 64 rows."""

    async def main() -> list[httpx.Response]:
        body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1.5]}]}
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=30) as client:
            url = f"http://{served.http}/v2/models/merged/infer"
            return await asyncio.gather(*(client.post(url, json=body) for _ in range(300)))

    replies = asyncio.run(main())
    for reply in replies:
        if reply.status_code != 200:
            assert "queue" in reply.json()["error"]
            assert int(reply.headers["retry-after"]) >= 1
    return Counter(reply.status_code for reply in replies)


def test_a_storm_of_resets_takes_no_memory(tmp_path: Path) -> None:
    heads = post("alone").partition(b"content-length")[0]
    texts = (b"", heads, heads + b"content-length: 50\r\n\r\nhe", post("alone"), post("merged") * 20)

    def storm(served: Served, times: int) -> None:
        host, _, port = served.http.rpartition(":")
        for turn in range(times):
            client = socket.create_connection((host, int(port)))
            client.sendall(texts[turn % len(texts)])
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()

    async def main() -> None:
        async with before(tmp_path) as (_, _, served):
            await asyncio.to_thread(storm, served, CANCELS // 2)
            at_first = resident(served)
            await asyncio.to_thread(storm, served, CANCELS)
            assert await asyncio.to_thread(settled, served) == {}
            grown = resident(served) - at_first
            assert grown < GROWTH, f"{grown} bytes more than after the first third"

    asyncio.run(main())

"""A soak: mixed requests at concurrency 64; 5 % leave, 1 % are malformed. All are answered right, and nothing stays.

The long form (`make soak`) makes 200,000 requests; here it is a tenth. Memory is judged after the first tenth of the
run, when every pool and buffer has had its use.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import uvloop

from tests.support.serve import Served, served, within
from tests.support.soak import Caller
from tests.support.triton import triton_with

REQUESTS = 200_000 if os.environ.get("HEADRACE_SOAK") else 20_000
CONCURRENCY = 64
# What memory may have grown by since the first tenth. The short form's is too short to fill gRPC's pools.
GROWTH = 0.05 if os.environ.get("HEADRACE_SOAK") else 0.1

POLICY = """\
telemetry: {{access_log: false, traces: {{keep: 16}}}}
x-triton: &triton {{http: "http://{http}", grpc: "{grpc}"}}
backends:
  http: {{endpoints: [*triton], protocol: http, model: rowsum, batch: {{max_rows: 16}}}}
  grpc: {{endpoints: [*triton], protocol: grpc, model: rowsum, batch: {{max_rows: 16}}}}
  alone: {{endpoints: [*triton], model: rowsum}}
  echo: {{endpoints: [*triton], model: echo, batch: {{max_rows: 16}}}}
  any: {{endpoints: [*triton]}}
routes:
  http: {{backend: http}}
  grpc: {{backend: grpc}}
  kept: {{backend: grpc, cache: {{entries: 200}}}}
  alone: {{backend: alone}}
  text: {{backend: echo}}
proxy: any
"""


def test_a_long_mixed_load_is_answered_right_and_leaves_nothing(tmp_path: Path) -> None:
    with triton_with(tmp_path, "echo", "rowsum", "accumulate") as triton:
        policy = tmp_path / "policy.yaml"
        policy.write_text(POLICY.format(http=triton.http, grpc=triton.grpc))
        with served(tmp_path, str(policy)) as gateway:
            idle = left_over(gateway)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                seen, wrong, memory = runner.run(load(gateway))
            assert wrong == []
            assert seen.total() == REQUESTS
            # What the clients have closed is gone at once; the gateway's own idle connections expire in 4 s.
            assert within(15, lambda: nothing_beyond(idle, gateway)), f"{left_over(gateway)} where there were {idle}"
            late = resident_mib(gateway)
            counters = gateway.counters()
            assert counters["headrace_internal_errors_total"] == 0
            print(
                f"{seen.total()} requests {dict(seen)}, MiB after each tenth {[f'{m:.1f}' for m in memory]}, {late:.1f}"
            )
            assert late <= memory[0] * (1 + GROWTH)


def sockets(gateway: Served) -> int:
    found = 0
    for file in Path(f"/proc/{gateway.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += str(file.readlink()).startswith("socket:")
    return found


def nothing_beyond(idle: dict[str, float], gateway: Served) -> bool:
    return all(count <= idle[what] for what, count in left_over(gateway).items())


async def load(gateway: Served) -> tuple[Counter[str], list[str], list[float]]:
    """What was asked, what went wrong, and the memory after each tenth in MiB."""
    seen: Counter[str] = Counter()
    wrong: list[str] = []
    memory: list[float] = []
    left = iter(range(1, REQUESTS + 1))

    async def work(caller: Caller) -> None:
        for number in left:
            try:
                await caller.ask()
            except Exception as error:
                wrong.append(f"request {number}: {error}")
                if len(wrong) > 20:
                    return
            if number % (REQUESTS // 10) == 0:
                memory.append(resident_mib(gateway))
        caller.hang_up()

    channels = [grpc.aio.insecure_channel(gateway.grpc, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)]
    callers = [Caller(gateway, channels[seed % len(channels)], seed, seen) for seed in range(CONCURRENCY)]
    await asyncio.gather(*map(work, callers))
    await asyncio.gather(*(channel.close() for channel in channels))
    return seen, wrong, memory


def left_over(gateway: Served) -> dict[str, float]:
    """What requests hold while they run: tasks, sockets, slots, places in queues."""
    counters = gateway.counters()
    backends = httpx.get(f"http://{gateway.admin}/backends", timeout=10).json().values()
    return {
        "tasks": counters["headrace_tasks"],
        "in flight": counters["headrace_requests_in_flight"],
        "calls": sum(endpoint["in_flight"] for backend in backends for endpoint in backend["endpoints"]),
        "queued": sum(backend["queue"]["rows"] for backend in backends if "queue" in backend),
        "batches": sum(backend["queue"]["batches_running"] for backend in backends if "queue" in backend),
        "sockets": sockets(gateway),
    }


def resident_mib(gateway: Served) -> float:
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024

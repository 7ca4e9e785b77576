"""A rolling restart of two gateways behind nginx under load: every request is answered, rightly, and executed once.

Over HTTP nobody notices. Over gRPC a call that is on its way in the moment of a GOAWAY ends with CANCELLED, which is
what gRPC's server says to whatever comes after its end began (nginx takes it for an answer); it was never executed, so
that whoever asks again, as these callers do, loses nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import grpc

from backends.proto import kserve_pb2 as pb
from tests.support.leaving import HttpCaller, infer, post
from tests.support.nginx import before_gateways
from tests.support.recorder import recording
from tests.support.serve import LISTENERS, Served, free_port, served

ROUNDS = 2  # each gateway is restarted so often
CALLERS = 8  # of each protocol
POLICY = """
backends:
  alone: {{endpoints: ["grpc://{address}"], model: m}}
  merged: {{endpoints: ["grpc://{address}"], model: m, batch: {{max_rows: 8, slots: 2}}}}
routes:
  alone: {{backend: alone}}
  merged: {{backend: merged}}
telemetry: {{access_log: false}}
limits: {{drain: 10s}}
"""


class Gateway:
    """One that is restarted on its ports."""

    def __init__(self, folder: Path, policy: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.policy = folder / "policy.yaml"
        self.policy.write_text(policy)
        self.port = free_port(len(LISTENERS))
        self.ended: list[int] = []
        self._running = ExitStack()
        self._served: Served | None = None

    def start(self) -> None:
        self._served = self._running.enter_context(served(self.folder, str(self.policy), first=self.port))

    def stop(self) -> None:
        assert self._served is not None
        self._served.process.send_signal(signal.SIGTERM)
        self.ended.append(self._served.process.wait(20))
        self._running.close()

    def __enter__(self) -> Gateway:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()


def test_a_rolling_restart_behind_nginx_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        wrong: list[str] = []
        asked: Counter[str] = Counter()
        turned_away: list[str] = []
        numbers = itertools.count()
        stopped = asyncio.Event()

        async def over_http(address: str) -> None:
            caller = None
            while not stopped.is_set():
                model = ("alone", "merged")[next(numbers) % 2]
                id = f"http-{next(numbers)}"
                try:
                    if caller is None:
                        caller = await HttpCaller.ask(address, b"")
                    caller.writer.write(post(model, id))
                    status, body = await asyncio.wait_for(caller.answer(), 10)
                except (OSError, EOFError, TimeoutError) as error:
                    wrong.append(f"{id}: {error!r}")
                    caller = None
                    continue
                if status != 200 or (body["id"], body["outputs"][0]["data"]) != (id, [1.5]):
                    wrong.append(f"{id}: {status} {body}")
                asked[model] += 1
            if caller is not None:
                caller.leave()

        async def over_grpc(channel: grpc.aio.Channel) -> None:
            while not stopped.is_set():
                model = ("alone", "merged")[next(numbers) % 2]
                id = f"grpc-{next(numbers)}"
                try:
                    answer = pb.ModelInferResponse.FromString(await infer(channel, model, id, timeout=10))
                except grpc.aio.AioRpcError as error:
                    if error.code() not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE):
                        wrong.append(f"{id}: {error.code()} {error.details()}")
                    turned_away.append(id)
                    continue
                if (answer.id, answer.raw_output_contents[0]) != (id, b"\x00\x00\xc0\x3f"):
                    wrong.append(f"{id}: {answer}")
                asked[f"grpc {model}"] += 1

        def restarts(gateways: list[Gateway]) -> None:
            for gateway in gateways * ROUNDS:
                time.sleep(1.0)
                gateway.stop()
                gateway.start()
                time.sleep(1.2)  # until nginx looks at it again

        async with recording(0.02) as recorder:
            with ExitStack() as stack:
                policy = POLICY.format(address=recorder.address)
                gateways = [
                    await asyncio.to_thread(stack.enter_context, Gateway(tmp_path / name, policy)) for name in "ab"
                ]
                http = [f"127.0.0.1:{gateway.port}" for gateway in gateways]
                rpc = [f"127.0.0.1:{gateway.port + 1}" for gateway in gateways]
                front = stack.enter_context(before_gateways(tmp_path, http, rpc))
                async with grpc.aio.insecure_channel(front.grpc) as channel:
                    loads = [asyncio.create_task(over_http(front.http)) for _ in range(CALLERS)]
                    loads += [asyncio.create_task(over_grpc(channel)) for _ in range(CALLERS)]
                    await asyncio.to_thread(restarts, gateways)
                    stopped.set()
                    await asyncio.gather(*loads)
                assert wrong == []
                assert min(asked.values()) > 100, asked
                print(f"{sum(asked.values())} answered, {len(turned_away)} gRPC calls turned away")
                assert len(turned_away) <= CALLERS * 2 * ROUNDS, "one call of each caller at each end, at most"
                assert [gateway.ended for gateway in gateways] == [[0] * ROUNDS] * 2
                await asyncio.to_thread(stack.close)
            twice = [
                id for id, times in Counter(call.id for call in recorder.calls if call.rows == 1).items() if times > 1
            ]
            assert twice == [], "nothing that had been begun was sent again"
            assert recorder.ends("cancelled") == 0
            executed = {call.id for call in recorder.calls}
            assert [id for id in turned_away if id in executed] == [], "who is turned away may ask again"

    asyncio.run(main())

"""A request leaves nothing for the garbage collector: what holds each other is cut when it is over."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec

from tests.support.garbage import garbage
from tests.support.gateway import FakeServer, Rig, double

POLICY = """\
telemetry: {access_log: false, traces: {per_second: 0}}
backends:
  batched: {endpoints: [http://h:1], model: double, batch: {}}
  plain: {endpoints: [http://h:1], model: double}
routes:
  batched: {backend: batched}
  cached: {backend: batched, cache: {ttl: 1h}}
  plain: {backend: plain}
  tiers:
    tiers:
      - {backend: batched, accept: {output: Y, values: probabilities, score: margin, threshold: 1}}
      - {backend: plain}
"""
BODY = msgspec.json.encode({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]})
# What an event loop and a test's own calls leave is not ours.
OURS = frozenset({"Request", "Reply", "Infer", "Tensors", "Batch", "Entry", "_Caller", "Answer", "Hop", "Task"})


async def ask(rig: Rig, route: str) -> None:
    """One call straight to the ASGI application: an HTTP client would leave garbage of its own."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    path = f"/v2/models/{route}/infer"
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": []}
    await rig.app(scope, receive, send)
    assert sent[0]["status"] == 200, sent


async def ask_all(rig: Rig, times: int) -> None:
    for _ in range(times):
        for route in ("batched", "cached", "plain", "tiers"):
            await ask(rig, route)
    rig.server.requests.clear()
    await asyncio.sleep(0.01)


def test_requests_leave_no_cycles() -> None:
    async def run() -> Counter[str]:
        rig = Rig(POLICY, FakeServer({"double": double}))
        await ask_all(rig, 3)
        with garbage() as found:
            await ask_all(rig, 10)
        return found

    found = asyncio.run(run())
    assert not OURS & found.keys(), found

"""The demo's load: labelled queries through a running gateway, by the real clients, over both protocols."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc.aio as grpcclient
import tritonclient.http.aio as httpclient

CONCURRENCY = 64
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? ([0-9.eE+-]+)$")


@dataclass
class Answers:
    """What one case gave: for each query, in order, the label and the seconds that it took.

    `cpu` is in seconds, by who spent it; `counters` is how much each sample of the metrics page grew.
    """

    labels: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)

    def extend(self, other: Answers) -> None:
        self.labels += other.labels
        self.seconds += other.seconds
        for mine, theirs in ((self.cpu, other.cpu), (self.counters, other.counters)):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0.0) + value


class Load:
    """Sends queries to the gateway at `http` and `grpc` (`host:port`), half of them by each."""

    def __init__(self, http: str, grpc: str) -> None:
        self._http = httpclient.InferenceServerClient(http, conn_limit=CONCURRENCY)
        self._grpc = grpcclient.InferenceServerClient(grpc)

    async def close(self) -> None:
        await self._http.close()
        await self._grpc.close()

    async def classify(self, route: str, texts: Sequence[str], advance: Callable[[], None]) -> Answers:
        """One request per text, CONCURRENCY in the air; odd ones over gRPC."""
        return await self._each(route, "TEXT", "LABEL", texts, advance)

    async def embed(self, route: str, texts: Sequence[str], advance: Callable[[], None]) -> Answers:
        """As `classify`, for a route that gives vectors; there are no labels."""
        return await self._each(route, "TEXT", "EMBEDDING", texts, advance)

    async def _each(
        self, route: str, source: str, target: str, texts: Sequence[str], advance: Callable[[], None]
    ) -> Answers:
        labels = [""] * len(texts)
        seconds = [0.0] * len(texts)
        numbers = iter(range(len(texts)))

        async def worker() -> None:
            for i in numbers:
                began = time.perf_counter()
                answer = await self._one(route, source, target, texts[i], grpc=i % 2 == 1)
                seconds[i] = time.perf_counter() - began
                if target == "LABEL":
                    labels[i] = answer[0, 0].decode()
                advance()

        await asyncio.gather(*(worker() for _ in range(min(CONCURRENCY, len(texts)))))
        return Answers(labels, seconds)

    async def _one(self, route: str, source: str, target: str, text: str, *, grpc: bool) -> Any:
        array = np.array([[text.encode()]], dtype=np.object_)
        module, client = (grpcclient, self._grpc) if grpc else (httpclient, self._http)
        tensor = module.InferInput(source, [1, 1], "BYTES")
        tensor.set_data_from_numpy(array)
        reply = await client.infer(route, [tensor], outputs=[module.InferRequestedOutput(target)])
        return reply.as_numpy(target)


async def counters(metrics: str) -> dict[str, float]:
    """All samples of the gateway's metrics page, by name with labels."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{metrics}/metrics")).text
    samples = {}
    for line in text.splitlines():
        if (match := _SAMPLE.match(line)) is not None:
            samples[f"{match[1]}{{{match[2] or ''}}}"] = float(match[3])
    return samples


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """How much each sample grew."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}

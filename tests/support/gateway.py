"""A whole gateway stack in one process, without sockets: policy text and fake servers in, an ASGI client out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import numpy as np

from backends.endpoint import Endpoint
from backends.errors import Failure
from backends.request import Answer, HttpCall, Infer, Relay, Reply, Request, Tensors, Trait
from backends.tensor import Tensor
from gateway import respond
from gateway.body import Bodies
from gateway.http import HttpEdge
from gateway.metrics import Metrics
from gateway.stack import Things, Tools, build
from gateway.telemetry import Tracing
from policies import parse

Model = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


class FakeServer:
    """A model server with `models` by name; calls that are relayed are answered with what they were."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self.models = dict(models)
        self.requests: list[Request] = []
        self.failure: Failure | None = None
        self.is_ready = True
        self.refreshed = 0
        self.traits: dict[str, Trait] = {}

    async def __call__(self, request: Request, /) -> Reply:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        if isinstance(request.content, Infer):
            outputs = self.models[request.model](request.infer.inputs.decoded)
            return Reply(Answer(Tensors.of(outputs), request.model, "1"))
        assert isinstance(request.content, HttpCall)
        body = b'{"name":"%s","target":"%s"}' % (request.model.encode(), request.content.target.encode())
        return Reply(Relay(200, ((b"content-type", b"application/json"),), _chunks(body)))

    async def unready(self, model: str, deadline: float, headers: Mapping[str, str]) -> str:
        return "" if self.is_ready else "it said no"

    async def trait(self, model: str, version: str, deadline: float, headers: Mapping[str, str]) -> Trait:
        return self.traits.get(model, Trait())

    def refresh(self) -> None:
        self.refreshed += 1

    async def close(self) -> None:
        pass

    def rows(self, model: str) -> list[int]:
        """Rows of each call that `model` got."""
        return [r.infer.inputs.heads[0].shape[0] for r in self.requests if r.model == model]


async def _chunks(body: bytes) -> Any:
    yield body


def double(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Y = 2 X, FP32."""
    values = np.frombuffer(inputs[0].data, "<f4") * np.float32(2)
    return (Tensor("Y", "FP32", inputs[0].shape, values.astype("<f4").tobytes()),)


def fp32(name: str, array: Any) -> Tensor:
    block = np.asarray(array, "<f4")
    return Tensor(name, "FP32", block.shape, block.tobytes())


class Rig:
    """`policy` before `server`: the services, the ASGI application, and what they observed.

    `others` are the servers at further addresses (`http://host:port`); `server` is at all that are not among them.
    """

    def __init__(
        self,
        policy: str,
        server: FakeServer,
        others: Mapping[str, FakeServer] | None = None,
        things: Things | None = None,
    ) -> None:
        self.policy = parse(policy, "policy.yaml", {})
        self.server = server
        self.others = dict(others or {})
        self.tracing = Tracing(per_second=1e9, keep=64, now=time.monotonic)
        self.metrics = Metrics()
        self.things = things or Things()
        self.refused: list[Failure] = []
        self.defects: list[BaseException] = []
        self.endpoints: list[Endpoint] = []
        self.tools = Tools(time.monotonic, self.tracing, self.metrics, self._connect, random.Random(1))
        self.services = build(self.policy, self.things, self.tools)
        self.app = HttpEdge(
            self.services["http"],
            now=time.monotonic,
            bodies=Bodies(lambda: self.policy.limits, self.things.in_flight),
            ready=lambda: server.is_ready,
            decision_headers=respond.decision_headers,
            statuses=respond.STATUSES[self.policy.listen.compat],
            refused=self.refused.append,
            report=self.defects.append,
        )

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app)  # type: ignore[arg-type]
        return httpx.AsyncClient(transport=transport, base_url="http://gateway")

    def metric(self, sample: str) -> float:
        """The value of one sample, as the metrics page writes its name and labels; 0 where it is not there."""
        for line in self.metrics.text().decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        return 0.0

    def _connect(self, backend: Any) -> tuple[Endpoint, ...]:
        made = tuple(
            Endpoint(
                str(spec),
                http=self.others.get(str(spec), self.server),
                grpc=None,
                prefer_grpc=False,
                tentative=False,
                timeout=backend.timeout,
                idle_timeout=backend.idle_timeout,
                headers=backend.headers,
                now=time.monotonic,
            )
            for spec in backend.endpoints
        )
        self.endpoints += made
        return made

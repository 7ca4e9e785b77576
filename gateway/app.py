"""The running gateway: clocks and chance are made here, servers started, signals answered, everything closed.

Start: build the policy's stack, ask every endpoint once whether it is ready, open the ports. A backend that is down
does not keep the gateway from starting. Stop (SIGTERM, SIGINT): not ready at once, new requests refused, what is in
flight answered until the drain time is over.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import uvloop

from backends.endpoint import Endpoint
from backends.errors import Failure
from backends.http_client import HttpClient
from backends.request import Reply, Request, Service
from backends.triton_grpc import TritonGrpc
from backends.triton_http import TritonHttp
from gateway import respond
from gateway.admin import admin, metrics_page
from gateway.body import Bodies
from gateway.grpc import GrpcEdge
from gateway.http import HttpEdge
from gateway.metrics import Metrics
from gateway.probe import Probing
from gateway.server import HttpServer
from gateway.stack import Things, Tools, build
from gateway.telemetry import Tracing
from policies import Policy
from policies.spec import Address, Backend
from policies.spec import Endpoint as EndpointSpec

_log = logging.getLogger("headrace")
# Kubernetes kills 30 s after SIGTERM; what is in flight has a deadline of that order too.
DRAIN_SECONDS = 25
# For what is still open then: the last bytes of answers, idle streams.
_CLOSE_SECONDS = 2
# The largest answer that is taken from a backend; beyond, something is wrong with it.
MAX_REPLY_BYTES = 256 * 1024 * 1024


class Gateway:
    """One process's gateway. `tentative_grpc` says that gRPC addresses were guessed and are used once they answer."""

    def __init__(self, policy: Policy, *, tentative_grpc: bool = False) -> None:
        self.policy = policy
        self._tentative = tentative_grpc
        self._now = time.monotonic
        telemetry = policy.telemetry
        self.tracing = Tracing(per_second=telemetry.traces_per_second, keep=telemetry.traces_kept, now=self._now)
        self.metrics = Metrics()
        self.metrics.policy(policy.version)
        self._things = Things()
        self.metrics.watch_in_flight(lambda: self._things.in_flight.count)
        tools = Tools(self._now, self.tracing, self.metrics, self._connect)
        self._services = build(policy, self._things, tools)
        self._probing = Probing(self._endpoints, self.metrics)
        self._servers: list[HttpServer] = []
        self._open = False
        self._grpc: GrpcEdge | None = None
        self.addresses: dict[str, Address] = {}

    def ready(self) -> bool:
        """Whether a request has a chance: every port is open, not draining, and some endpoint says that it is ready."""
        return self._open and any(endpoint.ready for _, endpoint in self._endpoints())

    def backends(self) -> dict[str, Any]:
        """What is known of each backend, for people."""
        known: dict[str, Any] = {}
        for name, (_, endpoints) in self._things.endpoints.items():
            known[name] = {
                "endpoints": [
                    {"name": e.name, "ready": e.ready, "protocol": e.protocol, "in_flight": e.in_flight}
                    for e in endpoints
                ]
            }
        for name, (_, dispatch) in self._things.dispatchers.items():
            known[name]["queue"] = {
                "rows": dispatch.dispatcher.waiting_rows,
                "batches_running": dispatch.dispatcher.running,
            }
        return known

    async def start(self) -> None:
        """Opens every port of the policy. Raises OSError, naming the listener and its address, where one is taken."""
        await self._probing.start()
        listen = self.policy.listen
        edge = HttpEdge(
            self._service("http"),
            now=self._now,
            bodies=Bodies(lambda: self.policy.limits, self._things.in_flight),
            ready=self.ready,
            decision_headers=self._decision_headers,
            refused=partial(self._refused, "http"),
            report=self._report,
        )
        applications = (
            ("http", listen.http, edge),
            ("metrics", listen.metrics, metrics_page(self.metrics)),
            ("admin", listen.admin, admin(self)),
        )
        for name, address, application in applications:
            if address is not None:
                server = HttpServer(application, address, _CLOSE_SECONDS)
                await _started(name, server.start())
                self._servers.append(server)
                self.addresses[name] = replace(address, port=server.port)
        if listen.grpc is not None:
            self._grpc = GrpcEdge(
                self._service("grpc"),
                now=self._now,
                max_message_bytes=self.policy.limits.body_bytes,
                ready=self.ready,
                grpc_status=respond.grpc_status,
                decision_headers=self._decision_headers,
                refused=partial(self._refused, "grpc"),
                report=self._report,
            )
            port = await _started("grpc", self._grpc.start([str(listen.grpc)]))
            self.addresses["grpc"] = replace(listen.grpc, port=port)
        self._open = True
        _log.info(
            "headrace is up",
            extra={"fields": {"policy": self.policy.version, **{k: str(v) for k, v in self.addresses.items()}}},
        )

    async def close(self) -> None:
        """Not ready at once; new requests refused, and those in flight answered; then everything closed."""
        in_flight = self._things.in_flight
        self._open, in_flight.draining = False, True
        until = self._now() + DRAIN_SECONDS
        while in_flight.count + in_flight.reading and self._now() < until:  # noqa: ASYNC110
            # The ports stay open meanwhile, so that whoever asks is told, and not just turned away.
            await asyncio.sleep(0.02)  # once in a process's life, so that no request has to signal its end
        closing = [server.close() for server in self._servers]
        if self._grpc is not None:
            closing.append(self._grpc.stop(_CLOSE_SECONDS))
        await asyncio.gather(*closing)
        await self._probing.close()
        await self._things.close()
        self.tracing.close()

    def _service(self, protocol: str) -> Service:
        async def current(request: Request, /) -> Reply:
            return await self._services[protocol](request)

        return current

    def _decision_headers(self, reply: Reply) -> respond.Headers:
        return respond.decision_headers(reply) if self.policy.telemetry.response_headers else ()

    def _refused(self, protocol: str, failure: Failure) -> None:
        """Counts and logs what an edge refused by itself, before there was a request to observe."""
        status = respond.http_status(failure)[0] if protocol == "http" else respond.grpc_status(failure)[0]
        self.metrics.refused(protocol, str(status))
        if self.policy.telemetry.access_log:
            fields = {"protocol": protocol, "status": str(status), "error": failure.message[:200]}
            logging.getLogger("headrace.access").info("refused", extra={"fields": fields})

    def _report(self, error: BaseException) -> None:
        self.metrics.defect()
        _log.error("internal error", exc_info=error)

    def _endpoints(self) -> Iterable[tuple[str, Endpoint]]:
        for name, (_, endpoints) in self._things.endpoints.items():
            for endpoint in endpoints:
                yield name, endpoint

    def _connect(self, backend: Backend) -> tuple[Endpoint, ...]:
        return tuple(self._endpoint(backend, spec) for spec in backend.endpoints)

    def _endpoint(self, backend: Backend, spec: EndpointSpec) -> Endpoint:
        http = grpc = None
        if spec.http is not None:
            url = urlsplit(spec.http)
            client = HttpClient(
                url.hostname or "",
                url.port or 80,
                now=self._now,
                connect_timeout=backend.connect_timeout,
                max_response_bytes=MAX_REPLY_BYTES,
            )
            http = TritonHttp(client)
        if spec.grpc is not None:
            grpc = TritonGrpc(
                spec.grpc, now=self._now, connect_timeout=backend.connect_timeout, max_message_bytes=MAX_REPLY_BYTES
            )
        return Endpoint(
            str(spec),
            http=http,
            grpc=grpc,
            prefer_grpc=backend.protocol == "grpc",
            tentative=self._tentative,
            timeout=backend.timeout,
            headers=backend.headers,
            now=self._now,
        )


async def _started(name: str, starting: Any) -> Any:
    try:
        return await starting
    except OSError as error:
        raise OSError(error.errno, f"listener '{name}': {error.strerror or error}") from None


def run(policy: Policy, *, tentative_grpc: bool = False, started: Callable[[Gateway], None] | None = None) -> None:
    """Serves `policy` until SIGTERM or SIGINT. Raises OSError where a port is taken."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(policy, tentative_grpc, started))


async def _serve(policy: Policy, tentative_grpc: bool, started: Callable[[Gateway], None] | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = Gateway(policy, tentative_grpc=tentative_grpc)
    try:
        await gateway.start()
        # What exists now lives as long as the process: the collector need not walk it for every request's garbage.
        gc.collect()
        gc.freeze()
        if started is not None:
            started(gateway)
        await stop.wait()
        _log.info("draining", extra={"fields": {"in_flight": gateway._things.in_flight.count}})
    finally:
        await gateway.close()

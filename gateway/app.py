"""The running gateway: clocks and chance are made here, servers started, signals answered, everything closed.

Start: build the policy's stack, ask every endpoint once whether it is ready, open the ports. A backend that is down
does not keep the gateway from starting.

Stop (SIGTERM, SIGINT): not ready at once, then as `gateway.drain` has it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from backends.errors import Failure
from backends.request import Reply, Request, Service
from gateway import respond
from gateway.admin import admin, joined_admin, joined_metrics, metrics_page, own
from gateway.body import Bodies
from gateway.connect import Connect
from gateway.drain import CLOSE_SECONDS, drain
from gateway.grpc import GrpcEdge
from gateway.http import HttpEdge
from gateway.http1 import Http1Server
from gateway.joined import Joined, clients
from gateway.memory import collect_seldom, settle
from gateway.metrics import Metrics
from gateway.observe import model_avoided
from gateway.probe import Probing
from gateway.reload import Reload, Snapshot
from gateway.server import Asgi, HttpServer
from gateway.sockets import take_all_files
from gateway.stack import Things, Tools, build
from gateway.telemetry import Tracing
from gateway.watch import Source, Watch, in_background
from gateway.workers import ALONE, Worker, scarce, share
from policies import Policy, PolicyError
from policies.spec import Address

_log = logging.getLogger("headrace")


class Gateway:
    """One process's gateway. `tentative_grpc` says that gRPC addresses were guessed and are used once they answer.

    `overruled` gives a policy that is posted as the flags of the command have it.

    Of several workers each puts its share of a policy in force; what is shown and compared is the whole.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        overruled: Callable[[Policy], Policy] | None = None,
        tentative_grpc: bool = False,
        worker: Worker = ALONE,
    ) -> None:
        self._now = time.monotonic
        # Listeners are the process's, whatever a policy that comes later says of them.
        as_told = overruled or (lambda later: later)
        self.overruled: Callable[[Policy], Policy] = lambda later: replace(as_told(later), listen=self.policy.listen)
        self._statuses = respond.STATUSES[policy.listen.compat]
        self.folder: Path | None = None  # of the policy file, where there is one
        self.reading = asyncio.Lock()
        self._worker = worker
        self._scarce: set[str] = set()
        self._joined: Joined | None = None
        telemetry = self._share(policy).telemetry
        self.tracing = Tracing(per_second=telemetry.traces_per_second, keep=telemetry.traces_kept, now=self._now)
        self.metrics = Metrics()
        self.metrics.watch_endpoints(
            lambda: [(backend, endpoint.name, endpoint.ready) for backend, endpoint in self._things.all_endpoints()]
        )
        self.metrics.watch_in_flight(lambda: self._things.in_flight.count)
        self.metrics.watch_tasks(lambda: len(asyncio.all_tasks()))
        self.metrics.watch_stores(lambda: [(s.name, s.up, s.dropped) for _, s in filter(None, [self._things.redis])])
        connect = Connect(self._now, tentative_grpc, avoided=model_avoided(self.metrics))
        self._tools = Tools(self._now, self.tracing, self.metrics, connect, random.Random())
        self.reload = Reload(self._snapshot(policy, Things()), self._snapshot)
        self._observed()
        self._probing = Probing(lambda: self._things.all_endpoints())
        self._servers: list[HttpServer | Http1Server] = []
        self._open = False
        self._grpc: GrpcEdge | None = None
        self._shown = policy.listen.tls
        self.addresses: dict[str, Address] = {}

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.reload.current.policy

    @property
    def _things(self) -> Things:
        return self.reload.current.things

    def ready(self) -> bool:
        """Whether a request has a chance: every port is open, not draining, and some endpoint says that it is ready."""
        return self._open and any(endpoint.ready for _, endpoint in self._things.all_endpoints())

    def backends(self) -> dict[str, Any]:
        """What is known of each backend, for people."""
        known: dict[str, Any] = {}
        for name, (_, endpoints) in self._things.endpoints.items():
            known[name] = {
                "endpoints": [
                    {
                        "name": e.name,
                        "ready": e.ready,
                        "reason": e.reason,
                        "protocol": e.protocol,
                        "in_flight": e.in_flight,
                        "avoided": e.avoided(),
                    }
                    for e in endpoints
                ]
            }
        for name, (_, dispatch) in self._things.dispatchers.items():
            known[name]["queue"] = {
                "rows": dispatch.dispatcher.waiting_rows,
                "batches_running": dispatch.dispatcher.running,
            }
        return known

    def cache(self) -> dict[str, Any]:
        """What is known of the store that caches share, if there is one."""
        if self._things.redis is None:
            return {}
        _, store = self._things.redis
        return {"redis": {"address": store.name, "up": store.up, "reason": store.reason, "dropped_rows": store.dropped}}

    async def start(self) -> None:
        """Opens every port of the policy. Raises OSError, naming the listener and its address, where one is taken."""
        await self._probing.start()
        listen = self.policy.listen
        edge = HttpEdge(
            self._service("http"),
            now=self._now,
            bodies=Bodies(lambda: self._own.limits, self._things.in_flight, lambda: self._things.deadlines),
            ready=self.ready,
            decision_headers=respond.decision_headers,
            statuses=self._statuses,
            refused=partial(self._refused, "http"),
            report=self.report,
        )
        shared = self._worker.count > 1
        http1 = partial(
            Http1Server,
            now=self._now,
            report=self.report,
            limit=lambda: self._own.limits.connections,
            tls=listen.tls,
        )
        for name, address, application in self._applications(edge):
            make = http1 if name == "http" else HttpServer
            server: HttpServer | Http1Server = make(application, address, CLOSE_SECONDS, shared=shared)
            await _started(name, server.start())
            self._servers.append(server)
            if isinstance(address, Address):
                self.addresses[name] = replace(address, port=server.port)
        if listen.grpc is not None:
            self._grpc = GrpcEdge(
                self._service("grpc"),
                now=self._now,
                max_message_bytes=lambda: self._own.limits.body_bytes,
                ready=self.ready,
                grpc_status=self._statuses.grpc,
                decision_headers=respond.decision_headers,
                refused=partial(self._refused, "grpc"),
                report=self.report,
                shared=shared,
                tls=listen.tls,
            )
            port = await _started("grpc", self._grpc.start([str(listen.grpc)]))
            self.addresses["grpc"] = replace(listen.grpc, port=port)
        # Only now: while models are loaded and ports opened, an answer of Redis could wait beyond its time.
        self._things.start()
        self._open = True
        self._worker.up()
        _log.info(
            "headrace is up",
            extra={"fields": {"policy": self.policy.version, **{k: str(v) for k, v in self.addresses.items()}}},
        )

    def _applications(self, edge: HttpEdge) -> Iterator[tuple[str, Address | Path, Asgi]]:
        """Every application with the name of its listener, and where it is served."""
        listen, worker = self.policy.listen, self._worker
        if listen.http is not None:
            yield "http", listen.http, edge
        if worker.count > 1:
            yield "worker", worker.socket_of(worker.index), own(self)
        if worker.index > 0:
            return
        if worker.count > 1:
            self._joined = Joined(clients(worker))
        if listen.metrics is not None:
            yield (
                "metrics",
                listen.metrics,
                joined_metrics(self._joined) if self._joined else metrics_page(self.metrics),
            )
        if listen.admin is not None:
            yield "admin", listen.admin, joined_admin(self, self._joined) if self._joined else admin(self)

    async def close(self) -> None:
        """Not ready at once; new requests refused, and those in flight answered; then everything closed."""
        delay = self._own.limits.drain_delay if self._open else 0.0
        self._open = False
        await drain(self._things, self._own.limits.drain, delay, self._servers, self._grpc, self._now)
        if self._joined is not None:
            await self._joined.close()
        await self._probing.close()
        await self.reload.close()
        await self._things.close()
        self.tracing.close()

    async def apply(self, policy: Policy, *, force: bool = False) -> bool:
        """Puts another policy in force; False where it is already. Raises PolicyError, and the old one stays."""
        with self._refusals():
            changed = await self.reload.apply(policy, force=force)
        if changed:
            self._in_force()
        return changed

    async def rollback(self) -> None:
        """Puts the policy before this one in force. Raises PolicyError where there is none."""
        with self._refusals():
            await self.reload.rollback()
        self._in_force()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except PolicyError:
            self.metrics.reloaded("refused")
            raise

    def _in_force(self) -> None:
        """After another policy has been put in force."""
        self.metrics.reloaded("applied")
        self._things.start()
        self._observed()
        self._renew()

    def _renew(self) -> None:
        """Has the listeners show the certificate of the policy in force."""
        tls = self.policy.listen.tls
        if tls is not None and tls != self._shown:
            self._shown = tls
            for server in (*self._servers, self._grpc):
                if isinstance(server, Http1Server | GrpcEdge):
                    server.renew(tls)
            _log.info("certificate renewed", extra={"fields": {"certificate": tls.certificate.path}})

    def _observed(self) -> None:
        """What is observed, as the policy in force has it."""
        self._own = self._share(self.policy)
        self.metrics.policy(self.policy.version)
        self.tracing.per_second = self._own.telemetry.traces_per_second
        self.tracing.recent.keep = self._own.telemetry.traces_kept
        if self._worker.index == 0:
            now_scarce = scarce(self.policy, self._worker.count)
            for name in sorted(now_scarce - self._scarce):
                _log.warning("fewer slots than workers: each worker takes one", extra={"fields": {"backend": name}})
            self._scarce |= now_scarce

    def _share(self, policy: Policy) -> Policy:
        return share(policy, self._worker.index, self._worker.count)

    def _snapshot(self, policy: Policy, things: Things) -> Snapshot:
        return Snapshot(policy, build(self._share(policy), things, self._tools), things)

    def _service(self, protocol: str) -> Service:
        async def current(request: Request, /) -> Reply:
            # From here to its end the request knows this snapshot alone.
            snapshot = self.reload.current
            snapshot.active += 1
            try:
                return await snapshot.services[protocol](request)
            finally:
                snapshot.active -= 1

        return current

    def _refused(self, protocol: str, failure: Failure) -> None:
        """Counts and logs what an edge refused by itself, before there was a request to observe."""
        told = self._statuses
        status = told.http(failure)[0] if protocol == "http" else told.grpc(failure)[0]
        self.metrics.refused(protocol, str(status))
        if self.policy.telemetry.access_log:
            fields = {"protocol": protocol, "status": str(status), "error": failure.message[:200]}
            logging.getLogger("headrace.access").info("refused", extra={"fields": fields})

    def report(self, error: BaseException) -> None:
        self.metrics.defect()
        _log.error("internal error", exc_info=error)


async def _started(name: str, starting: Any) -> Any:
    try:
        return await starting
    except OSError as error:
        raise OSError(error.errno, f"listener '{name}': {error.strerror or error}") from None


def run(
    policy: Policy,
    source: Source | None = None,
    *,
    overruled: Callable[[Policy], Policy],
    tentative_grpc: bool = False,
    worker: Worker = ALONE,
) -> None:
    """Serves `policy` until SIGTERM or SIGINT, and what `source` says later. Raises OSError where a port is taken.

    `overruled` gives a policy as the flags of the command have it.
    """
    settle()
    take_all_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        gateway = partial(Gateway, policy, overruled=overruled, tentative_grpc=tentative_grpc, worker=worker)
        runner.run(_serve(gateway, source, worker))


async def _serve(make: Callable[[], Gateway], source: Source | None, worker: Worker) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if worker.count > 1:

        def orphaned() -> None:
            loop.remove_reader(worker.lifeline)
            stop.set()

        loop.add_reader(worker.lifeline, orphaned)
    gateway = make()
    gateway.folder = source.folder if source else None
    watch: Watch | None = None
    try:
        await gateway.start()
        if source is not None:
            watch = Watch(source.changed, partial(_reload, gateway, source), gateway.report)
            watch.start()
            loop.add_signal_handler(signal.SIGHUP, in_background(partial(_reload, gateway, source), gateway.report))
        collect_seldom()
        await stop.wait()
        _log.info("draining", extra={"fields": {"in_flight": gateway._things.in_flight.count}})
    finally:
        if watch is not None:
            await watch.close()
        await gateway.close()


async def _reload(gateway: Gateway, source: Source) -> None:
    """What the file says now, or else the reasons why not. One after the other, whoever asks for it."""
    async with gateway.reading:
        try:
            # A large policy takes seconds to read: requests go on meanwhile.
            policy = await asyncio.to_thread(source.load)
        except PolicyError as error:
            gateway.reload.refuse(error)
            gateway.metrics.reloaded("refused")
            return
        with suppress(PolicyError):  # its reasons are kept and logged where it was refused
            await gateway.apply(policy)

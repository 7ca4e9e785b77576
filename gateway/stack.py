"""One request on one screen: `build` composes the parts into the service that the edges call.

    Observed     span, metrics, access line
    Admit        in-flight bound, already expired?, the request's own deadline
    Switch       public model name -> route
    Split        unit -> arm, where the route has an experiment
    Fallback     another backend, where the arm fails for reasons of its own
    Whole        straight to the last tier's Balancer, where a model is decoupled or stateful
    Cascade      small model first; only rows that are not confident go on to the next tier
      per tier:
      Cached     per row: hits answered, misses go on
      Dispatch   lanes by signature; slots; the batch
      Balancer   the less loaded of two replicas, where calls are not merged; what was never executed goes elsewhere
      Endpoint   one replica and its clients

Relayed calls (everything that is not an inference, and one with tensors in shared memory) take the plain path: Switch,
Renamed, Replicas, and Balancer where one replica answers, Endpoint. A model without a cascade is a cascade of one tier:
the general case with n = 1 is the only case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from backends.deadlines import Deadlines
from backends.endpoint import Endpoint
from backends.errors import NotFound
from backends.request import Infer, Reply, Request, Service
from backends.tensor import MAX_NAME
from cache.cached import Cached
from cache.store import MemoryStore, Store
from gateway.admit import Admit, InFlight
from gateway.fleet import Fleet
from gateway.metrics import Metrics
from gateway.observe import MeasuredArm, MeasuredBatch, Observed, store_changed
from gateway.relay import Renamed
from gateway.replicas import Replicas
from gateway.respond import STATUSES
from gateway.telemetry import Tracing
from gateway.traced import Traced, TracedBatch, TracedCall
from policies import Policy
from policies.spec import Arm, Backend, Cache, Redis, Route, Tier
from policies.spec import Endpoint as Replica
from routing.balancer import Balancer
from routing.cascade import Cascade, Rung
from routing.dispatch import Dispatch
from routing.dispatcher import Dispatcher
from routing.experiment import Split
from routing.fallback import Fallback
from routing.retry import RetryBudget
from routing.sequence import Sequences
from routing.sticky import Sticky
from routing.whole import Subject, Whole

if TYPE_CHECKING:
    from cache.redis import RedisStore


@dataclass(frozen=True, slots=True)
class Tools:
    """What every part may be given: the clock, chance and the observers."""

    now: Callable[[], float]
    tracing: Tracing
    metrics: Metrics
    connect: Callable[[Backend], tuple[Endpoint, ...]]
    chance: Random


@dataclass(slots=True)
class Things:
    """What is costly to make or to learn, found again by equal spec when a new policy is built."""

    endpoints: dict[str, tuple[Backend, tuple[Endpoint, ...]]] = field(default_factory=dict)
    dispatchers: dict[str, tuple[Backend, Dispatch]] = field(default_factory=dict)
    budgets: dict[str, RetryBudget] = field(default_factory=dict)
    fleets: dict[str, Fleet] = field(default_factory=dict)
    sequences: dict[str, Sequences] = field(default_factory=dict)
    stores: dict[tuple[str, str, Cache], Store] = field(default_factory=dict)
    redis: tuple[Redis, RedisStore] | None = None
    in_flight: InFlight = field(default_factory=InFlight)
    deadlines: Deadlines | None = None

    def fork(self) -> Things:
        """A copy that another policy may be built with, while this one stays as it is."""
        return replace(
            self,
            endpoints=dict(self.endpoints),
            dispatchers=dict(self.dispatchers),
            budgets=dict(self.budgets),
            fleets=dict(self.fleets),
            sequences=dict(self.sequences),
            stores=dict(self.stores),
        )

    def start(self) -> None:
        """Starts what works in the background, where it has not been started."""
        if self.redis is not None:
            self.redis[1].start()

    def all_endpoints(self) -> list[tuple[str, Endpoint]]:
        """Every endpoint, with the name of its backend."""
        return [(name, endpoint) for name, (_, endpoints) in self.endpoints.items() for endpoint in endpoints]

    def endpoints_beyond(self, other: Things) -> list[tuple[str, Endpoint]]:
        """The endpoints that `other` has not."""
        known = {id(endpoint) for _, endpoint in other.all_endpoints()}
        return [(name, endpoint) for name, endpoint in self.all_endpoints() if id(endpoint) not in known]

    def held(self) -> list[Endpoint | RedisStore]:
        """All that is to be closed."""
        stores = [self.redis[1]] if self.redis is not None else []
        return [*(endpoint for _, endpoint in self.all_endpoints()), *stores]

    def held_beyond(self, other: Things) -> list[Endpoint | RedisStore]:
        """All that is to be closed and that `other` has not."""
        known = set(map(id, other.held()))
        return [each for each in self.held() if id(each) not in known]

    def prune(self, policy: Policy) -> None:
        """Drops what `policy` has no use for."""
        backends = policy.backends
        caches = {(route.name, arm.name, arm.cache) for route in policy.routes.values() for arm in route.arms}
        self.endpoints = {
            name: kept
            for name, kept in self.endpoints.items()
            if name in backends and kept[0] == _replicas(backends[name])
        }
        self.dispatchers = {name: kept for name, kept in self.dispatchers.items() if kept[0] == backends.get(name)}
        self.budgets = {name: budget for name, budget in self.budgets.items() if name in backends}
        self.fleets = {name: fleet for name, fleet in self.fleets.items() if name in backends}
        self.sequences = {name: sequences for name, sequences in self.sequences.items() if name in backends}
        self.stores = {key: store for key, store in self.stores.items() if key in caches}
        shared = any(cache is not None and cache.store == "redis" for _, _, cache in caches)
        if self.redis is not None and not (shared and self.redis[0] == policy.redis):
            self.redis = None

    async def close(self) -> None:
        for each in self.held():
            await each.close()


def build(policy: Policy, things: Things, tools: Tools) -> dict[str, Service]:
    """The gateway that `policy` describes, as one service for each protocol (`http`, `grpc`)."""
    routes = {name: _route(route, policy, things, tools) for name, route in policy.routes.items()}
    proxy = _proxied(policy.backends[policy.proxy], policy, things, tools) if policy.proxy else None
    # Calls that name no model are the proxy's, else the first server's, if there is any.
    first = min(policy.backends.values(), key=lambda backend: backend.local is not None)
    general = proxy[1] if proxy else _plain(first, policy, things, tools)
    things.prune(policy)
    # The process's, as its requests in flight are: they are cut when it ends, whatever their policy.
    things.deadlines = things.deadlines or Deadlines(tools.now)
    admitted = Admit(Switch(routes, proxy, general), policy, things.in_flight, things.deadlines, tools.now)
    return {
        protocol: Observed(
            admitted,
            protocol=protocol,
            routes=policy.routes,
            proxy=policy.proxy is not None,
            policy=policy.version,
            tracing=tools.tracing,
            metrics=tools.metrics,
            access_log=policy.telemetry.access_log,
            headers=policy.telemetry.response_headers,
            statuses=STATUSES[policy.listen.compat],
            now=tools.now,
        )
        for protocol in ("http", "grpc")
    }


def _route(route: Route, policy: Policy, things: Things, tools: Tools) -> tuple[Service, Service]:
    """A route's two paths: inference, and calls that are relayed."""
    arms = {arm.name: _arm(route, arm, policy, things, tools) for arm in route.arms}
    if route.fallback is not None:
        spare = _arm(route, Arm((Tier(route.fallback, route.fallback),)), policy, things, tools)
        arms = {name: _fallen_back(paths, spare, route.fallback, tools) for name, paths in arms.items()}
    if route.experiment is None:
        return arms[route.arms[0].name]

    def split(path: int) -> Service:
        services = {
            name: MeasuredArm(paths[path], route.name, name, tools.metrics, tools.now) for name, paths in arms.items()
        }
        assert route.experiment is not None
        without_unit = partial(tools.metrics.without_unit, route.name)
        return Split(route.experiment, route.arms, services, policy.tenant_header, without_unit)

    return split(0), split(1)


def _fallen_back(
    paths: tuple[Service, Service], spare: tuple[Service, Service], name: str, tools: Tools
) -> tuple[Service, Service]:
    infer, plain = (Fallback(inner, other, name, tools.now) for inner, other in zip(paths, spare, strict=True))
    return infer, plain


def _arm(route: Route, arm: Arm, policy: Policy, things: Things, tools: Tools) -> tuple[Service, Service]:
    """An arm's two paths: inference, and calls that are relayed."""
    tiers = []
    for tier in arm.tiers:
        backend = policy.backends[tier.backend]
        inner = _batched(backend, things, tools)
        if arm.cache is not None:
            store = _store(route, arm, arm.cache, policy, things, tools)
            # Whoever else may once answer under these names must not answer from what this backend said: here after
            # a reload, and in other gateways that share the store.
            names = (route.name, arm.name, tier.name, backend.model, backend.version)
            scope = partial(_scope, names, backend, _endpoints(backend, things, tools))
            inner = Traced(Cached(inner, store, scope, arm.cache.ttl), "cache", tools.tracing)
        if len(arm.tiers) > 1 or arm.cache is not None:
            inner = Traced(inner, f"tier {tier.name}", tools.tracing)
        tiers.append(Rung(tier.name, inner, backend.model, backend.version, tier.accept))
    last = policy.backends[arm.tiers[-1].backend]
    infer: Service = Cascade(tiers, cacheable=arm.cache is not None)
    subjects = _subjects(arm, policy, things, tools)
    if subjects and (len(tiers) > 1 or arm.cache is not None or last.batch is not None):
        whole = Rung(arm.tiers[-1].name, _balanced(last, things, tools), last.model, last.version, None)
        infer = Whole(infer, Cascade([whole]), subjects)
    return (
        infer,
        Renamed(_plain(last, policy, things, tools), last.model, last.version, last.reply_bytes),
    )


def _subjects(arm: Arm, policy: Policy, things: Things, tools: Tools) -> list[Subject]:
    """The models of an arm that servers have: what runs in this process answers each row by itself."""
    backends = [policy.backends[tier.backend] for tier in arm.tiers]
    return [
        Subject(backend.model, backend.version, _endpoints(backend, things, tools))
        for backend in backends
        if backend.local is None
    ]


def _scope(names: tuple[str, ...], backend: Backend, endpoints: Sequence[Endpoint]) -> tuple[str, ...] | None:
    """What tells a tier's answers from others: its names, and its servers or what its model's files hold."""
    if backend.local is None:
        return (*names, " ".join(sorted(map(str, backend.endpoints))))
    contents = endpoints[0].contents
    return None if contents is None else (*names, contents)


def _batched(backend: Backend, things: Things, tools: Tools) -> Service:
    """A backend's inference path: its one dispatcher, or just a balancer where calls are never merged."""
    if backend.batch is None:
        return _balanced(backend, things, tools)
    endpoints = _endpoints(backend, things, tools)
    services = tuple(_observed(endpoint, backend, tools) for endpoint in endpoints)
    found = things.dispatchers.get(backend.name)
    if found is not None and found[0] == backend:
        dispatch = found[1]
    else:
        batches = tuple(TracedBatch(service, tools.tracing, {"headrace.backend": backend.name}) for service in services)
        dispatch = Dispatch(
            Dispatcher(backend.batch, len(endpoints)),
            batches,
            tools.now,
            partial(_unready, endpoints),
            _budget(backend, things, tools),
            partial(_avoided, endpoints),
            _sticky(backend, things, tools),
        )
        things.dispatchers[backend.name] = (backend, dispatch)
    return Traced(dispatch, "dispatch", tools.tracing, {"headrace.backend": backend.name})


def _unready(endpoints: Sequence[Endpoint]) -> list[int]:
    return [i for i, endpoint in enumerate(endpoints) if endpoint.ready is False]


def _avoided(endpoints: Sequence[Endpoint]) -> Callable[[str], list[int]] | None:
    """Gives the endpoints that a model is kept from; None where that is none for any."""
    if len(endpoints) < 2 or not any(endpoint.outliers for endpoint in endpoints):
        return None
    return lambda model: [i for i, endpoint in enumerate(endpoints) if endpoint.avoids(model)]


def _plain(backend: Backend, policy: Policy, things: Things, tools: Tools) -> Service:
    """A backend's path for calls that are relayed."""
    return _proxied(backend, policy, things, tools)[1]


def _proxied(backend: Backend, policy: Policy, things: Things, tools: Tools) -> tuple[Service, Service]:
    """A proxy's two paths: inference, never merged, and calls that are relayed."""
    endpoints = _endpoints(backend, things, tools)
    services = [_observed(endpoint, backend, tools) for endpoint in endpoints]
    chosen = _balanced(backend, things, tools)
    fleet = things.fleets.get(backend.name)
    if fleet is None or fleet.count != len(endpoints):
        fleet = things.fleets[backend.name] = Fleet(backend.name, len(endpoints), tools.now)
    headers = policy.telemetry.response_headers
    return chosen, Replicas(backend, endpoints, services, chosen, fleet, headers=headers)


def _balanced(backend: Backend, things: Things, tools: Tools) -> Service:
    """A backend's endpoints, one call at a time."""
    endpoints = _endpoints(backend, things, tools)
    services = [_observed(endpoint, backend, tools) for endpoint in endpoints]
    budget = _budget(backend, things, tools)
    return Balancer(endpoints, services, tools.chance, budget, _sticky(backend, things, tools))


def _sticky(backend: Backend, things: Things, tools: Tools) -> Sticky:
    """Who knows where a backend's sequences run, whatever the path and the policy."""
    sequences = things.sequences.setdefault(backend.name, Sequences())
    return Sticky(sequences, _endpoints(backend, things, tools), _budget(backend, things, tools), tools.now)


def _observed(endpoint: Endpoint, backend: Backend, tools: Tools) -> Service:
    called: Service
    if backend.local is not None:
        place = {"headrace.local.path": backend.local.path}
        called = Traced(endpoint, f"local {backend.name}", tools.tracing, place)
    else:
        where = next((spec for spec in backend.endpoints if str(spec) == endpoint.name), Replica())
        called = TracedCall(endpoint, backend.kind, where, tools.tracing)
    return MeasuredBatch(called, backend.name, tools.metrics, tools.now)


def _endpoints(backend: Backend, things: Things, tools: Tools) -> tuple[Endpoint, ...]:
    spec = _replicas(backend)
    found = things.endpoints.get(backend.name)
    if found is not None and found[0] == spec:
        return found[1]
    made = tools.connect(backend)
    things.endpoints[backend.name] = (spec, made)
    return made


def _budget(backend: Backend, things: Things, tools: Tools) -> RetryBudget:
    """A backend's one purse, whatever the path and the policy: the load that retries add is the backend's."""
    if backend.name not in things.budgets:
        things.budgets[backend.name] = RetryBudget(partial(tools.metrics.retried, backend.name))
    return things.budgets[backend.name]


def _replicas(backend: Backend) -> Backend:
    """What of a backend its endpoints depend on: all but what is decided before calls get there."""
    return replace(backend, batch=None, ready_replicas=1, control=False, shared_memory=False)


def _store(route: Route, arm: Arm, cache: Cache, policy: Policy, things: Things, tools: Tools) -> Store:
    """Redis' store, which all share; in memory an arm's own: what its policy grants it is not shared with others."""
    if cache.store == "redis":
        assert policy.redis is not None
        return _redis(policy.redis, things, tools)
    key = (route.name, arm.name, cache)
    if key not in things.stores:
        things.stores[key] = MemoryStore(cache.entries, cache.bytes, tools.now)
    return things.stores[key]


def _redis(spec: Redis, things: Things, tools: Tools) -> Store:
    if things.redis is None or things.redis[0] != spec:
        from cache.redis import RedisStore  # a third of a second, for those who need it

        store = RedisStore(spec, now=tools.now, observe=store_changed(str(spec), tools.metrics))
        things.redis = (spec, store)
    return things.redis[1]


class Switch:
    """Finds who answers: the route of that name, else the proxy; `general` takes calls that name no model.

    Routes and the proxy have two paths each: inference, and calls that are relayed.
    """

    def __init__(
        self, routes: dict[str, tuple[Service, Service]], proxy: tuple[Service, Service] | None, general: Service
    ) -> None:
        self._routes = routes
        self._proxy = proxy
        self._general = general

    async def __call__(self, request: Request, /) -> Reply:
        if len(request.model) + len(request.version) > MAX_NAME:
            raise NotFound(f"unknown model: '{request.model[:128]}...' is longer than a model's name can be")
        paths = self._routes.get(request.model) or self._proxy
        if paths is not None and request.model:
            infer, plain = paths
            return await (infer if isinstance(request.content, Infer) else plain)(request)
        if request.model:
            raise NotFound(f"unknown model: '{request.model[:128]}' is no route of this gateway")
        return await self._general(request)

"""Metrics, in Prometheus' text form; the only importer of prometheus_client.

Counters and histograms are counted by hand, in the one thread that there is, and rendered when somebody asks: a tenth
of what the library's own cost for each request. Labels are names from the policy or fixed words, never what a client
sent: a model that no route claims is `proxy`, or `unknown` where there is no proxy; what an edge refused by itself is
for `none`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from backends.request import Reply

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds: a cache hit is below a millisecond, a language model's answer takes a minute.
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class _Count:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class _Spread:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Counter:
    """A family of counters, one for each combination of labels that was asked for."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        self._about = name, text, labels
        self._children: dict[tuple[str, ...], _Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> _Count:
        return self._children.setdefault(values, _Count())

    def collect(self) -> Iterator[CounterMetricFamily]:
        name, text, labels = self._about
        family = CounterMetricFamily(name, text, labels=labels)
        for values, child in list(self._children.items()):
            family.add_metric(values, child.value)
        yield family


class Histogram:
    """A family of histograms; `buckets` are upper bounds, included."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._about = name, text, labels
        self._bounds = tuple(buckets)
        self._children: dict[tuple[str, ...], _Spread] = {}
        registry.register(self)

    def labels(self, *values: str) -> _Spread:
        return self._children.setdefault(values, _Spread(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        name, text, labels = self._about
        family = HistogramMetricFamily(name, text, labels=labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, child in list(self._children.items()):
            family.add_metric(values, list(zip(bounds, accumulate(child.counts), strict=True)), child.total)
        yield family


def _bound(metric: Any) -> Callable[..., Any]:
    """`metric.labels`, remembering its children: looking one up costs ten times what counting does."""
    return cache(metric.labels)


class _Endpoints:
    """Whether each endpoint is ready, as it is when somebody asks: one that a policy no longer has is gone."""

    def __init__(self, endpoints: Callable[[], Iterable[tuple[str, str, bool | None]]]) -> None:
        self._endpoints = endpoints

    def collect(self) -> Iterator[GaugeMetricFamily]:
        text = "1 while the endpoint says that it is ready"
        family = GaugeMetricFamily("headrace_backend_ready", text, labels=("backend", "endpoint"))
        for backend, name, ready in self._endpoints():
            if ready is not None:
                family.add_metric((backend, name), float(ready))
        yield family


class Metrics:
    """All series of one process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = _bound(
            Counter("headrace_requests", "Requests answered", ["route", "protocol", "status"], registry=registry)
        )
        self._seconds = _bound(Histogram(
            "headrace_request_duration_seconds", "From the whole request to its answer", ["route", "protocol"],
            buckets=_SECONDS, registry=registry,
        ))  # fmt: skip
        self._rows = _bound(
            Counter("headrace_rows", "Rows by the tier that answered them", ["route", "tier"], registry=registry)
        )
        self._deferred = _bound(
            Counter(
                "headrace_deferred_rows", "Rows that a tier passed on to the next", ["route", "tier"], registry=registry
            )
        )
        self._unscored = _bound(
            Counter(
                "headrace_unscored_rows",
                "Rows passed on because their confidence could not be told: is `accept` right?",
                ["route", "tier"],
                registry=registry,
            )
        )
        self._tier_failures = _bound(
            Counter(
                "headrace_tier_failures",
                "Calls that a tier failed and the next one got",
                ["route", "tier"],
                registry=registry,
            )
        )
        self._fallbacks = _bound(
            Counter("headrace_fallbacks", "Answers of a route's fallback", ["route"], registry=registry)
        )
        self._cache = _bound(
            Counter(
                "headrace_cache_rows", "Rows looked up, by outcome (hit, miss)", ["route", "result"], registry=registry
            )
        )
        self._store_changes = _bound(Counter(
            "headrace_cache_store_changes", "Changes of a shared store to `up`, `down` or `read_only`",
            ["store", "state"], registry=registry,
        ))  # fmt: skip
        self._queued = _bound(Histogram(
            "headrace_queue_duration_seconds", "Time a request waited for a slot", ["route"],
            buckets=_SECONDS, registry=registry,
        ))  # fmt: skip
        self._batch_rows = _bound(
            Histogram(
                "headrace_batch_rows",
                "Rows of the batches sent to a backend",
                ["backend"],
                buckets=_ROWS,
                registry=registry,
            )
        )
        self._batch_seconds = _bound(Histogram(
            "headrace_batch_duration_seconds", "Upstream time of a batch", ["backend"], buckets=_SECONDS,
            registry=registry,
        ))  # fmt: skip
        self._batch_failures = _bound(
            Counter(
                "headrace_batch_failures",
                "Batches that a backend did not answer",
                ["backend", "error"],
                registry=registry,
            )
        )
        self._arm_requests = _bound(
            Counter(
                "headrace_arm_requests",
                "Requests of an experiment: `answered`, `left` by their caller, or what failed",
                ["route", "arm", "outcome"],
                registry=registry,
            )
        )
        self._arm_seconds = _bound(Histogram(
            "headrace_arm_duration_seconds", "Time of an arm's answers", ["route", "arm"], buckets=_SECONDS,
            registry=registry,
        ))  # fmt: skip
        self._without_unit = _bound(
            Counter(
                "headrace_experiment_requests_without_unit",
                "Requests that went to the arm `otherwise`: they have no unit",
                ["route"],
                registry=registry,
            )
        )
        self._retries = _bound(
            Counter(
                "headrace_retries",
                "Calls sent again, to another endpoint",
                ["backend"],
                registry=registry,
            )
        )
        self._avoided = _bound(
            Counter(
                "headrace_backend_models_avoided",
                "How often an endpoint was avoided for a model that it kept failing",
                ["backend", "endpoint"],
                registry=registry,
            )
        )
        self._in_flight = Gauge("headrace_requests_in_flight", "Requests being answered", registry=registry)
        self._tasks = Gauge("headrace_tasks", "Tasks of the event loop", registry=registry)
        self._policy = Gauge("headrace_policy_info", "The policy in force", ["version"], registry=registry)
        self._reloads = Counter(
            "headrace_policy_reloads", "Policies offered to the running gateway", ["result"], registry=registry
        )
        self._defects = Counter("headrace_internal_errors", "Defects of the gateway itself", registry=registry).labels()

    def watch_in_flight(self, count: Callable[[], float]) -> None:
        self._in_flight.set_function(count)

    def watch_tasks(self, count: Callable[[], float]) -> None:
        self._tasks.set_function(count)

    def watch_endpoints(self, endpoints: Callable[[], Iterable[tuple[str, str, bool | None]]]) -> None:
        """Shows the endpoints that there are at each reading, as `(backend, name, ready)`; None is unknown."""
        self.registry.register(_Endpoints(endpoints))

    def watch_stores(self, stores: Callable[[], Iterable[tuple[str, bool | None, int]]]) -> None:
        """Shows the stores that `stores` gives at each reading, as `(name, up, rows dropped)`; None is unknown."""
        self.registry.register(_Stores(stores))

    def store_changed(self, store: str, state: str) -> None:
        self._store_changes(store, state).inc()

    def request(self, route: str, protocol: str, status: str, seconds: float) -> None:
        self._requests(route, protocol, status).inc()
        self._seconds(route, protocol).observe(seconds)

    def refused(self, protocol: str, status: str) -> None:
        """What an edge refused by itself: it was for no route, and took no time worth measuring."""
        self._requests("none", protocol, status).inc()

    def reply(self, route: str, reply: Reply) -> None:
        """What the trail says, counted."""
        if reply.degraded:
            self._fallbacks(route).inc()
        queued = 0.0
        for hop in reply.trail:
            if hop.tier:
                self._rows(route, hop.tier).inc(len(hop.rows) or (0 if hop.deferred else 1))
                if hop.deferred:
                    self._deferred(route, hop.tier).inc(hop.deferred)
                if hop.unscored:
                    self._unscored(route, hop.tier).inc(hop.unscored)
                if hop.reason == "failed":
                    self._tier_failures(route, hop.tier).inc()
            if reply.cacheable:
                self._cache(route, "hit" if hop.cached else "miss").inc(len(hop.rows))
            queued += hop.queued
        if queued:
            self._queued(route).observe(queued)

    def arm(self, route: str, arm: str, outcome: str, seconds: float) -> None:
        self._arm_requests(route, arm, outcome).inc()
        if outcome == "answered":
            self._arm_seconds(route, arm).observe(seconds)

    def without_unit(self, route: str) -> None:
        self._without_unit(route).inc()

    def batch(self, backend: str, rows: int, seconds: float) -> None:
        self._batch_rows(backend).observe(rows)
        self._batch_seconds(backend).observe(seconds)

    def batch_failed(self, backend: str, error: str) -> None:
        self._batch_failures(backend, error).inc()

    def model_avoided(self, backend: str, endpoint: str) -> None:
        self._avoided(backend, endpoint).inc()

    def retried(self, backend: str) -> None:
        self._retries(backend).inc()

    def policy(self, version: str) -> None:
        self._policy.clear()
        self._policy.labels(version).set(1)

    def reloaded(self, result: str) -> None:
        """`result` is `applied` or `refused`."""
        self._reloads.labels(result).inc()

    def defect(self) -> None:
        self._defects.inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Stores(Collector):
    """What is true of the shared stores of the policy in force: one that it no longer has is not shown as down."""

    def __init__(self, stores: Callable[[], Iterable[tuple[str, bool | None, int]]]) -> None:
        self._stores = stores

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        up = GaugeMetricFamily("headrace_cache_store_up", "1 while a shared store can be asked", labels=["store"])
        dropped = CounterMetricFamily(
            "headrace_cache_store_dropped_rows", "Rows that were to be kept and were not", labels=["store"]
        )
        for name, is_up, rows in self._stores():
            if is_up is not None:
                up.add_metric([name], int(is_up))
            dropped.add_metric([name], rows)
        yield up
        yield dropped

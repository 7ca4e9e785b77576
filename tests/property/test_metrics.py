"""Counters and histograms counted by hand render as prometheus_client's own do."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as TheirCounter
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.exposition import generate_latest

from gateway.metrics import Counter, Histogram

LABELS = st.text(max_size=5)
BUCKETS = (0.0005, 0.001, 1.0, 60.0)


@given(
    st.lists(st.tuples(LABELS, st.floats(0, 100))),
    st.lists(st.tuples(LABELS, st.floats(0, 1e6) | st.sampled_from((0.0, *BUCKETS)))),
)
def test_the_text_is_the_same(counted: list[tuple[str, float]], observed: list[tuple[str, float]]) -> None:
    def text(counter: Any, histogram: Any) -> list[str]:
        registry = CollectorRegistry()
        counts = counter("counts", "text \\ \n", ["label"], registry=registry)
        seconds = histogram("seconds", "text", ["label"], buckets=BUCKETS, registry=registry)
        for label, amount in counted:
            counts.labels(label).inc(amount)
        for label, value in observed:
            seconds.labels(label).observe(value)
        return [line for line in generate_latest(registry).decode().split("\n") if "_created" not in line]

    assert text(Counter, Histogram) == text(TheirCounter, TheirHistogram)

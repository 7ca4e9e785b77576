"""Properties of what several workers divide and join."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.joined import join_metrics
from gateway.metrics import Metrics
from gateway.workers import share
from policies.spec import Backend, Batch, Endpoint, Limits, Policy

COUNTS = st.integers(1, 256)


@given(count=COUNTS, slots=st.integers(1, 1024), max_rows=st.integers(1, 512), more=st.integers(0, 5000))
def test_shares_sum_to_the_whole_or_each_is_the_least_that_works(
    count: int, slots: int, max_rows: int, more: int
) -> None:
    batch = Batch(max_rows=max_rows, slots=slots, queue_rows=max_rows + more)
    backend = Backend(name="b", endpoints=(Endpoint("http://h:1"),), protocol="http", batch=batch)
    whole = Policy(backends={"b": backend}, limits=Limits(in_flight=slots))
    parts = [share(whole, index, count).backends["b"].batch for index in range(count)]
    for name, least in (("slots", 1), ("queue_rows", max_rows)):
        values = [getattr(part, name) for part in parts]
        assert min(values) >= least
        assert values == sorted(values, reverse=True)
        assert max(values) - min(values) <= 1
        assert sum(values) == getattr(batch, name) or min(values) == least
    assert sum(share(whole, index, count).limits.in_flight for index in range(count)) == max(slots, count)


EVENTS = st.lists(st.tuples(st.sampled_from(["r", 's"}\\', "t u"]), st.sampled_from(["200", "503"]), st.floats(0, 60)))


@given(st.lists(EVENTS, min_size=1, max_size=4))
def test_totals_of_the_joined_page_are_the_sums_of_the_pages(workers: list[list[tuple[str, str, float]]]) -> None:
    pages = []
    for events in workers:
        metrics = Metrics()
        for route, status, seconds in events:
            metrics.request(route, "http", status, seconds)
        pages.append(metrics.text().decode())

    def totals(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], list[float]]:
        found: dict[tuple[str, frozenset[tuple[str, str]]], list[float]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = frozenset((k, v) for k, v in sample.labels.items() if k != "worker")
                if sample.name.startswith("headrace_request") and not sample.name.endswith("_created"):
                    found.setdefault((sample.name, labels), []).append(sample.value)
        return found

    expected: dict[tuple[str, frozenset[tuple[str, str]]], list[float]] = {}
    for page in pages:
        for key, values in totals(page).items():
            expected.setdefault(key, []).extend(values)
    joined = join_metrics(pages)
    assert {k: sum(v) for k, v in totals(joined).items()} == {k: sum(v) for k, v in expected.items()}
    heads = [line for line in joined.split("\n") if line.startswith("# ")]
    assert len(heads) == len(set(heads))

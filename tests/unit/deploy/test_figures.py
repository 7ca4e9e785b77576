"""The demo's arithmetic."""

from __future__ import annotations

import pytest

from deploy.demo.figures import paired_interval, records
from deploy.demo.load import Answers


def test_the_paired_interval_is_that_of_the_mean_of_differences() -> None:
    low, high = paired_interval([1] * 10 + [-1] * 10 + [0] * 980)
    assert low == pytest.approx(-high)
    # sd = sqrt(20 / 999), over sqrt(1000), times 1.96
    assert high == pytest.approx(1.959964 * (20 / 999) ** 0.5 / 1000**0.5)


def test_a_case_against_another() -> None:
    counters = {
        'headrace_deferred_rows_total{route="intent",tier="distilled"}': 1.0,
        'headrace_batch_rows_sum{backend="heavy"}': 6.0,
        'headrace_batch_rows_count{backend="heavy"}': 2.0,
        'headrace_cache_rows_total{result="hit",route="intent"}': 0.0,
    }
    seconds = [0.001 * i for i in range(1, 5)]
    cascade = Answers(["a", "b", "c", "x"], seconds, {"triton": 1.0, "headrace": 1.0}, counters)
    heavy = Answers(["a", "b", "x", "x"], seconds, {"triton": 8.0, "headrace": 0.0}, {})
    values = {r.metric: r for r in records("cascade", cascade, ["a", "b", "c", "d"], ("heavy", heavy))}
    assert values["accuracy"].value == 0.75
    assert values["deferred"].value == 0.25
    assert values["mean_batch_rows"].value == 3.0
    assert values["cpu_s_per_1000"].value == 500.0
    assert (values["cpu_s_per_1000"].against, values["cpu_s_per_1000"].ratio) == ("heavy", 0.25)
    assert values["cpu_triton_s_per_1000"].value == 250.0
    assert values["difference_low"].value < 0.25 < values["difference_high"].value
    assert values["p50_ms"].value == pytest.approx(2.5)

"""Models that an endpoint fails again and again: avoided, tried in time, used again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backends import outlier
from backends.errors import (
    BackendFailed,
    BadReply,
    BadRequest,
    ConnectionLost,
    Expired,
    Failure,
    Rejected,
    TooSlow,
    Unreachable,
)
from backends.outlier import FAILURES, FIRST, LONGEST, MODELS, TRIAL, Outliers, blames


def broken(now: float = 0.0) -> Outliers:
    """A model `m` that has just failed too often."""
    cases = Outliers()
    told = [cases.failed("m", now, f"no {i}") for i in range(FAILURES)]
    assert told == [False] * (FAILURES - 1) + [True]
    return cases


def test_it_is_avoided_after_as_many_failures_in_a_row_and_no_other_model_is() -> None:
    cases = broken()
    assert cases.avoided("m", 0.0)
    assert not cases.avoided("n", 0.0)
    assert cases.reasons(0.0) == {"m": f"{FAILURES} failures in a row, the last: no {FAILURES - 1}"}


def test_an_answer_between_failures_starts_the_count_anew() -> None:
    cases = Outliers()
    for _ in range(3):
        for _ in range(FAILURES - 1):
            cases.failed("m", 0.0, "")
        assert not cases.answered("m")  # it was not avoided
    assert not cases.avoided("m", 0.0)
    assert not cases


def test_a_trial_that_is_answered_closes_the_case() -> None:
    cases = broken()
    assert cases.avoided("m", FIRST - 0.01)
    assert not cases.avoided("m", FIRST)
    cases.begin("m", FIRST)
    assert cases.avoided("m", FIRST)  # by all others, while the trial lasts
    assert cases.answered("m")
    assert not cases
    assert not cases.avoided("m", FIRST)


def test_trials_that_fail_are_ever_farther_apart_up_to_a_bound() -> None:
    cases, now, waits = broken(), 0.0, []
    for _ in range(10):
        began = now
        while cases.avoided("m", now):
            now += 0.5
        waits.append(now - began)
        cases.begin("m", now)
        assert not cases.failed("m", now, "still")  # told once
    assert waits == [min(FIRST * 2**k, LONGEST) for k in range(10)]


def test_a_trial_that_never_ends_is_followed_by_another() -> None:
    cases = broken()
    cases.begin("m", FIRST)
    assert cases.avoided("m", FIRST + TRIAL - 0.01)
    assert not cases.avoided("m", FIRST + TRIAL)


def test_failures_of_calls_that_were_under_way_change_nothing() -> None:
    cases = broken()
    for _ in range(50):
        cases.failed("m", FIRST / 2, "late")
    assert not cases.avoided("m", FIRST)


def test_after_a_load_a_trial_is_due_and_only_an_answer_closes_the_case() -> None:
    cases = broken()
    cases.retry("m", 0.5)
    cases.retry("n", 0.5)
    assert not cases.avoided("m", 0.5)
    cases.begin("m", 0.5)
    cases.failed("m", 0.6, "still")  # the load had done nothing
    assert cases.avoided("m", 0.6 + FIRST)


def test_an_answer_from_where_there_was_nowhere_else_closes_the_case() -> None:
    cases = broken()
    assert cases.answered("m")
    assert not cases.avoided("m", 0.0)


def test_callers_cannot_fill_it_with_names() -> None:
    cases = Outliers()
    for i in range(3 * MODELS):
        cases.failed(f"m{i}", 0.0, "x" * 10_000)
    assert len(cases._cases) == MODELS
    assert max(len(case.reason) for case in cases._cases.values()) == outlier._MAX_REASON


@pytest.mark.parametrize("failure", [
    lambda: BackendFailed("Stub process 'm' is not healthy.", 500), lambda: BackendFailed("", 503),
    lambda: BackendFailed("", 13, grpc=True), lambda: BackendFailed("", 14, grpc=True),
    lambda: ConnectionLost(""), lambda: BadReply(""), lambda: TooSlow(""),
])  # fmt: skip
def test_the_endpoints_own_failures_count(failure: Callable[[], Failure]) -> None:
    assert blames(failure())


@pytest.mark.parametrize("failure", [
    lambda: BackendFailed("", 400), lambda: BackendFailed("", 404), lambda: BackendFailed("", 501),
    lambda: BackendFailed("", 3, grpc=True), lambda: BackendFailed("", 5, grpc=True), lambda: Rejected("queue full"),
    lambda: BadRequest(""), lambda: Expired("backend"), lambda: Unreachable(""), lambda: None,
])  # fmt: skip
def test_nobody_elses_do(failure: Callable[[], Failure | None]) -> None:
    assert not blames(failure())

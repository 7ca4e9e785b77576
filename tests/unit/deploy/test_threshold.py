"""The walk that chooses the demo's acceptance threshold."""

from __future__ import annotations

import numpy as np

from deploy.demo import threshold

ROWS = 1000
# Row i has the i-th smallest margin.
MARGINS = np.linspace(0.001, 0.999, ROWS)
PROBABILITIES = np.stack([(1 + MARGINS) / 2, (1 - MARGINS) / 2], axis=1)
RIGHT = np.full(ROWS, True)


def wrong(*rows: int | slice) -> np.ndarray:
    right = RIGHT.copy()
    for row in rows:
        right[row] = False
    return right


def choose(cheap_right: np.ndarray, heavy_right: np.ndarray, slack: float = 0.0) -> threshold.Choice:
    return threshold.choose("margin", PROBABILITIES, cheap_right, heavy_right, slack)


def test_scores() -> None:
    p = np.array([[0.2, 0.7, 0.1], [1 / 3, 1 / 3, 1 / 3]])
    np.testing.assert_allclose(threshold.margin(p), [0.5, 0], atol=1e-12)
    np.testing.assert_allclose(threshold.max_probability(p), [0.7, 1 / 3])


def test_equal_tiers_leave_the_least_step_deferred() -> None:
    choice = choose(RIGHT, RIGHT)
    assert np.isclose(choice.deferred, 0.01)
    assert choice.threshold == threshold.margin(PROBABILITIES)[10]
    assert (choice.difference, choice.lower_bound) == (0, 0)


def test_rows_where_the_cheap_tier_is_wrong_are_deferred() -> None:
    choice = choose(wrong(slice(0, 125)), RIGHT)
    assert np.isclose(choice.deferred, 0.13)
    # With slack some of them are accepted, and the bound says how many are too many.
    loose = choose(wrong(slice(0, 125)), RIGHT, slack=0.02)
    assert loose.deferred < choice.deferred
    assert -0.02 <= loose.lower_bound < loose.difference < 0


def test_the_bound_is_the_one_of_the_paired_difference() -> None:
    cheap, heavy = wrong(700), wrong(slice(500, 530))
    choice = choose(cheap, heavy)
    d = cheap.astype(float) - heavy
    assert np.isclose(choice.difference, 29 / ROWS)
    assert np.isclose(choice.lower_bound, d.mean() - 1.2816 * d.std() / ROWS**0.5)


def test_nothing_certifiable_defers_everything() -> None:
    choice = choose(wrong(900, 950), RIGHT)
    assert (choice.deferred, choice.difference, choice.lower_bound) == (1.0, 0.0, 0.0)
    assert choice.threshold > threshold.margin(PROBABILITIES).max()


def test_the_walk_stops_at_the_first_failure() -> None:
    # Fails at 19 %, and would pass again at 10 %, where the heavy tier has been wrong more often.
    choice = choose(wrong(slice(190, 200)), wrong(slice(100, 150)))
    assert np.isclose(choice.deferred, 0.2)


def test_rows_of_one_score_are_accepted_together() -> None:
    probabilities = np.array([[0.9, 0.1]] * 500 + [[0.6, 0.4]] * 500)
    choice = threshold.choose("margin", probabilities, RIGHT, RIGHT, 0.0)
    assert choice.deferred == 0
    assert np.isclose(choice.threshold, 0.2)

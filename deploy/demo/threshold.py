"""Chooses when the cheap tier's answer is kept, so that the cascade is safely as accurate as the heavy tier.

A row is accepted when its score is at or above the threshold, and deferred to the heavy tier otherwise. On accepted
rows alone the cascade can differ from the heavy tier, so the paired difference of a row is

    d = (cheap right - heavy right) if accepted else 0        in {-1, 0, 1}

and the cascade's accuracy minus the heavy tier's is mean(d). A threshold passes when the one-sided 90 % lower bound,
mean(d) - 1.2816 * sd(d) / sqrt(rows), is not below `-slack`. A point estimate instead of the bound misses the target
on new text (a target of -0.5 points became -1.04). The scores must be out of fold for both tiers (heads.py).

The loosest of ten thousand thresholds that pass would be the best of as many tries, and passes by luck. Instead the
thresholds are walked in an order fixed beforehand, from `_STRICTEST` of the rows deferred to `_STEP`, and the walk ends
at the first that fails; the last that passed is chosen. An unsafe threshold is then chosen only if the first unsafe one
of the walk passed, which has a chance of 10 %, however many there are (fixed-sequence testing; Angelopoulos et al.,
Learn then Test, 2021). Shares of rows set the steps, not labels. When the first fails, nothing is certifiable and every
row is deferred.

What the 10 % leave out: the bound is the normal one; the predictions are those of five heads, not of the one that is
served; and the heads' constants were chosen on the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# Standard normal quantile of 90 %.
_Z = 1.2816
# Shares of rows. Where more is deferred, the tiers give one answer to nearly all accepted rows (at 40 % deferred they
# differ on a handful of ten thousand), and no test can tell which is better. A step is 100 of those rows.
_STRICTEST = 0.25
_STEP = 0.01


def margin(probabilities: np.ndarray) -> np.ndarray:
    """The largest probability less the second largest, in [0, 1]."""
    top = np.partition(probabilities, -2, axis=1)
    difference: np.ndarray = top[:, -1] - top[:, -2]
    return difference


def max_probability(probabilities: np.ndarray) -> np.ndarray:
    largest: np.ndarray = probabilities.max(axis=1)
    return largest


SCORES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"margin": margin, "max_probability": max_probability}


@dataclass(frozen=True)
class Choice:
    """A threshold on `score`, and what it gives on the rows that it was chosen on (shares of rows, not per cent)."""

    score: str
    threshold: float
    deferred: float
    difference: float
    lower_bound: float


def choose(
    score: str, probabilities: np.ndarray, cheap_right: np.ndarray, heavy_right: np.ndarray, slack: float
) -> Choice:
    """The last safe threshold of the walk under one score; accepts nothing when its first is not safe."""
    values = SCORES[score](probabilities)
    ranked = np.sort(values)
    difference = cheap_right.astype(np.float64) - heavy_right
    rows = len(ranked)
    chosen = Choice(score, float(np.nextafter(ranked[-1], np.inf)), 1.0, 0.0, 0.0)
    for share in np.arange(_STRICTEST, _STEP / 2, -_STEP):
        threshold = ranked[round(rows * share)]
        accepted = values >= threshold
        d = np.where(accepted, difference, 0)
        bound = float(d.mean() - _Z * d.std() / np.sqrt(rows))
        if bound < -slack:
            break
        chosen = Choice(score, float(threshold), float(1 - accepted.mean()), float(d.mean()), bound)
    return chosen

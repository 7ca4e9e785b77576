"""Fits the demo's two linear heads, and predicts out of fold what each would say of a text that it never saw.

Both heads are softmax regressions on fixed sentence vectors, the distilled one also on hashed words and pairs of words
(encoders.py), all weights fitted together by L-BFGS on cross entropy + L2 / 2 |weights|^2.
The targets are rows of probabilities, so that one fit serves gold labels and a teacher's answers alike:

    heavy      one-hot labels
    distilled  (1 - MIX) * one-hot + MIX * the heavy head's out-of-fold probabilities, softened by HEAT

Whoever learns from a teacher that has seen a label has seen that label too. Hence every distilled prediction for fold k
is made by a head that was fitted on the other folds, on answers of heavy heads that saw neither fold k nor the fold of
the row they answer: for each pair of folds {j, k} one heavy head is fitted on the rest. Without that the accuracy of a
distilled head on the vectors alone reads 0.911 out of fold instead of 0.899, and thresholds chosen on it are too loose.
The inputs carry nothing of other rows either: no vocabulary, no document frequencies.

Each head's temperature is fitted on its out-of-fold logits and folded into its weights, so that the softmax of what a
model serves is a probability (Guo et al., On Calibration of Modern Neural Networks, 2017).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import minimize, minimize_scalar
from threadpoolctl import threadpool_limits

from deploy.demo.encoders import BUCKETS

FOLDS = 5
# The share of the teacher's answer in the distilled head's targets, and what divides the teacher's logits beside its
# temperature: a softer answer tells more of the other classes. By nested 5-fold on the training texts: 0.911, 0.916 and
# 0.918 at a HEAT of 1, 1.5 and 2, not searched beyond; a MIX of 0.75 or 1 loses 0.003 or 0.010.
MIX = 0.5
HEAT = 2.0
# Inverse penalties, as scikit-learn's C: L2 = 1 / (C * rows). From 5-fold searches on the training texts' gold labels:
# heavy over 3, 10, 15, 20, 25, 30, 100 (flat, 0.922, from 15 to 25); distilled, on vectors alone, 0.898, 0.899, 0.893
# at 10, 30, 100. Bags weigh as much as vectors: half as much again gives 0.914
# instead of 0.916.
C_HEAVY = 20.0
C_DISTILLED = 30.0
# Where L-BFGS stops: the largest entry of the gradient. A tenth of it changes no accuracy, at 1.4 times the CPU.
_TOLERANCE = 1e-4
_STEPS = 400
_SEED = 0
# The folds that a heavy head does without: each pair, each alone, none.
_LEFT_OUT: list[tuple[int, ...]] = [*combinations(range(FOLDS), 2), *((k,) for k in range(FOLDS)), ()]
# All of these, and distilled heads: one per fold, one on all rows.
FITS = len(_LEFT_OUT) + FOLDS + 1


@dataclass(frozen=True)
class Inputs:
    """What heads read: vectors [rows, size] and sparse bags [rows, BUCKETS or 0]; rows of both have unit length."""

    vectors: np.ndarray
    bags: Any

    @classmethod
    def of(cls, vectors: np.ndarray, buckets: Sequence[np.ndarray] = ()) -> Inputs:
        """Bags from each row's distinct buckets, ascending; of no columns when none are given."""
        if not buckets:
            return cls(vectors, sparse.csr_array((len(vectors), 0), dtype=np.float32))
        counts = np.array([len(row) for row in buckets])
        values = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts).astype(np.float32)
        starts = np.concatenate([[0], np.cumsum(counts)])
        return cls(vectors, sparse.csr_array((values, np.concatenate(buckets), starts), (len(buckets), BUCKETS)))

    def __getitem__(self, rows: np.ndarray) -> Inputs:
        return Inputs(self.vectors[rows], self.bags[np.flatnonzero(rows)])


@dataclass(frozen=True)
class Linear:
    """logits = vectors @ weights + bags @ bucket_weights + bias; weights [size, classes]."""

    weights: np.ndarray
    bucket_weights: np.ndarray
    bias: np.ndarray

    def logits(self, inputs: Inputs) -> np.ndarray:
        product: np.ndarray = inputs.vectors @ self.weights + inputs.bags @ self.bucket_weights + self.bias
        return product

    def scaled(self, temperature: float) -> Linear:
        return Linear(*((part / temperature).astype(np.float32) for part in vars(self).values()))


@dataclass(frozen=True)
class Fitted:
    """Both heads, scaled, and their out-of-fold probabilities [rows, classes] for the training rows."""

    heavy: Linear
    distilled: Linear
    heavy_seen: np.ndarray
    distilled_seen: np.ndarray


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return shares


def fit(inputs: Inputs, targets: np.ndarray, c: float) -> Linear:
    """The softmax regression of `targets` [rows, classes], whose rows sum to one, on `inputs`."""
    rows, size = inputs.vectors.shape
    width, classes = size + inputs.bags.shape[1], targets.shape[1]
    l2 = 1 / (c * rows)
    transposed = inputs.bags.T.tocsr()

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        solution = flat.astype(np.float32).reshape(width + 1, classes)
        weights = solution[:-1]
        logits = Linear(weights[:size], weights[size:], solution[-1]).logits(inputs)
        logits -= logits.max(axis=1, keepdims=True)
        powers = np.exp(logits)
        total = powers.sum(axis=1, keepdims=True)
        logits -= np.log(total)
        value = -float(np.vdot(targets, logits)) / rows + l2 / 2 * float(np.vdot(weights, weights))
        powers /= total
        powers -= targets
        powers /= rows
        gradient = np.vstack([inputs.vectors.T @ powers, transposed @ powers, powers.sum(axis=0, keepdims=True)])
        gradient[:-1] += l2 * weights
        return value, gradient.ravel().astype(np.float64)

    options = {"maxiter": _STEPS, "gtol": _TOLERANCE, "maxcor": 10}
    found = minimize(loss, np.zeros((width + 1) * classes), jac=True, method="L-BFGS-B", options=options)
    solution = found.x.reshape(width + 1, classes).astype(np.float32)
    return Linear(solution[:size], solution[size:-1], solution[-1])


def temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The number that out-of-fold logits are divided by for the least cross entropy."""
    rows = np.arange(len(labels))

    def entropy(log_of: float) -> float:
        return -float(np.log(np.maximum(softmax(logits / np.exp(log_of))[rows, labels], 1e-12)).mean())

    return float(np.exp(minimize_scalar(entropy, bounds=(-3, 3), method="bounded").x))


def folds(labels: np.ndarray) -> np.ndarray:
    """A fold number for each row, every class spread evenly; the same at every call."""
    order = np.random.default_rng(_SEED).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    number = np.empty(len(labels), np.int64)
    number[by_class] = np.arange(len(labels)) % FOLDS
    return number


def fit_both(heavy_inputs: Inputs, cheap_inputs: Inputs, labels: np.ndarray, step: Callable[[], None]) -> Fitted:
    """Fits both heads and their out-of-fold predictions; calls `step` after each of the `FITS` fits, from any thread.

    Fits run side by side, each on one thread: BLAS threads that wait for one another spin, which costs five times the
    CPU on a busy machine; and so the result does not depend on the number of cores.
    """
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
        return _fit_both(heavy_inputs, cheap_inputs, labels, step, pool)


def _fit_both(
    heavy_inputs: Inputs,
    cheap_inputs: Inputs,
    labels: np.ndarray,
    step: Callable[[], None],
    pool: ThreadPoolExecutor,
) -> Fitted:
    gold = np.eye(int(labels.max()) + 1, dtype=np.float32)[labels]
    fold = folds(labels)

    def heavy_without(left_out: tuple[int, ...]) -> Linear:
        kept = ~np.isin(fold, left_out)
        head = fit(heavy_inputs[kept], gold[kept], C_HEAVY)
        step()
        return head

    without = dict(zip(_LEFT_OUT, pool.map(heavy_without, _LEFT_OUT), strict=True))
    heavy_logits = np.empty_like(gold)
    for k in range(FOLDS):
        heavy_logits[fold == k] = without[(k,)].logits(heavy_inputs[fold == k])
    heavy_heat = temperature(heavy_logits, labels)
    heavy_seen = softmax(heavy_logits / heavy_heat)

    def distil(rows: np.ndarray, teacher: np.ndarray) -> Linear:
        head = fit(cheap_inputs[rows], (1 - MIX) * gold[rows] + MIX * teacher[rows], C_DISTILLED)
        step()
        return head

    def distilled_without(k: int) -> Linear:
        teacher = np.zeros_like(gold)
        for j in set(range(FOLDS)) - {k}:
            logits = without[min(j, k), max(j, k)].logits(heavy_inputs[fold == j])
            teacher[fold == j] = softmax(logits / (heavy_heat * HEAT))
        return distil(fold != k, teacher)

    cheap_logits = np.empty_like(gold)
    for k, head in enumerate(pool.map(distilled_without, range(FOLDS))):
        cheap_logits[fold == k] = head.logits(cheap_inputs[fold == k])
    cheap_heat = temperature(cheap_logits, labels)

    return Fitted(
        heavy=without[()].scaled(heavy_heat),
        distilled=distil(np.full(len(labels), True), softmax(heavy_logits / (heavy_heat * HEAT))).scaled(cheap_heat),
        heavy_seen=heavy_seen,
        distilled_seen=softmax(cheap_logits / cheap_heat),
    )

"""The demo's heads: sparse inputs against dense ones, the optimum, and that nothing leaks between folds."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from deploy.demo import heads
from deploy.demo.encoders import buckets, unit


@pytest.fixture(scope="module")
def inputs() -> heads.Inputs:
    rng = np.random.default_rng(1)
    vectors = unit(rng.normal(size=(60, 5))).astype(np.float32)
    return heads.Inputs.of(vectors, [buckets(rng.integers(3, 9, size=n % 6).tolist()) for n in range(60)])


def narrow(inputs: heads.Inputs) -> heads.Inputs:
    """Without the buckets that no row has, so that fits take no time."""
    return heads.Inputs(inputs.vectors, inputs.bags[:, np.flatnonzero(inputs.bags.sum(axis=0))])


LABELS = np.arange(60) % 3


def test_bags_have_unit_length_and_a_text_without_words_has_none(inputs: heads.Inputs) -> None:
    lengths = np.linalg.norm(inputs.bags.toarray(), axis=1)
    np.testing.assert_allclose(lengths, np.where(np.arange(60) % 6, 1, 0), atol=1e-6)


def test_a_fit_on_bags_is_the_fit_on_their_dense_form(inputs: heads.Inputs) -> None:
    gold = np.eye(3, dtype=np.float32)[LABELS]
    inputs = narrow(inputs)
    dense = heads.Inputs.of(np.hstack([inputs.vectors, inputs.bags.toarray()]))
    sparse_logits = heads.fit(inputs, gold, c=30.0).logits(inputs)
    np.testing.assert_allclose(sparse_logits, heads.fit(dense, gold, c=30.0).logits(dense), rtol=0.02, atol=0.02)


def test_inputs_select_rows_of_both_parts(inputs: heads.Inputs) -> None:
    some = inputs[LABELS == 1]
    assert (some.vectors == inputs.vectors[1::3]).all()
    assert (some.bags.toarray() == inputs.bags.toarray()[1::3]).all()


def test_folds_spread_every_class_evenly() -> None:
    fold = heads.folds(LABELS)
    for label in range(3):
        assert np.bincount(fold[label == LABELS]).tolist() == [4] * heads.FOLDS
    assert (heads.folds(LABELS) == fold).all()


def test_the_temperature_undoes_a_scale() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(4000, 5))
    shares = heads.softmax(logits)
    labels = np.array([rng.choice(5, p=row) for row in shares])
    assert heads.temperature(3 * logits, labels) == pytest.approx(3, rel=0.15)


def test_no_prediction_out_of_fold_knows_its_own_label(inputs: heads.Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other labels in one fold change no out-of-fold prediction of that fold (temperatures aside, held at 1 here)."""
    monkeypatch.setattr(heads, "temperature", lambda logits, labels: 1.0)
    fold = heads.folds(LABELS)
    monkeypatch.setattr(heads, "folds", lambda labels: fold)
    vectors, inputs = heads.Inputs.of(inputs.vectors), narrow(inputs)
    steps: list[None] = []
    before = heads.fit_both(vectors, inputs, LABELS, lambda: steps.append(None))
    other = np.where(fold == 2, (LABELS + 1) % 3, LABELS)
    after = heads.fit_both(vectors, inputs, other, lambda: None)
    assert len(steps) == heads.FITS == len(list(combinations(range(heads.FOLDS), 2))) + 2 * heads.FOLDS + 2
    assert (before.heavy_seen[fold == 2] == after.heavy_seen[fold == 2]).all()
    assert (before.distilled_seen[fold == 2] == after.distilled_seen[fold == 2]).all()
    assert (before.distilled_seen[fold != 2] != after.distilled_seen[fold != 2]).any()

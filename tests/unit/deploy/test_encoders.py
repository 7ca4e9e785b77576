"""The demo's cheap features: stable hashing, and a head that reads them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from deploy.demo.encoders import BUCKETS, Head, buckets, groups_by_length

TEXT = [825, 508, 474, 437, 565, 590, 5881]


def test_buckets_are_the_same_everywhere() -> None:
    # By hand in integers of any size, so that no overflow of a machine's word takes part.
    keys = [*TEXT, *(((a + 1) << 16) | b for a, b in pairwise(TEXT))]
    by_hand = sorted({key * 0x9E3779B97F4A7C15 % 2**64 * BUCKETS // 2**64 for key in keys})
    assert buckets(TEXT).tolist() == by_hand
    assert buckets([474, 505]).tolist() == [1755, 15533, 15783]


def test_buckets_are_distinct_and_know_the_order_of_words() -> None:
    assert buckets([]).tolist() == []
    assert len(buckets([7])) == 1
    assert buckets([7, 7, 7]).tolist() == buckets([7, 7]).tolist()
    assert set(buckets([7, 8])) != set(buckets([8, 7]))


def test_a_row_has_the_same_bits_in_any_batch_and_none_of_its_buckets_is_lost(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    weights, bucket_weights, bias = (rng.normal(size=s).astype(np.float32) for s in ((6, 4), (BUCKETS, 4), (4,)))
    file = tmp_path / "head.npz"
    np.savez(file, weights=weights, bucket_weights=bucket_weights, bias=bias, labels=np.array(["a", "b", "c", "d"]))
    head = Head(file)
    vectors = rng.normal(size=(3, 6)).astype(np.float32)
    rows = [buckets(TEXT), buckets([]), buckets([1, 2])]
    together = head.logits(vectors, rows)
    for row in range(3):
        assert (head.logits(vectors[row : row + 1], rows[row : row + 1]) == together[row]).all()
    bag = np.zeros((3, BUCKETS))
    for row, chosen in enumerate(rows):
        bag[row, chosen] = 1 / np.sqrt(max(len(chosen), 1))
    np.testing.assert_allclose(together, vectors @ weights + bag @ bucket_weights + bias, atol=1e-5)
    np.testing.assert_allclose(head.logits(vectors), vectors @ weights + bias, atol=1e-5)


def test_groups_hold_equal_lengths_and_every_row_once() -> None:
    lengths = [3, 5] * 10 + [4]
    groups = groups_by_length(lengths)
    assert sorted(index for group in groups for index in group) == list(range(21))
    assert all(len({lengths[index] for index in group}) == 1 and len(group) <= 8 for group in groups)

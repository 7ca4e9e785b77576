import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.request import Answer, Tensors
from backends.tensor import Tensor
from policies.spec import Accept
from routing.confidence import confidence

NAN, INF = math.nan, math.inf


def judge(
    block: Any, values: str = "probabilities", score: str = "max_probability", datatype: str = "FP64", rows: int = 0
) -> list[float]:
    """Confidence of each row of a block, in the datatype's precision."""
    dtype = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "INT32": "<i4"}[datatype]
    array = np.array(block, dtype)
    answer = Answer(Tensors.of((Tensor("p", datatype, array.shape, array.tobytes()),)))
    accept = Accept("p", values, score, 0.5)  # type: ignore[arg-type]
    return confidence(answer, accept, rows or len(block)).tolist()  # type: ignore[no-any-return]


def reference(row: list[float], values: str, score: str) -> float:
    if values == "logits":
        powers = [math.exp(x - max(row)) for x in row]
        row = [power / math.fsum(powers) for power in powers]
    first, second = sorted(row, reverse=True)[:2]
    if score == "max_probability":
        return first
    if score == "margin":
        return first - second
    return 1 + math.fsum(p * math.log(p) for p in row if p > 0) / math.log(len(row))


@given(
    st.integers(2, 6).flatmap(
        lambda classes: st.lists(
            st.lists(st.floats(-700, 700), min_size=classes, max_size=classes), min_size=1, max_size=4
        )
    ),
    st.sampled_from(["max_probability", "margin", "entropy"]),
)
def test_the_formulae_against_a_plain_reference(block: list[list[float]], score: str) -> None:
    logits = judge(block, "logits", score)
    assert logits == pytest.approx([reference(row, "logits", score) for row in block], abs=1e-9)
    assert all(0 <= each <= 1 for each in logits)
    p = [[math.exp(x - max(row)) for x in row] for row in block]
    p = [[x / sum(row) for x in row] for row in p]
    assert judge(p, "probabilities", score) == pytest.approx(logits, abs=1e-9)


@pytest.mark.parametrize("score", ["max_probability", "margin", "entropy"])
def test_certain_and_unknown(score: str) -> None:
    assert judge([[0, 0, 1]], score=score) == [1.0]
    assert judge([[1000, 0, -1000]], "logits", score) == [1.0]
    expected = 0.25 if score == "max_probability" else 0.0
    assert judge([[0.25] * 4], score=score) == pytest.approx([expected])


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64"])
def test_every_float_that_has_a_numpy_form(datatype: str) -> None:
    assert judge([[0.25, 0.75]], datatype=datatype) == [0.75]


@pytest.mark.parametrize("values", ["probabilities", "logits"])
@pytest.mark.parametrize("score", ["max_probability", "margin", "entropy"])
@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
def test_a_row_that_is_not_finite_is_uncertain_and_leaves_others_alone(values: str, score: str, wrong: float) -> None:
    scores = judge([[0.2, 0.8], [wrong, 0.8], [0.9, 0.1]], values, score)
    assert scores[1] == -1.0
    assert scores[0] == judge([[0.2, 0.8]], values, score)[0] >= 0
    assert scores[2] == judge([[0.9, 0.1]], values, score)[0] >= 0


@pytest.mark.parametrize("score", ["max_probability", "margin", "entropy"])
@pytest.mark.parametrize("row", [[3.0, 2.5, -4.0], [1.5, 1.4, 0.0], [-0.5, 0.9, 0.6], [5.0, 5.0, 5.0]])
def test_what_cannot_be_probabilities_is_uncertain(score: str, row: list[float]) -> None:
    assert judge([row], score=score) == [-1.0]


def test_rounding_is_forgiven() -> None:
    assert judge([[1.0000001, -1e-7]]) == [1.0]


@pytest.mark.parametrize(
    ("block", "rows", "datatype"),
    [
        ([[1.0]], 1, "FP64"),  # one class says nothing
        ([[0.1, 0.9]], 2, "FP64"),  # not the rows that were asked
        ([0.1, 0.9], 2, "FP64"),
        ([[[0.1, 0.9], [0.2, 0.8]]], 1, "FP64"),
        ([[0, 1]], 1, "INT32"),
        (np.zeros((1, 0)), 1, "FP64"),
    ],
)
def test_an_output_of_another_form_is_uncertain(block: Any, rows: int, datatype: str) -> None:
    assert judge(block, datatype=datatype, rows=rows) == [-1.0] * rows


def test_a_missing_output_is_uncertain() -> None:
    accept = Accept("p", "logits", "margin", 0.0)
    assert confidence(Answer(Tensors.of(())), accept, 2).tolist() == [-1.0, -1.0]
    binary = Tensor("p", "BF16", (1, 2), bytes(4))
    assert confidence(Answer(Tensors.of((binary,))), accept, 1).tolist() == [-1.0]

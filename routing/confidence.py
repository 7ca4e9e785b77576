"""Confidence of each row, from a tier's own output: one number in [0, 1], higher is surer.

    max_probability   p1
    margin            p1 - p2
    entropy           1 - H(p) / ln(classes)

with p the probabilities, or softmax of the logits, in descending order. A row whose numbers are not finite, or whose
output is missing or of another form, has confidence -1: no threshold accepts it, so that it is asked of the next tier.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backends.request import Answer
from backends.tensor import Tensor
from policies.spec import Accept

_ROUNDING = 1e-6  # several steps of FP32 near 1, summed over classes
_DTYPES = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}


def confidence(answer: Answer, accept: Accept, rows: int) -> NDArray[np.float64]:
    """Confidence `[rows]` of an answer for `rows` rows, as `accept` asks for it."""
    tensor = next((t for t in answer.outputs.decoded if t.name == accept.output), None)
    block = _block(tensor, rows)
    if block is None:
        return np.full(rows, -1.0)
    return score(block, accept.values, accept.score)


def score(block: NDArray[np.float64], values: str, name: str) -> NDArray[np.float64]:
    """Confidence `[rows]` of a block `[rows, classes]`, two classes at least."""
    with np.errstate(all="ignore"):
        if values == "logits":
            shifted = np.exp(block - block.max(axis=1, keepdims=True))
            p = shifted / shifted.sum(axis=1, keepdims=True)
        else:
            p = block
        if name == "entropy":
            h = -(p * np.log(np.clip(p, 1e-300, None))).sum(axis=1)
            result = 1.0 - h / np.log(p.shape[1])
        else:
            top = np.partition(p, p.shape[1] - 2, axis=1)
            result = top[:, -1] - top[:, -2] if name == "margin" else top[:, -1]
        # Outside of [0, 1] by rounding is forgiven; by more, it was no probability.
        sound = np.isfinite(block).all(axis=1) & (_within(p).all(axis=1)) & _within(result)
    return np.where(sound, np.clip(result, 0.0, 1.0), -1.0)


def _within(numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    return (numbers >= -_ROUNDING) & (numbers <= 1.0 + _ROUNDING)


def _block(tensor: Tensor | None, rows: int) -> NDArray[np.float64] | None:
    if tensor is None or tensor.datatype not in _DTYPES or len(tensor.shape) != 2:
        return None
    if tensor.shape[0] != rows or tensor.shape[1] < 2:
        return None
    return np.frombuffer(tensor.data, _DTYPES[tensor.datatype]).reshape(tensor.shape).astype(np.float64)

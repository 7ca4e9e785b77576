"""The demo's Triton models (python backend): copied as each model's `model.py`, which one it is stands in its config.

The parameter `kind` names the answer (see `_KINDS`); `assets` is the folder of weights, relative to the model's own
folder. All rows of the requests that Triton hands over at once are answered together; a request that is at fault
(ids out of range, a row without tokens) fails alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

Arrays = dict[str, np.ndarray]
Answer = Callable[[list[Arrays]], list[Arrays | str]]


class TritonPythonModel:
    """What Triton's python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._inputs = [part["name"] for part in config["input"]]
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        folder = Path(args["model_repository"])
        assets = (folder / parameters.get("assets", "")).resolve()
        self._answer: Answer = _KINDS[parameters["kind"]](assets)

    def execute(self, requests: list[Any]) -> list[Any]:
        asked = []
        for request in requests:
            tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in self._inputs}
            asked.append({name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None})
        return [_response(answer) for answer in self._answer(asked)]


def _response(answer: Arrays | str) -> Any:
    if isinstance(answer, str):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(answer, pb_utils.TritonError.INVALID_ARG))
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in answer.items()])


def _together(rows_of: Callable[[Arrays], list[Any]], answer: Callable[[list[Any]], Arrays]) -> Answer:
    """Requests to rows, one `answer` for all rows, and its arrays cut back into one part per request."""

    def batch(asked: list[Arrays]) -> list[Arrays | str]:
        parts: list[list[Any] | str] = []
        for arrays in asked:
            try:
                parts.append(rows_of(arrays))
            except ValueError as fault:
                parts.append(str(fault))
        rows = [row for part in parts if not isinstance(part, str) for row in part]
        whole = answer(rows) if rows else {}
        out: list[Arrays | str] = []
        start = 0
        for part in parts:
            if isinstance(part, str):
                out.append(part)
                continue
            stop = start + len(part)
            out.append({name: array[start:stop] for name, array in whole.items()})
            start = stop
        return out

    return batch


def _texts(arrays: Arrays) -> list[str]:
    return [text.decode("utf-8", "replace") for text in arrays["TEXT"].reshape(-1)]


def _tokens(arrays: Arrays) -> list[list[int]]:
    """The ids that the mask selects, row by row: what a client or a gateway padded is dropped here."""
    from encoders import VOCABULARY

    ids, mask = arrays["input_ids"], arrays["attention_mask"]
    if ids.shape != mask.shape:
        raise ValueError(f"input_ids and attention_mask must have one shape, got {ids.shape} and {mask.shape}")
    rows = [row[chosen != 0].tolist() for row, chosen in zip(ids, mask, strict=True)]
    for number, row in enumerate(rows):
        if not row:
            raise ValueError(f"row {number}: attention_mask selects no token")
        if min(row) < 0 or max(row) >= VOCABULARY:
            raise ValueError(f"row {number}: input_ids must be in [0, {VOCABULARY})")
    return rows


def _labelled(logits: np.ndarray, labels: list[bytes]) -> Arrays:
    label = np.array([[labels[best]] for best in logits.argmax(axis=1)], dtype=np.object_)
    return {"LOGITS": logits, "LABEL": label}


def _heavy(assets: Path, ids: bool) -> Answer:
    from encoders import Head, MiniLM, WordPieces

    encoder, head, pieces = MiniLM(assets), Head(assets / "heavy.npz"), WordPieces(assets)

    def answer(rows: list[Any]) -> Arrays:
        return _labelled(head.logits(encoder.embed(rows if ids else pieces.ids(rows))), head.labels)

    return _together(_tokens if ids else _texts, answer)


def _distilled(assets: Path, ids: bool) -> Answer:
    from encoders import Head, WordPieces, Words

    encoder, head = Words(assets), Head(assets / "distilled.npz")
    pieces = WordPieces(assets) if ids else None

    def answer(rows: list[Any]) -> Arrays:
        return _labelled(head.logits(*encoder.features(pieces.texts(rows) if pieces else rows)), head.labels)

    return _together(_tokens if ids else _texts, answer)


def _embed(assets: Path) -> Answer:
    from encoders import MiniLM, WordPieces

    encoder, pieces = MiniLM(assets), WordPieces(assets)
    return _together(_texts, lambda rows: {"EMBEDDING": encoder.embed(pieces.ids(rows))})


def _echo(_: Path) -> Answer:
    """Every input that came, back under its output's name."""
    return lambda asked: [
        {"OUT_" + name.removeprefix("IN_"): array for name, array in arrays.items()} for arrays in asked
    ]


def _rowsum(_: Path) -> Answer:
    """Y = X @ M for a fixed M [16, 4] of small binary fractions, one row at a time: the same bits in any batch."""
    matrix = (np.arange(64, dtype=np.float32).reshape(16, 4) % 7 - 3) / 8

    def one(arrays: Arrays) -> Arrays | str:
        return {"Y": np.stack([row @ matrix for row in arrays["X"]])}

    return lambda asked: [one(arrays) for arrays in asked]


_KINDS: dict[str, Callable[[Path], Answer]] = {
    "intent_heavy": lambda assets: _heavy(assets, ids=False),
    "intent_heavy_ids": lambda assets: _heavy(assets, ids=True),
    "intent_distilled": lambda assets: _distilled(assets, ids=False),
    "intent_distilled_ids": lambda assets: _distilled(assets, ids=True),
    "embed": _embed,
    "echo": _echo,
    "rowsum": _rowsum,
}

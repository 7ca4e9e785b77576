"""Static embeddings: the numbers are the format's, and every kind of broken folder is told in one line."""
# ruff: noqa: E501 - messages stand beside what causes them

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.errors import BadRequest
from backends.local.load import load
from backends.local.model import Spec, Unusable
from backends.local.static import Static
from backends.tensor import Tensor, join_elements, split_elements
from deploy.demo import encoders
from tests.support.models import DESCRIPTION, WORDS, static, static_tensors


def tensor(*texts: bytes) -> Tensor:
    return Tensor("TEXT", "BYTES", (len(texts), 1), join_elements(list(texts)))


def classifier(folder: Path, **changed: Any) -> Static:
    made = load(static(folder, {**DESCRIPTION, **changed}))
    assert isinstance(made, Static)
    return made


def by_hand(ids: list[int], buckets: int = 16) -> np.ndarray:
    """The formula of the format, in numbers of double precision."""
    parts = {name: array.astype(np.float64) for name, array in static_tensors().items()}
    logits: np.ndarray = parts["bias"]
    if ids:
        vector = parts["embeddings"][ids].mean(axis=0)
        vector /= np.sqrt((vector**2).sum())
        keys = [*ids, *((a + 1 << 16) | b for a, b in pairwise(ids))]
        chosen = sorted({key * 0x9E3779B97F4A7C15 % 2**64 * buckets // 2**64 for key in keys})
        logits = vector @ parts["weights"] + logits + parts["bucket_weights"][chosen].sum(axis=0) / len(chosen) ** 0.5
    return logits


def test_the_numbers_are_the_formats(tmp_path: Path) -> None:
    model = classifier(tmp_path)
    texts = ["Red, GREEN card!", "blue", "purple red", "", "?!"]
    ids = [[1, 2, 4], [3], [0, 1], [], []]
    np.testing.assert_allclose(model.logits(texts), [by_hand(row) for row in ids], atol=1e-5)


def test_a_row_has_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    model = classifier(tmp_path)
    texts = ["red green", "card", "", "blue blue red"]
    together = model.logits(texts)
    for row, text in enumerate(texts):
        assert model.logits([text])[0].tobytes() == together[row].tobytes()


def test_the_bits_are_those_of_the_demos_model_on_triton(tmp_path: Path) -> None:
    parts = static_tensors()
    assert (encoders.BUCKETS, encoders.Words.size) == (1 << 14, 256)
    rng = np.random.default_rng(1)
    parts["embeddings"] = rng.normal(size=(len(WORDS), 256)).astype(np.float16)
    parts["weights"] = rng.normal(size=(256, 3)).astype(np.float32)
    parts["bucket_weights"] = rng.normal(size=(1 << 14, 3)).astype(np.float32)
    model = load(static(tmp_path, tensors=parts))
    assert isinstance(model, Static)
    np.save(tmp_path / "words.npy", parts["embeddings"])
    (tmp_path / "words-tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    np.savez(tmp_path / "head.npz", labels=["a", "b", "c"], **{k: v for k, v in parts.items() if k != "embeddings"})
    texts = ["Red, GREEN card!", "blue", "purple red", "", "red red red card"]
    theirs = encoders.Head(tmp_path / "head.npz").logits(*encoders.Words(tmp_path).features(texts))
    assert model.logits(texts).tobytes() == theirs.tobytes()


def test_options_of_the_description(tmp_path: Path) -> None:
    as_is = classifier(tmp_path / "a", text="as_is")
    np.testing.assert_allclose(as_is.logits(["Red green"]), [by_hand([0, 2])], atol=1e-5)
    short = classifier(tmp_path / "b", max_tokens=2)
    assert short.logits(["red green blue"]).tobytes() == short.logits(["red green"]).tobytes()
    long = classifier(tmp_path / "c", unit_length=False, label="")
    assert long.outputs == (Spec("LOGITS", "FP32", (-1, 3)),)
    assert not np.allclose(long.logits(["red"]), by_hand([1]))
    plain = static_tensors()
    del plain["bucket_weights"]
    model = load(static(tmp_path / "d", tensors=plain))
    assert isinstance(model, Static)
    vector = plain["embeddings"][1].astype(np.float32)
    expected = vector / np.linalg.norm(vector) @ plain["weights"] + plain["bias"]
    np.testing.assert_allclose(model.logits(["red"])[0], expected, atol=1e-5)


def test_tensors_in_and_tensors_out(tmp_path: Path) -> None:
    model = classifier(tmp_path)
    assert model.inputs == (Spec("TEXT", "BYTES", (-1, 1)),)
    assert model.outputs == (Spec("LOGITS", "FP32", (-1, 3)), Spec("LABEL", "BYTES", (-1, 1)))
    logits, label = model.run({"TEXT": tensor(b"red", b"blue card")}, {"LABEL", "LOGITS"})
    assert (logits.name, logits.datatype, logits.shape) == ("LOGITS", "FP32", (2, 3))
    values = np.frombuffer(logits.data, "<f4").reshape(2, 3)
    assert split_elements(label.data) == [DESCRIPTION["labels"][i].encode() for i in values.argmax(axis=1)]  # type: ignore[index]
    assert [t.name for t in model.run({"TEXT": tensor(b"red")}, {"LABEL"})] == ["LABEL"]
    assert [(t.shape, bytes(t.data)) for t in model.run({"TEXT": tensor()}, {"LABEL", "LOGITS"})] == [
        ((0, 3), b""),
        ((0, 1), b""),
    ]
    with pytest.raises(BadRequest, match="input 'TEXT': row 1 is not UTF-8: invalid start byte at byte 2"):
        model.run({"TEXT": tensor(b"red", b"ab\xff")}, {"LABEL"})


def replaced(name: str, array: Any) -> dict[str, np.ndarray]:
    return {**static_tensors(), name: array}


F32 = np.float32
BROKEN_TENSORS: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "one missing": (
        {name: array for name, array in static_tensors().items() if name != "bias"},
        "model.safetensors: bias is missing",
    ),
    "one too many": (
        replaced("more", np.zeros(3, F32)),
        "model.safetensors: unknown tensor 'more', expected embeddings, weights, bias, bucket_weights",
    ),
    "embeddings of doubles": (
        replaced("embeddings", np.zeros((5, 4))),
        "model.safetensors: embeddings: expected F16 or F32 [vocabulary, size], got F64 [5, 4]",
    ),
    "flat embeddings": (
        replaced("embeddings", np.zeros(5, F32)),
        "model.safetensors: embeddings: expected F16 or F32 [vocabulary, size], got F32 [5]",
    ),
    "no embeddings": (
        replaced("embeddings", np.zeros((0, 4), F32)),
        "model.safetensors: embeddings: expected F16 or F32 [vocabulary, size], got F32 [0, 4]",
    ),
    "weights of another size": (
        replaced("weights", np.zeros((6, 3), F32)),
        "model.safetensors: weights: expected F32 [4, 3], by the embeddings and labels, got F32 [6, 3]",
    ),
    "weights of half precision": (
        replaced("weights", np.zeros((4, 3), np.float16)),
        "model.safetensors: weights: expected F32 [4, 3], by the embeddings and labels, got F16 [4, 3]",
    ),
    "a bias for other classes": (
        replaced("bias", np.zeros(4, F32)),
        "model.safetensors: bias: expected F32 [3], by the labels, got F32 [4]",
    ),
    "buckets for other classes": (
        replaced("bucket_weights", np.zeros((16, 2), F32)),
        "model.safetensors: bucket_weights: expected F32 [buckets, 3], by the labels, got F32 [16, 2]",
    ),
    "twelve buckets": (
        replaced("bucket_weights", np.zeros((12, 3), F32)),
        "model.safetensors: bucket_weights: expected a power of two of rows, got 12",
    ),
    "too large for pairs": (
        replaced("embeddings", np.zeros((70000, 4), np.float16)),
        "model.safetensors: with bucket_weights at most 65536 embeddings have keys, got 70000",
    ),
    "no number": (
        replaced("bias", np.array([0, np.nan, 0], F32)),
        "model.safetensors: bias holds NaN or infinite numbers",
    ),
    "fewer embeddings than words": (
        replaced("embeddings", np.zeros((3, 4), F32)),
        "tokenizer.json: has ids up to 4, and model.safetensors embeddings for 3",
    ),
}


@pytest.mark.parametrize("case", BROKEN_TENSORS)
def test_tensors_that_are_not_those_of_the_format(case: str, tmp_path: Path) -> None:
    tensors, told = BROKEN_TENSORS[case]
    with pytest.raises(Unusable) as error:
        load(static(tmp_path, tensors=tensors))
    assert str(error.value) == told


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"format": "pickle"}, "model.json: Invalid enum value 'pickle' - at `$.format`"),
        ({"version": 2}, "model.json: Invalid enum value 2 - at `$.version`"),
        ({"labels": []}, "model.json: Expected `array` of length >= 1 - at `$.labels`"),
        ({"labels": ["a", 1, "c"]}, "model.json: Expected `str`, got `int` - at `$.labels[1]`"),
        ({"pooling": "max"}, "model.json: Invalid enum value 'max' - at `$.pooling`"),
        ({"text": "upper"}, "model.json: Invalid enum value 'upper' - at `$.text`"),
        ({"unit_length": 1}, "model.json: Expected `bool`, got `int` - at `$.unit_length`"),
        ({"max_tokens": 0}, "model.json: Expected `int` >= 1 - at `$.max_tokens`"),
        ({"max_tokens": 10**9}, "model.json: Expected `int` <= 65536 - at `$.max_tokens`"),
        ({"input": ""}, "model.json: Expected `str` of length >= 1 - at `$.input`"),
        ({"label": "LOGITS"}, "model.json: expected input, logits and label to have names of their own"),
        ({"code": "import os"}, "model.json: Object contains unknown field `code`"),
        ({"labels": ["a", "b"]}, "model.safetensors: weights: expected F32 [4, 2], by the embeddings and labels, got F32 [4, 3]"),
    ],
)  # fmt: skip
def test_descriptions_that_cannot_be(changed: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(Unusable) as error:
        load(static(tmp_path, {**DESCRIPTION, **changed}))
    assert str(error.value) == told


def remove(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (remove("model.json"), "model.json is missing: expected a folder with model.json, tokenizer.json, model.safetensors"),
        (remove("tokenizer.json"), "tokenizer.json is missing: expected"),
        (remove("model.safetensors"), "model.safetensors is missing: expected"),
        (write("model.json", b"{"), "model.json: Input data was truncated"),
        (write("model.json", b"[]"), "model.json: Expected `object`, got `array`"),
        (write("model.json", b'{"format":"\xff"}'), "model.json: "),
        (write("model.json", b"{}"), "model.json: Object missing required field `format`"),
        (write("model.json", b" " * (5 << 20)), "model.json: expected at most 4194304 bytes, got 5242880"),
        (write("tokenizer.json", b"{}"), "tokenizer.json: "),
        (write("tokenizer.json", b"\x80\x04K\x01."), "tokenizer.json: "),
        (write("model.safetensors", b""), "model.safetensors: "),
        (write("model.safetensors", b"\xff" * 64), "model.safetensors: "),
        (write("model.safetensors", b"\x80\x04K\x01."), "model.safetensors: "),
    ],
)  # fmt: skip
def test_folders_that_are_broken(harm: Callable[[Path], Any], told: str, tmp_path: Path) -> None:
    path = static(tmp_path)
    harm(tmp_path)
    with pytest.raises(Unusable) as error:
        load(path)
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("library", ["tokenizers", "safetensors"])
def test_a_missing_extra_is_named(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = static(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(Unusable, match=rf"text classifiers need {library}: pip install 'headrace\[local\]'"):
        load(path)

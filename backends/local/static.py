"""A text classifier over static embeddings, from a folder in a format of our own; the only importer of tokenizers and
safetensors.

The folder, version 1. No code and no pickle; every size and number is checked when it is loaded.

    model.json         {"format": "headrace-static", "version": 1,
                        "input": "TEXT", "logits": "LOGITS", "label": "LABEL",   tensors; `label` may be left out
                        "labels": ["card_arrival", ...],                         one a class, in the weights' order
                        "text": "words",         "words": lower case, runs of \\w joined by blanks; or "as_is"
                        "pooling": "mean",       of the tokens' vectors
                        "unit_length": true,     the mean is scaled to length one
                        "max_tokens": 4096}      of a text; what follows is cut
    tokenizer.json     of the tokenizers library; its special tokens, padding and truncation are not used
    model.safetensors  embeddings [vocabulary, size] F16 or F32, weights [size, classes] F32, bias [classes] F32, and
                       optionally bucket_weights [2^n, classes] F32

logits = vector @ weights + bias + (sum of the rows of bucket_weights that the text has) / sqrt(their number), where a
text has the bucket of each of its tokens and of each pair of neighbours: of the key `id`, or `(id + 1) << 16 | next`,
the upper n bits of key * 0x9E3779B97F4A7C15 modulo 2^64 (Knuth, volume 3, 6.4). A text without tokens has the zero
vector. All numbers are FP32. Products are plain sums in a fixed order, not BLAS': a row has the same bits in any batch
and with any build of numpy, and nothing spins on threads of BLAS' own beside the event loop.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from backends.local.model import Spec, Unusable, texts
from backends.tensor import Tensor, join_elements

# Bytes. A description has a name a class; the largest tokenizers and embedding tables in use are a tenth of these.
_MOST_BYTES = {"model.json": 4 << 20, "tokenizer.json": 64 << 20, "model.safetensors": 2 << 30}
# No text has longer tokens on the average: whatever is longer is cut before it costs more than it can matter.
_CHARACTERS_PER_TOKEN = 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_words = re.compile(r"\w+").findall
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Description(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal["headrace-static"]
    version: Literal[1]
    input: _Name
    logits: _Name
    labels: Annotated[list[_Name], msgspec.Meta(min_length=1, max_length=1 << 16)]
    text: Literal["words", "as_is"]
    pooling: Literal["mean"]
    unit_length: bool
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    label: str = ""


class Static:
    """A loaded classifier: BYTES [rows, 1] in, FP32 [rows, classes] and the likeliest label's BYTES [rows, 1] out."""

    platform = "headrace_static"

    def __init__(self, description: _Description, tokenizer: Any, tensors: Mapping[str, np.ndarray]) -> None:
        self._about = description
        self._tokenizer = tokenizer
        self._embeddings = tensors["embeddings"].astype(np.float32)
        self._weights = tensors["weights"]
        self._bias = tensors["bias"]
        self._bucket_weights = tensors.get("bucket_weights")
        self._labels = [label.encode() for label in description.labels]
        self.inputs = (Spec(description.input, "BYTES", (-1, 1)),)
        logits = Spec(description.logits, "FP32", (-1, len(self._labels)))
        self.outputs = (logits, Spec(description.label, "BYTES", (-1, 1))) if description.label else (logits,)

    def run(self, inputs: Mapping[str, Tensor], wanted: Collection[str]) -> tuple[Tensor, ...]:
        logits = self.logits(texts(inputs[self._about.input]))
        outputs = []
        if self._about.logits in wanted:
            outputs.append(Tensor(self._about.logits, "FP32", logits.shape, logits.tobytes()))
        if self._about.label in wanted:
            best = join_elements([self._labels[i] for i in logits.argmax(axis=1)])
            outputs.append(Tensor(self._about.label, "BYTES", (len(logits), 1), best))
        return tuple(outputs)

    def logits(self, rows: Sequence[str]) -> np.ndarray:
        """FP32 [rows, classes]."""
        most = self._about.max_tokens
        cut = [text[: most * _CHARACTERS_PER_TOKEN] for text in rows]
        plain = [" ".join(_words(text.lower())) for text in cut] if self._about.text == "words" else cut
        encoded = self._tokenizer.encode_batch_fast(plain, add_special_tokens=False)
        out = np.empty((len(rows), len(self._labels)), np.float32)
        for row, encoding in enumerate(encoded):
            out[row] = self._row(encoding.ids[:most])
        return out

    def _row(self, ids: list[int]) -> np.ndarray:
        if not ids:
            return self._bias
        vector = self._embeddings[ids].mean(axis=0)
        if self._about.unit_length:
            vector = vector / max(np.sqrt((vector * vector).sum()), np.float32(1e-9))
        logits: np.ndarray = np.einsum("i,ij->j", vector, self._weights) + self._bias
        if self._bucket_weights is not None:
            chosen = _buckets(ids, len(self._bucket_weights))
            logits += self._bucket_weights[chosen].sum(axis=0) / np.float32(np.sqrt(len(chosen)))
        return logits


def _buckets(ids: Sequence[int], count: int) -> np.ndarray:
    """The distinct buckets, of `count`, that a text of these tokens has, ascending."""
    tokens = np.array(ids, np.uint64)
    pairs = (tokens[:-1] + np.uint64(1)) << np.uint64(16) | tokens[1:]
    hashed = np.concatenate([tokens, pairs]) * _GOLDEN
    return np.unique((hashed // np.uint64(2**64 // count)).astype(np.int64))


def load(folder: str) -> Static:
    """The classifier in a folder. Raises Unusable."""
    try:
        import safetensors
        import tokenizers
    except ModuleNotFoundError as error:
        raise Unusable(f"text classifiers need {error.name}: pip install 'headrace[local]'") from None
    # The policy says on how many threads a model runs; the tokenizer would else start as many as there are cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    files = {name: _file(Path(folder) / name, most) for name, most in _MOST_BYTES.items()}
    try:
        description = msgspec.json.decode(files["model.json"].read_bytes(), type=_Description)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unusable(f"model.json: {error}") from None
    if len({description.input, description.logits, description.label}) < 3:
        raise Unusable("model.json: expected input, logits and label to have names of their own")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(files["tokenizer.json"]))
        tokenizer.no_padding()
        tokenizer.no_truncation()
    except Exception as error:  # the library raises no other kind
        raise Unusable(f"tokenizer.json: {error}") from None
    try:
        with safetensors.safe_open(str(files["model.safetensors"]), "numpy") as stored:
            names = set(stored.keys())
            slices = {name: stored.get_slice(name) for name in names}
            _check_layout(
                {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}, description
            )
            tensors: dict[str, np.ndarray] = {name: stored.get_tensor(name) for name in names}
    except safetensors.SafetensorError as error:
        raise Unusable(f"model.safetensors: {error}") from None
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise Unusable(f"model.safetensors: {name} holds NaN or infinite numbers")
    largest, rows = max(tokenizer.get_vocab().values(), default=0), len(tensors["embeddings"])
    if largest >= rows:
        raise Unusable(f"tokenizer.json: has ids up to {largest}, and model.safetensors embeddings for {rows}")
    return Static(description, tokenizer, tensors)


def _file(path: Path, most: int) -> Path:
    if not path.is_file():
        raise Unusable(f"{path.name} is missing: expected a folder with {', '.join(_MOST_BYTES)}")
    if (size := path.stat().st_size) > most:
        raise Unusable(f"{path.name}: expected at most {most} bytes, got {size}")
    return path


def _check_layout(found: Mapping[str, tuple[str, tuple[int, ...]]], description: _Description) -> None:
    """Unusable where the tensors are not those of the format, or do not fit each other; before any is read."""
    vocabulary, size = (found.get("embeddings", ("", ()))[1] + (0, 0))[:2]
    classes = len(description.labels)
    buckets = (found.get("bucket_weights", ("", ()))[1] + (0,))[0]
    expected = {
        "embeddings": ("F16 or F32", (vocabulary, size), "[vocabulary, size]"),
        "weights": ("F32", (size, classes), f"[{size}, {classes}], by the embeddings and labels"),
        "bias": ("F32", (classes,), f"[{classes}], by the labels"),
        "bucket_weights": ("F32", (buckets, classes), f"[buckets, {classes}], by the labels"),
    }
    for name in sorted(found.keys() - expected.keys()):
        raise Unusable(f"model.safetensors: unknown tensor '{name[:64]}', expected {', '.join(expected)}")
    for name, (dtypes, shape, told) in expected.items():
        if name not in found:
            if name == "bucket_weights":
                continue
            raise Unusable(f"model.safetensors: {name} is missing")
        dtype, its = found[name]
        if dtype not in dtypes.split(" or ") or its != shape or 0 in its:
            raise Unusable(f"model.safetensors: {name}: expected {dtypes} {told}, got {dtype} {list(its)}")
    if buckets and (buckets & (buckets - 1) or buckets < 2):
        raise Unusable(f"model.safetensors: bucket_weights: expected a power of two of rows, got {buckets}")
    if buckets and vocabulary > 1 << 16:
        raise Unusable(
            f"model.safetensors: with bucket_weights at most {1 << 16} embeddings have keys, got {vocabulary}"
        )

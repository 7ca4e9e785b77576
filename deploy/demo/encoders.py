"""The demo's two sentence encoders and its linear heads, for preparing and for serving alike.

One file serves both sides, so that a text has the same vector when a head is fitted and when Triton answers. It is
copied beside the models that need it, and imports numpy and the tokenizers only; ONNX Runtime where MiniLM is used.

Heavy: MiniLM-L6 (int8 ONNX), mean over the tokens, unit length, 384 numbers. Texts of equal token length run together
and nothing is padded, because on a CPU the cost is linear in padded tokens.

Cheap: wordllama's static token vectors, mean over the tokens, unit length, 256 numbers; and beside it which tokens and
which pairs of neighbours the text has, hashed into `BUCKETS`. The mean knows words that the training texts lack, the
buckets know phrases. Both are a gather and a sum; together they give 0.911 where the mean gives 0.899 (5-fold on
banking77's training texts). A text is read as its words (lower case, no punctuation): it and its round trip through
MiniLM's WordPiece ids then have the same words, and so the same answer. That costs the mean next to nothing (with
punctuation and case 0.900), where the other form falls from 0.910 to 0.888 by the round trip (test texts).

No number of either depends on the rows beside it: answers are equal bit by bit in any batch. The heads' products are
plain sums in a fixed order, because BLAS gives other bits by its build: Headrace, which runs the cheap tier in its own
process, and Triton then agree to the last bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

# The model was trained on at most 256 word pieces; what follows them is cut, as its authors do.
MAX_TOKENS = 256
# On a CPU nothing is gained by larger batches of equal length (0.93 + 1.79 b ms for b texts of 16 tokens).
CHUNK_ROWS = 8
# WordPiece vocabulary of MiniLM: ids outside of it are the caller's fault.
VOCABULARY = 30522
# For the 22 684 different tokens and pairs of banking77's training texts; a head is then 5 MB. 2^16 gain nothing
# (5-fold 0.9154, against 0.9156).
BUCKETS = 1 << 14

_words = re.compile(r"\w+").findall


def groups_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of equal length together, at most `CHUNK_ROWS` to a group; every index is in exactly one group."""
    same: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        same.setdefault(length, []).append(index)
    return [group[i : i + CHUNK_ROWS] for group in same.values() for i in range(0, len(group), CHUNK_ROWS)]


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows scaled to length one; a row of zeros stays zero."""
    scaled: np.ndarray = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    return scaled


def buckets(ids: Sequence[int]) -> np.ndarray:
    """The distinct buckets, ascending, of a text's tokens and of its pairs of neighbours; ids are below 2^16.

    A key's bucket is the upper bits of key * 2^64 / golden ratio, modulo 2^64 (Knuth, volume 3, 6.4): the same numbers
    on every machine and in every process, which Python's own hash does not promise.
    """
    tokens = np.array(ids, np.uint64)
    pairs = (tokens[:-1] + np.uint64(1)) << np.uint64(16) | tokens[1:]
    hashed = np.concatenate([tokens, pairs]) * np.uint64(0x9E3779B97F4A7C15)
    return np.unique((hashed // np.uint64(2**64 // BUCKETS)).astype(np.int64))


class WordPieces:
    """MiniLM's tokenizer: texts to ids and back."""

    def __init__(self, assets: Path) -> None:
        self._tokenizer = _tokenizer(assets / "minilm-tokenizer.json")

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids[:MAX_TOKENS] for encoding in self._tokenizer.encode_batch(list(texts))]

    def texts(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The texts that the ids stand for, lower case and without special tokens."""
        decoded: list[str] = self._tokenizer.decode_batch([list(row) for row in ids])
        return decoded


class MiniLM:
    """The heavy encoder; one thread of its own per call, so calls from several threads run side by side."""

    size = 384

    def __init__(self, assets: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        self._session: Any = onnxruntime.InferenceSession(str(assets / "minilm.onnx"), options)

    def embed(self, ids: Sequence[Sequence[int]], run: Callable[..., Any] = map) -> np.ndarray:
        """Unit vectors [rows, 384] of token ids; `run` maps over the groups (a thread pool's map uses more cores)."""
        vectors = np.empty((len(ids), self.size), np.float32)
        groups = groups_by_length([len(row) for row in ids])

        def one(group: list[int]) -> np.ndarray:
            tokens = np.array([ids[i][:MAX_TOKENS] for i in group], np.int64)
            feed = {
                "input_ids": tokens,
                "attention_mask": np.ones_like(tokens),
                "token_type_ids": np.zeros_like(tokens),
            }
            return unit(self._session.run(None, feed)[0].mean(axis=1))

        for group, part in zip(groups, run(one, groups), strict=True):
            vectors[group] = part
        return vectors


class Words:
    """The cheap encoder."""

    size = 256

    def __init__(self, assets: Path) -> None:
        self._tokenizer = _tokenizer(assets / "words-tokenizer.json")
        self._table = np.load(assets / "words.npy", allow_pickle=False).astype(np.float32)

    def features(self, texts: Sequence[str]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Unit vectors [rows, 256], and each row's buckets; a text without any word has the zero vector and none."""
        plain = [" ".join(_words(text.lower())) for text in texts]
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(plain, add_special_tokens=False)]
        vectors = np.zeros((len(plain), self.size), np.float32)
        for vector, tokens in zip(vectors, ids, strict=True):
            if tokens:
                vector[:] = self._table[tokens].mean(axis=0)
        return unit(vectors), [buckets(tokens) for tokens in ids]


class Head:
    """A linear classifier, whose softmax is the (temperature-scaled) probability.

    logits = vector @ weights + bias, and for the cheap encoder + sum of its buckets' weights / sqrt(their number).
    """

    def __init__(self, file: Path) -> None:
        with np.load(file, allow_pickle=False) as arrays:
            self._weights = arrays["weights"]
            self._bucket_weights = arrays["bucket_weights"]
            self._bias = arrays["bias"]
            self.labels: list[bytes] = [str(label).encode() for label in arrays["labels"]]

    def logits(self, vectors: np.ndarray, buckets: Sequence[np.ndarray] = ()) -> np.ndarray:
        """FP32 [rows, classes], row by row: a row's numbers do not depend on the rows beside it."""
        out = np.empty((len(vectors), len(self.labels)), np.float32)
        for row, vector in enumerate(vectors):
            out[row] = np.einsum("i,ij->j", vector, self._weights) + self._bias
        for row, chosen in enumerate(buckets):
            if len(chosen):
                out[row] += self._bucket_weights[chosen].sum(axis=0) / np.float32(np.sqrt(len(chosen)))
        return out


def _tokenizer(file: Path) -> Any:
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer

"""Models for the in-process tier, made on the spot: ONNX graphs, and a small folder of static embeddings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

# KServe's datatypes, and what ONNX calls them.
ONNX_TYPES = {
    "BOOL": TensorProto.BOOL, "UINT8": TensorProto.UINT8, "UINT16": TensorProto.UINT16, "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64, "INT8": TensorProto.INT8, "INT16": TensorProto.INT16, "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64, "FP16": TensorProto.FLOAT16, "FP32": TensorProto.FLOAT, "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING, "BF16": TensorProto.BFLOAT16,
}  # fmt: skip

Value = tuple[str, str, Sequence[int | str | None] | None]


def graph(path: Path, nodes: Sequence[Any], inputs: Sequence[Value], outputs: Sequence[Value], **constants: Any) -> str:
    """Writes a graph of `nodes` (made by `node`); values are `(name, datatype, shape)`. Returns its path."""

    def values(given: Sequence[Value]) -> list[Any]:
        return [helper.make_tensor_value_info(name, ONNX_TYPES[kind], shape) for name, kind, shape in given]

    known = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    made = helper.make_graph(list(nodes), "test", values(inputs), values(outputs), known)
    # Versions that every runtime of the last years reads.
    whole = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(whole.SerializeToString())
    return str(path)


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    return helper.make_node(kind, inputs, outputs, **attributes)


def identity(path: Path, datatype: str, shape: Sequence[int | str | None] | None = ("rows", 2)) -> str:
    """Y = X."""
    return graph(path, [node("Identity", ["X"], ["Y"])], [("X", datatype, shape)], [("Y", datatype, shape)])


def linear(path: Path) -> str:
    """LOGITS = X @ M, where X is FP32 [rows, 3] and M gives two classes; and SUM, of each row."""
    matrix = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
    nodes = [node("MatMul", ["X", "M"], ["LOGITS"]), node("ReduceSum", ["X", "axes"], ["SUM"], keepdims=1)]
    outputs: list[Value] = [("LOGITS", "FP32", ("rows", 2)), ("SUM", "FP32", ("rows", 1))]
    return graph(path, nodes, [("X", "FP32", ("rows", 3))], outputs, M=matrix, axes=np.array([1], np.int64))


WORDS = ["[UNK]", "red", "green", "blue", "card"]
DESCRIPTION = {
    "format": "headrace-static", "version": 1, "input": "TEXT", "logits": "LOGITS", "label": "LABEL",
    "labels": ["warm", "cold", "other"], "text": "words", "pooling": "mean", "unit_length": True, "max_tokens": 8,
}  # fmt: skip


def static_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "embeddings": rng.normal(size=(len(WORDS), 4)).astype(np.float16),
        "weights": rng.normal(size=(4, 3)).astype(np.float32),
        "bias": rng.normal(size=3).astype(np.float32),
        "bucket_weights": rng.normal(size=(16, 3)).astype(np.float32),
    }


def static(folder: Path, description: Any = None, tensors: dict[str, np.ndarray] | None = None) -> str:
    """Writes a text classifier over five words, with whatever is to be different."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(json.dumps(DESCRIPTION if description is None else description))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(static_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return str(folder)

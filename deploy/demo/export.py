"""Writes the distilled tier as a folder that Headrace runs by itself (the format is in `backends/local/static.py`)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

# Far more than any query of banking77 has; it bounds what one text may cost.
MAX_TOKENS = 4096


def write_local_model(assets: Path, folder: Path) -> Path:
    """Writes the folder from the prepared `assets`, each file in one step; returns it."""
    from safetensors.numpy import save

    folder.mkdir(parents=True, exist_ok=True)
    with np.load(assets / "distilled.npz", allow_pickle=False) as head:
        labels = [str(label) for label in head["labels"]]
        tensors = {name: np.ascontiguousarray(head[name]) for name in ("weights", "bucket_weights", "bias")}
    tensors["embeddings"] = np.load(assets / "words.npy", allow_pickle=False)
    model = {
        "format": "headrace-static",
        "version": 1,
        "input": "TEXT",
        "logits": "LOGITS",
        "label": "LABEL",
        "labels": labels,
        "text": "words",
        "pooling": "mean",
        "unit_length": True,
        "max_tokens": MAX_TOKENS,
    }
    for name, content in (
        ("tokenizer.json", (assets / "words-tokenizer.json").read_bytes()),
        ("model.safetensors", save(tensors)),
        ("model.json", json.dumps(model, indent=1).encode()),
    ):
        fresh = folder / f".{name}.{os.getpid()}"
        fresh.write_bytes(content)
        fresh.replace(folder / name)
    return folder

"""Writes the demo's Triton model repository: a folder per model with its config, its `model.py` and what that imports.

Weights are on disk once, in the `assets` folder that the configs point to by a relative path: build directory and
repository can be moved or copied into an image together.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As many rows as a gateway may put into one batch; the models cut them into groups of their own.
MAX_BATCH = 64

Tensors = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Model:
    """A model's interface; shapes are without the batch axis."""

    name: str
    inputs: Tensors
    outputs: Tensors
    instances: int = 1
    assets: bool = True
    optional: bool = False


_TEXT: Tensors = (("TEXT", "BYTES", (1,)),)
_IDS: Tensors = (("input_ids", "INT64", (-1,)), ("attention_mask", "INT64", (-1,)))
_INTENT: Tensors = (("LOGITS", "FP32", (77,)), ("LABEL", "BYTES", (1,)))
_ECHOED = ("FP32", "INT64", "BYTES", "BOOL", "FP16", "UINT8")

TEST_MODELS = (
    Model(
        "echo",
        tuple((f"IN_{datatype}", datatype, (-1,)) for datatype in _ECHOED),
        tuple((f"OUT_{datatype}", datatype, (-1,)) for datatype in _ECHOED),
        assets=False,
        optional=True,
    ),
    Model("rowsum", (("X", "FP32", (16,)),), (("Y", "FP32", (4,)),), assets=False),
)
# One instance runs on one thread, so the heavy model needs two to use two cores. Where client and server share two busy
# cores the second shows no gain (157 against 166 requests a second over seven runs each, from 101 to 262).
# `intent_distilled` is what the gateway's own tier is compared with, bit by bit, in the tests.
DEMO_MODELS = (
    Model("intent_heavy", _TEXT, _INTENT, instances=2),
    Model("intent_heavy_ids", _IDS, _INTENT),
    Model("intent_distilled", _TEXT, _INTENT),
    Model("intent_distilled_ids", _IDS, _INTENT),
    Model("embed", _TEXT, (("EMBEDDING", "FP32", (384,)),)),
)


def write_test_models(repository: Path) -> Path:
    """Writes `echo` and `rowsum`, which need no weights and no download; returns the repository."""
    for model in TEST_MODELS:
        _write(repository, model)
    return repository


def write_demo_models(repository: Path) -> Path:
    """Writes every model; the weights are expected in `assets` beside the repository. Returns the repository."""
    for model in DEMO_MODELS:
        _write(repository, model)
    return write_test_models(repository)


def _write(repository: Path, model: Model) -> None:
    folder = repository / model.name
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(_config(model))
    shutil.copyfile(HERE / "served.py", version / "model.py")
    if model.assets:
        shutil.copyfile(HERE / "encoders.py", version / "encoders.py")


def _config(model: Model) -> str:
    parameters = {"kind": model.name} | ({"assets": "../../assets"} if model.assets else {})
    return "\n".join(
        [
            f'name: "{model.name}"',
            'backend: "python"',
            f"max_batch_size: {MAX_BATCH}",
            *(_tensor("input", tensor, " optional: true" if model.optional else "") for tensor in model.inputs),
            *(_tensor("output", tensor, "") for tensor in model.outputs),
            f"instance_group [{{ kind: KIND_CPU count: {model.instances} }}]",
            *(
                f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
                for key, value in parameters.items()
            ),
            "",
        ]
    )


def _tensor(part: str, tensor: tuple[str, str, tuple[int, ...]], more: str) -> str:
    name, datatype, shape = tensor
    kind = "STRING" if datatype == "BYTES" else datatype
    return f'{part} [{{ name: "{name}" data_type: TYPE_{kind} dims: {list(shape)}{more} }}]'

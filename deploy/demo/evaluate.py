"""Checks the prepared demo on the held-out banking77 test texts, without a server: accuracies, cascade, what it defers.

    python -m deploy.demo.evaluate [--build build/demo-models]

The interval is the paired normal one of the cascade's accuracy minus the heavy tier's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

HERE = Path(__file__).resolve().parent
if not __package__:  # run as a plain script
    sys.path.insert(0, str(HERE.parents[1]))

from deploy.demo import heads, threshold  # noqa: E402
from deploy.demo.encoders import Head, MiniLM, WordPieces, Words  # noqa: E402
from deploy.demo.prepare import BUILD, read_banking77  # noqa: E402

# Standard normal quantile of a two-sided 95 % interval.
_Z = 1.96


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--build", type=Path, default=BUILD, metavar="DIR", help="what prepare made (default: %(default)s)"
    )
    build = parser.parse_args().build
    assets = build / "assets"
    calibration = json.loads((build / "calibration.json").read_text())
    texts, intents = read_banking77("test")
    pieces, words = WordPieces(assets), Words(assets)
    heavy_head, cheap_head = Head(assets / "heavy.npz"), Head(assets / "distilled.npz")
    labels = np.array([heavy_head.labels.index(intent.encode()) for intent in intents])

    ids = pieces.ids(texts)
    heavy = heavy_head.logits(MiniLM(assets).embed(ids)).argmax(axis=1)
    cheap_logits = cheap_head.logits(*words.features(texts))
    cheap_of_ids = cheap_head.logits(*words.features(pieces.texts(ids)))
    cheap = cheap_logits.argmax(axis=1)

    scores = threshold.SCORES[calibration["score"]](heads.softmax(cheap_logits))
    accepted = scores >= calibration["threshold"]
    cascade = np.where(accepted, cheap, heavy)
    difference = (cascade == labels).astype(np.float64) - (heavy == labels)
    half = _Z * float(difference.std()) / np.sqrt(len(labels))

    console = Console()
    for name, answers in (
        ("heavy", heavy),
        ("distilled", cheap),
        ("distilled from ids", cheap_of_ids.argmax(axis=1)),
        ("cascade", cascade),
    ):
        console.print(f"{name:<20}{np.mean(answers == labels):.2%} of {len(labels)}")
    mean = float(difference.mean())
    console.print(f"cascade - heavy     {mean:+.2%} [{mean - half:+.2%}, {mean + half:+.2%}] (95 %, paired)")
    console.print(f"deferred            {1 - accepted.mean():.1%}, expected {calibration['expected']['deferred']:.1%}")
    console.print(f"text and ids agree  {np.mean(cheap_of_ids == cheap_logits):.2%} of logits, bit by bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The demo's figures: from answers to records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import quantiles

from deploy.demo.load import Answers
from gateway.tools.report import Record

# Two-sided 95 % of the normal distribution; thousands of pairs make it exact enough.
_Z = 1.959964


def records(
    case: str, answers: Answers, gold: Sequence[str], against: tuple[str, Answers] | None = None
) -> list[Record]:
    """All metrics of one classification case; differences and ratios to the case `against`."""
    right = [label == wanted for label, wanted in zip(answers.labels, gold, strict=True)]
    made = [
        Record(case=case, metric="accuracy", value=sum(right) / len(right), unit="share"),
        Record(case=case, metric="deferred", value=deferred_share(answers), unit="share"),
        *_cpu(case, answers, against),
        *latencies(case, answers),
        Record(case=case, metric="mean_batch_rows", value=_mean_batch(answers), unit="rows"),
        Record(case=case, metric="cache_hits", value=hits(answers), unit="rows"),
    ]
    if against is not None:
        name, other = against
        other_right = [label == wanted for label, wanted in zip(other.labels, gold, strict=True)]
        low, high = paired_interval([int(a) - int(b) for a, b in zip(right, other_right, strict=True)])
        made.append(Record(case=case, metric="difference_low", value=low, unit="share", against=name))
        made.append(Record(case=case, metric="difference_high", value=high, unit="share", against=name))
    return made


def embed_records(case: str, answers: Answers) -> list[Record]:
    """The metrics of the embedding case, which has no labels."""
    return [
        *_cpu(case, answers, None),
        *latencies(case, answers),
        Record(case=case, metric="mean_batch_rows", value=_mean_batch(answers), unit="rows"),
        Record(case=case, metric="cache_hits", value=hits(answers), unit="rows"),
    ]


def latencies(case: str, answers: Answers) -> list[Record]:
    cuts = quantiles(answers.seconds, n=100, method="inclusive")
    return [Record(case=case, metric=f"p{cut}_ms", value=cuts[cut - 1] * 1e3, unit="ms") for cut in (50, 95, 99)]


def paired_interval(differences: Sequence[int]) -> tuple[float, float]:
    """95 % interval of the mean of paired differences (normal approximation)."""
    n = len(differences)
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / (n - 1)
    half = _Z * math.sqrt(variance / n)
    return mean - half, mean + half


def hits(answers: Answers) -> float:
    return sum(v for k, v in answers.counters.items() if k.startswith("headrace_cache_rows_total") and '"hit"' in k)


def deferred_share(answers: Answers) -> float:
    """Share of rows that the first tier passed on."""
    deferred = sum(v for k, v in answers.counters.items() if k.startswith("headrace_deferred_rows_total"))
    return deferred / len(answers.labels) if answers.labels else 0.0


def _mean_batch(answers: Answers) -> float:
    """Mean rows of the batches sent to any backend."""
    total = sum(v for k, v in answers.counters.items() if k.startswith("headrace_batch_rows_sum"))
    count = sum(v for k, v in answers.counters.items() if k.startswith("headrace_batch_rows_count"))
    return total / count if count else 0.0


def _cpu(case: str, answers: Answers, against: tuple[str, Answers] | None) -> list[Record]:
    """CPU seconds of all processes, and of each."""
    total = _per_1000(answers)
    name = ratio = None
    if against is not None:
        name, other = against
        ratio = total / _per_1000(other)
    per_request = 1000 / len(answers.labels)
    return [
        Record(case=case, metric="cpu_s_per_1000", value=total, unit="s", against=name, ratio=ratio),
        *(
            Record(case=case, metric=f"cpu_{who}_s_per_1000", value=seconds * per_request, unit="s")
            for who, seconds in answers.cpu.items()
        ),
    ]


def _per_1000(answers: Answers) -> float:
    return sum(answers.cpu.values()) * 1000 / len(answers.labels)

"""`headrace bench proxy`: CPU microseconds per request of whole proxies, side by side in one run.

A turn is one stack in one case: its callers open their connections and send a request on each, then the CPU time of
all the proxy's processes is read, the turn's requests are sent, and it is read again. The difference over the number of
requests is the turn's sample. The 20th percentile over the rounds is the figure (what it costs when others leave the
machine alone), the median stands beside it. Callers and stub are processes of their own and are not counted; over gRPC
they are slower than the proxies before them, so that a proxy there wakes for fewer events at a time than it could.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NoReturn

from gateway.tools.bench.load import CONCURRENCY
from gateway.tools.bench.processes import Broken, end, start
from gateway.tools.bench.stacks import Stack, all_running
from gateway.tools.report import Record

# Case: what its stacks are compared with.
CASES = {"http-json": "nginx", "http-binary": "nginx", "grpc": "haproxy"}
ROWS = {
    "cpu_us_per_request_p20": ("CPU us per request, p20", ".1f"),
    "cpu_us_per_request_median": ("CPU us per request, median", ".1f"),
    "p50_ms": ("p50 latency ms", ".2f"),
}
# What we hold ourselves to: Headrace's figure is at most so many times that of the other stack.
TARGETS = (
    *(
        (case, other, times)
        for case in ("http-json", "http-binary")
        for other, times in (("nginx", 4), ("starlette", 1 / 20))
    ),
    ("grpc", "haproxy", 25),
)


@dataclass(slots=True)
class Samples:
    """A stack's turns in one case."""

    requests: int = 0
    cpu_us: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)


def measure(rounds: int, requests: int, told: Callable[[str], None]) -> list[Record]:
    """All turns; `told` hears of each before it begins. Raises Broken where a stack fails a request.

    Nothing that is started outlives the call, also where that is ended by SIGTERM or Ctrl-C.
    """
    samples: dict[tuple[str, str], Samples] = {}
    with _sigterm_unwinds(), tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name)
        with all_running(folder) as stacks:
            for number in range(rounds):
                for case in CASES:
                    for stack in _in_turn(stacks, number):
                        if _protocol(case) in stack.ports:
                            told(f"round {number + 1}/{rounds}  {case}  {stack.name}")
                            sample = samples.setdefault((case, stack.name), Samples())
                            sample.requests = max(CONCURRENCY, round(requests * stack.share))
                            cpu_us, p50_ms = _turn(stack, case, sample.requests, folder)
                            sample.cpu_us.append(cpu_us)
                            sample.p50_ms.append(p50_ms)
    return records(samples)


def turns(rounds: int) -> int:
    """How many times `told` will be called: four stacks over HTTP, three over gRPC."""
    return rounds * sum(4 if _protocol(case) == "http" else 3 for case in CASES)


def records(samples: dict[tuple[str, str], Samples]) -> list[Record]:
    """The figures of every case and stack, and the ratio to the stack that the case is compared with."""
    made = []
    for case, against in CASES.items():
        base = samples[case, against]
        names = [name for of, name in samples if of == case]
        for name in sorted(names, key=("headrace", "nginx", "haproxy", "starlette").index):
            mine = samples[case, name]
            for metric, of in (("p20", p20), ("median", median)):
                value = of(mine.cpu_us)
                made.append(
                    Record(
                        case=f"{name}-{case}",
                        metric=f"cpu_us_per_request_{metric}",
                        value=value,
                        unit="us",
                        against=f"{against}-{case}",
                        ratio=value / of(base.cpu_us),
                    )
                )
            made.append(Record(case=f"{name}-{case}", metric="p50_ms", value=median(mine.p50_ms), unit="ms"))
            made.append(Record(case=f"{name}-{case}", metric="requests", value=mine.requests, unit="a round"))
    return made


def verdicts(made: Sequence[Record]) -> list[str]:
    """A line for each target: how far from it, and whether it is met."""
    figure = {record.case: record.value for record in made if record.metric == "cpu_us_per_request_p20"}
    lines = []
    for case, other, times in TARGETS:
        ratio = figure[f"headrace-{case}"] / figure[f"{other}-{case}"]
        word = "met" if ratio <= times else "missed"
        lines.append(f"{case}: {ratio:.3g} times {other}, target at most {times:.3g}: {word}")
    return lines


def p20(values: Sequence[float]) -> float:
    """The 20th percentile, between samples where it falls there."""
    return quantiles(values, n=5, method="inclusive")[0] if len(values) > 1 else values[0]


def load_average() -> str:
    """How busy the machine is, for whoever reads the figures."""
    return f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"


def _in_turn(stacks: list[Stack], number: int) -> list[Stack]:
    first = number % len(stacks)
    return stacks[first:] + stacks[:first]


def _protocol(case: str) -> str:
    return case.partition("-")[0]


def _turn(stack: Stack, case: str, requests: int, folder: Path) -> tuple[float, float]:
    """One sample: CPU microseconds per request, and the median latency in ms."""
    protocol = _protocol(case)
    module = f"gateway.tools.bench.load_{protocol}"
    address = f"127.0.0.1:{stack.ports[protocol]}"
    errors = folder / "load.log"
    with errors.open("wb") as sink:
        load = start(
            [sys.executable, "-m", module, address, case, str(requests)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
        )
    try:
        assert load.stdin is not None
        assert load.stdout is not None
        if load.stdout.readline() != b"ready\n":
            raise _failed(stack, case, errors)
        before = stack.process.cpu_seconds()
        load.stdin.write(b"go\n")
        load.stdin.flush()
        told = load.stdout.readline()
        after = stack.process.cpu_seconds()
        if not told:
            raise _failed(stack, case, errors)
        if before.keys() != after.keys():
            raise stack.process.broken("its processes changed while they were measured")
        return (sum(after.values()) - sum(before.values())) / requests * 1e6, float(told)
    finally:
        for pipe in (load.stdin, load.stdout):
            if pipe is not None:
                pipe.close()
        end(load)


def _failed(stack: Stack, case: str, errors: Path) -> Broken:
    lines = errors.read_text(errors="replace").strip().splitlines()
    return Broken(f"{case} through {stack.name}: {lines[-1] if lines else 'the callers ended without a word'}")


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends this process by an exception, so that everything is put away."""

    def leave(number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

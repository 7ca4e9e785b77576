"""`make demo`: prepares the models, starts Triton and Headrace, does the main job, prints its figures, and stays up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tenacity import RetryError, Retrying, retry_if_exception_type, retry_if_result, stop_after_delay, wait_fixed

from deploy.demo import figures
from deploy.demo.fetch import Mismatch
from deploy.demo.load import Answers, Load, counters, difference
from deploy.demo.prepare import prepare, read_banking77
from deploy.demo.triton import ServerFailed, Triton, ensure_venv, tree_cpu_seconds
from gateway.server import listen
from gateway.tools.report import Record, table, write
from gateway.tools.trace_tree import tree
from policies import Policy, load
from policies.spec import Address

_ROOT = Path(__file__).resolve().parents[2]
_BUILD = _ROOT / "build"
_POLICY = _ROOT / "policies/examples/demo.yaml"
# Cases take turns over blocks of the test set, so that whatever else the machine does falls on all of them alike.
_BLOCKS = 4
_CASES = {"distilled": "intent_distilled", "heavy": "intent_heavy", "cascade": "intent"}

console = Console()


def main(
    once: Annotated[bool, typer.Option("--once", help="Exit when done, non-zero if anything failed.")] = False,
    http: Annotated[str, typer.Option(help="Headrace's HTTP address.")] = "127.0.0.1:8000",
    grpc: Annotated[str, typer.Option(help="Headrace's gRPC address.")] = "127.0.0.1:8001",
    metrics: Annotated[str, typer.Option(help="Headrace's metrics address.")] = "127.0.0.1:8002",
    admin: Annotated[str, typer.Option(help="Headrace's admin address.")] = "127.0.0.1:8003",
    triton: Annotated[str, typer.Option(help="Triton's HTTP address; gRPC and metrics are the next two ports.")] = (
        "127.0.0.1:8100"
    ),
    json: Annotated[Path, typer.Option(help="Where the figures are written as JSON.")] = _BUILD / "demo.json",
) -> None:
    """Prepares, starts and shows the demo."""
    triton_http = _address("--triton", triton)
    addresses = {
        "--http": _address("--http", http),
        "--grpc": _address("--grpc", grpc),
        "--metrics": _address("--metrics", metrics),
        "--admin": _address("--admin", admin),
        "--triton": triton_http,
        "--triton (gRPC)": Address(triton_http.host, triton_http.port + 1),
        "--triton (metrics)": Address(triton_http.host, triton_http.port + 2),
    }
    _check_ports(addresses)
    # SIGTERM ends the demo as Ctrl-C does, which a shell's background job would ignore: everything that was started is
    # stopped on the way out.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            _run(stack, addresses, json, once=once)
    except (ServerFailed, Mismatch) as problem:
        _die(str(problem))
    except KeyboardInterrupt:
        console.print("stopped")
        raise SystemExit(130 if once else 0) from None


def _run(stack: ExitStack, addresses: dict[str, Address], json: Path, *, once: bool) -> None:
    venv = ensure_venv(_BUILD / "triton-venv")
    models = prepare(_BUILD / "demo-models", console)
    calibration = msgspec.json.decode(models.calibration.read_bytes())
    places = {name: str(address) for name, address in addresses.items()}
    # What the policy takes from its environment.
    os.environ |= {
        "TRITON_HTTP": places["--triton"],
        "TRITON_GRPC": places["--triton (gRPC)"],
        "INTENT_THRESHOLD": str(calibration["threshold"]),
    }
    policy = load(_POLICY, os.environ)
    with console.status("starting tritonserver and headrace"):
        server = stack.enter_context(
            Triton(venv, models.repository, http=addresses["--triton"].port, log=_BUILD / "tritonserver.log")
        )
        server.wait_ready()
        gateway = stack.enter_context(_headrace(places))
    console.print(f"tritonserver on {places['--triton']}, headrace on {places['--http']} and {places['--grpc']}")

    def cpu() -> dict[str, float]:
        return {
            "triton": server.cpu_seconds(),
            "headrace": tree_cpu_seconds(gateway.pid),
            "client": time.process_time(),
        }

    made = asyncio.run(_measure(places, cpu))
    write(json, made)
    _show(made, policy)
    _trace(places)
    console.print(f"\nfigures: {json}")
    if once:
        return
    _invite(places)
    gateway.wait()
    _die(f"headrace ended with {gateway.returncode}; see {_BUILD / 'headrace.log'}")


@contextmanager
def _headrace(places: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """`headrace serve` with the demo's policy, ready; ended with the block."""
    flags = [f"{flag}={places[flag]}" for flag in ("--http", "--grpc", "--metrics", "--admin")]
    command = [str(Path(sys.executable).parent / "headrace"), "serve", str(_POLICY), *flags, "--log-level=warning"]
    with (_BUILD / "headrace.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_ready(process, f"http://{places['--http']}/readyz")
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    def ready() -> bool:
        if process.poll() is not None:
            tail = (_BUILD / "headrace.log").read_text(errors="replace")[-2000:]
            _die(f"headrace ended with {process.returncode}:\n{tail}")
        return httpx.get(url, timeout=2).status_code == 200

    try:
        Retrying(
            stop=stop_after_delay(60),
            wait=wait_fixed(0.1),
            retry=retry_if_exception_type(httpx.TransportError) | retry_if_result(lambda answer: not answer),
        )(ready)
    except RetryError:
        _die(f"headrace was not ready within 60 s; see {_BUILD / 'headrace.log'}")


async def _measure(places: dict[str, str], cpu: Callable[[], dict[str, float]]) -> list[Record]:
    texts, gold = read_banking77("test")
    load = Load(places["--http"], places["--grpc"])
    given = {case: Answers() for case in _CASES}
    embedded = Answers()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, refresh_per_second=2) as progress:
            tasks = {case: progress.add_task(case, total=len(texts)) for case in _CASES}

            async def measured(work: Coroutine[Any, Any, Answers], into: Answers) -> None:
                before, began = await counters(places["--metrics"]), cpu()
                part = await work
                part.cpu = difference(began, cpu())
                part.counters = difference(before, await counters(places["--metrics"]))
                into.extend(part)

            for route in _CASES.values():
                # The first calls pay for pages, pools and caches of the processors.
                await load.classify(route, texts[:64], lambda: None)
            for block in _blocks(len(texts)):
                for case, route in _CASES.items():
                    await measured(
                        load.classify(route, texts[block], partial(progress.advance, tasks[case])), given[case]
                    )
            task = progress.add_task("embed, each text twice", total=1000)
            for _ in range(2):
                await measured(load.embed("embed", texts[:500], partial(progress.advance, task)), embedded)
    finally:
        await load.close()
    heavy = ("heavy", given["heavy"])
    made = [
        *figures.records("distilled", given["distilled"], gold, heavy),
        *figures.records("heavy", given["heavy"], gold),
        *figures.records("cascade", given["cascade"], gold, heavy),
    ]
    return [*made, *figures.embed_records("embed", embedded)]


def _blocks(count: int) -> list[slice]:
    edges = [count * i // _BLOCKS for i in range(_BLOCKS + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


_ROWS = {
    "accuracy": ("accuracy", ".2%"),
    "difference_low": ("difference to heavy, from", "+.2%"),
    "difference_high": ("to (95 % interval)", "+.2%"),
    "deferred": ("rows that went on", ".1%"),
    "cpu_s_per_1000": ("CPU s per 1,000 requests", ".2f"),
    "cpu_triton_s_per_1000": ("  of it Triton", ".2f"),
    "cpu_headrace_s_per_1000": ("  Headrace", ".2f"),
    "cpu_client_s_per_1000": ("  this client", ".2f"),
    "p50_ms": ("p50 ms", ".1f"),
    "p95_ms": ("p95 ms", ".1f"),
    "p99_ms": ("p99 ms", ".1f"),
    "mean_batch_rows": ("mean batch, rows", ".2f"),
    "cache_hits": ("cache hits, rows", ".0f"),
}


def _show(made: list[Record], policy: Policy) -> None:
    console.print()
    console.print(table(made, _ROWS, "banking77, 3,080 labelled test queries, half over HTTP and half over gRPC"))
    rule = policy.routes["intent"].arms[0].tiers[0].accept
    assert rule is not None
    console.print(
        "[dim]CPU is that of all processes: Triton with the heavy tier, Headrace with the distilled one, and this "
        "client; the ratio is to heavy alone. "
        f"The cascade keeps a row whose {rule.score} is at least {rule.threshold:.3f}, chosen on training data.[/dim]"
    )


def _trace(places: dict[str, str]) -> None:
    """Prints the trace of a text that the distilled tier is not sure of."""
    with httpx.Client(timeout=30) as client:

        def ask(text: str, **headers: str) -> httpx.Response:
            tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": [text]}
            url = f"http://{places['--http']}/v2/models/intent/infer"
            return client.post(url, json={"inputs": [tensor]}, headers=headers).raise_for_status()

        texts = read_banking77("test")[0]
        unsure = next((text for text in texts if "heavy=" in ask(text).headers["headrace-tier"]), texts[0])
        trace_id = os.urandom(16).hex()
        ask(unsure, traceparent=f"00-{trace_id}-{os.urandom(8).hex()}-01")
        document = client.get(f"http://{places['--admin']}/traces/{trace_id}").raise_for_status().json()
    console.print(f"\none request, {unsure!r}:", markup=False, highlight=False)
    # Wider than a narrow terminal: a line that wraps says more than one that is cut.
    Console(width=max(console.width, 200)).print(tree(document))


def _invite(places: dict[str, str]) -> None:
    body = '{"inputs":[{"name":"TEXT","datatype":"BYTES","shape":[1,1],"data":["I lost my card"]}]}'
    console.print(f"""
It stays up until Ctrl-C. Try:

  curl -i {places["--http"]}/v2/models/intent/infer -d '{body}'
  build/venv/bin/headrace trace last --admin http://{places["--admin"]}
  curl {places["--metrics"]}/metrics

  build/venv/bin/python - <<'PY'
  import numpy as np, tritonclient.grpc as triton
  client = triton.InferenceServerClient("{places["--grpc"]}")
  text = triton.InferInput("TEXT", [2, 1], "BYTES")
  text.set_data_from_numpy(np.array([["where is my refund"], ["top up failed"]], dtype=object))
  print(client.infer("intent", [text]).as_numpy("LABEL"))
  PY""", markup=False, highlight=False, soft_wrap=True)  # fmt: skip


def _address(flag: str, text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65534:
        _die(f"{flag}: expected HOST:PORT, got '{text}'")
    return Address(host.strip("[]"), int(port))


def _check_ports(addresses: dict[str, Address]) -> None:
    for flag, address in addresses.items():
        try:
            listen(address).close()
        except OSError as error:
            name = flag.split()[0]
            _die(f"{error.strerror}; choose another with {name}: make demo ARGS='{name} 127.0.0.1:9000'")


def _die(message: str) -> NoReturn:
    console.print(message, style="red", markup=False, highlight=False)
    raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)

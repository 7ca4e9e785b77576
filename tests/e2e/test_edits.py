"""Policy edits under load: good, bad and swapped ones, while Redis dies and comes back. Nothing is lost or mixed.

Each good policy is a generation that its tiers and arms are named after, so that every answer says which policies had a
part in it. The long form (`make soak`) makes 100 edits: 50 good, 30 bad, 20 symbolic links; here it is a tenth.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from backends.proto import kserve_pb2 as pb
from policies import parse
from tests.support.redis import RedisServer
from tests.support.serve import Served, served, within
from tests.support.triton import triton  # noqa: F401

TENTHS = 10 if os.environ.get("HEADRACE_SOAK") else 1
# What the process may grow by after it has warmed up, however many edits: an old policy that was kept would show.
GROWTH_MIB = 16
# What the model `rowsum` multiplies by: binary fractions, so that every sum is exact.
MATRIX = (np.arange(64, dtype=np.float32).reshape(16, 4) % 7 - 3) / 8

POLICY = """\
telemetry: {{access_log: false}}
redis: {{url: "redis://127.0.0.1:{redis}"}}
x-triton: &triton {{http: "http://{http}", grpc: "{grpc}"}}
backends:
  first: {{endpoints: [*triton], protocol: http, model: rowsum, batch: {{max_rows: {rows}}}}}
  second: {{endpoints: [*triton], protocol: grpc, model: rowsum, batch: {{max_rows: 8, slots: {slots}}}}}
routes:
  cascade:
    tiers:
      - {{name: g{n}-a, backend: first, accept: {{output: Y, values: logits, score: margin, threshold: 1}}}}
      - {{name: g{n}-b, backend: second}}
  kept:
    tiers: [{{name: g{n}-k, backend: first}}]
    cache: {{store: redis, ttl: 1h}}
  split:
    experiment:
      unit: header x-user
      arms:
        one: {{weight: 1, tiers: [{{name: g{n}-x, backend: first}}]}}
        two: {{weight: 1, tiers: [{{name: g{n}-y, backend: second}}]}}
"""
BAD: tuple[Callable[[str], bytes], ...] = (
    lambda text: text.replace("max_rows", "max_row").encode(),
    lambda text: text.replace("backend: second", "backend: third").encode(),
    lambda text: (text + "  - [").encode(),
    lambda text: text.encode() + b"# \xff\n",
    lambda text: b"",
    lambda text: text.replace("*triton]", "http://127.0.0.1:1]").encode(),  # it answers nobody
    lambda text: text.replace("127.0.0.1", "${NO_SUCH_VARIABLE}").encode(),
)


class Load(threading.Thread):
    """Asks one after the other until it is told to stop; keeps what went wrong."""

    def __init__(self, gateway: Served, number: int, generations: dict[str, int]) -> None:
        super().__init__()
        self.gateway = gateway
        self.chance = random.Random(number)
        self.generations = generations
        self.stopped = threading.Event()
        self.answers = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        with httpx.Client(timeout=20) as client, grpc.insecure_channel(self.gateway.grpc) as channel:
            infer = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=pb.ModelInferRequest.SerializeToString,
                response_deserializer=pb.ModelInferResponse.FromString,
            )
            while not self.stopped.is_set():
                rows = self.chance.randint(1, 3)
                x = np.array([[self.chance.randint(0, 9)] * 16 for _ in range(rows)], "<f4")
                ask = self.chance.choice([self.json, self.binary, self.rpc])
                try:
                    y, headers = ask(self.chance.choice(["cascade", "kept", "split"]), x, client, infer)
                except Exception as error:
                    self.wrong.append(f"{ask.__name__}: {error!r}")
                    continue
                self.answers += 1
                self.judge(x, y, headers)

    def judge(self, x: Any, y: Any, headers: dict[str, str]) -> None:
        if not np.array_equal(y, x @ MATRIX):
            self.wrong.append(f"{x.tolist()} gave {y.tolist()}")
        version, tiers = headers["headrace-policy"], headers.get("headrace-tier", "")
        of = {tier.partition("-")[0] for tier in tiers.split(",")}
        if of != {f"g{self.generations.get(version)}"}:
            self.wrong.append(f"policy {version} ({self.generations.get(version)}) answered by {tiers}")

    def json(self, route: str, x: Any, client: httpx.Client, _: Any) -> tuple[Any, dict[str, str]]:
        body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": x.shape, "data": x.ravel().tolist()}]}
        response = client.post(self.url(route), json=body, headers={"x-user": str(self.chance.randint(0, 99))})
        response.raise_for_status()
        return np.array(response.json()["outputs"][0]["data"], "<f4").reshape(-1, 4), dict(response.headers)

    def binary(self, route: str, x: Any, client: httpx.Client, _: Any) -> tuple[Any, dict[str, str]]:
        from tritonclient.http import InferenceServerClient, InferInput, InferResult

        given = InferInput("X", list(x.shape), "FP32")
        given.set_data_from_numpy(x)
        body, length = InferenceServerClient.generate_request_body([given])
        headers = {"inference-header-content-length": str(length)} if length else {}
        response = client.post(self.url(route), content=body, headers=headers)
        response.raise_for_status()
        length = response.headers.get("inference-header-content-length")
        result = InferResult.from_response_body(response.content, header_length=int(length) if length else None)
        return result.as_numpy("Y"), dict(response.headers)

    def rpc(self, route: str, x: Any, _: httpx.Client, infer: Any) -> tuple[Any, dict[str, str]]:
        request = pb.ModelInferRequest(model_name=route, raw_input_contents=[x.tobytes()])
        request.inputs.add(name="X", datatype="FP32", shape=x.shape)
        reply, call = infer.with_call(request, timeout=20)
        return np.frombuffer(reply.raw_output_contents[0], "<f4").reshape(-1, 4), dict(call.trailing_metadata())

    def url(self, route: str) -> str:
        return f"http://{self.gateway.http}/v2/models/{route}/infer"


def edits() -> list[str]:
    """Fifty good ones, thirty bad, twenty swapped links, or a tenth of it, in an order that is always the same."""
    kinds = ["good"] * 5 * TENTHS + ["bad"] * 3 * TENTHS + ["swap"] * 2 * TENTHS
    random.Random(3).shuffle(kinds)
    return kinds


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


def test_edits_of_every_kind_lose_nothing_and_mix_nothing(
    triton: Any,  # noqa: F811
    redis: RedisServer,
    tmp_path: Path,
) -> None:
    generations: dict[str, int] = {}

    def text(n: int) -> str:
        made = POLICY.format(http=triton.http, grpc=triton.grpc, redis=redis.port, n=n, rows=4 + n % 5, slots=1 + n % 3)
        generations[parse(made, "policy.yaml", {}).version] = n
        return made

    policy, data = tmp_path / "policy.yaml", tmp_path / "data"
    data.mkdir()
    policy.write_text(text(0))
    with served(tmp_path, str(policy)) as gateway:
        loads = [Load(gateway, number, generations) for number in range(4)]
        for load in loads:
            load.start()
        try:
            kinds, warm = edits(), 0
            for n, kind in enumerate(kinds, 1):
                if n == len(kinds) * 4 // 10:
                    redis.kill()
                if n == len(kinds) * 7 // 10:
                    redis.start()
                if n == len(kinds) // 2:
                    warm = resident_mib(gateway)
                before, refused = in_force(gateway), reloads(gateway, "refused")
                if kind == "bad":
                    content = BAD[n % len(BAD)](text(generations[before]))
                    replaced(policy, content)
                    assert within(1, lambda refused=refused: reloads(gateway, "refused") > refused), f"edit {n}"  # type: ignore[misc]
                    assert in_force(gateway) == before
                    continue
                if kind == "swap":
                    target = data / f"{n}.yaml"
                    target.write_text(text(n))
                    link = tmp_path / "link"
                    link.symlink_to(target)
                    link.replace(policy)
                elif n % 2:
                    policy.unlink()
                    policy.write_text(text(n))
                else:
                    replaced(policy, text(n).encode())
                assert within(1, lambda n=n: generations.get(in_force(gateway)) == n), f"edit {n} is not in force"  # type: ignore[misc]
            grown = resident_mib(gateway) - warm
        finally:
            for load in loads:
                load.stopped.set()
                load.join()
        assert [wrong for load in loads for wrong in load.wrong] == []
        assert all(load.answers > 20 * TENTHS for load in loads)
        assert reloads(gateway, "applied") == kinds.count("good") + kinds.count("swap")
        assert grown < GROWTH_MIB
        counters = gateway.counters()
        assert len([name for name in counters if name.startswith("headrace_policy_info{")]) == 1
        up, down = (changes(counters, state) for state in ("up", "down"))
        assert down == 1
        assert up >= 1
        print(f"{sum(load.answers for load in loads)} answers, {len(kinds)} edits, grown by {grown:.1f} MiB")


def replaced(policy: Path, content: bytes) -> None:
    """By rename, as editors do."""
    fresh = policy.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.replace(policy)


def in_force(gateway: Served) -> str:
    return str(httpx.get(f"http://{gateway.admin}/policy", timeout=10).json()["version"])


def reloads(gateway: Served, result: str) -> float:
    return gateway.counters().get(f'headrace_policy_reloads_total{{result="{result}"}}', 0.0)


def changes(counters: dict[str, float], state: str) -> float:
    return sum(
        value
        for name, value in counters.items()
        if name.startswith("headrace_cache_store_changes_total") and f'state="{state}"' in name
    )


def resident_mib(gateway: Served) -> float:
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024

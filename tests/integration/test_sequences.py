"""Stateful sequences over two real Tritons, by HTTP, gRPC and streams in turn, until one of them is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support.serve import Served, served, within
from tests.support.triton import triton_with

POLICY = """
backends:
  sums:
    endpoints: [{{http: "http://{0.http}", grpc: "{0.grpc}"}}, {{http: "http://{1.http}", grpc: "{1.grpc}"}}]
    protocol: {protocol}
    model: accumulate
    {batch}
routes:
  sums: {{backend: sums}}
telemetry: {{access_log: false}}
"""
KINDS = {"http": ("http", ""), "grpc": ("grpc", ""), "batched": ("grpc", "batch: {max_rows: 8}")}


@pytest.fixture(params=KINDS)
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Served, list[Any]]]:
    protocol, batch = KINDS[request.param]
    with ExitStack() as stack:
        servers = [stack.enter_context(triton_with(tmp_path / str(i), "accumulate")) for i in range(2)]
        (tmp_path / "policy.yaml").write_text(POLICY.format(*servers, protocol=protocol, batch=batch))
        gateway = stack.enter_context(served(tmp_path, str(tmp_path / "policy.yaml")))
        yield gateway, servers


class Caller:
    """Adds to sequences by turns over HTTP, over gRPC and in a stream."""

    def __init__(self, gateway: Served) -> None:
        self.http = httpclient.InferenceServerClient(gateway.http)
        self.grpc = grpcclient.InferenceServerClient(gateway.grpc)
        self.streamed: list[Any] = []
        self.grpc.start_stream(callback=lambda result, error: self.streamed.append(error or result))

    def add(self, how: int, id: int, value: int, *, start: bool = False, end: bool = False) -> int:
        module = grpcclient if how else httpclient
        tensor = module.InferInput("INPUT", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.array([[value]], np.int32))
        where = {"sequence_id": id, "sequence_start": start, "sequence_end": end}
        if how < 2:
            return int((self.grpc if how else self.http).infer("sums", [tensor], **where).as_numpy("OUTPUT")[0, 0])
        count = len(self.streamed)
        self.grpc.async_stream_infer("sums", [tensor], **where)
        assert within(5, lambda: len(self.streamed) > count)
        result = self.streamed[-1]
        if isinstance(result, Exception):
            raise result
        return int(result.as_numpy("OUTPUT")[0, 0])

    def close(self) -> None:
        self.http.close()
        self.grpc.stop_stream(cancel_requests=True)
        self.grpc.close()


def executed(server: Any) -> int:
    """How many requests of the model a server has answered."""
    with httpclient.InferenceServerClient(server.http) as client:
        return int(client.get_inference_statistics("accumulate")["model_stats"][0]["inference_count"])


def test_sequences_stay_where_they_began_and_are_lost_with_it(running: tuple[Served, list[Any]]) -> None:
    gateway, servers = running
    caller = Caller(gateway)
    try:
        ids = range(1, 11)
        homes: dict[int, Any] = {}
        for id in ids:
            before = [executed(server) for server in servers]
            assert caller.add(id % 2, id, id, start=True) == id
            # Statistics follow an answer.
            assert within(5, lambda before=before: [executed(server) for server in servers] != before)
            homes[id] = next(s for s, count in zip(servers, before, strict=True) if executed(s) > count)
        assert set(homes.values()) == set(servers)
        for turn in range(1, 4):
            for id in ids:
                assert caller.add((turn + id) % 3, id, 1) == id + turn
        killed, left = servers
        os.kill(killed.pids()[0], signal.SIGKILL)
        lost = [id for id in ids if homes[id] is killed]
        for id in lost:
            for how in (0, 1, 2):
                with pytest.raises(InferenceServerException) as raised:
                    caller.add(how, id, 1)
                text = str(raised.value)
                assert "begin anew" in text or "socket closed" in text.lower() or "refused" in text.lower(), text
        for id in ids:
            if homes[id] is left:
                assert caller.add(id % 3, id, 1) == id + 4
                assert caller.add((id + 1) % 3, id, 1, end=True) == id + 5
        for id in lost:
            assert caller.add(id % 3, id, 5, start=True) == 5
            assert caller.add((id + 1) % 3, id, 6, end=True) == 11
    finally:
        caller.close()
    assert not [k for k, v in gateway.counters().items() if k.startswith("headrace_internal_errors_total") and v]

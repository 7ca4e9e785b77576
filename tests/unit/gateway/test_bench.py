"""The benchmark's figures and messages; what it starts is tested in tests/bench."""

from __future__ import annotations

import pytest

from gateway.tools.bench import proxy, stacks
from gateway.tools.bench.exchanges import grpc_infer, http_binary, http_json


def test_what_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks.shutil, "which", lambda name, path: None if name == "nginx" else f"/usr/sbin/{name}")
    assert stacks.missing() == "expected nginx and haproxy; install: sudo apt-get install nginx-light"


def test_the_requests_are_of_the_size_that_is_told() -> None:
    assert 2400 < len(http_json().request) < 2800
    assert 2400 < len(grpc_infer().request) < 2800
    assert len(http_binary().request) < len(http_json().request) / 2


def test_the_figures_are_percentiles_with_a_ratio_to_the_one_beside() -> None:
    one, base = proxy.Samples(10, [8.0], [2.0]), proxy.Samples(10, [4.0, 1.0, 2.0, 3.0, 5.0, 6.0], [1.0])
    samples = {(case, "headrace"): one for case in proxy.CASES}
    samples |= {(case, name): base for case in proxy.CASES for name in ("nginx", "haproxy")}
    samples |= {(case, "starlette"): proxy.Samples(1, [100.0], [9.0]) for case in ("http-json", "http-binary")}

    made = proxy.records(samples)

    figure = {(record.case, record.metric): record for record in made}
    assert figure["nginx-http-json", "cpu_us_per_request_p20"].value == 2.0
    assert figure["headrace-http-json", "cpu_us_per_request_p20"].ratio == 4.0
    assert figure["nginx-http-json", "cpu_us_per_request_median"].value == 3.5
    assert proxy.verdicts(made)[:2] == [
        "http-json: 4 times nginx, target at most 4: met",
        "http-json: 0.08 times starlette, target at most 0.05: missed",
    ]

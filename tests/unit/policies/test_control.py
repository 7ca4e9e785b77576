"""What a backend lets its callers do, and how many of its replicas must be ready."""

from __future__ import annotations

import pytest

from policies import PolicyError, parse
from policies.read import implicit

ONE, TWO = "endpoints: [http://a:1]", "endpoints: [http://a:1, http://b:1]"


def backend(text: str) -> str:
    return f"backends:\n  b: {{{text}}}\nroutes: {{r: {{backend: b}}}}"


def test_callers_may_change_nothing_and_share_nothing_unless_the_policy_says_so() -> None:
    b = parse(backend(TWO), "p.yaml", {}).backends["b"]
    assert (b.control, b.shared_memory, b.ready_replicas) == (False, False, 1)
    b = parse(backend(f"{TWO}, control: true, ready_replicas: 2"), "p.yaml", {}).backends["b"]
    assert (b.control, b.ready_replicas) == (True, 2)
    assert parse(backend(f"{ONE}, shared_memory: true"), "p.yaml", {}).backends["b"].shared_memory


def test_a_proxy_without_a_policy_lets_its_callers_control_the_server_and_shares_no_memory() -> None:
    b = implicit("http://a:1").backends["backend"]
    assert (b.control, b.shared_memory) == (True, False)


@pytest.mark.parametrize(("text", "problem"), [
    (f"{ONE}, ready_replicas: 2",
     "p.yaml:2: backends.b.ready_replicas: ready_replicas is 2, and there are 1 endpoints; write 1 or less"),
    (f"{TWO}, ready_replicas: 0",
     "p.yaml:2: backends.b.ready_replicas: expected a whole number from 1 to 65536, got 0"),
    (f"{TWO}, shared_memory: true",
     "p.yaml:2: backends.b.shared_memory: shared_memory is for one replica, and there are 2 endpoints;"
     " a region is registered with one server: make each a backend of its own"),
    (f"{ONE}, control: 1", "p.yaml:2: backends.b.control: expected true or false, got 1"),
    ("local: m.onnx, control: true",
     "p.yaml:2: backends.b.control: a model in this process has no server; delete 'control'"),
])  # fmt: skip
def test_problems(text: str, problem: str) -> None:
    with pytest.raises(PolicyError) as refused:
        parse(backend(text), "p.yaml", {})
    assert [str(each) for each in refused.value.problems] == [problem]

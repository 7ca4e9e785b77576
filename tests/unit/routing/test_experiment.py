"""Assignment: shares, stability, independence, least movement; and where a unit comes from."""

import math
import subprocess
import sys

import pytest

from backends.request import HttpCall, Infer, Request, RpcCall, Tensors
from policies.spec import Unit
from routing.experiment import assign, cookie, unit_of

GOLDEN = "scscsssssssssssssssssssssssssscssssssssssssssssssssssscssssc"
UNITS = [f"user-{number}" for number in range(100_000)]


def shares(weights: dict[str, float], salt: str = "s") -> dict[str, int]:
    counts = dict.fromkeys(weights, 0)
    for unit in UNITS:
        counts[assign(salt, unit, weights)] += 1
    return counts


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 90, "b": 9, "c": 1}, {"a": 0.2, "b": 0, "c": 0.6}])
def test_shares_are_the_weights_within_binomial_error(weights: dict[str, float]) -> None:
    n, whole = len(UNITS), sum(weights.values())
    for arm, count in shares(weights).items():
        p = weights[arm] / whole
        # Four standard deviations: the units are fixed, so this passes always or never.
        assert abs(count - n * p) <= 4 * math.sqrt(n * p * (1 - p)), (arm, count)


def test_an_assignment_is_for_all_times() -> None:
    """Written down once: a change of the hash would move every user of every running experiment."""
    weights = {"stable": 9.0, "candidate": 1.0}
    told = "".join(assign("intent", f"user-{number}", weights)[0] for number in range(60))
    assert told == GOLDEN
    assert assign("intent", "", weights) == "stable"
    assert assign("intent", "\udcff ☃ \0", weights) == "stable"


def test_processes_agree() -> None:
    count = "sum(assign('s', f'user-{n}', {'a': 2, 'b': 1}) == 'a' for n in range(5000))"
    code = f"from routing.experiment import assign; print({count})"
    here = sum(assign("s", f"user-{n}", {"a": 2, "b": 1}) == "a" for n in range(5000))
    for seed in ("0", "1"):
        command = [sys.executable, "-c", code]
        there = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed})
        assert int(there.stdout) == here


def test_no_more_units_move_than_weights_ask_for() -> None:
    before, after = {"a": 80.0, "b": 20.0}, {"a": 60.0, "b": 40.0}
    moved = [(assign("s", unit, before), assign("s", unit, after)) for unit in UNITS]
    assert {pair for pair in moved if pair[0] != pair[1]} == {("a", "b")}
    assert abs(sum(a != b for a, b in moved) / len(UNITS) - 0.2) < 0.006


def test_a_new_arm_takes_from_all_and_moves_nobody_else() -> None:
    before, after = {"a": 2.0, "b": 1.0}, {"a": 2.0, "b": 1.0, "c": 1.0}
    moved = [(assign("s", unit, before), assign("s", unit, after)) for unit in UNITS]
    assert all(new in (old, "c") for old, new in moved)
    taken = [old for old, new in moved if new == "c"]
    assert abs(taken.count("a") / len(taken) - 2 / 3) < 0.02


def test_the_order_and_the_scale_of_weights_do_not_matter() -> None:
    for unit in UNITS[:2000]:
        arm = assign("s", unit, {"a": 1, "b": 3})
        assert assign("s", unit, {"b": 3, "a": 1}) == assign("s", unit, {"a": 0.25, "b": 0.75}) == arm


def test_experiments_are_independent() -> None:
    weights = {"a": 1.0, "b": 1.0}
    both = sum(assign("one", unit, weights) == assign("two", unit, weights) == "a" for unit in UNITS)
    n = len(UNITS)
    assert abs(both - n / 4) <= 4 * math.sqrt(n * 3 / 16)


def test_arms_and_units_are_told_apart() -> None:
    """An arm `a` with the unit `bc` is not an arm `ab` with the unit `c`: else their draws would be equal."""
    told = [assign("s", f"b{n}", {"a": 1, "z": 1}) == "a" for n in range(400)]
    other = [assign("s", f"{n}", {"ab": 1, "z": 1}) == "ab" for n in range(400)]
    assert told != other


def request(content: object, **headers: str) -> Request:
    return Request(model="m", content=content, headers=headers)  # type: ignore[arg-type]


async def _no_messages() -> object:
    return
    yield


INFER = Infer(inputs=Tensors((), None, None))


def test_where_a_unit_comes_from() -> None:
    call = HttpCall("GET", "/v2", ((b"x-user", b"u1"), (b"cookie", b"a=1; uid=u2")))
    rpc = RpcCall("/S/M", _no_messages(), (("x-user", "u1"), ("cookie", "uid=u2"), ("x-user-bin", b"x")))  # type: ignore[arg-type]
    infer = request(INFER, **{"x-user": "u1", "cookie": 'a=1; uid="u2"'})
    for made in (request(call), request(rpc), infer):
        assert unit_of(made, Unit("header", "x-user"), "") == "u1"
        assert unit_of(made, Unit("tenant"), "x-user") == "u1"
        assert unit_of(made, Unit("cookie", "uid"), "") == "u2"
        assert unit_of(made, Unit("header", "x-other"), "") == ""
        assert unit_of(made, Unit("cookie", "other"), "") == ""
    assert unit_of(request(INFER), Unit("cookie", "uid"), "") == ""


def test_cookies_that_are_none() -> None:
    assert [cookie(text, "uid") for text in ("uid", "uid=", "xuid=1", ";;=;", "UID=1")] == [""] * 5
    assert cookie("uid=1; uid=2", "uid") == "1"
    assert cookie("uid=a=b", "uid") == "a=b"

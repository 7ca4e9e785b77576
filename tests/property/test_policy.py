"""Whatever a file says, a policy comes of it or problems do; each problem is one line and quotes no secret."""

from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

import policies
from policies import Policy, PolicyError, Problem, parse

EXAMPLES = Path(policies.__file__).parent / "examples"
DEMO = (EXAMPLES / "demo.yaml").read_text()
SECRET = "hunter2 zq"

# Pieces that mean something to YAML or to the reader.
PIECES = st.sampled_from([
    "\n", "  ", "\t", ": ", "- ", "{", "}", "[", "]", "&a ", "*a", "<<: ", "!!str ", "'", '"', "#", "|", ">", "? ",
    "---\n", "...", "%YAML 1.1\n", "${S}", "$${", "${", "null", "~", "true", "off", "-1", "0", "1e999", ".inf", "10",
    "1s", "99d", "64M", "http://h:1", "grpc://h:1", "x-", "routes:", "tiers:", "accept: {}", "backend: ", "\\", "\x85",
    "\u2028", "\ufeff", "é", "\x00", "\ud800",
])  # fmt: skip


def outcome(text: str, **environ: str) -> Policy | tuple[Problem, ...]:
    try:
        return parse(text, "p.yaml", environ)
    except PolicyError as error:
        return error.problems


def check(text: str) -> None:
    policy = outcome(text, S=SECRET)
    if isinstance(policy, tuple):
        assert policy
        assert [problem.line for problem in policy] == sorted(problem.line for problem in policy)
        for line in map(str, policy):
            assert line.isprintable()
            assert line.startswith("p.yaml")
            assert SECRET not in line
    else:
        for route in policy.routes.values():
            for arm in route.arms:
                assert all(tier.backend in policy.backends for tier in arm.tiers)
                assert [tier.accept is None for tier in arm.tiers] == [False] * (len(arm.tiers) - 1) + [True]
        assert policy.proxy is None or policy.proxy in policy.backends


@settings(deadline=None)  # a loaded machine is no failure
@given(st.text() | st.lists(PIECES | st.text(max_size=5)).map("".join))
@example("*\ud7fc")
@example("%YAML 9.9\n---\na")
@example('"\\UFFFFFFFF"')
def test_any_text(text: str) -> None:
    check(text)


@settings(deadline=None)
@given(st.integers(0, len(DEMO)), st.integers(0, 40), PIECES | st.text(max_size=8))
def test_the_demo_with_a_piece_replaced(at: int, length: int, piece: str) -> None:
    check(DEMO[:at] + piece + DEMO[at + length :])


@settings(deadline=None)
@given(st.data())
def test_the_demo_with_a_word_changed(data: st.DataObject) -> None:
    lines = DEMO.split("\n")
    at = data.draw(st.integers(0, len(lines) - 1))
    words = lines[at].split(" ")
    words[data.draw(st.integers(0, len(words) - 1))] = data.draw(PIECES)
    lines[at] = " ".join(words)
    check("\n".join(lines))


@settings(deadline=None)
@given(st.permutations(DEMO.split("\n\n")))
def test_the_demo_in_another_order(parts: list[str]) -> None:
    check("\n\n".join(parts))


@settings(deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=20))
def test_a_variable_may_hold_anything(value: str) -> None:
    text = "proxy: b\nbackends: {b: {endpoints: [http://h:1], headers: {h: '${S}'}, timeout: '${S}'}}"
    policy = outcome(text, S=value)
    if isinstance(policy, tuple):
        assert all(str(problem).isprintable() for problem in policy)
    else:
        assert policy.backends["b"].headers["h"].value == value.strip(" \t\r\n")

"""What the README shows is what is there."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from gateway.cli import app
from policies import PolicyError, load, parse

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_policy_by_example_is_the_demos_policy() -> None:
    shown = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert shown[1] == (ROOT / "policies/examples/demo.yaml").read_text()


def test_the_larger_policy_can_be_read(tmp_path: Path) -> None:
    shown = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)[1]
    (tmp_path / "secrets").mkdir()
    (tmp_path / "teams").mkdir()
    (tmp_path / "secrets/redis").write_text("hunter2\n")
    (tmp_path / "secrets/token").write_text("hunter3\n")
    (tmp_path / "teams/search.yaml").write_text("backends: {search: {endpoints: [http://h:1]}}\n")
    (tmp_path / "policy.yaml").write_text(shown)
    policy = load(tmp_path / "policy.yaml", {})
    assert {*policy.backends} == {"stable", "candidate", "small", "search"}
    assert [arm.name for arm in policy.routes["ranker"].arms] == ["stable", "candidate"]


def test_the_message_of_a_misspelt_key_reads_as_shown() -> None:
    policy = (ROOT / "policies/examples/demo.yaml").read_text().replace("threshold: $", "treshold: $")
    try:
        parse(policy, "policy.yaml", {})
    except PolicyError as error:
        told = [str(problem).partition(": ")[2] for problem in error.problems]
    shown = re.search(r"policy\.yaml:\d+: (routes\.intent\.tiers.*treshold.*)", README)
    assert shown is not None
    assert shown[1] in told


def test_every_flag_of_the_operations_table_exists() -> None:
    help_text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    flags = re.findall(r"^\| \d{4} \|.*`(--[a-z-]+)` \|$", README, re.MULTILINE)
    assert len(flags) == 4
    for flag in flags:
        assert flag in help_text, flag

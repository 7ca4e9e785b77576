"""The JSON Schema takes what the readers take, and is the one that is committed."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

import policies
from policies import PolicyError, parse
from policies.json_schema import json_schema

HERE = Path(policies.__file__).parent
VALIDATOR = jsonschema.Draft7Validator(json.loads(json_schema()))
# More than the examples have; everything in it is good.
FULL = """\
listen: {http: "[::1]:9000", grpc: 9001, metrics: off, admin: "${ADMIN:-9003}"}
backends:
  a:
    kind: triton
    endpoints: [{http: http://h:1/, grpc: h:2}, "grpc://h:3"]
    protocol: grpc
    model: m
    version: 3
    batch: {max_rows: 8, slots: "${SLOTS:-3}", queue_rows: 64, queue_time: 250 ms}
    timeout: 1.5s
    first_byte_timeout: 300ms
    idle_timeout: 5s
    stream_timeout: 1h
    headers: {Authorization: "Bearer ${TOKEN:-t}", x-number: 12, x-flag: true}
routes:
  r:
    tiers:
      - {name: fast, backend: a, accept: {output: OUT, values: logits, score: entropy, threshold: 1}}
      - {backend: a}
    cache: {store: memory, entries: 10, bytes: 1048576, ttl: 5m}
  s: {backend: a, timeout: 2s}
limits: {in_flight: 10, body_bytes: 1MB, drain: 0s, drain_delay: 5s}
telemetry: {response_headers: "${SHOW:-false}", traces: {per_second: 0.5, keep: 0}}
x-free: [anything]
"""


def faults(text: str) -> list[str]:
    document: Any = YAML(typ="safe", pure=True).load(text)
    return [error.message for error in VALIDATOR.iter_errors(document)]


def test_the_committed_file_is_what_the_tables_say() -> None:
    committed = (HERE / "policy.schema.json").read_text()
    assert committed == json_schema(), "run: headrace schema > policies/policy.schema.json"


def test_it_is_a_schema() -> None:
    jsonschema.Draft7Validator.check_schema(json.loads(json_schema()))


@pytest.mark.parametrize("example", sorted((HERE / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_validate_and_name_it(example: Path) -> None:
    text = example.read_text()
    assert faults(text) == []
    mark, _, named = text.splitlines()[0].partition("$schema=")
    assert mark == "# yaml-language-server: "
    assert (example.parent / named).samefile(HERE / "policy.schema.json")


def test_whatever_can_be_written_validates() -> None:
    parse(FULL, "p.yaml", {})
    assert faults(FULL) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("kind: triton", "kind: tritn"),
        ("max_rows: 8", "max_row: 8"),
        ("max_rows: 8", "max_rows: 0"),
        ("queue_time: 250 ms", "queue_time: 250"),
        ("timeout: 1.5s", "timeout: soon"),
        ("threshold: 1", "threshold: 2"),
        ("bytes: 1048576", "bytes: 1 heap"),
        ("{backend: a, timeout: 2s}", "{timeout: 2s}"),
        ("{backend: a, timeout: 2s}", "{backend: a, tiers: [{backend: a}]}"),
        ("score: entropy, ", ""),
        ("x-free:", "free:"),
        ("  s: {", '  "s s": {'),
    ],
)
def test_what_the_readers_refuse_is_marked(right: str, wrong: str) -> None:
    assert right in FULL
    text = FULL.replace(right, wrong)
    with pytest.raises(PolicyError):
        parse(text, "p.yaml", {})
    assert faults(text)


def test_defaults_are_told_as_they_are_written() -> None:
    limits = json.loads(json_schema())["properties"]["limits"]["properties"]
    assert {key: part["default"] for key, part in limits.items()} == {
        "in_flight": 4096, "connections": 10_000, "body_bytes": "64MiB", "reply_bytes": "64MiB", "timeout": "30s",
        "drain": "25s", "drain_delay": "0s",
    }  # fmt: skip

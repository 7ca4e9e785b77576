"""Every value in effect and where it comes from."""

from os.path import abspath
from pathlib import Path

import pytest

import policies
from policies import PolicyError
from policies.explain import Setting, explain

POLICY = """\
listen: {metrics: off}
x-one: &one
  endpoints: [{http: "http://${HOST:-t}:8000", grpc: t:8001}, http://u:8000]
  batch: {queue_time: 250ms}
backends:
  small: *one
  large:
    <<: *one
    timeout: 2m
    headers: {Authorization: "Bearer pre-${TOKEN}"}
routes:
  r:
    tiers:
      - {backend: small, accept: {output: P, values: logits, score: margin, threshold: "${T:-0.5}"}}
      - backend: large
  s: {backend: large, cache: {}}
telemetry: {access_log: false, traces: {keep: 7}}
"""


def explained(text: str = POLICY, **environ: str) -> dict[str, tuple[str, str]]:
    """Value and source by path."""
    found: dict[str, tuple[str, str]] = {}

    def walk(setting: Setting, path: str) -> None:
        for part in setting.parts:
            under = f"{path}.{part.key}".removeprefix(".").replace(".[", "[")
            found[under] = part.value, part.source
            walk(part, under)

    walk(explain(text, "p.yaml", environ), "")
    return found


def test_what_is_written_has_its_line_and_its_variables() -> None:
    told = explained(TOKEN="hunter2", HOST="h")
    assert told["listen"] == ("", "p.yaml:1")
    assert told["listen.metrics"] == ("off", "p.yaml:1")
    assert told["backends.small.endpoints[0].http"] == ("http://h:8000", "p.yaml:3 with ${HOST}")
    assert told["backends.small.endpoints[1]"] == ("http://u:8000", "p.yaml:3")
    assert told["routes.r.tiers[0].accept.threshold"] == ("0.5", "p.yaml:14 with ${T}")
    assert told["routes.s.backend"] == ("large", "p.yaml:16")
    assert told["telemetry.access_log"] == ("false", "p.yaml:17")
    assert told["telemetry.traces.keep"] == ("7", "p.yaml:17")


def test_what_is_merged_has_the_line_where_it_was_written() -> None:
    told = explained(TOKEN="")
    assert told["backends.large.batch.queue_time"] == ("250ms", "p.yaml:4")
    assert told["backends.large.timeout"] == ("2m", "p.yaml:9")


def test_what_is_not_written_is_a_default_also_where_it_follows_from_other_keys() -> None:
    told = explained(TOKEN="")
    assert told["listen.admin"] == ("127.0.0.1:8003", "default")
    assert told["backends.small.batch.max_rows"] == ("32", "default")
    assert told["backends.small.connect_timeout"] == ("2s", "default")
    assert told["backends.small.protocol"] == ("http", "default")  # not every endpoint speaks gRPC
    assert told["routes.r.tiers[1].name"] == ("large", "default")
    assert told["routes.s.cache.bytes"] == ("256MiB", "default")
    assert told["limits"] == ("", "default")
    assert told["limits.body_bytes"] == ("64MiB", "default")
    assert told["telemetry.traces.per_second"] == ("10.0", "default")


def test_what_has_no_value_says_what_that_means() -> None:
    told = explained(TOKEN="")
    assert told["backends.small.model"] == ("(the name that was asked for)", "default")
    assert told["routes.r.cache"] == ("(nothing is kept)", "default")
    assert told["routes.r.timeout"] == ("(limits.timeout)", "default")
    assert told["backends.small.headers"] == ("(none)", "default")
    assert "routes.r.backend" not in told  # `backend` and `tiers` exclude each other
    assert "routes.s.tiers" not in told


def test_what_means_nothing_beside_another_key_is_not_told() -> None:
    text = "backends: {a: {local: m.onnx}}\nroutes: {r: {experiment: {unit: tenant, arms: ARMS}}}\ntenant_header: t"
    told = explained(text.replace("ARMS", "{x: {weight: 1, backend: a}, y: {weight: 1, backend: a}}"))
    assert told["backends.a.local"] == (abspath("m.onnx"), "p.yaml:1")
    assert not {"backends.a.protocol", "backends.a.headers", "backends.a.kind", "routes.r.cache"} & told.keys()
    assert "routes.r.experiment.arms.x.cache" in told


def test_secrets_are_never_shown() -> None:
    told = explained(TOKEN="hunter2")
    assert told["backends.large.headers.Authorization"] == ("***", "p.yaml:10 with ${TOKEN}")
    assert "hunter2" not in str(told)
    assert "pre-" not in str(told)


def test_the_root_has_the_version() -> None:
    assert explain(POLICY, "p.yaml", {"TOKEN": ""}).value == policies.parse(POLICY, "p.yaml", {"TOKEN": ""}).version


def test_a_policy_with_problems_is_not_explained() -> None:
    with pytest.raises(PolicyError, match="TOKEN"):
        explain(POLICY, "p.yaml", {})


@pytest.mark.parametrize("name", ["demo.yaml", "proxy.yaml"])
def test_no_default_of_the_examples_is_unknown(name: str) -> None:
    told = explained((Path(policies.__file__).parent / "examples" / name).read_text())
    assert not [path for path, (value, _) in told.items() if "object at" in value or "Address(" in value]

"""What `headrace init` writes for models of each kind."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.tools.init import policy_text
from gateway.tools.survey import Config, Metadata, Model, Survey
from policies import Policy, parse

METADATA = {
    "name": "m", "platform": "onnxruntime_onnx",
    "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 16]}],
    "outputs": [{"name": "Y", "datatype": "BYTES", "shape": [-1, 1]}],
}  # fmt: skip
INSTANCES = [{"kind": "KIND_GPU", "count": 2, "gpus": [0, 1]}, {"kind": "KIND_CPU", "count": 1}]


def model(name: str = "m", **config: Any) -> Model:
    given = {"max_batch_size": 8, "instance_group": INSTANCES} | config
    return Model(name, msgspec.convert(METADATA, Metadata), msgspec.convert(given, Config))


def written(*models: Model, **more: Any) -> tuple[str, Policy]:
    about = {"server": "triton 2.51.0", "http": "http://t:8000", "grpc": "t:8001", "skipped": ()} | more
    text = policy_text(Survey(models=models, **about))
    return text, parse(text, "policy.yaml", {})


def test_a_model_with_a_batch_axis_gets_a_batch_as_large_and_a_slot_an_instance() -> None:
    text, policy = written(model())
    batch = policy.backends["m"].batch
    assert batch is not None
    assert (batch.max_rows, batch.slots) == (8, 5)
    assert policy.backends["m"].model == "m"
    assert policy.routes["m"].arms[0].tiers[0].backend == "m"
    assert str(policy.backends["m"].endpoints[0].grpc) == "t:8001"
    assert "in  X FP32 [-1, 16]\n" in text
    assert "out Y BYTES [-1, 1]\n" in text


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_transaction_policy": {"decoupled": True}}, "decoupled"),
        ({"sequence_batching": {}}, "sequence model"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_batch_size": 1}, "max_batch_size is 1"),
        ({"input": [{"name": "X", "is_shape_tensor": True}]}, "shape tensors"),
        ({"ensemble_scheduling": {"step": [{"model_name": "elsewhere"}]}}, "step elsewhere"),
    ],
)
def test_a_model_whose_rows_must_not_be_merged_says_why(config: dict[str, Any], told: str) -> None:
    text, policy = written(model(**config))
    assert policy.backends["m"].batch is None
    (line,) = (line for line in text.splitlines() if "No batch" in line)
    assert told in line


def test_a_model_without_a_configuration_has_no_batch() -> None:
    text, policy = written(Model("m", msgspec.convert(METADATA, Metadata), None))
    assert policy.backends["m"].batch is None
    assert "does not tell its configuration" in text


def test_an_ensemble_of_models_that_merge_merges_as_its_narrowest_step() -> None:
    ensemble = model("both", instance_group=[], ensemble_scheduling={"step": [{"model_name": n} for n in "ab"]})
    _, policy = written(ensemble, model("a"), model("b", instance_group=[{"count": 3}]))
    batch = policy.backends["both"].batch
    assert batch is not None
    assert (batch.max_rows, batch.slots) == (8, 3)


def test_an_ensemble_that_names_itself_ends() -> None:
    _, policy = written(model("e", ensemble_scheduling={"step": [{"model_name": "e"}]}))
    assert policy.backends["e"].batch is None


def test_a_large_batch_has_a_queue_that_holds_it() -> None:
    _, policy = written(model(max_batch_size=2048))
    batch = policy.backends["m"].batch
    assert batch is not None
    assert (batch.max_rows, batch.queue_rows) == (2048, 2048)


@pytest.mark.parametrize("name", ["true", "NULL", "1e5", "---", "-", "a:", "::", "x-m", "a/b.c", "0x1", "off"])
def test_every_name_that_a_policy_can_have_reads_as_text(name: str) -> None:
    _, policy = written(model(name))
    assert (list(policy.routes), policy.backends[name].model) == ([name], name)


def test_what_the_server_says_stays_in_its_comment() -> None:
    evil = 'X"\nproxy: m\n\u2028# '
    tensors = msgspec.convert({"platform": evil, "inputs": [{"name": evil, "datatype": evil, "shape": [1]}]}, Metadata)
    made = Model("m", tensors, model().config)
    text, policy = written(made, server=evil, skipped=((evil, f"a reason\n{evil}"),))
    assert policy.proxy is None
    assert all(line.lstrip().startswith("#") for line in text.splitlines() if "proxy: m" in line)


def test_on_one_machine_the_gateway_listens_elsewhere() -> None:
    _, policy = written(model(), http="http://127.0.0.1:8000", grpc="127.0.0.1:8001")
    assert str(policy.listen.http) == "0.0.0.0:9000"
    assert str(policy.listen.admin) == "127.0.0.1:9003"
    _, policy = written(model(), http="http://127.0.0.1:8100", grpc=None)
    assert str(policy.listen.http) == "0.0.0.0:8000"


def test_an_ipv6_server_is_written_so_that_yaml_reads_it() -> None:
    _, policy = written(model(), http="http://[::1]:8000", grpc="[::1]:8001")
    (endpoint,) = policy.backends["m"].endpoints
    assert (endpoint.http, endpoint.grpc) == ("http://[::1]:8000", "[::1]:8001")
    assert str(policy.listen.http) == "0.0.0.0:9000"

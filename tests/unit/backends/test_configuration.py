"""A model's configuration, as it comes over either protocol."""

from __future__ import annotations

import pytest
from google.protobuf import json_format

from backends.configuration import read_document, read_message
from backends.errors import BadReply
from backends.proto import wire
from backends.proto.management_pb2 import ModelConfigResponse
from backends.proto.model_config_pb2 import DataType, ModelConfig
from backends.request import Trait


def test_what_a_message_says_of_its_models_nature() -> None:
    decoupled, sequences = wire.varint(19 << 3 | 2) + b"\x02\x08\x01", wire.field(13, b"\x08\x01")
    for fields, trait in [
        (b"", Trait()),
        (wire.text(1, "m"), Trait()),
        (decoupled, Trait(decoupled=True)),
        (wire.varint(19 << 3 | 2) + b"\x00", Trait()),
        (wire.varint(19 << 3 | 2) + b"\x02\x08\x00", Trait()),
        (sequences, Trait(stateful=True)),
        (sequences + decoupled, Trait(decoupled=True, stateful=True)),
    ]:
        assert read_message(wire.field(1, fields)) == trait
    assert read_message(b"") == Trait()
    with pytest.raises(BadReply, match="ModelConfig"):
        read_message(b"\x0b")


def test_a_message_and_a_document_say_the_same() -> None:
    config = ModelConfig(name="m", max_batch_size=4)
    config.input.add(name="X", data_type=DataType.TYPE_FP32, dims=[-1, 3])
    config.input.add(name="T", data_type=DataType.TYPE_STRING, dims=[1])
    config.output.add(name="Y", data_type=DataType.TYPE_STRING, dims=[1])
    config.output.add(name="Z", data_type=DataType.TYPE_BF16, dims=[1])
    config.model_transaction_policy.decoupled = True
    config.sequence_batching.max_sequence_idle_microseconds = 5
    expected = Trait(
        decoupled=True,
        stateful=True,
        batched=True,
        inputs=(("X", "FP32", (-1, 3)), ("T", "BYTES", (1,))),
        outputs={"Y": "BYTES", "Z": "BF16"},
    )
    assert read_message(ModelConfigResponse(config=config).SerializeToString()) == expected
    document = json_format.MessageToJson(config, preserving_proto_field_name=True)
    assert '"-1"' in document  # protobuf's way; Triton writes numbers
    for text in (document, document.replace('"-1"', "-1").replace('"3"', "3").replace('"1"', "1")):
        assert read_document(text.encode(), "/config") == expected


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"name":"m","input":[{"dims":["x"]}]}', b'{"name":"\xff"}'])
def test_what_is_no_document(body: bytes) -> None:
    with pytest.raises(BadReply, match="/config: expected a model's configuration as JSON"):
        read_document(body, "/config")

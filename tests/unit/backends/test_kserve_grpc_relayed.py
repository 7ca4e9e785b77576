"""Relayed messages of KServe v2 over gRPC: whom they are for, and other names."""

from __future__ import annotations

import pytest

from backends import kserve_grpc_relayed as codec
from backends.errors import BadReply, BadRequest
from backends.proto import kserve_pb2 as pb
from backends.proto import wire


def test_relayed_messages_are_named_and_renamed() -> None:
    service = "/inference.GRPCInferenceService/"
    ready = wire.text(1, "m") + wire.text(2, "3")
    assert codec.named(service + "ModelReady", ready) == ("m", "3")
    assert codec.named(service + "ModelReady", codec.rename(service + "ModelReady", ready, "b", "")) == ("b", "3")
    assert codec.named(service + "ModelReady", codec.rename(service + "ModelReady", ready, "b", "9")) == ("b", "9")
    load = wire.text(1, "repository") + wire.text(2, "m")
    assert codec.named(service + "RepositoryModelLoad", load) == ("m", "")
    assert not codec.names_model(service + "ServerMetadata")
    assert codec.rename(service + "ServerMetadata", b"", "b", "9") == b""
    for broken in (b"\x0a\x05m", b"\x0a\x01\xff"):
        with pytest.raises(BadRequest, match="ModelReady: expected its protobuf message"):
            codec.named(service + "ModelReady", broken)


def test_relayed_replies_are_renamed() -> None:
    stream = "/inference.GRPCInferenceService/ModelStreamInfer"
    sent = pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(model_name="b", id="7"))
    renamed = pb.ModelStreamInferResponse.FromString(codec.rename_reply(stream, sent.SerializeToString(), "public"))
    assert (renamed.infer_response.model_name, renamed.infer_response.id) == ("public", "7")
    error = pb.ModelStreamInferResponse(error_message="no").SerializeToString()
    assert codec.rename_reply(stream, error, "public") == error
    described = wire.text(1, "b") + wire.text(2, "1")
    assert codec.named(stream, codec.rename_reply("/a/ModelMetadata", described, "public")) == ("public", "1")
    assert codec.rename_reply("/a/ModelStatistics", described, "public") == described
    with pytest.raises(BadReply):
        codec.rename_reply(stream, b"\x0b", "public")

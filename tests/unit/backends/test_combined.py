"""Several servers' replies as one: sums, unions, intersections, in JSON and as protobuf."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from backends import combined
from backends.calls import Ask
from backends.errors import BadReply
from backends.request import HttpCall, RpcCall


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


HTTP, RPC = HttpCall("GET", "/v2"), RpcCall("/inference.GRPCInferenceService/ModelStatistics", nothing())


def spent(count: int) -> dict[str, int]:
    return {"count": count, "ns": 10 * count}


def model(scale: int, last: int, sizes: list[int]) -> dict[str, Any]:
    return {
        "name": "m",
        "version": "1",
        "last_inference": last,
        "inference_count": 3 * scale,
        "execution_count": 2 * scale,
        "inference_stats": {"success": spent(scale), "fail": spent(0)},
        "response_stats": {"0": {"compute_infer": spent(scale)}},
        "batch_stats": [{"batch_size": size, "compute_infer": spent(scale)} for size in sizes],
        "memory_usage": [{"type": "CPU", "id": 0, "byte_size": 5}],
    }


def test_statistics_add_up_by_model_version_batch_size_and_response() -> None:
    other = {**model(7, 1, []), "version": "2"}
    first, second = {"model_stats": [model(1, 50, [4, 1])]}, {"model_stats": [other, model(10, 40, [4, 8])]}
    summed, alone = combined.statistics([first, second])["model_stats"]
    assert alone == other
    assert summed == {
        "name": "m",
        "version": "1",
        "last_inference": 50,
        "inference_count": 33,
        "execution_count": 22,
        "inference_stats": {"success": spent(11), "fail": spent(0)},
        "response_stats": {"0": {"compute_infer": spent(11)}},
        "batch_stats": [
            {"batch_size": 1, "compute_infer": spent(1)},
            {"batch_size": 4, "compute_infer": spent(11)},
            {"batch_size": 8, "compute_infer": spent(10)},
        ],
        "memory_usage": [{"type": "CPU", "id": 0, "byte_size": 10}],
    }


@pytest.mark.parametrize("call", [HTTP, RPC])
def test_what_is_written_is_what_is_read(call: Any) -> None:
    document = {"model_stats": [model(1, 2**63 + 1, [4])]}
    body = combined.write(call, Ask.STATISTICS, document)
    read = combined.read(call, Ask.STATISTICS, body)
    assert combined.write(call, Ask.STATISTICS, read) == body
    assert read["model_stats"][0]["last_inference"] == 2**63 + 1


def test_the_protobuf_form_is_tritons() -> None:
    theirs = service_pb2.ModelStatisticsResponse(model_stats=[model(3, 7, [2])])
    ours = combined.write(RPC, Ask.STATISTICS, {"model_stats": [model(3, 7, [2])]})
    assert service_pb2.ModelStatisticsResponse.FromString(ours) == theirs
    index = combined.write(RPC, Ask.INDEX, [{"name": "m", "version": "1", "state": "READY", "reason": "r"}])
    assert str(service_pb2.RepositoryIndexResponse.FromString(index).models[0].reason) == "r"


def test_a_model_is_ready_where_enough_repositories_have_it_ready() -> None:
    ready, loading = {"name": "m", "version": "1", "state": "READY"}, {"name": "m", "version": "1", "state": "LOADING"}
    assert combined.index([[ready], [loading]], 1) == [ready]
    assert combined.index([[ready], [loading]], 2) == [
        {"name": "m", "version": "1", "state": "LOADING", "reason": "ready on 1 of the 2 replicas that must be"}
    ]
    assert combined.index([[ready], []], 2) == [
        {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "ready on 1 of the 2 replicas that must be"}
    ]
    failed = {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert combined.index([[failed], [loading]], 2) == [failed]


def test_a_model_that_one_server_has_not_loaded_is_listed_once() -> None:
    ready = {"name": "m", "version": "1", "state": "READY"}
    assert combined.index([[{"name": "m"}, {"name": "n"}], [ready, {"name": "n"}]], 1) == [{"name": "n"}, ready]


def test_extensions_are_those_that_all_have_and_that_the_policy_allows() -> None:
    said = ["classification", "sequence", "model_repository", "system_shared_memory", "trace", "their_own"]
    plain = combined.extensions(control=False, memory=False)
    full = combined.extensions(control=True, memory=True)
    documents = [{"name": "triton", "version": "2", "extensions": said}, {"name": "t", "extensions": said[1:]}]
    assert combined.server(documents, plain) == {"name": "triton", "version": "2", "extensions": ["sequence"]}
    assert combined.server(documents, full)["extensions"] == said[1:5]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"3", b'{"model_stats": 3}', b'{"model_stats": [3]}',
                                  b'{"model_stats": [{"last_inference": "x"}, {"last_inference": 1}]}'])  # fmt: skip
def test_nonsense_is_a_bad_reply(body: bytes) -> None:
    with pytest.raises(BadReply):
        combined.statistics([combined.read(HTTP, Ask.STATISTICS, body)] * 2)
    with pytest.raises(BadReply):
        combined.read(RPC, Ask.STATISTICS, b"\xff\xff")


def test_the_order_of_maps_means_nothing() -> None:
    config = service_pb2.ModelConfigResponse()
    config.config.name = "m"
    for key in ("a", "b", "c"):
        config.config.parameters[key].string_value = key
    entries = [b"r\x08\n\x01%c\x12\x03\n\x01%c" % (key, key) for key in b"cab"]
    inner = b"\n\x01m" + b"".join(entries)
    other = b"\n" + bytes((len(inner),)) + inner
    assert service_pb2.ModelConfigResponse.FromString(other) == config
    mine = config.SerializeToString()
    assert combined.canonical(RPC, Ask.CONFIG, mine) == combined.canonical(RPC, Ask.CONFIG, other)
    assert combined.canonical(RPC, Ask.CONFIG, mine) != combined.canonical(RPC, Ask.CONFIG, mine[:-1] + b"x")
    assert combined.canonical(HTTP, Ask.CONFIG, b'{"a": 1, "b": 2}') == combined.canonical(
        HTTP, Ask.CONFIG, b'{"b":2,"a":1}'
    )

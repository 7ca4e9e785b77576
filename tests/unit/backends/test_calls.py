"""What relayed calls ask, over both protocols."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from backends.calls import Ask, asks, changes
from backends.request import HttpCall, RpcCall


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


def rpc(method: str) -> RpcCall:
    return RpcCall(f"/inference.GRPCInferenceService/{method}", nothing())


@pytest.mark.parametrize(("path", "method", "ask"), [
    ("/v2", "ServerMetadata", Ask.SERVER),
    ("/v2/models/m/ready", "ModelReady", Ask.READY),
    ("/v2/models/m/versions/1/ready", "ModelReady", Ask.READY),
    ("/v2/models/m", "ModelMetadata", Ask.METADATA),
    ("/v2/models/m/versions/1", "ModelMetadata", Ask.METADATA),
    ("/v2/models/m/config?x=/load", "ModelConfig", Ask.CONFIG),
    ("/v2/models/m/versions/1/config", "ModelConfig", Ask.CONFIG),
    ("/v2/models/m/stats", "ModelStatistics", Ask.STATISTICS),
    ("/v2/models/m/versions/1/stats", "ModelStatistics", Ask.STATISTICS),
    ("/v2/models/stats", "ModelStatistics", Ask.STATISTICS),
    ("/v2/repository/index", "RepositoryIndex", Ask.INDEX),
    ("/v2/repository/models/m/load", "RepositoryModelLoad", Ask.LOAD),
    ("/v2/repository/models/m/unload", "RepositoryModelUnload", Ask.UNLOAD),
    ("/v2/models/m/trace/setting", "TraceSetting", Ask.TRACE),
    ("/v2/trace/setting", "TraceSetting", Ask.TRACE),
    ("/v2/logging", "LogSettings", Ask.LOGGING),
    ("/v2/systemsharedmemory/status", "SystemSharedMemoryStatus", Ask.MEMORY),
    ("/v2/cudasharedmemory/region/r/register", "CudaSharedMemoryRegister", Ask.MEMORY),
    ("/v2/systemsharedmemory/unregister", "SystemSharedMemoryUnregister", Ask.MEMORY),
    ("/v2/models/m/generate_stream", "ModelStreamInfer", Ask.OTHER),
    ("/v2/models/load", "ModelMetadata", Ask.METADATA),  # a model may be called anything
    ("/v2/models/m%2Fload/infer", "ModelInfer", Ask.OTHER),
])  # fmt: skip
def test_what_a_call_asks(path: str, method: str, ask: Ask) -> None:
    assert asks(HttpCall("GET", path)) is ask
    assert asks(rpc(method)) is ask


@pytest.mark.parametrize("path", [
    "/v2/repository/models/m/lo%61d", "//v2//repository/models/m/load/", "/v2/repository/other/models/m/load",
])  # fmt: skip
def test_another_spelling_of_a_change_is_a_change(path: str) -> None:
    assert asks(HttpCall("POST", path)) is Ask.LOAD


def test_settings_are_changed_by_what_names_one() -> None:
    for ask in (Ask.TRACE, Ask.LOGGING):
        assert not changes(HttpCall("GET", "/v2/logging"), ask, b"")
        assert changes(HttpCall("POST", "/v2/logging"), ask, b"")
        assert not changes(rpc("LogSettings"), ask, b"\x12\x01m")  # the model
        assert changes(rpc("LogSettings"), ask, b"\x12\x01m\x0a\x02\x0a\x00")
        assert changes(rpc("LogSettings"), ask, b"\xff")
    assert changes(HttpCall("GET", "/v2/repository/models/m/load"), Ask.LOAD, b"")
    assert not changes(HttpCall("POST", "/v2/repository/index"), Ask.INDEX, b"")

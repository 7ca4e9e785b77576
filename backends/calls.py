"""What a relayed call asks of a server, whatever its protocol: what is decided about it is decided once."""

from __future__ import annotations

from enum import Enum
from urllib.parse import unquote

from backends.proto import wire
from backends.request import HttpCall, RpcCall


class Ask(Enum):
    """The kinds of call that are more than work for a model; the values are for messages."""

    SERVER = "server metadata"
    READY = "readiness"
    METADATA = "metadata"
    CONFIG = "configuration"
    STATISTICS = "statistics"
    INDEX = "repository index"
    LOAD = "load"
    UNLOAD = "unload"
    TRACE = "trace settings"
    LOGGING = "log settings"
    MEMORY = "shared memory"
    OTHER = "other"


_METHODS = {
    "ServerMetadata": Ask.SERVER, "ModelReady": Ask.READY, "ModelMetadata": Ask.METADATA, "ModelConfig": Ask.CONFIG,
    "ModelStatistics": Ask.STATISTICS, "RepositoryIndex": Ask.INDEX, "RepositoryModelLoad": Ask.LOAD,
    "RepositoryModelUnload": Ask.UNLOAD, "TraceSetting": Ask.TRACE, "LogSettings": Ask.LOGGING,
}  # fmt: skip
_TAILS = {
    (): Ask.METADATA, ("ready",): Ask.READY, ("config",): Ask.CONFIG, ("stats",): Ask.STATISTICS,
    ("trace", "setting"): Ask.TRACE,
}  # fmt: skip
# What an HTTP call may be made with without changing anything.
_READS = ("GET", "HEAD")


def asks(call: HttpCall | RpcCall) -> Ask:
    """What `call` is for. A spelling that some server might take for a change is taken for it here, too."""
    if isinstance(call, RpcCall):
        method = call.method.rpartition("/")[2]
        return Ask.MEMORY if "SharedMemory" in method else _METHODS.get(method, Ask.OTHER)
    path = call.target.partition("?")[0]
    match [unquote(segment).rstrip("/") for segment in path.split("/") if segment][1:]:
        case []:
            return Ask.SERVER
        case ["models", "stats"]:
            return Ask.STATISTICS
        case ["models", _, "versions", _, *tail] | ["models", _, *tail]:
            return _TAILS.get(tuple(tail), Ask.OTHER)
        case ["repository", *_, "load"]:
            return Ask.LOAD
        case ["repository", *_, "unload"]:
            return Ask.UNLOAD
        case ["repository", *_, "index"]:
            return Ask.INDEX
        case ["trace", "setting"]:
            return Ask.TRACE
        case ["logging"]:
            return Ask.LOGGING
        case [("systemsharedmemory" | "cudasharedmemory"), *_]:
            return Ask.MEMORY
    return Ask.OTHER


def changes(call: HttpCall | RpcCall, ask: Ask, message: bytes) -> bool:
    """Whether `call`, whose kind is `ask`, changes a server; `message` is that of a gRPC call.

    Settings are read and written by the same method: over gRPC those change something that name a setting.
    """
    if ask in (Ask.LOAD, Ask.UNLOAD):
        return True
    if ask not in (Ask.TRACE, Ask.LOGGING):
        return False
    if isinstance(call, HttpCall):
        return call.method not in _READS
    try:
        return any(key >> 3 == _SETTINGS for key, *_ in wire.walk(message))
    except ValueError:  # whatever it is, a server may read it as a change
        return True


_SETTINGS = 1  # the field of TraceSettingRequest and of LogSettingsRequest

"""Several servers' replies to one call about them, as one: a sum, a union, an intersection.

Replies are plain documents here, as KServe v2's JSON has them, and `read` and `write` translate for both protocols.
Statistics add up, per model and version, batch size, memory and response; the last inference is the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from google.protobuf.message import DecodeError, Message

from backends.calls import Ask
from backends.errors import BadReply
from backends.proto import management_pb2 as pb
from backends.proto import wire
from backends.request import RpcCall

Document = Any

# Extensions of KServe v2 that a gateway has no part in, or supports; more as `extensions` says.
_EXTENSIONS = frozenset((
    "classification", "sequence", "schedule_policy", "model_configuration", "binary_tensor_data", "parameters",
    "statistics",
))  # fmt: skip
_OF_CONTROL = frozenset(("model_repository", "model_repository(unload_dependents)", "trace", "logging"))
_OF_MEMORY = frozenset(("system_shared_memory", "cuda_shared_memory"))

_MESSAGES: dict[Ask, type[Message]] = {
    Ask.SERVER: pb.ServerMetadataResponse,
    Ask.READY: pb.ModelReadyResponse,
    Ask.STATISTICS: pb.ModelStatisticsResponse,
    Ask.INDEX: pb.RepositoryIndexResponse,
}


def read(call: object, ask: Ask, body: bytes) -> Document:
    """A reply to `call` as a document. Raises BadReply where it is none."""
    try:
        if isinstance(call, RpcCall):
            document = _plain(_MESSAGES[ask].FromString(body))
            return document.get("models", []) if ask is Ask.INDEX else document
        document = msgspec.json.decode(body)
        if not isinstance(document, list if ask is Ask.INDEX else dict):
            raise ValueError(f"got {type(document).__name__}")
        return document
    except (msgspec.MsgspecError, DecodeError, ValueError, RecursionError) as error:
        raise BadReply(f"{ask.value}: expected a KServe v2 reply: {error}"[:300]) from None


def write(call: object, ask: Ask, document: Document) -> bytes:
    """The reply to `call` that says `document`. Raises BadReply where the protocol cannot say it."""
    if not isinstance(call, RpcCall):
        return msgspec.json.encode(document)
    try:
        fields = {"models": document} if ask is Ask.INDEX else document
        return _MESSAGES[ask](**fields).SerializeToString()
    except (TypeError, ValueError) as error:
        raise BadReply(f"{ask.value}: {error}"[:300]) from None


def _plain(message: Message) -> dict[str, Any]:
    """A protobuf message as the document that its constructor takes."""
    document: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type is None:
            document[field.name] = list(value) if field.is_repeated else value
        elif field.message_type.GetOptions().map_entry:
            document[field.name] = {key: _plain(each) for key, each in value.items()}
        else:
            document[field.name] = [_plain(each) for each in value] if field.is_repeated else _plain(value)
    return document


def canonical(call: object, ask: Ask, body: bytes) -> object:
    """What is equal for replies that say the same: maps have no order, whatever order they were written in."""
    try:
        if not isinstance(call, RpcCall):
            return msgspec.json.decode(body)
        fields = sorted(body[begin:end] for _, begin, _, end in wire.walk(body))
        if ask is not Ask.CONFIG:
            return fields
        return [sorted(config[b:e] for _, b, _, e in wire.walk(config)) for config in map(_value, fields)]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return body


def _value(field: bytes) -> bytes:
    ((_, _, start, end),) = wire.walk(field)
    return field[start:end]


def extensions(*, control: bool, memory: bool) -> frozenset[str]:
    """What the gateway supports: changes of a server, and its shared memory, where the policy lets callers use them."""
    return _EXTENSIONS | (_OF_CONTROL if control else frozenset()) | (_OF_MEMORY if memory else frozenset())


def server(documents: Sequence[Document], supported: frozenset[str]) -> Document:
    """The first server's metadata, with the extensions that all have and that are `supported`, in its order."""
    said = [each.get("extensions", []) for each in documents]
    if not all(isinstance(names, list) for names in said):
        raise BadReply("server metadata: expected a list of extensions")
    if "extensions" not in documents[0]:
        return documents[0]
    common = [name for name in said[0] if name in supported and all(name in names for names in said)]
    return {**documents[0], "extensions": common}


def named(document: Document, name: str) -> Document:
    """Statistics of one model under another name."""
    return {**document, "model_stats": [{**_table(each), "name": name} for each in _list(document, "model_stats")]}


def statistics(documents: Sequence[Document]) -> Document:
    """The sum of several servers' statistics, models in the order in which they are first named."""
    stats = [_list(document, "model_stats") for document in documents]
    try:
        return {**documents[0], "model_stats": _united(stats, ("name", "version"), _added_model)}
    except TypeError as error:  # a number that is text, and the like
        raise BadReply(f"statistics: {error}"[:300]) from None


def _added_model(one: Document, other: Document) -> Document:
    made = _added(one, other)
    if "last_inference" in made:
        made["last_inference"] = max(one.get("last_inference", 0), other.get("last_inference", 0))
    for field, key in (("batch_stats", ("batch_size",)), ("memory_usage", ("type", "id"))):
        if field in one or field in other:
            made[field] = _united([_list(one, field), _list(other, field)], key, _added_but(key))
    if "batch_stats" in made:
        made["batch_stats"].sort(key=lambda batch: batch.get("batch_size", 0))
    return made


def _added_but(key: tuple[str, ...]) -> Callable[[Document, Document], Document]:
    return lambda one, other: {**_added(one, other), **{name: one[name] for name in key if name in one}}


def _added(one: Any, other: Any) -> Any:
    """Numbers added and tables field by field; of anything else the first."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            name: _added(one[name], other[name]) if name in one and name in other else one.get(name, other.get(name))
            for name in dict.fromkeys((*one, *other))
        }
    if isinstance(one, bool) or not isinstance(one, int) or not isinstance(other, int):
        return one
    return one + other


def _united(
    lists: Sequence[list[Document]], key: tuple[str, ...], add: Callable[[Document, Document], Document]
) -> list[Document]:
    united: dict[tuple[Any, ...], Document] = {}
    for entries in lists:
        for entry in map(_table, entries):
            at = tuple(str(entry.get(name, "")) for name in key)
            united[at] = add(united[at], entry) if at in united else entry
    return list(united.values())


def index(documents: Sequence[Document], enough: int) -> Document:
    """The union of several repositories: a model is READY where `enough` servers say so, else as another says.

    A model of a name without a version is one that a server has and has not loaded: told only where no server has.
    """
    entries: dict[tuple[str, str], list[Document]] = {}
    for document in documents:
        for entry in map(_table, document):
            entries.setdefault((str(entry.get("name", "")), str(entry.get("version", ""))), []).append(entry)
    versioned = {name for name, version in entries if version}
    return [_state(said, enough) for (name, version), said in entries.items() if version or name not in versioned]


def _state(said: list[Document], enough: int) -> Document:
    ready = [entry for entry in said if entry.get("state") == "READY"]
    if len(ready) >= enough:
        return ready[0]
    other = next((entry for entry in said if entry.get("state") != "READY"), None)
    if not ready and other is not None:
        return other
    reason = f"ready on {len(ready)} of the {enough} replicas that must be"
    return {**(other or ready[0]), "state": (other or {}).get("state") or "UNAVAILABLE", "reason": reason}


def _list(document: Document, field: str) -> list[Document]:
    entries = document.get(field, [])
    if not isinstance(entries, list):
        raise BadReply(f"{field}: expected a list, got {type(entries).__name__}")
    return entries


def _table(entry: Document) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise BadReply(f"expected a mapping, got {type(entry).__name__}")
    return entry

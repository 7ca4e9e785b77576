"""Writes a policy for the models of a live server: a backend and a route each, with what a reader needs to go on.

Rows of different callers are merged only where that is known to be safe: the model's configuration says that axis 0 is
the row (`max_batch_size` above 1) and that one call has one answer of its own (neither decoupled nor a sequence).
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from gateway.tools.survey import Model, Survey, Tensor
from policies.problem import clip
from policies.spec import Batch

_PLAIN = re.compile(r"(?!(?:true|false|null)$)[A-Za-z_][A-Za-z0-9_./-]*", re.IGNORECASE)
_OWN_PORTS = range(8000, 8004)  # where a policy without `listen` listens
_MAX_ROWS = 65536  # the most that `batch.max_rows` may be
_MAX_SLOTS = 1024


def policy_text(found: Survey) -> str:
    """The policy as YAML with comments; it passes `headrace check`."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Survey) -> Iterator[str]:
    yield f"# Written by `headrace init {found.http}` for {shown(found.server)}; models ready: {len(found.models)}."
    yield "# `headrace check` tells what is wrong with it, `headrace explain` every value in effect, defaults included."
    yield ""
    if taken := _local_ports(found):
        yield f"# By default Headrace listens on 8000 to 8003, but the server is here and has {_and(taken)}."
        yield "listen: {http: 9000, grpc: 9001, metrics: 9002, admin: 9003}"
        yield ""
    yield "# Keys that begin with x- are yours: a place for anchors. More replicas: more such mappings in `endpoints`."
    yield "x-server: &server"
    yield f"  http: {found.http}"
    if found.grpc:
        address = f"'{found.grpc}'" if found.grpc.startswith("[") else found.grpc
        yield f"  grpc: {address}  # it answers; tensors travel over it unless a backend says `protocol: http`"
    else:
        yield "  # grpc: HOST:PORT  # nothing answered there; needed for streams, and lets calls be cancelled"
    yield ""
    yield "backends:"
    models = {model.name: model for model in found.models}
    for model in found.models:
        yield from _backend(model, models)
        yield ""
    yield "# A route is a model's public name: as on the server, so that clients change a host name only."
    yield "# Answers that depend on the inputs alone can be kept, row by row: `cache: {ttl: 1h}` beside `backend`."
    yield "routes:"
    for model in found.models:
        yield f"  {_scalar(model.name)}: {{backend: {_scalar(model.name)}}}"
    if found.skipped:
        yield ""
        yield "# Left out:"
        yield from (f"#   {shown(name)}: {one_line(reason)}" for name, reason in found.skipped)


def _backend(model: Model, models: Mapping[str, Model]) -> Iterator[str]:
    kind = model.metadata.platform or "of unknown platform"
    yield f"  # {shown(model.name)}, {shown(kind)}"
    optional = {tensor.name for tensor in model.config.input if tensor.optional} if model.config else set()
    for way, tensors in (("in ", model.metadata.inputs), ("out", model.metadata.outputs)):
        for tensor in tensors:
            yield f"  #   {way} {tensor_text(tensor)}{' optional' if way == 'in ' and tensor.name in optional else ''}"
    yield f"  {_scalar(model.name)}:"
    yield "    endpoints: [*server]"
    yield f"    model: {_scalar(model.name)}"
    if reason := unmergeable(model, models):
        yield f"    # No batch: {reason}."
    else:
        yield from _batch(model, models)


def _batch(model: Model, models: Mapping[str, Model]) -> Iterator[str]:
    assert model.config is not None
    rows = min(model.config.max_batch_size, _MAX_ROWS)
    keys = [f"max_rows: {rows}"]
    slots, why = model.config.instances, "its instances, each of which runs one batch at a time"
    if model.config.ensemble_scheduling:
        steps = (models[step.model_name].config for step in model.config.ensemble_scheduling.step)
        slots = min((config.instances for config in steps if config), default=0)
        why = "the instances of its narrowest step, each of which runs one batch at a time"
    if slots:
        keys.append(f"slots: {min(slots, _MAX_SLOTS)}")
    if rows > Batch().queue_rows:
        keys.append(f"queue_rows: {rows}")  # a queue holds one full batch
    yield "    # max_rows: its max_batch_size" + (f"; slots: {why}." if slots else ".")
    yield f"    batch: {{{', '.join(keys)}}}"


def unmergeable(model: Model, models: Mapping[str, Model]) -> str:
    """Why rows of different callers must not share a call to the model; empty: they may."""
    config = model.config
    if config is None:
        return "the server does not tell its configuration"
    if config.model_transaction_policy.decoupled:
        return "it is decoupled: a call has any number of answers. No cache either"
    if config.sequence_batching is not None:
        return "it is a sequence model: a call depends on those before it. No cache either"
    if config.max_batch_size <= 1:
        return f"its max_batch_size is {config.max_batch_size}"
    if any(tensor.is_shape_tensor for tensor in config.input):
        return "it has shape tensors, which are not per row"
    if config.ensemble_scheduling:
        for step in config.ensemble_scheduling.step:
            inner = models.get(step.model_name)
            # An ensemble within an ensemble is not looked into: it could name itself.
            if inner is None or not inner.config or inner.config.ensemble_scheduling or unmergeable(inner, models):
                return f"it is an ensemble, and rows cannot be merged in its step {shown(step.model_name)}"
    return ""


def _local_ports(found: Survey) -> list[int]:
    """The ports of a server on this machine that a policy would listen on by default."""
    parts = urlsplit(found.http)
    host = parts.hostname or ""
    if host != "localhost" and not (_is_address(host) and ipaddress.ip_address(host).is_loopback):
        return []
    ports = [parts.port or 0, int(found.grpc.rpartition(":")[2]) if found.grpc else 0]
    return sorted({port for port in ports if port in _OWN_PORTS})


def _and(ports: Sequence[int]) -> str:
    return " and ".join(map(str, ports))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def tensor_text(tensor: Tensor) -> str:
    return f"{shown(tensor.name)} {shown(tensor.datatype)} {tensor.shape}"


def _scalar(text: str) -> str:
    """A name as YAML that reads as text."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def shown(text: str) -> str:
    """What a server says, in a comment or on a terminal: one line whatever it is."""
    short = clip(text)
    return short if short.isascii() and short.isprintable() and short else json.dumps(short)


def one_line(text: str) -> str:
    """Whatever a server says, without what would steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)

"""What a live KServe v2 server says of itself and of its models; asks one for all of them, for `headrace init`.

What comes back is untrusted: it is decoded into the few fields that are needed, and a reply of another form is said so.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from backends.tls import client_context, explained
from policies.schema import A_NAME, NAME
from policies.spec import BackendTls

S = TypeVar("S")

_TIMEOUT_S = 5.0  # these replies are made from memory: a server that takes longer is as good as down
# HTTP/2's preface and empty settings (RFC 9113, 3.4): a server answers with its own settings, a frame of type 4.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4
_TRUSTING_THE_SYSTEM = BackendTls()


class Unusable(Exception):
    """Why no policy can be written for a server, in one line."""


class Tensor(msgspec.Struct, frozen=True):
    """Shapes are with the batch axis, -1 where any length will do."""

    name: str
    datatype: str
    shape: list[int]


class Metadata(msgspec.Struct, frozen=True):
    platform: str = ""
    versions: list[str] = []
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []


class Group(msgspec.Struct, frozen=True):
    kind: str = ""
    count: int = 1
    gpus: list[int] = []
    passive: bool = False


class Input(msgspec.Struct, frozen=True):
    name: str
    optional: bool = False
    is_shape_tensor: bool = False


class Transactions(msgspec.Struct, frozen=True):
    decoupled: bool = False


class Step(msgspec.Struct, frozen=True):
    model_name: str


class Steps(msgspec.Struct, frozen=True):
    step: list[Step] = []


class Config(msgspec.Struct, frozen=True):
    """The parts of Triton's `ModelConfig` that decide how a model may be called."""

    max_batch_size: int = 0
    input: list[Input] = []
    instance_group: list[Group] = []
    model_transaction_policy: Transactions = Transactions()
    sequence_batching: dict[str, Any] | None = None
    ensemble_scheduling: Steps | None = None

    @property
    def kind(self) -> str:
        """What it is, where one call does not have one answer of its own; else empty."""
        if self.model_transaction_policy.decoupled:
            return "decoupled"
        return "a sequence model" if self.sequence_batching is not None else ""

    @property
    def instances(self) -> int:
        """How many executions run at once; a group on GPUs has its count on each of them. 0: unknown."""
        return sum(
            group.count * (max(1, len(group.gpus)) if group.kind == "KIND_GPU" else 1)
            for group in self.instance_group
            if not group.passive
        )


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is ready; without `config` where the server has no such extension."""

    name: str
    metadata: Metadata
    config: Config | None


@dataclass(frozen=True, slots=True)
class Survey:
    """`grpc` is None where nothing answers. `models` is never empty, and each has a name that a policy can have;
    `skipped` are the others, with the reason.
    """

    server: str
    http: str
    grpc: str | None
    models: tuple[Model, ...]
    skipped: tuple[tuple[str, str], ...]


class _Entry(msgspec.Struct, frozen=True):
    name: str
    state: str = ""


class About(msgspec.Struct, frozen=True):
    name: str
    version: str = ""


def survey(http: str, grpc: str | None, said: Callable[[str], None]) -> Survey:
    """What the server at `http` (an URL) has; `grpc` (`host:port` or `grpcs://host:port`) is tried.

    `said` is told of progress. Raises Unusable.
    """
    # A proxy of the environment is for the web; the gateway itself does not use one either.
    verify = client_context(_TRUSTING_THE_SYSTEM, "http/1.1") if http.startswith("https://") else True
    with httpx.Client(base_url=http, timeout=_TIMEOUT_S, trust_env=False, verify=verify) as client:
        try:
            about = decoded(client.get("/v2"), About)
        except Unusable as error:
            raise Unusable(f"{http} is no KServe v2 server: {error}") from None
        except httpx.HTTPError as error:
            raise Unusable(f"nothing answers at {http}: {cause(error)}") from None
        try:
            listed = decoded(client.post("/v2/repository/index", json={}), list[_Entry])
            ready = dict.fromkeys(entry.name for entry in listed if entry.state == "READY")
            if not ready:
                others = len({entry.name for entry in listed})
                more = f"; {others} are in its repository and not loaded" if others else ""
                raise Unusable(f"{http} has no model that is ready{more}")
            models, skipped = list[Model](), list[tuple[str, str]]()
            for number, name in enumerate(ready, 1):
                said(f"asking about model {number} of {len(ready)}")
                try:
                    models.append(_model(client, name))
                except Unusable as error:
                    skipped.append((name, str(error)))
            if not models:
                raise Unusable(f"{http} has no model that can be a route: {skipped[0][0]!r}: {skipped[0][1]}")
        except Unusable as error:
            raise Unusable(str(error) if str(error).startswith(http) else f"{http} lists no models: {error}") from None
        except httpx.HTTPError as error:
            raise Unusable(f"{http} stopped answering: {cause(error)}") from None
    said("trying gRPC")
    answers = grpc if grpc and speaks_http2(grpc) else None
    return Survey(f"{about.name} {about.version}".strip(), http, answers, tuple(models), tuple(skipped))


def speaks_http2(target: str, timeout: float = _TIMEOUT_S, tls: BackendTls = _TRUSTING_THE_SYSTEM) -> bool:
    """Whether the server at `host:port`, or `grpcs://host:port`, answers as gRPC's transport does, in `timeout` s."""
    host, _, port = target.removeprefix("grpcs://").rpartition(":")
    host = host.strip("[]")
    try:
        with ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=timeout))
            if target.startswith("grpcs://"):
                name = tls.server_name or host
                context = client_context(tls, "h2")
                connection = stack.enter_context(context.wrap_socket(connection, server_hostname=name))
            connection.sendall(_PREFACE)
            head = b""
            while len(head) < 9 and (more := connection.recv(9 - len(head))):
                head += more
            return len(head) == 9 and head[3] == _SETTINGS
    except OSError:
        return False


def _model(client: httpx.Client, name: str) -> Model:
    if not NAME.fullmatch(name):
        raise Unusable(f"its name is not {A_NAME}")
    path = f"/v2/models/{quote(name, safe='')}"
    metadata = decoded(client.get(path), Metadata)
    answer = client.get(f"{path}/config")
    missing = answer.status_code in (404, 405, 501)  # an extension of Triton's
    return Model(name, metadata, None if missing else decoded(answer, Config))


def decoded(response: httpx.Response, kind: type[S]) -> S:
    """What a reply says. Raises Unusable."""
    asked = f"{response.request.method} {response.request.url.path}"
    if response.status_code != 200:
        raise Unusable(f"{asked} answered {response.status_code}")
    try:
        return msgspec.json.decode(response.content, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unusable(f"{asked} answered something else: {' '.join(str(error).split())}") from None


def cause(error: httpx.HTTPError) -> str:
    """Why nothing came, in one line."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, ssl.SSLError):
        inner = inner.__cause__ or inner.__context__
    if inner is not None:
        return explained(inner)
    return " ".join(str(error).split()) or type(error).__name__

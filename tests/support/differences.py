"""Where an answer through the gateway differs from Triton's own (2.51) by intent: few, and each for a reason.

Each is an infer call: over HTTP for `model`, with `body` as JSON; over gRPC for `told`, with `parameters`. The tests
send it both ways and hold both answers to what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_INPUT: dict[str, Any] = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [1]}


@dataclass(frozen=True)
class Difference:
    """`triton` and `ours` are HTTP statuses. `over` names the backend protocols where it is so."""

    what: str
    why: str
    triton: int
    ours: int
    body: Mapping[str, Any]
    over: tuple[str, ...] = ("http", "grpc")
    model: str = "told"

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class RpcDifference:
    """`triton` and `ours` are gRPC code numbers; `parameters` are a call's: name to `(field, value)`."""

    what: str
    why: str
    triton: int
    ours: int
    parameters: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    over: tuple[str, ...] = ("http", "grpc")

    def __str__(self) -> str:
        return self.what


_BLAME = "who sent what cannot be read is told so by a 4xx; Triton blames itself"

DIFFERENCES = (
    Difference("an id that is no text", _BLAME, 500, 400, {"inputs": [_INPUT], "id": 5}),
    Difference("a negative priority", _BLAME, 500, 400, {"inputs": [_INPUT], "parameters": {"priority": -1}}),
    Difference(
        "binary_data_output that is no bool", _BLAME, 500, 400,
        {"inputs": [_INPUT], "parameters": {"binary_data_output": 1}},
    ),
    Difference(
        "an input's parameter that is a list",
        "KServe v2 knows bools, numbers and texts; Triton does not look at it, and gRPC has no form for it",
        200, 400, {"inputs": [{**_INPUT, "parameters": {"x": [1]}}]},
    ),
    Difference(
        "a model's error of unknown kind, from a gRPC backend",
        "UNKNOWN is also what gRPC says of a server that broke, which is not the caller's fault",
        400, 500, {"inputs": [{"name": "CODE", "datatype": "BYTES", "shape": [1], "data": ["UNKNOWN"]}]},
        over=("grpc",), model="fails",
    ),
)  # fmt: skip

RPC_DIFFERENCES = (
    RpcDifference(
        "a uint64 parameter",
        "as JSON it is a number like any other, which Triton takes over HTTP only",
        3, 0, {"u": ("uint64_param", 2**64 - 1)}, over=("http",),
    ),
    RpcDifference(
        "a negative timeout",
        "a time below zero is a mistake that the caller should hear of; Triton takes it for half a million years",
        0, 3, {"timeout": ("int64_param", -1)},
    ),
)  # fmt: skip

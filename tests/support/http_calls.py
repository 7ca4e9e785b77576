"""HTTP calls that a Triton with `echo` and `rowsum` answers, in every form, and how one is written as bytes."""

from __future__ import annotations

import gzip
import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Edit = Callable[[bytes], bytes]
DATATYPES = ("FP32", "INT64", "BYTES", "BOOL", "FP16", "UINT8")


@dataclass
class HttpCall:
    """One call, until it is written: a JSON document, binary tensors behind it, and what is done to the bytes."""

    seed: int
    document: dict[str, Any]
    tail: list[bytes] = field(default_factory=list)
    method: str = "POST"
    target: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)  # of the JSON text
    body_edits: list[Edit] = field(default_factory=list)  # of all of the body
    faults: tuple[str, ...] = ()
    kills: bool = False

    @property
    def inputs(self) -> list[dict[str, Any]]:
        return self.document["inputs"]  # type: ignore[no-any-return]

    def parts(self) -> tuple[dict[str, str], bytes]:
        """Headers and body."""
        text = json.dumps(self.document).encode()
        for edit in self.edits:
            text = edit(text)
        headers = {"Inference-Header-Content-Length": str(len(text))} if self.tail else {}
        body = text + b"".join(self.tail)
        for edit in self.body_edits:
            body = edit(body)
        return headers | self.headers, body

    def raw(self) -> bytes:
        headers, body = self.parts()
        lines = [f"{self.method} {self.target} HTTP/1.1", "Host: h", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode("latin-1") + body

    def __str__(self) -> str:
        raw = self.raw()
        shown = repr(raw) if len(raw) < 2000 else f"{raw[:1500]!r}... ({len(raw)} bytes)"
        return f"seed {self.seed}, faults {list(self.faults)}: {shown}"


def values(chance: random.Random, datatype: str, count: int) -> list[Any]:
    kinds: dict[str, Callable[[], Any]] = {
        "FP32": lambda: chance.choice([0.0, -0.0, 1.5, 1e30, -3.25, float("nan"), float("inf"), 7]),
        "INT64": lambda: chance.choice([0, -1, 2**63 - 1, -(2**63), 42]),
        "BYTES": lambda: chance.choice(["", "a", "größe", "\0", "x" * 300, '"\\\n']),
        "BOOL": lambda: chance.random() < 0.5,
        "UINT8": lambda: chance.choice([0, 255, 7, 300]),  # 300 wraps
        "FP16": lambda: chance.choice([0.0, 1.5, -2.0]),
    }
    return [kinds[datatype]() for _ in range(count)]


def packed(datatype: str, values: list[Any]) -> bytes:
    """Values as a tensor's bytes."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in values)
    if datatype == "UINT8":
        return bytes(value & 0xFF for value in values)
    return np.array(values, {"FP32": "<f4", "INT64": "<i8", "BOOL": "?", "FP16": "<f2"}[datatype]).tobytes()


def sound(seed: int, chance: random.Random) -> HttpCall:
    """A call that the model answers."""
    model = chance.choice(["echo", "echo", "echo", "rowsum"])
    call = HttpCall(seed, {"inputs": []}, target=f"/v2/models/{model}{chance.choice(['', '/versions/1'])}/infer")
    rows = chance.randint(1, 3)
    columns = chance.randint(0, 3) if model == "echo" else 16
    kinds = chance.sample(DATATYPES, chance.randint(1, 3)) if model == "echo" else ["FP32"]
    every_binary = chance.random() < 0.2
    for datatype in kinds:
        given = values(chance, datatype, rows * columns)
        entry: dict[str, Any] = {
            "name": f"IN_{datatype}" if model == "echo" else "X", "datatype": datatype, "shape": [rows, columns],
        }  # fmt: skip
        if every_binary or datatype == "FP16" or chance.random() < 0.3:
            data = packed(datatype, given)
            entry["parameters"] = {"binary_data_size": len(data)}
            call.tail.append(data)
        else:
            nested = [given[i * columns : (i + 1) * columns] for i in range(rows)]
            entry["data"] = chance.choice([given, nested])
        call.inputs.append(entry)
    document = call.document
    if chance.random() < 0.3:
        document["id"] = chance.choice(["1", "größe", "a" * 200])
    if chance.random() < 0.3 or "FP16" in kinds:  # Triton has no JSON for FP16
        document["parameters"] = {"binary_data_output": "FP16" in kinds or chance.random() < 0.5}
    if chance.random() < 0.2:
        document.setdefault("parameters", {}).update(
            chance.choice([{"priority": 1}, {"a": 1.5}, {"b": True, "c": "d"}])
        )
    if chance.random() < 0.2:
        binary = {"parameters": {"binary_data": True}} if "FP16" in kinds else {}
        document["outputs"] = [{"name": output(entry["name"]), **binary} for entry in call.inputs]
    if chance.random() < 0.15:
        encoding, encode = chance.choice([("gzip", gzip.compress), ("deflate", zlib.compress)])
        call.headers["Content-Encoding"] = encoding
        call.body_edits.append(encode)
    return call


def output(name: str) -> str:
    return "Y" if name == "X" else name.replace("IN_", "OUT_")

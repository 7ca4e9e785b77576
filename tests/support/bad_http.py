"""What can be wrong with an HTTP call, each fault by its name, for the differential fuzz.

    call = made(seed)          # the same call for the same seed
    call.raw()                 # its bytes

A fault is a function that spoils a sound call; its name is how `differences_of_bad_input` speaks of it. What `kills` is
sent to gateways only. Tried on a Triton 2.51 of its own, one by one:

- JSON nested 200,000 levels deep ends the server, be it infer, generate, index, load, logging, trace settings or the
  registration of shared memory, and wherever in the document it stands; 10,000 levels do not.
- JSON data for a shape of far more elements ends it (FP32 [2^30, 16] with 16 values, [2^63 - 1] with none), or leaves
  it without memory. Binary and gRPC tensors of other sizes than their shapes are refused.
- A shape whose product is 0 modulo 2^64 (FP32 [1, 2^62] without bytes), over either protocol, ends the stub of a Python
  model, which then fails every call while the server says that it is ready.
- `classification` of a BYTES output ends it, over HTTP, gRPC and gRPC streams; of an empty output, over HTTP.
- 100,000 parameters, inputs, or keys of a generate keep a thread busy for more than 10 s, 10,000 for nearly one.
- A bomb of 300 MB in gzip is inflated, within 2.7 s.
"""

from __future__ import annotations

import gzip
import random
from functools import cache
from typing import Any

from tests.support.faults import Faults
from tests.support.http_calls import Edit, HttpCall, output, sound

FAULTS = Faults(sound, killing=(
    "shape_larger_than_the_data", "shape_whose_product_overflows", "nested_deeply", "bomb", "classification_of_text",
    "classification_of_nothing",
))  # fmt: skip
made, fault = FAULTS.made, FAULTS.fault


def _in_first(name: str, key: str, *values: Any) -> None:
    """A fault that gives the first input (or what is left of it) another value of `key`; `...` deletes it."""

    def spoil(call: HttpCall, chance: random.Random) -> None:
        value = chance.choice(values)
        inputs = call.document.get("inputs")
        if isinstance(inputs, list) and inputs and isinstance(inputs[0], dict):
            inputs[0].pop(key, None)
            if value is not ...:
                inputs[0][key] = value

    FAULTS.add(name, spoil)


def _in_root(name: str, key: str, *values: Any) -> None:
    def spoil(call: HttpCall, chance: random.Random) -> None:
        value = chance.choice(values)
        call.document.pop(key, None)
        if value is not ...:
            call.document[key] = value

    FAULTS.add(name, spoil)


def _parameter(name: str, key: str, *values: Any) -> None:
    def spoil(call: HttpCall, chance: random.Random) -> None:
        given = call.document.get("parameters")
        call.document["parameters"] = (given if isinstance(given, dict) else {}) | {key: chance.choice(values)}

    FAULTS.add(name, spoil)


def _of_output(name: str, key: str, *values: Any) -> None:
    def spoil(call: HttpCall, chance: random.Random) -> None:
        call.document["outputs"] = [{"name": output(_name(call)), "parameters": {key: chance.choice(values)}}]

    FAULTS.add(name, spoil)


def _text(name: str, *edits: Edit) -> None:
    def spoil(call: HttpCall, chance: random.Random) -> None:
        call.edits.append(chance.choice(edits))

    FAULTS.add(name, spoil)


def _header(name: str, key: str, *values: str) -> None:
    def spoil(call: HttpCall, chance: random.Random) -> None:
        call.headers[key] = chance.choice(values)

    FAULTS.add(name, spoil)


def _target(name: str, *targets: str, method: str = "POST") -> None:
    def spoil(call: HttpCall, chance: random.Random) -> None:
        call.target, call.method = chance.choice(targets), method

    FAULTS.add(name, spoil)


def _name(call: HttpCall) -> str:
    inputs = call.document.get("inputs")
    first = inputs[0] if isinstance(inputs, list) and inputs else {}
    return str(first.get("name", "X")) if isinstance(first, dict) else "X"


_in_first("shape_negative", "shape", [-1, 16], [1, -3], [-1, -1])
_in_first("shape_no_integers", "shape", [1.0, 1], ["1", "1"], [True, 1], [None], [[1]])
_in_first("shape_no_array", "shape", None, 1, "1", {}, ...)
_in_first("shape_beyond_64_bits", "shape", [2**64, 1], [1, 10**30])
_in_first("shape_of_another_rank", "shape", [], [1], [1, 1, 1, 1])
_in_first("shape_of_rank_17", "shape", [1] * 17, [1] * 1000)
_in_first("shape_larger_than_the_data", "shape", [2**30, 16], [2**40, 1], [1, 2**34])
_in_first("shape_whose_product_overflows", "shape", [1, 2**62], [2**63 - 1, 1], [2**32, 2**32])
_in_first("datatype_unknown", "datatype", "FP33", "", "fp32", "FP32 ", "BYTES\0")
_in_first("datatype_of_another_input", "datatype", "INT32", "UINT16", "FP64", "BF16")
_in_first("datatype_no_text", "datatype", 1, None, [], ...)
_in_first("name_unknown", "name", "Q", "IN_", "x" * 1000, "x" * 100_000)
_in_first("name_empty", "name", "")
_in_first("name_no_text", "name", 1, None, {}, ...)
_in_first("data_no_array", "data", None, "x", 1, {}, True)
_in_first("data_of_other_types", "data", [{}], [None, None], [[], {}], [[["a", 1]]])
_in_first("data_empty", "data", [], [[], []])
_in_first("input_parameters_no_object", "parameters", None, [], 1)
_in_first("input_parameter_no_value", "parameters", {"a": None}, {"a": {}}, {"a": [1]})
_in_first("binary_size_no_number", "parameters", {"binary_data_size": -1}, {"binary_data_size": "4"})
_in_first("binary_size_beyond", "parameters", {"binary_data_size": 2**40}, {"binary_data_size": 2**64 - 1})
_in_root("inputs_no_array", "inputs", None, 1, {}, "x", ...)
_in_root("inputs_of_no_objects", "inputs", [1], [None], [[]], ["a"])
_in_root("inputs_empty", "inputs", [])
_in_root("outputs_no_array", "outputs", None, 1, "x", {})
_in_root("outputs_of_no_names", "outputs", [1], [{}], [{"name": 1}], [None])
_in_root("outputs_unknown", "outputs", [{"name": "Q"}], [{"name": ""}], [{"name": "q" * 100_000}])
_in_root("outputs_empty", "outputs", [])
_in_root("id_no_text", "id", 1, None, [], True)
_in_root("parameters_no_object", "parameters", None, 1, [], "x")
_in_root("unknown_key", "more", 1, None, {"a": [1, {}]}, "x" * 10_000)
_parameter("parameter_no_value", "a", None, {}, [1])
_parameter("parameter_giant", "a", 2**64, -(2**63) - 1, 10**40)
_parameter("parameter_reserved_by_triton", "triton_x", 1, True)
_parameter("priority_wrong", "priority", "1", -1, 1.5, True, 2**64)
_parameter("timeout_wrong", "timeout", "1", -1, 1.5, False)
_parameter("sequence_wrong", "sequence_id", True, -1, 1.5, 2**64)
_parameter("sequence_flag_wrong", "sequence_start", 1, "true", 0.0)
_parameter("binary_data_output_wrong", "binary_data_output", "x", 1, 2.5)
_of_output("binary_data_wrong", "binary_data", "x", 1)
_of_output("classification_wrong", "classification", -1, "x", 1.5, True)
_of_output("output_parameter_no_value", "a", None, {}, [1])
_text("json_cut", lambda text: text[: len(text) // 2], lambda text: text[:-1], lambda _: b"{", lambda text: text[:1])
_text("json_trailing", lambda text: text + b"x", lambda text: text + text, lambda text: text + b",")
_text("json_of_another_kind", lambda _: b"[]", lambda _: b"1", lambda _: b'"x"', lambda _: b"null", lambda _: b"{}")
_text("json_comma", lambda text: text[:-1] + b",}", lambda text: text.replace(b", ", b",, ", 1))
_text("json_comment", lambda text: text[:-1] + b"/**/}", lambda text: b"//\n" + text)
_text("json_number_malformed", lambda text: text[:-1] + b', "n": 01}', lambda text: text[:-1] + b', "n": 1e999}')
_text("json_bad_literal", lambda text: text[:-1] + b', "n": nan}', lambda text: text[:-1] + b', "n": tru}')
_text("json_in_utf16", lambda text: text.decode().encode("utf-16"))
_text("json_byte_order_mark", lambda text: b"\xef\xbb\xbf" + text)
_text("json_nul_behind", lambda text: text + b"\0", lambda text: text + b"\0x")
_text("json_inf", lambda text: text[:-1] + b', "n": Inf}')
_text("json_lone_surrogate", lambda text: text[:-1] + b', "id": "\\ud800"}')
_text("json_control_character", lambda text: text[:-1] + b', "n": "\x01"}')
_text("json_no_utf8", lambda text: text[:-1] + b', "id": "\xff\xfe"}')
_text("key_twice", lambda text: b'{"inputs": [], ' + text[1:], lambda text: text[:-1] + b', "more": 1, "more": 2}')
_header("header_length_no_number", "Inference-Header-Content-Length", "-1", "1e1")
_header("header_length_beyond", "Inference-Header-Content-Length", "999999999", "9" * 30)
_header("header_length_short", "Inference-Header-Content-Length", "1", "9")
_header("encoding_unknown", "Content-Encoding", "br", "gzip, gzip", "snappy")
_target("model_unknown", f"/v2/models/{'n' * 2000}/infer", "/v2/models/nope/infer", "/v2/models/nope/versions/1/infer")
_target("version_unknown", "/v2/models/rowsum/versions/9/infer")
_target("version_no_number", "/v2/models/rowsum/versions/x/infer", "/v2/models/rowsum/versions/-1/infer")
_target("version_giant", "/v2/models/rowsum/versions/99999999999999999999/infer")
_target("path_unknown", "/v2/nope", "/v2/models/rowsum/nope", "/nope", "/v2/models")
_target("path_no_utf8", "/v2/models/%ff%fe/infer")
_target("method_wrong", "/v2/models/rowsum/infer", method="PUT")
_target("method_wrong_for_health", "/v2/health/live", "/v2/health/ready", method="POST")
_target("relayed_index", "/v2/repository/index")
_target("relayed_generate", "/v2/models/rowsum/generate", "/v2/models/nope/generate")


@fault
def input_twice(call: HttpCall, chance: random.Random) -> None:
    call.document["inputs"] = [*_list(call), *_list(call)[:1]]
    call.tail += call.tail[:1] if _list(call) and "data" not in _list(call)[0] else []


@fault
def input_too_many(call: HttpCall, chance: random.Random) -> None:
    more = {"name": "Z", "datatype": "FP32", "shape": [1], "data": [1]}
    call.document["inputs"] = [*_list(call), more]


@fault
def output_twice(call: HttpCall, chance: random.Random) -> None:
    call.document["outputs"] = [{"name": output(_name(call))}] * 2


@fault
def data_one_fewer_or_more(call: HttpCall, chance: random.Random) -> None:
    call.document["inputs"] = [
        {"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1] * chance.choice([15, 17])}
    ]
    call.tail, call.target = [], "/v2/models/rowsum/infer"


@fault
def data_giant(call: HttpCall, chance: random.Random) -> None:
    wrong = chance.choice([("INT64", 2**63), ("INT64", 10**400), ("UINT8", -1), ("UINT8", 2**64), ("INT64", 1.0)])
    call.document["inputs"] = [{"name": f"IN_{wrong[0]}", "datatype": wrong[0], "shape": [1, 1], "data": [wrong[1]]}]
    call.tail, call.target = [], "/v2/models/echo/infer"


@fault
def data_of_half_precision(call: HttpCall, chance: random.Random) -> None:
    call.document["inputs"] = [{"name": "IN_FP16", "datatype": "FP16", "shape": [1, 1], "data": [1.5]}]
    call.tail, call.target = [], "/v2/models/echo/infer"


@fault
def data_and_binary_size(call: HttpCall, chance: random.Random) -> None:
    first = {
        "name": "X",
        "datatype": "FP32",
        "shape": [1, 16],
        "data": [1] * 16,
        "parameters": {"binary_data_size": 64},
    }
    call.document["inputs"] = [first]
    call.tail, call.target = [bytes(64)], "/v2/models/rowsum/infer"


@fault
def bytes_lengths_that_lie(call: HttpCall, chance: random.Random) -> None:
    data = chance.choice([b"\xff\xff\xff\xffa", b"\2\0\0\0a", b"\1\0", b"\0\0\0\0" * 3, b"\1\0\0\0a" * 2, b""])
    first = {"name": "IN_BYTES", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(data)}}
    call.document["inputs"] = [first]
    call.tail, call.target = [data, b""], "/v2/models/echo/infer"


@fault
def binary_cut_or_longer(call: HttpCall, chance: random.Random) -> None:
    call.document["inputs"] = [
        {"name": "X", "datatype": "FP32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}
    ]
    call.tail, call.target = [bytes(chance.choice([0, 63, 65, 128]))], "/v2/models/rowsum/infer"


@fault
def raw_of_another_size(call: HttpCall, chance: random.Random) -> None:
    size = chance.choice([0, 1, 63, 64, 65])
    call.body_edits, call.target = [lambda _: bytes(size)], "/v2/models/rowsum/infer"
    call.headers = {"Inference-Header-Content-Length": "0"}


@fault
def body_empty(call: HttpCall, chance: random.Random) -> None:
    call.body_edits, call.headers, call.tail = [lambda _: b""], {}, []
    call.target = "/v2/models/rowsum/infer"


@fault
def compressed_badly(call: HttpCall, chance: random.Random) -> None:
    spoil = chance.choice([lambda b: b[:-9], lambda b: b + b"x", lambda b: b"x" + b, lambda _: b"\x1f\x8b"])
    call.headers["Content-Encoding"] = "gzip"
    call.body_edits = [gzip.compress, spoil]


@fault
def compressed_not_at_all(call: HttpCall, chance: random.Random) -> None:
    call.headers["Content-Encoding"] = chance.choice(["gzip", "deflate"])
    call.body_edits = []


@fault
def nested_deeply(call: HttpCall, chance: random.Random) -> None:
    levels = chance.choice([100_000, 200_000])
    begin, end = chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
    where = chance.choice([b"n", b"parameters", b"id"])
    call.edits.append(lambda text: b'%b, "%b": %b1%b}' % (text[:-1], where, begin * levels, end * levels))
    call.body_edits, call.headers = [], {}
    if chance.random() < 0.3:
        call.target = chance.choice(["/v2/repository/index", "/v2/logging", "/v2/models/rowsum/generate"])


@fault
def very_many(call: HttpCall, chance: random.Random) -> None:
    """Of what costs Triton time by the square."""
    key = chance.choice(["inputs", "outputs", "parameters", "input parameters"])
    entries = [{"name": f"n{i}", "datatype": "FP32", "shape": [1], "data": [1]} for i in range(2000)]
    if key == "input parameters":
        call.document["inputs"] = [{**entries[0], "parameters": {entry["name"]: 1 for entry in entries}}]
    elif key == "parameters":
        call.document[key] = {entry["name"]: 1 for entry in entries}
    else:
        call.document[key] = entries
    call.tail = []


@fault
def bomb(call: HttpCall, chance: random.Random) -> None:
    filler = chance.choice([b" ", b"["])
    call.headers = {"Content-Encoding": "gzip"}
    call.body_edits = [lambda _: _bomb(filler)]


@fault
def classification_of_text(call: HttpCall, chance: random.Random) -> None:
    call.document = {
        "inputs": [{"name": "IN_BYTES", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}],
        "outputs": [{"name": "OUT_BYTES", "parameters": {"classification": 1}}],
    }
    call.tail, call.target = [], "/v2/models/echo/infer"


@fault
def classification_of_nothing(call: HttpCall, chance: random.Random) -> None:
    call.document = {
        "inputs": [{"name": "IN_FP32", "datatype": "FP32", "shape": [1, 0], "data": []}],
        "outputs": [{"name": "OUT_FP32", "parameters": {"classification": 1}}],
    }
    call.tail, call.target = [], "/v2/models/echo/infer"


@cache
def _bomb(filler: bytes) -> bytes:
    return gzip.compress(filler * 80_000_000)


def _list(call: HttpCall) -> list[Any]:
    inputs = call.document.get("inputs")
    return inputs if isinstance(inputs, list) else []

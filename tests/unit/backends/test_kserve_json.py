import json
import math
import struct
from typing import Any

import pytest

from backends.errors import BadRequest
from backends.kserve_json import read_reply, read_request, write_reply, write_request
from backends.request import Answer, Infer, Tensors, Wanted
from backends.tensor import ITEM_BYTES, Tensor, join_elements
from tests.support.strategies import DTYPES, plains

NAN, INF = math.nan, math.inf


def body(datatype: str = "FP32", shape: Any = (1,), data: Any = (1,), **fields: Any) -> bytes:
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "data": data}
    return json.dumps({"inputs": [tensor], **fields}).encode()


def with_data(datatype: str, shape: list[int], text: str | bytes, extra: bytes = b"") -> bytes:
    """A body whose data is exactly this text."""
    raw = text if isinstance(text, bytes) else text.encode()
    head = f'{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":{shape},"data":'.encode()
    return head + raw + b"}]" + extra + b"}"


def binary(datatype: str, shape: list[int], data: bytes, **changed: Any) -> tuple[bytes, int]:
    parameters = {"binary_data_size": len(data), **changed}
    document = {"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "parameters": parameters}]}
    head = json.dumps(document).encode()
    return head + data, len(head)


def refused(data: bytes, header_length: int | None = None) -> str:
    """The message of the BadRequest that this body, or decoding it, is answered with."""
    with pytest.raises(BadRequest) as caught:
        read_request(data, header_length).inputs.decoded  # noqa: B018
    message = caught.value.message
    assert message.isprintable()
    assert len(message) < 400
    return message


def decoded(data: bytes, header_length: int | None = None) -> bytes:
    (tensor,) = read_request(data, header_length).inputs.decoded
    return bytes(tensor.data)


# Every datatype both ways

MATRIX: list[tuple[str, list[Any], bytes]] = [
    ("BOOL", [True, False], b"\1\0"),
    ("UINT8", [0, 255], b"\0\xff"),
    ("UINT16", [0, 65535], b"\0\0\xff\xff"),
    ("UINT32", [1, 2**32 - 1], b"\1\0\0\0\xff\xff\xff\xff"),
    ("UINT64", [2**53 + 1, 2**64 - 1], struct.pack("<QQ", 2**53 + 1, 2**64 - 1)),
    ("INT8", [-128, 127], b"\x80\x7f"),
    ("INT16", [-(2**15), 2**15 - 1], b"\0\x80\xff\x7f"),
    ("INT32", [-(2**31), 2**31 - 1], struct.pack("<ii", -(2**31), 2**31 - 1)),
    ("INT64", [-(2**63), 2**63 - 1], struct.pack("<qq", -(2**63), 2**63 - 1)),
    ("FP32", [0.1, -3.5], struct.pack("<ff", 0.1, -3.5)),
    ("FP64", [0.1, 5e-324], struct.pack("<dd", 0.1, 5e-324)),
    ("BYTES", ["", "a\0é\u2028😀"], join_elements([b"", "a\0é\u2028😀".encode()])),
]


@pytest.mark.parametrize(("datatype", "values", "data"), MATRIX)
def test_a_request_in_every_form(datatype: str, values: list[Any], data: bytes) -> None:
    assert decoded(body(datatype, [2], values)) == data
    assert decoded(body(datatype, [2, 1], [[v] for v in values])) == data
    assert decoded(body(datatype, [1, 2], [values])) == data
    assert decoded(body(datatype, [1, 2], values)) == data
    assert decoded(*binary(datatype, [2], data)) == data


@pytest.mark.parametrize(("datatype", "values", "data"), MATRIX)
def test_a_reply_in_both_forms(datatype: str, values: list[Any], data: bytes) -> None:
    answer = Answer(Tensors.of((Tensor("y", datatype, (2, 1), data),)), "m", "7")
    length, parts = write_reply(answer, Infer(Tensors.of(())), "public")
    assert length is None
    (output,) = json.loads(b"".join(parts))["outputs"]
    assert output["shape"] == [2, 1]
    if datatype == "FP32":
        assert struct.pack("<ff", *output["data"]) == data
    else:
        assert output["data"] == values
    assert plains(read_reply(b"".join(parts), None)) == plains(answer)
    asked = Infer(Tensors.of(()), parameters={"binary_data_output": True})
    length, parts = write_reply(answer, asked, "public")
    assert length is not None
    assert b"".join(parts)[length:] == data
    assert plains(read_reply(b"".join(parts), length)) == plains(answer)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_are_binary_only(datatype: str) -> None:
    data = b"\x00\x3c\xff\x7f"
    assert decoded(*binary(datatype, [2], data)) == data
    assert f"receiving {datatype} data via JSON is not supported" in refused(body(datatype, [1], [1.0]))
    assert decoded(body(datatype, [1, 0], [])) == b""
    answer = Answer(Tensors.of((Tensor("y", datatype, (2,), data),)))
    with pytest.raises(BadRequest, match=f"sending {datatype} data via JSON is not supported"):
        write_reply(answer, Infer(Tensors.of(())), "m")
    asked = Infer(Tensors.of(()), outputs=(Wanted("y", {"binary_data": True}),))
    _, parts = write_reply(answer, asked, "m")
    assert parts[1] == data


@pytest.mark.parametrize(("datatype", "code"), [("FP32", "f"), ("FP64", "d")])
def test_nan_and_infinity_pass_in_json_both_ways(datatype: str, code: str) -> None:
    data = struct.pack(f"<4{code}", NAN, INF, -INF, 1.5)
    assert decoded(with_data(datatype, [4], "[NaN, Infinity, -Infinity, 1.5]")) == data
    assert decoded(with_data(datatype, [2, 2], "[[NaN, Infinity], [-Infinity, 1.5]]")) == data
    answer = Answer(Tensors.of((Tensor("y", datatype, (4,), data),)), "m", "1")
    _, (text,) = write_reply(answer, Infer(Tensors.of(())), "m")
    assert b"[NaN,Infinity,-Infinity,1.5]" in bytes(text)
    assert plains(read_reply(bytes(text), None)) == plains(answer)


def test_large_finite_numbers_are_not_infinite() -> None:
    data = struct.pack("<dd", 1.7e308, 1.7e308)
    _, (text,) = write_reply(Answer(Tensors.of((Tensor("y", "FP64", (2,), data),))), Infer(Tensors.of(())), "m")
    assert json.loads(bytes(text))["outputs"][0]["data"] == [1.7e308, 1.7e308]


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_nan_stands_for_a_float_only(value: str) -> None:
    for datatype in ("INT32", "BOOL", "BYTES"):
        refused(with_data(datatype, [1], f"[{value}]"))
    assert decoded(body("BYTES", [2], ["NaN", "-Infinity"])) == join_elements([b"NaN", b"-Infinity"])


def test_beyond_single_precision_is_infinite() -> None:
    assert decoded(body("FP32", [2], [1e300, -1e300])) == struct.pack("<ff", INF, -INF)


@pytest.mark.parametrize("datatype", [d for d in DTYPES if "INT" in d])
def test_integers_out_of_range_wrap(datatype: str) -> None:
    bits = 8 * ITEM_BYTES[datatype]
    top = 2**bits
    low, high = (0, 2**64) if datatype.startswith("U") else (-(2**63), 2**63)
    values = [-1, top - 1, top, top + 1, -top, top // 2, -top // 2, -top // 2 - 1]
    values = [value for value in values if low <= value < high]
    packed = b"".join((v % top).to_bytes(bits // 8, "little") for v in values)
    assert decoded(body(datatype, [len(values)], values)) == packed
    for beyond in (high, low - 1, 10**400):
        assert f"expected integers from {low}" in refused(with_data(datatype, [1], str([beyond])))


def test_reserved_parameters_are_what_they_must_be() -> None:
    good = [
        ("timeout", 5),
        ("priority", 0),
        ("sequence_id", "a"),
        ("sequence_id", 7),
        ("sequence_end", True),
        ("mine", -3),
    ]
    for name, value in good:
        read_request(body("FP32", [1], [1], parameters={name: value}), None)
    bad = [("timeout", -1), ("timeout", True), ("timeout", 10**400), ("priority", "high"), ("sequence_id", 1.5)]
    bad += [("sequence_start", 1), ("binary_data_output", "yes"), ("mine", 2**64)]
    for name, value in bad:
        assert name in refused(body("FP32", [1], [1], parameters={name: value}))


def test_data_too_short_for_its_shape_is_refused_unread() -> None:
    for shape in ([2**31, 16], [2**28, 16], [3]):
        with pytest.raises(BadRequest, match="too short"):
            read_request(with_data("FP32", shape, "[1.0]"), None)
    read_request(with_data("INT8", [5], "[1,2,3,4,5]"), None)


def test_bytes_of_a_megabyte() -> None:
    text = "é\0" * 2**19
    assert decoded(body("BYTES", [1], [text])) == join_elements([text.encode()])


def test_bytes_that_are_not_utf8_stand_in_json_as_they_are() -> None:
    elements = [b'\xff\x00"\\\n', b"", "é".encode(), b"\xed\xa0\x80"]
    answer = Answer(Tensors.of((Tensor("y", "BYTES", (4,), join_elements(elements)),)))
    _, (text,) = write_reply(answer, Infer(Tensors.of(())), "m")
    loaded = json.loads(bytes(text).decode(errors="surrogateescape"))
    assert [t.encode(errors="surrogateescape") for t in loaded["outputs"][0]["data"]] == elements


@pytest.mark.parametrize("shape", [[0], [0, 3], [3, 0], [2, 0, 2]])
@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL", "BYTES"])
def test_tensors_without_elements(datatype: str, shape: list[int]) -> None:
    assert decoded(body(datatype, shape, [])) == b""
    assert decoded(*binary(datatype, shape, b"")) == b""
    answer = Answer(Tensors.of((Tensor("y", datatype, tuple(shape), b""),)))
    for parameters in ({}, {"binary_data_output": True}):
        length, parts = write_reply(answer, Infer(Tensors.of(()), parameters=parameters), "m")
        assert length is None
        assert plains(read_reply(b"".join(parts), length)) == plains(answer)
    assert decoded(body("FP32", [3, 0], [[], [], []])) == b""


@pytest.mark.parametrize(
    "text",
    [
        "[1,2,3,4]", "[[1,2],[3,4]]", "[[[1],[2]],[[3],[4]]]", "[[1,2,3],[4]]", "[1,[2,3],4]", "[[[[1,2,3,4]]]]",
        " \n[" + " " * 100 + "[1,2],[3,4]]", "[[],[1,2,3,4]]",
    ],
)  # fmt: skip
def test_nesting_says_nothing_of_the_shape(text: str) -> None:
    """Triton counts elements and lets the shape speak."""
    assert decoded(with_data("INT8", [2, 2, 1], text)) == b"\1\2\3\4"
    assert decoded(with_data("FP32", [4], text)) == struct.pack("<4f", 1, 2, 3, 4)


# What is refused

MALFORMED = [
    b"", b" ", b"null", b"[]", b"1", b'"x"', b"{", b"{}", b'{"inputs":[]}', b'{"inputs":{}}', b'{"inputs":null}',
    b'{"inputs":[null]}', b'{"inputs":[{}]}', b'{"inputs":[[]]}', b"\xff", b"\xef\xbb\xbf{}", b"\0", b"{}{}", b"NaN",
    b'{"inputs":NaN}', b'{"inputs":[NaN]}', b"Infinity", b'{"NaN":', b'{"inputs":[{"name":"NaN"}]}',
    body() + b"x", body()[:-1], body("FP31"), body(""), body(shape=[-1]), body(shape=[2**63, 2]), body(shape=[1.5]),
    body(shape=[True]), body(shape=["1"]), body(shape=None), body(shape=1), body(shape=[1] * 17), body(shape=[10**400]),
    body(shape=[-(10**400)]), body(shape=[2**40 + 1, 0]), body(data=None), body(data=1), body(data="1"), body(data={}),
    body(data=[1, 2]), body(data=[]), body(data=["1"]), body(data=[None]), body(data=[{}]), body(data=[True]),
    body("INT32", data=[1.5]), body("INT32", data=[True]), body("INT32", data=["1"]), body("BOOL", data=[1]),
    body("BYTES", data=[1]), body("BYTES", data=["a", "b"]), body("FP32", data=[10**400]),
    body(id=1), body(id=None), body(parameters=[]), body(parameters={"a": {}}), body(parameters={"a": [1]}),
    body(parameters={"a": None}), body(outputs={}), body(outputs=[{}]), body(outputs=[{"name": 1}]), body(outputs=None),
    body(outputs=["y"]), with_data("FP32", [1], "[" + "9" * 5000 + "]"),
    with_data("INT64", [1], "[" + "9" * 5000 + "]"),
    with_data("FP32", [1], "[1e999]"), with_data("FP32", [2], "[NaN," + "9" * 5000 + "]"),
    with_data("FP32", [2], "[NaN," + "9" * 400 + "]"), with_data("FP32", [1], "[+1]"), with_data("FP32", [1], "[01]"),
    with_data("FP32", [1], "[nan]"), with_data("FP32", [1], "[1,]"), with_data("BYTES", [1], b'["\xff"]'),
    with_data("BYTES", [1], b'["\\ud800"]'), with_data("BYTES", [1], b'["\\ud800"]', b',"parameters":{"n":NaN}'),
    with_data("FP32", [1], "[NaN]", b',"id":"\\ud800"'),
    with_data("FP32", [1], "[NaN]", b',"parameters":{"\\ud800":1}'),
    with_data("BYTES", [1], b'["\x01"]'), with_data("FP32", [1], "[1]", b',"id":"\xff"'),
    with_data("FP32", [1], "[NaN]", b',"id":"\xff"'), "{}".encode("utf-16"), '{"inputs":[NaN]}'.encode("utf-16-le"),
]  # fmt: skip


@pytest.mark.parametrize("data", MALFORMED, ids=lambda data: repr(data[:50]))
def test_malformed_bodies(data: bytes) -> None:
    refused(data)


def test_two_inputs_of_one_name() -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
    assert "two inputs have the same name" in refused(json.dumps({"inputs": [tensor, tensor]}).encode())


def test_an_input_without_data() -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1]}
    assert "expected 'data' or a 'binary_data_size'" in refused(json.dumps({"inputs": [tensor]}).encode())


REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 4}


@pytest.mark.parametrize(("inputs", "outputs", "regions"), [
    ([{"parameters": REGION}], [], True),
    ([{"data": [1]}], [{"name": "y", "parameters": REGION}], True),
    ([{"data": [1]}, {"name": "z", "parameters": REGION}], [], True),
    ([{"data": [1]}], [{"name": "y"}], False),
])  # fmt: skip
def test_tensors_in_shared_memory_are_noticed(inputs: list[Any], outputs: list[Any], regions: bool) -> None:
    tensors = [{"name": "x", "datatype": "FP32", "shape": [1], **tensor} for tensor in inputs]
    infer = read_request(json.dumps({"inputs": tensors, "outputs": outputs}).encode(), None)
    assert infer.regions is regions
    assert [tensor.name for tensor in infer.inputs.decoded] == ["x" for tensor in inputs if "data" in tensor]


@pytest.mark.parametrize(("tensor", "words"), [
    ({"data": [1], "parameters": REGION}, "got both"),
    ({"parameters": {**REGION, "binary_data_size": 4}}, "got both"),
    ({"parameters": {**REGION, "shared_memory_region": 5}}, "expected a string, got 5"),
    ({"parameters": {**REGION, "shared_memory_offset": -8}}, "expected an integer from 0"),
    ({"parameters": {**REGION, "shared_memory_byte_size": "x"}}, "expected an integer from 0"),
])  # fmt: skip
def test_regions_that_contradict_themselves(tensor: Any, words: str) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], **tensor}]}
    assert words in refused(json.dumps(body).encode())


HOSTILE = "\n\\ud83d\\ude00\U000e0001\u2028'\"" * 200


@pytest.mark.parametrize(
    "data",
    [
        body(parameters={HOSTILE: []}),
        body(HOSTILE),
        json.dumps({"inputs": [{"name": HOSTILE, "datatype": "FP32", "shape": [1]}]}).encode(),
        json.dumps({"inputs": [{"name": HOSTILE, "datatype": "FP16", "shape": [1], "data": [1]}]}).encode(),
        json.dumps({"inputs": [{"name": HOSTILE, "datatype": "FP32", "shape": [2], "data": [1]}]}).encode(),
        json.dumps({"inputs": [{"name": HOSTILE, "datatype": "FP32", "shape": [-1], "data": [1]}]}).encode(),
        json.dumps({"inputs": [{"name": HOSTILE, "datatype": "INT8", "shape": [1], "data": ["a"]}]}).encode(),
        json.dumps(
            {"inputs": [{"name": HOSTILE, "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}]}
        ).encode(),
    ],
)
def test_a_message_is_one_short_line_whatever_the_caller_sent(data: bytes) -> None:
    refused(data)


@pytest.mark.parametrize("length", [0, -1, 10**6, 10**4000])
def test_header_lengths_that_lie(length: int) -> None:
    data, _ = binary("FP32", [1], bytes(4))
    assert "Inference-Header-Content-Length: expected 1 to" in refused(data, length)


def test_a_header_length_off_by_one() -> None:
    data, length = binary("FP32", [1], bytes(4))
    refused(data, length - 1)
    refused(data, length + 1)
    refused(data, 1)
    refused(data)


@pytest.mark.parametrize("size", [0, 3, 5, 8, -4, 2**63, 10**400, "4", 4.0, True, 1e300])
def test_binary_sizes_that_lie(size: Any) -> None:
    refused(*binary("FP32", [1], bytes(4), binary_data_size=size))


def test_bytes_left_over() -> None:
    data, length = binary("FP32", [1], bytes(4))
    assert "1 bytes are left over" in refused(data + b"x", length)


def test_a_size_without_a_binary_part() -> None:
    data, length = binary("FP32", [1], bytes(4))
    assert "binary_data_size is 4, but only 0 bytes are left" in refused(data[:length])


@pytest.mark.parametrize("elements", [b"", b"\1\0\0\0", b"\0\0\0\0\0\0\0\0", b"\xff\xff\xff\xffa", b"a"])
def test_bytes_elements_that_lie(elements: bytes) -> None:
    refused(*binary("BYTES", [1], elements))


# Writing


def test_an_untouched_request_is_the_very_bytes() -> None:
    data = b' {"unknown": 1,\n"inputs":[{"name":"x","shape":[1], "datatype":"FP32","data":[ 1.50 ]}]}\n'
    assert write_request(read_request(data, None)) == (None, [data])
    data, length = binary("FP32", [1], bytes(4))
    infer = read_request(data, length)
    infer.inputs.decoded  # noqa: B018 - looking changes nothing
    assert write_request(infer) == (length, [data])


def test_a_touched_request_is_binary_and_asks_for_binary() -> None:
    tensor = Tensor("x", "FP32", (1,), bytes(4), {"own": 1})
    outputs = (Wanted("y", {"classification": 3, "binary_data": False}),)
    infer = Infer(Tensors.of((tensor,)), outputs, {"a": True, "binary_data_output": False}, "id")
    length, parts = write_request(infer)
    assert json.loads(bytes(parts[0])) == {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"own": 1, "binary_data_size": 4}},
        ],
        "outputs": [{"name": "y", "parameters": {"classification": 3, "binary_data": True}}],
        "parameters": {"a": True, "binary_data_output": True},
        "id": "id",
    }
    assert (length, parts[1:]) == (len(parts[0]), [bytes(4)])


@pytest.mark.parametrize(
    ("parameters", "outputs", "are_binary"),
    [
        ({}, (), (False, False)),
        ({"binary_data_output": True}, (), (True, True)),
        ({}, (Wanted("a", {"binary_data": True}), Wanted("b")), (True, False)),
        ({"binary_data_output": True}, (Wanted("a", {"binary_data": False}), Wanted("b")), (False, False)),
        ({"binary_data_output": True}, (Wanted("a", {"binary_data": True}), Wanted("b")), (True, False)),
        ({"binary_data_output": False}, (Wanted("b", {"binary_data": True}),), (False, True)),
    ],
)
def test_a_reply_has_the_form_that_was_asked_for(
    parameters: dict[str, Any], outputs: tuple[Wanted, ...], are_binary: tuple[bool, bool]
) -> None:
    tensors = (Tensor("a", "INT8", (1,), b"\1"), Tensor("b", "INT8", (2,), b"\2\3", {"own": 1}))
    answer = Answer(Tensors.of(tensors), "backend", "3", {"sequence": 1})
    length, parts = write_reply(answer, Infer(Tensors.of(()), outputs, parameters, "id"), "public")
    data = b"".join(parts)
    document = json.loads(data[:length])
    assert tuple("data" not in output for output in document["outputs"]) == are_binary
    assert {k: v for k, v in document.items() if k != "outputs"} == {
        "model_name": "public", "model_version": "3", "id": "id", "parameters": {"sequence": 1},
    }  # fmt: skip
    assert document["outputs"][1]["parameters"]["own"] == 1
    assert plains(read_reply(data, length)) == plains(answer)

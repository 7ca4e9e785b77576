"""What a JSON body may hide: depth, and keys that occur twice."""

import json
from typing import Any

import pytest

from backends.errors import BadRequest
from backends.json_text import MAX_KEYS, too_wide
from backends.kserve_json import read_request
from backends.tensor import split_elements


def body(datatype: str = "FP32", shape: Any = (1,), data: Any = (1,), **fields: Any) -> bytes:
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "data": data}
    return json.dumps({"inputs": [tensor], **fields}).encode()


def with_data(datatype: str, shape: list[int], text: str | bytes, extra: bytes = b"") -> bytes:
    """A body whose data is exactly this text."""
    raw = text if isinstance(text, bytes) else text.encode()
    head = f'{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":{shape},"data":'.encode()
    return head + raw + b"}]" + extra + b"}"


def decoded(data: bytes) -> bytes:
    (tensor,) = read_request(data, None).inputs.decoded
    return bytes(tensor.data)


# Depth

DEEP = "[" * 1000 + "]" * 1000
MODERATE = "[" * 100 + "]" * 100  # less than what makes any parser give up by itself
CLOSING = "]}" * 2000


@pytest.mark.parametrize(
    "data",
    [
        with_data("FP32", [1], DEEP),
        with_data("FP32", [1], "[1]", b',"parameters":{"a":' + DEEP.encode() + b"}"),
        with_data("FP32", [1], "[1]", b',"unknown":' + DEEP.encode()),
        with_data("FP32", [1], "[1]", b',"unknown":' + b'{"a":' * 1000 + b"1" + b"}" * 1000),
        with_data("FP32", [1], "[1]", b',"unknown":' + b'[{"a":' * 33 + b"1" + b"}]" * 33),
        with_data("FP32", [1], "[1]", b',"unknown":' + MODERATE.encode()),
        ('{"id":"' + CLOSING + '",' + with_data("FP32", [1], MODERATE).decode()[1:]).encode(),
        # What closes inside of a string closes nothing.
        ('{"id":"' + CLOSING + '",' + with_data("FP32", [1], DEEP).decode()[1:]).encode(),
        with_data("BYTES", [1], '["]",' * 100 + '"x"' + "]" * 100),
        with_data("BYTES", [1], '["\\"]",' * 100 + '"x"' + "]" * 100),
        with_data("BYTES", [1], '["\\\\","]",' * 100 + '"x"' + "]" * 100),
        with_data("BYTES", [1], '["[",' * 65 + '"x"' + "]" * 65),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        with_data("FP32", [1], "[NaN]", b',"unknown":' + DEEP.encode()),
    ],
    ids=range(15),
)
def test_absurd_nesting_however_it_is_hidden(data: bytes) -> None:
    with pytest.raises(BadRequest, match="JSON is nested more than 64 levels deep"):
        read_request(data, None)


def test_nesting_up_to_the_limit() -> None:
    read_request(with_data("FP32", [1], "[" * 61 + "1" + "]" * 61), None)
    with pytest.raises(BadRequest, match="64 levels"):
        read_request(with_data("FP32", [1], "[" * 62 + "1" + "]" * 62), None)


@pytest.mark.parametrize(
    "text", ["[" * 1000, "{" * 1000, '\\"[' * 500, "\\\\" + "[" * 100, '[\\\\\\"' * 100, "[]" * 500]
)
def test_strings_full_of_brackets(text: str) -> None:
    (tensor,) = read_request(with_data("BYTES", [2], f'["{text}","["]'), None).inputs.decoded
    assert split_elements(tensor.data) == [json.loads(f'"{text}"').encode(), b"["]


def test_many_brackets_that_are_not_deep() -> None:
    rows = [[i] for i in range(1000)]
    assert len(decoded(body("FP32", [1000, 1], rows))) == 4000


# Keys that occur twice: Triton takes the first, most parsers the last; whoever is asked for one must not see another.


@pytest.mark.parametrize(
    "data",
    [
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1],"data":[2]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1],"d\\u0061ta":[2]}]}',
        b'{"inputs":[{"name":"x","name":"y","datatype":"FP32","shape":[1],"data":[1]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[-1],"shape":[1],"data":[1]}]}',
        b'{"inputs":[],' + body()[1:],
        body(parameters={"a": "b:c"})[:-2] + b',"a":2}}',
        body(outputs=[{"name": "y"}])[:-3] + b',"name":"z"}]}',
        with_data("BYTES", [2], '["a:b","c:d"]', b',"id":"1","id":"2"'),
        with_data("FP32", [1], "[NaN]", b',"id":"1","id":"2"'),
        body(unknown=1)[:-1] + b',"id":"1","id":"2"}',
    ],
)
def test_keys_that_occur_twice(data: bytes) -> None:
    with pytest.raises(BadRequest, match=r"key '.*' occurs twice"):
        read_request(data, None)


def test_keys_that_only_look_as_if() -> None:
    read_request(body("BYTES", [2], ['":,"data":', "a:b"], id=":", unknown={"a": 1, "b": [{"a": 1}]}), None)
    read_request(body(id="", parameters={}, outputs=[]), None)


def test_too_wide_counts_the_keys_of_all_objects_and_nothing_in_strings() -> None:
    keys = ",".join(f'"k{i}":1' for i in range(MAX_KEYS - 1))
    assert not too_wide(f'{{"a":{{{keys}}}}}'.encode())
    assert too_wide(f'{{"a":{{{keys},"b":2}}}}'.encode())
    assert not too_wide(json.dumps({"a": ":" * 2 * MAX_KEYS, "b": '"\\":' * MAX_KEYS}).encode())

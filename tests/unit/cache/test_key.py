from typing import Any

import pytest

from backends.request import Infer, Tensors, Wanted
from backends.tensor import Tensor, join_elements
from cache.key import keys
from tests.support.strategies import by_binary, by_grpc, by_json, call, fp32


def key(infer: Infer, *scope: str) -> bytes:
    (only,) = keys(infer, scope, 1)
    return only


def texts(*elements: bytes, width: int = 1) -> Infer:
    shape = (len(elements) // width, width)
    return Infer(Tensors.of((Tensor("x", "BYTES", shape, join_elements(list(elements))),)))


def inputs(*tensors: Tensor) -> Infer:
    return Infer(Tensors.of(tensors))


def with_parameters(**parameters: Any) -> Infer:
    return inputs(Tensor("x", "INT8", (1,), b"\0", parameters))


def test_every_form_of_the_same_row_has_one_key() -> None:
    infer = call([1, 2], parameters={"a": 1, "b": True, "c": "x"}, outputs=(Wanted("y", {"classification": 2}),))
    assert key(by_json(infer)) == key(by_binary(infer)) == key(by_grpc(infer)) == key(infer)


def test_a_row_has_one_key_wherever_it_stands() -> None:
    a, b, c = keys(call([1], [2], [1]), (), 3)
    assert a == c != b
    assert keys(call([1]), (), 1) == [a]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call([1], parameters={"timeout": 1, "priority": 2}), call([1])),
        (call([1], parameters={"binary_data_output": True}), call([1])),
        (call([1], id="1"), call([1], id="2")),
        (call([1], parameters={"a": 1, "b": 2}), call([1], parameters={"b": 2, "a": 1})),
        (call([1], outputs=(Wanted("y", {"binary_data": True}),)), call([1], outputs=(Wanted("y"),))),
        (call([1], outputs=(Wanted("y"), Wanted("z"))), call([1], outputs=(Wanted("z"), Wanted("y")))),
        (inputs(fp32("a", [[1]]), fp32("b", [[2]])), inputs(fp32("b", [[2]]), fp32("a", [[1]]))),
        (with_parameters(binary_data_size=1), with_parameters()),
    ],
)
def test_what_cannot_change_an_answer_does_not_count(one: Infer, other: Infer) -> None:
    assert key(one) == key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call([1]), call([2])),
        (call([0.0]), call([-0.0])),
        (call([1, 2]), call([1])),
        (call([1], name="a"), call([1], name="b")),
        (call([1], parameters={"a": 1}), call([1])),
        (call([1], parameters={"a": 1}), call([1], parameters={"a": True})),
        (call([1], parameters={"a": 1}), call([1], parameters={"a": 1.0})),
        (call([1], parameters={"a": 1}), call([1], parameters={"a": "1"})),
        (call([1], parameters={"a": "b"}), call([1], parameters={"b": "a"})),
        (call([1], outputs=(Wanted("y"),)), call([1])),
        (call([1], outputs=(Wanted("y"),)), call([1], outputs=(Wanted("z"),))),
        (call([1], outputs=(Wanted("yz"),)), call([1], outputs=(Wanted("y"), Wanted("z")))),
        # Names that look like the fields around them.
        (
            call([1], outputs=(Wanted("y\2" + "\0" * 7 + "()z"),)),
            call([1], outputs=(Wanted("y"), Wanted("z"))),
        ),
        (call([1], outputs=(Wanted("y", {"classification": 2}),)), call([1], outputs=(Wanted("y"),))),
        (with_parameters(a=1), with_parameters()),
        (inputs(Tensor("x", "INT8", (1, 4), bytes(4))), inputs(Tensor("x", "INT8", (1, 2, 2), bytes(4)))),
        (inputs(Tensor("x", "INT8", (1, 4), bytes(4))), inputs(Tensor("x", "UINT8", (1, 4), bytes(4)))),
        (inputs(Tensor("x", "INT8", (1, 4), bytes(4))), inputs(Tensor("x", "INT32", (1, 1), bytes(4)))),
        (inputs(fp32("a", [[1]]), fp32("b", [[2]])), inputs(fp32("a", [[2]]), fp32("b", [[1]]))),
        (texts(b"ab", b"c", width=2), texts(b"a", b"bc", width=2)),
        (texts(b"a"), texts(b"a\0")),
        (texts(b""), inputs(Tensor("x", "BYTES", (1, 0), b""))),
    ],
)
def test_what_can_does(one: Infer, other: Infer) -> None:
    assert key(one) != key(other)


def test_the_scope_counts_field_by_field() -> None:
    scopes = [(), ("",), ("a",), ("a", ""), ("", "a"), ("ab",), ("a", "b"), ("b", "a"), ("()",), ("inputs",)]
    assert len({key(call([1]), *scope) for scope in scopes}) == len(scopes)


def test_rows_without_elements_are_still_rows() -> None:
    a, b = keys(inputs(Tensor("x", "FP32", (2, 0), b"")), (), 2)
    assert a == b

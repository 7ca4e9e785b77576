"""Merging, splitting, taking and gathering rows lose nothing, whatever the datatype and shape."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from backends import rows
from backends.errors import BadReply
from backends.request import Answer, Infer, Tensors
from backends.tensor import Tensor, check, row_offsets
from tests.support.strategies import data, datatypes, infers, plain, plains, sizes, tensors


@st.composite
def alike(draw: st.DrawFn) -> list[Infer]:
    """Calls that differ in rows only."""
    heads = draw(
        st.lists(st.tuples(datatypes, st.lists(sizes, max_size=2)), min_size=1, max_size=3).map(
            lambda kinds: [(f"x{i}", *kind) for i, kind in enumerate(kinds)]
        )
    )
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return [
        Infer(
            Tensors.of(
                tuple(draw(tensors(name=name, datatype=kind, shape=[rows, *rest])) for name, kind, rest in heads)
            )
        )
        for rows in counts
    ]


def answer(infer: Infer) -> Answer:
    return Answer(Tensors.of(infer.inputs.decoded), "m", "1")


@given(alike())
def test_split_undoes_merge(calls: list[Infer]) -> None:
    merged = rows.merge(calls)
    for tensor in merged.inputs.decoded:
        check(tensor)
    parts = rows.split(answer(merged), [rows.count(call) or 0 for call in calls])
    assert [plains(part) for part in parts] == [plains(call) for call in calls]


@given(infers(rows=4), st.lists(st.integers(0, 3), max_size=6))
def test_take_takes_those_rows(call: Infer, wanted: list[int]) -> None:
    taken = rows.take(call, wanted)
    single = rows.split(answer(call), [1] * 4)
    expected = [
        b"".join(bytes(single[row].outputs.decoded[i].data) for row in wanted) for i in range(len(taken.inputs.heads))
    ]
    assert [bytes(tensor.data) for tensor in taken.inputs.decoded] == expected
    for tensor in taken.inputs.decoded:
        check(tensor)
        assert tensor.rows == len(wanted)
    assert (taken.parameters, taken.outputs, taken.id) == (call.parameters, call.outputs, call.id)


@given(infers(rows=5), st.permutations(range(5)), st.lists(st.integers(1, 4), max_size=3, unique=True))
def test_gather_undoes_any_division(call: Infer, order: list[int], cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), 5]
    groups = [order[a:b] for a, b in pairwise(edges)]
    pieces = [(group, rows.take_answer(answer(call), group)) for group in groups]
    gathered = rows.gather(pieces, 5)
    assert plains(gathered) == plains(call)


@given(tensors(), st.integers(0, 5))
def test_a_row_count_is_right_or_a_bad_reply(tensor: Tensor, expected: int) -> None:
    whole = Answer(Tensors.of((tensor,)))
    try:
        parts = rows.split(whole, [1] * expected)
    except BadReply:
        assert not tensor.shape or tensor.shape[0] != expected
    else:
        assert tensor.shape[0] == expected
        assert b"".join(bytes(part.outputs.decoded[0].data) for part in parts) == bytes(tensor.data)


@given(st.data(), datatypes)
def test_offsets_divide_the_data(draws: st.DataObject, datatype: str) -> None:
    shape = tuple(draws.draw(st.lists(sizes, min_size=1, max_size=3)))
    elements = 1
    for size in shape:
        elements *= size
    tensor = check(Tensor("x", datatype, shape, draws.draw(data(datatype, elements))))
    offsets = row_offsets(tensor)
    assert len(offsets) == shape[0] + 1
    assert (offsets[0], offsets[-1]) == (0, len(tensor.data))
    for begin, end in pairwise(offsets):
        check(Tensor("x", datatype, (1, *shape[1:]), tensor.data[begin:end]))


@given(infers(), infers())
def test_equal_signatures_merge(one: Infer, other: Infer) -> None:
    if rows.count(one) and rows.count(other) and rows.signature(one) == rows.signature(other):
        merged = rows.merge([one, other])
        assert rows.count(merged) == rows.count(one) + rows.count(other)  # type: ignore[operator]
    assert [plain(tensor) for tensor in one.inputs.decoded] == plains(one)

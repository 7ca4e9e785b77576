from typing import Any

import pytest

from backends import rows
from backends.errors import BadReply
from backends.request import Answer, Infer, Tensors, Wanted
from backends.tensor import Tensor, join_elements
from tests.support.strategies import call, fp32, plains, rows_of


def infer(*shapes: tuple[int, ...], **fields: Any) -> Infer:
    """A call with an INT8 input of each shape; its data is never looked at."""
    return Infer(Tensors.of(tuple(Tensor(f"x{i}", "INT8", shape, b"") for i, shape in enumerate(shapes))), **fields)


def answer(*blocks: list[list[float]], **fields: Any) -> Answer:
    return Answer(Tensors.of(tuple(fp32(f"y{i}", block) for i, block in enumerate(blocks))), **fields)


@pytest.mark.parametrize(
    ("shapes", "count"),
    [
        ([(3,)], 3),
        ([(3, 2), (3,)], 3),
        ([(0, 2)], 0),
        ([(3, 0)], 3),
        ([()], None),
        ([(3,), ()], None),
        ([(3,), (2,)], None),
        ([], None),
    ],
)
def test_rows_are_what_all_inputs_agree_on(shapes: list[tuple[int, ...]], count: int | None) -> None:
    assert rows.count(infer(*shapes)) == count


@pytest.mark.parametrize("name", ["sequence_id", "sequence_start", "sequence_end"])
def test_a_sequence_is_never_divided(name: str) -> None:
    assert rows.count(infer((3,), parameters={name: 1})) is None


def with_parameters(**parameters: Any) -> Infer:
    return Infer(Tensors.of((Tensor("x", "INT8", (1,), b"\0", parameters),)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (infer((1, 2)), infer((5, 2))),
        (infer((1,), parameters={"a": 1, "b": 2}), infer((1,), parameters={"b": 2, "a": 1})),
        (infer((1,), parameters={"timeout": 5, "priority": 1}), infer((1,))),
        (infer((1,), parameters={"binary_data_output": True}), infer((1,))),
        (infer((1,), outputs=(Wanted("a", {"binary_data": True}),)), infer((1,), outputs=(Wanted("a"),))),
        (infer((1,), outputs=(Wanted("a"), Wanted("b"))), infer((1,), outputs=(Wanted("b"), Wanted("a")))),
        (with_parameters(binary_data_size=1), with_parameters()),
        (infer((1,), id="1"), infer((1,), id="2")),
    ],
)
def test_calls_that_may_share_a_batch(one: Infer, other: Infer) -> None:
    assert rows.signature(one) == rows.signature(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (infer((1, 2)), infer((1, 3))),
        (infer((1, 1)), infer((1,))),
        (infer((1,), (1,)), infer((1,))),
        (infer((1,), parameters={"a": True}), infer((1,), parameters={"a": 1})),
        (infer((1,), parameters={"a": 1.0}), infer((1,), parameters={"a": 1})),
        (infer((1,), parameters={"a": "1"}), infer((1,), parameters={"a": 1})),
        (infer((1,), parameters={"a": 1}), infer((1,))),
        (infer((1,), outputs=(Wanted("a"),)), infer((1,))),
        (infer((1,), outputs=(Wanted("a", {"classification": 2}),)), infer((1,), outputs=(Wanted("a"),))),
        (with_parameters(a=1), with_parameters()),
        (with_parameters(a=True), with_parameters(a=1)),
        (
            Infer(Tensors.of((Tensor("x", "INT8", (1,), b""),))),
            Infer(Tensors.of((Tensor("x", "UINT8", (1,), b""),))),
        ),
    ],
)
def test_calls_that_may_not(one: Infer, other: Infer) -> None:
    assert rows.signature(one) != rows.signature(other)


def test_signatures_of_parameters_that_do_not_compare() -> None:
    parameters = {"a": "x", "b": 1, "c": True, "d": 1.5}
    outputs = (Wanted("y", {"k": 1}), Wanted("y", {"k": "1"}), Wanted("y"))
    assert hash(rows.signature(infer((1,), parameters=parameters, outputs=outputs)))


def test_merging_goes_by_name() -> None:
    a, b = fp32("a", [[1], [2]]), fp32("b", [[3], [4]])
    c, d = fp32("a", [[5]]), fp32("b", [[6]])
    merged = rows.merge([Infer(Tensors.of((a, b))), Infer(Tensors.of((d, c)), parameters={"timeout": 1})])
    assert [(t.name, rows_of(t)) for t in merged.inputs.decoded] == [("a", [[1], [2], [5]]), ("b", [[3], [4], [6]])]


def test_a_merged_call_keeps_what_its_members_agree_on() -> None:
    outputs = (Wanted("y", {"classification": 2}),)
    first = call([1], outputs=outputs, parameters={"k": 1, "timeout": 5, "binary_data_output": True}, id="mine")
    merged = rows.merge([first, call([2], outputs=outputs, parameters={"k": 1})])
    assert (merged.outputs, merged.parameters, merged.id) == (outputs, {"k": 1}, "")


def test_one_call_alone_is_left_as_it_is() -> None:
    one = call([1])
    assert rows.merge([one]) is one


@pytest.mark.parametrize("shape", [(), (2,), (4, 1), (0,)])
def test_a_wrong_row_count_is_the_backends_fault(shape: tuple[int, ...]) -> None:
    data = bytes(4 * (shape[0] if shape else 1))
    wrong = Answer(Tensors.of((fp32("y", [[1], [2], [3]]), Tensor("z", "FP32", shape, data))))
    with pytest.raises(BadReply, match=rf"output 'z': expected 3 rows, got shape \[{str(list(shape))[1:-1]}\]"):
        rows.verify(wrong, 3)
    with pytest.raises(BadReply):
        rows.split(wrong, [1, 2])


def test_an_answer_without_outputs_has_any_number_of_rows() -> None:
    nothing = Answer(Tensors.of(()), "m", "1")
    assert [part.model for part in rows.split(nothing, [1, 2])] == ["m", "m"]
    assert rows.gather([([1], nothing), ([0], nothing)], 2).outputs.decoded == ()


def test_parts_keep_the_answers_origin() -> None:
    whole = answer([[1], [2]], model="m", version="3", parameters={"k": 1})
    for part in (*rows.split(whole, [1, 1]), rows.take_answer(whole, [1])):
        assert (part.model, part.version, part.parameters) == ("m", "3", {"k": 1})


def test_gathering_interleaved_pieces() -> None:
    gathered = rows.gather([([3, 0], answer([[30], [0]])), ([1], answer([[10]])), ([2], answer([[20]]))], 4)
    assert rows_of(gathered.outputs.decoded[0]) == [[0], [10], [20], [30]]


def test_gathering_texts() -> None:
    def texts(*elements: bytes) -> Answer:
        return Answer(Tensors.of((Tensor("y", "BYTES", (len(elements),), join_elements(list(elements))),)))

    gathered = rows.gather([([2, 0], texts(b"cc", b"")), ([1], texts(b"b\0"))], 3)
    assert gathered.outputs.decoded[0].data == join_elements([b"", b"b\0", b"cc"])


def test_gathering_one_whole_piece_changes_nothing() -> None:
    whole = answer([[1], [2]])
    assert rows.gather([(range(2), whole)], 2) is whole
    assert rows_of(rows.gather([([1, 0], whole)], 2).outputs.decoded[0]) == [[2], [1]]


def test_gathering_goes_by_name() -> None:
    one = answer([[1]], [[2]])
    other = Answer(Tensors.of(tuple(reversed(answer([[3]], [[4]]).outputs.decoded))))
    gathered = rows.gather([([0], one), ([1], other)], 2)
    assert [rows_of(t) for t in gathered.outputs.decoded] == [[[1], [3]], [[2], [4]]]


@pytest.mark.parametrize(
    "other",
    [
        answer([[1, 2]]),
        Answer(Tensors.of((Tensor("y0", "INT32", (1, 1), bytes(4)),))),
        Answer(Tensors.of((Tensor("y1", "FP32", (1, 1), bytes(4)),))),
        Answer(Tensors.of(())),
        answer([[1]], [[2]]),
    ],
    ids=["shape", "datatype", "name", "fewer", "more"],
)
@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_different_kinds_have_no_common_tensor(other: Answer, turned: bool) -> None:
    pieces = [([0], answer([[1]])), ([1], other)]
    with pytest.raises(BadReply, match="output 'y") as caught:
        rows.gather(pieces[::-1] if turned else pieces, 2)
    assert caught.value.message.isprintable()


def test_what_leaves_a_call_is_what_came() -> None:
    assert plains(rows.take(call([1, 2], [3, 4], [5, 6]), [2, 0, 2])) == plains(call([5, 6], [1, 2], [5, 6]))


def test_what_has_too_many_rows_is_not_divided() -> None:
    def wide(rows: int) -> Infer:
        return Infer(Tensors.of((Tensor("x", "INT8", (rows, 0), b""),)))

    assert rows.count(wide(rows.MAX_ROWS)) == rows.MAX_ROWS
    assert rows.count(wide(rows.MAX_ROWS + 1)) is None

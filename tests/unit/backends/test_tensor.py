import pytest

from backends.errors import BadReply, BadRequest
from backends.tensor import (
    DATATYPES,
    ITEM_BYTES,
    Tensor,
    check,
    check_shape,
    count_elements,
    join_elements,
    row_offsets,
    split_elements,
)


@pytest.mark.parametrize("datatype", sorted(ITEM_BYTES))
@pytest.mark.parametrize(("shape", "elements"), [((), 1), ((3,), 3), ((2, 3), 6), ((0,), 0), ((2, 0, 3), 0)])
def test_bytes_must_be_what_datatype_and_shape_ask_for(datatype: str, shape: tuple[int, ...], elements: int) -> None:
    size = elements * ITEM_BYTES[datatype]
    tensor = Tensor("x", datatype, shape, bytes(size))
    assert check(tensor) is tensor
    for wrong in {size - 1, size + 1} - {-1}:
        with pytest.raises(BadRequest, match=f"{datatype} of shape .* is {size} bytes, got {wrong}"):
            check(Tensor("x", datatype, shape, bytes(wrong)))


def test_bytes_elements_of_any_content() -> None:
    elements = [b"", b"\0", b"\xff\xfe", "é".encode(), b"x" * 2**20]
    data = join_elements(elements)
    assert count_elements(data) == 5
    assert split_elements(data) == elements
    assert split_elements(memoryview(data)) == elements
    assert check(Tensor("x", "BYTES", (5,), data))
    assert join_elements([]) == b""
    assert count_elements(b"") == 0


@pytest.mark.parametrize(
    "data",
    [
        b"\1",  # a length cut short
        b"\1\0\0\0",  # an element cut off
        b"\1\0\0\0ab",  # a byte too many
        b"\xff\xff\xff\xff",  # four gigabytes
        b"\0\0\0\0\2\0\0\0a",
    ],
)
def test_length_prefixes_that_lie(data: bytes) -> None:
    assert count_elements(data) == -1
    with pytest.raises(BadReply, match="length prefixes do not add up"):
        check(Tensor("x", "BYTES", (1,), data), BadReply)


def test_a_wrong_number_of_elements() -> None:
    with pytest.raises(BadRequest, match=r"shape \[3\] asks for 3 BYTES elements, got 2"):
        check(Tensor("x", "BYTES", (3,), join_elements([b"a", b"b"])))


def test_rows_begin_where_they_begin() -> None:
    assert row_offsets(Tensor("x", "FP32", (3, 2), bytes(24))) == [0, 8, 16, 24]
    assert row_offsets(Tensor("x", "FP32", (3, 0), b"")) == [0, 0, 0, 0]
    assert row_offsets(Tensor("x", "FP32", (0, 2), b"")) == [0]
    texts = Tensor("x", "BYTES", (2, 2), join_elements([b"", b"abc", b"d", b""]))
    assert row_offsets(texts) == [0, 11, 20]
    assert row_offsets(Tensor("x", "BYTES", (2, 0), b"")) == [0, 0, 0]
    assert row_offsets(Tensor("x", "BYTES", (0, 2), b"")) == [0]


def test_every_datatype_passes_the_head_check() -> None:
    for datatype in DATATYPES:
        check_shape("input", "x", datatype, (0, 2**20))


@pytest.mark.parametrize(
    ("name", "datatype", "shape", "message"),
    [
        ("", "FP32", (1,), "input: expected a name, got an empty one"),
        ("x", "FP31", (1,), "input 'x': unknown datatype 'FP31'"),
        ("x", "FP32", (1, -1), "input 'x': negative size in shape [1, -1]"),
        ("x", "FP32", (1,) * 17, "input 'x': expected at most 16 dimensions, got 17"),
        ("x", "FP32", (2**20, 2**21), "input 'x': shape [1048576, 2097152] is absurdly large"),
        ("x", "FP32", (0, 2**41), "input 'x': shape [0, 2199023255552] is absurdly large"),
    ],
)
def test_heads_that_cannot_be(name: str, datatype: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_shape("input", name, datatype, shape)
    assert caught.value.message == message


def test_a_message_is_one_short_line_whatever_the_caller_sent() -> None:
    hostile = "\n\U000e0001\ud800" * 1000
    for name, datatype, shape in [
        (hostile, hostile, (1,)),
        (hostile, "FP32", (-(10**4000),) * 16),
        (hostile, "FP32", (10**4000,) * 16),
    ]:
        with pytest.raises(BadRequest) as caught:
            check_shape("input", name, datatype, shape)
        assert caught.value.message.isprintable()
        assert len(caught.value.message) < 400
    for datatype, data in [("FP32", b"1"), ("BYTES", b"1"), (hostile, b"1")]:
        with pytest.raises(BadRequest) as caught:
            check(Tensor(hostile, datatype, (10**10,) * 16, data))
        assert caught.value.message.isprintable()
        assert len(caught.value.message) < 400

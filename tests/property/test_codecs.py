"""The JSON codec: what is written is read back bit by bit, and whatever is read is an answer or one clear failure."""

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from backends.errors import BadReply, BadRequest, Failure, Unsupported
from backends.json_text import MAX_NESTING, require_unique_keys, too_deep
from backends.kserve_json import read_reply, read_request, write_reply, write_request
from backends.request import Answer, Infer, Tensors, Wanted
from tests.support.strategies import by_binary, by_grpc, by_json, infers, json_body, names, plains, tensors

VALID = [
    json_body(Infer(Tensors.of(()))),
    b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2,1],"data":[[1.5],[NaN]]}],"id":"7"}',
    b'{"id":"7","inputs":[{"name":"x","datatype":"BYTES","shape":[2],"data":["a]","\\"["]},'
    b'{"name":"y","datatype":"INT8","shape":[1],"data":[300]}],"outputs":[{"name":"z","parameters":{"classification":2}}],'
    b'"parameters":{"a":true,"b":"c","d":-1}}',
]
HEAD = (
    b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}},'
    b'{"name":"y","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":5}}]}'
)
BINARY = HEAD + bytes(8) + b"\1\0\0\0a"

# Pieces that mean something to JSON or to the reader.
PIECES = st.sampled_from([
    b"[", b"]", b"{", b"}", b'"', b"\\", b",", b":", b"NaN", b"-Infinity", b"null", b"true", b"-", b"1e999", b"9" * 30,
    b"[" * 70, b"]" * 70, b'{"a":' * 70, b"\0", b"\xff", b"\\ud800", b'"data"', b'"shape"', b"\xef\xbb\xbf", b"0", b".",
    b'"inputs":[],', b'"binary_data_size":', b"-1", b"\n", b"\xed\xa0\x80",
])  # fmt: skip


def check_any(data: bytes, header_length: int | None) -> None:
    """Reading gives a call, or one short line that says why not; nothing else ever."""
    try:
        infer = read_request(data, header_length)
        assert write_request(infer) == (header_length, [data])
        assert len(infer.inputs.decoded) == len(infer.inputs.heads)
    except (BadRequest, Unsupported) as failure:
        check_message(failure)
    try:
        answer = read_reply(data, header_length)
        length, parts = write_reply(answer, Infer(Tensors.of(()), id="new"), "public")
        assert read_reply(b"".join(parts), length).model == "public"
        assert len(answer.outputs.decoded) == len(answer.outputs.heads)
    except BadReply as failure:
        check_message(failure)


def check_message(failure: Failure) -> None:
    assert failure.message.isprintable()
    assert len(failure.message) < 400


@given(st.binary() | st.lists(PIECES).map(b"".join), st.none() | st.integers(-1, 20))
@example(b"", None)
def test_any_bytes(data: bytes, header_length: int | None) -> None:
    check_any(data, header_length)


@given(st.sampled_from(VALID), st.integers(0, 400), st.integers(0, 20), PIECES | st.binary(max_size=5))
@example(VALID[2], 142, 0, b"\x80")
def test_a_body_with_a_piece_replaced(body: bytes, at: int, length: int, piece: bytes) -> None:
    check_any(body[:at] + piece + body[at + length :], None)
    reply = body.replace(b'"inputs"', b'"outputs"')
    check_any(reply[:at] + piece + reply[at + length :], None)


@given(st.integers(0, len(BINARY)), st.integers(0, 8), PIECES | st.binary(max_size=5), st.integers(-3, 3))
def test_a_binary_body_with_a_piece_replaced(at: int, length: int, piece: bytes, off: int) -> None:
    check_any(BINARY[:at] + piece + BINARY[at + length :], len(HEAD) + off)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
FIELDS = ["inputs", "outputs", "id", "parameters", "name", "datatype", "shape", "data", "x"]


@given(st.data())
def test_a_document_with_a_value_replaced(data: st.DataObject) -> None:
    document = json.loads(data.draw(st.sampled_from(VALID[1:])))
    at = document
    while True:
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else list(range(len(at)))))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(json_values)
        break
    check_any(json.dumps(document).encode(), None)


# Round trips


@given(infers())
def test_what_is_written_is_read_back(infer: Infer) -> None:
    length, parts = write_request(infer)
    read = read_request(b"".join(parts), length)
    assert plains(read) == plains(infer)
    assert [output.name for output in read.outputs] == [output.name for output in infer.outputs]
    assert {**read.parameters} == {**infer.parameters, "binary_data_output": True}
    assert read.id == infer.id


@given(infers(text=True))
def test_every_form_says_the_same(infer: Infer) -> None:
    expected = plains(infer)
    assert plains(by_json(infer)) == expected
    assert plains(by_json(infer, nest=True)) == expected
    assert plains(by_binary(infer)) == expected
    assert plains(by_grpc(infer)) == expected


@given(st.lists(tensors(text=True), max_size=3, unique_by=lambda tensor: tensor.name), st.data())
def test_a_reply_is_read_back_whatever_form_was_asked_for(outputs: list[Any], data: st.DataObject) -> None:
    answer = Answer(Tensors.of(tuple(outputs)), "backend", "3")
    flags = {tensor.name: data.draw(st.none() | st.booleans()) for tensor in outputs}
    default = data.draw(st.none() | st.booleans())
    asked = Infer(
        Tensors.of(()),
        tuple(Wanted(name, {} if flag is None else {"binary_data": flag}) for name, flag in flags.items()),
        {} if default is None else {"binary_data_output": default},
        data.draw(names),
    )
    length, parts = write_reply(answer, asked, "public")
    body = b"".join(parts)
    read = read_reply(body, length)
    assert plains(read) == plains(answer)
    assert (read.model, read.version, read.id) == ("public", "3", asked.id)
    for output in json.loads(body[:length])["outputs"]:
        flag = flags[output["name"]]
        assert ("data" not in output) == (flag is True)


@given(tensors(text=True), st.none() | st.booleans())
def test_a_reply_to_a_call_that_names_no_outputs_is_binary_where_that_is_the_default(output: Any, default: Any) -> None:
    asked = Infer(Tensors.of(()), (), {} if default is None else {"binary_data_output": default})
    length, parts = write_reply(Answer(Tensors.of((output,)), "m", "1"), asked, "m")
    (written,) = json.loads(b"".join(parts)[:length])["outputs"]
    assert ("data" not in written) == (default is True)


# What is looked for in the text


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(json_values, st.integers(MAX_NESTING - 3, MAX_NESTING + 1), st.text('[]{}"\\:ab'))
def test_depth_is_what_a_parser_sees(value: Any, levels: int, text: str) -> None:
    nested: Any = [value, text]
    for _ in range(levels - 1):
        nested = [text, nested, text]
    assert too_deep(json.dumps(nested).encode()) == (depth(nested) > MAX_NESTING)


pairs: st.SearchStrategy[Any] = st.recursive(
    st.integers() | st.text('[]{}"\\:ab', max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(st.tuples(st.sampled_from('ab":'), inner), max_size=3).map(tuple)
    ),
)


def written(value: Any) -> str:
    """JSON of a value in which a tuple of pairs is an object that may repeat a key."""
    if isinstance(value, tuple):
        return "{" + ",".join(f"{json.dumps(key)}:{written(inner)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def keys(value: Any) -> tuple[int, bool]:
    """How many different keys there are in all objects, and whether one repeats a key."""
    inners = [inner for _, inner in value] if isinstance(value, tuple) else value if isinstance(value, list) else []
    below = [keys(inner) for inner in inners]
    own = [key for key, _ in value] if isinstance(value, tuple) else []
    return len(set(own)) + sum(n for n, _ in below), len(set(own)) < len(own) or any(twice for _, twice in below)


@given(pairs, st.integers(0, 3))
def test_keys_that_occur_twice_are_found(value: Any, unknown: int) -> None:
    least, twice = keys(value)
    try:
        require_unique_keys(written(value).encode(), max(0, least - unknown))
    except ValueError:
        assert twice
    else:
        assert not twice

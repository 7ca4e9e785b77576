"""Replies of backends as KServe v2 JSON: renamed, and what breaks the protocol."""

import json
import math

import pytest

from backends.errors import BadReply
from backends.kserve_json import read_reply, write_reply
from backends.request import Infer, Tensors
from tests.support.strategies import plains

NAN, INF = math.nan, math.inf


REPLY = b'{"model_name":"m","model_version":"1","x":{"y":[1.50]},"outputs":[{"name":"y","datatype":"FP32","shape":[2],'


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (REPLY + b'"data":[1.50,-0.0]}]}', None),
        (REPLY + b'"data":[NaN,Infinity]}]}', None),
        (REPLY + b'"parameters":{"binary_data_size":8}}]}' + bytes(8), len(REPLY) + 38),
    ],
)
def test_a_renamed_reply_keeps_everything_else(data: bytes, length: int | None) -> None:
    answer = read_reply(data, length)
    asked = Infer(Tensors.of(()), id="")
    assert write_reply(answer, asked, "m") == (length, [data])
    new_length, parts = write_reply(answer, Infer(Tensors.of(()), id="7"), "public")
    new = b"".join(parts)
    expected = {**json.loads(data[:length]), "model_name": "public", "id": "7"}
    assert json.dumps(json.loads(new[:new_length])) == json.dumps(expected)
    assert new_length is None or new[new_length:] == bytes(8)
    assert plains(read_reply(new, new_length)) == plains(answer)


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (b"", None), (b"[]", None), (b"{}x", None), (b"{}", 0), (b"{}", 3), (b'{"outputs":[{}]}', None),
        (REPLY + b'"data":[1]}]}', None), (REPLY + b'"data":["a","b"]}]}', None), (REPLY + b'"data":null}]}', None),
        (REPLY + b'"parameters":{"binary_data_size":8}}]}' + bytes(7), len(REPLY) + 38), (REPLY + b'"x":1}]}', None),
        (REPLY.replace(b"FP32", b"FP31") + b'"data":[1,2]}]}', None), (b'{"outputs":[NaN]}', None),
        (REPLY.replace(b"[2]", b"[-1,-2]") + b'"data":[1,2]}]}', None), (b'{"x":NaN', None),
        (REPLY.replace(b"[2]", b"[0,999999999999999999]") + b'"data":[]}]}', None),
        (b'{"outputs":' + b"[" * 70 + b"]" * 70 + b"}", None),
    ],
)  # fmt: skip
def test_replies_that_break_the_protocol(data: bytes, length: int | None) -> None:
    with pytest.raises(BadReply) as caught:
        read_reply(data, length).outputs.decoded  # noqa: B018
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400


def test_a_reply_without_outputs_is_none() -> None:
    with pytest.raises(BadReply, match=r"the backend's reply: expected a KServe v2 JSON body: .*outputs"):
        read_reply(b'{"model_name":"m"}', None)


def test_a_reply_with_nan_among_its_parameters() -> None:
    answer = read_reply(b'{"model_name":"m","outputs":[],"parameters":{"loss":NaN}}', None)
    assert answer.outputs.decoded == ()

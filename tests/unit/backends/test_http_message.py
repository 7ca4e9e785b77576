"""What goes out on the wire, and what never does."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.errors import BadRequest
from backends.http_message import JOIN_BYTES, RequestWriter

WRITER = RequestWriter("h:80")


def test_a_small_request_is_one_piece() -> None:
    data = WRITER.write("POST", "/v2/models/m/infer?x=1", [(b"content-type", b"application/json")], b"{}")
    assert data == (
        b"POST /v2/models/m/infer?x=1 HTTP/1.1\r\nHost: h:80\r\ncontent-type: application/json\r\n"
        b"Content-Length: 2\r\n\r\n{}"
    )


@pytest.mark.parametrize(("method", "length"), [("GET", b""), ("HEAD", b""), ("POST", b"Content-Length: 0\r\n")])
def test_an_empty_body_has_a_length_where_one_is_expected(method: str, length: bytes) -> None:
    assert WRITER.write(method, "/", (), b"") == method.encode() + b" / HTTP/1.1\r\nHost: h:80\r\n" + length + b"\r\n"


def test_parts_keep_their_order_and_sizes_count_bytes_not_items() -> None:
    floats = memoryview(array("f", [1.0, 2.0, 3.0]))
    data = WRITER.write("POST", "/", (), [b"ab", bytearray(b"cd"), floats, memoryview(b"x0y0")[::2], memoryview(b"")])
    assert isinstance(data, bytes)
    assert data.endswith(b"Content-Length: 18\r\n\r\nabcd" + floats.tobytes() + b"xy")


def test_large_parts_are_not_copied() -> None:
    large = bytes(JOIN_BYTES)
    data = WRITER.write("POST", "/", (), [b"head", b"", large])
    assert isinstance(data, list)
    assert bytes(data[0]).endswith(b"Content-Length: %d\r\n\r\n" % (JOIN_BYTES + 4))
    assert data[1] == b"head"
    assert data[2] is large
    assert len(data) == 3


BAD = ["a\rb", "a\nb", "a\r\nb", "a\0b", "\r\n", "a\r\n\r\nGET / HTTP/1.1"]


@pytest.mark.parametrize("bad", BAD)
def test_a_line_end_anywhere_is_refused(bad: str) -> None:
    for method, target, headers in (
        ("GET", "/" + bad, []),
        ("GET" + bad, "/", []),
        ("GET", "/", [(b"x", bad.encode())]),
        ("GET", "/", [(b"x" + bad.encode(), b"y")]),
    ):
        with pytest.raises(BadRequest):
            WRITER.write(method, target, headers, b"")


@pytest.mark.parametrize("target", ["", "x", "/a b", "/a\tb", "/é", "http://other/", "/\x7f"])
def test_a_target_is_a_path_and_query(target: str) -> None:
    with pytest.raises(BadRequest):
        WRITER.write("GET", target, (), b"")


@pytest.mark.parametrize("name", [b"", b"a b", b"a:", b" a", b"\xe9"])
def test_a_name_is_a_token(name: bytes) -> None:
    with pytest.raises(BadRequest, match="header name"):
        WRITER.write("GET", "/", [(name, b"x")], b"")


@pytest.mark.parametrize("name", [b"Host", b"content-length", b"Transfer-Encoding", b"connection", b"upgrade", b"te"])
def test_headers_of_the_connection_are_refused(name: bytes) -> None:
    with pytest.raises(BadRequest, match="not forwarded"):
        WRITER.write("GET", "/", [(name, b"1")], b"")


def test_the_memo_is_bounded() -> None:
    writer = RequestWriter("h:80")
    for n in range(2000):
        assert f"GET /{n} HTTP/1.1".encode() in bytes(writer.write("GET", f"/{n}", [(b"x-%d" % n, b"1")], b""))  # type: ignore[arg-type]
    assert len(writer._lines) <= 512
    assert len(writer._names) <= 512


@given(st.lists(st.tuples(st.binary(max_size=6), st.binary(max_size=12)), max_size=4), st.text(max_size=8))
def test_no_header_or_target_ever_makes_another_line(headers: list[tuple[bytes, bytes]], target: str) -> None:
    try:
        data = WRITER.write("POST", target, headers, b"")
    except BadRequest:
        return
    assert isinstance(data, bytes)
    assert data.count(b"\r\n") == data.count(b"\r") == data.count(b"\n") == len(headers) + 4
    assert data.index(b"\r\n\r\n") == len(data) - 4

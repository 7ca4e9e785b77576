"""Request smuggling: what two servers could read in two ways is refused by the first, and the second never sees it."""

from __future__ import annotations

from typing import Any

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http1 import Http1Server
from tests.support.proxied import Backend, proxied, sent
from tests.support.strategies import spoiled

POST = b"POST /v2/models/a/generate HTTP/1.1\r\nHost: x\r\n"
INNER = b"GET /v2/models/SMUGGLED HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKS = b"0\r\n\r\n" + INNER


def both(te: bytes, length: bytes = b"content-length: 5\r\n") -> bytes:
    return POST + length + te + b"\r\n" + CHUNKS


def chunked(chunks: bytes) -> bytes:
    return POST + b"transfer-encoding: chunked\r\n\r\n" + chunks


# What is refused, and nothing of it forwarded; each has a second request within, for whoever reads it in the other way.
REFUSED = {
    "length and chunks": both(b"transfer-encoding: chunked\r\n"),
    "chunks and length": POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n" + CHUNKS,
    "chunks and length 0": both(b"transfer-encoding: chunked\r\n", b"content-length: 0\r\n"),
    "two lengths": POST + b"content-length: 0\r\ncontent-length: %d\r\n\r\n" % len(INNER) + INNER,
    "two equal lengths": POST + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}" + INNER,
    "two lengths in one": POST + b"content-length: 0, %d\r\n\r\n" % len(INNER) + INNER,
    "a plus": POST + b"content-length: +0\r\n\r\n" + INNER,
    "a minus": POST + b"content-length: -1\r\n\r\n" + INNER,
    "hexadecimal": POST + b"content-length: 0x0\r\n\r\n" + INNER,
    "an empty length": POST + b"content-length: \r\n\r\n" + INNER,
    "an inner space": POST + b"content-length: 0 1\r\n\r\n" + INNER,
    "a huge length": POST + b"content-length: 18446744073709551616\r\n\r\n" + INNER,
    "chunked twice": both(b"transfer-encoding: chunked, chunked\r\n", b""),
    "chunked in two headers": both(b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", b""),
    "xchunked": both(b"transfer-encoding: xchunked\r\n", b""),
    "chunkedx": both(b"transfer-encoding: chunkedx\r\n", b""),
    "identity": both(b"transfer-encoding: identity\r\n", b""),
    "gzip": both(b"transfer-encoding: gzip\r\n", b""),
    "chunked, then gzip": both(b"transfer-encoding: chunked, gzip\r\n", b""),
    "chunked, then identity": both(b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n", b""),
    "an empty encoding": both(b"transfer-encoding: \r\n", b""),
    "a comma": both(b"transfer-encoding: chunked,\r\n", b""),
    "quotes": both(b'transfer-encoding: "chunked"\r\n', b""),
    "a vertical tab": both(b"transfer-encoding: \x0bchunked\r\n", b""),
    "a parameter": both(b"transfer-encoding: chunked;q=1\r\n", b""),
    "a space before the colon": both(b"transfer-encoding : chunked\r\n"),
    "a tab before the colon": both(b"transfer-encoding\t: chunked\r\n"),
    "a fold": both(b"x: y\r\n transfer-encoding: chunked\r\n"),
    "a folded value": both(b"transfer-encoding:\r\n chunked\r\n", b""),
    "a space at the start": both(b" transfer-encoding: chunked\r\n"),
    "no colon": both(b"transfer-encoding chunked\r\n"),
    "bare LF": POST.replace(b"\r\n", b"\n") + b"content-length: 0\n\n" + INNER,
    "one bare LF": POST + b"x: y\ntransfer-encoding: chunked\r\n\r\n" + CHUNKS,
    "bare CR": POST + b"x: y\rtransfer-encoding: chunked\r\n\r\n" + CHUNKS,
    "CR only": POST.replace(b"\r\n", b"\r") + b"content-length: 0\r\r" + INNER,
    "NUL in a name": both(b"transfer-encoding\0: chunked\r\n"),
    "NUL in a value": both(b"x: \0\r\n"),
    "a byte above ASCII in a name": both(b"transfer-\xe9ncoding: chunked\r\n"),
    "a size that is none": chunked(b"zz\r\n" + CHUNKS),
    "no size": chunked(b"\r\n" + CHUNKS),
    "a size with a sign": chunked(b"+0\r\n\r\n" + CHUNKS),
    "a negative size": chunked(b"-1\r\n" + CHUNKS),
    "a size with 0x": chunked(b"0x0\r\n\r\n" + CHUNKS),
    "a size with spaces": chunked(b"0 \r\n\r\n" + CHUNKS),
    "a size that wraps": chunked(b"10000000000000000\r\n" + CHUNKS),
    "bare LF after a size": chunked(b"0\n\r\n" + INNER),
    "LF in an extension": chunked(b"0;a\nb\r\n\r\n" + INNER),
    "bare CR in an extension": chunked(b"0;a\rb\r\n\r\n" + INNER),
    "a huge extension": chunked(b"2;" + b"a" * 400_000 + b"\r\n{}\r\n" + CHUNKS),
    "a chunk longer than it says": chunked(b"1\r\n{}\r\n" + CHUNKS),
    "a chunk that ends with LF": chunked(b"2\r\n{}\n" + CHUNKS),
    "huge trailers": chunked(b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 80_000 + b"\r\n" + INNER),
    "a length in a trailer": chunked(b"2\r\n{}\r\n0\r\nContent-Length: 50\r\n\r\n" + INNER),
    "chunks in a trailer": chunked(b"2\r\n{}\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n" + INNER),
    "a folded trailer": chunked(b"2\r\n{}\r\n0\r\nx: y\r\n z\r\n\r\n" + INNER),
    "chunks of HTTP/1.0": both(b"transfer-encoding: chunked\r\n", b"").replace(b"/1.1", b"/1.0", 1),
    "no version": b"POST /v2/models/a/generate\r\n\r\n" + INNER,
    "a space in the target": POST.replace(b"/a/", b"/a b/") + b"content-length: 0\r\n\r\n" + INNER,
    "a tab in the target": POST.replace(b"/a/", b"/a\tb/") + b"content-length: 0\r\n\r\n" + INNER,
    "a byte above ASCII in the target": POST.replace(b"/a/", b"/\xe9/") + b"content-length: 0\r\n\r\n" + INNER,
    "CONNECT": b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n" + INNER,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_be_read_in_two_ways_is_refused(name: str) -> None:
    async def client(server: Http1Server, backend: Backend) -> tuple[bytes, bool]:
        found = await sent(server, REFUSED[name])
        # Whoever comes next gets an answer of its own.
        reply, _ = await sent(server, b"GET /v2/models/next HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert reply.endswith(b'{"target":"/v2/models/next"}')
        assert backend.requests == [(b"/v2/models/next", b"")]
        return found

    found, closed = proxied(client)
    assert closed
    assert found[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.1 431 ")
    assert found.count(b"\r\n\r\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        chunked(b"2\r\n{}\r\n0\r\nHost: y\r\nConnection: close\r\nX: z\r\n\r\n"),
        chunked(b"2;a=b;c\r\n{}\r\n0;d\r\n\r\n"),
        chunked(b"000002\r\n{}\r\n00\r\n\r\n"),
        POST + b"Connection: content-length, host, x-a\r\nX-A: 1\r\ncontent-length: 2\r\n\r\n{}",
        POST + b"Connection: close, transfer-encoding\r\ncontent-length: 2\r\n\r\n{}",
        POST + b"TE: trailers\r\nTrailer: x\r\nUpgrade: h2c\r\nKeep-Alive: 5\r\ncontent-length: 2\r\n\r\n{}",
        POST + b"Content-Length: 000002\r\n\r\n{}",
        POST.replace(b" HTTP", b"  HTTP") + b"content-length: 2\r\n\r\n{}",
        POST + b"Expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
        b"\r\n\r\n" + POST + b"content-length: 2\r\n\r\n{}",
    ],
)
def test_what_is_odd_and_clear_is_one_request_to_the_backend(text: bytes) -> None:
    async def client(server: Http1Server, backend: Backend) -> None:
        reply, _ = await sent(server, text)
        assert reply.count(b"HTTP/1.1 200 OK") == 1
        assert backend.requests == [(b"/v2/models/a/generate", b"{}")]

    proxied(client)


PIECES = st.sampled_from(
    [
        b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b"0", b"5", b"-", b"+", b"x", b"\xff", b"\r\n\r\n",
        b"0\r\n\r\n", b"content-length: 5\r\n", b"Content-Length: 0\r\n", b"transfer-encoding: chunked\r\n",
        b"Transfer-Encoding: identity\r\n", b"connection: close\r\n", b"connection: content-length\r\n",
        b"expect: 100-continue\r\n", b"upgrade: h2c\r\nconnection: upgrade\r\n", b"5\r\nhello\r\n", b" HTTP/1.1\r\n",
        b" HTTP/1.0\r\n", b"GET ", b"POST ", INNER,
    ]
)  # fmt: skip
GOOD = st.sampled_from(
    [
        b"GET /v2/models/a HTTP/1.1\r\nHost: x\r\n\r\n",
        POST + b"content-length: 2\r\n\r\n{}",
        POST + b"content-length: %d\r\n\r\n" % len(INNER) + INNER,
        chunked(b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"),
        chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)),
        b"GET http://h/v2/models/b?c=d HTTP/1.1\r\nHost: x\r\nX: %s\r\n\r\n" % (b"y" * 50),
        b"GET /v2/models/c HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    ]
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Good requests in a row, with a few pieces put in or cut out."""
    return draw(spoiled(b"".join(draw(st.lists(GOOD, min_size=1, max_size=4))), PIECES))


class Statuses:
    """The final statuses of responses in a row."""

    def __init__(self, text: bytes) -> None:
        self.found: list[int] = []
        self.parser: Any = httptools.HttpResponseParser(self)
        self.parser.feed_data(text)

    def on_headers_complete(self) -> None:
        if self.parser.get_status_code() >= 200:
            self.found.append(self.parser.get_status_code())


@settings(max_examples=120, deadline=None)
@given(st.lists(mutated(), min_size=1, max_size=3))
def test_the_backend_gets_one_well_formed_request_for_each_that_is_accepted(texts: list[bytes]) -> None:
    async def client(server: Http1Server, backend: Backend) -> None:
        for text in texts:
            before = len(backend.requests)
            found, _ = await sent(server, text)
            answered = Statuses(found).found if found else []
            assert len(backend.requests) - before == answered.count(200), (text, answered)
        reply, _ = await sent(server, b"GET /v2/models/next HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert reply.endswith(b'{"target":"/v2/models/next"}')

    proxied(client)

"""A backend that answers with anything: its answer is a response or an error, and the next caller's is its own."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.errors import BadReply, ConnectionLost, Expired
from backends.http_client import HttpClient
from tests.support.strategies import spoiled

POISON = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"


class Hostile(asyncio.Protocol):
    """Answers `/hostile` with `pieces`, and everything else with its own target."""

    transport: asyncio.Transport

    def __init__(self, pieces: list[bytes], said: asyncio.Event) -> None:
        self.pieces = pieces
        self.said = said

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for target in re.findall(rb"(?:GET|HEAD|POST) (\S+) HTTP/1\.1\r\n", data):
            if target == b"/hostile":
                self.said.clear()
                self.task = asyncio.ensure_future(self.say())
            else:
                self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(target), target))

    async def say(self) -> None:
        for piece in self.pieces:
            self.transport.write(piece)
            await asyncio.sleep(0)
        self.said.set()


async def after(pieces: list[bytes], method: str, streaming: bool) -> str:
    """What became of the hostile answer. The next two callers, on one connection at most, got their own."""
    said = asyncio.Event()
    said.set()  # the request may be too late to be sent at all
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Hostile(pieces, said), "127.0.0.1", 0)
    client = HttpClient(
        "127.0.0.1", server.sockets[0].getsockname()[1], now=time.monotonic, max_connections=1, max_response_bytes=1000
    )
    try:
        deadline = time.monotonic() + 0.05
        try:
            if streaming:
                stream = await client.stream(method, "/hostile", (), deadline=deadline)
                outcome = b"".join([chunk async for chunk in stream]).decode("latin-1")
            else:
                outcome = (await client.request(method, "/hostile", (), deadline=deadline)).body.decode("latin-1")
        except (BadReply, ConnectionLost, Expired) as failure:
            outcome = type(failure).__name__
        await said.wait()
        for own in ("/one", "/two"):
            response = await client.request("POST", own, (), b"x", deadline=time.monotonic() + 5)
            assert (response.status, response.body) == (200, own.encode()), pieces
        assert client.in_flight == 0
        return outcome
    finally:
        await client.close()
        server.close()


# What a hostile answer is taken for: its own body where there is one, else an error.
ANSWERS = {
    "two answers": (OK + POISON, "ok"),
    "more than was promised": (OK + b"more", "ok"),
    "a length and chunks": (CHUNKED + b"Content-Length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n" + POISON, "BadReply"),
    "chunks and a length": (HEAD + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n" + POISON, "BadReply"),
    "two lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: %d\r\n\r\nok" % len(POISON) + POISON, "BadReply"),
    "two lengths in one": (HEAD + b"Content-Length: 2, 2\r\n\r\nok" + POISON, "BadReply"),
    "a signed length": (HEAD + b"Content-Length: +2\r\n\r\nok" + POISON, "BadReply"),
    "a fold": (HEAD + b"X: y\r\n z\r\nContent-Length: 2\r\n\r\nok" + POISON, None),
    "a folded length": (HEAD + b"Content-Length:\r\n 2\r\n\r\nok" + POISON, None),
    "a space before the colon": (HEAD + b"Content-Length : 0\r\n\r\n" + POISON, "BadReply"),
    "bare LF": (HEAD + b"X: y\nContent-Length: 0\r\n\r\n" + POISON, "BadReply"),
    "bare CR": (HEAD + b"X: y\rContent-Length: 0\r\n\r\n" + POISON, "BadReply"),
    "NUL": (HEAD + b"X: \0\r\nContent-Length: 0\r\n\r\n" + POISON, "BadReply"),
    "chunked twice": (HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n" + POISON, "BadReply"),
    "chunked in two headers": (CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + POISON, None),
    "identity": (HEAD + b"Transfer-Encoding: identity\r\n\r\n" + POISON, "BadReply"),
    "xchunked": (HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + POISON, "BadReply"),
    "a bad chunk": (CHUNKED + b"\r\n-1\r\n" + POISON, "BadReply"),
    "a chunk longer than it says": (CHUNKED + b"\r\n1\r\nok\r\n0\r\n\r\n" + POISON, "BadReply"),
    "after the chunks": (CHUNKED + b"\r\n2\r\nok\r\n0\r\n\r\n" + POISON, "ok"),
    "in a trailer": (CHUNKED + b"\r\n2\r\nok\r\n0\r\nX: y\r\n\r\n" + POISON, "ok"),
    "a length in a trailer": (CHUNKED + b"\r\n2\r\nok\r\n0\r\nContent-Length: 6\r\n\r\n" + POISON, None),
    "interim answers for ever": (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 20_000 + POISON, "BadReply"),
    "an interim answer with a length": (b"HTTP/1.1 100 Continue\r\nContent-Length: 2\r\n\r\n" + OK + POISON, None),
    "another protocol": (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n" + POISON, "BadReply"),
    "no body, and one": (b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n" + POISON, ""),
    "unchanged, and a body": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\n" + POISON, ""),
    "a huge head": (HEAD + b"X: " + b"y" * 70_000 + b"\r\nContent-Length: 0\r\n\r\n" + POISON, "BadReply"),
    "a huge body": (HEAD + b"Content-Length: 2000\r\n\r\n" + b"x" * 2000 + POISON, "BadReply"),
    "a status that is none": (b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n" + POISON, "BadReply"),
    "another version": (b"HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\nok" + POISON, None),
    "HTTP/0.9": (b"<html>" + POISON, "BadReply"),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_no_answer_poisons_the_next(name: str) -> None:
    text, outcome = ANSWERS[name]
    found = asyncio.run(after([text], "GET", False))
    assert "poison" not in found
    if outcome is not None:  # else both are well, as long as the next answer is right
        assert found in (outcome, "Expired")  # the machine may be busy
    if name != "a huge body":  # a stream has no limit
        assert asyncio.run(after([text], "POST", True)) in (found, "Expired")


@pytest.mark.parametrize("text", [OK, CHUNKED + b"\r\n2\r\nok\r\n0\r\n\r\n", HEAD + b"\r\n", OK + POISON])
def test_a_body_that_answers_a_head_is_nobodys(text: bytes) -> None:
    assert asyncio.run(after([text], "HEAD", False)) in ("", "Expired")


PIECES = st.sampled_from(
    [
        b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b",", b"0", b"5", b"-", b"x", b"\xff", b"\r\n\r\n", b"0\r\n\r\n",
        b"Content-Length: 2\r\n", b"content-length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n",
        b"Connection: keep-alive, content-length\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.0 200 OK\r\n", POISON,
    ]
)  # fmt: skip


@st.composite
def hostile(draw: st.DrawFn) -> list[bytes]:
    """Some answers in a row, with a few pieces put in or cut out, in as many parts as may be."""
    whole = st.sampled_from([OK, CHUNKED + b"\r\n2\r\nok\r\n0\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n"])
    text = draw(spoiled(b"".join(draw(st.lists(whole, min_size=1, max_size=2))), PIECES))
    cuts = sorted(draw(st.sets(st.integers(1, len(text) + 1), max_size=3)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if text[a:b]]


@settings(max_examples=150, deadline=None)
@given(hostile(), st.sampled_from(["GET", "POST", "HEAD"]), st.booleans())
def test_whatever_comes_the_next_answer_is_the_callers_own(pieces: list[bytes], method: str, streaming: bool) -> None:
    asyncio.run(after(pieces or [OK], method, streaming))

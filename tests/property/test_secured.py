"""TLS changes nothing of what two protocols tell each other, however the wire cuts it, and tells a cut from an end."""

from __future__ import annotations

import asyncio
import ssl
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.secured import Secured
from backends.tls import client_context
from gateway.tls import server_context
from policies.spec import BackendTls, ListenTls
from tests.support.certificates import Authority, pem


@cache
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's and a client's."""
    with TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        server = ListenTls(*authority.pair("server", "here.test").pems())
        return server_context(server), client_context(BackendTls(pem(authority.ca)), "http/1.1")


class Wire(asyncio.Transport):
    """One end of a connection in memory: what is written waits in `sent` until the test hands it over."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.ended = self.closed = self.paused = False

    def write(self, data: Any) -> None:
        assert not self.ended
        self.sent += data

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return len(self.sent)


class End(asyncio.Protocol):
    """A protocol that remembers what it was told."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.made = self.ended = False
        self.lost: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert not self.made
        self.made = True

    def data_received(self, data: bytes) -> None:
        assert self.made
        assert not self.ended
        self.got += data

    def eof_received(self) -> None:
        self.ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


class Pair:
    """A server and a client, and the wires below them."""

    def __init__(self) -> None:
        self.told: list[Exception | None] = []
        self.ends = End(), End()
        made = [
            Secured(end, context, server_name=name, shaken=lambda _, error: self.told.append(error))
            for end, context, name in zip(self.ends, contexts(), (None, "here.test"), strict=True)
        ]
        self.server, self.client = made
        self.wires = Wire(), Wire()
        for secured, wire in zip(made, self.wires, strict=True):
            secured.connection_made(wire)

    def carry(self, sizes: list[int]) -> None:
        """Hands over all that is on the wires, in pieces of these sizes, in turn."""
        at = 0
        while any(wire.sent for wire in self.wires):
            for wire, other in ((self.wires[0], self.client), (self.wires[1], self.server)):
                size = sizes[at % len(sizes)]
                at += 1
                piece = bytes(wire.sent[:size])
                del wire.sent[:size]
                if piece:
                    other.data_received(piece)


SIZES = st.lists(st.integers(1, 40_000), min_size=1, max_size=8)
TALK = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 60_000), min_size=1, max_size=3)), max_size=6)


@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, talk=TALK, together=st.booleans(), notify=st.booleans())
def test_both_hear_what_the_other_said_and_only_a_word_is_an_end(
    sizes: list[int], talk: list[tuple[bool, list[int]]], together: bool, notify: bool
) -> None:
    pair = Pair()
    pair.carry(sizes)
    assert pair.told == [None, None]
    said = [bytearray(), bytearray()]
    for by_server, lengths in talk:
        parts = [bytes([len(said[by_server]) % 251]) * length for length in lengths]
        secured = pair.server if by_server else pair.client
        if together:
            secured.writelines(parts)
        else:
            for part in parts:
                secured.write(part)
        said[by_server] += b"".join(parts)
        pair.carry(sizes)
    assert [bytes(end.got) for end in pair.ends] == [bytes(each) for each in said]
    if notify:
        pair.server.close()
        pair.carry(sizes)
        assert pair.ends[1].ended
        assert pair.wires[1].closed
    else:
        pair.client.eof_received()  # of the transport below, without a word of TLS
        assert not pair.ends[1].ended
        assert pair.wires[1].closed
    for secured in (pair.server, pair.client):
        secured.connection_lost(None)
        secured.write(b"too late")
    assert [end.lost for end in pair.ends] == [[None], [None]]


@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, garbage=st.binary(min_size=1, max_size=64), early=st.booleans())
def test_garbage_ends_a_connection_once(sizes: list[int], garbage: bytes, early: bool) -> None:
    pair = Pair()
    if not early:
        pair.carry(sizes)
    pair.server.data_received(b"\0" + garbage * 400)
    pair.carry(sizes)
    assert pair.wires[0].closed
    pair.server.connection_lost(None)
    server, _ = pair.ends
    assert not server.got
    if early:
        assert isinstance(pair.told[0], ssl.SSLError)
        assert not server.made
        assert server.lost == []
    else:
        (error,) = server.lost
        assert isinstance(error, ssl.SSLError)


@settings(deadline=None, max_examples=30)
@given(sizes=SIZES, more=st.integers(1, 100_000))
def test_who_has_ended_can_count_what_still_comes(sizes: list[int], more: int) -> None:
    pair = Pair()
    pair.carry(sizes)
    pair.server.write(b"answer")
    pair.server.write_eof()
    pair.server.write_eof()
    pair.server.write(b"nothing more")
    assert pair.wires[0].ended
    pair.client.write(b"a" * more)
    # The client is handed nothing meanwhile: what it sent was on its way.
    piece = bytes(pair.wires[1].sent)
    pair.wires[1].sent.clear()
    pair.server.data_received(piece)
    assert len(pair.ends[0].got) >= more
    pair.carry(sizes)
    assert bytes(pair.ends[1].got) == b"answer"
    assert pair.ends[1].ended

"""Responses of every shape, whole and broken, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.errors import BadReply, ConnectionLost, Expired
from backends.http_connection import Connection
from backends.http_message import HttpResponse
from tests.unit.backends.http_peer import AGAIN, CLOSE, HOLD, OK, PAUSE, REQUEST, RESET, Peer, transcript, until

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@transcript
async def test_content_length() -> None:
    async with Peer() as peer:
        client = peer.client()
        expected = HttpResponse(200, ((b"content-type", b"text/plain"), (b"content-length", b"2")), b"ok")
        for _ in range(3):
            assert await client.request("GET", "/", ()) == expected
        assert len(peer.lines) == 1
        assert (client.in_flight, client.idle) == (0, 1)


@transcript
async def test_headers_of_the_connection_stay_here() -> None:
    reply = (
        b"HTTP/1.1 200 OK\r\nX-A:  1 \t\r\nConnection: keep-alive, X-Secret, content-length\r\n"
        b"Keep-Alive: timeout=5\r\nx-secret: 2\r\nUpgrade: h2c\r\nX-a: 3\r\nContent-Length: 0\r\n\r\n"
    )
    async with Peer([REQUEST, reply, AGAIN]) as peer:
        client = peer.client()
        for _ in range(2):
            response = await client.request("GET", "/", ())
            assert response.headers == ((b"x-a", b"1"), (b"x-a", b"3"), (b"content-length", b"0"))
        assert len(peer.lines) == 1


@transcript
async def test_chunked_with_extension_and_trailers() -> None:
    reply = CHUNKED + b"3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
    async with Peer([REQUEST, reply, AGAIN]) as peer:
        client = peer.client()
        for _ in range(2):
            assert await client.request("GET", "/", ()) == (200, (), b"abcde")
        assert len(peer.lines) == 1


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"])
@transcript
async def test_a_body_that_ends_with_the_connection(head: bytes) -> None:
    async with Peer([REQUEST, head, b"ab", PAUSE, b"c", CLOSE]) as peer:
        client = peer.client()
        for _ in range(2):
            assert (await client.request("GET", "/", ())).body == b"abc"
        assert len(peer.lines) == 2


@pytest.mark.parametrize(
    ("method", "reply"),
    [
        ("POST", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 103 Early\r\nX: 1\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("HEAD", b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n"),
    ],
)
@transcript
async def test_no_body(method: str, reply: bytes) -> None:
    """The connection serves a request with a body next, whichever way the head was cut."""
    for cut in range(0, len(reply), 7):
        async with Peer([REQUEST, reply[:cut], PAUSE, reply[cut:], REQUEST, OK]) as peer:
            client = peer.client()
            assert (await client.request(method, "/", ())).body == b""
            assert (await client.request("GET", "/", ())).body == b"ok"
            assert len(peer.lines) == 1


@pytest.mark.parametrize(
    ("method", "reply"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
        ("HEAD", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"),
        ("HEAD", b"HTTP/1.0 200 OK\r\n\r\n"),
        ("GET", b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"),
        ("GET", b"HTTP/1.1 200 OK\r\nConnection: X, Close\r\nContent-Length: 2\r\n\r\nok"),
        ("GET", OK + b"!"),
        ("GET", OK + b"HTTP"),
        ("GET", OK + OK),
        ("GET", CHUNKED + b"0\r\n\r\n" + OK),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\nX"),
    ],
)
@transcript
async def test_answered_but_not_reused(method: str, reply: bytes) -> None:
    async with Peer([REQUEST, reply, HOLD]) as peer:
        client = peer.client()
        for n in range(1, 3):
            assert (await client.request(method, "/", ())).status in (200, 204)
            assert (client.in_flight, client.idle) == (0, 0)
            assert len(peer.lines) == n
            await peer.lines[-1].lost.wait()


@transcript
async def test_keep_alive_of_http_1_0() -> None:
    reply = b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 2\r\n\r\nok"
    async with Peer([REQUEST, reply, AGAIN]) as peer:
        client = peer.client()
        for _ in range(2):
            assert (await client.request("GET", "/", ())).body == b"ok"
        assert len(peer.lines) == 1


@transcript
async def test_interim_responses_are_skipped() -> None:
    early = b"HTTP/1.1 100 Continue\r\nX-Early: 1\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    async with Peer([REQUEST, early[0], early[1], PAUSE, early[1], OK, AGAIN]) as peer:
        client = peer.client()
        for _ in range(2):
            response = await client.request("POST", "/", (), b"x")
            assert [name for name, _ in response.headers] == [b"content-type", b"content-length"]
        assert len(peer.lines) == 1


@pytest.mark.parametrize("reply", [OK, CHUNKED + b"2\r\nok\r\n0\r\nT: 1\r\n\r\n"])
@transcript
async def test_split_anywhere(reply: bytes) -> None:
    script: list[Any] = []
    for cut in range(1, len(reply)):
        script += [REQUEST, reply[:cut], PAUSE, reply[cut:]]
    async with Peer(script) as peer:
        client = peer.client()
        for _ in range(1, len(reply)):
            assert (await client.request("GET", "/", ())).body == b"ok"
        assert len(peer.lines) == 1


@transcript
async def test_single_bytes() -> None:
    reply = b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + b"5\r\nhello\r\n0\r\n\r\n"
    script: list[Any] = [REQUEST]
    for byte in reply:
        script += [bytes([byte]), PAUSE]
    async with Peer(script) as peer:
        assert (await peer.client().request("GET", "/", ())).body == b"hello"


@transcript
async def test_very_many_tiny_chunks_are_one_body() -> None:
    async with Peer([REQUEST, CHUNKED, b"1\r\nx\r\n" * 50_000, b"0\r\n\r\n"]) as peer:
        assert (await peer.client().request("GET", "/", ())).body == b"x" * 50_000


@transcript
async def test_a_response_before_the_request_is_sent_is_the_answer() -> None:
    reply = b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig"

    async def stop_reading(line: Any) -> None:
        line.transport.pause_reading()

    async with Peer([stop_reading, reply, HOLD]) as peer:
        client = peer.client()
        assert (await client.request("POST", "/", (), bytes(16 << 20)))[::2] == (413, b"big")
        assert (client.in_flight, client.idle) == (0, 0)
    keep = reply.replace(b"Connection: close\r\n", b"")
    async with Peer([stop_reading, keep, HOLD]) as peer:
        client = peer.client()
        assert (await client.request("POST", "/", (), [bytes(8 << 20), bytes(8 << 20)])).status == 413
        assert (client.in_flight, client.idle) == (0, 0), "what is not sent would come before the next request"


MALFORMED = [
    b"garbage\r\n\r\n",
    b"\0\0\0\0",
    b"SSH-2.0-x\r\n",
    b"HTTP/1.1 2x0 OK\r\n\r\n",
    b"HTTP/1.1 099 Low\r\n\r\n",
    b"HTTP/1.1 600 High\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nxyz",
    b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nBad Name: 1\r\n\r\n",
    b"HTTP/1.1 104 Odd\r\nContent-Length: 2\r\n\r\nab" + OK,
    CHUNKED + b"zz\r\n",
    CHUNKED + b"2\r\nokX",
    CHUNKED + b"fffffffffffffffff\r\n",
]


@pytest.mark.parametrize("reply", MALFORMED)
@transcript
async def test_malformed(reply: bytes) -> None:
    async with Peer([REQUEST, reply, HOLD]) as peer:
        client = peer.client()
        with pytest.raises(BadReply, match=f"127.0.0.1:{peer.port}"):
            await client.request("GET", "/", ())
        with pytest.raises(BadReply):
            async for _ in await client.stream("GET", "/", ()):
                pass
        assert (client.in_flight, client.idle) == (0, 0)


@pytest.mark.parametrize("end", [CLOSE, RESET])
@pytest.mark.parametrize(
    ("reply", "where"),
    [
        (b"", "before any of the response"),
        (b"HTTP/1.1 200 OK\r\nX", "within the response's headers"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", "after 3 of 5 bytes"),
        (b"HTTP/1.1 200 OK\r\nConnection: content-length\r\nContent-Length: 5\r\n\r\nabc", "after 3 of 5 bytes"),
        (CHUNKED + b"3\r\nabc\r\n", "after 3 bytes"),
        (CHUNKED + b"3\r\nabc\r\n0\r\n", "after 3 bytes"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "within the response's headers"),
    ],
)
@transcript
async def test_cut_short(reply: bytes, where: str, end: str) -> None:
    async with Peer([REQUEST, reply, PAUSE, end]) as peer:
        client = peer.client()
        with pytest.raises(ConnectionLost, match=where):
            await client.request("POST", "/", (), b"x")
        assert (client.in_flight, client.idle) == (0, 0)


@transcript
async def test_a_reset_is_no_end_of_a_body() -> None:
    async with Peer([REQUEST, b"HTTP/1.1 200 OK\r\n\r\nabc", PAUSE, RESET]) as peer:
        with pytest.raises(ConnectionLost, match="after 3 bytes"):
            await peer.client().request("GET", "/", ())


def endless(head: bytes, more: bytes) -> list[Any]:
    async def pour(line: Any) -> None:
        while not line.lost.is_set():
            line.transport.write(more * (20_000 // len(more)))
            await asyncio.sleep(0)

    return [REQUEST, head, pour]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (endless(b"HTTP/1.1 200 OK\r\n", b"X-Filler: 0123456789\r\n"), "headers above 65536 bytes"),
        (endless(b"HTTP/1.1 200 OK\r\nX: ", b"0123456789"), "headers above 65536 bytes"),
        (endless(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"), "headers above 65536 bytes"),
        ([REQUEST, b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", HOLD], "headers above 65536 bytes"),
        (
            [REQUEST, b"HTTP/1.1 200 OK\r\nContent-Length: 1000001\r\n\r\n", HOLD],
            "at most 1000000 bytes",
        ),
        (endless(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 1000), "at most 1000000 bytes"),
        (endless(CHUNKED, b"3e8\r\n" + b"x" * 1000 + b"\r\n"), "at most 1000000 bytes"),
        (endless(CHUNKED + b"0\r\n", b"X-Filler: 0123456789\r\n"), "more than 65536 bytes of framing"),
        (endless(CHUNKED + b"0\r\nX: ", b"0123456789"), "more than 65536 bytes of framing"),
        (endless(CHUNKED + b"1;x=", b"0123456789"), "more than 65536 bytes of framing"),
    ],
)
@transcript
async def test_limits(script: list[Any], said: str) -> None:
    async with Peer(script) as peer:
        client = peer.client(max_response_bytes=1_000_000)
        with pytest.raises(BadReply, match=said):
            await client.request("GET", "/", ())
        assert client.in_flight == 0
        await peer.lines[0].lost.wait()


@transcript
async def test_bodies_up_to_the_limits_pass() -> None:
    head = b"HTTP/1.1 200 OK\r\nX: " + b"x" * 60_000 + b"\r\nContent-Length: 1000000\r\n\r\n"
    async with Peer([REQUEST, head + b"x" * 1_000_000, AGAIN]) as peer:
        client = peer.client(max_response_bytes=1_000_000)
        for _ in range(2):
            assert len((await client.request("GET", "/", ())).body) == 1_000_000


@transcript
async def test_too_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.http_incoming.MAX_PIECES", 1000)
    async with Peer([REQUEST, CHUNKED + b"1\r\nx\r\n" * 1100, HOLD]) as peer:
        with pytest.raises(BadReply, match="more than 1000 pieces"):
            await peer.client().request("GET", "/", ())


@transcript
async def test_a_defect_in_a_callback_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Connection, data: bytes) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Connection, "on_body", broken)
    async with Peer() as peer:
        client = peer.client()
        with pytest.raises(ZeroDivisionError):
            await client.request("GET", "/", ())
        assert client.in_flight == 0


@pytest.mark.parametrize("stray", [b"HTTP/1.1 408 Timeout\r\n\r\n", b"\r\n"])
@transcript
async def test_bytes_that_nobody_asked_for_close_an_idle_connection(stray: bytes) -> None:
    async with Peer([REQUEST, OK, PAUSE, stray, HOLD], [REQUEST, OK]) as peer:
        client = peer.client()
        await client.request("GET", "/", ())
        await until(lambda: client.idle == 0)
        await peer.lines[0].lost.wait()
        assert (await client.request("POST", "/", ())).body == b"ok"


SEEDS = [
    OK,
    CHUNKED + b"3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\nabc",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    *MALFORMED,
]


async def survive(reply: bytes, method: str, streaming: bool, end: str, cut: int) -> None:
    """Whatever comes, the outcome is a response or one of the errors, in time, and nothing is left behind."""
    async with Peer([REQUEST, reply[:cut], *([PAUSE] if cut % 2 else []), reply[cut:], end]) as peer:
        client = peer.client(max_response_bytes=10_000, max_header_bytes=1000)
        deadline = time.monotonic() + (0.02 if end is HOLD else 2.0)
        with contextlib.suppress(BadReply, ConnectionLost, Expired):
            async with asyncio.timeout(3):
                if streaming:
                    async for chunk in await client.stream(method, "/", (), deadline=deadline):
                        assert chunk
                else:
                    response = await client.request(method, "/", (), deadline=deadline)
                    assert 200 <= response.status < 600
                    assert method != "HEAD" or not response.body
        assert client.in_flight == 0


def mutated(random: random.Random) -> bytes:
    data = bytearray(random.choice(SEEDS))
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) + 1)
        match random.randrange(4):
            case 0:
                data[at:at] = random.choice([b"\r\n", b"\n", b"\r", b":", b" ", b"0", b"\0", b"\xff", b"HTTP/1.1 "])
            case 1:
                del data[at : at + random.randint(1, 8)]
            case 2:
                data[at : at + 1] = bytes([random.randrange(256)])
            case _:
                data[at:at] = random.choice(SEEDS)[: random.randint(1, 40)]
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
@transcript
async def test_mutated_responses(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(120):
        reply = mutated(chance)
        method, end = chance.choice(["GET", "POST", "HEAD"]), chance.choice([CLOSE, CLOSE, RESET, HOLD])
        await survive(reply, method, chance.random() < 0.5, end, chance.randrange(len(reply) + 1))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200), st.sampled_from(["GET", "HEAD"]), st.booleans(), st.integers(0, 200))
def test_any_bytes(reply: bytes, method: str, streaming: bool, cut: int) -> None:
    asyncio.run(survive(b"HTTP/1.1 200 OK\r\n" * (cut % 3 == 0) + reply, method, streaming, CLOSE, cut))

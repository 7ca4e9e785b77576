"""Our HTTP/1.1 server under TLS: handshakes that fail, and how connections end. Over real sockets, on both loops."""

# ruff: noqa: F811 - a fixture is imported under the name that tests ask for it by

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.server import Receive, Scope, Send
from policies.spec import ListenTls
from tests.support.certificates import Authority, pem
from tests.support.garbage import garbage
from tests.support.http1 import (
    CHUNKED,
    HEAD,
    Rig,
    answer,
    bodies,
    echo,
    ignoring,
    read,
    reset,
    serving,  # noqa: F401
    until,
)

GET = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"


class Place:
    """An authority, and what the server shows of it."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.stranger = Authority(folder, "stranger")
        server = self.authority.pair("server", "127.0.0.1")
        self.plain = ListenTls(*server.pems())
        self.mutual = ListenTls(*server.pems(), pem(self.authority.ca))
        self.renewed = ListenTls(*self.stranger.pair("renewed", "127.0.0.1").pems(), pem(self.stranger.ca))
        self.client = self.authority.pair("client")
        self.trusting = self.authority.trusting()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("tls"))


async def open_tls(rig: Rig, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port, ssl=context)
    rig._writers.append(writer)
    return reader, writer


def asked(port: int, context: ssl.SSLContext, *parts: bytes, more: bytes = b"", pause: float = 0) -> bytes:
    """All that comes back until the server says that it ends, which it must say; `more` is sent afterwards.

    In a thread, with a plain socket: both event loops end their own way of a connection with the other, and uvloop
    loses what a paused reader has not taken by then. `pause` is after each read of the first two million bytes.
    """
    got = bytearray()
    with socket.socket() as raw:
        raw.settimeout(10)
        if pause:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        raw.connect(("127.0.0.1", port))
        with context.wrap_socket(raw, server_hostname="127.0.0.1", suppress_ragged_eofs=False) as client:
            for part in parts:
                client.sendall(part)
            while part := client.recv(1 << 20):
                if len(got) < 2_000_000:
                    time.sleep(pause)
                got += part
            client.sendall(more)
    return bytes(got)


async def ask(rig: Rig, context: ssl.SSLContext, *parts: bytes, **more: Any) -> bytes:
    return await asyncio.to_thread(asked, rig.server.port, context, *parts, **more)


async def one(rig: Rig, context: ssl.SSLContext) -> bytes:
    """The body of one answer."""
    return bodies(await ask(rig, context, GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")))[0]


def test_requests_are_answered_and_know_that_it_is_https(serving: Any, place: Place) -> None:
    schemes = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        schemes.append(scope["scheme"])
        await echo(scope, receive, send)

    async def client(rig: Rig) -> None:
        body = bytes(range(256)) * 800
        head = HEAD + b"content-length: %d\r\n" % len(body)
        reply = await ask(rig, place.trusting, head + b"\r\n" + body, GET, head + b"connection: close\r\n\r\n", body)
        assert bodies(reply) == [b"/=" + body, b"/x=", b"/=" + body]
        reader, writer = await open_tls(rig, place.trusting)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() is None  # it was not asked for one
        writer.write(CHUNKED)
        for byte in b"5\r\nhello\r\n0\r\n\r\n":
            writer.write(bytes((byte,)))
        assert b"/=hello" in await reader.readuntil(b"hello")

    serving(app, client, tls=place.plain)
    assert schemes == ["https"] * 4
    serving(app, lambda rig: rig.ask(GET.replace(b"1.1", b"1.0")))
    assert schemes[4:] == ["http"]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
def test_mutual_tls_takes_clients_of_its_authority_alone(serving: Any, place: Place, version: ssl.TLSVersion) -> None:
    def limited(context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = context.maximum_version = version
        return context

    async def client(rig: Rig) -> None:
        known = limited(place.authority.trusting(place.client))
        strange = limited(place.authority.trusting(place.stranger.pair("intruder")))
        late = limited(place.authority.trusting(place.authority.pair("late", expired=True)))
        for context in (limited(place.authority.trusting()), strange, late):
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                await one(rig, context)
            assert await one(rig, known) == b"/x="
        assert not rig.server.shaking
        assert rig.reported == []

    serving(echo, client, tls=place.mutual)


@pytest.mark.parametrize(
    "said", [b"", GET, b"\x16\x03\x01\x00\x05hello", b"\0" * 100_000], ids=["none", "http", "odd", "0"]
)
@pytest.mark.parametrize("leave", ["close", "reset", "stay"])
def test_a_failed_handshake_disturbs_nobody(serving: Any, place: Place, said: bytes, leave: str) -> None:
    async def client(rig: Rig) -> None:
        reader, writer = await open_tls(rig, place.trusting)
        raw = await rig.raw()
        await asyncio.get_running_loop().sock_sendall(raw, said)
        if leave == "close":
            raw.close()
        elif leave == "reset":
            reset(raw)
        else:
            await until(lambda: not said or not rig.server.shaking)
        writer.write(GET)
        assert b"/x=" in await reader.readuntil(b"/x=")
        await until(lambda: not rig.server.shaking or (leave == "stay" and not said))
        raw.close()
        assert len(rig.server.connections) == 1
        assert rig.reported == []

    serving(echo, client, tls=place.plain)


def test_a_handshake_has_the_time_of_a_head(serving: Any, place: Place) -> None:
    async def client(rig: Rig) -> None:
        raw = await rig.raw()
        await asyncio.get_running_loop().sock_sendall(raw, b"\x16")  # the first byte of a handshake, and no more
        await until(lambda: rig.server.shaking)
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(raw, 1), 5) == b""
        assert not rig.server.shaking
        raw.close()

    serving(echo, client, tls=place.plain, head_seconds=0.1)


def test_the_servers_end_does_not_wait_for_handshakes(serving: Any, place: Place) -> None:
    async def client(rig: Rig) -> None:
        raw = await rig.raw()
        await until(lambda: rig.server.shaking)
        began = time.monotonic()
        await rig.server.close()
        assert time.monotonic() - began < 1
        raw.close()

    serving(echo, client, tls=place.plain, drain_seconds=20)


def test_who_comes_after_a_renewal_is_shown_another_certificate(serving: Any, place: Place) -> None:
    async def client(rig: Rig) -> None:
        known = place.authority.trusting(place.client)
        reader, writer = await open_tls(rig, known)
        rig.server.renew(place.renewed)
        with pytest.raises(ssl.SSLCertVerificationError):
            await one(rig, known)
        # The authority of clients is another one, too.
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await one(rig, place.stranger.trusting(place.client))
        assert await one(rig, place.stranger.trusting(place.stranger.pair("friend"))) == b"/x="
        writer.write(GET)  # who was there before goes on
        assert b"/x=" in await reader.readuntil(b"/x=")

    serving(echo, client, tls=place.mutual)


# Ends.


@pytest.mark.parametrize("leave", ["notify", "fin", "rst"])
def test_a_client_that_leaves_has_its_task_cancelled_at_once(serving: Any, place: Place, leave: str) -> None:
    cancelled: list[float] = []
    started = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(time.monotonic())
            raise

    async def client(rig: Rig) -> None:
        _, writer = await open_tls(rig, place.trusting)
        writer.write(GET)
        await started.wait()
        left = time.monotonic()
        if leave == "notify":
            writer.close()
        elif leave == "fin":
            writer.transport.abort()
        else:
            linger = b"\1\0\0\0\0\0\0\0"
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        await until(lambda: cancelled)
        assert cancelled[0] - left < 0.1
        await until(lambda: not rig.server.connections)

    serving(app, client, tls=place.plain)


def test_an_early_answer_reaches_who_still_sends_and_ends_in_order(serving: Any, place: Place) -> None:
    async def client(rig: Rig) -> None:
        part = HEAD + b"content-length: 9000000\r\n\r\n" + b"a" * 1000
        reply = await ask(rig, place.trusting, part, more=b"a" * 8_000_000)  # the answer was no reset for who goes on
        assert reply.startswith(b"HTTP/1.1 413 ")
        assert bodies(reply) == [b"no"]
        await until(lambda: not rig.server.connections)

    serving(ignoring, client, tls=place.plain)


def test_who_stays_after_the_answer_is_cut_off_in_time(serving: Any, place: Place) -> None:
    async def client(rig: Rig) -> None:
        raw = await rig.raw()
        raw.setblocking(True)
        secured = await asyncio.to_thread(place.trusting.wrap_socket, raw, server_hostname="127.0.0.1")
        secured.sendall(HEAD + b"content-length: 9000000\r\n\r\n" + b"a" * 1000)
        await until(lambda: rig.server.connections)
        await until(lambda: not rig.server.connections, seconds=4)
        secured.close()

    serving(ignoring, client, tls=place.plain, head_seconds=0.2)


def test_an_answer_that_is_cut_is_not_taken_for_a_whole_one(serving: Any, place: Place) -> None:
    """To HTTP/1.0, where the end of the connection is the end of the body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": scope["path"] == "/x"})

    async def client(rig: Rig) -> None:
        with pytest.raises((ConnectionResetError, ssl.SSLError)):
            await ask(rig, place.trusting, GET.replace(b"1.1", b"1.0"))
        whole = await ask(rig, place.trusting, GET.replace(b"1.1", b"1.0").replace(b"/x", b"/y"))
        assert whole.endswith(b"\r\n\r\nhalf")

    serving(app, client, tls=place.plain)


def test_a_slow_reader_gets_the_whole_of_a_last_answer(serving: Any, place: Place) -> None:
    """What is unsent when the connection ends leaves as long as its client takes any of it."""
    body = bytes(range(256)) * 40_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, body)

    async def client(rig: Rig) -> None:
        last = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        assert bodies(await ask(rig, place.trusting, last, pause=0.01)) == [body]

    serving(app, client, tls=place.plain, head_seconds=0.3, stall_seconds=1)


def test_one_that_reads_nothing_is_cut_off(serving: Any, place: Place) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"a" * 100_000, "more_body": True})

    async def client(rig: Rig) -> None:
        _, writer = await open_tls(rig, place.trusting)
        writer.transport.pause_reading()
        writer.write(GET)
        await until(lambda: rig.server.connections)
        await until(lambda: not rig.server.connections, seconds=6)

    serving(app, client, tls=place.plain, stall_seconds=0.3)


def test_a_body_waits_for_its_reader(serving: Any, place: Place) -> None:
    """Reading is paused under TLS as it is without: a sender cannot fill memory."""
    go = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await answer(send, b"%d" % len(await read(receive)))

    async def client(rig: Rig) -> None:
        reader, writer = await open_tls(rig, place.trusting)
        size = 32 << 20
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % size)
        writer.write(b"a" * size)
        await until(lambda: rig.server.connections)
        (connection,) = rig.server.connections
        await until(lambda: connection._held)
        held = connection.busy._size  # type: ignore[union-attr]
        await asyncio.sleep(0.05)
        assert connection.busy._size == held < 2 << 20  # type: ignore[union-attr]
        go.set()
        assert b"\r\n\r\n33554432" in await reader.readuntil(b"33554432")

    serving(app, client, tls=place.plain)


def test_a_connection_leaves_no_cycles(serving: Any, place: Place) -> None:
    async def client(rig: Rig) -> Any:
        await one(rig, place.trusting)
        gc.collect()
        with garbage() as left:
            for _ in range(5):
                await one(rig, place.trusting)
            await until(lambda: not rig.server.connections)
        return left

    left = serving(echo, client, tls=place.plain)
    assert not [each for each in left if type(each).__name__ in ("Secured", "Connection", "Exchange")]


def test_what_is_in_flight_is_answered_before_the_servers_end(serving: Any, place: Place) -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/x":
            started.set()
            await go.wait()
        await answer(send, b"in time")

    async def client(rig: Rig) -> None:
        await open_tls(rig, place.trusting)
        asking = asyncio.create_task(ask(rig, place.trusting, GET))
        await started.wait()
        closing = asyncio.create_task(rig.server.close())
        await until(lambda: len(rig.server.connections) == 1)  # the idle one is closed at once
        go.set()
        assert bodies(await asking) == [b"in time"]
        await asyncio.wait_for(closing, 5)
        assert rig.reported == []

    serving(app, client, tls=place.plain, drain_seconds=10)

"""The HTTP server: what it refuses before there is a request."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from gateway.http1 import Http1Server
from gateway.server import HttpServer, Receive, Scope, Send, listen
from policies.spec import Address


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


async def exchange(port: int, *parts: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(100_000), 5)
    finally:
        writer.close()


@pytest.fixture(params=["own", "uvicorn"])
def serving(request: pytest.FixtureRequest) -> Any:
    """Runs a client against an application behind either server."""

    def make(app: Any) -> Any:
        address = Address("127.0.0.1", 0)
        if request.param == "uvicorn":
            return HttpServer(app, address, 1)
        return Http1Server(app, address, 1, now=time.monotonic, report=_defect)

    return lambda app, client: _served(make, app, client)


def _defect(error: BaseException) -> None:
    raise error


def _served(make: Any, app: Any, client: Any) -> Any:
    async def run() -> Any:
        server = make(app)
        await server.start()
        try:
            return await client(server.port)
        finally:
            await server.close()

    return asyncio.run(run())


def test_a_head_of_60_kib_is_read_and_a_larger_one_is_431(serving: Any) -> None:
    async def client(port: int) -> tuple[bytes, bytes]:
        line = b"x-%d: " + b"a" * 1000 + b"\r\n"
        fine = b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(line % i for i in range(60)) + b"\r\n"
        bomb = b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 200_000
        return await exchange(port, fine), await exchange(port, bomb)

    fine, bomb = serving(hello, client)
    assert fine.startswith(b"HTTP/1.1 200")
    assert bomb.startswith(b"HTTP/1.1 431")
    head, _, content = bomb.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(content) in head


@pytest.mark.parametrize("serving", ["own"], indirect=True)
def test_a_client_that_leaves_ends_its_task(serving: Any) -> None:
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.set()

    async def client(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.wait_for(ended.wait(), 1)

    serving(app, client)


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    taken = listen(Address("127.0.0.1", 0))
    port = taken.getsockname()[1]
    try:
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            listen(Address("127.0.0.1", port))
    finally:
        taken.close()


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body, and with the names of the headers once the body has been read."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    body += b"|" + b",".join(name for name, _ in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def test_an_upgrade_that_nobody_offers_is_ignored_and_its_body_is_not(serving: Any) -> None:
    async def client(port: int) -> bytes:
        head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nUpgrade: h2c\r\ncontent-length: 5\r\n\r\n"
        return await exchange(port, head + b"hello")

    assert b"hello|" in serving(echo, client)


def test_trailers_are_no_headers(serving: Any) -> None:
    async def client(port: int) -> bytes:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        return await exchange(port, head, b"2\r\nhi\r\n0\r\nheadrace-timeout-ms: 1\r\n\r\n")

    reply = serving(echo, client)
    assert b"hi|" in reply
    assert b"headrace-timeout-ms" not in reply


def test_what_is_no_http_gets_one_line(serving: Any) -> None:
    async def client(port: int) -> bytes:
        return await exchange(port, b"\x16\x03\x01 hello\r\n\r\n")

    reply = serving(hello, client)
    assert reply.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert reply.endswith(b'{"error":"expected an HTTP/1.1 request, got something else"}')


@pytest.mark.parametrize("serving", ["own"], indirect=True)
def test_pipelined_requests_of_a_client_that_leaves_all_end(serving: Any) -> None:
    started, ended = [], []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        started.append(scope["path"])
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append(scope["path"])

    async def client(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % i for i in range(3)))
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.1)

    serving(app, client)
    assert (started, ended) == (["/0"], ["/0"])

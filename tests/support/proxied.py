"""The HTTP edge and the HTTP client, before a backend that takes nothing but well-formed requests and records them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from backends.http_client import HttpClient
from backends.triton_http import TritonHttp
from gateway.admit import InFlight
from gateway.body import Bodies
from gateway.http import HttpEdge
from gateway.http1 import Http1Server
from policies.spec import Address, Limits

_LINE = re.compile(rb"([A-Z]+) (/[!-~]*) HTTP/1\.1")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+): ([^\r\n\0]*)")
_OF_ONE_HOP = {b"transfer-encoding", b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"proxy-connection"}


class Recorder(asyncio.Protocol):
    """One connection of the backend. A byte that is no part of a well-formed request is a failure of the test."""

    transport: asyncio.Transport

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.data = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        try:
            while self.one():
                pass
        except AssertionError as error:
            self.backend.failures.append(error)
            self.transport.abort()

    def one(self) -> bool:
        head, blank, rest = self.data.partition(b"\r\n\r\n")
        if not blank:
            assert b"\r\n" not in self.data or _LINE.match(self.data), self.data
            return False
        first, *lines = head.split(b"\r\n")
        line = _LINE.fullmatch(first)
        assert line, first
        headers = []
        for text in lines:
            header = _HEADER.fullmatch(text)
            assert header, text
            headers.append((header[1].lower(), header[2]))
        names = [name for name, _ in headers]
        assert names.count(b"content-length") <= 1, names
        assert names.count(b"host") == 1, names
        assert not _OF_ONE_HOP & set(names), names
        size = int(dict(headers).get(b"content-length", 0))
        if len(rest) < size:
            return False
        self.data = rest[size:]
        self.backend.requests.append((line[2], rest[:size]))
        body = b'{"target":"%b"}' % line[2]
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        return True


class Backend:
    """What came: targets and bodies; and what should never have come."""

    def __init__(self) -> None:
        self.requests: list[tuple[bytes, bytes]] = []
        self.failures: list[AssertionError] = []


def _raise(error: BaseException) -> None:
    raise error


def proxied(client: Callable[[Http1Server, Backend], Awaitable[Any]]) -> Any:
    """Runs `client` against the edge before a backend of its own."""

    async def run() -> Any:
        backend = Backend()
        peer = await asyncio.get_running_loop().create_server(lambda: Recorder(backend), "127.0.0.1", 0)
        upstream = HttpClient("127.0.0.1", peer.sockets[0].getsockname()[1], now=time.monotonic)
        edge = HttpEdge(
            TritonHttp(upstream, time.monotonic),
            now=time.monotonic,
            bodies=Bodies(lambda: Limits(body_bytes=1 << 20), InFlight()),
            ready=lambda: True,
            decision_headers=lambda reply: (),
            refused=lambda failure: None,
            report=_raise,
        )
        server = Http1Server(edge, Address("127.0.0.1", 0), 1, now=time.monotonic, report=_raise)
        await server.start()
        try:
            return await client(server, backend)
        finally:
            await server.close()
            await upstream.close()
            peer.close()
            assert not backend.failures, backend.failures

    return asyncio.run(run())


async def sent(server: Http1Server, text: bytes) -> tuple[bytes, bool]:
    """All that comes back until the server closes, or has nothing left to do; whether it closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    found = b""
    own = writer.get_extra_info("sockname")
    try:
        writer.write(text)
        while True:
            try:
                data = await asyncio.wait_for(reader.read(1 << 20), 0.03)
            except TimeoutError:
                # Where it is not there it has not been accepted yet, or is about to end.
                there = [connection for connection in server.connections if connection._peer == own]
                if there and not (there[0].busy and there[0].busy.complete):
                    return found, False
                continue
            if not data:
                return found, True
            found += data
    finally:
        writer.close()

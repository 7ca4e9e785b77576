"""A scripted HTTP server on 127.0.0.1: each connection plays the next of the scripts, step by step.

    async with Peer([REQUEST, OK, REQUEST, CLOSE], [REQUEST, OK]) as peer: ...

A step is bytes to send, one of the words below, or a coroutine function that takes the `Line`. The last script serves
all further connections.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import uvloop

from backends.http_client import HttpClient
from tests.support import waiting

REQUEST = "await one whole request"
PAUSE = "let the client read what was sent"
HOLD = "wait until the client closes"
CLOSE = "close"
RESET = "close with a TCP reset"
AGAIN = "begin this script again"

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok"


class Line(asyncio.Protocol):
    """The server's end of one connection: the requests that came, and what of the last is not whole."""

    transport: Any

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.buffer = bytearray()
        self.requests: list[bytes] = []
        self.news = asyncio.Event()
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.script = self.peer.scripts[min(len(self.peer.lines), len(self.peer.scripts) - 1)]
        self.peer.lines.append(self)
        self.task = asyncio.ensure_future(self.play())

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self.news.set()

    async def play(self) -> None:
        steps = list(self.script)
        while steps and not self.lost.is_set():
            step = steps.pop(0)
            if isinstance(step, bytes):
                self.transport.write(step)
            elif step is REQUEST:
                await self.request()
            elif step is PAUSE:
                await asyncio.sleep(0.002)
            elif step is HOLD:
                await self.lost.wait()
            elif step is CLOSE:
                self.transport.close()
            elif step is RESET:
                linger = struct.pack("ii", 1, 0)
                self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.transport.abort()
            elif step is AGAIN:
                steps = list(self.script)
            else:
                await step(self)

    async def request(self) -> None:
        while not self.lost.is_set():
            head, blank, _ = bytes(self.buffer).partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            size = len(head) + 4 + (int(length[1]) if length else 0)
            if blank and len(self.buffer) >= size:
                self.requests.append(bytes(self.buffer[:size]))
                del self.buffer[:size]
                return
            self.news.clear()
            await self.news.wait()


class Peer:
    """The server; `lines` are its connections in the order they came."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = scripts or ([REQUEST, OK, AGAIN],)
        self.lines: list[Line] = []

    async def __aenter__(self) -> Peer:
        self.server = await asyncio.get_running_loop().create_server(lambda: Line(self), "127.0.0.1", 0)
        self.port: int = self.server.sockets[0].getsockname()[1]
        self.clients: list[HttpClient] = []
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.close()
            assert client.in_flight == client.idle == 0
        self.server.close()
        for line in self.lines:
            line.transport.abort()
            await line.lost.wait()
            line.task.cancel()
        await asyncio.gather(*(line.task for line in self.lines), return_exceptions=True)
        await self.server.wait_closed()

    def client(self, **options: Any) -> HttpClient:
        """A client of this server, closed with it."""
        client = HttpClient("127.0.0.1", self.port, now=options.pop("now", time.monotonic), **options)
        self.clients.append(client)
        return client


async def echo(line: Any) -> None:
    """A step: answer with the body that came."""
    body = line.requests[-1].partition(b"\r\n\r\n")[2]
    line.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


until = partial(waiting.until, seconds=2.0)


def transcript(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """An async test, run on both event loops and never for longer than 20 seconds."""

    async def bounded(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(20):
            await test(*args, **kwargs)

    @functools.wraps(test)
    def run(*args: Any, loop: Any, **kwargs: Any) -> None:
        loop.run(bounded(*args, **kwargs))

    own = inspect.signature(test)
    added = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), added])  # type: ignore[attr-defined]
    pytest.mark.parametrize("loop", [asyncio, uvloop], ids=["asyncio", "uvloop"])(run)  # marks `run` itself
    return run

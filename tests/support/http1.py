"""Our HTTP/1.1 server over real sockets, on both event loops, with the applications that its tests put behind it."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import uvloop

from gateway.http1 import Http1Server
from gateway.server import Receive, Scope, Send
from policies.spec import Address
from tests.support import waiting

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
UPGRADE = HEAD + b"connection: Upgrade, HTTP2-Settings\r\nUPGRADE: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
REFUSED = b'{"error":"expected an HTTP/1.1 request, got something else"}'


class Rig:
    """A server, what it reported, and the clients that the test opened."""

    def __init__(self, server: Http1Server, reported: list[BaseException]) -> None:
        self.server = server
        self.reported = reported
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host = self.server._address.host  # type: ignore[union-attr]
        reader, writer = await asyncio.open_connection(host, self.server.port)
        self._writers.append(writer)
        return reader, writer

    async def ask(self, *parts: bytes, pause: float = 0.0) -> bytes:
        """All that comes back until the server closes."""
        reader, writer = await self.open()
        for part in parts:
            writer.write(part)
            if len(parts) > 1:
                await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 5)

    async def raw(self) -> socket.socket:
        """A socket that reads and sends nothing by itself."""
        client = socket.socket()
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.server.port))
        return client

    def sweep(self) -> None:
        for connection in list(self.server.connections):
            connection.sweep(time.monotonic())

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def serving(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Runs `client(rig)` against `app`, on either event loop; nothing may be left when both are over."""

    def served(app: Any, client: Callable[[Rig], Awaitable[Any]], host: str = "127.0.0.1", **limits: Any) -> Any:
        async def run() -> Any:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
            drain = limits.pop("drain_seconds", 1)
            server = Http1Server(
                app, Address(host, 0), drain, now=time.monotonic, report=reported.append, **limits
            )  # fmt: skip
            await server.start()
            rig = Rig(server, reported)
            try:
                return await client(rig)
            finally:
                rig.close()
                await asyncio.wait_for(server.close(), drain + 3)
                assert not server.connections
                left = asyncio.all_tasks() - {asyncio.current_task()}
                assert not left, left

        told: list[dict[str, Any]] = []
        reported: list[BaseException] = []
        with asyncio.Runner(loop_factory=request.param) as runner:
            result = runner.run(run())
        assert not told, told
        return result

    return served


async def answer(send: Send, body: bytes, *headers: tuple[bytes, bytes], status: int = 200) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        body += message["body"]
        more = message["more_body"]
    return body


class Waiting:
    """An application that waits in one way or another; counts how its tasks end."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.started = self.cancelled = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started += 1
        try:
            if self.how == "body":
                await read(receive)
                await asyncio.sleep(0)
            elif self.how in ("stream", "slow reader"):
                await send({"type": "http.response.start", "status": 200, "headers": []})
                size = 10 if self.how == "stream" else 100_000
                while True:
                    await send({"type": "http.response.body", "body": b"a" * size, "more_body": True})
                    await asyncio.sleep(0.005)
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """The path, and the body once it has been read."""
    body = await read(receive)
    await answer(send, scope["raw_path"] + b"=" + body)


async def ignoring(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without reading the body."""
    await answer(send, b"no", status=413)


def bodies(reply: bytes) -> list[bytes]:
    """The bodies of responses that say their length."""
    found = []
    while reply:
        head, _, reply = reply.partition(b"\r\n\r\n")
        if b" 100 Continue" in head:
            continue
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        found.append(reply[:length])
        reply = reply[length:]
    return found


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def depart(client: socket.socket, how: str) -> None:
    """The client resets its connection (`rst`), closes it (`fin`), or says that it sends no more."""
    if how == "rst":
        reset(client)
    elif how == "fin":
        client.close()
    else:
        client.shutdown(socket.SHUT_WR)


until = partial(waiting.until, seconds=1.0)

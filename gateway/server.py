"""What an HTTP server is here, and uvicorn as one, for the admin and metrics ports; `http1` is the public port's.

A server runs in the loop that is there, without signal handlers of its own; `close` answers what is in flight first.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.sockets import bound
from policies.spec import Address

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

# A callable in the scope of servers that can tell: the whole body where it is there already, else None.
WHOLE = "headrace.whole"

# Longer than clients and load balancers keep idle connections (60 s is common), so that they close first.
KEEP_ALIVE_SECONDS = 75
# The largest head, or trailers, that are read; proxies before us allow as much at most.
MAX_HEAD_BYTES = 64 * 1024
# How long a new connection, an unfinished head, or lingering may take.
HEAD_SECONDS = 30
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, stricter with heads.

    A head is bounded in size and in time; trailers are dropped; an upgrade that nobody offers is ignored, its body is
    not.
    """

    _head_bytes = 0
    _in_head = _in_body = False
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def data_received(self, data: bytes) -> None:
        if self._late is not None and not self._in_head:
            self._late.cancel()
            self._late = None
        if b"pgrade:" in data and not self._in_body:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-upgrade-ignored:", head) + end + rest
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"request head: expected at most {MAX_HEAD_BYTES} bytes, got more")
            elif self._late is None:
                self._late = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        if self._late is not None:
            self._late.cancel()
            self._late = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self.pipeline.clear()
        super().connection_lost(exc)
        if self._late is not None:
            self._late.cancel()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "expected an HTTP/1.1 request, got something else")

    def _head_is_late(self) -> None:
        self._late = None
        self._refuse(408, f"request head: expected all of it within {HEAD_SECONDS} s")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        body = msgspec.json.encode({"error": message})
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """One listener, of a port alone or `shared` with other processes, or of a Unix socket.

    `start` raises OSError, naming the address, where it is taken.
    """

    def __init__(self, app: Asgi, address: Address | Path, drain_seconds: int, *, shared: bool = False) -> None:
        self._address = address
        self._shared = shared
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=drain_seconds,
            )
        )
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        listener = listen(self._address, shared=self._shared)
        if isinstance(self._address, Address):
            self.port = listener.getsockname()[1]
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise OSError(f"the HTTP server on {self._address} ended at once")
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Refuses new connections, answers what is in flight until the drain time is over."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def listen(address: Address | Path, *, shared: bool = False) -> socket.socket:
    """A bound, listening socket (see `bound`). Raises OSError, naming the address."""
    listener = bound(address, shared=shared)
    try:
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from None
    listener.setblocking(False)
    return listener

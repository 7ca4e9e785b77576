"""HTTP servers: ASGI under uvicorn, behind this one module so that it can be replaced.

A server runs in the loop that is there, without signal handlers of its own; `close` answers what is in flight first.
An application that wants to end when its client leaves puts its task into `scope[TASK]`: it is cancelled then.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from policies.spec import Address

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

TASK = "headrace.task"

# Longer than clients and load balancers keep idle connections (60 s is common), so that they close first.
_KEEP_ALIVE_SECONDS = 75


class _Protocol(HttpToolsProtocol):
    def connection_lost(self, exc: Exception | None) -> None:
        cycle = self.cycle
        super().connection_lost(exc)
        if cycle is not None and not cycle.response_complete:
            task = cycle.scope.get(TASK)
            if isinstance(task, asyncio.Task):
                task.cancel()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """One listener. `start` raises OSError, naming the address, where the port is taken."""

    def __init__(self, app: Asgi, address: Address, drain_seconds: int) -> None:
        self._address = address
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
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=drain_seconds,
            )
        )
        self._task: asyncio.Task[None] | None = None
        self.port = address.port

    async def start(self) -> None:
        listener = listen(self._address)
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


def listen(address: Address) -> socket.socket:
    """A bound, listening socket."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from None
    listener.setblocking(False)
    return listener

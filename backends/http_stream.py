"""A response that is read while it comes: the state that a connection fills and the iterator that a reader holds.

The two are apart so that a stream which nobody holds any more is noticed at once: the connection knows only the
`Inflow`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

from backends.errors import ConnectionLost
from backends.http_message import Headers

Waiter = asyncio.Future[Any]


class Source(Protocol):
    """What a stream asks of its connection; `waiter` is the token of the exchange."""

    def resume(self, waiter: Waiter) -> None: ...

    def cancel(self, waiter: Waiter) -> None: ...


class Inflow:
    """A streamed response between the connection, which fills it, and its one reader.

    `parts` have come and not been taken, `size` bytes in all; then the body is complete (`ended`) or `error` says why
    it never will be.
    """

    __slots__ = ("ended", "error", "headers", "parts", "size", "status", "waiter")

    def __init__(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self.parts: list[bytes] = []
        self.size = 0
        self.ended = False
        self.error: BaseException | None = None
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class HttpStream:
    """A response whose body is still coming: `async for chunk in stream`, by one reader.

    A chunk is what had arrived since the last one, whatever the framing; memory stays bounded, because a slow reader
    stops the connection being read. The iterator ends only when the body is complete; a cut one raises ConnectionLost,
    a late one Expired, a malformed one BadReply, each after the bytes that did come. `aclose`, a cancelled reader and a
    forgotten stream close the connection at once, unless the body was complete.
    """

    __slots__ = ("_connection", "_inflow", "_token")

    def __init__(self, connection: Source, token: Waiter, inflow: Inflow) -> None:
        self._connection = connection
        self._token = token
        self._inflow = inflow

    @property
    def status(self) -> int:
        return self._inflow.status

    @property
    def headers(self) -> Headers:
        """As in `HttpResponse`."""
        return self._inflow.headers

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        inflow = self._inflow
        while not inflow.parts:
            if inflow.error is not None:
                raise inflow.error
            if inflow.ended:
                raise StopAsyncIteration
            if inflow.waiter is not None:
                raise RuntimeError("a stream has one reader")
            inflow.waiter = asyncio.get_running_loop().create_future()
            try:
                await inflow.waiter
            except BaseException:
                self._abandon("its reader was cancelled")
                raise
            finally:
                inflow.waiter = None
        parts = inflow.parts
        chunk = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        inflow.size = 0
        self._connection.resume(self._token)
        return chunk

    async def aclose(self) -> None:
        """Stop reading. A reader that waits in another task gets ConnectionLost."""
        self._abandon("it was closed by its reader")

    async def __aenter__(self) -> HttpStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _abandon(self, why: str) -> None:
        inflow = self._inflow
        if not inflow.ended and inflow.error is None:
            inflow.parts.clear()
            inflow.error = ConnectionLost(f"the stream was not read to its end: {why}")
            self._connection.cancel(self._token)
            inflow.wake()

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may have ended before
            self._abandon("nobody holds it")

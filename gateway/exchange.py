"""One request and its response on an HTTP/1.1 connection: what an ASGI application receives from and sends to.

A response whose length is known leaves together with its first bytes, one that is streamed leaves as it comes. A body
waits for its reader in as many bytes as it has, however small the chunks are that it came in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING

from gateway.server import Message

if TYPE_CHECKING:
    from gateway.connection import Connection

# Bytes of a body that may wait for their reader.
HIGH_WATER_BYTES = 256 * 1024
# A body's pieces are joined when there are this many: each costs fifty bytes beside its own.
_PIECES = 1024

STATUS = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
_BODILESS = frozenset((204, 304))


class Exchange:
    """One request and its response. `keep`: the connection lives on after it."""

    __slots__ = (
        "_bodiless", "_chunked", "_connection", "_expects", "_head", "_http11", "_left", "_parts", "_size", "_taken",
        "_waiter", "complete", "done", "head_only", "keep", "pieces", "started", "task",
    )  # fmt: skip

    def __init__(self, connection: Connection, *, head_only: bool, http11: bool, expects: bool, keep: bool) -> None:
        self.complete = False  # the request has come
        self.started = self.done = False  # the response, as far as the application has sent it
        self.head_only = head_only
        self.keep = keep
        self.pieces = 0  # that the body has come in
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._http11 = http11
        self._expects = expects
        self._parts: list[bytes] = []
        self._size = 0
        self._taken = False  # all of the request's body has been handed over
        self._waiter: asyncio.Future[None] | None = None
        self._head = b""  # of a response that waits for its first bytes
        self._bodiless = head_only
        self._chunked = False
        self._left = -1  # bytes of the response that were promised; below 0: until the connection ends

    # The request.

    def whole(self) -> bytes | None:
        """The whole body where it is there."""
        if not self.complete or self._taken:
            return None
        return self._take()

    def body(self, data: bytes) -> None:
        parts = self._parts
        parts.append(data)
        self._size += len(data)
        if len(parts) > _PIECES:
            parts[:] = [b"".join(parts)]
        if self._size > HIGH_WATER_BYTES:
            self._connection.hold()
        if self._waiter is not None:
            self.wake()

    def end(self) -> None:
        self.complete = True
        if self._waiter is not None:
            self.wake()

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def cancel(self) -> None:
        # A task cancelled before its first step keeps its arguments in a traceback: let it go, or they hold each other.
        task, self.task = self.task, None
        if task is not None:
            task.cancel()

    async def receive(self) -> Message:
        while not self._parts and not (self.complete and not self._taken):
            if self._connection.gone or self.done:
                return {"type": "http.disconnect"}
            if self._expects and not self.started:
                self._expects = False
                self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return {"type": "http.request", "body": self._take(), "more_body": not self.complete}

    def _take(self) -> bytes:
        self._taken = self.complete
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._size = 0
        self._connection.unhold()
        return data

    # The response.

    @property
    def silent(self) -> bool:
        """Whether nothing of the response has been written."""
        return not self.started or bool(self._head)

    @property
    def delimited(self) -> bool:
        """Whether the client can tell that what it has is not the whole."""
        return self._chunked or self._left >= 0

    async def send(self, message: Message) -> None:
        connection = self._connection
        if connection.paused:
            await connection.drained()
        if self.done or connection.gone:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
            return
        if not self.started:
            raise RuntimeError("the body of a response came before its head")
        data, more = message.get("body", b""), message.get("more_body", False)
        if self._bodiless:
            data = b""
        elif self._chunked:
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if not more:
                data += b"0\r\n\r\n"
        elif self._left >= 0:
            left = self._left - len(data)
            if left < 0 or (left and not more):
                raise RuntimeError("the body of a response is not as long as was promised")
            self._left = left
        head, self._head = self._head, b""
        if head or data:
            connection.write(head + data if head else data)
        if not more:
            self.done = True
            if self._waiter is not None:
                self.wake()
            connection.answered(self)

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self.started:
            raise RuntimeError("a response was started twice")
        if not self.complete or self._connection.server.draining:
            self.keep = False  # whatever comes now belongs to a body that nobody reads, or to another gateway
        bodiless = self.head_only or status in _BODILESS
        if status == 204:
            headers = [(name, value) for name, value in headers if name != b"content-length"]  # RFC 9110, 8.6
        length, lines, dated = -1, [], False
        for name, value in headers:
            if name == b"content-length":
                if not value.isdigit():
                    raise RuntimeError("the content-length of a response is no number")
                length = int(value)
            elif name == b"date":
                dated = True
            lines.append(b"%b: %b\r\n" % (name, value))
        if not dated:
            lines.append(self._connection.server.date)
        if self.keep and not self._http11:
            # To HTTP/1.0 the end of the connection is the end of a body whose length it is not told.
            self.keep = length >= 0 or bodiless
            if self.keep:
                lines.append(b"connection: keep-alive\r\n")
        if not self.keep:
            lines.append(b"connection: close\r\n")
        chunked = length < 0 and not bodiless and self._http11
        if chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        head = b"".join(lines)
        # Each line ends with one CRLF; any more came from a header's name or value.
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head:
            raise RuntimeError("a header of a response has CR, LF or NUL in it")
        head = b"%b%b\r\n" % (STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status, head)
        self.started = True
        self._bodiless, self._chunked, self._left = bodiless, chunked, length
        if length < 0 and not bodiless:
            self._connection.write(head)
        else:
            self._head = head

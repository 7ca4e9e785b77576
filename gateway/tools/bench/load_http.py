"""The HTTP callers: `python -m gateway.tools.bench.load_http HOST:PORT CASE REQUESTS` (see `load`)."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import cast

import uvloop

from gateway.tools.bench.exchanges import HTTP, MODEL, Exchange
from gateway.tools.bench.load import CONCURRENCY, Wrong, turn

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class _Caller(asyncio.Protocol):
    """One connection, which has at most one request in the air."""

    def __init__(self, request: bytes, reply: bytes) -> None:
        self._request = request
        self._reply = reply
        self._buffer = b""
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def ask(self) -> asyncio.Future[None]:
        """Sends the request; done with its reply, which was 200 and as long as the backend's."""
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(self._request)
        return self._waiter

    def data_received(self, data: bytes) -> None:
        self._buffer = buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(buffer, 0, end)
        if not buffer.startswith(b"HTTP/1.1 200") or length is None or int(length[1]) != len(self._reply):
            self._fail(Wrong(f"expected status 200 and {len(self._reply)} bytes, got {buffer[:300]!r}"))
        elif len(buffer) >= end + 4 + len(self._reply):
            self._buffer = b""
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(Wrong(f"the connection was lost: {error or 'closed by the proxy'}"))

    def close(self) -> None:
        self._waiter = None
        self._transport.close()

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)


def _request(host: str, exchange: Exchange) -> bytes:
    kind = "application/json"
    if exchange.header_length is not None:
        kind = f"application/octet-stream\r\nInference-Header-Content-Length: {exchange.header_length}"
    head = (
        f"POST /v2/models/{MODEL['http']}/infer HTTP/1.1\r\nHost: {host}\r\nUser-Agent: headrace-bench\r\n"
        f"Accept: */*\r\nContent-Type: {kind}\r\nContent-Length: {len(exchange.request)}\r\n\r\n"
    )
    return head.encode() + exchange.request


async def _main(address: str, case: str, requests: int) -> None:
    exchange = HTTP[case]()
    host, _, port = address.rpartition(":")
    request = _request(address, exchange)
    callers: list[_Caller] = []
    seconds: list[float] = []
    numbers = iter(range(requests))

    async def warm() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(CONCURRENCY):
            caller = _Caller(request, exchange.reply)
            await loop.create_connection(lambda caller=caller: caller, host, int(port))  # type: ignore[misc]
            callers.append(caller)
        await asyncio.gather(*(caller.ask() for caller in callers))

    async def loop_of(caller: _Caller) -> None:
        for _ in numbers:
            began = time.perf_counter()
            await caller.ask()
            seconds.append(time.perf_counter() - began)

    async def run() -> list[float]:
        await asyncio.gather(*map(loop_of, callers))
        return seconds

    try:
        await turn(warm, run)
    finally:
        for caller in callers:
            caller.close()


if __name__ == "__main__":
    try:
        uvloop.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    except (Wrong, OSError, TimeoutError) as error:
        sys.exit(f"{type(error).__name__}: {error}")

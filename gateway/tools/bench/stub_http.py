"""The HTTP backend of the benchmark: `python -m gateway.tools.bench.stub_http PORT`; a fixed reply to each request.

It reads no more of a request than where it ends, and whether its body is binary. It ends at a body that is not as long
as the callers': what is measured is passing bodies on, and a proxy that did anything else would be measured for that.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from typing import cast

import uvloop

from gateway.tools.bench.exchanges import Exchange, http_binary, http_json

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_BINARY = b"inference-header-content-length:"


def _reply(exchange: Exchange) -> bytes:
    kind = "application/json"
    if exchange.reply_header_length is not None:
        kind = f"application/octet-stream\r\nInference-Header-Content-Length: {exchange.reply_header_length}"
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(exchange.reply)}\r\n\r\n"
    return head.encode() + exchange.reply


class _Stub(asyncio.Protocol):
    _JSON = len(http_json().request), _reply(http_json())
    _BINARY = len(http_binary().request), _reply(http_binary())
    _EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"  # readiness

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        while (end := buffer.find(b"\r\n\r\n")) >= 0:
            head = buffer[:end]
            found = _LENGTH.search(head)
            length = int(found[1]) if found else 0
            whole = end + 4 + length
            if len(buffer) < whole:
                break
            buffer = buffer[whole:]
            if head.startswith(b"GET "):
                self._transport.write(self._EMPTY)
                continue
            expected, reply = self._BINARY if _BINARY in head.lower() else self._JSON
            if length != expected:
                print(f"expected a body of {expected} bytes, got {length}", file=sys.stderr, flush=True)
                os._exit(1)
            self._transport.write(reply)
        self._buffer = buffer


async def _main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Stub, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1])))

"""A server that answers while a large request is still being written: its answer counts, not the broken connection."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from backends.errors import BackendFailed
from backends.http_client import HttpClient
from backends.request import HttpCall, Infer, Relay, Request, Tensors
from backends.tensor import Tensor
from backends.triton_http import TritonHttp
from tests.unit.backends.http_peer import transcript

SIZE = 8 << 20
BODY = b'{"error":"who are you?"}'
ANSWER = (
    b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Bearer\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
    % (len(BODY), BODY)
)


@contextmanager
def refusing(how: str) -> Iterator[int]:
    """A server that answers each connection after a little of its request and ends it: its port."""

    def refuse(one: socket.socket) -> None:
        with one:
            one.recv(4096)
            one.sendall(ANSWER)
            if how == "reset":
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif how == "half":
                one.shutdown(socket.SHUT_WR)
                while one.recv(1 << 20):
                    pass

    def serve() -> None:
        while True:
            try:
                one, _ = server.accept()
            except OSError:
                return
            refuse(one)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


# "close" leaves most of the request unread, which resets the connection behind the answer.
@pytest.mark.parametrize("how", ["close", "reset", "half"])
@transcript
async def test_an_early_answer_is_the_answer(how: str) -> None:
    with refusing(how) as port:
        client = HttpClient("127.0.0.1", port, now=time.monotonic)
        for body in (bytes(SIZE), [bytes(SIZE // 2)] * 2):
            for _ in range(5):
                response = await client.request("POST", "/", (), body, deadline=time.monotonic() + 5)
                assert (response.status, response.body) == (401, BODY)
        assert (client.in_flight, client.idle) == (0, 0)
        await client.close()


@pytest.mark.parametrize("how", ["close", "half"])
@transcript
async def test_the_caller_gets_the_backends_own_words(how: str) -> None:
    with refusing(how) as port:
        backend = TritonHttp(HttpClient("127.0.0.1", port, now=time.monotonic), time.monotonic)
        infer = Infer(Tensors.of((Tensor("X", "UINT8", (SIZE,), bytes(SIZE)),)))
        with pytest.raises(BackendFailed, match="who are you") as caught:
            await backend(Request(model="m", content=infer, deadline=time.monotonic() + 5))
        assert caught.value.status == 401
        call = HttpCall("POST", "/v2/models/m/generate", (), bytes(SIZE))
        reply = await backend(Request(model="m", content=call, deadline=time.monotonic() + 5))
        relay: Any = reply.body
        assert isinstance(relay, Relay)
        assert relay.status == 401
        assert (b"www-authenticate", b"Bearer") in relay.headers
        assert b"".join([chunk async for chunk in relay.body]) == BODY
        await backend.close()
        await asyncio.sleep(0)

"""A gRPC backend whose host is a name: all its addresses in turn, and other ones when they change."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from backends.errors import Unreachable
from backends.grpc_channels import _target
from backends.request import Relay
from backends.triton_grpc import TritonGrpc
from tests.unit.backends.grpc_peer import REPLY, Methods, ask, relay
from tests.unit.backends.http_peer import until

HERE, THERE, NOWHERE = "127.0.0.1", "127.0.0.2", "127.0.0.3"


class Named:
    """A client of `backend`, whose addresses are `known`; `calls` by the address that they came to."""

    def __init__(self) -> None:
        self.known: Any = (HERE, THERE)
        self.calls: dict[str, int] = {HERE: 0, THERE: 0}
        self.ahead = 0.0
        self.asked = 0

    def now(self) -> float:
        return time.monotonic() + self.ahead

    async def resolve(self, host: str) -> tuple[str, ...]:
        assert host == "backend"
        self.asked += 1
        if isinstance(self.known, Exception):
            raise self.known
        return tuple(self.known)

    def script(self, address: str) -> Any:
        async def run(messages: AsyncIterator[bytes], context: Any) -> None:
            self.calls[address] += 1
            async for _ in messages:
                await context.write(REPLY)

        return run

    async def moved(self, *known: str) -> None:
        self.known = known
        self.ahead += 5.0
        self.client.refresh()
        await asyncio.sleep(0.01)


@asynccontextmanager
async def named() -> AsyncIterator[Named]:
    backend = Named()
    servers, port = [], 0
    for address in (HERE, THERE):
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Methods(backend.script(address)),))
        port = server.add_insecure_port(f"{address}:{port}")
        await server.start()
        servers.append(server)
    backend.port = port  # type: ignore[attr-defined]
    backend.client = TritonGrpc(  # type: ignore[attr-defined]
        f"backend:{port}", now=backend.now, connect_timeout=2, max_message_bytes=1 << 20, resolve=backend.resolve
    )
    try:
        yield backend
    finally:
        await backend.client.close()  # type: ignore[attr-defined]
        for server in servers:
            await server.stop(None)


def test_calls_go_to_all_addresses_in_turn() -> None:
    async def main() -> None:
        async with named() as backend:
            await asyncio.gather(*(backend.client(ask()) for _ in range(3)))
            assert backend.asked == 1
            async with asyncio.timeout(5):  # the second connection may be a moment later than the first
                while not all(backend.calls.values()):
                    await backend.client(ask())
            backend.calls |= {HERE: 0, THERE: 0}
            for _ in range(20):
                await backend.client(ask())
            assert backend.calls == {HERE: 10, THERE: 10}
            assert await backend.client.unready("", backend.now() + 1, {})  # the script's reply is none of its
            assert backend.asked == 1

    asyncio.run(main())


def test_an_address_that_refuses_costs_nothing_and_all_that_refuse_are_unreachable() -> None:
    async def main() -> None:
        async with named() as backend:
            backend.known = (HERE, NOWHERE)
            for _ in range(10):
                await backend.client(ask())
            await backend.moved(NOWHERE, "127.0.0.4")
            for request in (ask(), relay("ModelConfig", _told(b""))):
                with pytest.raises(Unreachable, match="connections to all backends failing"):
                    await backend.client(request)

    asyncio.run(main())


async def _told(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


def test_the_next_call_goes_where_the_name_has_moved_and_old_calls_end_in_peace() -> None:
    async def main() -> None:
        async with named() as backend:
            backend.known = (HERE,)
            said: asyncio.Queue[bytes] = asyncio.Queue()

            async def talk() -> AsyncIterator[bytes]:
                while message := await said.get():
                    yield message

            said.put_nowait(b"a")
            reply = await backend.client(relay("ModelStreamInfer", talk()))
            assert isinstance(reply.body, Relay)
            chunks = reply.body.body
            assert not isinstance(chunks, bytes)
            assert await anext(chunks) == REPLY
            old = backend.client._channels.line
            await backend.moved(THERE)
            await backend.client(ask())
            assert backend.calls == {HERE: 1, THERE: 1}
            said.put_nowait(b"b")
            assert await anext(chunks) == REPLY
            assert old.channel.get_state() is grpc.ChannelConnectivity.READY
            said.put_nowait(b"")
            with pytest.raises(StopAsyncIteration):
                await anext(chunks)
            await until(lambda: old.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
            assert backend.client._channels._lines == {backend.client._channels.line}

    asyncio.run(main())


def test_a_change_without_calls_closes_at_once_and_the_same_addresses_change_nothing() -> None:
    async def main() -> None:
        async with named() as backend:
            await backend.client(ask())
            line = backend.client._channels.line
            await backend.moved(HERE, THERE)
            assert backend.client._channels.line is line
            await backend.moved(THERE)
            assert backend.client._channels.line is None
            assert backend.client._channels._lines == set()
            backend.known = socket.gaierror(-3, "Temporary failure")
            backend.ahead += 5.0
            backend.client.refresh()
            await asyncio.sleep(0.01)
            await backend.client(ask())
            assert backend.calls[THERE] >= 1

    asyncio.run(main())


def test_a_name_that_cannot_be_resolved() -> None:
    async def main() -> None:
        async with named() as backend:
            backend.known = socket.gaierror(-2, "Name or service not known")
            with pytest.raises(Unreachable, match=r"backend backend:\d+: Name or service not known$"):
                await backend.client(ask())
            backend.known = (HERE,)
            await backend.client(ask())

    asyncio.run(main())


def test_the_authority_is_the_name() -> None:
    async def resolve(host: str) -> tuple[str, ...]:
        return (HERE,)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server((HERE, 0)) as listener:
            listener.setblocking(False)
            address = f"backend:{listener.getsockname()[1]}"
            client = TritonGrpc(address, now=time.monotonic, connect_timeout=2, max_message_bytes=1024, resolve=resolve)
            call = asyncio.ensure_future(client(ask()))
            connection, _ = await loop.sock_accept(listener)
        with connection:
            await loop.sock_sendall(connection, b"\0\0\0\4\0\0\0\0\0")  # an empty SETTINGS frame
            heard = b""
            async with asyncio.timeout(5):
                while address.encode() not in heard:
                    heard += await loop.sock_recv(connection, 1 << 16)
        await asyncio.gather(call, return_exceptions=True)
        await client.close()

    asyncio.run(main())


def test_targets() -> None:
    assert _target(("10.0.0.1", "10.0.0.2"), "1") == "ipv4:10.0.0.1:1,10.0.0.2:1"
    assert _target(("::1", "fd00::2"), "1") == "ipv6:[::1]:1,[fd00::2]:1"
    assert _target(("10.0.0.1", "fd00::2"), "1") == "ipv6:[::ffff:10.0.0.1]:1,[fd00::2]:1"

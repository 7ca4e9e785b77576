"""A host that is a name: several addresses in turn, refused ones left out, gone ones left."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.errors import Unreachable
from backends.http_client import HttpClient
from tests.unit.backends.http_peer import transcript, until

HERE, THERE, NOWHERE = "127.0.0.1", "127.0.0.2", "127.0.0.3"


class Server:
    """A server at one address; answers with that address after `seconds`."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.open = 0
        self.seconds = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.hosts.append(head.partition(b"Host: ")[2].partition(b"\r\n")[0].decode())
                await asyncio.sleep(self.seconds)
                body = str(writer.get_extra_info("sockname")[0]).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
            self.open -= 1


@asynccontextmanager
async def named(*known: str, **options: Any) -> AsyncIterator[tuple[Any, dict[str, Server], list[Any]]]:
    """A client of `backend`, whose addresses the list gives, and servers at HERE and THERE on the same port."""
    answer: list[Any] = [known]

    async def resolve(host: str) -> tuple[str, ...]:
        assert host == "backend"
        if isinstance(answer[0], Exception):
            raise answer[0]
        return tuple(answer[0])

    servers = {HERE: Server(), THERE: Server()}
    first = await asyncio.start_server(servers[HERE].serve, HERE, 0)
    port = first.sockets[0].getsockname()[1]
    second = await asyncio.start_server(servers[THERE].serve, THERE, port)
    clock = [0.0]
    client = HttpClient("backend", port, now=lambda: clock[0] + time.monotonic(), resolve=resolve, **options)
    client.advance = lambda seconds: clock.__setitem__(0, clock[0] + seconds)  # type: ignore[attr-defined]
    try:
        yield client, servers, answer
    finally:
        await client.close()
        await until(lambda: not any(server.open for server in servers.values()))
        for server in (first, second):
            server.close()
            await server.wait_closed()


async def ask(client: HttpClient) -> str:
    return (await client.request("GET", "/", ())).body.decode()


@transcript
async def test_connections_go_round_and_the_host_stays_the_name() -> None:
    async with named(HERE, THERE) as (client, servers, _):
        for server in servers.values():
            server.seconds = 0.05
        answers = await asyncio.gather(*(ask(client) for _ in range(6)))
        assert sorted(answers) == [HERE] * 3 + [THERE] * 3
        assert {host for server in servers.values() for host in server.hosts} == {client.origin}
        assert client.origin.startswith("backend:")


@transcript
async def test_a_refused_address_costs_nothing() -> None:
    async with named(HERE, NOWHERE) as (client, servers, _):
        servers[HERE].seconds = 0.05
        assert await asyncio.gather(*(ask(client) for _ in range(6))) == [HERE] * 6


@transcript
async def test_all_refuse() -> None:
    async with named(NOWHERE, "127.0.0.4") as (client, _, _):
        with pytest.raises(Unreachable, match=r"cannot connect to backend:\d+: connection refused"):
            await ask(client)
        assert client.in_flight == 0


@transcript
async def test_an_address_that_does_not_answer_has_its_share_of_the_time() -> None:
    async with named(HERE, NOWHERE, connect_timeout=0.2) as (client, servers, _):
        with socket.socket() as listener:
            address = NOWHERE, int(client.origin.rpartition(":")[2])
            listener.bind(address)
            listener.listen(0)
            crowd = [socket.socket() for _ in range(4)]
            for one in crowd:
                one.setblocking(False)
                one.connect_ex(address)
            servers[HERE].seconds = 0.3
            began = time.monotonic()
            assert await asyncio.gather(*(ask(client) for _ in range(4))) == [HERE] * 4
            assert time.monotonic() - began < 0.6
            for one in crowd:
                one.close()


@transcript
async def test_idle_connections_to_an_address_that_is_gone_are_closed_and_busy_ones_later() -> None:
    async with named(HERE) as (client, servers, answer):
        servers[HERE].seconds = 0.2
        busy = asyncio.ensure_future(ask(client))
        await until(lambda: servers[HERE].hosts)
        servers[HERE].seconds = 0.0
        assert await ask(client) == HERE
        assert (client.idle, servers[HERE].open) == (1, 2)
        answer[0] = (THERE,)
        client.refresh()  # it was asked just now
        assert await ask(client) == HERE
        client.advance(5.0)
        client.refresh()
        await until(lambda: servers[HERE].open == 1)
        assert await ask(client) == THERE
        assert await busy == HERE
        await until(lambda: servers[HERE].open == 0)
        assert [await ask(client) for _ in range(3)] == [THERE] * 3
        assert client.idle == 1


@transcript
async def test_what_is_known_outlives_a_resolver() -> None:
    async with named(HERE) as (client, _, answer):
        assert await ask(client) == HERE
        answer[0] = socket.gaierror(-3, "Temporary failure in name resolution")
        client.advance(5.0)
        client.refresh()
        await asyncio.sleep(0.01)
        client.advance(60.0)  # what idled is gone: it connects anew
        assert await ask(client) == HERE


@transcript
async def test_a_name_that_cannot_be_resolved() -> None:
    async with named() as (client, _, answer):
        answer[0] = socket.gaierror(-2, "Name or service not known")
        with pytest.raises(Unreachable, match=r"cannot connect to backend:\d+: name or service not known$"):
            await ask(client)
        answer[0] = (HERE,)
        assert await ask(client) == HERE

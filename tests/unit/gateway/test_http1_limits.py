"""Our HTTP/1.1 server: how many connections there may be, and what idle ones cost. Over real sockets."""

# ruff: noqa: F811 - a fixture is imported under the name that tests ask for it by

from __future__ import annotations

import asyncio
import gc
import resource
from contextlib import suppress
from typing import Any

from tests.support.http1 import HEAD, Rig, bodies, echo, reset, serving, until  # noqa: F401

IDLE_BYTES = 12 * 1024


async def refused(rig: Rig) -> bytes:
    reader, writer = await rig.open()
    found = b""
    with suppress(ConnectionError):
        writer.write(HEAD + b"\r\n")
        found = await asyncio.wait_for(reader.read(), 5)
    return found


def test_one_connection_too_many_is_told_so(serving: Any) -> None:
    async def client(rig: Rig) -> None:
        kept = [await rig.raw() for _ in range(5)]
        await until(lambda: len(rig.server.connections) == 5)
        # Without a request, so that no reset overtakes the answer.
        reply = await rig.ask()
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in reply
        assert bodies(reply) == [b'{"error":"too many connections, limit 5"}']
        for _ in range(20):
            assert b" 200 " not in await refused(rig)
        assert len(rig.server.connections) == 5
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(kept[0], HEAD + b"\r\n")
        assert (await loop.sock_recv(kept[0], 1000)).endswith(b"/="), "those that are there live on"
        kept.pop().close()
        await until(lambda: len(rig.server.connections) == 4)
        assert bodies(await rig.ask(HEAD + b"connection: close\r\n\r\n")) == [b"/="]
        for one in kept:
            one.close()

    serving(echo, client, limit=lambda: 5)


def test_file_descriptors_bound_connections_too(serving: Any) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def client(rig: Rig) -> int:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, before[1]))
        return rig.server.limit

    try:
        assert serving(echo, client, limit=lambda: 100_000) == 750
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_in_a_crowd_who_idles_has_to_go(serving: Any) -> None:
    async def client(rig: Rig) -> None:
        ahead = rig.server.now
        silent = [await rig.raw() for _ in range(4)]
        slow, used = await rig.raw(), await rig.raw()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(slow, HEAD)
        await loop.sock_sendall(used, HEAD + b"\r\n")
        await loop.sock_recv(used, 1000)
        await until(lambda: len(rig.server.connections) == 6 and any(c._in_head for c in rig.server.connections))
        rig.server.now = lambda: ahead() + 6
        rig.server.look_after()
        await asyncio.sleep(0.01)
        assert len(rig.server.connections) == 6, "there is room"
        silent.append(await rig.raw())
        await until(lambda: len(rig.server.connections) == 7)
        rig.server.look_after()
        assert (await loop.sock_recv(slow, 1000)).startswith(b"HTTP/1.1 408 ")
        assert await loop.sock_recv(used, 1000) == b""
        assert all([await loop.sock_recv(one, 1000) == b"" for one in silent[:4]])
        for one in (*silent, slow, used):
            one.close()
        await until(lambda: not rig.server.connections)

    serving(echo, client, limit=lambda: 8)


def test_idle_connections_are_cheap(serving: Any) -> None:
    """Of both ends in this process, the kernel's share not included."""

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    async def client(rig: Rig) -> float:
        loop = asyncio.get_running_loop()

        async def idle(count: int) -> list[Any]:
            made = []
            for _ in range(count):
                one = await rig.raw()
                await loop.sock_sendall(one, HEAD + b"\r\n")
                await loop.sock_recv(one, 1000)
                made.append(one)
            return made

        first = await idle(200)
        before = resident()
        more = await idle(1500)
        each = (resident() - before) / len(more)
        for one in (*first, *more):
            reset(one)
        return each

    assert serving(echo, client) < IDLE_BYTES

"""Our HTTP/1.1 server: clients that leave, what takes too long, and its own end. Over real sockets."""

# ruff: noqa: F811 - a fixture is imported under the name that tests ask for it by

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections import Counter
from typing import Any

import pytest

from gateway.server import Receive, Scope, Send
from tests.support.garbage import garbage
from tests.support.http1 import (
    HEAD,
    UPGRADE,
    Rig,
    Waiting,
    answer,
    bodies,
    depart,
    echo,
    read,
    reset,
    serving,  # noqa: F401
    until,
)

# Clients that leave.


@pytest.mark.parametrize("how", ["body", "backend", "stream", "slow reader"])
@pytest.mark.parametrize("leave", ["fin", "rst", "half"])
def test_who_leaves_has_its_task_cancelled(serving: Any, how: str, leave: str) -> None:
    app = Waiting(how)

    async def client(rig: Rig) -> None:
        one = await rig.raw()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(one, HEAD + (b"content-length: 5\r\n\r\nhe" if how == "body" else b"\r\n"))
        await until(lambda: app.started)
        if how == "slow reader":
            await until(lambda: next(iter(rig.server.connections)).paused, seconds=3)
        else:
            await asyncio.sleep(0.02)
        depart(one, leave)
        left = time.monotonic()
        await until(lambda: app.cancelled == 1)
        assert time.monotonic() - left < 0.1
        one.close()
        await until(lambda: not rig.server.connections)

    serving(app, client, stall_seconds=0.1)


OURS = frozenset({"Connection", "Exchange", "HttpRequestParser", "Task"})


def storm(port: int, text: bytes, times: int) -> None:
    for _ in range(times):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(text)
        reset(client)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        HEAD,
        HEAD + b"\r\n",
        HEAD + b"content-length: 5\r\n\r\nhe",
        (HEAD + b"\r\n") * 5,
        UPGRADE + b"\r\n",
        HEAD + b"x y\r\n\r\n",
        HEAD + b"\r\n" + b"\x16",
        HEAD + b"transfer-encoding: identity\r\n\r\n",
    ],
)
def test_resets_leave_nothing_behind(serving: Any, text: bytes) -> None:
    async def client(rig: Rig) -> Counter[str]:
        await asyncio.to_thread(storm, rig.server.port, text, 20)
        await until(lambda: not rig.server.connections)
        with garbage() as found:
            await asyncio.to_thread(storm, rig.server.port, text, 50)
            await until(lambda: not rig.server.connections)
            await asyncio.sleep(0.01)
        return found

    found = serving(Waiting("backend"), client)
    assert not OURS & found.keys(), found


def test_a_storm_of_resets_takes_no_memory(serving: Any) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    async def client(rig: Rig) -> int:
        texts = (HEAD + b"content-length: 50\r\n\r\nhe", (HEAD + b"\r\n") * 10, HEAD, HEAD + b"\r\n")
        sizes = []
        for times in (250, 500):
            for text in texts:
                await asyncio.to_thread(storm, rig.server.port, text, times)
            await until(lambda: not rig.server.connections)
            gc.collect()
            sizes.append(resident())
        return sizes[1] - sizes[0]

    assert serving(Waiting("backend"), client) < 8 << 20


def test_answered_requests_leave_no_cycles(serving: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/raises":
            raise ValueError
        await echo(scope, receive, send)

    async def ask_all(rig: Rig) -> None:
        text = HEAD + b"content-length: 2\r\n\r\nhi" + HEAD + b"connection: close\r\n\r\n" + HEAD
        for _ in range(10):
            await rig.ask(text)
            await rig.ask(text.replace(b"/", b"/raises", 1))
            await rig.ask(UPGRADE + b"connection: close\r\n\r\n")
        rig.close()
        rig.reported.clear()
        await until(lambda: not rig.server.connections)
        await asyncio.sleep(0.01)

    async def client(rig: Rig) -> Counter[str]:
        await ask_all(rig)
        with garbage() as found:
            await ask_all(rig)
        return found

    found = serving(app, client)
    assert not OURS & found.keys(), found


def test_a_cancelled_send_does_not_poison_the_next(serving: Any) -> None:
    outcome = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"40000000")]})
        await send({"type": "http.response.body", "body": b"a" * 20_000_000, "more_body": True})
        last = {"type": "http.response.body", "body": b"a" * 20_000_000}
        try:
            async with asyncio.timeout(0.02):
                await send(last)
        except TimeoutError:
            outcome.append("late")
        await send(last)
        outcome.append("sent")

    async def client(rig: Rig) -> int:
        reader, writer = await rig.open()
        writer.write(HEAD + b"connection: close\r\n\r\n")
        await until(lambda: outcome)
        return len(await asyncio.wait_for(reader.read(), 5))

    assert serving(app, client) > 40_000_000
    assert outcome == ["late", "sent"]


def test_who_waits_for_a_client_to_leave_is_woken_by_the_answer(serving: Any) -> None:
    heard = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read(receive)

        async def listen() -> None:
            heard.append((await receive())["type"])

        listener = asyncio.create_task(listen())
        await asyncio.sleep(0)
        await answer(send, b"hi")
        await listener

    async def client(rig: Rig) -> None:
        reader, writer = await rig.open()
        writer.write(HEAD + b"\r\n")
        await reader.readuntil(b"hi")
        await until(lambda: heard == ["http.disconnect"])

    serving(app, client)


# Time.


def test_who_reads_nothing_is_cut_off(serving: Any) -> None:
    """Its answer would be held for as long as it likes."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"a" * 20_000_000)

    async def client(rig: Rig) -> None:
        one = await rig.raw()
        await asyncio.get_running_loop().sock_sendall(one, HEAD + b"connection: close\r\n\r\n")
        await until(lambda: any(c._transport.is_closing() for c in rig.server.connections))
        await until(lambda: rig.sweep() or not rig.server.connections, seconds=5)
        one.close()

    serving(app, client, stall_seconds=0.1)


def test_a_slow_reader_is_waited_for_in_bounded_memory(serving: Any) -> None:
    sent = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"a" * 50_000, "more_body": True})
            sent += 50_000
        await send({"type": "http.response.body"})

    async def client(rig: Rig) -> int:
        one = await rig.raw()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(one, HEAD + b"connection: close\r\n\r\n")
        await until(lambda: any(c.paused for c in rig.server.connections))
        await asyncio.sleep(0.05)
        (connection,) = rig.server.connections
        assert connection._transport.get_write_buffer_size() < 200_000
        assert sent < 25_000_000  # what the kernel holds
        got = 0
        while data := await loop.sock_recv(one, 1_000_000):
            got += len(data)
        one.close()
        return got

    assert serving(app, client) > 50_000_000


def test_slow_heads_and_idle_connections_end(serving: Any) -> None:
    async def client(rig: Rig) -> tuple[bytes, bytes, bytes]:
        asking = asyncio.gather(
            rig.ask(HEAD, b"x", b": ", b"y", pause=0.02), rig.ask(), rig.ask(HEAD + b"\r\n", HEAD, pause=0.02)
        )
        await until(lambda: rig.sweep() or asking.done())
        return await asking

    slow, silent, second = serving(echo, client, head_seconds=0.15, keep_alive_seconds=0.15)
    assert slow.startswith(b"HTTP/1.1 408 ")
    assert silent == b""
    assert len(bodies(second)) == 2
    assert b" 408 " in second


def test_keep_alive_expires(serving: Any) -> None:
    async def client(rig: Rig) -> bytes:
        asking = asyncio.create_task(rig.ask(HEAD + b"\r\n"))
        await until(lambda: rig.sweep() or asking.done())
        return await asking

    assert bodies(serving(echo, client, keep_alive_seconds=0.05)) == [b"/="]


def test_responses_are_dated_once(serving: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        own = [(b"date", b"Thu, 01 Jan 1970 00:00:00 GMT")] if scope["path"] == "/own" else []
        await answer(send, b"", *own)

    async def client(rig: Rig) -> bytes:
        return await rig.ask(HEAD + b"\r\nGET /own HTTP/1.1\r\nconnection: close\r\n\r\n")

    first, second, _ = serving(app, client).split(b"\r\n\r\n")
    assert first.count(b"\r\ndate: ") == second.count(b"\r\ndate: ") == 1
    assert b" GMT" in first
    assert b"1970" not in first
    assert b"1970" in second


def test_ipv6(serving: Any) -> None:
    async def client(rig: Rig) -> bytes:
        return await rig.ask(HEAD + b"connection: close\r\n\r\n")

    assert bodies(serving(echo, client, host="::1")) == [b"/="]


# The end.


def test_closing_answers_what_is_in_flight_and_closes_what_idles(serving: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await asyncio.sleep(0.1)
        await echo(scope, receive, send)

    async def client(rig: Rig) -> None:
        reader, writer = await rig.open()
        writer.write(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        idle, other = await rig.open()
        other.write(HEAD + b"\r\n")
        await idle.readuntil(b"/=")
        await until(lambda: len(rig.server.connections) == 2)
        began = time.monotonic()
        closing = asyncio.create_task(rig.server.close())
        assert await asyncio.wait_for(idle.read(), 1) == b""
        reply = await asyncio.wait_for(reader.read(), 1)
        assert bodies(reply) == [b"/slow="]
        assert b"connection: close\r\n" in reply
        await closing
        assert time.monotonic() - began < 0.5

    serving(app, client)


def test_what_is_accepted_while_closing_does_not_hold_it_up(serving: Any) -> None:
    async def client(rig: Rig) -> None:
        slow = await rig.raw()
        began = time.monotonic()
        await rig.server.close()
        assert time.monotonic() - began < 0.5
        slow.close()

    serving(echo, client, drain_seconds=2)


def test_closing_ends_in_time_and_leaves_no_task(serving: Any) -> None:
    app = Waiting("backend")
    ended = []

    async def slow_to_end(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)

    async def client(rig: Rig) -> None:
        _, writer = await rig.open()
        writer.write(HEAD + b"\r\n")
        await until(lambda: app.started)
        await rig.server.close()
        assert ended == [True]

    serving(slow_to_end, client, drain_seconds=0.1)
    assert app.cancelled == 1

"""Clients that leave while our HTTP/1.1 server reads nothing from them. Over real sockets, on both event loops."""

# ruff: noqa: F811 - a fixture is imported under the name that tests ask for it by

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.support.http1 import HEAD, Rig, Waiting, depart, reset, serving, until  # noqa: F401


@pytest.mark.parametrize("leave", ["fin", "rst", "half"])
@pytest.mark.parametrize("after", [b"x" * 1000, b""], ids=["unread bytes", "nothing"])
@pytest.mark.parametrize("why", ["pipelined", "body"])
def test_who_leaves_while_nothing_is_read_has_its_task_cancelled_too(
    serving: Any, why: str, after: bytes, leave: str
) -> None:
    app = Waiting("backend")

    async def client(rig: Rig) -> None:
        one = await rig.raw()
        loop = asyncio.get_running_loop()
        if why == "pipelined":
            text = (HEAD + b"\r\n") * 17 + HEAD
        else:
            text = HEAD + b"content-length: 1000000\r\n\r\n" + b"b" * 300_000
        await loop.sock_sendall(one, text)
        await until(lambda: any(connection._held for connection in rig.server.connections))
        await loop.sock_sendall(one, after)
        await asyncio.sleep(0.02)
        assert (app.started, app.cancelled) == (1, 0)
        depart(one, leave)
        left = time.monotonic()
        await until(lambda: app.cancelled == 1)
        assert time.monotonic() - left < 0.1
        await until(lambda: not rig.server.connections)
        one.close()

    serving(app, client)
    assert app.started == 1

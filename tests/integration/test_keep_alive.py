"""Keep-alive races with a real nginx as the backend, which ends idle and well-used connections early."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import uvloop

from backends.errors import Failure
from backends.http_client import HttpClient
from gateway.server import KEEP_ALIVE_SECONDS
from tests.support import nginx

SERVER = "keepalive_timeout {timeout}; keepalive_requests {requests}; location / {{ return 200 ok; }}"
LOST = "the connection was lost (connection reset by peer) before any of the response"


async def load(port: int, seconds: float, pause: float, spread: float) -> Counter[str]:
    """Callers that pause for about as long as the backend waits; what they got."""
    client = HttpClient("127.0.0.1", port, now=time.monotonic, idle_expiry=60.0)
    got: Counter[str] = Counter()
    chance = random.Random(5)
    until = time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < until:
            try:
                response = await client.request("POST", "/", (), b"x", deadline=time.monotonic() + 5)
                got[f"{response.status} {response.body.decode()}"] += 1
            except Failure as failure:
                got[f"{type(failure).__name__}: {failure.message}"] += 1
            await asyncio.sleep(pause + chance.uniform(-spread, spread))

    await asyncio.gather(*(caller() for _ in range(100)))
    await client.close()
    return got


def executed(folder: Path) -> int:
    return (folder / "access.log").read_text().count('"POST / HTTP/1.1" 200')


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("timeout", "requests", "pause", "spread"),
    [("1s 1s", 1_000_000, 1.0, 0.05), ("1s 1s", 10, 0.01, 0.01), ("75s", 10, 0.0, 0.0)],
)
def test_no_request_is_lost_to_a_backend_that_says_how_long_it_waits(
    tmp_path: Path, run: Any, timeout: str, requests: int, pause: float, spread: float
) -> None:
    with nginx.backend(tmp_path, SERVER.format(timeout=timeout, requests=requests)) as port:
        got = run(load(port, 2.5, pause, spread))
    assert set(got) == {"200 ok"}, got
    assert executed(tmp_path) == got["200 ok"], "each once"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_of_a_backend_that_keeps_its_time_to_itself_only_what_is_uncertain_is_lost(tmp_path: Path, run: Any) -> None:
    """Callers who come back just as nginx gives up. What it had received and not read yet, it resets.

    Whether it had read it nobody can tell, so that is an error; what it had not received is sent once more.
    """
    with nginx.backend(tmp_path, SERVER.format(timeout="30ms", requests=1_000_000)) as port:
        got = run(load(port, 2.5, 0.03, 0.003))
    answered = got.pop("200 ok")
    lost = sum(got.values())
    assert all(outcome.startswith("ConnectionLost") and outcome.endswith(LOST) for outcome in got), got
    assert answered <= executed(tmp_path) <= answered + lost
    assert lost < answered / 5


def test_connections_to_us_live_longer_than_those_of_the_clients_in_use() -> None:
    """nginx, envoy's default pool of an hour aside, ELB and the SDKs keep idle connections for 60 s at most."""
    assert KEEP_ALIVE_SECONDS > 60

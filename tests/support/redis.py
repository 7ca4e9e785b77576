"""A real redis-server on a free port of 127.0.0.1, in a folder of its own, and stores that know it.

What the tests change of it (its configuration, users, that it runs) goes through `RedisServer`; it is ended by its
process id alone. A missing program fails the run: `make redis` installs it.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from cache.redis import RedisStore
from cache.store import Store
from policies.spec import Redis
from tests.support import waiting
from tests.support.serve import free_port, within


def program() -> str:
    # redis-server and redis-check-rdb are one program, which asks for the name that it was started by.
    found = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    assert found, "expected redis-server; install it: make redis, or sudo apt-get install redis-tools"
    return found


@dataclass
class RedisServer:
    """A server with these further arguments; `start` again after `kill` finds the same port."""

    folder: Path
    arguments: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = self.folder / f"redis-{time.monotonic_ns()}.log"
        line = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        line += ["--save", "", "--appendonly", "no", "--logfile", str(log), *self.arguments]
        self.process = subprocess.Popen(line, executable=program())
        said = within(10, lambda: log.exists() and "Ready to accept connections" in log.read_text(errors="replace"))
        assert said, log.read_text(errors="replace")[-2000:] if log.exists() else "redis-server wrote no log"

    def kill(self) -> None:
        """As by `kill -9`."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """It takes connections, and says nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def do(self, *words: str) -> bytes:
        """The server's answer to a command without credentials, as it is on the wire; errors fail the test."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as plain:
            plain.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w.encode()) for w in words))
            answer = plain.recv(65536)
        assert not answer.startswith(b"-"), answer
        return answer

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()  # works on a paused one, too
            self.process.wait()


@dataclass
class Facts:
    """What a store reported, as `(reachable, reason)`."""

    told: list[tuple[bool, str]] = field(default_factory=list)

    def __call__(self, reachable: bool, reason: str) -> None:
        self.told.append((reachable, reason))

    @property
    def states(self) -> list[str]:
        return ["down" if not up else "read_only" if reason else "up" for up, reason in self.told]


# Far more than a healthy server needs on a busy machine; tests of the limit itself give a shorter one.
PATIENT = 2.0


@asynccontextmanager
async def store(
    port: int, facts: Facts | None = None, *, known: bool = True, **fields: Any
) -> AsyncIterator[RedisStore]:
    """A started store, once its state is known (up or down); closed with the block."""
    spec = Redis(**{"host": "127.0.0.1", "port": port, "timeout": PATIENT, **fields})
    made = RedisStore(spec, now=time.monotonic, observe=facts or Facts())
    made.start()
    try:
        if known:
            await until(lambda: made.up is not None)
        yield made
    finally:
        await made.close()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not {task for task in left if "RedisStore" in repr(task)}, left


until = partial(waiting.until, seconds=10.0)


@dataclass
class Settled:
    """A store whose puts are over when they return, so that a test can look at what became of them."""

    inner: RedisStore

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self.inner.get_many(keys)

    async def put_many(self, values: Mapping[bytes, bytes], ttl: float) -> None:
        await self.inner.put_many(values, ttl)
        await self.inner.settled()


@asynccontextmanager
async def settled(port: int) -> AsyncIterator[Store]:
    async with store(port) as made:
        yield Settled(made)


@contextmanager
def redis_server(folder: Path, *arguments: str) -> Iterator[RedisServer]:
    with RedisServer(folder, arguments) as server:
        yield server


def run(main: Coroutine[Any, Any, None]) -> None:
    """On the product's event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def value(number: int) -> bytes:
    """Says whose it is from its first byte to its last; sizes differ, so that a reply that is off by one is seen."""
    return b"%06d" % number * (1 + number * 37 % 400)


async def filled(kept: RedisStore, count: int) -> None:
    await kept.put_many({key(i): value(i) for i in range(count)}, 600.0)
    await kept.settled()
    assert kept.dropped == 0


async def hit(kept: RedisStore, number: int = 1) -> bool:
    return (await kept.get_many([key(number)])) == [value(number)]

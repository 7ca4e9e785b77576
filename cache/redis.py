"""RedisStore: rows that several gateways share, in one Redis that is never in a request's way.

Theory of operation. A store has two connections, one to read by and one to write by, so that a large value on its way
out delays no lookup. Each is a pipeline: commands are written in the order of asking, replies come in that order, and
`_Link` deals them out. A caller that gave up (cancelled, or out of time) keeps its place in the line, where its reply
is dropped: nobody can be given the reply of somebody else, and a time-out costs no connection. Redis runs one command
at a time; what a pool of connections would add is waiting for one of them.

One task, `_keep`, owns the connections: connect, prove by a lookup that Redis answers within the limit, serve until
something breaks, wait, begin again. No request ever connects: without connections a lookup is a miss and a put is
dropped, at once and without a system call. A lookup stands under the policy's `timeout` from its first step to its
last; a put is a task of its own that no answer waits for, under the same limit, and what Redis has not confirmed yet is
bounded in bytes.

When it is down. A connection that fails is replaced at once, and if none can be had (or this one did not last) the
store is down: a Redis that is gone says so by itself. One that is silent does not (it was paused, or its machine was),
and a single late reply may as well be this process's own fault, when the event loop was busy and many callers ran out
of time together. So three time-outs in a row take the store down, and one counts only if its command was asked after
the last one that counted was over: a burst is one, and silence is found after three limits. From then on it costs
nothing until it is back; attempts are 0.1 s apart, later 2 s. A Redis that is always too slow for the limit is down as
well, and is said to be: its lookups could only ever make requests wait.

A Redis that answers but does not take writes (a replica, a full memory, a user without the right) goes on being read.
It is written to again after a pause, and the first value that it takes then ends the matter.

`observe(reachable, reason)` is told every change among up (no reason), up and refusing writes, and down, once each.
Reasons are our own words, the system's, or Redis'; where a password was sent never Redis', which may repeat it.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeAlias

from redis.asyncio import Connection, SSLConnection
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError, ResponseError

from cache.key import Key
from policies.spec import Redis

# Before each key: tells our rows from what else is in a shared Redis, and a later format's from these.
PREFIX = b"headrace:1:"
# Larger rows are not kept: at a gigabit a second this one takes 8 ms of the limit.
MAX_VALUE_BYTES = 2**20
# Written and not yet confirmed, over all puts. Beyond it Redis is slower than the models, and rows are dropped.
_UNCONFIRMED_BYTES = 16 * 2**20
# For name resolution, TCP, TLS and credentials together: no request waits for it.
_CONNECT_SECONDS = 1.0
_PAUSE_SECONDS = (0.1, 2.0)  # between attempts: the first, doubled up to the last
# A connection that lasted as long is replaced without a pause: Redis closes idle ones (its `timeout`), proxies do.
_SETTLED_SECONDS = 2.0
_LATE_IN_A_ROW = 3
# Until a Redis that refused to write is written to again: entries end, replicas are promoted.
_REFUSED_SECONDS = 10.0

_WORDS = {
    "NOAUTH": "it wants a password",
    "WRONGPASS": "it refuses the user or the password",
    "NOPERM": "the user may not do this: +mget, +set and +select on ~headrace:* are needed",
    "READONLY": "it is a replica, which takes no writes",
    "OOM": "its memory is full: set maxmemory-policy, such as allkeys-lru",
    "MISCONF": "it takes no writes, because it cannot save them",
    "LOADING": "it is loading its data",
    "MASTERDOWN": "it is a replica that has lost its master",
    "CROSSSLOT": "it is a cluster: a cache needs a Redis of its own",
    "MOVED": "it is a cluster: a cache needs a Redis of its own",
    "CLUSTERDOWN": "it is a cluster: a cache needs a Redis of its own",
}

# Said of a proxy that lost count, or of what is no Redis at all.
_UNLIKE = "it does not answer as Redis does"

Command: TypeAlias = tuple[bytes | int, ...]
_Connection: TypeAlias = Connection | SSLConnection
_Replies: TypeAlias = asyncio.Future[list[Any] | None]


class _Link:
    """One connection, shared by all who ask. `late` counts time-outs in a row, the last one at `late_at`."""

    def __init__(self, connection: _Connection) -> None:
        assert connection._writer is not None
        self._connection = connection
        self._transport = connection._writer.transport
        self._unsent: list[Command] = []
        self._wake = asyncio.Event()
        self._waiting: deque[tuple[_Replies, int, int]] = deque()
        self.unconfirmed_bytes = 0
        self.late, self.late_at = 0, -math.inf

    def ask(self, commands: Sequence[Command], size: int = 0) -> _Replies:
        """The reply to each command, error replies among them; None if the connection is lost before the last."""
        future: _Replies = asyncio.get_running_loop().create_future()
        self._unsent += commands
        self._waiting.append((future, len(commands), size))
        self.unconfirmed_bytes += size
        self._wake.set()
        return future

    async def write(self) -> None:
        """Sends what is asked, all that came in one turn of the loop together. Raises when the connection fails."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            commands, self._unsent = self._unsent, []
            await self._connection.send_packed_command(self._connection.pack_commands(commands))

    async def read(self) -> None:
        """Deals out replies. Raises when the connection fails."""
        while True:
            replies = [await self._reply()]
            if not self._waiting:
                raise RedisError("it sent what nobody asked for")
            future, count, size = self._waiting[0]
            while len(replies) < count:
                replies.append(await self._reply())
            self._waiting.popleft()
            self.unconfirmed_bytes -= size
            if not future.done():
                future.set_result(replies)

    async def _reply(self) -> Any:
        try:
            return await self._connection.read_response()
        except ResponseError as error:
            return error

    async def close(self) -> None:
        for future, *_ in self._waiting:
            if not future.done():
                future.set_result(None)
        # The library would first send what is left, and for as long as a server hangs.
        self._transport.abort()
        await _disconnect(self._connection)


class RedisStore:
    """A `cache.store.Store` in the Redis of `spec`, from `start` to `close`; before and after it knows nothing.

    `up` is None until it is known, `reason` says why not (or why nothing is written); `dropped` counts rows that were
    to be put and, as far as is known, were not. `now` is a monotonic clock in seconds.
    """

    def __init__(self, spec: Redis, *, now: Callable[[], float], observe: Callable[[bool, str], None]) -> None:
        self.name = str(spec)
        self.up: bool | None = None
        self.reason = ""
        self.dropped = 0
        self._spec = spec
        self._now = now
        self._observe = observe
        self._links: tuple[_Link, _Link] | None = None
        self._given_up: asyncio.Future[None] | None = None
        self._writes_from = -math.inf
        self._keeper: asyncio.Task[None] | None = None
        self._puts: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Connects in the background, and from now on whenever it has to. Again: does nothing."""
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep(), context=Context())

    async def close(self) -> None:
        """Gives the puts under way their time, then ends everything."""
        await self.settled()
        self._links = None
        for task in (self._keeper, *self._puts):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def settled(self) -> None:
        """Until every put so far has been confirmed or dropped: no longer than the limit."""
        if self._puts:
            await asyncio.wait(self._puts)

    async def get_many(self, keys: Sequence[Key]) -> list[bytes | None]:
        if self._links is None or not keys:
            return [None] * len(keys)
        link = self._links[0]
        replies = await self._in_time(link, link.ask([(b"MGET", *(PREFIX + key for key in keys))]))
        if replies is None:
            return [None] * len(keys)
        try:
            return _found(replies[0], len(keys))
        except RedisError as error:
            self._give_up(self._why(error))
            return [None] * len(keys)

    async def put_many(self, values: Mapping[Key, bytes], ttl: float) -> None:
        """Returns at once; `settled` waits for what becomes of it."""
        px = int(ttl * 1000)
        fit = {key: value for key, value in values.items() if len(value) <= MAX_VALUE_BYTES}
        self.dropped += len(values) - len(fit)
        size = sum(map(len, fit.values()))
        if not fit or px < 1:
            return
        if (
            self._links is None
            or self._now() < self._writes_from
            or self._links[1].unconfirmed_bytes + size > _UNCONFIRMED_BYTES
        ):
            self.dropped += len(fit)
            return
        commands: list[Command] = [(b"SET", PREFIX + key, value, b"PX", px) for key, value in fit.items()]
        link = self._links[1]
        put = self._put(link, link.ask(commands, size), len(commands))
        task = asyncio.get_running_loop().create_task(put, context=Context())  # the rows are no one request's
        self._puts.add(task)
        task.add_done_callback(self._puts.discard)

    async def _put(self, link: _Link, future: _Replies, rows: int) -> None:
        asked = self._now()
        replies = await self._in_time(link, future)
        if replies is None:
            self.dropped += rows
            return
        refused = [reply for reply in replies if isinstance(reply, ResponseError)]
        taken = replies.count(b"OK")
        self.dropped += rows - taken
        if taken + len(refused) < rows:
            self._give_up(_UNLIKE)
        if refused:
            self._writes_from = self._now() + _REFUSED_SECONDS
        # What was asked before a refusal and confirmed after it says nothing of the time since.
        if self.up and (refused or asked >= self._writes_from):
            self._tell(True, self._why(refused[0]) if refused else "")

    async def _in_time(self, link: _Link, future: _Replies) -> list[Any] | None:
        """The replies to what was just asked, or None where they do not come in time."""
        asked = self._now()
        try:
            async with asyncio.timeout(self._spec.timeout):
                replies = await future
        except TimeoutError:
            if asked >= link.late_at:
                link.late, link.late_at = link.late + 1, self._now()
            if link.late == _LATE_IN_A_ROW:
                self._give_up(f"no reply within {self._spec.timeout * 1000:g} ms, {_LATE_IN_A_ROW} times in a row")
            return None
        link.late = 0
        return replies

    def _give_up(self, reason: str) -> None:
        if self._given_up is not None and not self._given_up.done():
            self._given_up.set_result(None)
            self._links = None
            self._tell(False, reason)

    def _tell(self, up: bool, reason: str) -> None:
        changed = (up, up and reason != "") != (self.up, bool(self.up) and self.reason != "")
        self.up, self.reason = up, reason
        if changed:
            self._observe(up, reason)

    async def _keep(self) -> None:
        """The life of the connections, over and over."""
        pause, longest = _PAUSE_SECONDS
        while True:
            try:
                links = await self._connect()
            except Exception as error:  # a defect of the library's is no more a request's failure than Redis' absence
                self._tell(False, self._why(error))
            else:
                # That it refuses writes is not over because a connection was replaced; after an absence all is new.
                if not self.up:
                    self._writes_from = -math.inf
                self._tell(True, self.reason if self.up else "")
                since = self._now()
                broken = await self._serve(links)
                if self._now() - since >= _SETTLED_SECONDS:
                    pause = _PAUSE_SECONDS[0]
                    continue
                if broken is not None:
                    self._tell(False, self._why(broken))
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _serve(self, links: tuple[_Link, _Link]) -> BaseException | None:
        """Serves until a connection fails, and returns how; None where the store was given up."""
        loop = asyncio.get_running_loop()
        given_up = self._given_up = loop.create_future()
        tasks = [loop.create_task(part) for link in links for part in (link.write(), link.read())]
        self._links = links
        try:
            await asyncio.wait([*tasks, given_up], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._links = self._given_up = None
            failed = [task.exception() for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for link in links:
                await link.close()
        return None if given_up.done() else failed[0]

    async def _connect(self) -> tuple[_Link, _Link]:
        """Two connections, the first of which has answered a lookup within the limit: raises where it did not."""
        opened: list[_Connection] = []
        try:
            for _ in range(2):
                opened.append(await self._connection())
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await opened[-1].connect()  # type: ignore[no-untyped-call]
            async with asyncio.timeout(self._spec.timeout):
                # Not PING: what will be asked may be refused where a PING is not, and by a cluster for two keys only.
                await opened[0].send_command("MGET", PREFIX, PREFIX + b"1")
                _found(await opened[0].read_response(), 2)
        except BaseException:
            for connection in opened:
                await _disconnect(connection)
            raise
        return _Link(opened[0]), _Link(opened[1])

    async def _connection(self) -> _Connection:
        where = self._spec
        fields: dict[str, Any] = {
            "host": where.host,
            "port": where.port,
            "db": where.database,
            "username": where.user or None,
            "password": where.password.value if where.password else None,
            # Time limits are the store's; there are no tries but its own, and no commands beyond what it needs.
            "socket_timeout": None,
            "socket_connect_timeout": _CONNECT_SECONDS,
            "protocol": 2,
            "driver_info": None,
        }
        if not where.tls:
            return Connection(**fields)
        connection = SSLConnection(**fields)
        # The library would trust the system's authorities beside `ca_file`. Reading them takes too long for the loop.
        connection.ssl_context.context = await asyncio.to_thread(
            ssl.create_default_context, cafile=where.ca_file or None
        )
        return connection

    def _why(self, error: BaseException) -> str:
        """What went wrong, in a line that shows no secret."""
        text = " ".join(str(error).split())[:200]
        if isinstance(error, TimeoutError):
            return text or "no answer in time"
        code = getattr(error, "status_code", None) or ("LOADING" if isinstance(error, BusyLoadingError) else "")
        if code in _WORDS:
            return f"{code}: {_WORDS[code]}"
        if isinstance(error, AuthenticationError):
            return "it refuses the user or the password"
        if isinstance(error, ResponseError) and self._spec.password:
            return "it answers with an error"
        return text or type(error).__name__


def _found(reply: Any, count: int) -> list[bytes | None]:
    """A lookup's reply. Raises RedisError where it is an error, or none of Redis': a value that is none harms rows."""
    if isinstance(reply, ResponseError):
        raise reply
    if not (isinstance(reply, list) and len(reply) == count and all(isinstance(v, bytes | None) for v in reply)):
        raise RedisError(_UNLIKE)
    return reply


async def _disconnect(connection: _Connection) -> None:
    with suppress(RedisError, OSError):
        await connection.disconnect(nowait=True)

"""An HTTP/1.1 server for one ASGI application: asyncio.Protocol, httptools, one task and one write a request.

Theory of operation. A connection parses what comes and answers its requests in their order, one task at a time; what
was pipelined waits. A request's body usually comes with its head, before its task runs: then `scope[WHOLE]()` is the
body, and nobody has to wait for it. What cannot be parsed is refused after the answers to what came before it. Whoever
goes away, be it by half, has its task cancelled.

An `Exchange` (gateway/exchange.py) is one request and its response; a `Connection` (gateway/connection.py) has them.

Bounds: a head in bytes and seconds, a body by what its reader takes (beyond HIGH_WATER_BYTES unread the connection is
read no further), a slow reader of a response by the transport's buffer, one that reads nothing in seconds, idling in
seconds; one timer a server looks after all of them. Trailers are dropped; an upgrade is ignored, its body is not. A
connection that ends while its client may still be sending lingers: what comes is read and dropped, within bounds, so
that the answer is not lost to a reset. A handshake of TLS has the time of a head; a connection whose handshake fails
never was one.

Connections are bounded in number, handshakes included, and by the file descriptors that the process may have: one too
many is told so (503) and closed. When they are nearly too many, those that idle, and heads that do not come, get
seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from math import inf
from pathlib import Path

from backends.secured import Secured
from backends.tls import explained
from gateway.connection import Connection
from gateway.departures import Departures
from gateway.server import HEAD_SECONDS, KEEP_ALIVE_SECONDS, Asgi, listen
from gateway.sockets import most_files
from gateway.tls import server_context
from policies.spec import Address, ListenTls

_log = logging.getLogger("headrace.tls")
# How long a client may take nothing of what was written for it, in seconds.
STALL_SECONDS = 60.0
# How often connections are looked after: what times out does so at most this much later, in seconds.
_SWEEP_SECONDS = 1.0
# When connections are nearly too many, and how long one may then idle, in seconds: longer than a busy client pauses.
_CROWDED = 0.75
_CROWDED_SECONDS = 5.0
# Of the file descriptors that the process may have, for connections of callers; the others are for backends.
_FILES = 0.75
# How long tasks that were cut may take to end, in seconds.
_CUT_SECONDS = 1.0


class Http1Server:
    """One listener, of a port alone or `shared` with other processes, or of a Unix socket.

    `report` hears of what the application raises; limits are in seconds. With `tls` connections begin by a handshake;
    `renew` gives those that come later another certificate.
    """

    def __init__(
        self,
        app: Asgi,
        address: Address | Path,
        drain_seconds: float,
        *,
        shared: bool = False,
        tls: ListenTls | None = None,
        now: Callable[[], float],
        report: Callable[[BaseException], None],
        head_seconds: float = HEAD_SECONDS,
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
        stall_seconds: float = STALL_SECONDS,
        limit: Callable[[], int] = lambda: 10_000,
    ) -> None:
        self.app = app
        self.now = now
        self.report = report
        self.head_seconds = head_seconds
        self.keep_alive_seconds = keep_alive_seconds
        self.stall_seconds = stall_seconds
        self.patience = inf  # seconds that whoever idles gets at most
        self.connections: set[Connection] = set()
        self.scheme = "https" if tls else "http"
        self.shaking: dict[Secured, float] = {}  # handshakes that are under way, and when they began
        self.draining = self.closing = False
        self.date = b""
        self.port = 0
        self._tls = server_context(tls) if tls else None
        self._address = address
        self._shared = shared
        self._limit = limit
        self._drain_seconds = drain_seconds
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Opens the port. Raises OSError, naming the address, where it is taken."""
        self.loop = asyncio.get_running_loop()
        self.departures = Departures()
        listener = listen(self._address, shared=self._shared)
        if isinstance(self._address, Address):
            self.port = listener.getsockname()[1]
        self._sweep()
        arrive = partial(Connection, self) if self._tls is None else self._secured
        self._server = await self.loop.create_server(arrive, sock=listener, backlog=2048)

    def renew(self, tls: ListenTls) -> None:
        """Connections that come from now on are shown this certificate, and checked by these authorities."""
        self._tls = server_context(tls)

    def drain(self) -> None:
        """From now on every answer is its connection's last; connections are taken as before."""
        self.draining = True

    async def close(self) -> None:
        """Refuses new connections, answers what is in flight until the drain time is over, then cuts what is left."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        for handshake in list(self.shaking):
            handshake.abort()
        for connection in list(self.connections):
            connection.shut()
        until = self.now() + self._drain_seconds
        while self.connections and self.now() < until:  # noqa: ASYNC110 - once in a process's life
            await asyncio.sleep(0.01)
        cut = [task for connection in list(self.connections) if (task := connection.abort()) is not None]
        await asyncio.sleep(0)
        if cut:
            await asyncio.wait(cut, timeout=_CUT_SECONDS)
        if self._timer is not None:
            self._timer.cancel()
        self.departures.close()

    def _secured(self) -> Secured:
        assert self._tls is not None
        return Secured(Connection(self), self._tls, server_name=None, shaken=self._shaken, shaking=self._shaking)

    def _shaking(self, transport: Secured) -> None:
        self.shaking[transport] = self.now()
        if len(self.connections) + len(self.shaking) > self.limit:
            transport.abort()

    def _shaken(self, transport: Secured, error: Exception | None) -> None:
        del self.shaking[transport]
        if error is not None:  # whatever knocks on a port: no more than a hint for who looks for it
            _log.debug("handshake failed", extra={"fields": {"reason": explained(error)}})

    @property
    def limit(self) -> int:
        """How many connections there may be."""
        return max(1, min(self._limit(), int(most_files() * _FILES)))

    def _sweep(self) -> None:
        self.look_after()
        self._timer = self.loop.call_later(_SWEEP_SECONDS, self._sweep)

    def look_after(self) -> None:
        """Ends the connections that have taken too long."""
        self.date = b"date: %b\r\n" % formatdate(usegmt=True).encode()
        now = self.now()
        crowd = len(self.connections) + len(self.shaking)
        self.patience = _CROWDED_SECONDS if crowd > _CROWDED * self.limit else inf
        for connection in list(self.connections):
            connection.sweep(now)
        for handshake, since in list(self.shaking.items()):
            if now - since > min(self.head_seconds, self.patience):
                handshake.abort()

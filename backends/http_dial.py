"""Where the connections of a pool lead: to one of the addresses that the host stands for, under TLS if it is to be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from backends.addresses import Addresses, Resolve
from backends.deadlines import GRAIN
from backends.http_connection import Connection
from backends.tls import ClientTls


class Dialer:
    """Connects to `host`. `moved` is told when its name stands for other addresses.

    Without `resolve` the event loop looks a name up at each connect.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        now: Callable[[], float],
        resolve: Resolve | None,
        tls: ClientTls | None,
        moved: Callable[[], None],
    ) -> None:
        self._host = host
        self._port = port
        self._now = now
        self._tls = tls
        self._addresses = Addresses.of(host, resolve, now, moved)
        self._turn = 0

    def refresh(self) -> None:
        """Ask anew, in the background, what the host's name stands for, where the last answer is old."""
        if self._addresses is not None:
            self._addresses.refresh()

    def close(self) -> None:
        if self._addresses is not None:
            self._addresses.close()

    def astray(self, connection: Connection) -> bool:
        """Whether `connection` leads to an address that is no longer the host's."""
        return self._addresses is not None and connection.address not in self._addresses.known

    async def dial(self, make: Callable[[], Connection], until: float) -> Connection:
        """A connection to the next of the host's addresses, or to the first one after it that takes it.

        Each but the last has its share of the time that is left `until` then; the last one is the caller's to end.
        Raises OSError, UnicodeError or OverflowError where there is none.
        """
        addresses = self._addresses
        if addresses is None:
            return await self._dial(make, self._host)
        known = await addresses.get()
        turn = self._turn = self._turn + 1  # others connect meanwhile
        for left in range(len(known), 0, -1):
            address = known[(turn - left) % len(known)]
            share = max(until - self._now(), 0.0) / left + GRAIN if left > 1 else None
            try:
                async with asyncio.timeout(share):
                    connection = await self._dial(make, address)
            except OSError:
                if left == 1:
                    raise
            else:
                connection.address = address
                connection.retiring = self.astray(connection)
                return connection
        raise AssertionError("a name that is known has an address")

    async def _dial(self, make: Callable[[], Connection], host: str) -> Connection:
        """A connection to this address of the host, after its handshake."""
        connection = make()
        if self._tls is None:
            await asyncio.get_running_loop().create_connection(lambda: connection, host, self._port)
        else:
            await self._tls.connect(connection, host, self._port, self._host)
        return connection

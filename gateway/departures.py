"""Clients that leave while nothing is read from them, noticed at once (Linux).

Who does not read a socket does not learn of its end from an event loop: it stands behind what was not read. The kernel
knows of it as soon as it has come (EPOLLRDHUP, EPOLLHUP), and one epoll of our own, which the loop watches like any
socket, says so for all sockets that are held. What stays unseen is an end that has not come: that of a client which
left when more of what it had sent was on its way than our kernel takes (the socket's receive buffer). To TCP it is like
one that lives and waits for us to read on. Elsewhere than on Linux such clients are noticed when they are read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable


class Departures:
    """Belongs to the event loop that it is made in; is to be closed."""

    def __init__(self) -> None:
        self._left: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._loop = asyncio.get_running_loop()
        if self._epoll is not None:
            self._loop.add_reader(self._epoll.fileno(), self._look)

    def watch(self, socket: int, left: Callable[[], None]) -> None:
        """`left()` is called, once, when the peer of this socket (by number) ends its side or resets."""
        if self._epoll is not None:
            self._left[socket] = left
            self._epoll.register(socket, select.EPOLLRDHUP | select.EPOLLONESHOT)  # HUP and ERR are always told

    def forget(self, socket: int) -> None:
        """Watches no more, before the socket is closed."""
        if self._left.pop(socket, None) is not None and self._epoll is not None:
            with contextlib.suppress(OSError):  # the transport may have closed it already
                self._epoll.unregister(socket)

    def close(self) -> None:
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None

    def _look(self) -> None:
        if self._epoll is not None:
            for socket, _ in self._epoll.poll(0):
                if left := self._left.get(socket):
                    self.forget(socket)
                    left()

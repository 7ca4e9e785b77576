"""Turns: in what order the requests of a stream are answered, whoever has the answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Turn:
    """A request's place among all that are owed an answer. `free`: nobody waits for it any more."""

    __slots__ = ("free", "id", "waiter")

    def __init__(self, id: bytes) -> None:
        self.id = id
        self.free = False
        self.waiter: asyncio.Future[None] | None = None


class Turns:
    """The turns of one stream, first come first served. `released` is told of each that is owed no more."""

    def __init__(self, released: Callable[[], None]) -> None:
        self.owed = 0
        self._released = released
        self._order: deque[Turn] = deque()

    def take(self, id: bytes) -> Turn:
        """The place of a request behind all others."""
        turn = Turn(id)
        self._order.append(turn)
        self.owed += 1
        return turn

    def first(self) -> Turn | None:
        """Whose turn it is."""
        order = self._order
        while order and order[0].free:
            order.popleft()
        return order[0] if order else None

    async def wait(self, turn: Turn) -> None:
        """Returns when it is its turn, or nobody's business any more."""
        while not turn.free and self.first() is not turn:
            turn.waiter = asyncio.get_running_loop().create_future()
            await turn.waiter

    def release(self, turn: Turn) -> None:
        """The request has been answered, or is not waited for; the next one's waiter, if it is first, goes on."""
        if turn.free:
            return
        turn.free = True
        self.owed -= 1
        self._released()
        first = self.first()
        if first is not None and first.waiter is not None and not first.waiter.done():
            first.waiter.set_result(None)

    def unanswered(self) -> list[bytes]:
        """The ids of all that are owed an answer, in their order."""
        return [turn.id for turn in self._order if not turn.free]

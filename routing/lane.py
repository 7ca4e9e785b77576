"""A lane: the queue of entries that may share a batch, first come first served."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from typing import Any

import msgspec


class Entry(msgspec.Struct, eq=False):
    """One caller's work while it waits. `limit` is the time at which waiting stops making sense, in clock seconds.

    An entry that is `alone` never shares a batch. `number` is its place among all arrivals; `tried` holds the endpoints
    that did not take it, by number: with `lane` it says whose batch it may share. One with `only` goes to the endpoint
    of that number, whatever becomes of it; all of its lane do. `caller` is whatever the shell keeps of the caller; the
    dispatcher never looks at it.
    """

    rows: int
    arrived: float
    limit: float
    caller: Any
    alone: bool = False
    lane: Hashable = None
    number: int = 0
    tried: tuple[int, ...] = ()
    queued: bool = False
    only: int | None = None


Key = tuple[Hashable, tuple[int, ...]]  # of a lane: what its entries came with, and who did not take them


class Lane:
    """Entries in order of arrival. An entry that left early stays as a ghost until it reaches the head."""

    __slots__ = ("_entries", "key", "rows")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.rows = 0
        self._entries: deque[Entry] = deque()

    def add(self, entry: Entry) -> None:
        entry.queued = True
        self._entries.append(entry)
        self.rows += entry.rows

    def restore(self, entries: list[Entry]) -> None:
        """Puts back entries that were taken, in order, before all that arrived after them."""
        for entry in entries:
            entry.queued = True
            self.rows += entry.rows
        self._entries = deque(heapq.merge(entries, self._entries, key=lambda entry: entry.number))

    def remove(self, entry: Entry) -> None:
        """Takes out an entry that is queued here."""
        entry.queued = False
        self.rows -= entry.rows

    @property
    def head(self) -> Entry | None:
        """The oldest entry that still waits."""
        entries = self._entries
        while entries and not entries[0].queued:
            entries.popleft()
        return entries[0] if entries else None

    def take(self, max_rows: int) -> list[Entry]:
        """The next batch: entries in order up to `max_rows`; one larger than that goes alone, as it is."""
        taken: list[Entry] = []
        rows = 0
        while (entry := self.head) is not None:
            if taken and (entry.alone or taken[0].alone or rows + entry.rows > max_rows):
                break
            self._entries.popleft()
            self.remove(entry)
            taken.append(entry)
            rows += entry.rows
        return taken

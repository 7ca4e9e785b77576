"""Where cached rows are kept: the protocol, and the store in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from cache.key import Key

# What an entry costs beside its bytes: key, tuple, dictionary slot.
_ENTRY_OVERHEAD_BYTES = 200


class Store(Protocol):
    """Keeps values by key for a time. Raises nothing a request would have to fail for: what is lost is a miss."""

    async def get_many(self, keys: Sequence[Key]) -> list[bytes | None]:
        """The value of each key, None where there is none (any more)."""
        ...

    async def put_many(self, values: Mapping[Key, bytes], ttl: float) -> None:
        """Keeps each value for `ttl` seconds, or shorter where the store is full."""
        ...


class MemoryStore:
    """A store in this process: bounded in entries and bytes, least recently used goes first."""

    def __init__(self, max_entries: int, max_bytes: int, now: Callable[[], float]) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._now = now
        self._entries: OrderedDict[Key, tuple[float, bytes]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def get_many(self, keys: Sequence[Key]) -> list[bytes | None]:
        now = self._now()
        return [self._get(key, now) for key in keys]

    async def put_many(self, values: Mapping[Key, bytes], ttl: float) -> None:
        until = self._now() + ttl
        for key, value in values.items():
            self._drop(key)
            size = len(value) + _ENTRY_OVERHEAD_BYTES
            if size > self._max_bytes:
                continue
            self._entries[key] = (until, value)
            self.bytes += size
            while len(self._entries) > self._max_entries or self.bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def _get(self, key: Key, now: float) -> bytes | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry[0] <= now:
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return entry[1]

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= len(entry[1]) + _ENTRY_OVERHEAD_BYTES

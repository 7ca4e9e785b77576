"""The dispatcher of one backend: lanes, slots, and which batch goes next. The only owner of both.

Theory of operation. Entries that may share a batch wait in one lane, found by its key. An endpoint runs `slots` batches
at once. `step(now)` runs once per loop turn, after everything that arrived in that turn has been offered, so that rows
which arrive together leave together. It first fails what has waited past its limit, then fills every free slot: the
lane whose head has waited longest gives a batch of at most `max_rows` rows, to the endpoint with most free slots (one
that is known not to be ready fails fast, and would else attract everything: it comes last). A
free slot releases a batch at once (greedy): while all slots are busy the lanes fill by themselves, which is where
batches come from. A batch is decided at the moment it leaves, so that it grows until then.

Bounds. At most `queue_rows` rows wait in all (an offer beyond is Rejected, with the time the present queue needs as
Retry-After), and none longer than the limit it came with. Work that is larger than `max_rows` passes alone.

Deliberately not here: time (it is an argument), I/O (a batch is returned, `done` reports it back), callers.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from backends.errors import Rejected
from policies.spec import Batch as BatchSpec
from routing.lane import Entry, Lane


@dataclass(slots=True, eq=False)
class Batch:
    """Entries that leave together, for the endpoint (by index) whose slot they hold until `done`."""

    entries: list[Entry]
    rows: int
    endpoint: int
    reason: str
    started: float


@dataclass(slots=True)
class Step:
    """What one step decided: I/O to start, entries to fail, and when the next step is due if nothing happens before."""

    batches: list[Batch] = field(default_factory=list)
    expired: list[Entry] = field(default_factory=list)
    wake: float | None = None


class Dispatcher:
    """Lanes and slots of one backend. Synchronous; `now` is in seconds and never goes back."""

    def __init__(self, limits: BatchSpec, endpoints: int = 1) -> None:
        self.limits = limits
        self.free = [limits.slots] * endpoints
        self.waiting_rows = 0
        self._lanes: OrderedDict[Hashable, Lane] = OrderedDict()
        self._limits: list[tuple[float, int, Entry]] = []
        self._numbers = itertools.count()
        self._seconds_per_row = 0.0
        self._turn = 0

    @property
    def running(self) -> int:
        """Batches in flight."""
        return self.limits.slots * len(self.free) - sum(self.free)

    def offer(self, entry: Entry, key: Hashable) -> None:
        """Queues `entry` in the lane `key`. Raises Rejected when the queue is full."""
        if self.waiting_rows and self.waiting_rows + entry.rows > self.limits.queue_rows:
            raise Rejected(
                f"queue full: {self.waiting_rows} rows wait, limit {self.limits.queue_rows}",
                retry_after=self.predicted_wait(),
            )
        entry.lane = key
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
        lane.add(entry)
        self.waiting_rows += entry.rows
        heapq.heappush(self._limits, (entry.limit, next(self._numbers), entry))

    def withdraw(self, entry: Entry) -> bool:
        """Takes a queued entry out, for a caller that has left; False where it has left the queue already."""
        if not entry.queued:
            return False
        self._lanes[entry.lane].remove(entry)
        self.waiting_rows -= entry.rows
        return True

    def step(self, now: float, unready: Collection[int] = ()) -> Step:
        """Everything that is due at `now`. Endpoints that are `unready` get a batch only where no other has a slot."""
        step = Step()
        while self._limits and self._limits[0][0] <= now:
            entry = heapq.heappop(self._limits)[2]
            if self.withdraw(entry):
                step.expired.append(entry)
        while (endpoint := self._freest(unready)) is not None and (lane := self._oldest()) is not None:
            entries = lane.take(self.limits.max_rows)
            rows = sum(entry.rows for entry in entries)
            self.waiting_rows -= rows
            self.free[endpoint] -= 1
            self._turn += 1
            reason = "full" if rows >= self.limits.max_rows or lane.rows else "idle_slot"
            step.batches.append(Batch(entries, rows, endpoint, reason, now))
        while self._limits and not self._limits[0][2].queued:
            heapq.heappop(self._limits)
        if self._limits:
            step.wake = self._limits[0][0]
        return step

    def done(self, batch: Batch, now: float) -> None:
        """Gives back the slot of a batch, however it ended."""
        self.free[batch.endpoint] += 1
        if batch.rows:
            sample = (now - batch.started) / batch.rows
            # A plain moving average (weight 1/8) is enough for a Retry-After.
            self._seconds_per_row += (sample - self._seconds_per_row) / 8 if self._seconds_per_row else sample

    def predicted_wait(self) -> float:
        """Seconds until a row that is queued now would start, from the recent time per row; at least one second."""
        slots = self.limits.slots * len(self.free)
        return max(1.0, self.waiting_rows * self._seconds_per_row / slots)

    def _freest(self, unready: Collection[int]) -> int | None:
        """The endpoint with most free slots, the ready ones first; ties go round."""
        count = len(self.free)
        if count == 1:
            return 0 if self.free[0] else None
        order = [(i + self._turn) % count for i in range(count) if self.free[(i + self._turn) % count]]
        return max(order, key=lambda i: (i not in unready, self.free[i]), default=None)

    def _oldest(self) -> Lane | None:
        """The lane whose head has waited longest. Empty lanes are dropped on the way."""
        oldest: Lane | None = None
        since = 0.0
        for key in list(self._lanes):
            lane = self._lanes[key]
            head = lane.head
            if head is None:
                del self._lanes[key]
            elif oldest is None or head.arrived < since:
                oldest, since = lane, head.arrived
        return oldest

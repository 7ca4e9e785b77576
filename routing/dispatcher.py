"""The dispatcher of one backend: lanes, slots, and which batch goes next. The only owner of both.

Theory of operation. Entries that may share a batch wait in one lane, found by its key. An endpoint runs `slots` batches
at once. `step(now)` runs once per loop turn, after everything that arrived in that turn has been offered, so that rows
which arrive together leave together. It first fails what has waited past its limit, then fills every free slot: the
lane whose head came first gives a batch of at most `max_rows` rows, to the endpoint with most free slots. A
free slot releases a batch at once (greedy): while all slots are busy the lanes fill by themselves, which is where
batches come from. A batch is decided at the moment it leaves, so that it grows until then.

Replicas. An endpoint that is known not to be ready fails fast, and would attract everything: its slots count only while
no endpoint is ready. Those of one that is avoided for a lane count for it only while no other is ready. What an
endpoint did not take (it never got it, or it was busy) may be put back: to its old place among all arrivals, with the
limit that it came with. There it waits for an endpoint that is ready and was not tried, while there is one; so each is
tried once, and it ends. A lane holds only entries that the same endpoints did not take: whatever may go at all goes at
once, and who waits for one endpoint is in nobody's way to another.

Work that belongs to one endpoint (a stateful sequence that runs there) waits for a slot of that one, ready or not, in a
lane of its own.

Bounds. At most `queue_rows` rows wait in all (an offer beyond is Rejected, with the time the present queue needs as
Retry-After), and none longer than the limit it came with. Work that is larger than `max_rows` passes alone.

Deliberately not here: time (it is an argument), I/O (a batch is returned, `done` reports it back), callers.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Hashable

import msgspec

from backends.errors import Rejected
from policies.spec import Batch as BatchSpec
from routing.lane import Entry, Key, Lane

Avoided = Callable[[Hashable], Collection[int]]  # the endpoints that a lane's key is kept from


class Batch(msgspec.Struct, eq=False):
    """Entries that leave together, for the endpoint (by index) whose slot they hold until `done`."""

    entries: list[Entry]
    rows: int
    endpoint: int
    reason: str
    started: float


class Step(msgspec.Struct):
    """What one step decided: I/O to start, entries to fail, and when the next step is due if nothing happens before."""

    batches: list[Batch] = []
    expired: list[Entry] = []
    wake: float | None = None


class Dispatcher:
    """Lanes and slots of one backend. Synchronous; `now` is in seconds and never goes back."""

    def __init__(self, limits: BatchSpec, endpoints: int = 1) -> None:
        self.limits = limits
        self.free = [limits.slots] * endpoints
        self.waiting_rows = 0
        self._lanes: dict[Key, Lane] = {}  # none is empty
        self._limits: list[tuple[float, int, Entry]] = []
        self._numbers = itertools.count()
        self._seconds_per_row = 0.0
        self._turn = 0

    @property
    def running(self) -> int:
        """Batches in flight."""
        return self.limits.slots * len(self.free) - sum(self.free)

    @property
    def put_back(self) -> bool:
        """Whether anything waits that was put back: where that may go depends on which endpoints are ready."""
        return any(tried for _, tried in self._lanes)

    def offer(self, entry: Entry, key: Hashable) -> None:
        """Queues `entry` in the lane `key`. Raises Rejected when the queue is full."""
        if self.waiting_rows and self.waiting_rows + entry.rows > self.limits.queue_rows:
            raise Rejected(
                f"queue full: {self.waiting_rows} rows wait, limit {self.limits.queue_rows}",
                retry_after=self.predicted_wait(),
            )
        entry.lane = key
        entry.number = next(self._numbers)
        self._lane(entry).add(entry)
        self.waiting_rows += entry.rows
        heapq.heappush(self._limits, (entry.limit, entry.number, entry))

    def withdraw(self, entry: Entry) -> bool:
        """Takes a queued entry out, for a caller that has left; False where it has left the queue already."""
        if not entry.queued:
            return False
        lane = self._lane(entry)
        lane.remove(entry)
        self._left(lane, entry.rows)
        return True

    def step(self, now: float, unready: Collection[int] = (), avoided: Avoided | None = None) -> Step:
        """Everything that is due at `now`.

        Endpoints that are `unready` get a batch only where all are; `avoided` gives those that a lane's key is kept
        from while another one is ready.
        """
        step = Step()
        while self._limits and self._limits[0][0] <= now:
            entry = heapq.heappop(self._limits)[2]
            # An entry that was put back may have got more time: then it stands here once more.
            if entry.limit <= now and self.withdraw(entry):
                step.expired.append(entry)
        while self.waiting_rows and (choice := self._next(unready, avoided)) is not None:
            lane, endpoint = choice
            rows = lane.rows
            entries = lane.take(self.limits.max_rows)
            rows -= lane.rows
            self._left(lane, rows)
            self.free[endpoint] -= 1
            self._turn += 1
            reason = "full" if rows >= self.limits.max_rows or lane.rows else "idle_slot"
            step.batches.append(Batch(entries, rows, endpoint, reason, now))
        while self._limits and not self._limits[0][2].queued:
            heapq.heappop(self._limits)
        if self._limits:
            step.wake = self._limits[0][0]
            if len(self._limits) > 2 * self.waiting_rows + 64:
                self._sweep()
        return step

    def done(self, batch: Batch, now: float) -> None:
        """Gives back the slot of a batch, however it ended."""
        assert self.free[batch.endpoint] < self.limits.slots, "a slot is given back once"
        self.free[batch.endpoint] += 1
        if batch.rows:
            sample = (now - batch.started) / batch.rows
            # A plain moving average (weight 1/8) is enough for a Retry-After.
            self._seconds_per_row += (sample - self._seconds_per_row) / 8 if self._seconds_per_row else sample

    def another(self, entry: Entry, batch: Batch, unready: Collection[int]) -> bool:
        """Whether `entry`, which left in `batch`, has an endpoint left that is ready and was not tried."""
        count = len(self.free)
        if entry.only is not None:
            return False
        return len(entry.tried) < count - 1 and len({batch.endpoint, *entry.tried, *unready}) < count

    def requeue(self, batch: Batch, entries: list[Entry]) -> None:
        """Puts back `entries` of a batch that its endpoint did not take; the slot is held until `done`."""
        for entry in entries:
            entry.tried = tuple(sorted((*entry.tried, batch.endpoint)))
            batch.entries.remove(entry)
            batch.rows -= entry.rows
            self.waiting_rows += entry.rows
            heapq.heappush(self._limits, (entry.limit, next(self._numbers), entry))
        self._lane(entries[0]).restore(entries)  # they came out of one lane, and go into one

    def predicted_wait(self) -> float:
        """Seconds until a row that is queued now would start, from the recent time per row; at least one second."""
        slots = self.limits.slots * len(self.free)
        return max(1.0, self.waiting_rows * self._seconds_per_row / slots)

    def _lane(self, entry: Entry) -> Lane:
        """The lane that `entry` waits in, or is going to."""
        key = (entry.lane, entry.tried)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
        return lane

    def _left(self, lane: Lane, rows: int) -> None:
        """Counts `rows` that have left `lane`, and drops it where they were the last."""
        self.waiting_rows -= rows
        if not lane.rows:
            del self._lanes[lane.key]

    def _sweep(self) -> None:
        """Forgets the limits of all that waits no more: one entry that waits long keeps those of all that passed it."""
        waiting = {entry for _, _, entry in self._limits if entry.queued}
        self._limits = [(entry.limit, entry.number, entry) for entry in waiting]
        heapq.heapify(self._limits)

    def _next(self, unready: Collection[int], avoided: Avoided | None) -> tuple[Lane, int] | None:
        """The lane whose head came first of those that a free slot is for, and the endpoint of that slot."""
        if not any(self.free):
            return None
        choice: tuple[Lane, int] | None = None
        first = 0
        for lane in self._lanes.values():
            head = lane.head
            if head is not None and (choice is None or head.number < first):
                if head.only is not None:
                    endpoint = self._own(head.only)
                else:
                    endpoint = self._freest(unready, avoided(head.lane) if avoided else (), head.tried)
                if endpoint is not None:
                    choice, first = (lane, endpoint), head.number
        return choice

    def _own(self, endpoint: int) -> int | None:
        return endpoint if self.free[endpoint] else None

    def _freest(self, unready: Collection[int], avoided: Collection[int], tried: Collection[int]) -> int | None:
        """The endpoint with most free slots among the best there are, None where those are busy; ties go round."""
        count = len(self.free)
        if count == 1:
            return 0 if self.free[0] else None
        every = [(i + self._turn) % count for i in range(count)]
        ready = [i for i in every if i not in unready] or every
        if avoided:
            ready = [i for i in ready if i not in avoided] or ready
        fresh = [i for i in ready if i not in tried] or ready
        best = max(fresh, key=self.free.__getitem__)
        return best if self.free[best] else None

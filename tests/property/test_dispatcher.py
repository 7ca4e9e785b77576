"""The dispatcher under any sequence of arrivals, departures, completions, refusals and endpoints that come and go."""

from __future__ import annotations

import itertools
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from backends.errors import Rejected
from policies.spec import Batch as Limits
from routing.dispatcher import Batch, Dispatcher
from routing.lane import Entry

limits = st.builds(
    Limits,
    max_rows=st.integers(1, 6),
    slots=st.integers(1, 3),
    queue_rows=st.integers(1, 20),
    queue_time=st.just(1.0),
)
arrivals = st.tuples(
    st.just("arrive"),
    st.integers(1, 8),
    st.sampled_from("abc"),
    st.floats(0.0, 2.0),
    st.sampled_from([False] * 4 + [True]),
)
events = st.lists(
    arrivals
    | st.tuples(st.just("leave"), st.randoms(use_true_random=False))
    | st.tuples(st.just("done"), st.randoms(use_true_random=False))
    | st.tuples(st.just("refuse"), st.randoms(use_true_random=False))
    | st.tuples(st.just("flap"), st.integers(0, 2))
    | st.tuples(st.just("turn"), st.sampled_from([0.0, 0.1, 0.5]))
    | st.tuples(st.just("wake")),
    max_size=60,
)


class World:
    """A dispatcher, its clock, and what became of each entry."""

    def __init__(self, spec: Limits, endpoints: int) -> None:
        self.dispatcher = Dispatcher(spec, endpoints)
        self.spec = spec
        self.now = 0.0
        self.wake: float | None = None
        self.fate: dict[Entry, str] = {}
        self.number: dict[Entry, int] = {}
        self.running: list[Batch] = []
        self.free = [spec.slots] * endpoints
        self.unready: set[int] = set()

    @property
    def waiting(self) -> list[Entry]:
        return [entry for entry, fate in self.fate.items() if fate == "waiting"]

    def arrive(self, rows: int, key: str, patience: float, alone: bool) -> None:
        entry = Entry(rows, self.now, self.now + patience, None, alone)
        waiting = sum(each.rows for each in self.waiting)
        try:
            self.dispatcher.offer(entry, key)
        except Rejected:
            assert waiting
            assert waiting + rows > self.spec.queue_rows
            assert not entry.queued
            return
        assert not waiting or waiting + rows <= self.spec.queue_rows
        self.fate[entry] = "waiting"
        self.number[entry] = len(self.number)

    def leave(self, chance: random.Random) -> None:
        if not self.fate:
            return
        entry = chance.choice(list(self.fate))
        waited = self.fate[entry] == "waiting"
        assert self.dispatcher.withdraw(entry) == waited
        if waited:
            self.fate[entry] = "withdrawn"

    def done(self, chance: random.Random) -> None:
        if self.running:
            batch = self.running.pop(chance.randrange(len(self.running)))
            self.finish(batch)

    def finish(self, batch: Batch) -> None:
        self.dispatcher.done(batch, self.now)
        self.free[batch.endpoint] += 1

    def refuse(self, chance: random.Random) -> None:
        """An endpoint does not take a batch: a part of it goes back, while the rest is failed, or its callers left."""
        if not self.running:
            return
        batch = self.running.pop(chance.randrange(len(self.running)))
        entries = list(batch.entries)
        again = [
            entry
            for entry in entries
            if chance.random() < 0.8 and entry.limit > self.now and self.dispatcher.another(entry, batch, self.unready)
        ]
        if again:
            self.dispatcher.requeue(batch, again)
        for entry in again:
            assert self.fate[entry] == "sent"
            self.fate[entry] = "waiting"
            assert len(entry.tried) < len(self.free)
        assert batch.entries == [entry for entry in entries if entry not in again]
        assert batch.rows == sum(entry.rows for entry in batch.entries)
        self.finish(batch)

    def fit(self, entry: Entry) -> set[int]:
        """The endpoints that an entry may go to, were they free."""
        every = set(range(len(self.free)))
        ready = every - self.unready or every
        return ready - set(entry.tried) or ready

    def step(self) -> None:
        step = self.dispatcher.step(self.now, self.unready)
        for entry in step.expired:
            assert self.fate[entry] == "waiting"
            assert entry.limit <= self.now
            self.fate[entry] = "expired"
        for batch in step.batches:
            self.check(batch)
        self.wake = step.wake
        waiting = self.waiting
        assert all(entry.limit > self.now for entry in waiting)
        for entry in waiting:
            assert not any(self.free[i] for i in self.fit(entry)), "a free slot releases a batch"
        assert step.wake == min((entry.limit for entry in waiting), default=None)
        assert self.dispatcher.put_back == any(entry.tried for entry in waiting)
        assert self.dispatcher.waiting_rows == sum(entry.rows for entry in waiting)
        assert self.dispatcher.free == self.free
        assert all(0 <= free <= self.spec.slots for free in self.free)
        assert self.dispatcher.running == len(self.running)

    def happens(self, event: tuple[Any, ...]) -> None:
        match event:
            case "arrive", *arguments:
                self.arrive(*arguments)
            case "leave", chance:
                self.leave(chance)
            case "done", chance:
                self.done(chance)
                self.step()
            case "refuse", chance:
                self.refuse(chance)
                self.step()
            case "flap", endpoint:
                self.unready ^= {endpoint} & set(range(len(self.free)))
            case "turn", seconds:
                self.now += seconds
                self.step()
            case ("wake",) if self.wake is not None:
                self.now = max(self.now, self.wake)
                self.step()

    def ends(self) -> None:
        """Every batch comes back: then nothing is left, and nothing was lost."""
        while self.running or self.waiting:
            self.done(random.Random(0))
            self.step()
        assert self.dispatcher.waiting_rows == self.dispatcher.running == 0
        assert set(self.fate.values()) <= {"sent", "expired", "withdrawn"}
        assert self.dispatcher.step(self.now + 10).wake is None

    def check(self, batch: Batch) -> None:
        entries = batch.entries
        assert batch.rows == sum(entry.rows for entry in entries)
        assert batch.rows <= self.spec.max_rows or len(entries) == 1
        assert len(entries) == 1 or not any(entry.alone for entry in entries)
        ((key, tried),) = {(entry.lane, entry.tried) for entry in entries}
        head = entries[0]
        fit = self.fit(head)
        assert batch.endpoint in fit
        assert self.free[batch.endpoint] == max(self.free[i] for i in fit) > 0
        waiting = sorted(self.waiting, key=self.number.__getitem__)
        for other in itertools.takewhile(lambda other: other is not head, waiting):
            assert not any(self.free[i] for i in self.fit(other)), "who came first goes first"
        lane = [entry for entry in waiting if (entry.lane, entry.tried) == (key, tried)]
        assert lane[: len(entries)] == entries, "order within a lane is kept"
        for entry in entries:
            assert self.fate[entry] == "waiting"
            assert entry.limit > self.now
            self.fate[entry] = "sent"
        for follows in lane[len(entries) : len(entries) + 1]:
            fits = batch.rows + follows.rows <= self.spec.max_rows and not (head.alone or follows.alone)
            assert not fits, "a batch takes along whatever fits"
        self.free[batch.endpoint] -= 1
        self.running.append(batch)


@given(limits, st.integers(1, 3), events)
def test_any_sequence_of_events(spec: Limits, endpoints: int, script: list[tuple]) -> None:  # type: ignore[type-arg]
    world = World(spec, endpoints)
    for event in script:
        world.happens(event)
    world.ends()


# A turn after every event, and callers who wait: most of these scripts have several batches refused.
chance = st.randoms(use_true_random=False)
refusals = st.lists(
    st.tuples(st.just("arrive"), st.integers(1, 3), st.sampled_from("ab"), st.just(9.0), st.just(False))
    | st.tuples(st.just("refuse"), chance)
    | st.tuples(st.sampled_from(["leave", "done"]), chance)
    | st.tuples(st.just("flap"), st.integers(0, 2))
    | st.tuples(st.just("turn"), st.just(0.1)),
    min_size=20,
    max_size=60,
)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(2, 3), refusals)
def test_any_sequence_of_refusals(rows: int, slots: int, endpoints: int, script: list[tuple]) -> None:  # type: ignore[type-arg]
    world = World(Limits(max_rows=rows, slots=slots), endpoints)
    for number in range(4):
        world.happens(("arrive", 1 + number % rows, "a", 9.0, False))
        world.happens(("turn", 0.1))
    for event in script:
        world.happens(event)
        world.step()
    world.ends()

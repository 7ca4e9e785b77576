"""The dispatcher under any sequence of arrivals, departures and completions."""

from __future__ import annotations

import random
from collections import defaultdict

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
        self.sent: dict[object, list[Entry]] = defaultdict(list)
        self.running: list[Batch] = []

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
            self.dispatcher.done(batch, self.now)

    def step(self) -> None:
        step = self.dispatcher.step(self.now)
        for entry in step.expired:
            assert self.fate[entry] == "waiting"
            assert entry.limit <= self.now
            self.fate[entry] = "expired"
        for batch in step.batches:
            self.check(batch)
        self.wake = step.wake
        waiting = self.waiting
        assert all(entry.limit > self.now for entry in waiting)
        assert not (waiting and self.dispatcher.running < self.spec.slots * len(self.dispatcher.free))
        assert step.wake == min((entry.limit for entry in waiting), default=None)
        assert self.dispatcher.waiting_rows == sum(entry.rows for entry in waiting)
        assert all(0 <= free <= self.spec.slots for free in self.dispatcher.free)
        assert self.dispatcher.running == len(self.running)

    def check(self, batch: Batch) -> None:
        entries = batch.entries
        assert batch.rows == sum(entry.rows for entry in entries)
        assert batch.rows <= self.spec.max_rows or len(entries) == 1
        assert len(entries) == 1 or not any(entry.alone for entry in entries)
        (key,) = {entry.lane for entry in entries}
        assert entries[0].arrived == min(entry.arrived for entry in self.waiting), "who waits longest goes first"
        for entry in entries:
            assert self.fate[entry] == "waiting"
            assert entry.limit > self.now
            self.fate[entry] = "sent"
        lane = [entry for entry in self.waiting if entry.lane == key]
        if lane:
            follows = min(lane, key=self.number.__getitem__)
            fits = batch.rows + follows.rows <= self.spec.max_rows and not (entries[0].alone or follows.alone)
            assert not fits, "a batch takes along whatever fits"
        self.sent[key] += entries
        numbers = [self.number[entry] for entry in self.sent[key]]
        assert numbers == sorted(numbers), "order within a lane is kept"
        self.running.append(batch)


@given(limits, st.integers(1, 3), events)
def test_any_sequence_of_events(spec: Limits, endpoints: int, script: list[tuple]) -> None:  # type: ignore[type-arg]
    world = World(spec, endpoints)
    for what, *arguments in script:
        match what:
            case "arrive":
                world.arrive(*arguments)
            case "leave":
                world.leave(*arguments)
            case "done":
                world.done(*arguments)
                world.step()
            case "turn":
                world.now += arguments[0]
                world.step()
            case "wake" if world.wake is not None:
                world.now = max(world.now, world.wake)
                world.step()
    while world.running or world.waiting:
        world.done(random.Random(0))
        world.step()
    assert world.dispatcher.waiting_rows == world.dispatcher.running == 0
    assert set(world.fate.values()) <= {"sent", "expired", "withdrawn"}
    assert world.dispatcher.step(world.now + 10).wake is None

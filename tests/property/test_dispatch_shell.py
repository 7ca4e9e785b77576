"""All of Dispatch, in virtual time: endpoints that refuse, fail and flap, callers that leave, a loop that stalls."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import defaultdict
from collections.abc import Collection
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from backends.errors import BackendFailed, BadReply, ConnectionLost, Expired, Rejected, Unreachable
from backends.request import Reply, Request
from policies.spec import Batch as Limits
from routing.dispatch import Dispatch
from routing.dispatcher import Avoided, Batch, Dispatcher, Step
from routing.lane import Entry
from routing.retry import RetryBudget
from tests.support.dispatching import ask, first, idle, short, stall
from tests.support.loop import run
from tests.support.services import echo
from tests.support.strategies import call, rows_of

# What an endpoint does with a call, and what its callers may see where that was the last that was done with theirs.
FAILURES: dict[str, Exception] = {
    "full": Rejected("full"),
    "down": Unreachable("down"),
    "lost": ConnectionLost("gone"),
    "bad": BackendFailed("bad", 500),
    "defect": KeyError("a defect"),
}
SEEN: dict[str, tuple[type[Exception], ...]] = {
    "never sent": (Rejected, Expired),
    "full": (Rejected, Expired),
    "down": (Unreachable, Rejected, Expired),
    "lost": (ConnectionLost,),
    "bad": (BackendFailed, BadReply, KeyError),  # a defect in one half fails the other, which is not begun
    "defect": (KeyError,),
}
AGAIN = {"never sent", "full", "down", "bad"}  # all else was executed, or may have been

# Mostly what fills the queues and what is put back, for there is where things meet.
SECONDS = (0.0, 0.0107, 0.0511, 0.3013)
DOINGS = (
    "echo",
    "echo",
    "full",
    "full",
    "full",
    "down",
    "bad",
    "bad",
    "bad",
    "short",
    "lost",
    "hang",
    "hang",
    "defect",
)
PAUSES = (0.0, 0.0, 0.004, 0.03, 0.03, 0.3)


def limits(chance: Random) -> Limits:
    return Limits(
        max_rows=chance.choice((1, 2, 4, 4)),
        slots=chance.choice((1, 1, 2)),
        queue_rows=chance.choice((4, 30, 30)),
        queue_time=chance.choice((0.05, 0.4, 5.0)),
    )


def endpoint(chance: Random) -> list[tuple[float, str]]:
    """What it does with one call after the other, over and over."""
    return [(chance.choice(SECONDS), chance.choice(DOINGS)) for _ in range(chance.randint(1, 6))]


def event(chance: Random, flaps: bool) -> tuple[Any, ...]:
    kinds = ["call"] * 8 + ["pause"] * 6 + ["stall", "leave"] + ["flap"] * flaps
    match chance.choice(kinds):
        case "call":
            rows, lane = chance.choice((1, 1, 1, 2, 5)), chance.choice(("a", "a", "a", "b", "alone"))
            patience = chance.choice((math.inf, math.inf, math.inf, 0.02, 0.2))  # seconds to its deadline
            stays = chance.choice((math.inf, math.inf, math.inf, 0.0, 0.0503, 0.1))  # seconds until its caller leaves
            return "call", rows, lane, patience, stays
        case "pause":
            return "pause", chance.choice(PAUSES)
        case "stall":
            return "stall", chance.choice((0.02, 0.5))
        case kind:
            return kind, chance.randrange(100)


class Watched(Dispatcher):
    """A dispatcher whose books are kept a second time."""

    def __init__(self, spec: Limits, count: int) -> None:
        super().__init__(spec, count)
        self.offered: list[Entry] = []
        self.flying: set[Batch] = set()
        self.fresh = 0

    def check(self) -> None:
        assert all(0 <= free <= self.limits.slots for free in self.free)
        assert self.waiting_rows == sum(entry.rows for entry in self.offered if entry.queued)
        assert self.running == len(self.flying)

    def offer(self, entry: Entry, key: Any) -> None:
        super().offer(entry, key)
        self.offered.append(entry)
        self.check()

    def step(self, now: float, unready: Collection[int] = (), avoided: Avoided | None = None) -> Step:
        step = super().step(now, unready, avoided)
        self.flying.update(step.batches)
        self.fresh += sum(not batch.entries[0].tried for batch in step.batches)
        self.check()
        self.greedy(unready)
        return step

    def done(self, batch: Batch, now: float) -> None:
        super().done(batch, now)
        self.flying.remove(batch)
        self.check()

    def requeue(self, batch: Batch, entries: list[Entry]) -> None:
        assert batch in self.flying
        super().requeue(batch, entries)
        self.check()

    def greedy(self, unready: Collection[int]) -> None:
        every = set(range(len(self.free)))
        ready = every.difference(unready) or every
        for entry in self.offered:
            if entry.queued:
                fit = ready.difference(entry.tried) or ready
                assert not any(self.free[i] for i in fit), "a free slot releases a batch at once"


class World:
    """Callers by number, which is the value of their rows, and what was done with each call, in order."""

    def __init__(self, spec: Limits, scripts: list[list[tuple[float, str]]], saved: int) -> None:
        self.spec = spec
        self.now = asyncio.get_running_loop().time
        self.dispatcher = Watched(spec, len(scripts))
        self.spent = 0
        self.saved = saved
        budget = RetryBudget(self.spend)
        for _ in range(10 - saved):
            budget.take()
        self.spent = 0
        self.unready: set[int] = set()
        self.steady = -math.inf
        self.stalled = 0.0
        self.flapped = False
        self.asked: list[tuple[asyncio.Task[Reply], int, str]] = []
        self.leavers: set[asyncio.Task[Reply]] = set()
        self.done_with: dict[int, list[str]] = defaultdict(lambda: ["never sent"])
        self.refused: dict[int, list[int]] = defaultdict(list)
        self.last_first: dict[str, int] = {}
        backends = tuple(self.endpoint(number, script) for number, script in enumerate(scripts))
        self.dispatch = Dispatch(self.dispatcher, backends, self.now, lambda: self.unready, budget)

    def spend(self) -> None:
        self.spent += 1

    def endpoint(self, number: int, script: list[tuple[float, str]]) -> Any:
        doings = itertools.cycle(script)
        running = 0

        async def service(request: Request) -> Reply:
            nonlocal running
            values = [int(row[0]) for row in rows_of(request.infer.inputs.decoded[0])]
            callers = list(dict.fromkeys(values))
            self.sent(number, callers)
            for caller in callers:
                self.done_with[caller].append("running")
            running += 1
            assert running <= self.spec.slots
            pause, doing = next(doings)
            if doing == "short" and (len(values) == 1 or self.asked[callers[0]][2] == "alone"):
                doing = "echo"  # there is no row that could be missed
            became = "cancelled"
            try:
                await asyncio.sleep(3.0 if doing == "hang" else pause)
                became = {"hang": "lost", "short": "bad"}.get(doing, doing)
            finally:
                running -= 1
                for caller in callers:
                    self.done_with[caller][-1] = became
                    if became in ("full", "down"):
                        self.refused[caller].append(number)
            if became == "echo":
                return echo(request)
            if doing == "short":
                return short(echo(request))
            raise FAILURES[became]

        return service

    def sent(self, endpoint: int, callers: list[int]) -> None:
        assert callers == sorted(callers)
        for caller in callers:
            last = self.done_with[caller][-1]
            assert last in AGAIN, f"sent again, although it was {last}"
            assert self.flapped or endpoint not in self.refused[caller]
            if last == "never sent":
                lane = self.asked[caller][2]
                assert caller > self.last_first.get(lane, -1), "order within a lane is kept"
                self.last_first[lane] = caller

    async def happens(self, event: tuple[Any, ...]) -> None:
        match event:
            case "call", rows, lane, patience, stays:
                self.call(rows, lane, patience, stays)
            case "pause", seconds:
                await asyncio.sleep(seconds)
                if seconds:
                    await self.quiet()
            case "stall", seconds:
                self.stalled += seconds
                stall(seconds)
            case "leave", number if self.asked:
                self.leaves(self.asked[number % len(self.asked)][0])
            case "flap", number:
                self.unready ^= {number % len(self.dispatcher.free)}
                self.steady = self.now() + 0.11
                self.flapped = True

    def call(self, rows: int, lane: str, patience: float, stays: float) -> None:
        number = len(self.asked)
        infer = call(*[[float(number)]] * rows, parameters={"sequence_id" if lane == "alone" else lane: 1})
        task = ask(self.dispatch, infer, deadline=self.now() + patience, span=str(number))
        self.asked.append((task, rows, lane))
        latest = self.now() + min(patience, self.spec.queue_time) + 0.002
        task.add_done_callback(lambda _: self.in_time(number, latest))
        if stays < math.inf:
            asyncio.get_running_loop().call_later(stays, self.leaves, task)

    def leaves(self, task: asyncio.Task[Reply]) -> None:
        if task.cancel():
            self.leavers.add(task)

    def in_time(self, number: int, latest: float) -> None:
        if self.done_with[number] == ["never sent"]:
            assert self.now() <= latest + self.stalled

    async def quiet(self) -> None:
        """Time passes only when nothing is left to do: then nothing waits that could go, or for nobody."""
        await asyncio.sleep(1e-6)
        if self.now() > self.steady:
            self.dispatcher.greedy(self.unready)
        assert all(self.wanted(entry) for entry in self.dispatcher.offered if entry.queued)
        assert all(any(map(self.wanted, batch.entries)) for batch in self.dispatcher.flying)

    def wanted(self, entry: Entry) -> bool:
        return not self.asked[int(entry.caller.request.span)][0].done()

    async def ends(self) -> None:
        while not all(task.done() for task, _, _ in self.asked):
            await asyncio.sleep(0.05)
            await self.quiet()
        results = await asyncio.gather(*(task for task, _, _ in self.asked), return_exceptions=True)
        await asyncio.sleep(1.0)
        for number, ((task, rows, _), result) in enumerate(zip(self.asked, results, strict=True)):
            doings = self.done_with[number]
            if isinstance(result, asyncio.CancelledError):
                assert task in self.leavers
            elif doings[-1] == "echo":
                assert isinstance(result, Reply)
                assert first(result) == [[number]] * rows
                assert result.trail[0].retries == len(self.refused[number])
            else:
                assert isinstance(result, SEEN[doings[-1]]), (doings, result)
        idle(self.dispatch)
        assert not self.dispatcher.flying
        assert not self.dispatcher.put_back
        assert self.dispatcher.step(self.now() + 99.0) == Step()
        assert all(entry.caller.batch is None for entry in self.dispatcher.offered)
        assert 5 * self.spent <= 5 * self.saved + self.dispatcher.fresh


@settings(max_examples=400)
@given(st.randoms(use_true_random=True))
def test_any_sequence_of_events(chance: Random) -> None:
    async def main() -> None:
        scripts = [endpoint(chance) for _ in range(chance.choice((1, 2, 2, 3)))]
        world = World(limits(chance), scripts, saved=chance.choice((10, 10, 0)))
        flaps = chance.random() < 0.5
        for _ in range(chance.randint(5, 40)):
            await world.happens(event(chance, flaps))
        await world.ends()

    run(main())

import weakref

import pytest

from backends.errors import Rejected
from policies.spec import Batch as Limits
from routing.dispatcher import Batch, Dispatcher, Step
from routing.lane import Entry


def entry(rows: int = 1, arrived: float = 0.0, limit: float = 1.0, *, alone: bool = False) -> Entry:
    return Entry(rows, arrived, limit, None, alone)


def offer(dispatcher: Dispatcher, *entries: Entry, key: str = "k") -> None:
    for each in entries:
        dispatcher.offer(each, key)


class Caller:
    """Whatever a shell keeps, and would like to be rid of."""


def rows(step: Step) -> list[list[int]]:
    return [[each.rows for each in batch.entries] for batch in step.batches]


def test_a_free_slot_releases_at_once() -> None:
    dispatcher = Dispatcher(Limits())
    offer(dispatcher, entry(limit=7.0))
    step = dispatcher.step(0.0)
    (batch,) = step.batches
    assert (batch.rows, batch.endpoint, batch.reason, batch.started) == (1, 0, "idle_slot", 0.0)
    assert step.wake is None
    assert (dispatcher.waiting_rows, dispatcher.running) == (0, 1)


def test_a_batch_grows_while_all_slots_are_busy() -> None:
    dispatcher = Dispatcher(Limits(max_rows=8, slots=1))
    offer(dispatcher, entry())
    (first,) = dispatcher.step(0.0).batches
    for i in range(1, 11):
        offer(dispatcher, entry(arrived=i / 100))
        assert dispatcher.step(i / 100).batches == []
    dispatcher.done(first, 0.2)
    step = dispatcher.step(0.2)
    assert rows(step) == [[1] * 8]
    assert step.batches[0].reason == "full"
    dispatcher.done(step.batches[0], 0.3)
    assert rows(dispatcher.step(0.3)) == [[1, 1]]


def test_limits_fire_while_everything_is_busy() -> None:
    dispatcher = Dispatcher(Limits(slots=1))
    offer(dispatcher, entry())
    dispatcher.step(0.0)
    early, late = entry(limit=0.5), entry(limit=0.7)
    offer(dispatcher, late, early)
    assert dispatcher.step(0.1).wake == 0.5
    step = dispatcher.step(0.5)
    assert (step.expired, step.wake) == ([early], 0.7)
    step = dispatcher.step(0.7)
    assert (step.expired, step.wake, dispatcher.waiting_rows) == ([late], None, 0)


def test_what_is_past_its_limit_is_not_sent_although_a_slot_is_free() -> None:
    dispatcher = Dispatcher(Limits())
    offer(dispatcher, entry(limit=0.5))
    step = dispatcher.step(0.5)
    assert (len(step.expired), step.batches, dispatcher.running) == (1, [], 0)


def test_who_came_first_goes_first_whatever_its_lane() -> None:
    dispatcher = Dispatcher(Limits(slots=1, max_rows=1))
    entries = [entry(limit=9.0) for _ in range(5)]  # all in one turn
    for each, key in zip(entries, "abbab", strict=True):
        offer(dispatcher, each, key=key)
    order = []
    for at in range(5):
        (batch,) = dispatcher.step(float(at)).batches
        order += batch.entries
        dispatcher.done(batch, float(at))
    assert order == entries


def test_the_endpoint_with_most_free_slots_is_next() -> None:
    dispatcher = Dispatcher(Limits(max_rows=1, slots=2), endpoints=2)
    offer(dispatcher, *(entry() for _ in range(5)))
    step = dispatcher.step(0.0)
    assert sorted(batch.endpoint for batch in step.batches) == [0, 0, 1, 1]
    assert dispatcher.free == [0, 0]
    dispatcher.done(step.batches[1], 0.1)
    (next_batch,) = dispatcher.step(0.1).batches
    assert next_batch.endpoint == step.batches[1].endpoint


def test_the_queue_is_bounded_in_rows() -> None:
    dispatcher = Dispatcher(Limits(max_rows=4, slots=1, queue_rows=6))
    offer(dispatcher, entry(4))
    (busy,) = dispatcher.step(0.0).batches
    offer(dispatcher, entry(4), entry(2))
    late = entry(1)
    with pytest.raises(Rejected, match="queue full: 6 rows wait, limit 6") as caught:
        offer(dispatcher, late)
    assert caught.value.retry_after >= 1.0
    assert not late.queued
    assert dispatcher.waiting_rows == 6
    dispatcher.done(busy, 0.1)
    dispatcher.step(0.1)
    offer(dispatcher, late)


def test_work_larger_than_the_queue_passes_alone() -> None:
    dispatcher = Dispatcher(Limits(max_rows=4, slots=1, queue_rows=8))
    offer(dispatcher, entry(100))
    with pytest.raises(Rejected):
        offer(dispatcher, entry(1))
    assert rows(dispatcher.step(0.0)) == [[100]]


def test_retry_after_is_the_time_that_the_queue_needs() -> None:
    dispatcher = Dispatcher(Limits(max_rows=10, slots=1))
    offer(dispatcher, entry(10))
    (batch,) = dispatcher.step(0.0).batches
    dispatcher.done(batch, 5.0)  # half a second a row
    offer(dispatcher, entry(20, limit=99))
    assert dispatcher.predicted_wait() == pytest.approx(10.0)


def test_a_queued_entry_can_be_withdrawn_once() -> None:
    dispatcher = Dispatcher(Limits(slots=1))
    gone, stays = entry(3), entry()
    offer(dispatcher, gone, stays)
    assert dispatcher.withdraw(gone)
    assert not dispatcher.withdraw(gone)
    assert dispatcher.waiting_rows == 1
    step = dispatcher.step(0.0)
    assert [batch.entries for batch in step.batches] == [[stays]]
    assert not dispatcher.withdraw(stays)


def test_nothing_to_do_is_nothing() -> None:
    step = Dispatcher(Limits()).step(5.0)
    assert (step.batches, step.expired, step.wake) == ([], [], None)


def test_a_batch_belongs_to_one_lane() -> None:
    dispatcher = Dispatcher(Limits(slots=2))
    offer(dispatcher, entry(), entry(), key="a")
    offer(dispatcher, entry(), key="b")
    step = dispatcher.step(0.0)
    assert rows(step) == [[1, 1], [1]]
    batches: list[Batch] = step.batches
    assert {each.lane for each in batches[0].entries} == {"a"}


def test_what_was_not_taken_goes_back_to_its_place() -> None:
    dispatcher = Dispatcher(Limits(max_rows=2, slots=1), endpoints=3)
    entries = [entry(arrived=i / 10, limit=9.0) for i in range(6)]
    offer(dispatcher, *entries[:4])
    early, late = dispatcher.step(0.3).batches
    offer(dispatcher, *entries[4:])
    unready = {3 - early.endpoint - late.endpoint}  # the third endpoint is down
    assert dispatcher.step(0.5, unready).batches == []
    for batch in (early, late):  # the earlier one first: the later one must not overtake it
        assert all(dispatcher.another(each, batch, unready) for each in batch.entries)
        dispatcher.requeue(batch, list(batch.entries))
        assert (batch.entries, batch.rows) == ([], 0)
    assert dispatcher.waiting_rows == 6
    dispatcher.done(early, 0.6)
    dispatcher.done(late, 0.6)
    again = dispatcher.step(0.6, unready).batches
    assert [batch.entries for batch in again] == [entries[:2], entries[2:4]]
    assert [batch.endpoint for batch in again] == [late.endpoint, early.endpoint]
    assert not any(dispatcher.another(each, batch, unready) for batch in again for each in batch.entries)


def test_nobody_is_taken_along_to_an_endpoint_that_refused_it() -> None:
    dispatcher = Dispatcher(Limits(max_rows=8, slots=1), endpoints=2)
    batches = []
    for at in (0.0, 0.1):
        offer(dispatcher, entry(arrived=at, limit=9.0))
        batches += dispatcher.step(at).batches
    for batch in batches:
        dispatcher.requeue(batch, list(batch.entries))
        dispatcher.done(batch, 0.2)
    again = dispatcher.step(0.2).batches
    assert rows(Step(again)) == [[1], [1]]
    assert [batch.endpoint for batch in again] == [batches[1].endpoint, batches[0].endpoint]


def test_who_waits_for_another_endpoint_is_in_nobodys_way() -> None:
    dispatcher = Dispatcher(Limits(max_rows=1, slots=1), endpoints=2)
    entries = [entry(limit=9.0) for _ in range(3)]
    offer(dispatcher, *entries)
    refused, busy = dispatcher.step(0.0).batches
    assert not dispatcher.put_back
    dispatcher.requeue(refused, list(refused.entries))
    assert dispatcher.put_back
    dispatcher.done(refused, 0.1)
    (passes,) = dispatcher.step(0.1).batches
    assert (passes.entries, passes.endpoint) == (entries[2:], refused.endpoint)
    dispatcher.done(busy, 0.2)
    (again,) = dispatcher.step(0.2).batches
    assert (again.entries, again.endpoint) == (entries[:1], busy.endpoint)
    assert not dispatcher.put_back


def test_the_same_endpoints_tried_in_another_order_are_the_same() -> None:
    dispatcher = Dispatcher(Limits(max_rows=1, slots=1), endpoints=3)
    entries = [entry(limit=9.0) for _ in range(3)]
    offer(dispatcher, *entries)
    *twice, last = dispatcher.step(0.0).batches
    for _ in range(2):
        for batch in twice:
            dispatcher.requeue(batch, list(batch.entries))
            dispatcher.done(batch, 0.1)
        twice = dispatcher.step(0.1).batches
    assert twice == []
    dispatcher.limits = Limits(max_rows=2, slots=1)
    dispatcher.done(last, 0.2)
    (batch,) = dispatcher.step(0.2).batches
    assert (batch.entries, batch.endpoint) == (entries[:2], last.endpoint)


def test_one_that_waits_long_does_not_keep_all_that_passed_it() -> None:
    dispatcher = Dispatcher(Limits(slots=1), endpoints=2)
    waits = entry(limit=99.0)
    offer(dispatcher, waits, entry(), key="k")
    offer(dispatcher, entry(), key="busy")
    refused, busy = dispatcher.step(0.0).batches
    dispatcher.requeue(refused, [waits])
    dispatcher.done(refused, 0.0)
    passed = []
    for _ in range(1000):
        passing = entry(limit=100.0)
        passing.caller = Caller()
        offer(dispatcher, passing)
        step = dispatcher.step(0.0)
        assert step.wake == 99.0
        (batch,) = step.batches
        dispatcher.done(batch, 0.0)
        passed.append(weakref.ref(passing.caller))
    assert sum(ref() is not None for ref in passed) < 100
    assert dispatcher.step(99.0).expired == [waits]
    assert busy.endpoint != refused.endpoint


def test_a_slot_is_given_back_once() -> None:
    dispatcher = Dispatcher(Limits(slots=2))
    offer(dispatcher, entry())
    (batch,) = dispatcher.step(0.0).batches
    dispatcher.done(batch, 0.0)
    with pytest.raises(AssertionError, match="given back once"):
        dispatcher.done(batch, 0.0)


def test_while_none_is_ready_all_are_tried() -> None:
    dispatcher = Dispatcher(Limits(max_rows=1, slots=1), endpoints=2)
    offer(dispatcher, entry(), entry())
    assert {batch.endpoint for batch in dispatcher.step(0.0, {0, 1}).batches} == {0, 1}


def test_a_lane_keeps_away_from_who_fails_it_while_another_is_ready() -> None:
    dispatcher = Dispatcher(Limits(slots=1), endpoints=3)
    avoided = {"bad": {0}, "good": set()}.__getitem__
    offer(dispatcher, entry(), key="bad")
    (first,) = dispatcher.step(0.0, {2}, avoided).batches  # type: ignore[arg-type]
    assert first.endpoint == 1
    offer(dispatcher, entry(), key="bad")
    assert dispatcher.step(0.0, {2}, avoided).batches == []  # type: ignore[arg-type]
    offer(dispatcher, entry(), key="good")
    (second,) = dispatcher.step(0.0, {2}, avoided).batches  # type: ignore[arg-type]
    assert second.endpoint == 0  # who waits for another endpoint is in nobody's way
    dispatcher.done(second, 0.1)
    (third,) = dispatcher.step(0.1, {1, 2}, avoided).batches  # type: ignore[arg-type]
    assert third.endpoint == 0

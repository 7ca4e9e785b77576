from __future__ import annotations

from collections import Counter

import pytest

from backends.errors import SequenceLost
from routing.sequence import Sequences

FIVE = ("a", "b", "c", "d", "e")


def replica(sequences: Sequences, id: int | str, *, starts: bool = True, up: tuple[str, ...] = FIVE) -> str:
    return sequences.place(("m", id), starts, FIVE, up, 0.0).replica


def test_sequences_spread_over_replicas_and_every_gateway_places_them_alike() -> None:
    one, other = Sequences(), Sequences()
    placed = {i: replica(one, i) for i in range(1000)}
    assert placed == {i: replica(other, i, starts=False) for i in range(1000)}
    assert min(Counter(placed.values()).values()) > 150


def test_numbers_texts_and_models_are_different_sequences() -> None:
    sequences = Sequences()
    pairs = [(replica(sequences, i), replica(sequences, str(i))) for i in range(100)]
    assert any(number != text for number, text in pairs)
    assert len(sequences) == 200
    others = [sequences.place(("n", i), True, FIVE, FIVE, 0.0).replica for i in range(100)]
    assert [number for number, _ in pairs] != others


def test_a_replica_that_leaves_moves_only_what_it_had() -> None:
    before = {i: replica(Sequences(), i) for i in range(500)}
    after = {i: replica(Sequences(), i, up=("a", "b", "c", "d")) for i in range(500)}
    assert {before[i] for i in before if before[i] != after[i]} == {"e"}


def test_a_sequence_that_runs_stays_where_it_began_whoever_joins() -> None:
    sequences = Sequences()
    few = ("a", "b")
    began = {i: sequences.place(("m", i), True, few, few, 0.0).replica for i in range(200)}
    assert {i: replica(sequences, i, starts=False) for i in range(200)} == began
    assert any(replica(Sequences(), i) != began[i] for i in range(200))


def test_a_sequence_is_lost_with_its_replica_until_it_begins_anew() -> None:
    sequences = Sequences()
    began = replica(sequences, 7)
    left = tuple(name for name in FIVE if name != began)
    for up in (left, FIVE):  # its state is gone, though the replica is back
        with pytest.raises(SequenceLost, match=f"sequence '7' of model 'm' was lost with '{began}'"):
            replica(sequences, 7, starts=False, up=up)
    anew = replica(sequences, 7, up=left)
    assert anew in left
    assert replica(sequences, 7, starts=False) == anew


def test_a_replica_that_is_no_more_has_lost_its_sequences() -> None:
    sequences = Sequences()
    began = replica(sequences, 7)
    left = tuple(name for name in FIVE if name != began)
    with pytest.raises(SequenceLost):
        sequences.place(("m", 7), False, left, left, 0.0)


def test_where_no_replica_is_up_the_hash_still_decides() -> None:
    assert replica(Sequences(), 7, up=()) == replica(Sequences(), 7)


def test_the_end_forgets_a_sequence_but_not_the_one_that_began_after_it() -> None:
    sequences = Sequences()
    first = sequences.place(("m", 7), True, FIVE, FIVE, 0.0)
    second = sequences.place(("m", 7), True, FIVE, FIVE, 0.0)
    sequences.end(("m", 7), first)
    assert len(sequences) == 1
    sequences.end(("m", 7), second)
    assert len(sequences) == 0


def test_what_is_remembered_is_bounded_in_number_and_time() -> None:
    sequences = Sequences(limit=10, idle=60.0)
    for i in range(50):
        sequences.place(("m", i), True, FIVE, FIVE, float(i))
    assert len(sequences) <= 11
    run = sequences.place(("m", 49), False, FIVE, FIVE, 50.0)
    sequences.place(("m", "other"), True, FIVE, FIVE, 109.0)
    assert sequences.place(("m", 49), False, FIVE, FIVE, 109.5) is run  # idle for less than a minute
    sequences.place(("m", "later"), True, FIVE, FIVE, 200.0)
    assert len(sequences) == 1

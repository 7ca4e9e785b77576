from routing.lane import Entry, Lane


def entry(rows: int = 1, *, alone: bool = False) -> Entry:
    return Entry(rows, 0.0, 1.0, None, alone)


def lane(*entries: Entry) -> Lane:
    made = Lane(("k", ()))
    for each in entries:
        made.add(each)
    return made


def test_first_come_first_served_up_to_the_limit() -> None:
    a, b, c, d = (entry(2) for _ in range(4))
    queue = lane(a, b, c, d)
    assert queue.rows == 8
    assert queue.take(5) == [a, b]
    assert queue.take(4) == [c, d]
    assert (queue.rows, queue.head, queue.take(4)) == (0, None, [])


def test_an_entry_that_does_not_fit_waits_for_the_next_batch_and_is_not_passed() -> None:
    a, b, c = entry(2), entry(3), entry(1)
    queue = lane(a, b, c)
    assert queue.take(4) == [a]
    assert queue.take(4) == [b, c]


def test_an_over_size_entry_goes_alone() -> None:
    big, small = entry(9), entry(1)
    assert lane(big, small).take(4) == [big]
    queue = lane(small, big)
    assert queue.take(4) == [small]
    assert queue.take(4) == [big]


def test_alone_means_alone() -> None:
    a, b, c = entry(), entry(alone=True), entry()
    queue = lane(a, b, c)
    assert [queue.take(4), queue.take(4), queue.take(4)] == [[a], [b], [c]]


def test_who_left_is_skipped_wherever_it_stood() -> None:
    a, b, c, d = (entry() for _ in range(4))
    queue = lane(a, b, c, d)
    queue.remove(a)
    queue.remove(c)
    assert (queue.head, queue.rows) == (b, 2)
    assert queue.take(4) == [b, d]
    assert not any(each.queued for each in (a, b, c, d))

from routing.retry import RetryBudget


def test_ten_retries_are_there_to_begin_with_and_each_is_told() -> None:
    told: list[int] = []
    budget = RetryBudget(lambda: told.append(1))
    assert [budget.take() for _ in range(12)] == [True] * 10 + [False] * 2
    assert len(told) == 10


def test_five_calls_earn_one() -> None:
    budget = RetryBudget()
    while budget.take():
        pass
    for _ in range(3):
        for _ in range(4):
            budget.earn()
            assert not budget.take()
        budget.earn()
        assert budget.take()


def test_no_more_than_ten_are_saved() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.earn()
    assert sum(budget.take() for _ in range(20)) == 10

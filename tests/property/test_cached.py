"""The cache against a plain dictionary, and its keys against the requests that they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backends.request import Answer, Hop, Infer, Reply, Request, Tensors, Wanted
from backends.rows import split, take
from cache.cached import Cached
from cache.key import keys
from cache.store import MemoryStore
from tests.support.loop import run
from tests.support.services import Scripted, echo
from tests.support.strategies import by_binary, by_grpc, by_json, call, fp32, infers, names, plains, rows_of, tensors

numbers = st.integers(0, 6)


@given(st.lists(st.lists(numbers, min_size=1, max_size=6), max_size=8), st.integers(1, 8), st.booleans())
def test_hits_duplicates_and_order(calls: list[list[int]], entries: int, counted: bool) -> None:
    """Answers are the model's whatever is kept; each row is asked only where it is not kept, and once a call."""

    def model(request: Request) -> Reply:
        block = rows_of(request.infer.inputs.decoded[0])
        hop = Hop("", tuple(range(len(block))) if counted else (), endpoint="e")
        return Reply(Answer(Tensors.of((fp32("y", [[10 * row[0], 1] for row in block]),)), "m", "1"), (hop,))

    async def main() -> None:
        backend = Scripted(model)
        store = MemoryStore(entries, 10**6, lambda: 0.0)
        cached = Cached(backend, store, lambda: ("r",), 60.0)
        for values in calls:
            before = len(backend.requests)
            infer = call(*([float(value)] for value in values))
            names_of = dict(zip(values, keys(infer, ("r", "m", ""), len(values)), strict=True))
            kept = {value for value in values if (await store.get_many([names_of[value]]))[0] is not None}
            reply = await cached(Request(model="m", content=infer))
            assert rows_of(reply.answer.outputs.decoded[0]) == [[10 * value, 1] for value in values]
            asked = [row[0] for r in backend.requests[before:] for row in rows_of(r.infer.inputs.decoded[0])]
            expected = list(dict.fromkeys(value for value in values if value not in kept))
            assert asked == expected
            rows = {row: hop.cached for hop in reply.trail for row in hop.rows}
            if not counted and expected == values:
                continue  # passed as it came, and nobody counted
            assert rows == {row: value in kept for row, value in enumerate(values)}
            assert sum(len(hop.rows) for hop in reply.trail) == len(values)
        assert len(store) <= entries

    run(main())


@given(infers(rows=3), st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_any_tensors_come_back_as_they_were(infer: Infer, order: list[int]) -> None:
    async def main() -> None:
        cached = Cached(Scripted(echo), MemoryStore(100, 10**6, lambda: 0.0), tuple, 60.0)
        for part in (take(infer, [order[0]]), take(infer, order), infer, take(infer, order)):
            reply = await cached(Request(model="m", content=part))
            assert plains(reply.answer) == plains(part)

    run(main())


def meaning(infer: Infer, row: int) -> Any:
    """All that makes a row the question it is."""

    def typed(parameters: Any) -> Any:
        left_out = {"binary_data", "binary_data_size", "binary_data_output", "timeout", "priority"}
        return {(k, type(v), v) for k, v in (parameters or {}).items() if k not in left_out}

    single = split(Answer(infer.inputs), [1] * infer.inputs.heads[0].shape[0])[row]
    inputs = {(t.name, t.datatype, t.shape, bytes(t.data)) for t in single.outputs.decoded}
    outputs = sorted((output.name, sorted(map(repr, typed(output.parameters)))) for output in infer.outputs)
    return inputs, outputs, typed(infer.parameters)


few = st.sampled_from(["a", "b", "ab", "()", "inputs"])
small = st.builds(
    lambda inputs, outputs, parameters: Infer(Tensors.of(tuple(inputs)), tuple(map(Wanted, outputs)), parameters),
    st.lists(
        st.tuples(
            few, st.sampled_from(["INT8", "UINT8", "BYTES", "BOOL"]), st.sampled_from([[1], [1, 1], [1, 2], [1, 0]])
        ).flatmap(lambda kind: tensors(name=kind[0], datatype=kind[1], shape=kind[2])),
        min_size=1,
        max_size=2,
        unique_by=lambda tensor: tensor.name,
    ),
    st.lists(few, max_size=2, unique=True),
    st.dictionaries(
        few | st.sampled_from(["timeout", "priority", "binary_data_output"]),
        st.sampled_from([True, 1, "1", 1.0, False, 0]),
        max_size=2,
    ),
)


@given(small, small)
def test_two_rows_share_a_key_exactly_where_they_are_the_same_question(one: Infer, other: Infer) -> None:
    assert (keys(one, (), 1) == keys(other, (), 1)) == (meaning(one, 0) == meaning(other, 0))


@given(infers(rows=2, text=True))
def test_every_form_has_the_same_keys(infer: Infer) -> None:
    expected = keys(infer, ("r",), 2)
    assert [keys(form(infer), ("r",), 2) for form in (by_json, by_binary, by_grpc)] == [expected] * 3


@given(infers(rows=4), names)
def test_keys_go_with_the_rows(infer: Infer, scope: str) -> None:
    whole = keys(infer, (scope,), 4)
    for row in range(4):
        assert keys(take(infer, [row]), (scope,), 1) == [whole[row]]
    order = np.array([2, 0, 3, 1]).tolist()
    assert keys(take(infer, order), (scope,), 4) == [whole[row] for row in order]

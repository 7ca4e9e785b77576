"""Cascades in which a row's first number is the small model's confidence in it."""

from collections.abc import Callable
from typing import Any

import pytest

from backends.errors import (
    BackendFailed,
    BadReply,
    BadRequest,
    ConnectionLost,
    Expired,
    Failure,
    Rejected,
    TooLarge,
    Unreachable,
    Unsupported,
)
from backends.request import Answer, Hop, Infer, Reply, Request, Tensors, Wanted
from backends.tensor import Tensor
from policies.spec import Accept
from routing.cascade import Cascade, Rung
from tests.support.loop import run
from tests.support.services import Scripted, refuse, undecodable
from tests.support.strategies import by_json, call, fp32, rows_of

ACCEPT = Accept("p", "probabilities", "max_probability", 0.8)


def model(number: float, *, rowwise: bool = True, extra: tuple[Tensor, ...] = ()) -> Callable[[Request], Reply]:
    """Answers `label` = [number, the row's second value] and, where asked, `p` from the row's first value."""

    def answer(request: Request) -> Reply:
        rows = rows_of(request.infer.inputs.decoded[0])
        outputs = {
            "label": fp32("label", [[number, row[1]] for row in rows]),
            "p": fp32("p", [[row[0], 1 - row[0]] for row in rows]),
        }
        wanted = [output.name for output in request.infer.outputs] or list(outputs)
        hop = Hop("", tuple(range(len(rows))) if rowwise else (), endpoint=f"e{number:g}", batch_rows=len(rows))
        tensors = tuple(outputs[name] for name in wanted) + extra
        return Reply(Answer(Tensors.of(tensors), f"m{number:g}", "1"), (hop,))

    return answer


def cascade(*backends: Scripted, **fields: Any) -> Cascade:
    """Tiers `t1`, `t2`, ... of which all but the last accept."""
    last = len(backends)
    return Cascade(
        [Rung(f"t{i}", b, f"m{i}", "", ACCEPT if i < last else None) for i, b in enumerate(backends, 1)], **fields
    )


def ask(service: Cascade, infer: Infer) -> Reply:
    async def main() -> Reply:
        return await service(Request(model="public", version="9", content=infer))

    return run(main())


def labels(reply: Reply) -> list[list[float]]:
    return next(rows_of(tensor) for tensor in reply.answer.outputs.decoded if tensor.name == "label")


SURE, UNSURE, BROKEN = 0.9, 0.6, float("nan")


def test_only_unsure_rows_go_on_and_come_back_in_their_places() -> None:
    small, large = Scripted(model(1)), Scripted(model(2))
    rows = [[SURE, 0], [UNSURE, 1], [BROKEN, 2], [SURE, 3], [UNSURE, 4]]
    reply = ask(cascade(small, large, cacheable=True), call(*rows))
    assert labels(reply) == [[1, 0], [2, 1], [2, 2], [1, 3], [2, 4]]
    assert (small.rows, large.rows) == ([5], [3])
    assert [request.model for request in small.requests + large.requests] == ["m1", "m2"]
    assert [request.version for request in large.requests] == ["9"]
    assert reply.trail == (
        Hop("t1", (0, 3), deferred=3, unscored=1, endpoint="e1", batch_rows=5),
        Hop("t2", (1, 2, 4), endpoint="e2", batch_rows=3),
    )
    assert reply.cacheable


def test_a_tier_that_cannot_do_what_is_asked_passes_all_rows_on() -> None:
    small, large = Scripted(refuse(lambda _: True, lambda: Unsupported("no classification here"))), Scripted(model(2))
    reply = ask(cascade(small, large), call([SURE, 0], [UNSURE, 1]))
    assert labels(reply) == [[2, 0], [2, 1]]
    assert reply.trail[0] == Hop("t1", (), deferred=2, reason="unsupported")
    only = Scripted(refuse(lambda _: True, lambda: Unsupported("not here")))
    with pytest.raises(Unsupported):
        ask(cascade(Scripted(model(1)), only), call([UNSURE, 0]))


def test_three_tiers() -> None:
    middle = Scripted(model(2))
    middle_answer = middle.answer

    def sharper(request: Request) -> Reply:
        reply = middle_answer(request)
        block = [[0.95 if row[1] < 3 else 0.5, 0.05] for row in rows_of(request.infer.inputs.decoded[0])]
        label = next(t for t in reply.answer.outputs.decoded if t.name == "label")
        return Reply(Answer(Tensors.of((label, fp32("p", block)))), reply.trail)

    middle.answer = sharper
    rows = [[UNSURE, 4], [SURE, 1], [UNSURE, 2], [UNSURE, 3], [SURE, 5], [UNSURE, 0]]
    reply = ask(cascade(Scripted(model(1)), middle, Scripted(model(3))), call(*rows))
    assert labels(reply) == [[3, 4], [1, 1], [2, 2], [3, 3], [1, 5], [2, 0]]
    assert [(hop.tier, hop.rows, hop.deferred) for hop in reply.trail] == [
        ("t1", (1, 4), 4), ("t2", (2, 5), 2), ("t3", (0, 3), 0),
    ]  # fmt: skip


def test_a_row_at_the_threshold_is_accepted() -> None:
    large = Scripted(model(2))
    accept = Accept("p", "probabilities", "max_probability", 0.75)
    service = Cascade([Rung("t1", Scripted(model(1)), "", "", accept), Rung("t2", large, "", "", None)])
    assert labels(ask(service, call([0.75, 7]))) == [[1, 7]]
    assert large.requests == []


def test_all_sure_and_all_unsure() -> None:
    small, large = Scripted(model(1)), Scripted(model(2))
    infer = by_json(call([SURE, 0], [SURE, 1]))
    assert labels(ask(cascade(small, large), infer)) == [[1, 0], [1, 1]]
    assert large.requests == []
    infer = by_json(call([UNSURE, 0], [UNSURE, 1]))
    reply = ask(cascade(small, large), infer)
    assert labels(reply) == [[2, 0], [2, 1]]
    assert large.requests[0].infer is infer, "a call that goes on whole goes as the very bytes"
    assert reply.answer.model == "m2"


def test_a_tier_that_does_not_count_rows_is_counted_all_the_same() -> None:
    """Without a dispatcher in between, a backend's hop says nothing of rows."""
    service = cascade(Scripted(model(1, rowwise=False)), Scripted(model(2, rowwise=False)))
    reply = ask(service, call([SURE, 0], [UNSURE, 1], [UNSURE, 2]))
    assert [(hop.tier, hop.rows, hop.deferred) for hop in reply.trail] == [("t1", (0,), 2), ("t2", (1, 2), 0)]
    single = ask(cascade(Scripted(model(1, rowwise=False))), call([SURE, 0], [SURE, 1]))
    assert [(hop.tier, hop.rows, hop.deferred) for hop in single.trail] == [("t1", (0, 1), 0)]


# Requested outputs


def test_the_judged_output_is_asked_for_and_not_shown() -> None:
    small, large = Scripted(model(1)), Scripted(model(2))
    infer = by_json(call([SURE, 0], [UNSURE, 1], outputs=(Wanted("label"),)))
    reply = ask(cascade(small, large), infer)
    assert [output.name for output in small.requests[0].infer.outputs] == ["label", "p"]
    assert small.requests[0].infer.inputs.wire is None, "the bytes as they came ask for less"
    assert [output.name for output in large.requests[0].infer.outputs] == ["label"]
    assert [head.name for head in reply.answer.outputs.heads] == ["label"]
    assert labels(reply) == [[1, 0], [2, 1]]


def test_the_judged_output_is_shown_to_who_asks_for_it() -> None:
    small = Scripted(model(1))
    infer = by_json(call([SURE, 0], outputs=(Wanted("p"), Wanted("label"))))
    reply = ask(cascade(small, Scripted(model(2))), infer)
    assert small.requests[0].infer is infer
    assert [head.name for head in reply.answer.outputs.heads] == ["p", "label"]


def test_no_output_named_means_all() -> None:
    reply = ask(cascade(Scripted(model(1)), Scripted(model(2))), call([SURE, 0], [UNSURE, 1]))
    assert {head.name for head in reply.answer.outputs.heads} == {"label", "p"}


def test_a_tier_without_the_judged_output_accepts_nothing() -> None:
    def blind(request: Request) -> Reply:
        reply = model(1)(request)
        return Reply(Answer(Tensors.of(reply.answer.outputs.decoded[:1])), reply.trail)

    reply = ask(cascade(Scripted(blind), Scripted(model(2))), call([SURE, 0]))
    assert labels(reply) == [[2, 0]]
    assert [(hop.tier, hop.rows, hop.deferred) for hop in reply.trail] == [("t1", (), 1), ("t2", (0,), 0)]


# Failures

OWN = [
    Rejected("busy"), Unreachable("down"), ConnectionLost("gone"), BadReply("odd"), BackendFailed("crash", 500),
    BackendFailed("down", 503), BackendFailed("slow down", 429), BackendFailed("unknown model", 404),
    BackendFailed("who are you", 401), BackendFailed("internal", 13, grpc=True), BackendFailed("no", 5, grpc=True),
]  # fmt: skip
CALLERS = [
    BackendFailed("malformed", 400), BackendFailed("too large", 413), BackendFailed("malformed", 422),
    BackendFailed("malformed", 3, grpc=True), Expired("backend"), BadRequest("malformed"), TooLarge("large"),
]  # fmt: skip


@pytest.mark.parametrize("failure", OWN, ids=repr)
def test_a_tier_that_fails_for_its_own_reasons_passes_everything_on(failure: Failure) -> None:
    small, large = Scripted(refuse(lambda _: True, lambda: failure)), Scripted(model(2))
    reply = ask(cascade(small, large), call([SURE, 0], [UNSURE, 1]))
    assert labels(reply) == [[2, 0], [2, 1]]
    assert [(hop.tier, hop.rows, hop.deferred, hop.reason) for hop in reply.trail] == [
        ("t1", (), 2, "failed"), ("t2", (0, 1), 0, ""),
    ]  # fmt: skip


@pytest.mark.parametrize("failure", CALLERS, ids=repr)
def test_the_callers_fault_ends_the_request(failure: Failure) -> None:
    large = Scripted(model(2))
    with pytest.raises(type(failure)):
        ask(cascade(Scripted(refuse(lambda _: True, lambda: failure)), large), call([SURE, 0]))
    assert large.requests == []


@pytest.mark.parametrize("failure", OWN + CALLERS, ids=repr)
def test_nobody_is_behind_the_last_tier(failure: Failure) -> None:
    with pytest.raises(type(failure)):
        ask(cascade(Scripted(model(1)), Scripted(refuse(lambda _: True, lambda: failure))), call([UNSURE, 0]))


def test_a_wrong_row_count_is_a_tiers_own_failure() -> None:
    def short(request: Request) -> Reply:
        return Reply(Answer(Tensors.of((fp32("p", [[0.9, 0.1]]),))))

    reply = ask(cascade(Scripted(short), Scripted(model(2))), call([SURE, 0], [SURE, 1]))
    assert labels(reply) == [[2, 0], [2, 1]]


def test_a_body_that_cannot_be_read_is_the_callers_fault() -> None:
    small = Scripted(lambda _: Reply(Answer(Tensors.of((fp32("p", [[0.9, 0.1], [0.5, 0.5]]),)))))
    with pytest.raises(BadRequest):
        ask(cascade(small, Scripted(model(2))), undecodable((2, 2)))


def test_tiers_whose_answers_have_no_common_form() -> None:
    def wide(request: Request) -> Reply:
        rows = rows_of(request.infer.inputs.decoded[0])
        outputs = (fp32("label", [[2, row[1], 0] for row in rows]), fp32("p", [[1, 0] for _ in rows]))
        return Reply(Answer(Tensors.of(outputs)))

    service = cascade(Scripted(model(1)), Scripted(wide))
    with pytest.raises(BadReply, match="output 'label'"):
        ask(service, call([SURE, 0], [UNSURE, 1]))
    assert labels(ask(service, call([UNSURE, 1]))) == [[2, 1, 0]]


# What is not divided


def test_a_single_tier_passes_the_very_bytes() -> None:
    only = Scripted(lambda _: Reply(Answer(Tensors.of(()))))
    infer = by_json(call([1, 2]))
    ask(cascade(only), infer)
    assert only.requests[0].infer is infer
    assert (only.requests[0].model, only.requests[0].version) == ("m1", "9")


def test_a_single_tier_does_not_look_at_the_data() -> None:
    only = Scripted(lambda _: Reply(Answer(Tensors.of(())), (Hop("", ()),)))
    infer = undecodable((2, 2))
    assert [hop.tier for hop in ask(cascade(only), infer).trail] == ["t1"]


@pytest.mark.parametrize(
    "infer",
    [
        call([SURE, 0], parameters={"sequence_id": 5}),
        Infer(Tensors.of((Tensor("x", "FP32", (), bytes(4)),))),
        Infer(Tensors.of((Tensor("x", "FP32", (0, 2), b""),))),
        Infer(Tensors.of((fp32("x", [[1]]), fp32("y", [[1], [2]])))),
    ],
    ids=["sequence", "scalar", "empty", "uneven"],
)
def test_what_has_no_rows_is_asked_of_the_last_tier(infer: Infer) -> None:
    small, large = Scripted(model(1)), Scripted(lambda _: Reply(Answer(Tensors.of(())), (Hop("", ()),)))
    reply = ask(cascade(small, large), infer)
    assert small.requests == []
    assert large.requests[0].infer is infer
    assert [(hop.tier, hop.rows, hop.deferred) for hop in reply.trail] == [("t2", (0,), 0)]


def test_what_has_no_rows_and_was_counted_as_one_by_the_dispatcher() -> None:
    only = Scripted(lambda _: Reply(Answer(Tensors.of(())), (Hop("", (0,), batch_rows=1),)))
    reply = ask(cascade(only), Infer(Tensors.of((Tensor("x", "FP32", (), bytes(4)),))))
    assert reply.trail == (Hop("t1", (0,), batch_rows=1),)


def test_names_of_its_own_only_where_a_tier_has_some() -> None:
    only = Scripted(lambda _: Reply(Answer(Tensors.of(()))))
    ask(Cascade([Rung("t", only, "", "", None)]), call([1, 2]))
    ask(Cascade([Rung("t", only, "m", "4", None)]), call([1, 2]))
    assert [(request.model, request.version) for request in only.requests] == [("public", "9"), ("m", "4")]

import pytest

from backends.errors import BadRequest, Rejected
from backends.request import Answer, Hop, Infer, Reply, Request, Tensors
from backends.tensor import Tensor, join_elements, split_elements
from cache.cached import Cached
from cache.key import keys
from cache.store import MemoryStore
from tests.support.loop import run
from tests.support.services import Scripted, undecodable
from tests.support.strategies import by_binary, by_grpc, by_json, call, fp32, rows_of


def double(request: Request) -> Reply:
    block = rows_of(request.infer.inputs.decoded[0])
    answer = Answer(Tensors.of((fp32("y", [[2 * x for x in row] for row in block]),)), "m", "3")
    return Reply(answer, (Hop("", tuple(range(len(block))), endpoint="e"),))


class Rig:
    """A cache before a scripted backend, in virtual time."""

    def __init__(self, backend: Scripted | None = None, ttl: float = 60.0) -> None:
        self.now = 0.0
        self.backend = backend or Scripted(double)
        self.store = MemoryStore(100, 10**6, lambda: self.now)
        self.cached = Cached(self.backend, self.store, lambda: ("route", "tier"), ttl)

    def ask(self, infer: Infer, model: str = "m", version: str = "") -> Reply:
        async def main() -> Reply:
            return await self.cached(Request(model=model, version=version, content=infer))

        return run(main())


def first(reply: Reply) -> list[list[float]]:
    return rows_of(reply.answer.outputs.decoded[0])


def test_what_was_answered_is_answered_again() -> None:
    rig = Rig()
    assert first(rig.ask(by_json(call([1], [2])))) == [[2], [4]]
    reply = rig.ask(by_grpc(call([2], [1])))
    assert first(reply) == [[4], [2]]
    assert reply.trail == (Hop("", (0, 1), cached=True),)
    assert (reply.answer.model, reply.answer.version) == ("m", "3")
    assert rig.backend.rows == [2]


def test_hits_and_misses_in_one_call() -> None:
    rig = Rig()
    rig.ask(call([2], [4]))
    reply = rig.ask(call([1], [2], [3], [4], [5]))
    assert first(reply) == [[2], [4], [6], [8], [10]]
    assert rig.backend.rows == [2, 3]
    assert reply.trail == (Hop("", (1, 3), cached=True), Hop("", (0, 2, 4), endpoint="e"))


def test_duplicates_are_asked_once() -> None:
    rig = Rig()
    reply = rig.ask(call([1], [2], [1], [1]))
    assert first(reply) == [[2], [4], [2], [2]]
    assert rig.backend.rows == [2]
    assert reply.trail == (Hop("", (0, 1, 2, 3), endpoint="e"),)


def test_a_backend_that_does_not_count_rows_answered_all_it_was_asked() -> None:
    def uncounted(request: Request) -> Reply:
        return Reply(double(request).body, (Hop("", (), endpoint="e"),))

    rig = Rig(Scripted(uncounted))
    rig.ask(call([1]))
    reply = rig.ask(call([1], [2], [3], [2]))
    assert reply.trail == (Hop("", (0,), cached=True), Hop("", (1, 2, 3), endpoint="e"))


def test_a_call_of_misses_passes_as_it_came() -> None:
    rig = Rig()
    infer = by_binary(call([1], [2]))
    rig.ask(infer)
    assert rig.backend.requests[0].infer is infer


def test_an_answer_lives_as_long_as_it_may() -> None:
    rig = Rig(ttl=10.0)
    rig.ask(call([1]))
    rig.now = 9.9
    rig.ask(call([1]))
    rig.now = 10.0
    rig.ask(call([1]))
    assert rig.backend.rows == [1, 1]


@pytest.mark.parametrize(("model", "version"), [("n", ""), ("m", "2")])
def test_another_model_is_another_question(model: str, version: str) -> None:
    rig = Rig()
    rig.ask(call([1]))
    rig.ask(call([1]), model, version)
    assert rig.backend.rows == [1, 1]


def test_tiers_do_not_share() -> None:
    rig = Rig()
    rig.ask(call([1]))
    rig.cached = Cached(rig.backend, rig.store, lambda: ("route", "other"), 60.0)
    rig.ask(call([1]))
    assert rig.backend.rows == [1, 1]


@pytest.mark.parametrize(
    "infer",
    [
        call([1], parameters={"sequence_id": 1}),
        Infer(Tensors.of((Tensor("x", "FP32", (), bytes(4)),))),
        Infer(Tensors.of((Tensor("x", "FP32", (0, 1), b""),))),
    ],
)
def test_what_has_no_rows_passes_unread(infer: Infer) -> None:
    rig = Rig(Scripted(lambda _: Reply(Answer(Tensors.of(())))))
    rig.ask(infer)
    rig.ask(infer)
    assert [request.infer for request in rig.backend.requests] == [infer, infer]


def test_what_cannot_be_read_is_not_asked() -> None:
    rig = Rig()
    with pytest.raises(BadRequest):
        rig.ask(undecodable())
    assert rig.backend.requests == []


def test_a_wrong_row_count_is_not_kept() -> None:
    rig = Rig(Scripted(lambda _: Reply(Answer(Tensors.of((fp32("y", [[1], [2], [3]]),))))))
    assert first(rig.ask(call([1], [2]))) == [[1], [2], [3]]  # as it would pass without a cache
    assert len(rig.store) == 0
    rig.backend.answer = double
    assert first(rig.ask(call([1], [2]))) == [[2], [4]]


def test_a_failure_is_not_kept() -> None:
    def busy(request: Request) -> Reply:
        raise Rejected("busy")

    rig = Rig(Scripted(busy))
    with pytest.raises(Rejected):
        rig.ask(call([1]))
    assert len(rig.store) == 0


def test_hits_outlive_a_failing_backend() -> None:
    rig = Rig()
    rig.ask(call([1]))

    def busy(request: Request) -> Reply:
        raise Rejected("busy")

    rig.backend.answer = busy
    assert first(rig.ask(call([1]))) == [[2]]


def corrupt(rig: Rig, infer: Infer, value: bytes) -> None:
    async def main() -> None:
        await rig.store.put_many(dict.fromkeys(keys(infer, ("route", "tier", "m", ""), 1), value), 60.0)

    run(main())


def test_a_corrupt_value_is_a_miss_and_is_replaced() -> None:
    async def kept(rig: Rig) -> bytes:
        (value,) = await rig.store.get_many(keys(call([1]), ("route", "tier", "m", ""), 1))
        assert value is not None
        return value

    sound = Rig()
    sound.ask(call([1]))
    for at in range(len(run(kept(sound)))):
        rig = Rig()
        rig.ask(call([1], [2]))
        value = bytearray(run(kept(rig)))
        value[at] ^= 0x41
        for wrong in (bytes(value), bytes(value[:at])):
            corrupt(rig, call([1]), wrong)
            reply = rig.ask(call([2], [1], [3]))
            assert [row[0] for row in first(reply)][::2] == [4, 6]
            (head,) = reply.answer.outputs.heads
            assert head.shape == (3, 1)


@pytest.mark.parametrize("value", [b"", b"\xc0", b"\x93\xa0\xa0\xa0", b"x" * 100])
def test_what_is_no_value_is_a_miss(value: bytes) -> None:
    rig = Rig()
    corrupt(rig, call([1]), value)
    assert first(rig.ask(call([1], [2]))) == [[2], [4]]
    assert rig.backend.rows == [2]
    rig.ask(call([1], [2]))
    assert rig.backend.rows == [2]


def test_a_model_that_was_changed_in_place_is_asked_anew() -> None:
    """What was kept no longer fits what is answered now: a cache must not fail the request."""

    def wide(request: Request) -> Reply:
        block = rows_of(request.infer.inputs.decoded[0])
        return Reply(Answer(Tensors.of((fp32("y", [[row[0], 0] for row in block]),)), "m", "4"))

    rig = Rig()
    rig.ask(call([1], [2]))
    rig.backend.answer = wide
    reply = rig.ask(call([1], [3]))
    assert first(reply) == [[1, 0], [3, 0]]
    assert reply.answer.version == "4"
    assert not any(hop.cached for hop in reply.trail)
    assert first(rig.ask(call([2], [1]))) == [[2, 0], [1, 0]], "hits of two kinds do not fit each other either"
    assert first(rig.ask(call([1], [2], [3]))) == [[1, 0], [2, 0], [3, 0]]
    assert rig.backend.rows == [2, 1, 2, 2]


def test_texts_are_kept_as_they_are() -> None:
    def echo(request: Request) -> Reply:
        (tensor,) = request.infer.inputs.decoded
        return Reply(Answer(Tensors.of((Tensor("y", "BYTES", tensor.shape, bytes(tensor.data)),))))

    rig = Rig(Scripted(echo))
    for elements in ([b"", b"a\0", b"\xff"], [b"\xff", b"", b"new"]):
        tensor = Tensor("x", "BYTES", (3,), join_elements(elements))
        reply = rig.ask(Infer(Tensors.of((tensor,))))
        assert split_elements(reply.answer.outputs.decoded[0].data) == elements
    assert rig.backend.rows == [3, 1]


def test_what_is_kept_is_a_copy() -> None:
    data = bytearray(fp32("y", [[7]]).data)
    rig = Rig(Scripted(lambda _: Reply(Answer(Tensors.of((Tensor("y", "FP32", (1, 1), memoryview(data)),))))))
    rig.ask(call([1]))
    data[:] = bytes(4)
    assert first(rig.ask(call([1]))) == [[7]]

"""Inside of batches: whoever shares one gets what a real Triton gives to the same call alone, bit by bit.

All callers of one datatype come at once, over HTTP and gRPC and in every form; `headrace-batch` says that they shared.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx
import pytest
import tritonclient.grpc.service_pb2 as pb

from tests.support.differential import (
    MODEL_INFER,
    PLAIN,
    Case,
    Peer,
    Said,
    as_binary,
    as_json,
    as_raw_contents,
    as_typed_contents,
    cases,
    length_header,
    said,
)

# What may share a batch with each other: tensors of one datatype and trailing shape.
GROUPS: dict[tuple[str, tuple[int, ...]], list[Case]] = {}
for each in cases():
    GROUPS.setdefault((each.datatype, each.shape[1:]), []).append(each)
COPIES = 4
BINARY_OUT = {"parameters": {"binary_data_output": True}}
Answered = Said | bytes | tuple[grpc.StatusCode, str]


class Caller:
    """Asks `peer` over both protocols; `shared` is how many rows each answer's batch had."""

    def __init__(self, peer: Peer, http: httpx.AsyncClient, channel: grpc.aio.Channel) -> None:
        self.peer = peer
        self.http = http
        self.infer = channel.unary_unary(MODEL_INFER)
        self.shared: list[int] = []

    async def post(self, model: str, body: bytes, length: int | None) -> Said:
        url = f"http://{self.peer.http}/v2/models/{model}/infer"
        response = await self.http.post(url, content=body, headers={**PLAIN, **length_header(length)})
        self._note(response.headers.get("headrace-batch"))
        return said(response)

    async def call(self, message: pb.ModelInferRequest) -> bytes | tuple[grpc.StatusCode, str]:
        call = self.infer(message.SerializeToString(), timeout=60)
        try:
            reply: bytes = await call
        except grpc.aio.AioRpcError as error:
            return error.code(), str(error.details())
        self._note(dict(await call.trailing_metadata()).get("headrace-batch"))
        return reply

    def _note(self, rows: Any) -> None:
        if rows is not None:
            self.shared.append(int(rows))


async def with_callers(direct: Peer, gateway: Peer, use: Callable[[Caller, Caller], Awaitable[None]]) -> None:
    async with (
        httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=64)) as http,
        grpc.aio.insecure_channel(direct.grpc) as straight,
        grpc.aio.insecure_channel(gateway.grpc) as through,
    ):
        await use(Caller(direct, http, straight), Caller(gateway, http, through))


def asks(caller: Caller, model: str, case: Case) -> list[Awaitable[Answered]]:
    """The case in every form that it has."""
    forms: list[Awaitable[Answered]] = [
        caller.post(model, *as_binary(case, **BINARY_OUT)),
        caller.post(model, *as_binary(case)),
        caller.call(as_raw_contents(case, model)),
    ]
    if case.values is not None:
        forms += [caller.post(model, *as_json(case)), caller.call(as_typed_contents(case, model))]
    return forms


def expected(answer: Answered, model: str) -> Answered:
    """What Triton answered, under the route's name."""
    if isinstance(answer, Said):
        return answer.called(model) if answer.status == 200 else answer
    if isinstance(answer, bytes):
        message = pb.ModelInferResponse.FromString(answer)
        message.model_name = model
        return message.SerializeToString()
    return answer


def same(through: Answered, straight: Answered, case: Case) -> bool:
    if isinstance(through, Said) and isinstance(straight, Said):
        floats = case.datatype in ("FP32", "FP64") and through.header_length is None
        return through == straight or (floats and through.numbers == straight.numbers)
    if isinstance(through, bytes) and isinstance(straight, bytes):
        return bool(pb.ModelInferResponse.FromString(through) == pb.ModelInferResponse.FromString(straight))
    return through == straight


@pytest.mark.parametrize("route", ["over_http", "over_grpc"])
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group[0]} {list(group[1])}")
def test_every_datatype_shares_batches(
    direct: Peer, gateways: dict[str, Peer], group: tuple[str, tuple[int, ...]], route: str
) -> None:
    members = GROUPS[group]

    async def use(straight: Caller, through: Caller) -> None:
        wanted = [(case, await one) for case in members for one in asks(straight, "identity", case)]
        got = await asyncio.gather(
            *(one for _ in range(COPIES) for case in members for one in asks(through, route, case))
        )
        for (case, answer), found in zip(wanted * COPIES, got, strict=True):
            assert same(found, expected(answer, route), case), case.name
        assert max(through.shared) > max(case.shape[0] for case in members)

    asyncio.run(with_callers(direct, gateways["batched"], use))


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_in_json_fail_alone_in_tritons_words(
    direct: Peer, gateways: dict[str, Peer], datatype: str
) -> None:
    good = next(case for case in cases() if case.datatype == datatype)
    bad = Case("", datatype, good.shape, b"", [1.0] * 4)

    async def use(straight: Caller, through: Caller) -> None:
        refusal = await straight.post("identity", *as_json(bad))
        assert refusal.status == 400
        got = await asyncio.gather(
            *(
                through.post("over_grpc", *as_json(bad) if i % 3 == 1 else as_binary(good, **BINARY_OUT))
                for i in range(12)
            )
        )
        answer = expected(await straight.post("identity", *as_binary(good, **BINARY_OUT)), "over_grpc")
        assert [each == (refusal if i % 3 == 1 else answer) for i, each in enumerate(got)] == [True] * 12
        assert max(through.shared) > good.shape[0]

    asyncio.run(with_callers(direct, gateways["batched"], use))


def test_what_no_batch_may_hold_passes_alone(direct: Peer, gateways: dict[str, Peer]) -> None:
    """F13, F5: more rows than a batch has, none at all, and sequences; others share meanwhile."""
    large = Case("", "INT32", (60, 1), struct.pack("<60i", *range(60)), None)
    none = Case("", "INT32", (0, 1), b"", [])
    small = Case("", "INT32", (1, 1), struct.pack("<i", 7), None)

    async def use(straight: Caller, through: Caller) -> None:
        sent = [large, none, *[small] * 10]
        got = await asyncio.gather(*(through.call(as_raw_contents(case, "over_grpc")) for case in sent))
        for case, found in zip(sent, got, strict=True):
            answer = expected(await straight.call(as_raw_contents(case, "identity")), "over_grpc")
            if isinstance(answer, tuple):
                assert isinstance(found, tuple)
                assert found[0] == answer[0]
            else:
                assert same(found, answer, case)
        assert 60 in through.shared
        assert any(1 < rows <= 48 for rows in through.shared)

    asyncio.run(with_callers(direct, gateways["batched"], use))


def test_an_answer_of_too_few_rows_is_never_shared_out(direct: Peer, gateways: dict[str, Peer]) -> None:
    """F11: the model answers one row whatever the batch; each caller still gets its own."""

    async def use(straight: Caller, through: Caller) -> None:
        sent = [Case("", "INT32", (1, 1), struct.pack("<i", i), None) for i in range(16)]
        got = await asyncio.gather(*(through.call(as_raw_contents(case, "one_by_one")) for case in sent))
        for case, found in zip(sent, got, strict=True):
            assert isinstance(found, bytes)
            assert pb.ModelInferResponse.FromString(found).raw_output_contents == [case.data]

    asyncio.run(with_callers(direct, gateways["batched"], use))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_classes_are_those_of_the_rows_own(direct: Peer, gateways: dict[str, Peer], count: int) -> None:
    rows = [[1.0, 3.0, 2.0], [9.0, 8.0, 7.0], [0.5, 0.25, 0.75], [-1.0, float("inf"), 0.0]]
    inputs = [Case("", "FP32", (1, 3), struct.pack("<3f", *row), row) for row in rows]
    wanted = {"outputs": [{"name": "OUT_FP32", "parameters": {"classification": count}}]}

    def message(case: Case, model: str) -> pb.ModelInferRequest:
        made = as_raw_contents(case, model)
        made.outputs.add(name="OUT_FP32").parameters["classification"].int64_param = count
        return made

    async def use(straight: Caller, through: Caller) -> None:
        for case in inputs:
            plain = await straight.post("labelled", *as_json(case, **wanted))
            assert plain.status == 200
            got = await asyncio.gather(
                *(through.post("classes", *as_json(other, **wanted)) for other in [case, *inputs] * 2),
                *(through.call(message(other, "classes")) for other in [case, *inputs] * 2),
            )
            assert got[0] == plain.called("classes")
            answer = expected(await straight.call(message(case, "labelled")), "classes")
            assert same(got[10], answer, case)
        assert max(through.shared) > 1

    asyncio.run(with_callers(direct, gateways["batched"], use))


def test_callers_with_different_wishes_share_no_batch(direct: Peer, gateways: dict[str, Peer]) -> None:
    """Parameters and requested outputs make a batch's members; ids, priorities and binary flags are each caller's."""
    case = Case("", "INT32", (1, 1), struct.pack("<i", 7), [7])
    wishes: list[dict[str, Any]] = [
        {"id": "a"}, {"id": "b", "parameters": {"priority": 1}}, {"parameters": {"own": True}},
        {"parameters": {"own": 1}}, {"outputs": [{"name": "OUT_INT32"}]}, {"outputs": []},
        {"parameters": {"binary_data_output": True}},
    ]  # fmt: skip

    async def use(straight: Caller, through: Caller) -> None:
        sent = wishes * 4
        got = await asyncio.gather(*(through.post("over_grpc", *as_json(case, **wish)) for wish in sent))
        for wish, found in zip(sent, got, strict=True):
            assert found == (await straight.post("identity", *as_json(case, **wish))).called("over_grpc")
            assert json.loads(found.body[: int(found.header_length or len(found.body))]).get("id") == wish.get("id")

    asyncio.run(with_callers(direct, gateways["batched"], use))

"""Where parts meet: failures that concern one message, one replica or one call, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from backends.errors import BadRequest, ConnectionLost
from backends.parameters import OF_REQUEST, check_parameters
from backends.request import HttpCall, Relay, Reply, Request, RpcCall, replace
from gateway.relay import _target
from tests.support.gateway import Rig
from tests.support.http1 import serving
from tests.unit.gateway.grpc_edge import edge
from tests.unit.gateway.test_grpc_stream import PLAIN, Models, ask, once, said, stream
from tests.unit.gateway.test_http_streams import POLICY, Streaming

__all__ = ["serving"]


class Choosy(Models):
    """Does not take the message with the id `bad`, wherever it stands in its stream."""

    async def __call__(self, request: Request) -> Reply:
        call = request.content
        assert isinstance(call, RpcCall)
        return await super().__call__(replace(request, content=replace(call, messages=self._taken(call))))

    async def _taken(self, call: RpcCall) -> AsyncIterator[bytes]:
        async for message in call.messages:
            if b"bad" in message:
                assert call.refused is not None
                call.refused(BadRequest("not this one"))
            else:
                yield message


@pytest.mark.parametrize("trait", [PLAIN, None])
def test_a_message_that_is_refused_on_its_way_fails_alone_and_in_its_turn(trait: Any) -> None:
    async def main() -> None:
        models = Choosy({"a": trait}, once)
        async with edge(models) as setup:
            call = stream(setup)
            for id in ("1", "bad", "3"):
                await ask(call, "a", id)
            await call.done_writing()
            got = [await said(call) for _ in range(3)]
            expected = [("a", "1", ""), ("", "bad", "not this one"), ("a", "3", "")]
            assert (got if trait is PLAIN else sorted(got)) == (expected if trait is PLAIN else sorted(expected))
            assert (await said(call))[2] == "EOF"
            assert not setup.reported

    asyncio.run(main())


def test_a_relayed_answer_that_fails_before_it_begins_has_a_status_of_its_own(serving: Callable[..., Any]) -> None:
    class Cut(Streaming):
        async def __call__(self, request: Request, /) -> Reply:
            self.requests.append(request)
            assert isinstance(request.content, HttpCall)
            return Reply(Relay(200, ((b"content-length", b"100"),), self._chunks()))

    stack = Rig(POLICY, Cut([ConnectionLost("it went away")]))

    async def client(rig: Any) -> bytes:
        reader, writer = await rig.open()
        writer.write(b"GET /v2/models/m/config HTTP/1.1\r\nhost: x\r\n\r\n")
        return bytes(await asyncio.wait_for(reader.readuntil(b"}"), 2))

    said = serving(stack.app, client)
    assert said.startswith(b"HTTP/1.1 502 ")
    assert b'{"error":"it went away"}' in said


def test_what_remembers_sequences_is_not_given_megabytes() -> None:
    check_parameters({"sequence_id": "x" * 128}, OF_REQUEST)
    with pytest.raises(BadRequest, match="at most 128 characters"):
        check_parameters({"sequence_id": "x" * 129}, OF_REQUEST)


def test_a_path_in_disguise_is_renamed_as_what_it_is() -> None:
    assert _target("/v2/%6Dodels/r/%63onfig?a", "m", "") == ("/v2/%6Dodels/m/%63onfig?a", "config")

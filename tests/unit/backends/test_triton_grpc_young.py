"""Calls that are given up within their first milliseconds: cancelled when they have grown, and not before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from backends.errors import Expired
from backends.grpc_channels import GROWN
from backends.request import Request, RpcCall
from backends.triton_grpc import TritonGrpc
from tests.unit.backends.grpc_peer import SERVICE, ask, backend, told


async def left(client: TritonGrpc, request: Request) -> None:
    call = asyncio.ensure_future(client(request))
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait({call})


async def late(client: TritonGrpc, request: Request) -> None:
    began = time.monotonic()
    with pytest.raises(Expired):
        await client(Request(model="m", content=request.content, deadline=began + 0.01))
    assert time.monotonic() - began < GROWN


async def closed(client: TritonGrpc, request: Request) -> None:
    await left(client, request)
    await client.close()


@pytest.mark.parametrize("given_up", [left, late, closed])
@pytest.mark.parametrize("relayed", [False, True])
def test_no_inference_is_cancelled_young(
    given_up: Callable[[TritonGrpc, Request], Awaitable[None]], relayed: bool
) -> None:
    async def main() -> None:
        ages: list[float] = []
        over = asyncio.Event()

        async def script(messages: AsyncIterator[bytes], context: Any) -> None:
            began = time.monotonic()
            try:
                await asyncio.sleep(10)
            finally:
                ages.append(time.monotonic() - began)
                over.set()

        async with backend(script) as client:

            async def warm() -> None:
                with pytest.raises(Expired):
                    await client(ask(deadline=time.monotonic() + 0.2))

            await warm()  # what is measured is the age of a call, not how long a connection takes
            await over.wait()
            over.clear()
            request = Request(model="m", content=RpcCall(SERVICE + "ModelInfer", told(b""))) if relayed else ask()
            await given_up(client, request)
            await asyncio.wait_for(over.wait(), 2)
            assert GROWN * 0.8 < ages[-1] < 1

    asyncio.run(main())

"""A relayed gRPC call as it runs: the caller's messages go out, the backend's come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from typing import Any

import grpc

from backends.errors import ConnectionLost, Failure
from backends.grpc_metadata import answered
from backends.request import Metadata


class Replies:
    """A relayed call's replies, one by one. Closing it, or dropping it, cancels the call if it still runs."""

    def __init__(
        self,
        call: Any,
        messages: AsyncIterator[bytes],
        failure: Callable[[grpc.aio.AioRpcError], Failure],
        address: str,
    ) -> None:
        self._call = call
        self._replies = call.__aiter__()
        self._failure = failure
        self._address = address
        self._first: bytes | None = None
        self._trailing: Metadata = ()
        self._faults: list[Exception] = []
        # Must not hold `self`, which would then never be dropped.
        self._sending = sending = asyncio.create_task(_send(call, messages, self._faults), context=Context())
        # A peer may answer before all was said. A write that is under way then fails, and grpc.aio puts an "Internal
        # error from Core" over the status that has come already, be it OK: so writing ends as soon as there is one.
        call.add_done_callback(lambda _: sending.cancel())

    async def begin(self) -> None:
        with contextlib.suppress(StopAsyncIteration):
            self._first = await self._read()

    def __aiter__(self) -> Replies:
        return self

    async def __anext__(self) -> bytes:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await self._read()

    def trailers(self) -> Metadata:
        return self._trailing

    async def aclose(self) -> None:
        self._stop()

    async def _read(self) -> bytes:
        try:
            reply: bytes = await anext(self._replies)
        except StopAsyncIteration:
            self._trailing = answered(await self._call.trailing_metadata() or ())
            self._stop()
            raise
        except grpc.aio.AioRpcError as error:
            self._stop()
            raise self._failure(error) from None
        except asyncio.CancelledError:
            self._stop()
            if cancelled():
                raise
            if self._faults:
                raise self._faults[0] from None
            raise ConnectionLost(f"backend {self._address}: the client was closed during the call") from None
        return reply

    def _stop(self) -> None:
        self._call.cancel()
        self._sending.cancel()

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the call with it
            self._stop()


async def _send(call: Any, messages: AsyncIterator[bytes], faults: list[Exception]) -> None:
    """Writes the caller's messages to the call; an exception of theirs ends it and is kept in `faults`."""
    over = (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError)  # whoever reads learns why
    try:
        async for message in messages:
            try:
                await call.write(message)
            except over:
                return
        with contextlib.suppress(*over):
            await call.done_writing()
    except asyncio.CancelledError:
        call.cancel()
        raise
    except Exception as fault:
        faults.append(fault)
        call.cancel()


def cancelled() -> bool:
    """Whether it is this very task that is being cancelled.

    grpc.aio raises CancelledError for a call that ended because its channel was closed, too; to let that pass for a
    cancellation would leave a caller without an answer.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0

"""Streams of chunks: watched to their end and in time, of one chunk, and as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, aclosing
from typing import NamedTuple

from backends.errors import BadReply, Expired, Failure
from backends.request import Relay, Reply, replace


class Bound(NamedTuple):
    """How long each chunk is waited for: in a `block()`, which raises TimeoutError where that is too long.

    `failure` is what that means, or what Expired means that the stream itself raised.
    """

    block: Callable[[], AbstractContextManager[None]]
    failure: Callable[[TimeoutError | Expired], Failure]


def watched(reply: Reply, ended: Callable[[BaseException | None], None], bound: Bound | None = None) -> Reply | None:
    """`reply` with its stream as a `Watched`; None where it has none, and is whole."""
    relay = reply.body
    if not isinstance(relay, Relay) or isinstance(relay.body, bytes):
        return None
    return replace(reply, body=replace(relay, body=Watched(relay.body, ended, bound)))


class Watched:
    """The chunks of `inner`; `ended(error)` is called when they are over (None), fail, or are left.

    A stream that is closed before its end, or dropped without a word, ends with CancelledError; one that told of a
    failure in its own words (`inner.failure`) ends with that, though its reader sees nothing but an end. An object and
    not a generator, because a generator that was never started runs nothing when it is closed.
    """

    def __init__(
        self, inner: AsyncIterator[bytes], ended: Callable[[BaseException | None], None], bound: Bound | None = None
    ) -> None:
        self._inner = inner
        self._ended: Callable[[BaseException | None], None] | None = ended
        self._bound = bound

    def __aiter__(self) -> Watched:
        return self

    async def __anext__(self) -> bytes:
        try:
            if self._bound is None:
                return await anext(self._inner)
            with self._bound.block():
                return await anext(self._inner)
        except StopAsyncIteration:
            self._end(self.failure)
            raise
        except (TimeoutError, Expired) as late:
            failure = self._bound.failure(late) if self._bound is not None else late
            await self._close(failure)
            raise failure from None
        except BaseException as error:
            await self._close(error)
            raise

    @property
    def failure(self) -> BaseException | None:
        """What the stream has told of by itself."""
        failure: BaseException | None = getattr(self._inner, "failure", None)
        return failure

    async def aclose(self) -> None:
        await self._close(asyncio.CancelledError())

    async def _close(self, error: BaseException) -> None:
        self._end(error)
        close = getattr(self._inner, "aclose", None)
        if close is not None:
            await close()

    def _end(self, error: BaseException | None) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(error)

    def __del__(self) -> None:
        self._end(asyncio.CancelledError())


async def once(chunk: bytes) -> AsyncIterator[bytes]:
    """A stream of one chunk: a server's answer is a stream, and whoever renames what passes knows that form only."""
    yield chunk


async def whole(relay: Relay, max_bytes: int) -> bytes:
    """All of a relay's body. Raises BadReply where it is larger."""
    if isinstance(relay.body, bytes):
        return relay.body
    body = bytearray()
    async with aclosing(relay.body) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            body += chunk
            if len(body) > max_bytes:
                raise BadReply(f"backend: expected a reply of at most {max_bytes} bytes, got more")
    return bytes(body)

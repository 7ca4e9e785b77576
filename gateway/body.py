"""Bodies of HTTP requests: read within bounds of size and time, and decompressed within the same bound."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import nullcontext
from math import inf

from backends.deadlines import Deadlines
from backends.errors import Expired, ShutDown, SlowCaller, TooLarge, UnknownEncoding
from backends.tensor import shown
from gateway.admit import InFlight
from gateway.encoding import inflated
from gateway.server import WHOLE, Receive, Scope
from policies.spec import Limits

# Longer numbers are no length; int() itself refuses them only from 4,300 digits on.
NUMBER = re.compile(rb"[0-9]{1,18}")


class Bodies:
    """Reads bodies within `limits`, each counted by `in_flight` while it comes, until `deadlines` are cut."""

    def __init__(
        self,
        limits: Callable[[], Limits],
        in_flight: InFlight,
        deadlines: Callable[[], Deadlines | None] = lambda: None,
    ) -> None:
        self._limits = limits
        self._in_flight = in_flight
        self._deadlines = deadlines

    async def decoded(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, wait: float = inf) -> bytes:
        """The body, decompressed where it is gzip or deflate; its sender waits for `wait` seconds."""
        body = await self.read(scope, headers, receive, wait)
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding == b"identity":
            return body
        if encoding not in (b"gzip", b"deflate"):
            raise UnknownEncoding(
                f"content-encoding: expected gzip or deflate, got {shown(encoding.decode('latin-1'))}"
            )
        limits = self._limits()
        with self._in_flight.receiving(limits.in_flight):
            return await inflated(body, encoding, limits.body_bytes)

    async def read(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, wait: float = inf) -> bytes:
        """The body as it came. Raises TooLarge before it is read, or while.

        SlowCaller where it takes longer than a request may, Expired where longer than the sender's `wait` in seconds,
        ShutDown where the gateway waits no more.
        """
        limits = self._limits()
        whole: bytes | None = scope[WHOLE]() if WHOLE in scope else None
        if whole is not None:
            if len(whole) > limits.body_bytes:
                raise TooLarge(f"request body: expected at most {limits.body_bytes} bytes, got {len(whole)}")
            self._in_flight.arrive(limits.in_flight)
            return whole
        length = headers.get(b"content-length")
        if length is not None and NUMBER.fullmatch(length) and int(length) > limits.body_bytes:
            raise TooLarge(f"request body: expected at most {limits.body_bytes} bytes, got {int(length)}")
        deadlines = self._deadlines()
        with self._in_flight.receiving(limits.in_flight):
            try:
                with deadlines.until(inf) if deadlines is not None else nullcontext():
                    async with asyncio.timeout(min(limits.timeout, wait)):
                        return await _whole(receive, limits.body_bytes)
            except TimeoutError:
                if deadlines is not None and deadlines.was_cut:
                    raise ShutDown("the gateway is shutting down, and not all of the body had come") from None
                if wait < limits.timeout:
                    raise Expired("edge", "deadline exceeded in edge, before all of the body had come") from None
                raise SlowCaller(f"request body: expected all of it within {limits.timeout:g} s") from None


async def _whole(receive: Receive, limit: int) -> bytes:
    # One buffer however many chunks: a table of a million one-byte chunks would cost a hundred times their bytes.
    whole = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        body: bytes = message.get("body", b"")
        if len(whole) + len(body) > limit:
            raise TooLarge(f"request body: expected at most {limit} bytes, got more")
        if not message.get("more_body"):
            return bytes(whole) + body if whole else body
        whole += body

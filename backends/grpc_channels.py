"""The gRPC channel to a server, which is replaced when the server's name stands for other addresses.

A channel is made for the addresses that are known (`backends.addresses`), and calls go to them in turn. When they
change, the next call makes another channel; the old one is closed after its last call. gRPC itself is not needed here:
`connect(target, options)` makes a channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any

from backends.addresses import Addresses, Resolve

Options = list[tuple[str, int | str]]


# A ModelInfer that is given up sooner is cancelled when it is so old, in seconds. One that is cancelled in its first
# milliseconds can end Triton 2.51 (SIGSEGV, once in some ten thousand); at an age of 5 ms none of 40,000 did. The rest
# is for a busy machine. Streams are not at risk.
GROWN = 0.05


class Line:
    """A channel and how many calls are on it; `ended` is told of the last one of a channel that was replaced."""

    __slots__ = ("_ended", "calls", "channel", "infer", "replaced", "settling", "stream")

    def __init__(self, channel: Any, ended: Callable[[Line], None]) -> None:
        self.channel = channel
        # Made once: these are called most.
        self.infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        self.stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        self.calls = 0
        self.replaced = False
        self.settling: asyncio.Task[None] | None = None
        self._ended = ended

    def leave(self) -> None:
        """One call less."""
        self.calls -= 1
        if self.replaced and not self.calls:
            self._ended(self)

    async def close(self) -> None:
        if self.settling is not None:
            self.settling.cancel()
        await self.channel.close()


class Channels:
    """`line` is the channel for new calls, None where one has to be made by `open`. `address` is `host:port`."""

    def __init__(
        self,
        address: str,
        connect: Callable[[str, Options], Any],
        now: Callable[[], float],
        resolve: Resolve | None,
    ) -> None:
        self.line: Line | None = None
        self.closed = False
        self._address = address
        self._connect = connect
        host, _, self._port = address.rpartition(":")
        self._addresses = Addresses.of(host.strip("[]"), resolve, now, self._moved)
        self._lines: set[Line] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def open(self) -> Line:
        """The channel to the addresses that are known. Raises OSError or UnicodeError where the name has none."""
        target = self._address
        options: Options = []
        if self._addresses is not None and not self.closed:
            target = _target(await self._addresses.get(), self._port)
            options = [("grpc.lb_policy_name", "round_robin"), ("grpc.default_authority", self._address)]
        if self.closed:
            raise OSError("the client is closed")
        if self.line is None:
            self.line = Line(self._connect(target, options), self._ended)
            self._lines.add(self.line)
        return self.line

    def refresh(self) -> None:
        """Asks anew, in the background, what the server's name stands for, where the last answer is old."""
        if self._addresses is not None:
            self._addresses.refresh()

    async def close(self) -> None:
        self.closed = True
        if self._addresses is not None:
            self._addresses.close()
        if any(line.calls for line in self._lines):
            await asyncio.sleep(GROWN)  # to close a channel is to cancel its calls
        await asyncio.gather(*(line.close() for line in self._lines), *self._closing)

    def _moved(self) -> None:
        line, self.line = self.line, None
        if line is not None:
            line.replaced = True
            if not line.calls:
                self._ended(line)

    def _ended(self, line: Line) -> None:
        if not self.closed:
            self._lines.remove(line)
            task = asyncio.get_running_loop().create_task(line.close(), context=Context())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _target(addresses: tuple[str, ...], port: str) -> str:
    """One target for all. gRPC takes one family at a time, so IPv4 goes as IPv6 where there are both (RFC 4291)."""
    if any(":" in address for address in addresses):
        return "ipv6:" + ",".join(f"[{a if ':' in a else f'::ffff:{a}'}]:{port}" for a in addresses)
    return "ipv4:" + ",".join(f"{a}:{port}" for a in addresses)

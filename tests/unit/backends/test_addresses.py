from __future__ import annotations

import asyncio
import socket

import pytest

from backends.addresses import Addresses
from tests.support.loop import run, settle


class Resolver:
    """Answers with `answer`, or raises it, after a second; `asked` counts."""

    def __init__(self, *answer: str) -> None:
        self.answer: tuple[str, ...] | Exception = answer
        self.asked = 0

    async def __call__(self, host: str) -> tuple[str, ...]:
        assert host == "backend"
        self.asked += 1
        await asyncio.sleep(1.0)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def addresses(resolver: Resolver) -> tuple[Addresses, list[tuple[str, ...]]]:
    told: list[tuple[str, ...]] = []
    made = Addresses.of("backend", resolver, asyncio.get_running_loop().time, lambda: told.append(made.known))  # type: ignore[union-attr]
    assert made is not None
    return made, told


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_stands_for_itself(host: str) -> None:
    assert Addresses.of(host, Resolver(), lambda: 0.0, lambda: None) is None
    assert Addresses.of("name", None, lambda: 0.0, lambda: None) is None


def test_however_many_wait_it_is_asked_once_and_then_every_five_seconds() -> None:
    async def main() -> None:
        resolver = Resolver("10.0.0.1", "10.0.0.2")
        found, told = addresses(resolver)
        assert await asyncio.gather(*(found.get() for _ in range(9))) == [("10.0.0.1", "10.0.0.2")] * 9
        for _ in range(100):
            found.refresh()
            await found.get()
            await asyncio.sleep(0.1)
        assert resolver.asked == 3
        assert told == [("10.0.0.1", "10.0.0.2")]
        resolver.answer = ("10.0.0.3",)
        await asyncio.sleep(5.0)
        found.refresh()
        await asyncio.sleep(2.0)
        assert await found.get() == ("10.0.0.3",)
        assert told[1:] == [("10.0.0.3",)]

    run(main())


@pytest.mark.parametrize("failure", [socket.gaierror(-3, "Temporary failure"), ()])
def test_a_resolver_that_fails_later_changes_nothing(failure: Exception | tuple[str, ...]) -> None:
    async def main() -> None:
        resolver = Resolver("10.0.0.1")
        found, told = addresses(resolver)
        await found.get()
        resolver.answer = failure
        await asyncio.sleep(5.0)
        found.refresh()
        await asyncio.sleep(2.0)
        assert resolver.asked == 2
        assert await found.get() == ("10.0.0.1",)
        assert told == [("10.0.0.1",)]

    run(main())


def test_a_name_that_nobody_knows_is_asked_again() -> None:
    async def main() -> None:
        resolver = Resolver()
        found, _ = addresses(resolver)
        with pytest.raises(OSError, match="has no address"):
            await found.get()
        resolver.answer = socket.gaierror(-2, "Name or service not known")
        with pytest.raises(socket.gaierror):
            await found.get()
        resolver.answer = ("10.0.0.1",)
        assert await found.get() == ("10.0.0.1",)

    run(main())


def test_who_leaves_takes_no_answer_along_and_an_end_leaves_nobody_waiting() -> None:
    async def main() -> None:
        found, _ = addresses(Resolver("10.0.0.1"))
        leaves, stays = (asyncio.ensure_future(found.get()) for _ in range(2))
        await settle()
        leaves.cancel()
        assert await stays == ("10.0.0.1",)
        found, _ = addresses(Resolver("10.0.0.1"))
        waits = asyncio.ensure_future(found.get())
        await settle()
        found.close()
        with pytest.raises(OSError, match="the client was closed"):
            await waits

    run(main())

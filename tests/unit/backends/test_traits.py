from __future__ import annotations

import asyncio

import pytest

from backends.errors import BackendFailed, BadReply, Failure, Unreachable
from backends.request import Trait
from backends.traits import UNTOLD, Traits
from tests.support.loop import run, settle

DECOUPLED = Trait(decoupled=True)


class Server:
    """Tells `answer` of every model, as often as it is `asked`, once it is let."""

    def __init__(self, answer: Trait | Failure) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str]] = []
        self.let = asyncio.Event()
        self.let.set()
        self.now = 0.0
        self.traits = Traits(self.ask, lambda: self.now)

    async def ask(self, model: str, version: str) -> Trait:
        self.asked.append((model, version))
        answer = self.answer
        await self.let.wait()
        if isinstance(answer, Failure):
            raise answer
        return answer


def test_a_model_is_asked_for_once_and_known_from_then_on() -> None:
    async def main() -> None:
        server = Server(DECOUPLED)
        assert server.traits.known("m", "") is None
        server.let.clear()
        learning = [asyncio.ensure_future(server.traits.learn("m", "")) for _ in range(5)]
        await settle()
        learning[0].cancel()  # takes only itself along
        server.let.set()
        assert [await each for each in learning[1:]] == [DECOUPLED] * 4
        assert server.traits.known("m", "") == DECOUPLED
        assert await server.traits.learn("m", "") == DECOUPLED
        assert server.traits.known("m", "2") is None
        assert server.asked == [("m", "")]

    run(main())


def test_what_is_old_is_asked_again_in_the_background() -> None:
    async def main() -> None:
        server = Server(DECOUPLED)
        await server.traits.learn("m", "")
        server.answer = Trait()
        server.now = 29.0
        assert server.traits.known("m", "") == DECOUPLED
        await settle()
        assert len(server.asked) == 1
        server.now = 31.0
        assert server.traits.known("m", "") == DECOUPLED
        await settle()
        assert server.traits.known("m", "") == Trait()
        server.answer = Unreachable("down")
        server.now = 70.0
        assert server.traits.known("m", "") == Trait()
        await settle()
        assert server.traits.known("m", "") == Trait()  # nothing better is known

    run(main())


@pytest.mark.parametrize(
    ("failure", "trait", "seconds"),
    [
        (Unreachable("down"), None, 1.0),
        (BadReply("nonsense"), UNTOLD, 60.0),
        (BackendFailed("", 500), None, 1.0),
        (BackendFailed("", 14, grpc=True), None, 1.0),
        (BackendFailed("unknown model", 404), Trait(), 1.0),
        (BackendFailed("unknown model", 400), Trait(), 1.0),
        (BackendFailed("unknown model", 5, grpc=True), Trait(), 1.0),
        (BackendFailed("no such call", 12, grpc=True), UNTOLD, 30.0),
        (BackendFailed("no such call", 501), UNTOLD, 30.0),
    ],
)
def test_servers_that_do_not_tell(failure: Failure, trait: Trait | None, seconds: float) -> None:
    async def main() -> None:
        server = Server(failure)
        assert await server.traits.learn("m", "") == trait
        server.now = seconds - 0.01
        assert await server.traits.learn("m", "") == trait
        assert len(server.asked) == 1
        server.now = seconds + 0.01
        assert await server.traits.learn("m", "") == trait
        await settle()
        assert len(server.asked) == 2

    run(main())


def test_forgetting_holds_for_what_is_being_asked_too() -> None:
    async def main() -> None:
        server = Server(DECOUPLED)
        server.let.clear()
        learning = asyncio.ensure_future(server.traits.learn("m", ""))
        await settle()
        server.traits.forget()
        server.answer = Trait()
        server.let.set()
        assert await learning == DECOUPLED
        assert server.traits.known("m", "") is None
        assert await server.traits.learn("m", "") == Trait()

    run(main())


def test_only_so_many_are_remembered() -> None:
    async def main() -> None:
        server = Server(Trait())
        for i in range(1100):
            await server.traits.learn(str(i), "")
        assert server.traits.known("0", "") is None
        assert server.traits.known("1099", "") == Trait()

    run(main())


def test_what_is_told_is_of_the_server_and_of_lately() -> None:
    async def main() -> None:
        server = Server(DECOUPLED)

        async def told() -> Trait:
            return await server.traits.told("m", "", lambda: server.ask("m", ""))

        assert [await told(), await told(), await server.traits.learn("m", "")] == [DECOUPLED] * 3
        assert len(server.asked) == 1
        server.now = 31.0
        server.answer = Unreachable("down")
        with pytest.raises(Unreachable):
            await told()
        # What is supposed of it is not what it said, be it asked for in the meantime or not.
        assert await server.traits.learn("m", "") == DECOUPLED
        await settle()
        with pytest.raises(Unreachable):
            await told()
        server.answer = BackendFailed("unknown model", 404)
        for _ in range(2):
            with pytest.raises(BackendFailed):
                await told()
        server.answer = Trait()
        assert await told() == Trait() == server.traits.known("m", "")

    run(main())


def test_what_is_told_while_it_is_forgotten_is_not_kept() -> None:
    async def main() -> None:
        server = Server(DECOUPLED)
        server.let.clear()
        telling = asyncio.ensure_future(server.traits.told("m", "", lambda: server.ask("m", "")))
        await settle()
        server.traits.forget()
        server.let.set()
        assert await telling == DECOUPLED
        assert server.traits.known("m", "") is None

    run(main())

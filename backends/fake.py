"""A backend that answers from a function: for tests, examples and the simulator's live twin."""

from __future__ import annotations

from collections.abc import Callable

from backends.request import Reply, Request


class FakeBackend:
    """Answers with `answer(request)`; keeps what it was asked in `requests`."""

    def __init__(self, answer: Callable[[Request], Reply]) -> None:
        self._answer = answer
        self.requests: list[Request] = []

    async def __call__(self, request: Request, /) -> Reply:
        self.requests.append(request)
        return self._answer(request)

"""Scripted services: what stands behind a part while it is tested. All keep what they were asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from backends.errors import BadRequest
from backends.request import Answer, Hop, Infer, Reply, Request, Tensors
from backends.tensor import Tensor


def echo(request: Request) -> Reply:
    """Every input comes back as an output of the same name, from model `echo`, version 1."""
    tensors = tuple(Tensor(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.infer.inputs.decoded)
    return Reply(Answer(Tensors.of(tensors), "echo", "1"), (Hop("", (), endpoint="fake"),))


class Scripted:
    """Answers with `answer(request)` after `seconds`; `running`, `most` and `cancelled` count calls."""

    def __init__(self, answer: Callable[[Request], Reply] = echo, seconds: float = 0.0) -> None:
        self.answer = answer
        self.seconds = seconds
        self.requests: list[Request] = []
        self.running = self.most = self.cancelled = self.finished = 0

    async def __call__(self, request: Request, /) -> Reply:
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds)
            reply = self.answer(request)
            self.finished += 1
            return reply
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    @property
    def rows(self) -> list[int]:
        """Rows of each call, by its first input; 0 for a scalar."""
        return [(request.infer.inputs.heads[0].shape or (0,))[0] for request in self.requests]


class Gate(Scripted):
    """Answers nothing until `open()`: a backend that is busy for as long as a test wants."""

    def __init__(self, answer: Callable[[Request], Reply] = echo) -> None:
        super().__init__(answer)
        self._opened = asyncio.Event()

    def open(self) -> None:
        self._opened.set()

    async def __call__(self, request: Request, /) -> Reply:
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._opened.wait()
            self.finished += 1
            return self.answer(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


def refuse(test: Callable[[Request], bool], failure: Callable[[], Exception]) -> Callable[[Request], Reply]:
    """An answer that fails where `test` says so, and echoes otherwise."""

    def answer(request: Request) -> Reply:
        if test(request):
            raise failure()
        return echo(request)

    return answer


def undecodable(shape: tuple[int, ...] = (1, 2)) -> Infer:
    """A call whose head is fine and whose data cannot be read, as of a JSON body with text for numbers."""

    def decode() -> tuple[Tensor, ...]:
        raise BadRequest("'x': data does not fit FP32")

    sound = Tensors.of((Tensor("x", "FP32", shape, b""),))
    return Infer(Tensors(sound.heads, None, decode))

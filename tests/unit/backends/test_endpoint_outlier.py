"""An endpoint finds out which models it fails, from every kind of call that makes one work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from backends.endpoint import Endpoint
from backends.errors import BackendFailed, BadRequest, ConnectionLost, Failure, Rejected, TooSlow
from backends.outlier import FAILURES, FIRST
from backends.request import Answer, HttpCall, Infer, Origin, Relay, Reply, Request, Tensors, replace
from tests.support.loop import run
from tests.support.strategies import call

INFER = Request(model="m", content=call([1.0]))
GENERATE = Request(model="m", content=HttpCall("POST", "/v2/models/m/generate_stream"), stream=True)
BROKEN = BackendFailed("Stub process 'm_0' is not healthy.", 500)


class Server:
    """Answers with `status`, or fails with `failure`: at once, or where a stream is asked for at its end."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.status = 200
        self.hang = False

    async def __call__(self, request: Request, /) -> Reply:
        if not isinstance(request.content, Infer):
            return Reply(Relay(self.status, (), self._chunks()))
        if self.failure is not None:
            raise self.failure
        return Reply(Answer(Tensors.of(())))

    async def _chunks(self) -> AsyncIterator[bytes]:
        yield b"first"
        if self.hang:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure

    async def unready(self, model: str, deadline: float, headers: Any) -> str:
        return ""

    def refresh(self) -> None: ...

    async def close(self) -> None: ...


def make() -> tuple[Server, Endpoint, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    server = Server()
    endpoint = Endpoint(
        "e",
        http=server,
        timeout=30.0,
        idle_timeout=30.0,
        headers={},
        now=lambda: asyncio.get_running_loop().time(),
        observe=lambda model, reason: told.append((model, reason)),
    )
    return server, endpoint, told


async def fail(endpoint: Endpoint, request: Request, times: int = FAILURES) -> None:
    for _ in range(times):
        try:
            reply = await endpoint(request)
            if isinstance(reply.body, Relay) and not isinstance(reply.body.body, bytes):
                async for _ in reply.body.body:
                    pass
        except (Failure, TimeoutError):
            pass


def test_a_model_that_fails_every_call_is_avoided_until_a_trial_is_answered() -> None:
    async def main() -> None:
        server, endpoint, told = make()
        server.failure = BROKEN
        await fail(endpoint, INFER)
        reason = f"{FAILURES} failures in a row, the last: {BROKEN.message}"
        assert (endpoint.avoids("m"), endpoint.avoids("n"), endpoint.avoided()) == (True, False, {"m": reason})
        await asyncio.sleep(FIRST)
        assert not endpoint.avoids("m")
        server.failure = None
        await endpoint(INFER)
        assert (endpoint.avoids("m"), told) == (False, [("m", reason), ("m", "")])

    run(main())


@pytest.mark.parametrize(("prepare", "broken"), [
    (lambda server: setattr(server, "failure", ConnectionLost("cut")), True),
    (lambda server: setattr(server, "status", 500), True),
    (lambda server: setattr(server, "hang", True), True),  # until it is too slow
    (lambda server: setattr(server, "status", 503), False),  # it may be a full queue
    (lambda server: setattr(server, "status", 400), False),
    (lambda server: setattr(server, "failure", BadRequest("the caller's own message")), False),
])  # fmt: skip
def test_the_outcome_of_a_stream_is_that_of_its_end(prepare: Callable[[Server], None], broken: bool) -> None:
    async def main() -> None:
        server, endpoint, _ = make()
        prepare(server)
        await fail(endpoint, GENERATE)
        assert (endpoint.avoids("m"), endpoint.in_flight) == (broken, 0)

    run(main())


def test_a_stream_that_is_answered_to_its_end_closes_the_case_and_one_that_is_left_tells_nothing() -> None:
    async def main() -> None:
        server, endpoint, _ = make()
        server.failure = BROKEN
        await fail(endpoint, INFER)
        server.failure = None
        left = await endpoint(GENERATE)
        await left.body.body.aclose()  # type: ignore[union-attr]
        assert endpoint.avoids("m")
        await fail(endpoint, GENERATE, 1)
        assert not endpoint.avoids("m")

    run(main())


@pytest.mark.parametrize("failure", [Rejected("queue full"), BackendFailed("bad shape", 400), TooSlow("late")])
def test_who_is_busy_or_was_asked_nonsense_is_not_avoided(failure: Failure) -> None:
    async def main() -> None:
        server, endpoint, _ = make()
        server.failure = failure
        await fail(endpoint, INFER)
        assert endpoint.avoids("m") is isinstance(failure, TooSlow)

    run(main())


def test_a_batch_that_fails_and_is_run_again_in_parts_counts_by_its_parts_alone() -> None:
    async def main() -> None:
        server, endpoint, _ = make()
        server.failure = BROKEN
        await fail(endpoint, replace(INFER, origins=(Origin(), Origin())), 3 * FAILURES)
        assert not endpoint.avoids("m")
        await fail(endpoint, replace(INFER, origins=(Origin(),)))
        assert endpoint.avoids("m")

    run(main())


def test_questions_about_a_model_are_no_work_and_no_trial() -> None:
    async def main() -> None:
        server, endpoint, _ = make()
        server.status = 500
        question = Request(model="m", content=HttpCall("GET", "/v2/models/m/ready"))
        await fail(endpoint, question)
        assert not endpoint.avoids("m")
        server.failure = BROKEN
        await fail(endpoint, INFER)
        server.status, server.failure = 200, None
        await fail(endpoint, question)
        assert endpoint.avoids("m")
        await asyncio.sleep(FIRST)
        await fail(endpoint, question)
        assert not endpoint.avoids("m")  # the trial is still to come

    run(main())

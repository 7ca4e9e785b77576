"""A dispatch before scripted backends, and short words for what tests do with it."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from backends.errors import BackendFailed
from backends.request import Answer, Infer, Reply, Request, Service, Tensors
from policies.spec import Batch as Limits
from routing.dispatch import Dispatch
from routing.dispatcher import Dispatcher
from tests.support.loop import VirtualLoop, settle
from tests.support.strategies import call, fp32, rows_of


def make(*backends: Service, **limits: Any) -> Dispatch:
    dispatcher = Dispatcher(Limits(**{"slots": 1, **limits}), len(backends))
    return Dispatch(dispatcher, backends, asyncio.get_running_loop().time)


def ask(dispatch: Service, infer: Infer, deadline: float = math.inf, **fields: Any) -> asyncio.Task[Reply]:
    async def asked() -> Reply:
        return await dispatch(Request(model="m", content=infer, deadline=deadline, **fields))

    return asyncio.ensure_future(asked())


async def busy(dispatch: Dispatch) -> asyncio.Task[Reply]:
    """Takes the only slot."""
    task = ask(dispatch, call([0.0]))
    await settle()
    assert dispatch.dispatcher.running == 1
    return task


def stall(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.stall(seconds)


def first(reply: Reply) -> list[list[float]]:
    return rows_of(reply.answer.outputs.decoded[0])


def idle(dispatch: Dispatch) -> None:
    assert dispatch.dispatcher.running == 0
    assert dispatch.dispatcher.waiting_rows == 0
    assert set(dispatch.dispatcher.free) == {dispatch.dispatcher.limits.slots}


def bad_row(request: Request) -> bool:
    return any(row[0] < 0 for row in rows_of(request.infer.inputs.decoded[0]))


def no() -> BackendFailed:
    return BackendFailed("no", 400)


def short(reply: Reply) -> Reply:
    """The reply of a model that answers one row only, whatever it was asked."""
    tensor = reply.answer.outputs.decoded[0]
    return Reply(Answer(Tensors.of((fp32(tensor.name, rows_of(tensor)[:1]),))))

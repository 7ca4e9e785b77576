"""Dispatch: the asynchronous shell around a dispatcher, as a service.

A call waits in a lane, leaves in a batch, and gets its own rows back. Callers of any wire share a batch, because a call
is decoded only when it is merged: one that leaves alone goes as the very bytes it came as. A caller that leaves takes
only its own rows; a batch that nobody waits for any more is cancelled. A batch that failed for what may be in it is run
again by halves, so that one bad row fails alone. One that was never executed goes back to its lane, for another
endpoint, as long as the budget pays for it (`routing.retry`); one that was lost is not run again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from contextvars import Context
from functools import partial
from typing import Any

import msgspec

from backends import rows
from backends.errors import BackendFailed, BadReply, BadRequest, Expired, Failure, Rejected
from backends.request import Answer, Hop, Infer, Origin, Reply, Request, Service, content, replace, sequence
from routing.dispatcher import Batch, Dispatcher
from routing.lane import Entry
from routing.retry import NEVER_EXECUTED, RetryBudget
from routing.sticky import Sticky

# Nobody tells that an endpoint is ready again, or no more: while something waits and one is down, or what waits was put
# back and may go to some of them only, their slots are looked at so often.
_LOOK_AGAIN_SECONDS = 0.1


class _Caller(msgspec.Struct, eq=False):
    request: Request
    reply: asyncio.Future[Reply | None]  # None: `batch` is yours alone, run it
    divisible: bool
    batch: Batch | None = None


class Dispatch:
    """Answers through `endpoints`, one service per endpoint of the dispatcher, in batches.

    `unready` gives the numbers of endpoints that are known not to be ready, `avoided` those that a model is kept from
    (None: no model is); without a `budget` nothing is sent again. `sticky` chooses the endpoint for calls of stateful
    sequences; without it any may get them.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        endpoints: tuple[Service, ...],
        now: Callable[[], float],
        unready: Callable[[], Collection[int]] = tuple,
        budget: RetryBudget | None = None,
        avoided: Callable[[], Callable[[str], Collection[int]] | None] = lambda: None,
        sticky: Sticky | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self._endpoints = endpoints
        self._now = now
        self._unready = unready
        self._avoided = avoided
        # With one endpoint there is no elsewhere.
        self._budget = budget if len(endpoints) > 1 else None
        self._sticky = sticky if len(endpoints) > 1 else None
        self._due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._running: dict[Batch, asyncio.Task[None]] = {}

    async def __call__(self, request: Request, /) -> Reply:
        count = rows.count(request.infer)
        if count is None and self._sticky is not None and (running := sequence(request)) is not None:
            return await self._sticky(request, running, partial(self._queued, request, None))
        return await self._queued(request, count, None)

    async def _queued(self, request: Request, count: int | None, only: int | None) -> Reply:
        """The reply to a call of `count` rows, None where it cannot be divided, once it has waited for its batch."""
        infer = request.infer
        now = self._now()
        caller = _Caller(request, asyncio.get_running_loop().create_future(), divisible=bool(count))
        entry = Entry(
            rows=count or 1,
            arrived=now,
            limit=min(request.deadline, now + self.dispatcher.limits.queue_time),
            caller=caller,
            alone=not count,
            only=only,
        )
        # What goes to one endpoint only must not wait behind what waits for another.
        key = (request.model, request.version, rows.signature(infer) if count else only)
        self.dispatcher.offer(entry, key)
        self._schedule()
        while True:
            try:
                given = await caller.reply
            except asyncio.CancelledError:
                self._leave(entry, caller)
                raise
            if given is not None:
                return given
            # A batch of one is run by its caller: no task, and no future, stands between them.
            assert caller.batch is not None
            reply = await self._alone(caller.batch, entry)
            if reply is not None:
                return reply

    def _leave(self, entry: Entry, caller: _Caller) -> None:
        if self.dispatcher.withdraw(entry):
            return
        batch = caller.batch
        if batch is None:
            return
        if batch not in self._running:  # its own, and not begun
            self._over(batch)
        elif not any(map(_wanted, batch.entries)):
            self._running[batch].cancel()

    def _schedule(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._due = False
        now = self._now()
        unready = self._unready()
        avoided = self._avoided()
        step = self.dispatcher.step(now, unready, None if avoided is None else partial(_of_lane, avoided))
        for entry in step.expired:
            self._expire(entry, now)
        for batch in step.batches:
            self._start(batch)
        wake = step.wake
        if wake is not None and (unready or avoided or self.dispatcher.put_back):
            wake = min(wake, now + _LOOK_AGAIN_SECONDS)
        if wake is not None and wake < self._timer_at:
            self._set_timer(wake, now)

    def _set_timer(self, at: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        # Timers have whole-millisecond grain: half a millisecond more saves a turn that would find nothing due.
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - now) + 0.0005, self._ring)

    def _ring(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._turn()

    def _expire(self, entry: Entry, now: float) -> None:
        caller: _Caller = entry.caller
        if caller.reply.done():
            return
        waited_ms = (now - entry.arrived) * 1e3
        if caller.request.deadline <= now:
            failure: Failure = Expired("queue", f"deadline exceeded in queue after {waited_ms:.0f} ms")
        else:
            limit_ms = self.dispatcher.limits.queue_time * 1e3
            failure = Rejected(
                f"waited {waited_ms:.0f} ms in the queue, limit {limit_ms:.0f} ms", self.dispatcher.predicted_wait()
            )
        caller.reply.set_exception(failure)

    def _start(self, batch: Batch) -> None:
        for entry in batch.entries:
            entry.caller.batch = batch
        if self._budget is not None and not batch.entries[0].tried:
            self._budget.earn()
        if len(batch.entries) == 1:
            caller = batch.entries[0].caller
            if caller.reply.done():
                self._over(batch)
            else:
                caller.reply.set_result(None)
            return
        # An empty context: a batch belongs to none of its callers.
        task = asyncio.get_running_loop().create_task(self._answer(batch, batch.entries), context=Context())
        self._running[batch] = task
        # Not the task's own `finally`: a task that is cancelled before its first step never comes to it.
        task.add_done_callback(partial(self._ended, batch))

    def _ended(self, batch: Batch, task: asyncio.Task[None]) -> None:
        """Gives the slot back, and leaves no caller waiting: an error here is a defect, reported at the edge."""
        del self._running[batch]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            _fail(batch.entries, error)
        self._over(batch)

    def _over(self, batch: Batch) -> None:
        """Gives the slot of a batch back."""
        self.dispatcher.done(batch, self._now())
        for entry in batch.entries:
            # Batch, entry and caller hold each other: what is cut here, the garbage collector need not look for.
            if entry.caller.batch is batch:
                entry.caller.batch = None
        if self.dispatcher.waiting_rows:
            self._schedule()

    async def _alone(self, batch: Batch, entry: Entry) -> Reply | None:
        """The reply to the only entry of a batch; None where it was put back, to wait for another endpoint."""
        began = self._now()
        try:
            reply = await self._endpoints[batch.endpoint](_merged(batch.entries))
            service = self._now() - began
            (answer,) = _shares(reply, batch.entries)
        except NEVER_EXECUTED:
            entry.caller.reply = asyncio.get_running_loop().create_future()
            self._elsewhere(batch, batch.entries)
            if entry.queued:
                return None
            raise
        finally:
            self._over(batch)
        return Reply(answer, (_hop(entry, batch, reply, entry.rows, service),))

    async def _answer(self, batch: Batch, entries: list[Entry]) -> None:
        """Answers `entries`, a part of `batch`, in one upstream call, or by halves where that failed."""
        entries = [entry for entry in entries if _wanted(entry) and (len(entries) == 1 or _decodes(entry))]
        if not entries:
            return
        began = self._now()
        try:
            reply = await self._endpoints[batch.endpoint](_merged(entries))
            service = self._now() - began
            answers = _shares(reply, entries)
        except (BackendFailed, BadReply, BadRequest) as failure:
            if len(entries) == 1 or not _blames_content(failure):
                _fail(entries, failure)
                return
            half = len(entries) // 2
            await self._answer(batch, entries[:half])
            await self._answer(batch, entries[half:])
            return
        except NEVER_EXECUTED as failure:
            self._elsewhere(batch, entries)
            _fail([entry for entry in entries if not entry.queued], failure)
            return
        except Failure as failure:
            _fail(entries, failure)
            return
        rows_sent = sum(entry.rows for entry in entries)
        for entry, answer in zip(entries, answers, strict=True):
            if not entry.caller.reply.done():
                entry.caller.reply.set_result(Reply(answer, (_hop(entry, batch, reply, rows_sent, service),)))

    def _elsewhere(self, batch: Batch, entries: list[Entry]) -> None:
        """Puts back what another endpoint may get of `entries`, never executed; nothing for callers that left."""
        if self._budget is None:
            return
        now, unready = self._now(), self._unready()
        for entry in entries:
            # The time at an endpoint that could not be reached was no time in the queue.
            entry.limit = min(entry.caller.request.deadline, entry.limit + now - batch.started)
        again = [
            entry
            for entry in entries
            if _wanted(entry) and entry.limit > now and self.dispatcher.another(entry, batch, unready)
        ]
        if again and self._budget.take():
            self.dispatcher.requeue(batch, again)
            for entry in again:
                # It has no part in the batch any more: neither the slot nor the task is its own to end.
                entry.caller.batch = None
            # At once: the rest of the batch may take long yet, while another endpoint is free.
            self._schedule()


def _of_lane(avoided: Callable[[str], Collection[int]], lane: Any) -> Collection[int]:
    model, _, _ = lane
    return avoided(model)


# Statuses that a single bad row may cause; any other (busy, down, forbidden) would be the same for every half.
_HTTP_BLAMES = frozenset({400, 413, 422, 500})
_GRPC_BLAMES = frozenset({2, 3, 11, 13})  # UNKNOWN, INVALID_ARGUMENT, OUT_OF_RANGE, INTERNAL


def _blames_content(failure: BackendFailed | BadReply | BadRequest) -> bool:
    if not isinstance(failure, BackendFailed):
        return True
    return failure.status in (_GRPC_BLAMES if failure.grpc else _HTTP_BLAMES)


def _hop(entry: Entry, batch: Batch, reply: Reply, rows_sent: int, service: float) -> Hop:
    return Hop(
        tier="",
        rows=tuple(range(entry.rows)),
        endpoint=reply.trail[-1].endpoint if reply.trail else "",
        batch_rows=rows_sent,
        queued=batch.started - entry.arrived,
        service=service,
        reason=batch.reason,
        retries=len(entry.tried),
    )


def _wanted(entry: Entry) -> bool:
    return not entry.caller.reply.done()


def _decodes(entry: Entry) -> bool:
    """Whether the tensors of a call can be read, which only merging asks for; a call whose cannot fails here, alone."""
    try:
        entry.caller.request.infer.inputs.decoded  # noqa: B018 - decoded for the memo
    except Failure as failure:
        _fail([entry], failure)
        return False
    return True


def _merged(entries: list[Entry]) -> Request:
    """One request for all entries: the latest of their deadlines, an origin for each."""
    requests: list[Request] = [entry.caller.request for entry in entries]
    first = requests[0]
    origins = tuple(Origin(request.span, entry.rows) for request, entry in zip(requests, entries, strict=True))
    if len(requests) == 1:
        return replace(first, origins=origins)
    merged: Infer = rows.merge([request.infer for request in requests])
    return replace(
        content(first, merged),
        deadline=max(request.deadline for request in requests),
        headers={},
        span=None,
        origins=origins,
    )


def _shares(reply: Reply, entries: list[Entry]) -> list[Answer]:
    """Each entry's own rows of the reply. Raises BadReply where the rows do not add up."""
    if len(entries) == 1:
        entry = entries[0]
        return [rows.verify(reply.answer, entry.rows) if entry.caller.divisible else reply.answer]
    return rows.split(reply.answer, [entry.rows for entry in entries])


def _fail(entries: list[Entry], error: BaseException) -> None:
    if len(entries) > 1 and isinstance(error, BackendFailed):
        error.headers = ()  # they came for none of them
    for entry in entries:
        if not entry.caller.reply.done():
            entry.caller.reply.set_exception(error)

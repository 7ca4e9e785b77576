"""ModelStreamInfer: one caller's stream, whose messages may be for any models, versions and sequences.

Theory of operation. Each message's head is read, and the message goes as it is into the flow of its model, version and
sequence: one streamed call through the gateway, which is opened by its first message and closed by the caller's
half-close or the end of its sequence. What the flows answer is written by whoever has it, one at a time. Back-pressure
goes both ways: a caller is read no further while too much waits for the backends or too much is owed by them, and a
backend is read no further while its last answer waits to be written.

Order is Triton's. Models answer each request once, and all those answers come in the order of the requests, errors
included, whatever flow they belong to. Decoupled models answer any number of times, and whenever they like; a model of
which nobody knows what it is like (`backends.traits`) is waited for no more than those.

Errors are Triton's, too. A request that fails is answered with an `error_message`, and the stream goes on. Where a
caller asked for real statuses (`triton_grpc_error: true` in the metadata) the first failure ends the stream, except
that a request which is wrong in itself is told by a message even then. That wish is met here and kept from the backend:
Triton 2.51 dies of it (a segmentation fault within some dozens of failing decoupled requests), so that the status of a
model's error is always INTERNAL, which is what models give unless they choose another. What a flow owes when it breaks
is told for each request that is known to be owed an answer. Of a decoupled model that has begun to answer nobody knows
what it owes: its last request is told, and the stream ends with the failure's status, as it would at the backend
itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from backends.errors import (
    BackendFailed,
    BadReply,
    BadRequest,
    Failure,
    NotFound,
    Rejected,
    SlowCaller,
    TooSlow,
    Unsupported,
)
from backends.kserve_grpc import read_request
from backends.kserve_grpc_relayed import model_error, request_id, stream_error
from backends.parameters import Sequence, SequenceId, sequence
from backends.request import Relay, Reply, Request, RpcCall, Service, Trait
from gateway.turns import Turn, Turns

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"

STRICT = ("triton_grpc_error", "true")

_INTERNAL = 13  # gRPC's status
# One backend stream each. Beyond, callers are told to open another stream.
_MAX_FLOWS = 256
# What may wait for backends in one stream; a larger message passes alone. Each costs something beside its bytes.
_QUEUED_BYTES = 1 << 20
_MESSAGE_BYTES = 512
# Requests of one stream without an answer, until no more are read.
_MAX_OWED = 1 << 14
# Requests of a flow that may never be answered at all, of which the last ones are told where it breaks.
_MAX_UNANSWERED = 1 << 10
# Ids are kept for errors as long as their requests are owed an answer.
_MAX_ID_BYTES = 256
# An open stream that says nothing belongs to nobody, and is held for nothing.
_FIRST_MESSAGE_S = 30.0
# How long the last words of a stream that is cut may take a slow caller.
_LAST_WORDS_S = 1.0
# Faults of the request itself, which Triton finds before it runs anything, and tells in a message whatever was asked.
_REFUSALS = (BadRequest, NotFound, Unsupported)

_Key = tuple[str, str, SequenceId]


class _Flow:
    """The messages of one model, version and sequence, as the iterator that a call reads."""

    def __init__(self, stream: InferStream, key: _Key, of: Sequence | None, after: _Flow | None) -> None:
        self.key = key
        self.sequence = of
        self.after = after  # its predecessor of the same key, which has to end first
        self.told = False
        self.ordered = True  # until something else is known
        self.finished = False  # no more messages will come
        self.over = asyncio.Event()
        self.turns: deque[Turn] = deque()  # owed; of a flow that is not ordered: until its first answer
        self.newest = b""
        self.answered = 0
        self.patience = 0.0
        self.since = 0.0  # when the first of `turns` came to be owed
        self.reading = False  # it waits for the backend
        self.failure: Failure | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._stream = stream
        self.last: tuple[Turn | None, bytes] = None, b""  # of the message that was taken last: its turn and its id
        self._messages: deque[tuple[bytes, Turn | None, bytes]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: bytes, turn: Turn | None) -> None:
        self._messages.append((message, turn, self.newest))
        self._wake()

    def finish(self) -> None:
        self.finished = True
        self._wake()

    def drop(self) -> None:
        """Forgets what was never sent."""
        while self._messages:
            self._stream.taken(self._messages.popleft()[0])

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> _Flow:
        return self

    async def __anext__(self) -> bytes:
        while not self._messages:
            if self.finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message, turn, id = self._messages.popleft()
        self.last = turn, id
        self._stream.taken(message)
        return message


class InferStream:
    """One caller's stream before `service`.

    `check` raises TooLarge for a message; `request` makes a flow's request of model, version and call; `write` gives
    the caller a message. `began` is told of each flow's reply before its first message, `ended` after a good end.
    `metadata` goes with each flow. `refused` is told of failures that `service` never saw.
    """

    def __init__(
        self,
        service: Service,
        *,
        check: Callable[[bytes], None],
        request: Callable[[str, str, RpcCall], Request],
        metadata: tuple[tuple[str, str | bytes], ...],
        write: Callable[[bytes], Awaitable[None]],
        began: Callable[[Reply, Relay], Awaitable[None]],
        ended: Callable[[Reply, Relay], None],
        refused: Callable[[Failure], None],
        now: Callable[[], float],
    ) -> None:
        self._service = service
        self._check = check
        self._request = request
        self._metadata = tuple(pair for pair in metadata if pair != STRICT)
        self._strict = STRICT in metadata
        self._write_out = write
        self._began = began
        self._ended = ended
        self._refused = refused
        self._now = now
        self._flows: dict[_Key, _Flow] = {}
        self._turns = Turns(self._make_room)
        self._writing = asyncio.Lock()
        self._queued = 0
        self._room: asyncio.Future[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cut: Failure | None = None
        self._unanswered: list[bytes] = []  # when it was cut
        self._group = asyncio.TaskGroup()

    async def run(self, messages: AsyncIterator[bytes]) -> None:
        """Serves the stream to its end. Raises Failure where that is to be its status."""
        self._task = asyncio.current_task()
        try:
            async with self._group:
                first = await _first(messages)
                if first is None:
                    return
                await self._take(first)
                async for message in messages:
                    await self._take(message)
                    while self._queued > _QUEUED_BYTES or self._turns.owed > _MAX_OWED:
                        self._room = asyncio.get_running_loop().create_future()
                        await self._room
                for flow in self._flows.values():
                    flow.finish()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        except asyncio.CancelledError:
            if self._cut is None or self._task is None:
                raise
            self._task.uncancel()
            await self._last_words(self._cut)
            raise self._cut from None

    def cut(self, failure: Failure) -> None:
        """Ends the stream with `failure`, which each request that is owed an answer is told first."""
        if self._cut is None and self._task is not None:
            self._cut = failure
            self._unanswered = self._turns.unanswered()
            self._unanswered += [flow.newest for flow in self._flows.values() if not flow.ordered]
            self._task.cancel()

    def taken(self, message: bytes) -> None:
        """A flow's message has gone to its backend."""
        self._queued -= len(message) + _MESSAGE_BYTES
        self._make_room()

    # From the caller to the flows

    async def _take(self, message: bytes) -> None:
        try:
            self._check(message)
            model, version, infer = read_request(message)
            of = sequence(infer.parameters)
            key = model, version, of.id if of is not None else 0
            flow = self._flows.get(key)
            if flow is None or flow.finished:
                flow = self._open(key, of, flow)
        except Failure as failure:
            if self._strict and not isinstance(failure, _REFUSALS):
                raise
            self._refused(failure)
            turn = self._turns.take(_short(request_id(message)))
            error = stream_error(line(failure), turn.id)
            if self._turns.first() is turn:
                await self._answer(turn, error)
            else:
                self._group.create_task(self._answer(turn, error))
            return
        flow.newest = _short(infer.id.encode())
        place: Turn | None = None
        if flow.ordered or not flow.answered:
            if not flow.turns:
                flow.since = self._now()
            place = turn = self._turns.take(flow.newest)
            if not flow.ordered:
                self._turns.release(turn)
            flow.turns.append(turn)
            if not flow.ordered and len(flow.turns) > _MAX_UNANSWERED:
                flow.turns.popleft()
        self._queued += len(message) + _MESSAGE_BYTES
        flow.put(message, place)
        if of is not None and of.ends:
            assert flow.sequence is not None
            flow.sequence.ends = True
            flow.finish()

    def _open(self, key: _Key, of: Sequence | None, after: _Flow | None) -> _Flow:
        if len(self._flows) >= _MAX_FLOWS and after is None:
            raise Rejected(f"a stream may have {_MAX_FLOWS} models and sequences open at once: use another stream")
        flow = _Flow(self, key, Sequence(of.id, of.starts) if of is not None else None, after)
        self._flows[key] = flow
        flow.task = self._group.create_task(self._serve(flow))
        return flow

    def _make_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    # From the flows to the caller

    async def _serve(self, flow: _Flow) -> None:
        """One flow to its end."""
        failure: Failure | None = None
        try:
            if flow.after is not None:
                await flow.after.over.wait()
                flow.after = None
            await self._pump(flow)
            if not flow.finished or (flow.ordered and flow.turns):
                failure = BadReply("the backend ended the stream, and has not answered all requests")
        except Failure as raised:
            failure = raised
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if flow.failure is None or task is None or task.uncancel() > 0:
                raise
            failure = flow.failure
        finally:
            flow.finished = True
            flow.drop()
            flow.over.set()
            if flow.timer is not None:
                flow.timer.cancel()
            if self._flows.get(flow.key) is flow:
                del self._flows[flow.key]
        if failure is not None:
            await self._broken(flow, failure)

    async def _pump(self, flow: _Flow) -> None:
        told, refused = partial(self._told, flow), partial(self._refuse, flow)
        call = RpcCall(METHOD, flow, self._metadata, flow.sequence, told, refused)
        flow.reading = True
        reply = await self._service(self._request(*flow.key[:2], call))
        relay = reply.body
        assert isinstance(relay, Relay)
        assert not isinstance(relay.body, bytes)
        if not flow.told:
            self._told(flow, None, 0.0)
        try:
            async with self._writing:
                await self._began(reply, relay)
            async for chunk in relay.body:
                flow.reading = False
                flow.answered += 1
                if self._strict and (error := model_error(chunk)):
                    if flow.ordered and flow.turns:
                        await self._turns.wait(flow.turns[0])
                    raise BackendFailed(error, _INTERNAL, grpc=True)
                if flow.ordered and flow.turns:
                    turn = flow.turns.popleft()
                    flow.since = self._now()
                    await self._answer(turn, chunk)
                else:
                    flow.turns.clear()
                    async with self._writing:
                        await self._write_out(chunk)
                flow.reading = True
            self._ended(reply, relay)
        finally:
            if close := getattr(relay.body, "aclose", None):
                await close()

    def _told(self, flow: _Flow, trait: Trait | None, patience: float) -> None:
        flow.told = True
        if trait is None or trait.decoupled or not trait.told:
            flow.ordered = False
            for turn in flow.turns:
                self._turns.release(turn)
            return
        flow.patience = patience
        self._watch(flow, patience)

    def _watch(self, flow: _Flow, seconds: float) -> None:
        flow.timer = asyncio.get_running_loop().call_later(seconds, self._looked_after, flow)

    def _looked_after(self, flow: _Flow) -> None:
        """Ends a flow whose backend takes too long to answer; one that owes nothing may be silent."""
        left = flow.since + flow.patience - self._now() if flow.turns and flow.reading else flow.patience
        if left > 0:
            self._watch(flow, left)
        elif flow.task is not None:
            flow.failure = TooSlow(f"the backend did not answer within {flow.patience:g} s")
            flow.task.cancel()

    def _refuse(self, flow: _Flow, failure: Failure) -> None:
        """The message that `flow` has given last does not go to the backend."""
        turn, id = flow.last
        if turn is not None and turn in flow.turns:
            flow.turns.remove(turn)
        self._group.create_task(self._answer(turn or self._turns.take(id), stream_error(line(failure), id)))

    async def _broken(self, flow: _Flow, failure: Failure) -> None:
        """Tells what the flow still owed; raises what is to end the stream."""
        if flow.ordered and not flow.turns:
            return
        if self._strict and not isinstance(failure, _REFUSALS):
            raise failure
        if flow.answered and not flow.ordered:
            async with self._writing:
                await self._write_out(stream_error(line(failure), flow.newest))
            raise failure
        while flow.turns:
            turn = flow.turns.popleft()
            await self._answer(turn, stream_error(line(failure), turn.id))

    async def _last_words(self, failure: Failure) -> None:
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                for id in self._unanswered:
                    await self._write_out(stream_error(line(failure), id))
        except TimeoutError:
            return

    async def _answer(self, turn: Turn, message: bytes) -> None:
        """Writes the answer to a request when it is its turn."""
        await self._turns.wait(turn)
        async with self._writing:
            await self._write_out(message)
        self._turns.release(turn)


async def _first(messages: AsyncIterator[bytes]) -> bytes | None:
    try:
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            return await anext(messages, None)
    except TimeoutError:
        raise SlowCaller(f"{METHOD}: no message came within {_FIRST_MESSAGE_S:g} s") from None


def _short(id: bytes) -> bytes:
    return id if len(id) <= _MAX_ID_BYTES else b""


def line(failure: Failure) -> str:
    """A failure's message as one line of text that can be written, of at most a kilobyte."""
    return " ".join(failure.message.split())[:1024].encode(errors="replace").decode()

"""A backend's path for calls that are relayed: work goes to one replica, questions about the backend to all.

What the replicas say is put together so that it is true of the backend (`backends.combined`): a model is ready where
as many replicas as the policy wants have it ready, statistics are summed, the repository index is a union. Metadata,
configuration and settings are those of the first replica that tells them, and that others say something else is told
in the log. For these, replicas that are known to be down are not asked while others are up.

What would change the servers needs the policy's `control`; it goes to every replica, and has succeeded where all of
them say so. Shared memory needs the policy's `shared_memory`, which there is for one replica only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from backends import combined
from backends.calls import Ask, asks, changes
from backends.endpoint import Endpoint
from backends.errors import (
    BackendFailed,
    BadReply,
    BadRequest,
    Failure,
    Forbidden,
    SlowCaller,
    Unreachable,
    Unsupported,
)
from backends.kserve_grpc import read_request
from backends.kserve_json import error_text
from backends.request import HttpCall, Infer, Relay, Reply, Request, RpcCall, Service, replace
from backends.stream import once, whole
from gateway import respond
from gateway.fleet import Fleet
from policies.spec import Backend

# How long the answers that have come wait for those of other replicas.
_PATIENCE_SECONDS = 1.0
# A call is a header and a message, which its caller sends together.
_MESSAGE_SECONDS = 30.0
_REGION = b"shared_memory_region"
_MAX_SAID = 300  # characters of what one replica says of a change that failed


@dataclass(frozen=True, slots=True)
class _Told:
    """What one replica, by number, answered. A failing HTTP answer is both, a reply and a failure."""

    index: int
    reply: Reply | None = None
    failure: Failure | None = None

    @property
    def relay(self) -> Relay:
        assert self.reply is not None
        assert isinstance(self.reply.body, Relay)
        return self.reply.body

    @property
    def body(self) -> bytes:
        body = self.relay.body
        assert isinstance(body, bytes)
        return body


class Replicas:
    """Answers for `backend` through `services[i]`, the calls of `endpoints[i]`, or through `chosen`, which takes one.

    With `headers` a caller is told which replicas a sum is without.
    """

    def __init__(
        self,
        backend: Backend,
        endpoints: Sequence[Endpoint],
        services: Sequence[Service],
        chosen: Service,
        fleet: Fleet,
        *,
        headers: bool = True,
    ) -> None:
        self._backend = backend
        self._endpoints = tuple(endpoints)
        self._services = tuple(services)
        self._chosen = chosen
        self._fleet = fleet
        self._headers = headers
        self._extensions = combined.extensions(control=backend.control, memory=backend.shared_memory)

    async def __call__(self, request: Request, /) -> Reply:
        call = request.content
        assert not isinstance(call, Infer)
        ask = asks(call)
        if ask in (Ask.OTHER, Ask.MEMORY):
            return await self._chosen(request if self._backend.shared_memory else _apart(request, ask))
        message = b""
        if isinstance(call, RpcCall):
            message = await _only(call)
            request = _with(request, message)
        if changes(call, ask, message):
            if not self._backend.control:
                raise Forbidden(f"{ask.value}: the policy does not let callers change the servers of this backend")
            everywhere = partial(self._everywhere, request, ask, message)
            return await self._fleet.alone(request.model, everywhere, request.deadline)
        if ask is Ask.READY:
            return await self._ready(request, message)
        if len(self._services) == 1 and ask is not Ask.SERVER:
            return await self._chosen(request)
        # What is summed or united needs all of them; what one tells needs one that is up.
        every = range(len(self._endpoints))
        asked = every if ask in (Ask.STATISTICS, Ask.INDEX) else self._up() or every
        told = await self._ask(asked, _uncompressed(request), message)
        good = [each for each in told if each.failure is None]
        if not good:
            return _failing(told)
        if ask in (Ask.SERVER, Ask.STATISTICS, Ask.INDEX):
            return self._combined(request, ask, told, good)
        self._compare(request, ask, good)
        return _reply(good[0])

    async def _everywhere(self, request: Request, ask: Ask, message: bytes) -> Reply:
        """A change, on every replica."""
        every = range(len(self._services))
        told = await self._ask(every, request, message, patient=True)
        if ask is Ask.LOAD:
            for each in told:
                if each.failure is None:
                    self._endpoints[each.index].retry(request.model)
        failed = [each for each in told if each.failure is not None]
        if not failed:
            return _reply(told[0])
        if len(told) == 1:
            return _failing(told)
        of = f" of '{request.model[:128]}'" if request.model else ""
        said = "; ".join(f"{self._endpoints[each.index].name}: {_said(each)}" for each in told)
        raise BackendFailed(
            f"{ask.value}{of} failed on {len(failed)} of {len(told)} replicas: {said}", _gravest(failed)
        )

    async def _ready(self, request: Request, message: bytes) -> Reply:
        """Ready where enough replicas say so and do not fail the model all the time; else no, in a server's words."""
        up = self._up()
        told = await self._ask(up, request, message)
        good, ready = self._good(request, told)
        if len(ready) < self._backend.ready_replicas:
            # What is known of the others may be a second old.
            down = [i for i in range(len(self._endpoints)) if i not in up]
            told += await self._ask(down, request, message)
            good, ready = self._good(request, told)
        if len(ready) >= self._backend.ready_replicas:
            return _reply(ready[0])
        if isinstance(request.content, RpcCall):
            answered = [each for each in told if each.failure is None]
            if not answered:
                return _failing(told)
            no = combined.write(request.content, Ask.READY, {"ready": False})
            return _reply(answered[0], no)
        if not good:
            return _failing(told)
        wanted, count = self._backend.ready_replicas, len(self._endpoints)
        why = "; ".join(
            f"{endpoint.name}: {endpoint.avoided().get(request.model, '')}"
            for endpoint in self._endpoints
            if endpoint.avoids(request.model)
        )
        raise Unreachable(
            f"model '{request.model[:128]}' is ready on {len(ready)} of {count} replicas, expected {wanted}"
            + (f" ({why})" if why else "")
        )

    def _up(self) -> list[int]:
        return [i for i, endpoint in enumerate(self._endpoints) if endpoint.ready is not False]

    def _good(self, request: Request, told: Sequence[_Told]) -> tuple[list[_Told], list[_Told]]:
        """Those that say that they are ready, and those of them that may be believed."""
        good = [each for each in told if each.failure is None and self._says_ready(request, each)]
        return good, [each for each in good if not self._endpoints[each.index].avoids(request.model)]

    def _says_ready(self, request: Request, told: _Told) -> bool:
        call = request.content
        try:
            return not isinstance(call, RpcCall) or combined.read(call, Ask.READY, told.body).get("ready") is True
        except BadReply:
            return False

    def _combined(self, request: Request, ask: Ask, told: Sequence[_Told], good: Sequence[_Told]) -> Reply:
        call = request.content
        documents, unread = [], dict[int, BadReply]()
        for each in good:
            try:
                documents.append(combined.read(call, ask, each.body))
            except BadReply as failure:
                unread[each.index] = failure
        good = [each for each in good if each.index not in unread]
        if not good:
            raise next(iter(unread.values()))
        if ask is Ask.SERVER:
            self._compare(request, ask, good)
            document = combined.server(documents, self._extensions)
            if document == documents[0]:
                return _reply(good[0])
        elif ask is Ask.INDEX:
            document = combined.index(documents, self._backend.ready_replicas)
        else:
            document = combined.statistics(documents)
        reply = _reply(good[0], combined.write(call, ask, document))
        # A replica that says that it has no such model is missing in nothing.
        heard = {each.index for each in told if each.failure is None or isinstance(each.failure, BackendFailed)}
        heard -= unread.keys()
        missing = [endpoint.name for i, endpoint in enumerate(self._endpoints) if i not in heard]
        if not missing or not self._headers or ask is Ask.SERVER:
            return reply
        relay = reply.body
        assert isinstance(relay, Relay)
        headers = (*relay.headers, (b"headrace-incomplete", "; ".join(missing).encode()))
        return replace(reply, body=replace(relay, headers=headers))

    def _compare(self, request: Request, ask: Ask, good: Sequence[_Told]) -> None:
        call = request.content
        which = call.target if isinstance(call, HttpCall) else f"'{request.model}' {request.version}".strip()
        said = {self._endpoints[each.index].name: combined.canonical(call, ask, each.body) for each in good}
        self._fleet.compare(f"{ask.value}: {which}", said)

    async def _ask(
        self, replicas: Collection[int], request: Request, message: bytes, *, patient: bool = False
    ) -> list[_Told]:
        """What these replicas answer, in their order.

        Unless `patient`, those that take a second longer than one that has answered are not waited for.
        """
        asking = [asyncio.ensure_future(self._told(i, request, message)) for i in replicas]
        pending = set(asking)
        try:
            answered = False
            while pending:
                patience = _PATIENCE_SECONDS if answered and not patient else None
                done, pending = await asyncio.wait(pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                answered = answered or any(each.result().failure is None for each in done)
                if not done:
                    break
        finally:
            for each in pending:
                each.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return [_silent(i) if each in pending else each.result() for i, each in zip(replicas, asking, strict=True)]

    async def _told(self, index: int, request: Request, message: bytes) -> _Told:
        if isinstance(request.content, RpcCall):
            request = _with(request, message)
        try:
            reply = await self._services[index](request)
            relay = reply.body
            assert isinstance(relay, Relay)
            body = await whole(relay, self._backend.reply_bytes)
        except Failure as failure:
            return _Told(index, failure=failure)
        reply, status = replace(reply, body=replace(relay, body=body)), relay.status
        if status < 400:
            return _Told(index, reply)
        return _Told(index, reply, BackendFailed(error_text(body) or f"answered {status}", status, body=body))


def _silent(index: int) -> _Told:
    return _Told(index, failure=Unreachable("did not answer in time"))


def _apart(request: Request, ask: Ask) -> Request:
    """`request` as a backend gets it that shares no memory with its callers. Raises Unsupported where it needs that."""
    if ask is Ask.MEMORY or request.regions:
        raise _no_memory()
    call = request.content
    if isinstance(call, RpcCall) and request.stream:
        return replace(request, content=replace(call, messages=_without_regions(call)))
    return request


async def _without_regions(call: RpcCall) -> AsyncIterator[bytes]:
    async for message in call.messages:
        if _REGION in message and read_request(message)[2].regions:
            if call.refused is None:
                raise _no_memory()
            call.refused(_no_memory())
            continue
        yield message


def _no_memory() -> Unsupported:
    return Unsupported(
        "shared memory does not reach through the gateway: the policy does not say that this backend shares its "
        "callers' machine; send the data"
    )


async def _only(call: RpcCall) -> bytes:
    """The message of a unary call. Raises BadRequest where there is none, SlowCaller where it does not come."""
    try:
        async with asyncio.timeout(_MESSAGE_SECONDS):
            message = await anext(call.messages, None)
    except TimeoutError:
        raise SlowCaller(f"{call.method}: no message came within {_MESSAGE_SECONDS:g} s") from None
    if message is None:
        raise BadRequest(f"{call.method}: expected a message, got none")
    return message


def _with(request: Request, message: bytes) -> Request:
    assert isinstance(request.content, RpcCall)
    return replace(request, content=replace(request.content, messages=once(message)))


def _uncompressed(request: Request) -> Request:
    """`request`, for a reply that is read here."""
    call = request.content
    if isinstance(call, RpcCall | Infer):
        return request
    return replace(request, content=replace(call, headers=tuple(h for h in call.headers if h[0] != b"accept-encoding")))


def _reply(told: _Told, body: bytes | None = None) -> Reply:
    assert told.reply is not None
    return told.reply if body is None else replace(told.reply, body=replace(told.relay, body=body))


def _failing(told: Sequence[_Told]) -> Reply:
    """What the first that answered said, or else why the first did not."""
    for each in told:
        if each.reply is not None:
            return each.reply
    failure = next((each.failure for each in told if isinstance(each.failure, BackendFailed)), told[0].failure)
    assert failure is not None
    raise failure


def _said(told: _Told) -> str:
    return "done" if told.failure is None else told.failure.message[:_MAX_SAID]


def _gravest(failed: Sequence[_Told]) -> int:
    """One HTTP status for several failures: what may be repeated (429, 503) only where all of them may."""
    statuses = {respond.HEADRACE.http(each.failure)[0] for each in failed if each.failure is not None}
    if len(statuses) == 1:
        return statuses.pop()
    return 502 if any(status >= 500 for status in statuses) else max(statuses)

"""One replica: its clients for either protocol, how many calls are in the air, and whether it says that it is ready.

Tensors travel by the protocol of the policy; a call that is relayed goes by its own protocol, if the replica has an
address for it, else as what it is in the other (`backends.bridge`). A replica in this process has one client, `local`,
for everything. `tentative` is a gRPC address that was guessed, not given: it is used once it has answered.

An endpoint is down from the first call that cannot reach it (Unreachable), so that the very next decision looks
elsewhere; only `probe` says that it is ready (again). A relayed call over the other protocol than that of the tensors
tells nothing: its port may be closed for good. A model that it fails again and again, ready or not, is avoided here for
a while (`backends.outlier`); the outcome of a stream is that of its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any, Protocol

from backends import rows
from backends.bridge import GrpcOverHttp, HttpOverGrpc
from backends.calls import Ask, asks
from backends.deadlines import Deadlines
from backends.errors import FIRST_BYTE, BackendFailed, BadRequest, Expired, Failure, TooSlow, Unreachable
from backends.events import listened
from backends.interface import Classified, asks_classes
from backends.outlier import Outliers, blames
from backends.request import Hop, HttpCall, Infer, Relay, Reply, Request, RpcCall, Service, Trait, computes, replace
from backends.stream import Bound, watched
from backends.traits import ASK_SECONDS, Traits
from policies.spec import Secret

# Triton drops a request whose head is above 8 KiB without a word; the request line and our own headers come on top.
MAX_HEADER_BYTES = 7000


class Client(Protocol):
    """A client of one server, as a service that can be asked for readiness and closed."""

    async def __call__(self, request: Request, /) -> Reply: ...
    async def unready(self, model: str, deadline: float, headers: Mapping[str, str]) -> str:
        """Why the server, or `model` on it, is not ready; empty where it is. No `model` asks for the server alone."""
        ...

    async def trait(self, model: str, version: str, deadline: float, headers: Mapping[str, Any]) -> Trait:
        """What `model` is like, by its server's configuration; no `version` leaves the choice to the server.

        Raises Failure where it cannot be told.
        """
        ...

    def refresh(self) -> None:
        """Follows the server's name to other addresses, in the background, where it was not asked for lately."""

    async def close(self) -> None: ...


class Endpoint:
    """A replica named `name` as a service.

    `model` is the one that it must have ready; empty: the server's own word is enough. `headers` go with every call
    (credentials). Limits are in seconds: `timeout` bounds each call that is no stream, and how long a stream may take
    to begin; `idle_timeout` the wait for each of its further chunks, `stream_timeout` the whole of it. The clients keep
    `first_byte_timeout`, which is here for its words. `observe` is told of a model that begins to be avoided, with the
    reason, and without one when it no longer is.
    """

    def __init__(
        self,
        name: str,
        *,
        http: Client | None = None,
        grpc: Client | None = None,
        local: Client | None = None,
        contents: Callable[[], str | None] = lambda: "",
        prefer_grpc: bool = False,
        tentative: bool = False,
        timeout: float,
        first_byte_timeout: float = inf,
        idle_timeout: float = inf,
        stream_timeout: float = inf,
        headers: Mapping[str, Secret],
        model: str = "",
        now: Callable[[], float],
        observe: Callable[[str, str], None] = lambda model, reason: None,
    ) -> None:
        self.name = name
        self.in_flight = 0
        # Unknown is not zero: None until it has been asked.
        self.ready: bool | None = None
        self.reason = ""
        self.traits = Traits(self._trait, now)
        self._model = model
        self._http = http
        self._grpc = grpc
        self._local = local
        self._over_http = GrpcOverHttp(http, name) if http is not None else None
        self._over_grpc = HttpOverGrpc(grpc, name, self._told) if grpc is not None else None
        self._contents = contents
        self._prefer_grpc = prefer_grpc
        self._tentative = tentative
        self._timeout = timeout
        self._first_byte_timeout = first_byte_timeout
        self._idle_timeout = idle_timeout
        self._stream_timeout = stream_timeout
        self._headers = {name: secret.value for name, secret in headers.items()}
        self._now = now
        self._deadlines = Deadlines(now)
        self._observe = observe
        self.outliers = Outliers()
        self._trail = (Hop("", (), endpoint=name),)

    @property
    def contents(self) -> str | None:
        """A digest of what a model in this process was loaded from: None until it is; empty for a server."""
        return self._contents()

    @property
    def protocol(self) -> str:
        """How tensors travel now: `http`, `grpc`, or `local` where they do not."""
        if self._local is not None:
            return "local"
        return "grpc" if self._prefer_grpc and self._grpc is not None and not self._tentative else "http"

    async def __call__(self, request: Request, /) -> Reply:
        now = self._now()
        if request.deadline <= now:
            raise Expired("backend", "deadline exceeded before the backend was called")
        service, client = self._client(request)
        if self._headers:
            request = replace(request, headers={**request.headers, **self._headers})
        _check_size(request)
        content = request.content
        # A caller's stream of inferences counts by itself how long each answer is owed.
        timed = True
        if isinstance(content, RpcCall) and content.told is not None:
            content.told(await self.traits.learn(request.model, request.version), self._timeout)
            timed = False
        own = now + (self._stream_timeout if request.stream else self._timeout)
        asked = replace(request, deadline=own) if own < request.deadline else request
        if self.outliers and computes(request):
            self.outliers.begin(request.model, now)
        self.in_flight += 1
        streams = False
        try:
            if request.stream:
                with self._deadlines.until(now + self._timeout if timed else inf):
                    reply = await service(asked)
            else:
                reply = await service(asked)
            stream = None
            if isinstance(reply.body, Relay):
                reply = listened(request, reply)
                idle = self._idle_timeout if request.stream and timed else inf
                stream = watched(reply, partial(self._left, request, reply), self._bound(request, own, idle))
                streams = stream is not None
            elif self.outliers:
                self._answered(request.model)
            # Whoever put a batch together knows its rows.
            trail = self._trail if request.origins else (Hop("", _rows(request), endpoint=self.name),)
            return replace(stream or reply, trail=trail)
        except Expired as late:
            raise self._failed(request, self._expired(late, request, own)) from None
        except Unreachable as failure:
            if client is self._main:
                self.ready, self.reason = False, failure.message
            raise
        except TimeoutError:
            raise self._failed(request, TooSlow(f"'{self.name}' sent nothing for {self._timeout:g} s")) from None
        except Failure as failure:
            self._failed(request, failure)
            raise
        finally:
            if not streams:
                self.in_flight -= 1
            if not isinstance(content, Infer) and asks(content) in (Ask.LOAD, Ask.UNLOAD):
                self.traits.forget()

    def _expired(self, late: Expired, request: Request, own: float) -> Failure:
        """What it means that a call ended at its deadline: of the policy's (`own` among them), or its caller's."""
        if late.where == FIRST_BYTE:
            return TooSlow(f"'{self.name}' began no answer within {self._first_byte_timeout:g} s")
        if own >= request.deadline:
            return Expired("backend", f"deadline exceeded in backend '{self.name}'")
        if request.stream:
            return TooSlow(f"'{self.name}' did not end its stream within {self._stream_timeout:g} s")
        return TooSlow(f"'{self.name}' did not answer within {self._timeout:g} s")

    def _bound(self, request: Request, own: float, idle: float) -> Bound:
        """How long the chunks of a relayed reply are waited for."""

        def failure(late: TimeoutError | Expired) -> Failure:
            if isinstance(late, Expired):
                return self._expired(late, request, own)
            return TooSlow(f"'{self.name}' sent nothing for {idle:g} s in the middle of its stream")

        return Bound(lambda: self._deadlines.until(self._now() + idle), failure)

    def avoids(self, model: str) -> bool:
        """Whether another replica should be asked for `model`, which this one has failed lately."""
        return bool(self.outliers) and self.outliers.avoided(model, self._now())

    def avoided(self) -> dict[str, str]:
        """The models that are avoided here, with why."""
        return self.outliers.reasons(self._now())

    def retry(self, model: str) -> None:
        """Lets the next call for `model` come here, avoided or not: it has been loaded, which may have been a cure."""
        self.outliers.retry(model, self._now())

    def _answered(self, model: str) -> None:
        if self.outliers.answered(model):
            self._observe(model, "")

    def _failed(self, request: Request, failure: Failure) -> Failure:
        # A batch that fails is run again by halves: one bad row would count several times.
        if len(request.origins) < 2 and blames(failure) and computes(request):
            now = self._now()
            if self.outliers.failed(request.model, now, failure.message):
                self._observe(request.model, self.outliers.reasons(now)[request.model])
        return failure

    def _left(self, request: Request, reply: Reply, error: BaseException | None) -> None:
        """A relayed call is over."""
        self.in_flight -= 1
        status = reply.body.status if isinstance(reply.body, Relay) else 200
        if error is None and status >= 400:
            error = BackendFailed(f"'{self.name}' answered {status}", status)
        if isinstance(error, Failure):
            # What a relayed 503 says was not read: it may be a full queue.
            if not (isinstance(error, BackendFailed) and not error.grpc and error.status == 503):
                self._failed(request, error)
        elif error is None and self.outliers and computes(request):
            self._answered(request.model)

    async def probe(self, seconds: float) -> bool:
        """Asks whether the replica, and its model, is ready, for at most `seconds`; remembers the answer and why."""
        if self._tentative and self._grpc is not None:
            self._tentative = await self._grpc.unready("", self._now() + seconds, self._headers) != ""
        self.reason = await self._main.unready(self._model, self._now() + seconds, self._headers)
        was, self.ready = self.ready, not self.reason
        if self.ready and was is False:
            self.traits.forget()  # it may have other models now
        return self.ready

    async def _trait(self, model: str, version: str) -> Trait:
        return await self._main.trait(model, version, self._now() + ASK_SECONDS, self._headers)

    async def _told(self, request: Request) -> Trait:
        """What the model of `request` is like, by its server's word of lately or of now. Raises Failure."""
        model, version = request.model, request.version
        until = min(request.deadline, self._now() + self._timeout)
        ask = partial(self._main.trait, model, version, until, request.headers)
        return await self.traits.told(model, version, ask)

    def refresh(self) -> None:
        """Has the clients follow the replica's name to other addresses."""
        for client in (self._http, self._grpc):
            if client is not None:
                client.refresh()

    async def close(self) -> None:
        self.traits.close()
        for client in (self._http, self._grpc, self._local):
            if client is not None:
                await client.close()

    @property
    def _main(self) -> Client:
        """The client whose word counts: the one that tensors travel by."""
        client = self._local or (self._grpc if self.protocol == "grpc" or self._http is None else self._http)
        assert client is not None
        return client

    def _client(self, request: Request) -> tuple[Service, Client]:
        """Who answers a call, and the client that it goes by."""
        main, call = self._main, request.content
        if self._local is not None:
            return main, main
        if isinstance(call, Infer):
            if call.outputs and asks_classes(call):
                return Classified(main, self._told), main
            return main, main
        if isinstance(call, HttpCall):
            if self._http is not None:
                return Classified(self._http, self._told) if request.regions else self._http, self._http
            assert self._over_grpc is not None
            return self._over_grpc, main
        if self._grpc is not None and not self._tentative:
            return Classified(self._grpc, self._told) if request.stream or request.regions else self._grpc, self._grpc
        assert self._over_http is not None
        return self._over_http, main


def _check_size(request: Request) -> None:
    """BadRequest for headers that the backend would drop the connection for."""
    size = 0
    for name, value in request.headers.items():
        size += len(name) + (len(value) if isinstance(value, str) else _size(value))
    if isinstance(request.content, HttpCall):
        size += sum(len(name) + len(value) for name, value in request.content.headers)
    elif isinstance(request.content, RpcCall):
        size += sum(len(name) + _size(value) for name, value in request.content.metadata)
    if size > MAX_HEADER_BYTES:
        raise BadRequest(f"request headers: expected at most {MAX_HEADER_BYTES} bytes for the backend, got {size}")


def _size(value: str | bytes | tuple[str | bytes, ...]) -> int:
    """Of a value of gRPC metadata, as it goes: bytes as base64."""
    if isinstance(value, tuple):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str) else (len(value) + 2) // 3 * 4


def _rows(request: Request) -> tuple[int, ...]:
    count = rows.count(request.content) if isinstance(request.content, Infer) else None
    return tuple(range(count)) if count else ()

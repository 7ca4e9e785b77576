"""One replica: its clients for either protocol, how many calls are in the air, and whether it says that it is ready.

Tensors travel by the protocol of the policy; a call that is relayed goes by its own protocol, if the replica has an
address for it. A replica in this process has one client, `local`, for everything. `tentative` is a gRPC address that
was guessed, not given: it is used once it has answered.

An endpoint is down from the first call that cannot reach it (Unreachable), so that the very next decision looks
elsewhere; only `probe` says that it is ready (again). A relayed call over the other protocol than that of the tensors
tells nothing: its port may be closed for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from backends import rows
from backends.classified import STREAM, check, checked, classifies
from backends.errors import BadRequest, Expired, TooSlow, Unreachable, Unsupported
from backends.request import Hop, HttpCall, Infer, Reply, Request, RpcCall, Service, replace
from backends.stream import watched
from policies.spec import Secret

# Triton drops a request whose head is above 8 KiB without a word; the request line and our own headers come on top.
MAX_HEADER_BYTES = 7000


class Client(Protocol):
    """A client of one server, as a service that can be asked for readiness and closed."""

    async def __call__(self, request: Request, /) -> Reply: ...
    async def unready(self, model: str, deadline: float, headers: Mapping[str, str]) -> str:
        """Why the server, or `model` on it, is not ready; empty where it is. No `model` asks for the server alone."""
        ...

    def refresh(self) -> None:
        """Follows the server's name to other addresses, in the background, where it was not asked for lately."""

    async def close(self) -> None: ...


class Endpoint:
    """A replica named `name` as a service.

    `model` is the one that it must have ready; empty: the server's own word is enough. `timeout` bounds each call, and
    the wait for each chunk of a stream, in seconds. `headers` go with every call (credentials).
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
        headers: Mapping[str, Secret],
        model: str = "",
        now: Callable[[], float],
    ) -> None:
        self.name = name
        self.in_flight = 0
        # Unknown is not zero: None until it has been asked.
        self.ready: bool | None = None
        self.reason = ""
        self._model = model
        self._http = http
        self._grpc = grpc
        self._local = local
        self._contents = contents
        self._prefer_grpc = prefer_grpc
        self._tentative = tentative
        self._timeout = timeout
        self._headers = {name: secret.value for name, secret in headers.items()}
        self._now = now
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
        client = self._client(request)
        if self._headers:
            request = replace(request, headers={**request.headers, **self._headers})
        _check_size(request)
        own = now + self._timeout
        self.in_flight += 1
        streams = False
        try:
            if request.stream:
                if isinstance(request.content, RpcCall) and request.content.method == STREAM:
                    messages = checked(client, request, request.content.messages)
                    request = replace(request, content=replace(request.content, messages=messages))
                async with asyncio.timeout(self._timeout):
                    reply = await client(request)
            else:
                call = replace(request, deadline=own) if own < request.deadline else request
                if isinstance(call.content, Infer) and call.content.outputs and classifies(call.content):
                    await check(client, call, call.content, grpc=client is self._grpc)
                reply = await client(call)
            stream = watched(reply, self._left, self._timeout if request.stream else None)
            streams = stream is not None
            # Whoever put a batch together knows its rows.
            trail = self._trail if request.origins else (Hop("", _rows(request), endpoint=self.name),)
            return replace(stream or reply, trail=trail)
        except Expired:
            if own < request.deadline:
                raise TooSlow(f"'{self.name}' did not answer within {self._timeout:g} s") from None
            raise
        except Unreachable as failure:
            if client is self._main:
                self.ready, self.reason = False, failure.message
            raise
        except TimeoutError:
            raise TooSlow(f"'{self.name}' sent nothing for {self._timeout:g} s") from None
        finally:
            if not streams:
                self.in_flight -= 1

    def _left(self, error: BaseException | None) -> None:
        self.in_flight -= 1

    async def probe(self, seconds: float) -> bool:
        """Asks whether the replica, and its model, is ready, for at most `seconds`; remembers the answer and why."""
        if self._tentative and self._grpc is not None:
            self._tentative = await self._grpc.unready("", self._now() + seconds, self._headers) != ""
        self.reason = await self._main.unready(self._model, self._now() + seconds, self._headers)
        self.ready = not self.reason
        return self.ready

    def refresh(self) -> None:
        """Has the clients follow the replica's name to other addresses."""
        for client in (self._http, self._grpc):
            if client is not None:
                client.refresh()

    async def close(self) -> None:
        for client in (self._http, self._grpc, self._local):
            if client is not None:
                await client.close()

    @property
    def _main(self) -> Client:
        """The client whose word counts: the one that tensors travel by."""
        client = self._local or (self._grpc if self.protocol == "grpc" or self._http is None else self._http)
        assert client is not None
        return client

    def _client(self, request: Request) -> Service:
        if self._local is not None:
            return self._local
        if isinstance(request.content, HttpCall):
            if self._http is None:
                raise Unsupported(f"this call needs HTTP, and the policy gives '{self.name}' no http address")
            return self._http
        if isinstance(request.content, RpcCall):
            if self._grpc is None or self._tentative:
                raise Unsupported(f"this call needs gRPC, and '{self.name}' has no known grpc address")
            return self._grpc
        return self._main


def _check_size(request: Request) -> None:
    """BadRequest for headers that the backend would drop the connection for."""
    size = 0
    for name, value in request.headers.items():
        size += len(name) + len(value)
    if isinstance(request.content, HttpCall):
        size += sum(len(name) + len(value) for name, value in request.content.headers)
    elif isinstance(request.content, RpcCall):
        size += sum(len(name) + len(value) for name, value in request.content.metadata)
    if size > MAX_HEADER_BYTES:
        raise BadRequest(f"request headers: expected at most {MAX_HEADER_BYTES} bytes for the backend, got {size}")


def _rows(request: Request) -> tuple[int, ...]:
    count = rows.count(request.content) if isinstance(request.content, Infer) else None
    return tuple(range(count)) if count else ()

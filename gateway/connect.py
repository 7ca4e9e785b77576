"""Endpoints for a backend: one a replica, each with a client for every protocol that it has an address for.

A model in this process is one replica.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from urllib.parse import urlsplit

from backends.addresses import Resolve
from backends.endpoint import Endpoint
from backends.http_client import HttpClient
from backends.local.client import LocalClient
from backends.tls import ClientTls
from backends.triton_grpc import TritonGrpc
from backends.triton_http import TritonHttp
from policies.spec import Backend, Local
from policies.spec import Endpoint as EndpointSpec


async def look_up(host: str) -> tuple[str, ...]:
    """The host's IP addresses as the system's resolver knows them, sorted. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(sorted({str(address[0]) for *_, address in found}))


@dataclass(frozen=True, slots=True)
class Connect:
    """Makes endpoints. `tentative_grpc` says that gRPC addresses were guessed, and are used once they answer.

    `avoided` is told of models that an endpoint is avoided for: backend, endpoint, model, and why (empty: no more).
    """

    now: Callable[[], float]
    tentative_grpc: bool = False
    resolve: Resolve = look_up
    avoided: Callable[[str, str, str, str], None] = lambda backend, endpoint, model, reason: None

    def __call__(self, backend: Backend) -> tuple[Endpoint, ...]:
        if backend.local is not None:
            return (self._local(backend, backend.local),)
        tls = ClientTls(backend.tls)
        return tuple(self._endpoint(backend, spec, tls) for spec in backend.endpoints)

    def _local(self, backend: Backend, local: Local) -> Endpoint:
        client = LocalClient(local, now=self.now)
        return Endpoint(
            client.name,
            local=client,
            contents=lambda: client.contents,
            timeout=backend.timeout,
            headers=backend.headers,
            now=self.now,
            observe=partial(self.avoided, backend.name, client.name),
        )

    def _endpoint(self, backend: Backend, spec: EndpointSpec, tls: ClientTls) -> Endpoint:
        http = grpc = None
        first_byte = inf if backend.first_byte_timeout is None else backend.first_byte_timeout
        if spec.http is not None:
            url = urlsplit(spec.http)
            client = HttpClient(
                url.hostname or "",
                url.port or 80,
                now=self.now,
                connect_timeout=backend.connect_timeout,
                first_byte_timeout=first_byte,
                max_response_bytes=backend.reply_bytes,
                resolve=self.resolve,
                tls=tls if url.scheme == "https" else None,
            )
            http = TritonHttp(client, self.now)
        if spec.grpc is not None:
            grpc = TritonGrpc(
                spec.grpc_target,
                now=self.now,
                connect_timeout=backend.connect_timeout,
                first_byte_timeout=first_byte,
                max_message_bytes=backend.reply_bytes,
                resolve=self.resolve,
                tls=tls if spec.grpc_tls else None,
            )
        return Endpoint(
            str(spec),
            http=http,
            grpc=grpc,
            prefer_grpc=backend.protocol == "grpc",
            tentative=self.tentative_grpc,
            timeout=backend.timeout,
            first_byte_timeout=first_byte,
            idle_timeout=backend.idle_timeout,
            stream_timeout=inf if backend.stream_timeout is None else backend.stream_timeout,
            headers=backend.headers,
            model=backend.model,
            now=self.now,
            observe=partial(self.avoided, backend.name, str(spec)),
        )

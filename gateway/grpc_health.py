"""What a gRPC client is told of our health: by gRPC's health service, and by KServe's ServerLive and ServerReady."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from google.protobuf.message import DecodeError

from backends.errors import BadRequest, NotFound
from backends.proto import kserve_pb2 as pb

# Watch has no event to wait for; a second is soon enough for whoever balances by health.
_WATCH_S = 1.0


class Health:
    """The answers, as messages. Serving is who is `ready`, `inference` the one service that is known by its name.

    `stopping` is set when the server stops: it serves no more then, and each watch ends.
    """

    def __init__(self, ready: Callable[[], bool], inference: str) -> None:
        self.stopping = asyncio.Event()
        self._ready = ready
        self._services = ("", inference)

    def server_live(self) -> bytes:
        return pb.ServerLiveResponse(live=True).SerializeToString()

    def server_ready(self) -> bytes:
        return pb.ServerReadyResponse(ready=self._ready()).SerializeToString()

    def check(self, data: bytes) -> bytes:
        """The status of the service that a HealthCheckRequest names. Raises NotFound, or BadRequest if it is none."""
        service = _asked(data)
        if service not in self._services:
            raise NotFound(f"health: unknown service '{service[:64]}'")
        return self._status(service)

    async def watch(self, data: bytes) -> AsyncGenerator[bytes, None]:
        """The status now, and whenever it is another. Raises BadRequest where `data` is no HealthCheckRequest."""
        service, last = _asked(data), b""
        while True:
            # Asked first: it may change while a status is written, which is then old.
            stopping = self.stopping.is_set()
            status = self._status(service)
            if status != last:
                yield status
                last = status
            if stopping:
                return
            try:
                await asyncio.wait_for(self.stopping.wait(), _WATCH_S)
            except TimeoutError:
                continue

    def _status(self, service: str) -> bytes:
        if service not in self._services:
            status = pb.HealthCheckResponse.SERVICE_UNKNOWN
        elif self._ready() and not self.stopping.is_set():
            status = pb.HealthCheckResponse.SERVING
        else:
            status = pb.HealthCheckResponse.NOT_SERVING
        return pb.HealthCheckResponse(status=status).SerializeToString()


def _asked(data: bytes) -> str:
    try:
        return pb.HealthCheckRequest.FromString(data).service
    except DecodeError:
        raise BadRequest("health: expected a HealthCheckRequest as protobuf") from None

"""The end of a gateway, in its order, so that a proxy or a balancer before it loses nothing.

It is not ready any more. First everything is served as before, for `delay`, but each HTTP answer is its connection's
last. Then nothing new is taken: a 503 over HTTP, whose port stays open so that whoever asks is told; over gRPC GOAWAY
and a closed port, which clients and proxies take for what it is, while a status would be an answer. What is in flight
goes on for `limits.drain`; what is not over then ends with an error. A gRPC call that is on its way in the moment of
the GOAWAY is answered by gRPC's server itself, with CANCELLED, and never executed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from backends.errors import ShutDown
from gateway.grpc import GrpcEdge
from gateway.http1 import Http1Server
from gateway.server import HttpServer
from gateway.stack import Things

_log = logging.getLogger("headrace")
# For what is still open after the time to drain: the last bytes of answers, idle streams.
CLOSE_SECONDS = 2


async def drain(
    things: Things,
    seconds: float,
    delay: float,
    servers: Sequence[HttpServer | Http1Server],
    grpc: GrpcEdge | None,
    now: Callable[[], float],
) -> None:
    """Returns when no request is left and no port is open: after `delay + seconds`, and a little more, at most."""
    for server in servers:
        if isinstance(server, Http1Server):
            server.drain()
    await asyncio.sleep(delay)
    in_flight = things.in_flight
    in_flight.draining = True
    stopping = asyncio.ensure_future(grpc.stop(seconds + 2 * CLOSE_SECONDS)) if grpc else None
    until = now() + seconds
    while in_flight.count + in_flight.reading and now() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.02)  # once in a process's life, so that no request has to signal its end
    if in_flight.count + in_flight.reading:
        fields = {"in_flight": in_flight.count, "bodies": in_flight.reading}
        _log.warning("cut what was not over in time", extra={"fields": fields})
    if grpc is not None:
        grpc.cut(ShutDown("the gateway is shutting down"))  # a stream has no other last word
    if things.deadlines is not None:
        things.deadlines.cut()
    closing = [server.close() for server in servers]
    await asyncio.gather(*closing, *([asyncio.wait({stopping}, timeout=CLOSE_SECONDS)] if stopping else []))
    if stopping is not None and grpc is not None:
        # Streams that were opened and never said for whom are no requests, and were not waited for.
        stopping.cancel()
        await grpc.stop(0)

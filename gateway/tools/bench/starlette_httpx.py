"""The reverse proxy that one writes first: `python -m gateway.tools.bench.starlette_httpx PORT BACKEND`; for scale."""

from __future__ import annotations

import sys

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Of the connection, or written anew for the body that is sent.
_OWN = frozenset({"host", "connection", "keep-alive", "transfer-encoding", "content-length"})


def application(backend: str) -> Starlette:
    client = httpx.AsyncClient(
        base_url=backend, timeout=30, limits=httpx.Limits(max_connections=None, max_keepalive_connections=64)
    )

    async def forward(request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in _OWN}
        reply = await client.request(
            request.method, request.url.path, headers=headers, content=await request.body(), params=request.query_params
        )
        given = {name: value for name, value in reply.headers.items() if name not in _OWN}
        return Response(reply.content, reply.status_code, given)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])


if __name__ == "__main__":
    uvicorn.run(
        application(sys.argv[2]),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        log_level="warning",
        access_log=False,
    )

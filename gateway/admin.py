"""The admin application (loopback by default) and the metrics page.

GET /                 what there is to ask
GET /backends         endpoints with readiness, protocol and calls in the air; queues
GET /cache            the Redis that caches share, where there is one: up, else why not; rows it did not take
GET /policy           effective values of the policy in force, why the last one was refused, versions before it
POST /policy          puts the policy of the body (YAML) in force, or says all that is wrong with it; ?force=true takes
                      it although new endpoints are not ready, ?file=NAME is its name in messages
POST /policy/rollback puts the policy in force that was before this one
GET /traces           ids of recent traces, the last one first; ?ended=true with the time of their end
GET /traces/{id}      one trace as a list of spans; `last` is the last one
GET /livez /readyz

Pages in browsers are kept out, and a posted policy names only files beside the one that is served (`gateway/guard.py`).
Of several workers the first answers for all (`gateway/joined.py`): sums, unions, metrics with a label `worker`; GET
/policy has also the versions that the `workers` have in force.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.guard import Below, refusal
from gateway.metrics import CONTENT_TYPE, Metrics
from policies import Policy, PolicyError, parse
from policies.files import MAX_BYTES
from policies.spec import Secret

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.joined import Joined, Said

_SHOWN = 200  # characters of a posted policy's name in messages


def admin(gateway: Gateway) -> Starlette:
    """The admin application of a running gateway."""

    async def index(_: Request) -> Response:
        return _json(_index(gateway, routes))

    async def backends(_: Request) -> Response:
        return _json(gateway.backends())

    async def cache(_: Request) -> Response:
        return _json(gateway.cache())

    async def policy(_: Request) -> Response:
        history = [before.version for before in gateway.reload.history]
        return _json({**plain(gateway.policy), "refused": gateway.reload.refused, "history": history})

    async def apply(request: Request) -> Response:
        try:
            text = (await _body(request)).decode()
            # A large policy takes seconds to read: requests go on meanwhile.
            candidate = await asyncio.to_thread(_posted, text, request.query_params.get("file", ""), gateway.folder)
            changed = await gateway.apply(
                gateway.overruled(candidate), force=request.query_params.get("force") == "true"
            )
        except UnicodeDecodeError:
            return _json({"error": "expected a policy in UTF-8"}, 400)
        except PolicyError as error:
            return _json({"error": "policy refused", "problems": [str(problem) for problem in error.problems]}, 400)
        # The text that is in force already is no news, and leaves nothing to roll back.
        return _json({"version": gateway.policy.version}, headers={"headrace-changed": str(changed).lower()})

    async def rollback(_: Request) -> Response:
        try:
            await gateway.rollback()
        except PolicyError as error:
            return _json({"error": str(error.problems[0])}, 409)
        return _json({"version": gateway.policy.version})

    async def traces(request: Request) -> Response:
        recent = gateway.tracing.recent
        if request.query_params.get("ended") == "true":
            return _json([{"trace_id": trace, "end_unix_ns": end} for trace, end in recent.ended()])
        return _json(recent.ids())

    async def trace(request: Request) -> Response:
        wanted = request.path_params["id"]
        if wanted == "last":
            ids = gateway.tracing.recent.ids()
            if not ids:
                return _json({"error": "no trace has been recorded yet"}, 404)
            wanted = ids[0]
        spans = gateway.tracing.recent.trace(wanted)
        if not spans:
            return _json({"error": f"no trace {wanted[:64]!r} among the recent ones"}, 404)
        return _json({"trace_id": wanted, "spans": spans})

    async def ready(_: Request) -> Response:
        return Response(status_code=200 if gateway.ready() else 503)

    routes = [
        Route("/", index),
        Route("/backends", backends),
        Route("/cache", cache),
        Route("/policy", policy, methods=["GET"]),
        Route("/policy", apply, methods=["POST"]),
        Route("/policy/rollback", rollback, methods=["POST"]),
        Route("/traces", traces),
        Route("/traces/{id}", trace),
        Route("/livez", _live),
        Route("/readyz", ready),
    ]
    return Starlette(routes=routes, middleware=[_guard(gateway)])


def joined_admin(gateway: Gateway, joined: Joined) -> Starlette:
    """The admin application of all workers."""

    def answered(ask: Callable[[Request], Awaitable[Said]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            said = await ask(request)
            incomplete = {"headrace-incomplete": "; ".join(said.missing)} if said.missing else None
            return _json(said.value, said.status, incomplete)

        return answer

    async def index(_: Request) -> Response:
        return _json(_index(gateway, routes))

    async def apply(request: Request) -> Said:
        return await joined.apply(await _body(request), request.query_params)

    async def ready(_: Request) -> Response:
        return Response(status_code=200 if await joined.ready() else 503)

    routes = [
        Route("/", index),
        Route("/backends", answered(lambda _: joined.backends())),
        Route("/cache", answered(lambda _: joined.cache())),
        Route("/policy", answered(lambda _: joined.policy()), methods=["GET"]),
        Route("/policy", answered(apply), methods=["POST"]),
        Route("/policy/rollback", answered(lambda _: joined.rollback()), methods=["POST"]),
        Route("/traces", answered(lambda _: joined.traces())),
        Route("/traces/{id}", answered(lambda request: joined.trace(request.path_params["id"]))),
        Route("/livez", _live),
        Route("/readyz", ready),
    ]
    return Starlette(routes=routes, middleware=[_guard(gateway)])


def own(gateway: Gateway) -> Starlette:
    """What one worker of several answers for itself, on its Unix socket: its admin application and its metrics."""
    return Starlette(routes=[*admin(gateway).routes, *metrics_page(gateway.metrics).routes])


def metrics_page(metrics: Metrics) -> Starlette:
    """The application of the metrics port: `/metrics` alone."""

    async def page(_: Request) -> Response:
        return Response(metrics.text(), media_type=None, headers={"content-type": CONTENT_TYPE})

    return Starlette(routes=[Route("/metrics", page)])


def joined_metrics(joined: Joined) -> Starlette:
    """The application of the metrics port of all workers."""

    async def page(_: Request) -> Response:
        return Response(await joined.metrics(), media_type=None, headers={"content-type": CONTENT_TYPE})

    return Starlette(routes=[Route("/metrics", page)])


def plain(value: Any) -> Any:
    """A policy as JSON can say it. Secrets stay secret."""
    if isinstance(value, Secret):
        return str(value)
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "items"):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


class _Guarded:
    """An application that answers only whom `gateway.guard` lets in."""

    def __init__(self, app: ASGIApp, own_name: str) -> None:
        self._app = app
        self._own_name = own_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (wrong := refusal(scope["method"], Headers(scope=scope), self._own_name)):
            await _json({"error": wrong}, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _guard(gateway: Gateway) -> Middleware:
    listener = gateway.policy.listen.admin
    return Middleware(_Guarded, own_name=listener.host if listener else "")


def _posted(text: str, file: str, folder: Path | None) -> Policy:
    """The policy of a posted text, as if it stood in `folder`; `file` is what problems call it."""
    path = str((folder or Path()) / (Path(file).name or "policy"))
    try:
        return parse(text, path, os.environ, Below(folder))
    except PolicyError as error:
        shown = file if len(file) <= _SHOWN else f"...{file[3 - _SHOWN :]}"
        raise PolicyError(
            [replace(problem, file=shown) if file and problem.file == path else problem for problem in error.problems]
        ) from None


def _index(gateway: Gateway, routes: list[Route]) -> dict[str, Any]:
    return {"headrace": {"policy": gateway.policy.version}, "paths": list(dict.fromkeys(r.path for r in routes))}


async def _live(_: Request) -> Response:
    return Response(status_code=200)


async def _body(request: Request) -> bytes:
    """What is posted, and of what is larger than a policy only so much that this is seen."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            return b" " * (MAX_BYTES + 1)  # whatever it says, what is wrong with it is its size
    return bytes(body)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")

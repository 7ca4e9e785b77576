"""Asks the servers of a policy what they are, and says where the policy and they disagree: `headrace explain --live`.

Every server, and Redis, is given two seconds in all, at the same time as all others; models that run in the gateway are
loaded, which takes as long as it takes. What comes back is untrusted, as
in `survey`. What a server does not tell (a configuration, over gRPC everything) is not held against the policy.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx

from backends.tls import client_context, explained
from gateway.tools.init import one_line, shown, tensor_text
from gateway.tools.survey import About, Config, Metadata, Tensor, Unusable, cause, decoded, speaks_http2
from policies import Policy
from policies.problem import clip
from policies.spec import Accept, Backend, BackendTls, Batch, Endpoint, Redis, Route

if TYPE_CHECKING:
    from backends.local.model import Spec

_SECONDS = 2.0  # such replies are made from memory: a server that takes longer is as good as down
_AT_ONCE = 64  # connections; a policy may have thousands of replicas
_SCORED = ("FP16", "FP32", "FP64")  # what `routing.confidence` reads


@dataclass(frozen=True, slots=True)
class Told:
    """What one replica says of one model; no `model`: of itself. `reason` says why it is not ready; empty: it is."""

    endpoint: Endpoint
    model: str = ""
    server: str = ""
    reason: str = ""
    metadata: Metadata | None = None
    config: Config | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that was loaded here, as the gateway would; `reason` says why it could not be."""

    reason: str = ""
    metadata: Metadata | None = None


@dataclass(frozen=True, slots=True)
class Live:
    """What was found: by backend what its replicas say, what models in this process are, and Redis."""

    backends: Mapping[str, tuple[Told, ...]]
    local: Mapping[str, Loaded]
    redis: str | None  # why it does not answer; empty: it does; None: the policy has none


def ask(policy: Policy) -> Live:
    """Asks everybody."""
    return asyncio.run(_ask(policy))


def servers(policy: Policy) -> int:
    """How many there are to be asked."""
    addresses = {str(endpoint) for backend in policy.backends.values() for endpoint in backend.endpoints}
    return len(addresses) + (policy.redis is not None)


async def _ask(policy: Policy) -> Live:
    door = asyncio.Semaphore(_AT_ONCE)
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(_client())
        clients = {
            name: await stack.enter_async_context(_client(backend.tls)) if _over_tls(backend) else plain
            for name, backend in policy.backends.items()
        }
        asked = {
            name: [
                _replica(clients[name], door, backend, endpoint, model)
                for endpoint in backend.endpoints
                for model in _models(policy, backend)
            ]
            for name, backend in policy.backends.items()
        }
        redis = asyncio.create_task(_redis(policy.redis)) if policy.redis else None
        told = await asyncio.gather(*(question for questions in asked.values() for question in questions))
        answers = iter(told)
        backends = {name: tuple(next(answers) for _ in questions) for name, questions in asked.items()}
        return Live(backends, await asyncio.to_thread(_local, policy), await redis if redis else None)


def _over_tls(backend: Backend) -> bool:
    return any((endpoint.http or "").startswith("https://") for endpoint in backend.endpoints)


def _client(tls: BackendTls | None = None) -> httpx.AsyncClient:
    async def named(request: httpx.Request) -> None:
        if tls and tls.server_name:
            request.extensions["sni_hostname"] = tls.server_name

    # A proxy of the environment is for the web; the gateway itself does not use one either.
    verify = client_context(tls, "http/1.1") if tls else True
    return httpx.AsyncClient(timeout=_SECONDS, trust_env=False, verify=verify, event_hooks={"request": [named]})


def _models(policy: Policy, backend: Backend) -> tuple[str, ...]:
    """The names that the backend's servers are asked for; `""` where that is the callers' affair alone."""
    routes = [route.name for route in policy.routes.values() if backend.name in _backends(route)]
    return (backend.model,) if backend.model else tuple(routes) or ("",)


def _backends(route: Route) -> list[str]:
    """The backends that may answer a route, in order."""
    names = [tier.backend for arm in route.arms for tier in arm.tiers]
    return list(dict.fromkeys([*names, *([route.fallback] if route.fallback else [])]))


async def _replica(
    client: httpx.AsyncClient, door: asyncio.Semaphore, backend: Backend, endpoint: Endpoint, model: str
) -> Told:
    told = Told(endpoint, model)
    async with door:
        try:
            async with asyncio.timeout(_SECONDS):
                if endpoint.http is None:
                    speaks = await asyncio.to_thread(speaks_http2, endpoint.grpc or "", _SECONDS, backend.tls)
                    return replace(told, reason="" if speaks else f"nothing speaks gRPC at {endpoint.grpc}")
                return await _over_http(client, backend, endpoint.http, told)
        except Unusable as error:
            return replace(told, reason=one_line(str(error)))
        except httpx.HTTPError as error:
            return replace(told, reason=f"nothing answers: {one_line(cause(error))}")
        except ssl.SSLError as error:  # told after the handshake, which httpx takes for nobody's
            return replace(told, reason=f"nothing answers: {explained(error)}")
        except TimeoutError:
            return replace(told, reason=f"no answer within {_SECONDS:g} s")


async def _over_http(client: httpx.AsyncClient, backend: Backend, url: str, told: Told) -> Told:
    headers = {name: secret.value for name, secret in backend.headers.items()}
    about = decoded(await client.get(f"{url}/v2", headers=headers), About)
    told = replace(told, server=f"{about.name} {about.version}".strip())
    if not told.model:
        ready = await client.get(f"{url}/v2/health/ready", headers=headers)
        return told if ready.status_code == 200 else replace(told, reason=f"it answered {ready.status_code}: not ready")
    base = path = f"{url}/v2/models/{quote(told.model, safe='')}"
    if backend.version:
        path += f"/versions/{quote(backend.version, safe='')}"
    found = await client.get(path, headers=headers)
    if found.status_code != 200:
        other = await client.get(base, headers=headers) if backend.version else found
        if other.status_code == 200:
            there = ", ".join(map(shown, decoded(other, Metadata).versions)) or "others"
            reason = f"version {backend.version} is missing; the server has {there}"
        else:
            # Triton says 400 to a model that it has not; others 404. Whatever else is no word on the model.
            unknown = " is unknown or not loaded" if other.status_code in (400, 404) else ""
            reason = f"model {told.model!r}{unknown}: {_words(other)}"
        return replace(told, reason=reason)
    metadata = decoded(found, Metadata)
    answer = await client.get(f"{path}/config", headers=headers)
    config = None if answer.status_code in (404, 405, 501) else decoded(answer, Config)  # an extension of Triton's
    ready = await client.get(f"{path}/ready", headers=headers)
    reason = "" if ready.status_code == 200 else f"model {told.model!r} is not ready: {_words(ready)}"
    return replace(told, metadata=metadata, config=config, reason=reason)


def _words(response: httpx.Response) -> str:
    """An error in the server's own words."""
    try:
        return one_line(clip(str(response.json()["error"])))
    except (ValueError, LookupError, TypeError):
        return f"it answered {response.status_code}"


def _local(policy: Policy) -> dict[str, Loaded]:
    return {name: _loaded(backend.local.path) for name, backend in policy.backends.items() if backend.local}


def _loaded(path: str) -> Loaded:
    from backends.local.load import load  # with the libraries that models need, where a policy has one
    from backends.local.model import Unusable as Broken

    try:
        model = load(path)
    except Broken as error:
        return Loaded(f"{path}: {one_line(str(error))}")
    inputs, outputs = ([_tensor(spec) for spec in specs] for specs in (model.inputs, model.outputs))
    return Loaded(metadata=Metadata(model.platform, ["1"], inputs, outputs))


def _tensor(spec: Spec) -> Tensor:
    return Tensor(spec.name, spec.datatype, list(spec.shape or (-1, -1)))


async def _redis(spec: Redis) -> str:
    """What the gateway's own store finds: it connects as a gateway does, and looks something up."""
    from cache.redis import RedisStore  # imported where a policy has one

    said: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def observe(up: bool, reason: str) -> None:
        if not said.done():
            said.set_result("" if up else reason)

    store = RedisStore(spec, now=asyncio.get_running_loop().time, observe=observe)
    store.start()
    try:
        async with asyncio.timeout(_SECONDS):
            return one_line(await said)
    except TimeoutError:
        return f"no answer within {_SECONDS:g} s"
    finally:
        await store.close()


def findings(policy: Policy, live: Live) -> Iterator[str]:
    """Where the policy and what is there disagree, one line each, each with its place in the policy."""
    for name, all_told in live.backends.items():
        backend = policy.backends[name]
        for told in all_told:
            where = f"backends.{name}: {told.endpoint}"
            if told.reason:
                yield f"{where}: {told.reason}"
            if told.config is not None and backend.batch is not None:
                yield from (f"{where}: {wrong}" for wrong in _merging(told.model, told.config, backend.batch))
    for name, loaded in live.local.items():
        if loaded.reason:
            yield f"backends.{name}.local: {loaded.reason}"
    if live.redis:
        yield f"redis: {policy.redis}: {live.redis}"
    for route in policy.routes.values():
        yield from _of_route(policy, route, live)


def _merging(model: str, config: Config, batch: Batch) -> Iterator[str]:
    if config.kind:
        yield f"{model!r} is {config.kind}, and batch merges calls of several callers; delete batch"
    elif config.max_batch_size == 0:
        yield f"{model!r} has max_batch_size 0 (its axis 0 is no batch), and batch merges calls; delete batch"
    elif batch.max_rows > config.max_batch_size:
        yield f"batch.max_rows is {batch.max_rows}, and {model!r} has max_batch_size {config.max_batch_size}"


def _of_route(policy: Policy, route: Route, live: Live) -> Iterator[str]:
    known: dict[str, Told] = {}
    for name in _backends(route):
        wanted = policy.backends[name].model or route.name
        for told in live.backends.get(name, ()):
            if told.model == wanted and told.metadata is not None:
                known.setdefault(name, told)
        if (loaded := live.local.get(name)) is not None and loaded.metadata is not None:
            known[name] = Told(Endpoint(), wanted, metadata=loaded.metadata)
    for arm in route.arms:
        within = f"routes.{route.name}" + (f".{arm.name}" if arm.name else "")
        for tier in arm.tiers:
            one = known.get(tier.backend)
            if one is None or one.metadata is None:
                continue
            if tier.accept and (wrong := _judged(tier.accept, one.metadata)):
                yield f"{within}.{tier.name}.accept.output: {wrong}"
            if arm.cache and one.config and one.config.kind:
                yield f"{within}.cache: {one.model!r} is {one.config.kind}, and what it answers cannot be kept"
    for other in list(known)[1:]:
        first = next(iter(known))
        if wrong := _difference(_outputs(known[first]), _outputs(known[other])):
            yield f"routes.{route.name}: '{first}' and '{other}' answer differently: {wrong}"


def _outputs(told: Told) -> Sequence[Tensor]:
    assert told.metadata is not None
    return told.metadata.outputs


def _judged(accept: Accept, metadata: Metadata) -> str:
    outputs = {tensor.name: tensor for tensor in metadata.outputs}
    tensor = outputs.get(accept.output)
    if tensor is None:
        return f"the model has no {accept.output!r}; it has {', '.join(map(shown, outputs)) or 'no outputs'}"
    if tensor.datatype not in _SCORED:
        return f"expected {', '.join(_SCORED)}, and the model has {tensor_text(tensor)}"
    if len(tensor.shape) != 2 or tensor.shape[1] in (0, 1):
        return f"expected the shape [rows, classes], and the model has {tensor_text(tensor)}"
    return ""


def _difference(ones: Sequence[Tensor], others: Sequence[Tensor]) -> str:
    """The first difference in two models' outputs; -1 is any length, and so are rows."""
    mine, its = ({tensor.name: tensor for tensor in tensors} for tensors in (ones, others))
    for name in mine.keys() ^ its.keys():
        return f"{shown(name)} is an output of one alone"
    for name, tensor in mine.items():
        other = its[name]
        lengths = zip(tensor.shape[1:], other.shape[1:], strict=False)
        alike = len(tensor.shape) == len(other.shape) and all(a == b or -1 in (a, b) for a, b in lengths)
        if tensor.datatype != other.datatype or not alike:
            return f"{tensor_text(tensor)} and {tensor_text(other)}"
    return ""

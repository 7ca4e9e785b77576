"""A model in this process as the client of an endpoint.

The model is loaded on the first call or probe, on a thread of the pool that it later runs on. One that cannot be loaded
says why to whoever asks whether it is ready, and is tried again when its files have changed; a model that is loaded
stays as it is, whatever becomes of its files. Requests are checked and decoded on the event loop, like all others, and
run on the pool.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from contextvars import Context
from functools import partial
from os.path import normpath
from typing import Any

from backends.errors import BackendFailed, Failure, Unreachable
from backends.local import metadata
from backends.local.load import digest, load, stamp
from backends.local.model import VERSION, Model, Unusable, check_call, check_version
from backends.local.pool import Pool
from backends.request import Answer, Infer, Relay, Reply, Request, Tensors, Trait
from backends.tensor import Tensor
from policies.spec import Local

# Calls that wait for a thread, for each thread: of a model that takes 5 ms they make a third of a second, after which a
# caller is better told to come back. Where calls are batched, the batches' slots bound them first.
_QUEUE = 64


class LocalClient:
    """Answers inference calls, and what else `metadata` knows, by the model at `local.path`."""

    def __init__(self, local: Local, *, now: Callable[[], float], load: Callable[[str], Model] = load) -> None:
        self.name = f"local:{normpath(local.path)}"
        self._path = local.path
        self._now = now
        self._load = load
        self._pool = Pool(self.name, local.threads, _QUEUE * local.threads, now)
        self._model: Model | None = None
        self._loading: asyncio.Task[None] | None = None
        self._reason = ""
        self._stamp: object = None
        self.contents: str | None = None  # a digest of the files of the model that is loaded

    async def __call__(self, request: Request, /) -> Reply:
        content = request.content
        if isinstance(content, Infer):
            check_version(request.version)
            model = await self._loaded(request.deadline)
            wanted = check_call(model, content)
            inputs = {tensor.name: tensor for tensor in content.inputs.decoded}
            outputs = await self._pool.run(partial(_run, model, inputs, wanted), request.deadline)
            return Reply(Answer(Tensors.of(outputs), request.model, VERSION))
        return Reply(await self._relay(request, content))

    async def unready(self, model: str, deadline: float, headers: Mapping[str, str]) -> str:
        """Why the model is not loaded by `deadline`; empty where it is. There is one, whatever `model` says."""
        failed = self._loading
        # Of those who find it mended at the same time the first begins anew, and the others wait with it.
        if self._reason and await self._mended(deadline) and self._loading is failed:
            self._loading, self._reason = None, ""
        return await self._missing(deadline)

    async def trait(self, model: str, version: str, deadline: float, headers: Mapping[str, Any]) -> Trait:
        """A model in this process answers each row by itself."""
        return Trait()

    def refresh(self) -> None:
        """Has no addresses to follow."""

    async def close(self) -> None:
        """Waits for the calls that run; later ones are refused as unreachable."""
        await self._pool.close()
        if self._loading is not None:
            await self._loading
        self._model, self._reason = None, "closed"

    async def _relay(self, request: Request, call: metadata.Call) -> Relay:
        asked, version = metadata.subject(call, request.version)
        check_version(version)
        if asked == "server":
            return metadata.server(call)
        if asked == "ready":
            return metadata.readiness(call, not await self.unready("", request.deadline, {}))
        return metadata.metadata(call, await self._loaded(request.deadline), request.model)

    async def _loaded(self, deadline: float) -> Model:
        """The model, once it is there. Raises Unreachable where it cannot be loaded, or is not by `deadline`."""
        if self._model is None:
            reason = await self._missing(deadline)
            if self._model is None:
                raise Unreachable(f"{self.name}: {reason}")
        return self._model

    async def _missing(self, deadline: float) -> str:
        """Why there is no model by `deadline`; empty where there is."""
        if self._model is None:
            if self._loading is None:
                # Of its own context, for it outlives the call that happened to be the first.
                self._loading = asyncio.get_running_loop().create_task(self._begin(), context=Context())
            left = None if deadline == math.inf else max(0.0, deadline - self._now())
            await asyncio.wait({self._loading}, timeout=left)
        return "" if self._model is not None else self._reason or "still being loaded"

    async def _begin(self) -> None:
        try:
            self._model = await self._pool.run(self._read)
        except Unusable as error:
            self._reason = str(error)
        except Failure as failure:
            self._reason = failure.message

    def _read(self) -> Model:
        # Taken first: files that change while they are read have changed since.
        self._stamp = stamp(self._path)
        model = self._load(self._path)
        self.contents = digest(self._path)
        return model

    async def _mended(self, deadline: float) -> bool:
        """Whether the files of a model that could not be loaded are others now."""
        try:
            return await self._pool.run(partial(stamp, self._path), deadline) != self._stamp
        except Failure:  # busy or closed: nobody could look
            return False


def _run(model: Model, inputs: Mapping[str, Tensor], wanted: Collection[str]) -> tuple[Tensor, ...]:
    try:
        return model.run(inputs, wanted)
    except Failure:
        raise
    except Exception as error:
        message = " ".join(str(error).split())[:1000] or type(error).__name__
        raise BackendFailed(message, 500) from None

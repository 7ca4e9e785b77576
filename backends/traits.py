"""What a server's own configuration says of its models: which are decoupled or stateful, what they take and give.

Theory of operation. A decoupled model answers a call with any number of responses, a stateful one answers by what came
before: neither call may be merged with another, answered from a cache or asked of another model first. Who has to know
asks here: `known` looks it up and never waits, `learn` asks the server where it is not known. What was told is kept for
half a minute; then the next look-up has it asked again in the background, and the old answer stands until the new one
comes. It is forgotten when a model is loaded or unloaded through the gateway, and when the server has been down.

Unknown is not no. A server that could not be asked is asked again after a second, and until then its models are treated
as if they were decoupled. One that does not know the model answers every call of it with one error, whatever the path;
that is asked again after a second, too. One that does not know the question, or answers another (it is no Triton), has
no configuration to tell: `UNTOLD` is its models' trait, and the policy's word counts.

A few calls cannot be sent without a model's inputs or outputs (`backends.interface`), and nothing old or supposed will
do: `told` knows only what the server said within half a minute, and asks by the call itself, whose the failure is then.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import Context

from backends.errors import BackendFailed, BadReply, Failure
from backends.request import Trait

# A model that is replaced by another under its name is not what is remembered.
_FRESH_SECONDS = 30.0
_SHORTLY_SECONDS = 1.0
# A look-up beside a caller's own deadline; a healthy server needs a millisecond.
ASK_SECONDS = 2.0
# Names may be the callers', where a whole server is proxied.
_MAX_MODELS = 1024


UNTOLD = Trait(told=False)
_Key = tuple[str, str]


class _Entry:
    """What is supposed of a model `until` it is asked for again; `told` where its server said so."""

    __slots__ = ("told", "trait", "until")

    def __init__(self, trait: Trait | None, told: bool, until: float) -> None:
        self.trait = trait
        self.told = told
        self.until = until


class Traits:
    """The traits of the models of one server, which `ask(model, version)` asks; it raises Failure where it cannot."""

    def __init__(self, ask: Callable[[str, str], Awaitable[Trait]], now: Callable[[], float]) -> None:
        self._ask = ask
        self._now = now
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._asking: dict[_Key, asyncio.Task[Trait | None]] = {}

    def known(self, model: str, version: str) -> Trait | None:
        """What is known of a model; None where that is nothing. Costs one look-up."""
        entry = self._entries.get((model, version))
        if entry is None:
            return None
        if entry.until <= self._now() and entry.trait is not None:
            self._begin((model, version))
        return entry.trait

    async def learn(self, model: str, version: str) -> Trait | None:
        """What is known of a model, asked of the server where it has to be; None where that cannot tell now."""
        key = model, version
        entry = self._entries.get(key)
        if entry is not None and (entry.trait is not None or entry.until > self._now()):
            return self.known(model, version)
        # Whoever leaves takes only itself along: others wait for the same answer.
        return await asyncio.shield(self._begin(key))

    async def told(self, model: str, version: str, ask: Callable[[], Awaitable[Trait]]) -> Trait:
        """What the server said of a model lately, or says to `ask` now. Raises what that raises."""
        key, entries = (model, version), self._entries
        entry = entries.get(key)
        if entry is not None and entry.trait is not None and entry.told and entry.until > self._now():
            return entry.trait
        trait = await ask()
        if entries is self._entries:
            self._keep(key, trait, True, _FRESH_SECONDS)
        return trait

    def forget(self) -> None:
        """Everything has to be asked anew."""
        # What is being asked was asked before: its answer is for those who wait, and is not kept.
        self._entries = OrderedDict()
        self._asking.clear()

    def close(self) -> None:
        for task in self._asking.values():
            task.cancel()

    def _begin(self, key: _Key) -> asyncio.Task[Trait | None]:
        task = self._asking.get(key)
        if task is None:
            # Of its own context, for it outlives the call that happened to be the first.
            task = asyncio.get_running_loop().create_task(self._asked(key), context=Context())
            self._asking[key] = task
        return task

    async def _asked(self, key: _Key) -> Trait | None:
        task = asyncio.current_task()
        trait: Trait | None = None
        told, seconds = False, _SHORTLY_SECONDS
        try:
            trait, told, seconds = await self._ask(*key), True, _FRESH_SECONDS
        except BackendFailed as failure:
            if failure.status in ((12,) if failure.grpc else (405, 501)):
                trait, seconds = UNTOLD, _FRESH_SECONDS
            elif failure.status in ((3, 5) if failure.grpc else (400, 404)):
                trait = Trait()
        except BadReply:
            trait, seconds = UNTOLD, _FRESH_SECONDS
        except Failure:  # asked again shortly
            pass
        finally:
            if asked_here := self._asking.get(key) is task:
                del self._asking[key]
        if asked_here:
            before = self._entries.get(key)
            if trait is None and before is not None:
                trait = before.trait
            self._keep(key, trait, told, seconds)
        return trait

    def _keep(self, key: _Key, trait: Trait | None, told: bool, seconds: float) -> None:
        self._entries[key] = _Entry(trait, told, self._now() + seconds)
        self._entries.move_to_end(key)
        if len(self._entries) > _MAX_MODELS:
            self._entries.popitem(last=False)

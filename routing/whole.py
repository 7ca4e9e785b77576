"""Whole: calls that must reach their server as they are, past everything that merges, keeps or reorders them.

Theory of operation. A policy may batch, cache or cascade a model that turns out to be decoupled (any number of
responses a call) or stateful, or that is made so later. Neither can be divided into rows that stand for themselves, so
their calls go past all of that to the last tier's server, which answers them by its own rules: Triton refuses a unary
call of a decoupled model, and that is what the caller is told. What a model is like is looked up in what is known
(`backends.traits`); only the first call waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from backends.endpoint import Endpoint
from backends.request import Reply, Request, Service


class Subject(msgspec.Struct, frozen=True):
    """A model that a call may be asked of: its names there ("" keeps the caller's), and its replicas."""

    model: str
    version: str
    endpoints: tuple[Endpoint, ...]


class Whole:
    """`inner`; or `plain` where one of the models that `inner` may ask cannot have its calls divided."""

    def __init__(self, inner: Service, plain: Service, subjects: Sequence[Subject]) -> None:
        self._inner = inner
        self._plain = plain
        self._subjects = tuple(subjects)

    async def __call__(self, request: Request, /) -> Reply:
        for subject in self._subjects:
            # Replicas are alike: one that is up can tell for all.
            endpoints = subject.endpoints
            traits = next((e for e in endpoints if e.ready is not False), endpoints[0]).traits
            model, version = subject.model or request.model, subject.version or request.version
            trait = traits.known(model, version)
            if trait is None:
                trait = await traits.learn(model, version)
            if trait is None or not trait.divisible:
                return await self._plain(request)
        return await self._inner(request)

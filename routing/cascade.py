"""Cascade: tiers in order, cheapest first; only rows that are not confident go on.

Theory of operation. Each tier but the last has a rule (`Accept`): which output to look at and the least confidence
(`routing.confidence`) that keeps a row. Rows below it are asked of the next tier, the rest keep the answer they have;
the last tier answers whatever reaches it. The answer is put together in the caller's order, and its outputs are those
that the caller asked for. A tier that fails or is too slow for reasons of its own, or cannot do what is asked, passes
all its rows on; the caller's own faults and its deadline end the request. A model without a cascade is a cascade of one
tier, whose request and answer pass unread. A call that cannot be divided into rows is asked of the last tier alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from backends import rows as rowwise
from backends.errors import SERVER_FAILURES, Unsupported, own_fault
from backends.request import Answer, Hop, Infer, Reply, Request, Service, Tensors, Trail, Wanted, content, replace
from policies.spec import Accept
from routing.confidence import confidence

_NAMES_NOTHING = ("", "")


@dataclass(frozen=True, slots=True)
class Rung:
    """One tier as the cascade sees it; `model` and `version` are the backend's own names ("" keeps the caller's)."""

    name: str
    inner: Service
    model: str
    version: str
    accept: Accept | None


class Cascade:
    """Answers through `tiers`, of which all but the last have a rule. `cacheable` is noted in replies."""

    def __init__(self, tiers: Sequence[Rung], *, cacheable: bool = False) -> None:
        self._tiers = tuple(tiers)
        self._cacheable = cacheable

    async def __call__(self, request: Request, /) -> Reply:
        tiers = self._tiers
        count = rowwise.count(request.infer)
        if not count or len(tiers) == 1:
            last = tiers[-1]
            reply = await last.inner(_addressed(request, last))
            # Everything was asked, and everything stands.
            hops = [replace(hop, tier=last.name, rows=hop.rows or _all(count or 1)) for hop in reply.trail]
            return Reply(reply.body, tuple(hops), cacheable=self._cacheable)
        pieces: list[tuple[list[int], Answer]] = []
        trail: list[Hop] = []
        pending = list(range(count))
        for tier in tiers:
            infer = request.infer if len(pending) == count else rowwise.take(request.infer, pending)
            asked, added = _with_output(infer, tier.accept)
            try:
                reply = await tier.inner(_addressed(content(request, asked), tier))
                answer = rowwise.verify(reply.answer, len(pending))
                kept, unscored = _kept(answer, tier.accept, len(pending))
            except (*SERVER_FAILURES, Unsupported) as failure:
                # An output that the caller never asked for cannot be the caller's fault.
                cannot = isinstance(failure, Unsupported)
                if tier is tiers[-1] or not (added or cannot or own_fault(failure)):
                    raise
                reason = "unsupported" if cannot else "failed"
                trail.append(Hop(tier.name, (), deferred=len(pending), reason=reason))
                continue
            trail += _trail(reply.trail, tier.name, pending, kept)
            if unscored and trail:
                trail[-1] = replace(trail[-1], unscored=unscored)
            if kept:
                part = answer if len(kept) == len(pending) else rowwise.take_answer(answer, kept)
                pieces.append(([pending[i] for i in kept], _without(part, added)))
                chosen = set(kept)
                pending = [row for i, row in enumerate(pending) if i not in chosen]
            if not pending:
                break
        return Reply(rowwise.gather(pieces, count), tuple(trail), cacheable=self._cacheable)


@lru_cache(64)
def _all(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def _addressed(request: Request, tier: Rung) -> Request:
    if (tier.model, tier.version) == _NAMES_NOTHING:
        return request
    return replace(request, model=tier.model or request.model, version=tier.version or request.version)


def _kept(answer: Answer, accept: Accept | None, count: int) -> tuple[list[int], int]:
    """Positions, among the rows that were asked, of those whose answer stands; and how many could not be scored."""
    if accept is None:
        return list(range(count)), 0
    scores = confidence(answer, accept, count)
    kept: list[int] = (scores >= accept.threshold).nonzero()[0].tolist()
    return kept, int((scores < 0).sum())


def _with_output(infer: Infer, accept: Accept | None) -> tuple[Infer, str]:
    """The call with the output that the rule looks at among those requested, and its name where it had to be added."""
    if accept is None or not infer.outputs or any(output.name == accept.output for output in infer.outputs):
        return infer, ""
    # The wire bytes ask for less than is needed now, so the tensors travel without them.
    inputs = Tensors.of(infer.inputs.decoded)
    return replace(infer, inputs=inputs, outputs=(*infer.outputs, Wanted(accept.output))), accept.output


def _without(answer: Answer, name: str) -> Answer:
    if not name:
        return answer
    return replace(answer, outputs=Tensors.of(tuple(t for t in answer.outputs.decoded if t.name != name)))


def _trail(trail: Trail, tier: str, pending: Sequence[int], kept: Sequence[int] | None = None) -> tuple[Hop, ...]:
    """The hops of one tier in the caller's row numbers: each answered those of its rows that were kept (None: all).

    A hop without rows comes from a backend that does not count them: it stands for all that were asked. What cannot be
    divided counts as one row.
    """
    chosen = frozenset(kept if kept is not None else range(len(pending)))
    hops = []
    for hop in trail:
        asked = hop.rows or range(len(pending))
        stay = tuple(pending[i] for i in asked if i in chosen)
        hops.append(replace(hop, tier=tier, rows=stay, deferred=len(asked) - len(stay)))
    return tuple(hops)

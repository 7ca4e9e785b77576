"""Cached: answers known rows from a store and asks the inner service only for the others.

A row's value is the outputs of that row alone, with the version of the model that gave them; an answer is put together
from hits and fresh rows in the caller's order. Only answers whose outputs have exactly the rows that were sent are
stored. A call that cannot be divided into rows passes unread. Duplicates within a call are asked once. Where kept rows
no longer fit what the model answers now (it was changed in place), the whole call is asked anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from backends import rows as rowwise
from backends.errors import BadReply
from backends.request import Answer, Hop, Reply, Request, Service, Tensors, content, replace
from backends.tensor import Tensor, check
from cache.key import Key, keys
from cache.store import Store


class _Output(msgspec.Struct, array_like=True, frozen=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class _Row(msgspec.Struct, array_like=True, frozen=True):
    model: str
    version: str
    outputs: tuple[_Output, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Row)


class Cached:
    """`inner` behind `store`. `scope` tells this tier's answers from all others in the store; `ttl` in seconds.

    While `scope` gives None, it is not known what answers, and nothing is looked up or kept.
    """

    def __init__(self, inner: Service, store: Store, scope: Callable[[], tuple[str, ...] | None], ttl: float) -> None:
        self._inner = inner
        self._store = store
        self._scope = scope
        self._ttl = ttl

    async def __call__(self, request: Request, /) -> Reply:
        infer = request.infer
        count = rowwise.count(infer)
        scope = self._scope()
        if not count or scope is None:
            return await self._inner(request)
        names = keys(infer, (*scope, request.model, request.version), count)
        found = [_read(value) for value in await self._store.get_many(names)]
        return await self._filled(request, names, found)

    async def _filled(self, request: Request, names: Sequence[Key], found: Sequence[Answer | None]) -> Reply:
        """`found`, the answers that were kept, made whole by asking for the others."""
        count = len(found)
        hits: list[tuple[Sequence[int], Answer]] = [([row], kept) for row, kept in enumerate(found) if kept is not None]
        pieces = list(hits)
        trail = [Hop("", tuple(row for (row,), _ in hits), cached=True)] if hits else []
        if len(hits) < count:
            asked, copies = _distinct(names, found)
            sub = request if len(asked) == count else content(request, rowwise.take(request.infer, asked))
            reply = await self._inner(sub)
            try:
                answer = rowwise.verify(reply.answer, len(asked))
                values = _values(answer, [names[row] for row in asked])
            except BadReply:
                if len(asked) == count:
                    # It cannot be kept row by row; that is no reason not to pass it on.
                    return reply
                raise
            await self._store.put_many(values, self._ttl)
            if len(asked) == count:
                return reply
            fresh = rowwise.take_answer(answer, [position for position, _ in copies])
            pieces.append(([row for _, row in copies], fresh))
            trail += [_in_caller_rows(hop, copies) for hop in reply.trail]
        try:
            gathered = rowwise.gather(pieces, count)
        except BadReply:
            return await self._filled(request, names, [None] * count)
        return Reply(gathered, tuple(trail))


def _distinct(names: Sequence[Key], found: Sequence[Answer | None]) -> tuple[list[int], list[tuple[int, int]]]:
    """Which rows to ask for, and for each missing row `(position among those, the caller's row)`."""
    asked: list[int] = []
    position: dict[Key, int] = {}
    copies = []
    for row, kept in enumerate(found):
        if kept is None:
            at = position.setdefault(names[row], len(asked))
            if at == len(asked):
                asked.append(row)
            copies.append((at, row))
    return asked, copies


def _in_caller_rows(hop: Hop, copies: Sequence[tuple[int, int]]) -> Hop:
    """A hop in the caller's row numbers; one without rows, from a backend that does not count them, is of all."""
    answered = frozenset(hop.rows or (position for position, _ in copies))
    return replace(hop, rows=tuple(row for position, row in copies if position in answered))


def _read(value: bytes | None) -> Answer | None:
    """The answer for one row that a stored value holds, None where there is none or it is not sound."""
    if value is None:
        return None
    try:
        row = _decoder.decode(value)
        outputs = tuple(check(Tensor(o.name, o.datatype, (1, *o.shape), o.data), BadReply) for o in row.outputs)
    except (msgspec.MsgspecError, BadReply):
        return None
    return Answer(Tensors.of(outputs), row.model, row.version)


def _values(answer: Answer, names: Sequence[Key]) -> dict[Key, bytes]:
    """The value to keep for each row of an answer."""
    singles = rowwise.split(answer, [1] * len(names))
    return {
        name: _encoder.encode(
            _Row(
                single.model,
                single.version,
                tuple(_Output(t.name, t.datatype, t.shape[1:], bytes(t.data)) for t in single.outputs.decoded),
            )
        )
        for name, single in zip(names, singles, strict=True)
    }

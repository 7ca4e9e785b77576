"""Sticky: a call of a stateful sequence goes to the replica that the sequence runs on, and nowhere else.

`routing.sequence` decides which one that is; here is the call, and what its end says of the sequence. Where a sequence
begins, and the replica never executed the call, it may begin elsewhere as long as the budget pays for it; any later
call is made once. A replica that cannot be reached, or is lost during a call, has lost the sequence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from backends.endpoint import Endpoint
from backends.errors import ConnectionLost, Rejected, SequenceLost, Unreachable
from backends.parameters import Sequence as Running
from backends.request import Reply, Request, RpcCall
from backends.stream import watched
from routing.retry import NEVER_EXECUTED, RetryBudget
from routing.sequence import Key, Run, Sequences

_LOST = (Unreachable, ConnectionLost)


class Sticky:
    """Chooses among `endpoints` for calls of `sequences`."""

    def __init__(
        self, sequences: Sequences, endpoints: Sequence[Endpoint], budget: RetryBudget, now: Callable[[], float]
    ) -> None:
        self._sequences = sequences
        self._endpoints = tuple(endpoints)
        self._budget = budget
        self._now = now

    async def __call__(self, request: Request, sequence: Running, ask: Callable[[int], Awaitable[Reply]]) -> Reply:
        """The reply of the endpoint that is chosen; `ask(i)` asks the one of that number. Raises SequenceLost."""
        key: Key = request.model, sequence.id
        endpoints, sequences = self._endpoints, self._sequences
        left = set(range(len(endpoints)))
        while True:
            names = [endpoints[i].name for i in sorted(left)]
            up = [endpoints[i].name for i in sorted(left) if endpoints[i].ready is not False]
            run = sequences.place(key, sequence.starts, names, up, self._now())
            chosen = next(i for i in left if endpoints[i].name == run.replica)
            try:
                reply = await ask(chosen)
            except NEVER_EXECUTED as failure:
                if not sequence.starts:
                    if isinstance(failure, Rejected):  # it lives, and so does the sequence
                        raise
                    raise _lost(run, failure) from failure
                sequences.end(key, run)
                left.discard(chosen)
                elsewhere = any(endpoints[i].ready is not False for i in left)
                if isinstance(request.content, RpcCall) or not elsewhere or not self._budget.take():
                    raise
                continue
            except ConnectionLost as failure:
                raise _lost(run, failure) from failure
            stream = watched(reply, partial(self._over, key, run, sequence))
            if stream is None:
                self._over(key, run, sequence, None)
            return stream or reply

    def _over(self, key: Key, run: Run, sequence: Running, error: BaseException | None) -> None:
        if isinstance(error, _LOST):
            run.lost = True
        elif sequence.ends:
            self._sequences.end(key, run)


def _lost(run: Run, failure: Unreachable | ConnectionLost) -> SequenceLost:
    run.lost = True
    return SequenceLost(f"{failure.message}; the sequence is lost with it: begin anew (sequence_start)")

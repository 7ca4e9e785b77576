"""What is remembered of a backend's replicas between calls, under any policy: who is changing what, and who disagrees.

A change (load, unload, settings) runs to its end once it has begun, even if its caller leaves: the servers go on with
it anyway, and the next change of the same model must not overtake it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from backends.errors import Expired

_log = logging.getLogger("headrace.backends")
_DISAGREEMENTS = 256  # remembered at most; what they are about is named by callers

_T = TypeVar("_T")


class Fleet:
    """The replicas of the backend `name`, of which there are `count`."""

    def __init__(self, name: str, count: int, now: Callable[[], float]) -> None:
        self._name = name
        self.count = count
        self._now = now
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running: set[asyncio.Task[Any]] = set()
        self._disagreements: dict[str, list[list[str]]] = {}

    async def alone(self, model: str, work: Callable[[], Coroutine[Any, Any, _T]], deadline: float) -> _T:
        """The result of `work`, which nothing else that concerns `model` runs beside ("" stands for the servers).

        Raises Expired where its turn has not come by `deadline`. Later the caller alone gives up, not the work.
        """
        lock = self._locks.setdefault(model, asyncio.Lock())
        try:
            async with asyncio.timeout(None if deadline == math.inf else deadline - self._now()):
                await lock.acquire()
        except TimeoutError:
            raise Expired("queue", "deadline exceeded while another change of the same model was under way") from None
        task = asyncio.create_task(work(), context=Context())
        self._running.add(task)

        def over(ended: asyncio.Task[Any]) -> None:
            self._running.discard(ended)
            lock.release()
            if not ended.cancelled():
                ended.exception()  # somebody's, or nobody's any more

        task.add_done_callback(over)
        return await asyncio.shield(task)

    def compare(self, what: str, said: Mapping[str, object]) -> None:
        """Tells once, of each change, that replicas say different things of `what`; `said` has it by replica."""
        groups: list[list[str]] = []
        answers: list[object] = []
        for replica, answer in said.items():
            if answer in answers:
                groups[answers.index(answer)].append(replica)
            else:
                answers.append(answer)
                groups.append([replica])
        before = self._disagreements.get(what)
        if len(groups) > 1 and groups != before:
            self._disagreements.pop(what, None)
            if len(self._disagreements) >= _DISAGREEMENTS:
                del self._disagreements[next(iter(self._disagreements))]
            self._disagreements[what] = groups
            shown = " | ".join(" ".join(group) for group in groups)
            _log.warning("replicas disagree", extra={"fields": self._fields(what) | {"replicas": shown}})
        elif len(groups) == 1 and before is not None and len(said) == self.count:
            del self._disagreements[what]
            _log.info("replicas agree again", extra={"fields": self._fields(what)})

    def _fields(self, what: str) -> dict[str, str]:
        return {"backend": self._name, "about": what[:200]}

"""Which replica a stateful sequence runs on, from its first call to its last.

Theory of operation. A sequence's state lives in one replica, so all of its calls go there. Where a sequence begins is
decided by rendezvous hashing (Thaler and Ravishankar 1998): of the replicas that are up the one whose hash with the
sequence is highest. Every gateway before the same replicas decides alike, without a word between them, and a replica
that joins or leaves moves only the sequences that it gets or had. A sequence that runs stays where it began, whoever
joins: that is what is remembered here, until it ends, or has idled for `idle` seconds, or too many have begun since.
One that nobody remembers is placed by its hash as if it began: it was begun through another gateway, or has idled.

A sequence whose replica is lost has lost its state, and fails with SequenceLost until it is begun anew; it is never
moved, for another replica would answer from no state at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Ordered
from hashlib import blake2b

import msgspec

from backends.errors import SequenceLost
from backends.parameters import SequenceId

Key = tuple[str, SequenceId]  # the model's name and the sequence's


class Run(msgspec.Struct, eq=False):
    """A sequence that runs on `replica`, or ran there until that was `lost`; `used` is when it was placed last."""

    replica: str
    used: float
    lost: bool = False


class Sequences:
    """The sequences that run on the replicas of one backend, which go by their names. `now` is in seconds.

    At most `limit` are remembered, an hour by default: servers forget idle ones much sooner.
    """

    def __init__(self, limit: int = 1 << 16, idle: float = 3600.0) -> None:
        self._limit = limit
        self._idle = idle
        self._runs: OrderedDict[Key, Run] = OrderedDict()  # the one that was used last is last

    def __len__(self) -> int:
        return len(self._runs)

    def place(self, key: Key, starts: bool, replicas: Ordered[str], up: Ordered[str], now: float) -> Run:
        """Where a call of a sequence goes, of all `replicas`, those that are `up` first.

        Raises SequenceLost where the sequence runs, and its replica is not up.
        """
        self._expire(now)
        before = self._runs.get(key)
        run = None if starts else before
        if run is None:
            # Whoever begins anew after a loss need not meet the same replica before it is known to be down.
            others = [replica for replica in up if before is None or not before.lost or replica != before.replica]
            run = self._runs[key] = Run(_rendezvous(key, others or up or replicas), now)
        elif run.lost or run.replica not in up:
            run.lost = True
            raise SequenceLost(
                f"sequence {_name(key)} was lost with '{run.replica}', which it ran on: begin anew (sequence_start)"
            )
        run.used = now
        self._runs.move_to_end(key)
        return run

    def end(self, key: Key, run: Run) -> None:
        """The sequence has ended, or never begun; nothing happens where it has begun anew meanwhile."""
        if self._runs.get(key) is run:
            del self._runs[key]

    def _expire(self, now: float) -> None:
        while self._runs:
            oldest = next(iter(self._runs))
            if len(self._runs) <= self._limit and now - self._runs[oldest].used < self._idle:
                return
            del self._runs[oldest]


def _rendezvous(key: Key, replicas: Ordered[str]) -> str:
    return max(replicas, key=lambda replica: _weight(key, replica))


def _weight(key: Key, replica: str) -> bytes:
    """A hash of all three, with lengths, so that no two different ones are written alike."""
    model, name = key
    parts = [model, f"{type(name).__name__}:{name}", replica]
    data = b"".join(b"%d:%b" % (len(part), part) for part in (part.encode(errors="replace") for part in parts))
    return blake2b(data, digest_size=8).digest()


def _name(key: Key) -> str:
    return f"{str(key[1])[:64]!a} of model {key[0][:64]!a}"

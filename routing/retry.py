"""A retry budget: what was never executed may be asked once more elsewhere, as long as that stays rare.

Theory of operation. A backend that is down or full fails many calls at once, and retries would multiply the load on
what is left of it. So retries are paid for: each call earns a fifth of a retry, at most ten are saved, and the purse
starts full. A burst of failures after quiet times is repaired; under lasting failure retries add at most 20 % to the
load. This is Finagle's RetryBudget without its floor per second and its expiry, which need a clock (Twitter, "Retry
Budgets", finagle/RetryBudget.scala).

What may be retried at all is said by the failure: `Unreachable` was never sent, `Rejected` was refused before anything
was executed. Of a gRPC relay neither is certain, for the caller's messages may have been read.
"""

from __future__ import annotations

from collections.abc import Callable

from backends.errors import Rejected, Unreachable

__all__ = ["NEVER_EXECUTED", "RetryBudget"]

NEVER_EXECUTED = (Unreachable, Rejected)

# In fifths of a retry, which are exact.
_COST = 5
_SAVED = 10 * _COST


class RetryBudget:
    """The retries that the calls of one backend have earned; `spent` is told of each that is taken."""

    __slots__ = ("_fifths", "_spent")

    def __init__(self, spent: Callable[[], None] = lambda: None) -> None:
        self._fifths = _SAVED
        self._spent = spent

    def earn(self) -> None:
        """For one call that is no retry."""
        if self._fifths < _SAVED:
            self._fifths += 1

    def take(self) -> bool:
        """Whether one retry may be made, which is then paid for."""
        if self._fifths < _COST:
            return False
        self._fifths -= _COST
        self._spent()
        return True

"""Outliers: models that an endpoint fails again and again while it says that they are ready.

Theory of operation. Envoy's outlier detection by consecutive failures, for each model of an endpoint: after FAILURES
failures in a row, without one answer between them, the endpoint is avoided for that model (`avoided`) for
`FIRST * 2 ** k` seconds, at most LONGEST, where k counts the trials that failed since. Then the next call is let
through as a trial; while it lasts, TRIAL seconds at most, the endpoint is avoided still. Any answer closes the case,
whether it was the trial's or came because there was nowhere else to go; a trial that fails doubles the time. Once a
trial is due the endpoint counts as ready, or nobody who looks at its readiness first would ever make one.

What counts as a failure is `blames`: the endpoint's own, not the caller's. Success of a model without a case costs one
look at an empty table. At most MODELS models are watched, the oldest case is dropped: their names are the callers'.

Deliberately not here: time (it is an argument), which endpoint is chosen then (`routing`), whether a server answers at
all (`Endpoint.ready`).
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.errors import BackendFailed, Rejected, Unreachable, own_fault

FAILURES = 5  # Envoy's: fewer would let one caller's odd requests pass for a broken model
FIRST = 2.0  # seconds; a stub that is started again takes about as long
LONGEST = 60.0
TRIAL = 10.0  # seconds that one trial may last before there is another; few calls take longer
MODELS = 1024
_MAX_REASON = 200

# What these statuses speak of is not how well the server does: what was asked for, or that it is busy.
_HTTP_SPARED = frozenset({401, 403, 404, 405, 408, 409, 429, 499, 501})
_GRPC_SPARED = frozenset({1, 5, 6, 7, 8, 9, 11, 12, 16})  # CANCELLED, NOT_FOUND ... UNAUTHENTICATED


def blames(failure: BaseException | None) -> bool:
    """Whether the endpoint is to blame for `failure`, and for this model alone; never for what it answered (None)."""
    if failure is None or not own_fault(failure) or isinstance(failure, Rejected | Unreachable):
        return False
    if isinstance(failure, BackendFailed):
        return failure.status not in (_GRPC_SPARED if failure.grpc else _HTTP_SPARED)
    return True


@dataclass(slots=True)
class _Case:
    failures: int = 0
    times: int = 0  # that it has been avoided since its last answer
    until: float = 0.0
    trial: bool = False
    reason: str = ""


class Outliers:
    """The cases of one endpoint, by model. Synchronous; `now` is in seconds and never goes back."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}

    def __bool__(self) -> bool:
        """Whether there is any case: where there is none, nothing needs to be asked."""
        return bool(self._cases)

    def begin(self, model: str, now: float) -> None:
        """A call for `model` begins; where its time to be avoided is over, this is the trial."""
        case = self._cases.get(model)
        if case is not None and case.times and case.until <= now:
            case.trial, case.until = True, now + TRIAL

    def failed(self, model: str, now: float, reason: str) -> bool:
        """A call failed as `blames` says; whether `model` is avoided from now on and was not before."""
        case = self._cases.get(model)
        if case is None:
            if len(self._cases) >= MODELS:
                del self._cases[next(iter(self._cases))]
            case = self._cases[model] = _Case()
        case.failures += 1
        case.reason = reason[:_MAX_REASON]
        if case.times and not case.trial:
            return False  # a call from before, or one that had nowhere else to go
        if not case.times and case.failures < FAILURES:
            return False
        first = case.times == 0
        case.until = now + min(FIRST * 2.0 ** min(case.times, 16), LONGEST)
        case.times += 1
        case.trial = False
        return first

    def retry(self, model: str, now: float) -> None:
        """A trial is due: something was done about `model`. Whether it helped, only an answer tells."""
        case = self._cases.get(model)
        if case is not None:
            case.until = now

    def answered(self, model: str) -> bool:
        """A call was answered; whether `model` had been avoided until now."""
        case = self._cases.pop(model, None)
        return case is not None and case.times > 0

    def avoided(self, model: str, now: float) -> bool:
        """Whether another endpoint should be asked for `model`."""
        case = self._cases.get(model)
        return case is not None and case.times > 0 and now < case.until

    def reasons(self, now: float) -> dict[str, str]:
        """Every model that is avoided, with why."""
        return {
            model: f"{case.failures} failures in a row, the last: {case.reason}"
            for model, case in self._cases.items()
            if case.times and now < case.until
        }

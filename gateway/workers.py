"""Several workers behind one set of ports: `share` divides a policy between them, `supervise` keeps them running.

Theory of operation. The supervisor has no event loop, no thread and none of the servers' libraries, so that nothing
stands in the way of a fork at any time. It holds every listener's port by a socket that is bound with SO_REUSEPORT and
does not listen: the port is known (port 0 too) and nobody else's, and the kernel shares connections out among the
workers' own listening sockets, which join it. All signals are blocked and taken one after the other by `sigtimedwait`,
so that none comes at a bad moment.

A worker that ends is started again, the later the more often it ends soon after its start; one that has never been up
in its first life ends the command, with its reason. A fork that fails is an end like any other. A new life begins with
what the policy file says then; a policy that was posted to the admin port is not in it (GET /policy shows the versions
in force of all workers). Each worker holds the read end of a pipe whose other end only the supervisor has: it drains
once that end is gone, however that came about.

Slots and queues are divided, because batching happens within a worker: n workers have n queues, and smaller batches.
"""

from __future__ import annotations

import logging
import math
import os
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from gateway.sockets import bound
from policies import Policy
from policies.spec import Address, Backend, Listen

_log = logging.getLogger("headrace.workers")
# A worker drains for 25 s, then closes what is open; Kubernetes kills 30 s after SIGTERM.
_STOP_SECONDS = 30.0
# A worker that lived as long did not end by how it starts.
_STEADY_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
# What a worker writes once its ports are open; anything else is why they are not.
_UP = b"+"
_CANNOT_START = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What a process knows of itself: the worker `index` of `count`. Alone, it needs none of the rest.

    `folder` has the workers' Unix sockets, `listen` real ports; `lifeline` ends when the supervisor does; `up` tells it
    that the ports are open.
    """

    index: int = 0
    count: int = 1
    folder: Path = Path()
    listen: Listen = field(default_factory=Listen)
    lifeline: int = -1
    up: Callable[[], None] = lambda: None

    def socket_of(self, index: int) -> Path:
        """Where the worker `index` answers what worker 0 asks."""
        return self.folder / f"{index}.sock"


ALONE = Worker()


def share(policy: Policy, index: int, count: int) -> Policy:
    """What of `policy` the worker `index` of `count` puts in force; remainders go to the lower numbers.

    The parts sum to the whole, except where that would leave a worker without a slot, or with a queue that holds no
    full batch. Equal policies have equal shares.
    """
    if count == 1:
        return policy
    part = partial(_part, index=index, count=count)

    def backend(whole: Backend) -> Backend:
        batch = whole.batch
        if batch is None:
            return whole
        rows = max(batch.max_rows, part(batch.queue_rows))
        return replace(whole, batch=replace(batch, slots=part(batch.slots), queue_rows=rows))

    return replace(
        policy,
        backends={name: backend(whole) for name, whole in policy.backends.items()},
        limits=replace(policy.limits, in_flight=part(policy.limits.in_flight)),
        telemetry=replace(policy.telemetry, traces_per_second=policy.telemetry.traces_per_second / count),
    )


def _part(whole: int, index: int, count: int) -> int:
    return max(1, whole // count + (index < whole % count))


def scarce(policy: Policy, count: int) -> set[str]:
    """The backends with fewer slots than workers: together these run more batches than the policy says."""
    return {name for name, backend in policy.backends.items() if backend.batch and backend.batch.slots < count}


def reserve(listen: Listen, held: ExitStack) -> Listen:
    """The same listeners with real ports, which are ours as long as `held` is open.

    Raises OSError, naming the listener and its address, where one is taken.
    """
    real: dict[str, Any] = {}
    for name in (each.name for each in fields(listen)):
        address = getattr(listen, name)
        if not isinstance(address, Address):
            continue  # off, or not an address at all
        try:
            # Alone first: another gateway's workers would let us join them, and take half of our callers.
            with bound(address) as alone:
                real[name] = replace(address, port=alone.getsockname()[1])
            held.enter_context(bound(real[name], shared=True))
        except OSError as error:
            raise OSError(error.errno, f"listener '{name}': {error.strerror}") from None
    return replace(listen, **real)


def supervise(
    count: int, listen: Listen, serve: Callable[[Worker], None], *, rereads: bool, now: Callable[[], float]
) -> int:
    """Runs `serve` in `count` processes until SIGTERM or SIGINT; 0 where all of them drained in time, else 1.

    `rereads` says whether SIGHUP means something to the workers; else it ends the supervisor, as it would any process.
    Raises OSError where a port is taken, or where a worker cannot start in its first life. Signals stay blocked: the
    process is to end.
    """
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD} | ({signal.SIGHUP} if rereads else set())
    with ExitStack() as held:
        listen = reserve(listen, held)
        folder = Path(tempfile.mkdtemp(prefix="headrace-"))
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        # For good: one that comes in the last moment must not change the exit code.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        return _Supervisor(count, Worker(count=count, folder=folder, listen=listen), serve, signals, before, now).run()


@dataclass(slots=True, eq=False)
class _Place:
    """One worker's place: the process that fills it (`pid` 0: none), or when it is filled again."""

    index: int
    pid: int = 0
    said: int = -1  # the pipe by which the process says that it is up, or why not
    since: float = 0.0
    due: float = -math.inf
    pauses: int = 0
    lives: int = 0


class _Supervisor:
    def __init__(
        self,
        count: int,
        worker: Worker,
        serve: Callable[[Worker], None],
        signals: set[signal.Signals],
        mask: set[int] | set[signal.Signals],
        now: Callable[[], float],
    ) -> None:
        self._places = [_Place(index) for index in range(count)]
        self._worker = worker
        self._serve = serve
        self._signals = signals
        self._mask = mask
        self._now = now
        self._lifeline = os.pipe()
        self._until = math.inf  # when what still runs is killed; infinite while nobody wants an end
        self._clean = True
        self._failure = ""

    def run(self) -> int:
        while True:
            self._fill()
            if self._until < math.inf and not any(place.pid for place in self._places):
                break
            number = self._next_signal()
            if number in (signal.SIGTERM, signal.SIGINT):
                self._end()
            elif number == signal.SIGHUP:
                self._send(signal.SIGHUP)
            self._reap()
            if self._now() >= self._until and any(place.pid for place in self._places):
                self._clean = False
                self._send(signal.SIGKILL)
        if self._failure:
            raise OSError(self._failure)
        return 0 if self._clean else 1

    def _next_signal(self) -> int | None:
        """The next signal, or None once it is time for something else."""
        ending = self._until < math.inf
        next_at = self._until if ending else min((p.due for p in self._places if not p.pid), default=math.inf)
        if next_at == math.inf:
            return signal.sigwait(self._signals)
        # After SIGKILL only the ends of processes are waited for; a second is no busy loop.
        left = next_at - self._now()
        told = signal.sigtimedwait(self._signals, left if left > 0 else 1.0 if ending else 0.0)
        return told.si_signo if told else None

    def _fill(self) -> None:
        for place in self._places:
            if self._until == math.inf and not place.pid and place.due <= self._now():
                self._start(place)

    def _end(self) -> None:
        if self._until == math.inf:
            self._until = self._now() + _STOP_SECONDS
            self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        for place in self._places:
            if place.pid:  # not waited for yet, so its number is nobody else's
                os.kill(place.pid, number)

    def _start(self, place: _Place) -> None:
        place.since, place.lives = self._now(), place.lives + 1
        try:
            with ExitStack() as pipe:
                for end in (ends := os.pipe()):
                    pipe.callback(os.close, end)
                place.pid = os.fork()
                pipe.pop_all()
        except OSError as error:  # no memory, or no process more: for now, as the others still serve
            self._lost(place, 0, "could not be started", f"no process for a worker: {error.strerror}", was_up=False)
            return
        place.said, saying = ends
        if place.pid == 0:
            self._live(place, saying)
        os.close(saying)
        _log.info("worker started", extra={"fields": {"worker": place.index, "pid": place.pid}})

    def _live(self, place: _Place, saying: int) -> None:
        """The whole life of a worker's process, which nothing of the supervisor's outlives."""
        code = 1
        try:
            os.close(self._lifeline[1])
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for who interrupts an import
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read again
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

            def up() -> None:
                with suppress(BrokenPipeError):  # nobody listens any more: `lifeline` says so
                    os.write(saying, _UP)

            worker = replace(self._worker, index=place.index, lifeline=self._lifeline[0], up=up)
            self._serve(worker)
            if select.select([worker.lifeline], [], [], 0)[0]:  # an orphan: nobody else clears up
                shutil.rmtree(worker.folder, ignore_errors=True)
            code = 0
        except OSError as error:
            os.write(saying, (error.strerror or str(error)).encode())
            code = _CANNOT_START
        except BaseException:
            _log.exception("worker failed")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        for place in self._places:
            if place.pid and (ended := os.waitpid(place.pid, os.WNOHANG))[0]:
                self._ended(place, os.waitstatus_to_exitcode(ended[1]))

    def _ended(self, place: _Place, code: int) -> None:
        said = os.read(place.said, 4096)
        os.close(place.said)
        pid, place.pid = place.pid, 0
        was_up = said.startswith(_UP)
        reason = said.removeprefix(_UP).decode(errors="replace")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        if self._until < math.inf:
            # One that was not up yet had nothing to drain. A terminal's SIGINT reaches the workers by itself.
            self._clean &= code == 0 or (not was_up and -code in (signal.SIGTERM, signal.SIGINT))
            if code:
                _log.warning(f"worker ended {how}", extra={"fields": {"worker": place.index, "pid": pid}})
            return
        self._lost(place, pid, f"ended {how}", reason, was_up)

    def _lost(self, place: _Place, pid: int, how: str, reason: str, was_up: bool) -> None:
        """What follows from the end of a worker that was to live: another one, or in its first life the end of all."""
        if not was_up and place.lives == 1:
            self._failure, self._clean = reason, False
            _log.error(f"worker {how} before it was up", extra={"fields": {"worker": place.index, "pid": pid}})
            self._end()
            return
        now = self._now()
        place.pauses = 0 if now - place.since >= _STEADY_SECONDS else place.pauses + 1
        pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** (place.pauses - 1)) if place.pauses else 0.0
        place.due = now + pause
        fields = {"worker": place.index, "pid": pid, "again_in_s": pause, **({"error": reason} if reason else {})}
        _log.error(f"worker {how}", extra={"fields": fields})

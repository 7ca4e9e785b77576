"""Runs one server process, and sees to it that nothing of it outlives the process that asked for it.

    python keeper.py PARENT_PID SHM_PREFIX GRACE_SECONDS COMMAND...

It ends the server (SIGTERM, then SIGKILL after the grace), then what the server left: orphaned children, which fall to
this process as their subreaper, and files under /dev/shm that begin with the prefix. It does so on SIGTERM or SIGINT,
when the server ends by itself, and when the parent is gone, however it went. Should the keeper itself be killed, the
kernel ends the server (parent-death signal). The exit status is the server's. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WOKEN_BY = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
# How often to look whether the parent is still there; a parent's death sends no signal that threads could not mislead.
_LOOK_S = 0.25

_libc = ctypes.CDLL(None, use_errno=True)


def children(pid: int) -> list[int]:
    """Living children of a process, by /proc; empty when it is gone."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in file.read_text().split()]
    return found


def _before_exec() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WOKEN_BY)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(server: subprocess.Popen[bytes], grace: float) -> int:
    server.terminate()
    try:
        return server.wait(grace)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def _end_orphans() -> None:
    """Kills and reaps what is left below this process."""
    while left := children(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def main(parent: int, prefix: str, grace: float, command: list[str]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, _WOKEN_BY)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(command, preexec_fn=_before_exec)
    while server.poll() is None and os.getppid() == parent:
        woken = signal.sigtimedwait(_WOKEN_BY, _LOOK_S)
        if woken is not None and woken.si_signo != signal.SIGCHLD:
            break
    status = _end(server, grace) if server.poll() is None else server.returncode
    _end_orphans()
    for file in Path("/dev/shm").glob(prefix + "*"):  # noqa: S108  where Linux has it, no temporary folder
        file.unlink(missing_ok=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]))

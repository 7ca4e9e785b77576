"""Processes of a benchmark: started in groups of their own, watched by /proc, ended with the block that began them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Python with gRPC starts in about a second; a busy machine may take ten times that.
_START_SECONDS = 30
_END_SECONDS = 10

_libc = ctypes.CDLL(None, use_errno=True)


class Broken(Exception):
    """A process did not start, ended early, or answered wrongly; the message says which, and why."""


@dataclass(frozen=True, slots=True)
class Process:
    """A running process and all below it."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    def cpu_seconds(self) -> dict[int, float]:
        """CPU time, user and system, of every process of the tree so far, by process."""
        try:
            return {pid: _cpu_seconds(pid) for pid in _tree(self.popen.pid)}
        except OSError:
            raise self.broken("ended too early") from None

    def broken(self, what: str) -> Broken:
        """What went wrong, with the last line that the process wrote."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return Broken(f"{self.name}: {what}; it said: {lines[-1][:500] if lines else 'nothing'}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(name: str, command: Sequence[str], ports: Sequence[int], folder: Path) -> Iterator[Process]:
    """The process, once all its ports take connections. It is ended with the block, or when this process dies.

    What it writes goes to `NAME.log` in the folder. Raises Broken where it does not come up.
    """
    log = folder / f"{name}.log"
    with log.open("wb") as sink:
        popen = start(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    process = Process(name, popen, log)
    try:
        for port in ports:
            _listening(process, port)
        yield process
    finally:
        end(popen)


def start(command: Sequence[str], *, stdin: int, stdout: object, stderr: object) -> subprocess.Popen[bytes]:
    """The command in a session of its own: a Ctrl-C is ours alone, and what is left of it can be ended at once."""
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        command, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True, preexec_fn=_before_exec
    )


def end(popen: subprocess.Popen[bytes]) -> None:
    """Ends the process, and then whatever is left of its group."""
    if popen.poll() is None:
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(_END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()


def _before_exec() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _listening(process: Process, port: int) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if process.popen.poll() is not None:
            raise process.broken(f"ended with {process.popen.returncode} instead of listening")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise process.broken(f"port {port} takes no connection after {_START_SECONDS} s")


def _tree(pid: int) -> list[int]:
    found = [pid]
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended
            for child in file.read_text().split():
                found += _tree(int(child))
    return found


def _cpu_seconds(pid: int) -> float:
    """utime and stime of all threads, ended ones too; from the clock behind /proc, which counts in ticks of 10 ms."""
    clock = ctypes.c_int()
    if (error := _libc.clock_getcpuclockid(pid, ctypes.byref(clock))) != 0:
        raise OSError(error, os.strerror(error))
    return time.clock_gettime(clock.value)

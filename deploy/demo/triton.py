"""Starts a real tritonserver on 127.0.0.1 from a virtual environment of its own, and ends it without a trace.

The server is the binary inside the nvidia-pytriton wheel, started directly; PyTriton's Python API is not used (it adds
thirteen times the latency and hides features). `ensure_venv` prepares the environment once; `Triton` is one server:

    with Triton(ensure_venv(venv), repository, log=log, models=["echo"]) as triton:
        print(triton.http)

The server runs under a keeper (keeper.py), which ends it also when this process is killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console

HERE = Path(__file__).resolve().parent
if not __package__:  # run or imported as a plain script
    sys.path.insert(0, str(HERE.parents[1]))

from deploy.demo.keeper import children  # noqa: E402
from deploy.demo.lock import only_one  # noqa: E402

REQUIREMENTS = HERE / "requirements-triton.txt"
# What the server gives its open connections and models to end in, before it ends without them. A client's kept-alive
# connection alone uses all of it (Triton's own default is 30 s).
DRAIN_S = 3
# When a server that is asked to end is taken to be stuck.
GRACE_S = 10.0
# Two Pythons can start on a loaded machine with a cold disk cache; a warm start takes one or two seconds.
START_S = 60.0
_STAMP = "requirements-triton.sha256"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ServerFailed(RuntimeError):
    """The server ended or did not become ready; the message ends with the last lines of its log."""


def ensure_venv(venv: Path) -> Path:
    """Creates the server's virtual environment where it is missing or its requirements have changed; returns it.

    It is made with the running Python, or with another one on the path where that is newer than numpy 1 allows, and
    takes about ten seconds and 350 MB. Raises ServerFailed where that fails.
    """
    venv = venv.absolute()
    with only_one(venv):
        wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
        stamp = venv / _STAMP
        if not stamp.is_file() or stamp.read_text() != wanted:
            _install(venv)
            stamp.write_text(wanted)
    return venv


def _interpreter() -> str:
    """A Python 3.11 or 3.12."""
    if sys.version_info < (3, 13):
        return sys.executable
    found = shutil.which("python3.12") or shutil.which("python3.11")
    if found is None:
        raise ServerFailed("the Triton demo needs Python 3.11 or 3.12 (numpy below 2), and neither is on the path")
    return found


def _install(venv: Path) -> None:
    with Console(stderr=True).status(f"Installing tritonserver into {venv} (once)"):
        if venv.exists():
            shutil.rmtree(venv)
        python = str(venv / "bin/python")
        for command in (
            [_interpreter(), "-m", "venv", str(venv)],
            [python, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "-r", str(REQUIREMENTS)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ServerFailed(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
        _backend(venv)


def _packages(venv: Path) -> Path:
    return next((venv / "lib").glob("python3.*")) / "site-packages"


def _backend(venv: Path) -> None:
    """Lays out the python backend with the stub of the environment's own Python version."""
    packages = _packages(venv)
    server = packages / "pytriton/tritonserver"
    target = venv / "triton-backends/python"
    target.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copy(server / "backends/python" / name, target)
    version = packages.parent.name.removeprefix("python")
    stub = Path(shutil.copy(server / "python_backend_stubs" / version / "triton_python_backend_stub", target))
    for program in (stub, server / "bin/tritonserver"):
        program.chmod(0o755)


def _ports(http: int, grpc: int | None, metrics: int | None) -> list[int]:
    """The three ports, free ones in place of zeros."""
    wanted = [http] + [
        given if given is not None else http and http + offset for offset, given in ((1, grpc), (2, metrics))
    ]
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in wanted]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [port or int(each.getsockname()[1]) for port, each in zip(wanted, sockets, strict=True)]


def tree_pids(pid: int) -> list[int]:
    """A process and all below it, parents first; empty when it is gone."""
    found: list[int] = []
    ahead = [pid] if Path(f"/proc/{pid}").exists() else []
    while ahead:
        found.append(ahead.pop(0))
        ahead += children(found[-1])
    return found


def tree_cpu_seconds(pid: int) -> float:
    """CPU time, user and system, of a process and all below it, those that have ended and been reaped included."""
    return sum(sum(_ticks(each)) for each in tree_pids(pid)) / _TICKS_PER_S


class Triton:
    """One tritonserver: ready on entering the context, ended on leaving it; or by `start`, `wait_ready` and `stop`.

    A port of 0 is a free one; where `http` is given, the other two are by default the next ones. `models` loads just
    those (explicit model control, which also allows load and unload by request); `otlp` is the full URL that its
    OpenTelemetry spans go to; `more` are further command-line arguments.
    """

    def __init__(
        self,
        venv: Path,
        repository: Path,
        *,
        log: Path,
        models: Sequence[str] | None = None,
        http: int = 0,
        grpc: int | None = None,
        metrics: int | None = None,
        otlp: str | None = None,
        more: Sequence[str] = (),
    ) -> None:
        self._repository = repository.absolute()
        self._venv = venv.absolute()
        self.log = log.absolute()
        self._models = models
        self.http_port, self.grpc_port, self.metrics_port = _ports(http, grpc, metrics)
        self._otlp = otlp
        self._more = more
        self._prefix = f"headrace-{secrets.token_hex(6)}-"
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def metrics(self) -> str:
        return f"127.0.0.1:{self.metrics_port}"

    def start(self) -> None:
        """Starts the server and returns at once; `wait_ready` tells when it answers."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(HERE / "keeper.py"), str(os.getpid()), self._prefix, str(GRACE_S)]
        with self.log.open("wb") as log:
            # A session of its own: Ctrl-C in a terminal reaches this process, which decides; not the server beside it.
            self._keeper = subprocess.Popen(
                command + self._command(),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, timeout: float = START_S) -> None:
        """Returns once server and models are ready; raises ServerFailed when it dies or the time is over."""
        give_up = time.monotonic() + timeout
        while self._keeper is not None and self._keeper.poll() is None:
            if self._ready():
                return
            if time.monotonic() > give_up:
                raise ServerFailed(f"tritonserver is not ready after {timeout:g} s; {self._tail()}")
            time.sleep(0.05)
        raise ServerFailed(f"tritonserver ended while starting; {self._tail()}")

    def stop(self) -> None:
        """Ends the server; when it returns no process and no shared-memory file of it is left. Harmless when ended."""
        if self._keeper is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._keeper.send_signal(signal.SIGTERM)
        self._keeper.wait()
        self._keeper = None

    def pids(self) -> list[int]:
        """The server, then its stubs; empty when it has ended."""
        return [] if self._keeper is None else tree_pids(self._keeper.pid)[1:]

    def cpu_seconds(self) -> float:
        """CPU time, user and system, of the server and its stubs since start, those that ended meanwhile included.

        The keeper's own, some 30 ms a minute, is in it too. Zero when the server is not running.
        """
        return 0.0 if self._keeper is None else tree_cpu_seconds(self._keeper.pid)

    def __enter__(self) -> Triton:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self) -> list[str]:
        server = _packages(self._venv) / "pytriton/tritonserver"
        # The rate counts requests without a trace context; one that carries a sampled context is always traced.
        trace = ["mode=opentelemetry", f"opentelemetry,url={self._otlp}", "rate=1", "level=TIMESTAMPS"]
        return [
            str(server / "bin/tritonserver"),
            f"--model-repository={self._repository}",
            f"--backend-directory={self._venv / 'triton-backends'}",
            f"--cache-directory={server / 'caches'}",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
            "--http-address=127.0.0.1",
            f"--http-port={self.http_port}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={self.grpc_port}",
            "--metrics-address=127.0.0.1",
            f"--metrics-port={self.metrics_port}",
            "--allow-gpu-metrics=false",
            f"--exit-timeout-secs={DRAIN_S}",
            # The configs are complete; asking the models for theirs doubles the time to start.
            "--disable-auto-complete-config",
            *(["--model-control-mode=explicit"] if self._models is not None else []),
            *(f"--load-model={model}" for model in self._models or ()),
            *(f"--trace-config={setting}" for setting in (trace if self._otlp is not None else ())),
            *self._more,
        ]

    def _environment(self) -> dict[str, str]:
        packages = _packages(self._venv)
        # The base interpreter's lib folder, through the environment's link to it: the stub needs its libpython.
        lib = (self._venv / "bin/python").resolve().parents[1] / "lib"
        libraries = [str(packages / "nvidia_pytriton.libs"), str(lib)]
        return os.environ | {
            # The stub takes its site-packages from the first python3 on the path, and only from there.
            "PATH": f"{self._venv / 'bin'}:{os.environ.get('PATH', '')}",
            "LD_LIBRARY_PATH": ":".join(libraries),
            # One thread per instance: instances are what runs side by side.
            "OMP_NUM_THREADS": "1",
        }

    def _ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=1)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()

    def _tail(self, lines: int = 20) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return f"the end of {self.log}:\n" + "\n".join(text[-lines:])


def _ticks(pid: int) -> tuple[int, int, int, int]:
    """utime, stime and those of reaped children, in clock ticks; zeros when the process is gone."""
    try:
        # The command's name, in parentheses, may hold spaces: count from behind it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, 0, 0, 0
    return int(fields[11]), int(fields[12]), int(fields[13]), int(fields[14])

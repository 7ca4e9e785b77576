"""The command `headrace`."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn
from urllib.parse import urlsplit

import typer

from gateway.tools import policy_commands
from gateway.tools.asking import ADMIN, Admin, ask
from gateway.tools.bench import command as bench_command
from policies import Policy, PolicyError, Problem, implicit, load
from policies.address import grpc_target, http_url, listener
from policies.files import Files
from policies.problem import Wrong

app = typer.Typer(
    name="headrace",
    help="Inference gateway and cascade router: a drop-in HTTP/gRPC proxy in front of model servers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
trace_app = typer.Typer(help="Traces that a running gateway recorded.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")
app.add_typer(policy_commands.app, name="policy")
app.add_typer(bench_command.app, name="bench")

# More than the cores of large machines, far below where the slots of any policy would go round.
_MAX_WORKERS = 256

Listener = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Listen here instead; 'off' for not at all.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def _command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Inference gateway and cascade router: a drop-in HTTP/gRPC proxy in front of model servers."""


@app.command()
def serve(
    policy_file: Annotated[Path | None, typer.Argument(metavar="[POLICY]", help="The policy, a YAML file.")] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="URL", help="Without a policy: proxy every model of this server.")
    ] = None,
    backend_grpc: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Its gRPC address; guessed as the next port if not given.")
    ] = None,
    http: Listener = None,
    grpc: Listener = None,
    metrics: Listener = None,
    admin: Listener = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="json or text; default: text on a terminal.")] = "",
    access_log: Annotated[bool | None, typer.Option(help="One line a request; overrides the policy.")] = None,
    workers: Annotated[
        int, typer.Option(metavar="N", help="Processes that share the ports, and the policy's slots and limits.")
    ] = 1,
) -> None:
    """Serve a policy, or proxy one server."""
    if log_level not in ("debug", "info", "warning", "error"):
        _die(f"--log-level: expected debug, info, warning or error, got '{log_level}'")
    if log_format not in ("", "json", "text"):
        _die(f"--log-format: expected json or text, got '{log_format}'")
    if not 1 <= workers <= _MAX_WORKERS:
        _die(f"--workers: expected 1 to {_MAX_WORKERS}, got {workers}")
    if workers > 1 and sys.platform != "linux":
        _die("--workers: expected 1, or Linux, where the system shares connections out among processes")
    if (policy_file is None) == (backend is None):
        _die("serve: expected either a policy file or --backend URL")
    flags = {"http": http, "grpc": grpc, "metrics": metrics, "admin": admin}
    tentative, files = False, Files()
    try:
        if backend is not None:
            guess = None if backend_grpc else _next_port(backend)
            tentative = guess is not None
            policy = implicit(backend, backend_grpc or guess)
        else:
            assert policy_file is not None
            policy = load(policy_file, os.environ, files)
    except PolicyError as error:
        _die(str(error))
    declared = policy.listen
    listen = _listening(policy, flags).listen

    def overruled(policy: Policy) -> Policy:
        """A policy as the flags of this command have it."""
        logs = policy.telemetry.access_log if access_log is None else access_log
        return replace(policy, listen=listen, telemetry=replace(policy.telemetry, access_log=logs))

    def again() -> Policy:
        """What the file says now."""
        assert policy_file is not None
        files.seen.clear()
        fresh = load(policy_file, os.environ, files)
        if fresh.listen != declared:
            wrong = "the listeners of a running gateway cannot change"
            raise PolicyError([Problem(str(policy_file), 0, "listen", wrong, "restart it, or leave them as they were")])
        return overruled(fresh)

    from gateway.log import configure
    from gateway.workers import ALONE, Worker, supervise

    form: Literal["json", "text"] = (
        "json" if log_format == "json" or (not log_format and not sys.stderr.isatty()) else "text"
    )
    configure(log_level, form)

    def work(worker: Worker) -> None:
        """The life of the only process, or of one worker of several."""
        nonlocal listen
        now_said = policy
        if worker.count > 1:
            configure(log_level, form, {"worker": worker.index})
            listen = worker.listen
            if policy_file:
                # It may be another life, long after the command began. Whoever runs has said what is wrong with it.
                with suppress(PolicyError):
                    now_said = again()
        # Servers are imported by the process that serves: `check` answers at once, and nothing of them is forked.
        from gateway.app import Source, run

        source = Source(again, files.changed, policy_file.parent) if policy_file else None
        run(overruled(now_said), source, overruled=overruled, tentative_grpc=tentative, worker=worker)

    code = 0
    try:
        if workers == 1:
            work(ALONE)
        else:
            now = time.monotonic  # noqa: TID251 - the supervisor's own: its process has no gateway/app.py
            code = supervise(workers, listen, work, rereads=policy_file is not None, now=now)
    except OSError as error:
        reason = error.strerror or str(error)
        _die(f"{reason}; see the flags --http, --grpc, --metrics, --admin" if "listener" in reason else reason)
    if code:
        raise typer.Exit(code)


@app.command()
def check(policy_file: Annotated[Path, typer.Argument(metavar="POLICY", help="The policy, a YAML file.")]) -> None:
    """Check a policy without a server: exit code 0 where it is usable, 1 and every problem where not."""
    try:
        policy = load(policy_file, os.environ)
    except PolicyError as error:
        _die(str(error), code=1)
    tiers = sum(len(arm.tiers) for route in policy.routes.values() for arm in route.arms)
    typer.echo(
        f"{policy_file}: good (version {policy.version}: {len(policy.routes)} routes, {tiers} tiers, "
        f"{len(policy.backends)} backends{', proxy ' + policy.proxy if policy.proxy else ''})"
    )


@app.command()
def explain(
    policy_file: Annotated[Path, typer.Argument(metavar="POLICY", help="The policy, a YAML file.")],
    live: Annotated[
        bool, typer.Option("--live", help="Ask its servers, too; exit code 1 where they and the policy disagree.")
    ] = False,
) -> None:
    """Print every value that a policy puts in effect, and the line that it comes from."""
    from gateway.tools.explain import tree
    from policies.explain import explain as explained

    try:
        root = explained(Files().text(policy_file, pipe=True), str(policy_file), os.environ)
        policy = load(policy_file, os.environ) if live else None
    except PolicyError as error:
        _die(str(error), code=1)
    _print_wide(tree(root))
    if policy is not None:
        _explain_live(policy)


def _explain_live(policy: Policy) -> None:
    from rich.console import Console

    from gateway.tools.live import ask as ask_all
    from gateway.tools.live import findings, servers
    from gateway.tools.live_tree import live_tree

    with Console(stderr=True).status(f"asking {servers(policy)} servers", spinner="line"):
        found = ask_all(policy)
    _print_wide(live_tree(policy, found))
    wrong = list(findings(policy, found))
    for line in wrong:
        typer.echo(f"finding: {line}")
    typer.echo(f"findings: {len(wrong) or 'none'}")
    if wrong:
        raise typer.Exit(1)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a policy, by which editors complete and check it."""
    from policies.json_schema import json_schema

    typer.echo(json_schema(), nl=False)


@app.command()
def init(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The HTTP address of a Triton or another KServe v2 server.")
    ],
    grpc: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Its gRPC address; guessed as the next port if not given.")
    ] = None,
) -> None:
    """Print a policy for the models of a live server: headrace init URL > policy.yaml."""
    from rich.console import Console

    from gateway.tools.init import policy_text
    from gateway.tools.survey import Unusable, survey

    try:
        http = http_url(url)
        guess = grpc_target(grpc) if grpc else _next_port(http)
    except Wrong as error:
        _die(f"init: {error}")
    try:
        with Console(stderr=True).status(f"asking {http}", spinner="line") as status:
            found = survey(http, guess, status.update)
        text = policy_text(found)
    except Unusable as error:
        _die(f"init: {error}", code=1)
    typer.echo(text, nl=False)
    if guess and not found.grpc:
        typer.echo(f"init: gRPC does not answer at {guess}: left out{'' if grpc else '; see --grpc'}", err=True)
    for name, reason in found.skipped:
        typer.echo(f"init: the model {name!r} is left out: {reason}", err=True)


@trace_app.command("last")
def trace_last(admin: Admin = ADMIN) -> None:
    """Print the last recorded request as an indented tree with times."""
    _show_trace(admin, "last")


@trace_app.command("show")
def trace_show(trace_id: str, admin: Admin = ADMIN) -> None:
    """Print one trace by its id (from the access log or GET /traces), or by a whole `traceparent`."""
    found = re.fullmatch(r"(?:[0-9a-f]{2}-)?([0-9a-f]{32})(?:-[0-9a-f]{16}-[0-9a-f]{2})?", trace_id.strip().lower())
    if found is None:
        _die(f"trace show: expected 32 hexadecimal digits, or a traceparent, got {trace_id[:60]!r}")
    _show_trace(admin, found[1])


def _show_trace(admin: str, trace_id: str) -> None:
    from gateway.tools.trace_tree import tree

    _print_wide(tree(ask("GET", admin, f"/traces/{trace_id}")))


def _print_wide(renderable: Any) -> None:
    """Wider than a narrow terminal: a line that wraps says more than one that is cut."""
    from rich.console import Console

    Console(width=max(Console().width, 200)).print(renderable)


def _next_port(url: str) -> str | None:
    """Where gRPC is on a server whose HTTP is at `url`, by Triton's habit; None where the URL does not say."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme != "http" or not parts.hostname or not port or port > 65534:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port + 1}"


def _listening(policy: Policy, flags: dict[str, str | None]) -> Policy:
    listen = policy.listen
    for name, text in flags.items():
        if text is not None:
            try:
                host = "127.0.0.1" if name == "admin" else "0.0.0.0"  # noqa: S104 - as the policy's defaults
                at: Any = listener(text, host)
                listen = replace(listen, **{name: at})
            except Wrong as error:
                _die(f"--{name}: {error.wrong or f'got {text[:60]!r}'}; expected host:port, a port, or off")
    taken: dict[str, str] = {}
    for name in flags:
        address = getattr(listen, name)
        if address is not None and address.port:
            if str(address) in taken:
                _die(f"--{name}: {address} is taken by --{taken[str(address)]}; give one of them another port")
            taken[str(address)] = name
    return replace(policy, listen=listen)


def _die(message: str, code: int = 2) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)


def main() -> None:
    app()

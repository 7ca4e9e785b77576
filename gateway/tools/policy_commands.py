"""`headrace policy`: another policy for a running gateway, through its admin port."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.tools.asking import ADMIN, Admin, ask, die
from policies import PolicyError, load, parse
from policies.files import Files

app = typer.Typer(help="Another policy for a running gateway.", no_args_is_help=True)

PolicyFile = Annotated[Path, typer.Argument(metavar="POLICY", help="The policy, a YAML file.")]


@app.command()
def apply(
    policy_file: PolicyFile,
    admin: Admin = ADMIN,
    force: Annotated[bool, typer.Option("--force", help="Although new endpoints are not ready.")] = False,
) -> None:
    """Put a policy in force, until the gateway's own file says something new."""
    try:
        text = Files().text(policy_file, pipe=True)
        parse(text, str(policy_file), os.environ)
    except PolicyError as error:
        die(str(error))
    answer = ask(
        "POST",
        admin,
        "/policy",
        content=text.encode(),
        params={"file": str(policy_file.absolute()), "force": force},
    )
    typer.echo(f"in force: {answer['version']}")


@app.command()
def rollback(admin: Admin = ADMIN) -> None:
    """Put the policy in force that was before this one."""
    typer.echo(f"in force: {ask('POST', admin, '/policy/rollback')['version']}")


@app.command()
def diff(policy_file: PolicyFile, admin: Admin = ADMIN) -> None:
    """Compare the policy in force with a file: exit code 0 where they say the same, 1 where not."""
    from gateway.admin import plain

    # The listeners are the process's, the versions differ by definition, and the rest is what only a gateway tells.
    others = ("listen", "version", "refused", "history", "workers")
    running, wanted = (
        _flat({key: value for key, value in document.items() if key not in others})
        for document in (ask("GET", admin, "/policy"), plain(_loaded(policy_file)))
    )
    changes = 0
    for path in sorted(running.keys() | wanted.keys()):
        if running.get(path) == wanted.get(path):
            continue
        changes += 1
        if path in running:
            typer.echo(f"- {path}: {running[path]}")
        if path in wanted:
            typer.echo(f"+ {path}: {wanted[path]}")
    if changes:
        raise typer.Exit(1)
    typer.echo("no difference")


def _loaded(policy_file: Path) -> Any:
    try:
        return load(policy_file, os.environ)
    except PolicyError as error:
        die(str(error))


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """A document's leaves by path: `routes.intent.tiers[0].backend`. Empty mappings and lists are leaves."""
    if isinstance(value, dict) and value:
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}" if path else key).items()}
    if isinstance(value, list) and value:
        return {k: v for i, item in enumerate(value) for k, v in _flat(item, f"{path}[{i}]").items()}
    return {path: value}

"""Asking a running gateway, through its admin port, from the command line."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import typer

Admin = Annotated[str, typer.Option(metavar="URL", help="The gateway's admin address.")]
ADMIN = "http://127.0.0.1:8003"
# New endpoints of a policy are given two seconds to say that they are ready.
_PATIENCE_SECONDS = 30


def ask(method: str, admin: str, path: str, **more: Any) -> Any:
    """The JSON that the admin port answers with; ends the command with what is wrong where it is no success."""
    import httpx  # as long to import as the rest of a command that asks nobody

    try:
        response = httpx.request(method, admin.rstrip("/") + path, timeout=_PATIENCE_SECONDS, **more)
        document = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        die(f"no admin port answers at {admin}: {error}; see --admin")
    if response.status_code != 200:
        die("\n".join(document.get("problems") or [f"{admin}: {document.get('error', response.status_code)}"]))
    return document


def die(message: str) -> NoReturn:
    """Ends the command with exit code 1 and `message` on standard error."""
    typer.echo(message, err=True)
    raise typer.Exit(1)

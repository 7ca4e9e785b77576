"""Asking a running gateway, through its admin port, from the command line."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import typer

from gateway.guard import YAML

Admin = Annotated[str, typer.Option(metavar="URL", help="The gateway's admin address.")]
ADMIN = "http://127.0.0.1:8003"
_PATIENCE_SECONDS = 30.0
# A change may load models. Of several workers each is given 130 s for it, and as long to undo it (gateway/joined.py).
_CHANGE_SECONDS = 300.0


def ask(method: str, admin: str, path: str, **more: Any) -> Any:
    """The JSON that the admin port answers with; ends the command with what is wrong where it is no success."""
    import httpx  # as long to import as the rest of a command that asks nobody

    seconds, headers = _PATIENCE_SECONDS, {}
    if method != "GET":
        seconds, headers = _CHANGE_SECONDS, {"content-type": YAML}
    try:
        limits = httpx.Timeout(seconds, connect=_PATIENCE_SECONDS)
        response = httpx.request(method, admin.rstrip("/") + path, headers=headers, timeout=limits, **more)
        document = response.json()
    except httpx.ReadTimeout:
        later = "" if method == "GET" else "; it may do so yet: GET /policy shows the version in force"
        die(f"{admin}: no answer within {seconds:g} s{later}")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        die(f"no admin port answers at {admin}: {error}; see --admin")
    if response.status_code != 200:
        wrong = document.get("problems") or [f"{admin}: {document.get('error', response.status_code)}"]
        die("\n".join([*wrong, *document.get("left", ())]))
    return document


def die(message: str) -> NoReturn:
    """Ends the command with exit code 1 and `message` on standard error."""
    typer.echo(message, err=True)
    raise typer.Exit(1)

"""A trace as an indented tree with times, for a terminal."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.tree import Tree

# What repeats the span's place in the tree or its name here.
_SILENT = frozenset({"headrace.model", "headrace.policy", "headrace.kind"})
_STATUS = ("http.response.status_code", "rpc.response.status_code")
_INFER = ("infer", "ModelInfer")


def tree(document: dict[str, Any]) -> Tree:
    """The tree of a document of the admin API's `/traces/{id}`.

    A call is shown by a short name (`edge http`, `triton MODEL`), and by what the conventions call it only where it is
    no inference; of their attributes the status alone.
    """
    spans = document["spans"]
    start = min((span["start_unix_ns"] for span in spans), default=0)
    root = Tree(f"trace [bold]{escape(document['trace_id'])}[/bold]")
    nodes: dict[str, Tree] = {}
    # A parent starts no later than its children, and comes first where they start together.
    for span in sorted(spans, key=lambda span: (span["start_unix_ns"], -span["duration_ms"])):
        parent = nodes.get(span["parent_id"] or "", root)
        nodes[span["span_id"]] = parent.add(_line(span, start, other=span["trace_id"] != document["trace_id"]))
    return root


def _line(span: dict[str, Any], start: int, *, other: bool) -> str:
    at_ms = (span["start_unix_ns"] - start) / 1e6
    words = " ".join(f"{escape(k)}={escape(str(v))}" for k, v in _words(span).items())
    line = f"[bold]{escape(_name(span))}[/bold]  {span['duration_ms']:.2f} ms  [dim]at {at_ms:.2f}  {words}[/dim]"
    if other:
        line += " [dim](shared batch)[/dim]"
    if span["error"] is not None:
        line += f" [red]{escape(span['error'])}[/red]"
    return line


def _name(span: dict[str, Any]) -> str:
    attributes = span["attributes"]
    if span["kind"] == "server":
        return "edge grpc" if "rpc.method" in attributes else "edge http"
    if span["kind"] == "client":
        return f"{attributes.get('headrace.kind', 'call')} {attributes.get('headrace.model', '')}".strip()
    return str(span["name"])


def _words(span: dict[str, Any]) -> dict[str, Any]:
    attributes, words = span["attributes"], {}
    called = span["kind"] in ("server", "client")
    if called and span["name"].rpartition("/")[2] not in _INFER:
        words["call"] = span["name"]
    status = next((attributes[name] for name in _STATUS if name in attributes), None)
    if span["kind"] == "server" and status is not None:
        words["status"] = status
    own = {k: v for k, v in attributes.items() if k.startswith("headrace.") and k not in _SILENT}
    return words | {k.removeprefix("headrace."): v for k, v in own.items()}

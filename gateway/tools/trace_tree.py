"""A trace as an indented tree with times, for a terminal."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.tree import Tree

# Attributes that repeat the span's place in the tree.
_SILENT = frozenset({"headrace.model", "headrace.policy", "error.type"})


def tree(document: dict[str, Any]) -> Tree:
    """The tree of a document of the admin API's `/traces/{id}`."""
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
    words = " ".join(
        f"{escape(k.removeprefix('headrace.'))}={escape(str(v))}"
        for k, v in span["attributes"].items()
        if k not in _SILENT
    )
    line = f"[bold]{escape(span['name'])}[/bold]  {span['duration_ms']:.2f} ms  [dim]at {at_ms:.2f}  {words}[/dim]"
    if other:
        line += " [dim](shared batch)[/dim]"
    if span["error"]:
        line += f" [red]{escape(span['error'])}[/red]"
    return line

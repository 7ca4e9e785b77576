"""What a policy comes to, as a tree for a terminal."""

from __future__ import annotations

from rich.text import Text
from rich.tree import Tree

from policies.explain import DEFAULT, Setting


def tree(root: Setting) -> Tree:
    """The tree of `policies.explain.explain`: each value, and behind it the line that it comes from, or `default`."""
    made = Tree(Text.assemble((root.key, "bold"), f" (version {root.value})"))
    _grow(made, root)
    return made


def _grow(branch: Tree, setting: Setting) -> None:
    for part in setting.parts:
        _grow(branch.add(_line(part)), part)


def _line(setting: Setting) -> Text:
    value = f": {setting.value}" if setting.value else ""
    written = setting.source != DEFAULT
    return Text.assemble((setting.key, "bold" if written else ""), value, (f"  {setting.source}", "dim"))

"""What a policy comes to: every value in effect, and the line that it comes from, defaults included.

A third reading of the tables, beside the values and the JSON Schema. What a key says is read again from its own node;
what is not written is looked up in the value that its section made, because some defaults depend on other keys.
Values out of the environment are shown, as they are what is asked for; secrets never are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from policies.files import Files
from policies.include import gathered
from policies.problem import Place
from policies.read import POLICY, parse
from policies.reader import Either, Listed, Named, Reader, Scalar, Section
from policies.source import Items, Keys, Leaf, Node, variables

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value in effect, as a file would have it, or a collection of `parts`, whose `value` is then empty.

    In parentheses stands what the absence of a value means. `source` is `FILE:LINE`, with the variables that went into
    the value, or `default`.
    """

    key: str
    value: str
    source: str
    parts: tuple[Setting, ...] = ()


def explain(content: str, file: str, environ: Mapping[str, str]) -> Setting:
    """The tree of the policy that `content` describes; its root has the version as value. Raises PolicyError."""
    policy = parse(content, file, environ)
    root = gathered(content, file, environ, Files()).root
    return Setting(file, policy.version, file, tuple(_parts(POLICY, root, policy, Place(file))))


def _setting(reader: Reader[Any], key: str, node: Node | None, value: Any, at: Place) -> Setting:
    """`node` is what is written under `key`; None: nothing is."""
    if isinstance(reader, Either):
        reader = reader.short if isinstance(node, Leaf) else reader.long
    source = DEFAULT
    if node is not None:
        source = f"{at.file}:{at.line}"
        if isinstance(node, Leaf) and (names := variables(node.raw)):
            source += " with " + ", ".join(names)
    parts = tuple(_parts(reader, node, value, at))
    return Setting(key, "" if parts else _text(reader, node, value), source, parts)


def _parts(reader: Reader[Any], node: Node | None, value: Any, at: Place) -> Iterator[Setting]:
    entries = node.entries if isinstance(node, Keys) else {}
    match reader:
        case Section() if value is not None:
            moot = {key for there, keys in reader.moot.items() if there in entries for key in keys}
            for key, part in reader.keys.items():
                if key in entries:
                    yield _read(part, key, entries[key].node, at.under(key, entries[key].line, entries[key].file))
                elif key not in reader.one_of and key not in moot:
                    yield _setting(part, key, None, getattr(value, key, reader.defaults.get(key)), at)
        case Named():
            for key, entry in entries.items():
                yield _read(reader.part, key, entry.node, at.under(key, entry.line, entry.file))
        case Listed() if isinstance(node, Items):
            for index, child in enumerate(node.children):
                yield _read(reader.part, f"[{index}]", child, at.under(index, child.line))


def _read(reader: Reader[Any], key: str, node: Node, at: Place) -> Setting:
    return _setting(reader, key, node, reader(node, at), at)


def _text(reader: Reader[Any], node: Node | None, value: Any) -> str:
    if node is None and (value is None or value == ""):
        return f"({reader.unset or 'none'})"
    if not isinstance(reader, Scalar):
        return "(none)"
    written = reader.write(value)
    return str(written).lower() if isinstance(written, bool) else str(written)

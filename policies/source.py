"""A policy's text as a tree of nodes, each of which knows its line and column.

The tree is built from YAML events, one at a time, so that every bound holds before memory is spent: size of the text,
depth, and nodes counted as if each alias had been written out (an alias shares its node; ten of ten of ten cost ten
nodes each but count a thousand). Plain scalars follow YAML 1.2's core schema: `off`, `yes` and `1_000` are text. Tags
are refused, so nothing in a file can name a type. Merge keys (`<<`) are resolved here: a mapping's own keys win over
merged ones, and of several merged mappings the earlier wins.

`${NAME}` and `${NAME:-default}` in a value are replaced from the environment before the scalar gets its type, quoted
or not (within `{}` and `[]` YAML wants the quotes), so `threshold: ${T:-0.5}` is a number; the default also stands in
for an empty variable. `${file:NAME}` is what that file says, relative to the one that names it; only secrets may be
written so. `$${` is a literal `${`. Keys are never interpolated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from policies.files import MAX_BYTES, Files
from policies.problem import Place, PolicyError, Problem, Wrong, clip, join, suggest

MAX_NODES = 100_000  # in a file; a route is about 20 nodes, and parsing as many takes some seconds
MAX_DEPTH = 32  # a policy is 7 deep

_INT = re.compile(r"[-+]?[0-9]{1,20}|0x[0-9a-fA-F]{1,16}|0o[0-7]{1,20}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None} | {
    word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")
}
_VARIABLE = re.compile(
    r"\$\$\{|\$\{(?:file:(?P<file>[^}\0]{1,1024})\}|(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^}]*)?\})?"
)

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Leaf:
    """One scalar. `text` is what stands in it after interpolation, `raw` before; only `raw` may be shown.

    It is `secret` where a part of it came out of a file.
    """

    line: int
    column: int
    raw: str
    text: str = field(repr=False)
    value: Value = field(repr=False)
    interpolated: bool = False
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Items:
    line: int
    column: int
    children: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's own line, and what stands under it; `file` where that is another than around it."""

    line: int
    node: Node
    file: str = ""


@dataclass(frozen=True, slots=True)
class Keys:
    line: int
    column: int
    entries: Mapping[str, Entry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Broken:
    """A node whose problem has been reported; nothing more is to be said about it."""

    line: int
    column: int


Node = Leaf | Items | Keys | Broken


def leaf(text: str) -> Leaf:
    """A scalar that stands in no file."""
    return Leaf(0, 0, text, text, text)


def tree(text: str, file: str, environ: Mapping[str, str], files: Files) -> tuple[Node, list[Problem]]:
    """The root, and what is wrong so far with single nodes. Raises PolicyError where no tree can be made."""
    if len(text) > MAX_BYTES or len(text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise _fatal(file, 0, f"larger than {MAX_BYTES // 2**20} MiB", "is this the right file?")
    return _Tree(file, environ, files).build(_events(text, file))


def _events(text: str, file: str) -> Iterator[Any]:
    events = YAML(typ="safe", pure=True).parse(text)
    while True:
        try:
            event = next(events, None)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            what = ", ".join(filter(None, (error.context, error.problem)))
            line = mark.line + 1 if mark else 0
            trap = line and "${" in (text.splitlines() + [""] * 2)[line - 1]  # braces are YAML's own in a flow mapping
            raise _fatal(
                file, line, f"not YAML: {_one_line(what)}", "within {} and [] write '${NAME}' in quotes" if trap else ""
            ) from None
        except ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise _fatal(
                file, line, f"not YAML: the character U+{ord(text[error.position]):04X} is not allowed"
            ) from None
        except Exception as error:  # the scanner lets others through, such as OverflowError for "\UFFFFFFFF"
            raise _fatal(file, 0, f"not YAML: {_one_line(str(error) or type(error).__name__)}") from None
        if event is None:
            return
        yield event


@dataclass(slots=True)
class _Open:
    """A collection whose end has not been read yet. `key` is set while a mapping's value is awaited."""

    line: int
    column: int
    path: str
    anchor: str | None
    mapping: bool
    children: list[Node] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    merged: tuple[Node, ...] = ()
    key: str | None = None
    key_line: int = 0
    merging: bool = False  # `key` is the merge key
    merge_line: int = 0  # of the first merge key
    size: int = 1
    depth: int = 1


class _Tree:
    def __init__(self, file: str, environ: Mapping[str, str], files: Files) -> None:
        self.file = file
        self.environ = environ
        self.files = files
        self.problems: list[Problem] = []
        self.open: list[_Open] = []
        self.anchors: dict[str, tuple[Node, int, int]] = {}  # node, size written out, depth
        self.nodes = 0
        self.root: Node | None = None

    def build(self, events: Iterator[Any]) -> tuple[Node, list[Problem]]:
        for event in events:
            line, column = event.start_mark.line + 1, event.start_mark.column + 1
            match event:
                case DocumentStartEvent() if self.root is not None:
                    raise _fatal(self.file, line, "a second document begins here", "a policy is one document")
                case MappingStartEvent() | SequenceStartEvent():
                    self.refuse_tag(event, line)
                    self.begin(_Open(line, column, self.path(), event.anchor, isinstance(event, MappingStartEvent)))
                case ScalarEvent() if self.awaits_key():
                    self.refuse_tag(event, line)
                    self.take_key(event.value, line, merge=event.value == "<<" and not event.style)
                case ScalarEvent():
                    self.refuse_tag(event, line)
                    node = self.scalar(event.value, line, column, plain=not event.style)
                    self.put(node, 1, 0, event.anchor)
                case AliasEvent():
                    self.alias(event.anchor, line, column)
                case MappingEndEvent() | SequenceEndEvent():
                    self.end()
        return self.root or Leaf(1, 1, "", "", None), self.problems

    def path(self) -> str:
        if not self.open:
            return ""
        top = self.open[-1]
        return join(top.path, top.key or "" if top.mapping else len(top.children))

    def awaits_key(self) -> bool:
        return bool(self.open) and self.open[-1].mapping and self.open[-1].key is None

    def report(self, line: int, wrong: str, right: str = "") -> None:
        self.problems.append(Problem(self.file, line, self.path(), wrong, right))

    def refuse_tag(self, event: Any, line: int) -> None:
        if event.tag is not None:
            tag = clip(_one_line(str(event.tag)).replace("tag:yaml.org,2002:", "!!"))
            self.report(line, f"the tag '{tag}' is not read", "write a plain value")

    def begin(self, opened: _Open) -> None:
        if self.awaits_key():
            raise _fatal(self.file, opened.line, "a mapping or a list stands where a key should", "a key is plain text")
        self.open.append(opened)
        self.bound(opened.line, 1, len(self.open))

    def bound(self, line: int, size: int, depth: int) -> None:
        self.nodes += size
        if self.nodes > MAX_NODES:
            raise _fatal(self.file, line, f"more than {MAX_NODES} values, each alias counted as what it stands for")
        if depth > MAX_DEPTH:
            raise _fatal(self.file, line, f"nested deeper than {MAX_DEPTH} levels")

    def take_key(self, key: str, line: int, *, merge: bool) -> None:
        top = self.open[-1]
        top.key, top.key_line, top.merging = key, line, merge
        earlier = top.merge_line if merge else top.entries[key].line if key in top.entries else 0
        if earlier:
            self.report(line, f"duplicate key, first on line {earlier}", "keep one of them")
        if merge:
            top.merge_line = top.merge_line or line

    def put(self, node: Node, size: int, depth: int, anchor: str | None) -> None:
        """Gives a finished node to the collection that it belongs to; `size` and `depth` as if written out."""
        if anchor is not None:
            self.anchors[anchor] = node, size, depth
        if not self.open:
            self.root = node
            return
        top = self.open[-1]
        top.size += size
        top.depth = max(top.depth, depth + 1)
        if not top.mapping:
            top.children.append(node)
            return
        if top.merging:
            self.merge(top, node)
        else:
            assert top.key is not None
            top.entries.setdefault(top.key, Entry(top.key_line, node))
        top.key = None

    def merge(self, top: _Open, node: Node) -> None:
        parts = node.children if isinstance(node, Items) else (node,)
        if all(isinstance(part, Keys | Broken) for part in parts):
            top.merged += parts
        else:
            self.report(top.key_line, "'<<' merges mappings only", "write <<: *anchor or <<: [*one, *other]")

    def end(self) -> None:
        done = self.open.pop()
        node: Node = Items(done.line, done.column, tuple(done.children))
        if done.mapping:
            for part in done.merged:
                if isinstance(part, Keys):
                    done.entries.update((k, v) for k, v in part.entries.items() if k not in done.entries)
            node = Keys(done.line, done.column, done.entries)
        self.put(node, done.size, done.depth, done.anchor)

    def alias(self, anchor: str, line: int, column: int) -> None:
        if self.awaits_key():
            raise _fatal(self.file, line, "an alias stands where a key should", "a key is plain text")
        node: Node = Broken(line, column)
        size, depth = 1, 0
        if any(opened.anchor == anchor for opened in self.open):
            self.report(line, f"the alias '*{clip(anchor)}' stands inside of what it names")
        elif anchor in self.anchors:
            node, size, depth = self.anchors[anchor]
        else:
            self.report(line, f"no anchor '&{clip(anchor)}' above", suggest(anchor, self.anchors.keys()))
        self.bound(line, size, len(self.open) + depth)
        self.put(node, size, depth, None)

    def scalar(self, raw: str, line: int, column: int, *, plain: bool) -> Node:
        self.bound(line, 1, len(self.open))
        if "${" not in raw:
            return Leaf(line, column, raw, raw, resolve(raw) if plain else raw)
        try:
            text, interpolated, secret = interpolate(raw, self.environ, lambda name: self.files.secret(name, self.file))
        except Wrong as wrong:
            self.report(line, wrong.wrong, wrong.right)
            return Broken(line, column)
        value = resolve(text) if plain or interpolated else text
        return Leaf(line, column, raw, text, text if value is None else value, interpolated, secret)


def resolve(text: str) -> Value:
    """A plain scalar's value by YAML 1.2's core schema."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def interpolate(raw: str, environ: Mapping[str, str], secret: Callable[[str], str]) -> tuple[str, bool, bool]:
    """`raw` with its variables replaced, whether it had any, and whether any was a file, which `secret` reads.

    Raises Wrong, which never shows what a variable stands for.
    """
    found = secrets = False

    def replacement(match: re.Match[str]) -> str:
        nonlocal found, secrets
        if match[0] == "$${":
            return "${"
        name, default = match["name"], match["default"]
        if match["file"]:
            found = secrets = True
            return secret(match["file"])
        if not name:
            raise Wrong(
                "'${' is not followed by a name and '}'", "write ${NAME}, ${NAME:-default}, or $${ for a literal '${'"
            )
        found = True
        if default is not None:
            return environ.get(name) or default[2:]
        if name not in environ:
            raise Wrong(f"the environment has no {clip(name)}", f"set it, or write ${{{clip(name)}:-default}}")
        return environ[name]

    return _VARIABLE.sub(replacement, raw), found, secrets


def variables(raw: str) -> list[str]:
    """The variables in `raw`, each once and without its default: `${NAME}`, `${file:NAME}`."""
    found = (match["name"] or (match["file"] and f"file:{match['file']}") for match in _VARIABLE.finditer(raw))
    return list(dict.fromkeys(f"${{{name}}}" for name in found if name))


def _fatal(file: str, line: int, wrong: str, right: str = "") -> PolicyError:
    return PolicyError([Place(file).problem(Wrong(wrong, right), line)])


def _one_line(text: str) -> str:
    return " ".join(text.split())

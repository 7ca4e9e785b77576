"""A policy in several files: the tree of the first, with what the files under its key `include` say.

An included file has top-level sections like the first. Names in `backends` and `routes` come together from all files;
every other section stands in one of them. Anchors and `x-` keys are a file's own. Nothing replaces anything: what is
said twice is a problem, with both places. Included files include nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from policies.files import MAX_BYTES, Files
from policies.problem import Place, PolicyError, Problem, Wrong
from policies.source import Broken, Entry, Items, Keys, Leaf, Node, tree

KEY = "include"
_SHARED = ("backends", "routes")  # sections of names that several files may add to
MOST = 64  # files


@dataclass(frozen=True, slots=True)
class Whole:
    """The tree of all files, what is wrong so far, and the texts, the first file's first."""

    root: Node
    problems: list[Problem]
    texts: list[str]


def gathered(content: str, file: str, environ: Mapping[str, str], files: Files) -> Whole:
    """`content`, which stands in `file`, and all that it includes. Raises PolicyError where no tree can be made."""
    root, problems = tree(content, file, environ, files)
    made = Whole(root, problems, [content])
    if not isinstance(root, Keys) or KEY not in root.entries:
        return made
    entries = {key: _placed(key, entry, file) for key, entry in root.entries.items()}
    left = MAX_BYTES - len(content)
    for leaf in _names(root.entries[KEY].node):
        place = Place(file).under(KEY, leaf.line)
        name = str(Path(file).parent / leaf.text)
        try:
            text = files.text(name)
            left -= len(text)
            if left < 0:
                problems.append(
                    place.problem(Wrong(f"with '{name}' the policy is larger than {MAX_BYTES // 2**20} MiB"))
                )
                break
            made.texts.append(text)
            part, wrongs = tree(text, name, environ, files)
        except PolicyError as error:
            problems += error.problems
            continue
        problems += wrongs
        if not isinstance(part, Keys):
            problems.append(
                place.problem(Wrong(f"'{name}' is no policy", "expected a mapping with backends or routes"))
            )
            continue
        problems += _merge(entries, part, name)
    return replace(made, root=replace(root, entries=entries))


def _names(node: Node) -> Iterator[Leaf]:
    """The files that are named; whatever is no name, or one too many, is told by the reader of the key."""
    nodes = node.children if isinstance(node, Items) else ()
    yield from [leaf for leaf in nodes if isinstance(leaf, Leaf) and leaf.text and not leaf.interpolated][:MOST]


def _merge(entries: dict[str, Entry], part: Keys, file: str) -> Iterator[Problem]:
    """Adds what `part` says to `entries`."""
    for key, entry in part.entries.items():
        place = Place(file).under(key, entry.line)
        if key == KEY:
            yield place.problem(Wrong("an included file includes nothing", "include it from the first file"))
        elif key.startswith("x-"):
            continue
        elif key not in entries:
            entries[key] = _placed(key, entry, file)
        elif key not in _SHARED:
            there = entries[key]
            yield place.problem(Wrong(f"stands in {there.file}:{there.line} already", "write it in one file"))
        else:
            yield from _merge_names(entries, key, entry, place)


def _merge_names(entries: dict[str, Entry], section: str, entry: Entry, place: Place) -> Iterator[Problem]:
    there, here = entries[section].node, entry.node
    if not isinstance(here, Keys) or not isinstance(there, Keys):
        # Whichever is no mapping is told by the reader of the section; a broken node has been told.
        if not isinstance(here, Keys | Broken):
            yield place.problem(Wrong("expected a mapping from names"))
        return
    names = dict(there.entries)
    for name, added in here.entries.items():
        if name in names:
            known = names[name]
            wrong = Wrong(f"stands in {known.file}:{known.line} already", "give it another name")
            yield place.under(name, added.line).problem(wrong)
        else:
            names[name] = replace(added, file=place.file)
    entries[section] = replace(entries[section], node=replace(there, entries=names))


def _placed(key: str, entry: Entry, file: str) -> Entry:
    """An entry that knows its file; the names of a shared section know theirs, too."""
    node = entry.node
    if key in _SHARED and isinstance(node, Keys):
        node = replace(node, entries={name: replace(named, file=file) for name, named in node.entries.items()})
    return Entry(entry.line, node, file)

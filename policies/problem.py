"""What is wrong with a policy, said so that it can be put right without reading anything else.

A `Wrong` is raised where a value is read, by code that does not know where the value stands; whoever walks the file
gives it a place and makes a `Problem` of it. Problems are collected, never reported one at a time: a `PolicyError`
carries all of them. A value that came out of the environment is shown as the file has it (`${NAME}`), never as it is.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.files import Files

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_/:-]{1,64}|<<")
_SHOWN = 60  # characters of a key or value in a message: enough to recognise it, and the line stays one line
_CANDIDATES = 500  # names compared for "did you mean": the comparison is quadratic


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to put right. `line` counts from 1; 0 where the problem has no line. `path` may be empty.

    `str` is one printable line, whatever the file says.
    """

    file: str
    line: int
    path: str
    wrong: str
    right: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        line = ": ".join(filter(None, (where, self.path, "; ".join(filter(None, (self.wrong, self.right))))))
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class PolicyError(Exception):
    """Everything that is wrong with a policy, in the order of its lines, file by file; `str` is one line a problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        found = list(problems)
        files = {file: at for at, file in enumerate(dict.fromkeys(problem.file for problem in found))}
        self.problems = tuple(sorted(found, key=lambda problem: (files[problem.file], problem.line)))
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


class Wrong(ValueError):
    """What is wrong with a value and what would be right, each part of one line.

    `key` names the part of a mapping that is to blame; empty: the whole. Without `wrong`, whoever knows what was
    expected finds the words.
    """

    def __init__(self, wrong: str = "", right: str = "", key: str = "") -> None:
        super().__init__("; ".join(filter(None, (wrong, right))))
        self.wrong = wrong
        self.right = right
        self.key = key


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: its path, the key it stands under and that key's line.

    `names` are the names that the whole policy defines, by top-level section: what a reference may name. `files` reads
    the files that are named; None: nobody watches them.
    """

    file: str
    path: str = ""
    key: str = ""
    line: int = 1
    names: Mapping[str, Collection[str]] = field(default_factory=dict)
    files: Files | None = None

    def under(self, key: str | int, line: int, file: str = "") -> Place:
        """The place of what stands under `key`, on that line; in another `file` where it was included from there."""
        return replace(self, path=join(self.path, key), key=str(key), line=line, file=file or self.file)

    def problem(self, wrong: Wrong, line: int | None = None) -> Problem:
        return Problem(self.file, self.line if line is None else line, self.path, wrong.wrong, wrong.right)


@dataclass(slots=True)
class Findings:
    """Problems found so far on one level. A part that fails is noted and the next one is read all the same."""

    problems: list[Problem] = field(default_factory=list)
    failed: bool = False

    def add(self, problem: Problem) -> None:
        self.problems.append(problem)
        self.failed = True

    @contextmanager
    def reading(self, place: Place, line: int) -> Iterator[None]:
        """Keeps what the block raises; `line` is that of the value at `place`."""
        try:
            yield
        except Wrong as wrong:
            self.add(place.problem(wrong, line))
        except PolicyError as error:
            self.problems.extend(error.problems)
            self.failed = True

    def close(self) -> None:
        """Raises PolicyError if any part failed: without problems where they were all reported before."""
        if self.failed:
            raise PolicyError(self.problems)


def join(path: str, key: str | int) -> str:
    """`routes` and `intent` are `routes.intent`; a key that would blur the path is quoted: `routes["v1.2"]`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if _PLAIN_KEY.fullmatch(key):
        return f"{path}.{key}" if path else key
    return f"{path}[{json.dumps(clip(key))}]"


def clip(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def nearest(word: str, options: Collection[str]) -> str:
    """The option that `word` is probably a misspelling of, or the empty text."""
    if len(options) > _CANDIDATES:
        return ""
    return next(iter(difflib.get_close_matches(word[:128], options, 1)), "")


def suggest(word: str, options: Collection[str]) -> str:
    """The second half of a message: the option that was probably meant, or all of them."""
    if near := nearest(word, options):
        return f"did you mean '{near}'?"
    shown = ", ".join(sorted(options)[:12]) + (", ..." if len(options) > 12 else "")
    return f"expected one of {shown}" if options else "there are none"

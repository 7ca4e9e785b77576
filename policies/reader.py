"""What a reader is: a function from a node to a value that also says what it takes.

So the tables under `policies.read` are the one description of a policy: `policies.explain` and `policies.json_schema`
are other readings of them. There are five kinds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

from policies.problem import Place
from policies.source import Node

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader(Generic[T]):
    """A function from a node to a value, and what it takes. `unset` says what no value means, where none is needed."""

    read: Callable[[Node, Place], T]
    expected: str
    unset: str = ""

    def __call__(self, node: Node, at: Place) -> T:
        return self.read(node, at)

    def absent(self, unset: str) -> Self:
        return replace(self, unset=unset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar(Reader[T]):
    """`form` is the JSON Schema of what is written without variables; `write` gives the value as a file has it."""

    form: Mapping[str, Any]
    write: Callable[[T], str | int | float] = str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section(Reader[T]):
    """`one_of` are keys of which exactly one is there; of `needed` each is; `about` is the section in a sentence.

    `moot` has the keys that mean nothing where another one, under which they stand, is there.
    """

    keys: Mapping[str, Reader[Any]]
    defaults: Mapping[str, Any]
    needed: Collection[str]
    one_of: Collection[str]
    moot: Mapping[str, Collection[str]]
    free: str
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed(Reader[tuple[T, ...]]):
    part: Reader[T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(Reader[dict[str, T]]):
    """`names` is the form of a key where it is that of a name, else None."""

    part: Reader[T]
    names: re.Pattern[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Either(Reader[T]):
    short: Scalar[T]
    long: Section[T]

"""Readers: small functions that turn a node into a value, and the few ways to combine them.

A section of the policy is a table of keys and readers:

    section(Batch, {"max_rows": whole(1, 4096), "queue_time": duration("1ms", "1h")})

What a key's absence means is the dataclass's business: a field without a default is a required key. A reader raises
`Wrong` for one thing wrong with the node itself, or `PolicyError` for what has a place already. Combined readers go on
past a part that fails, so that one pass finds everything.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from policies import units
from policies.problem import Findings, Place, PolicyError, Wrong, clip, nearest, suggest
from policies.reader import Either, Listed, Named, Reader, Scalar, Section
from policies.source import Broken, Items, Keys, Leaf, Node, Value

T = TypeVar("T")

# Names become metric labels, header values and path segments: nothing in them ever needs to be escaped.
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
A_NAME = "a name of 1 to 128 letters, digits, '_', '.', ':', '/' or '-'"

_TEXT = ["string", "number"]  # JSON's types of what counts as text


# One value.


def scalar(
    expected: str,
    convert: Callable[[Leaf], T],
    form: Mapping[str, Any],
    write: Callable[[T], str | int | float] = str,
) -> Scalar[T]:
    """A leaf that `convert` understands; Wrong without words means: `expected`, and something else came.

    What `convert` says of a value out of the environment is not passed on, because it may quote it.
    """

    def read(node: Node, at: Place) -> T:
        if not isinstance(node, Leaf):
            raise mismatch(expected, node)
        if node.secret:
            raise Wrong(f"{clip(node.raw)!r} would show here what a file keeps secret", "write ${NAME}")
        try:
            return convert(node)
        except Wrong as wrong:
            if wrong.wrong and not node.interpolated:
                raise
            raise mismatch(expected, node) from None

    return Scalar(read=read, expected=expected, form=form, write=write)


def flag() -> Scalar[bool]:
    return scalar(
        "true or false",
        lambda node: node.value if isinstance(node.value, bool) else _no(),
        {"type": "boolean"},
        lambda value: value,
    )


def whole(low: int, high: int) -> Scalar[int]:
    """An integer in [low, high]."""
    return scalar(
        f"a whole number from {low} to {high}",
        lambda node: int(_number(node.value, low, high, int)),
        {"type": "integer", "minimum": low, "maximum": high},
        lambda value: value,
    )


def number(low: float, high: float) -> Scalar[float]:
    """An integer or a decimal number in [low, high]; NaN is in no range."""
    return scalar(
        f"a number from {_plainly(low)} to {_plainly(high)}",
        lambda node: float(_number(node.value, low, high, int, float)),
        {"type": "number", "minimum": low, "maximum": high},
        lambda value: value,
    )


def duration(low: str, high: str) -> Scalar[float]:
    """Seconds in [low, high]."""
    least, most = units.duration(low), units.duration(high)

    def convert(node: Leaf) -> float:
        return float(_number(units.duration(_text(node)), least, most, float))

    form = {"type": "string", "pattern": rf"^{units.NUMBER} ?({'|'.join(units.SECONDS)})$"}
    expected = f"a duration from {low} to {high}, such as {_between(low, high)}"
    return scalar(expected, convert, form, units.format_duration)


def size(low: str, high: str) -> Scalar[int]:
    """Bytes in [low, high]."""
    least, most = units.size(low), units.size(high)

    def convert(node: Leaf) -> int:
        return int(_number(units.size(_text(node)), least, most, int))

    form = {"type": ["string", "integer"], "pattern": rf"^{units.NUMBER} ?({'|'.join(units.BYTES)})?$"}
    return scalar(f"a size from {low} to {high}, such as 64MiB", convert, form, units.format_size)


def choice(*options: str) -> Scalar[str]:
    def convert(node: Leaf) -> str:
        text = _text(node)
        if text in options:
            return text
        if near := nearest(text, options):
            raise Wrong(f"expected {expected}, got {shown(node)}", f"did you mean '{near}'?")
        _no()

    expected = " or ".join((", ".join(options[:-1]), options[-1])) if options[1:] else options[0]
    return scalar(expected, convert, {"enum": list(options)})


def text(expected: str, pattern: re.Pattern[str]) -> Scalar[str]:
    """Text of that form. A number counts as the text that it was written as, so `version: 1` needs no quotes."""
    form = {"type": _TEXT, "pattern": f"^(?:{pattern.pattern})$"}
    return scalar(expected, lambda node: found if pattern.fullmatch(found := _text(node)) else _no(), form)


def name() -> Scalar[str]:
    return text(A_NAME, NAME)


def parsed(expected: str, parse: Callable[[str], T], write: Callable[[T], str] = str) -> Scalar[T]:
    """Text that `parse` understands; it raises Wrong. `write` is its inverse."""
    return scalar(expected, lambda node: parse(_text(node)), {"type": _TEXT}, write)


# Several values.


def section(
    make: Callable[..., T],
    keys: Mapping[str, Reader[Any]],
    verify: Callable[[T], Iterable[Wrong]] = lambda made: (),
    free: str = "",
    rest: Callable[..., Any] | None = None,
    one_of: Collection[str] = (),
    moot: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Section[T]:
    """A mapping with these keys and no others, as arguments to `make`; its parameters without a default are required.

    A parameter `name` of `make` that is no key gets the key under which the section itself stands. `verify` tells what
    is wrong with the whole, once every part could be read; `make` may raise Wrong as well. Keys that begin with
    `free` are passed over. `rest` is what `make` fills in, where that is not `make` itself: its other defaults are
    told from there. `one_of` tells which keys exclude each other, and `moot` which ones mean nothing where a certain
    one is there; both are for `make` to raise.
    """
    parameters = inspect.signature(make).parameters
    required = [k for k, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    told = {**(inspect.signature(rest).parameters if rest else {}), **parameters}
    named = "name" in required and "name" not in keys
    needed = [key for key in required if key in keys]
    expected = f"a mapping with {', '.join(keys)}"

    def read(node: Node, at: Place) -> T:
        if not isinstance(node, Keys):
            empty = isinstance(node, Leaf) and node.value is None and not needed and not named
            raise mismatch(expected, node, "delete the key, or write {} for the defaults" if empty else "")
        found, got, meant = Findings(), dict[str, Any](), set[str]()
        for key, entry in node.entries.items():
            place = at.under(key, entry.line, entry.file)
            if key in keys:
                with found.reading(place, entry.node.line):
                    got[key] = keys[key](entry.node, place)
            elif not (free and key.startswith(free)):
                meant.add(nearest(key, keys))
                found.add(place.problem(Wrong("unknown key", suggest(key, keys))))
        for key in needed:
            if key not in node.entries and key not in meant:
                found.add(at.problem(Wrong(f"the key '{key}' is missing")))
        found.close()

        def place_of(wrong: Wrong) -> Place:
            entry = node.entries.get(wrong.key)
            return at.under(wrong.key, entry.line, entry.file) if entry else at

        try:
            made = make(**got, **{"name": at.key} if named else {})
            wrongs = list(verify(made))
        except Wrong as wrong:
            wrongs = [wrong]
        if wrongs:
            raise PolicyError(place_of(wrong).problem(wrong) for wrong in wrongs)
        return made

    return Section(
        read=read,
        expected=expected,
        keys=keys,
        defaults={
            key: told[key].default for key in keys if key in told and told[key].default is not inspect.Parameter.empty
        },
        needed=needed,
        one_of=one_of,
        moot=moot,
        free=free,
        about=" ".join((inspect.getdoc(rest or make) or "").partition("\n\n")[0].split()),
    )


def items(
    what: str, reader: Reader[T], check: Callable[[Items], Iterable[tuple[int, Wrong]]] = lambda node: ()
) -> Listed[T]:
    """A list of one or more. `check` tells what is wrong between its nodes, by index, readable or not."""
    expected = f"a list of at least one {what}"

    def read(node: Node, at: Place) -> tuple[T, ...]:
        if not isinstance(node, Items) or not node.children:
            raise mismatch(expected, node)
        found, got = Findings(), list[T]()
        for index, wrong in check(node):
            line = node.children[index].line
            found.add(at.under(index, line).problem(wrong))
        for index, child in enumerate(node.children):
            place = at.under(index, child.line)
            with found.reading(place, child.line):
                got.append(reader(child, place))
        found.close()
        return tuple(got)

    return Listed(read=read, expected=expected, part=reader)


def mapping(what: str, reader: Reader[T], key: Callable[[str], str] | None = None) -> Named[T]:
    """A mapping from names to values. `key` checks a key (Wrong) and gives its final form; default: a name as it is."""
    final = key or _name
    expected = f"a mapping from names to {what}s"

    def read(node: Node, at: Place) -> dict[str, T]:
        if not isinstance(node, Keys):
            raise mismatch(expected, node)
        found, got = Findings(), dict[str, T]()
        for written, entry in node.entries.items():
            place = at.under(written, entry.line, entry.file)
            with found.reading(place, entry.line):
                checked = final(written)
                if checked in got:
                    raise Wrong(f"'{checked}' is here already", "names differ by more than upper and lower case")
                with found.reading(place, entry.node.line):
                    got[checked] = reader(entry.node, place)
        found.close()
        return got

    return Named(read=read, expected=expected, part=reader, names=None if key else NAME)


def either(expected: str, short: Scalar[T], long: Section[T]) -> Either[T]:
    """A scalar is read by `short`, a mapping by `long`."""

    def read(node: Node, at: Place) -> T:
        if isinstance(node, Leaf):
            return short(node, at)
        if isinstance(node, Items):
            raise mismatch(expected, node)
        return long(node, at)

    return Either(read=read, expected=expected, short=short, long=long)


def path() -> Scalar[str]:
    """A file's or a folder's name, relative to the file that names it; absolute, however that one was named."""
    written = text("the name of a file or a folder", re.compile(r"[^\0\n]{1,1024}"))
    return replace(written, read=lambda node, at: os.path.abspath(Path(at.file).parent / written(node, at)))


def reference(section: str) -> Scalar[str]:
    """The name of something that stands in that top-level section."""
    what = f"the name of one of the {section}"
    written = scalar(what, _text, {"type": _TEXT})

    def read(node: Node, at: Place) -> str:
        found = written(node, at)
        known = at.names.get(section)
        if known is not None and found not in known:
            raise Wrong(f"{section} has no {shown(node)}", suggest(found, known))
        return found

    return replace(written, read=read)


def mismatch(expected: str, node: Node, right: str = "") -> Exception:
    """The problem of a node that is something else; nothing new where the node's own problem is known already."""
    return PolicyError(()) if isinstance(node, Broken) else Wrong(f"expected {expected}, got {shown(node)}", right)


def shown(node: Node) -> str:
    """A node as a message may show it: what the file says, never what the environment says."""
    match node:
        case Leaf(interpolated=True):
            return f"the value of {clip(node.raw)!r}"
        case Leaf(value=None):
            return "nothing"
        case Leaf(value=str()):
            return repr(clip(node.raw))
        case Leaf():
            return clip(node.raw)
        case Items():
            return "a list" if node.children else "an empty list"
        case _:
            return "a mapping"


def _no() -> NoReturn:
    raise Wrong


def _text(node: Leaf) -> str:
    """The text as written. A variable holds text whatever it looks like; in a file, `true` without quotes does not."""
    untyped = node.interpolated or not isinstance(node.value, bool | None)
    return node.text if untyped else _no()


def _plainly(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def _number(value: Value, low: float, high: float, *kinds: type) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(value, kinds):
        _no()
    return value if low <= value <= high else _no()


def _name(key: str) -> str:
    if not NAME.fullmatch(key):
        raise Wrong(f"expected {A_NAME}")
    return key


def _between(low: str, high: str) -> str:
    """A duration to show as an example: the first usual one that lies in the range."""
    least, most = units.duration(low), units.duration(high)
    return next((example for example in ("2s", "1h") if least <= units.duration(example) <= most), low)

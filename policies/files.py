"""The files that a policy is read from, and what they said: whoever watches a policy watches all of them.

Files are known by what they say. So every way of changing one counts (an editor renames, Kubernetes swaps a symbolic
link, a tool writes in place), and nothing falls between reading and watching.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

from policies.problem import PolicyError, Problem, Wrong, clip

MAX_BYTES = 4 * 2**20  # a route is about 200 bytes: room for 20 000 of them
_SECRET_BYTES = 64 * 1024  # a key or a token has a few hundred


# A pipe would be waited for.
_NOT_REGULAR = OSError(errno.EINVAL, "not a regular file")


class Files:
    """Reads files. `seen` has a digest of what each said, also of those that could not be read."""

    def __init__(self) -> None:
        self.seen: dict[Path, bytes] = {}

    def text(self, path: str | Path, *, pipe: bool = False) -> str:
        """What a UTF-8 file of at most MAX_BYTES says. Raises PolicyError.

        It may be a `pipe`, as shells give one to a command, where somebody waits for that; nobody watches one.
        """
        shown = str(path)
        try:
            data = _read(Path(path), regular=not pipe)
            self.seen[Path(path)] = _digest(data) if os.path.isfile(path) else _digest(_NOT_REGULAR)
            if len(data) > MAX_BYTES:
                raise _problem(shown, 0, f"larger than {MAX_BYTES // 2**20} MiB", "is this the right file?")
            return data.decode()
        except OSError as error:
            self.seen[Path(path)] = _digest(error)
            raise _problem(shown, 0, f"cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise _problem(shown, line, "not UTF-8 text", "save the file as UTF-8") from None
        except ValueError:  # NUL, or what no file system can write
            raise _problem(shown, 0, "not the name of a file") from None

    def secret(self, name: str, beside: str) -> str:
        """What the file `name` says, relative to the file `beside`, without the ends of its lines. Raises Wrong."""
        try:
            text = self.text(Path(beside).parent / name)
        except PolicyError as error:
            raise Wrong(f"'{clip(name)}' {error.problems[0].wrong}", error.problems[0].right) from None
        if len(text) > _SECRET_BYTES:
            raise Wrong(f"'{clip(name)}' has more than {_SECRET_BYTES // 1024} KiB", "is this the right file?")
        return text.rstrip("\r\n")

    def changed(self) -> bool:
        """Whether one of the files says something else now."""
        return any(_now(path) != digest for path, digest in list(self.seen.items()))


def _now(path: Path) -> bytes:
    try:
        return _digest(_read(path, regular=True))
    except OSError as error:
        return _digest(error)


def _read(path: Path, *, regular: bool) -> bytes:
    if regular and not stat.S_ISREG(os.stat(path).st_mode):
        raise _NOT_REGULAR
    with open(path, "rb") as file:
        return file.read(MAX_BYTES + 1)


def _problem(file: str, line: int, wrong: str, right: str = "") -> PolicyError:
    return PolicyError([Problem(file, line, "", wrong, right)])


def _digest(said: bytes | OSError) -> bytes:
    return hashlib.sha256(said).digest() if isinstance(said, bytes) else str(said.errno).encode()

"""The files that a policy is read from, and which they were: whoever watches a policy watches all of them."""

from __future__ import annotations

from pathlib import Path

from policies.problem import PolicyError, Problem, Wrong, clip

MAX_BYTES = 4 * 2**20  # a route is about 200 bytes: room for 20 000 of them
_SECRET_BYTES = 64 * 1024  # a key or a token has a few hundred


class Files:
    """Reads files and remembers their names in `seen`, also of those that could not be read."""

    def __init__(self) -> None:
        self.seen: dict[Path, None] = {}

    def text(self, path: str | Path, limit: int = MAX_BYTES) -> str:
        """What a UTF-8 file says; what is beyond `limit` bytes is not read, but for one byte. Raises PolicyError."""
        self.seen[Path(path)] = None
        try:
            with open(path, "rb") as file:
                data = file.read(limit + 1)
            return data.decode()
        except OSError as error:
            raise PolicyError([Problem(str(path), 0, "", f"cannot be read: {error.strerror or error}")]) from None
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise PolicyError([Problem(str(path), line, "", "not UTF-8 text", "save the file as UTF-8")]) from None

    def secret(self, name: str, beside: str) -> str:
        """What the file `name` says, relative to the file `beside`, without the ends of its lines. Raises Wrong."""
        try:
            text = self.text(Path(beside).parent / name, _SECRET_BYTES)
        except PolicyError as error:
            raise Wrong(f"'{clip(name)}' {error.problems[0].wrong}", error.problems[0].right) from None
        if len(text) > _SECRET_BYTES:
            raise Wrong(f"'{clip(name)}' has more than {_SECRET_BYTES // 1024} KiB", "is this the right file?")
        return text.rstrip("\r\n")

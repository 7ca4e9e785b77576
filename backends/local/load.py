"""From the path in a policy to a model, and to what tells whether its files have changed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from backends.local import onnx, static
from backends.local.model import Model, Unusable


def load(path: str) -> Model:
    """The model at `path`. Takes as long as it takes; raises Unusable, whatever is wrong."""
    try:
        if Path(path).is_dir():
            return static.load(path)
        if not Path(path).exists():
            raise Unusable("there is no such file or folder")
        if Path(path).suffix != ".onnx":
            raise Unusable("expected an .onnx file, or a folder with a static-embedding text classifier")
        return onnx.load(path)
    except Unusable as error:
        raise Unusable(_line(error)) from None
    except Exception as error:  # the libraries' own, of any kind
        raise Unusable(_line(error)) from None


def stamp(path: str) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the model's files: what changes when somebody mends it."""
    root = Path(path)
    try:
        files = sorted(root.iterdir()) if root.is_dir() else [root]
        return tuple((file.name, (about := file.stat()).st_size, about.st_mtime_ns) for file in files)
    except OSError:
        return ()


def digest(path: str) -> str:
    """A digest of the model's files, names and contents: models of equal digests answer alike."""
    root = Path(path)
    whole = hashlib.sha256()
    for file in sorted(file for file in (root.iterdir() if root.is_dir() else [root]) if file.is_file()):
        with file.open("rb") as opened:
            whole.update(
                f"{file.name if root.is_dir() else ''}:{hashlib.file_digest(opened, 'sha256').hexdigest()};".encode()
            )
    return whole.hexdigest()[:32]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__

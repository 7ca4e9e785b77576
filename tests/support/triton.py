"""Real Triton servers as session fixtures: a small one that needs no weights, and the demo's with all its models.

A test module or a conftest takes them by name: `from tests.support.triton import triton, triton_demo`. What is missing
is installed or prepared once under `build/`; a server that does not start fails the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.demo.prepare import BUILD, prepare
from deploy.demo.repository import write_test_models
from deploy.demo.triton import Triton, ensure_venv

VENV = BUILD.parent / "triton-venv"


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """A server with `echo` and `rowsum`, ready in half a second."""
    folder: Path = tmp_path_factory.mktemp("triton")
    with Triton(
        ensure_venv(VENV),
        write_test_models(folder / "repository"),
        log=folder / "triton.log",
        models=["echo", "rowsum"],
    ) as server:
        yield server


@pytest.fixture(scope="session")
def triton_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """A server with every model of the demo; the first run prepares their weights, which takes minutes."""
    built = prepare(BUILD)
    log = tmp_path_factory.mktemp("triton-demo") / "triton.log"
    with Triton(ensure_venv(VENV), built.repository, log=log) as server:
        yield server

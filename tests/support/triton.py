"""Real Triton servers as session fixtures: a small one that needs no weights, and the demo's with all its models.

`triton_with` starts one with models of the tests' own: a folder each in `triton_models`, with `config.pbtxt`, label
files and `model.py`; without that it is another `identity`.

A test module or a conftest takes them by name: `from tests.support.triton import triton, triton_demo`. What is missing
is installed or prepared once under `build/`; a server that does not start fails the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.demo.prepare import BUILD, prepare
from deploy.demo.repository import write_test_models
from deploy.demo.triton import Triton, ensure_venv
from tests.support.serve import Served, served

VENV = BUILD.parent / "triton-venv"
MODELS = Path(__file__).parent / "triton_models"


@contextmanager
def triton_with(folder: Path, *models: str, http: int = 0, more: Sequence[str] = ()) -> Iterator[Triton]:
    """A server with these models, the tests' or `echo` and `rowsum`, and explicit model control.

    Its repository is `folder`/models.
    """
    repository = write_test_models(folder / "models")
    for model in models:
        if not (MODELS / model).exists():
            continue
        version = repository / model / "1"
        version.mkdir(parents=True, exist_ok=True)
        for file in MODELS.joinpath(model).glob("*.*"):
            shutil.copy(file, version if file.name == "model.py" else repository / model)
        if not (version / "model.py").exists():
            shutil.copy(MODELS / "identity/model.py", version)
    with Triton(
        ensure_venv(VENV), repository, log=folder / "triton.log", models=list(models), http=http, more=more
    ) as server:
        yield server


@contextmanager
def proxied(folder: Path, policy: str, *models: str) -> Iterator[tuple[Triton, Served]]:
    """`triton_with` these models, and a gateway before it; `policy` has its addresses as `{http}` and `{grpc}`."""
    with triton_with(folder, *models) as server:
        path = folder / "policy.yaml"
        path.write_text(policy.format(http=server.http, grpc=server.grpc))
        with served(folder, str(path)) as gateway:
            yield server, gateway


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

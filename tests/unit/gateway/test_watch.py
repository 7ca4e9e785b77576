"""Watching files: any way of changing any of them counts, once."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.watch import Watch
from policies import PolicyError
from policies.files import Files


class Reader:
    """Reads `main`, which names another file or none, as a policy does; remembers what it read."""

    def __init__(self, main: Path) -> None:
        self.main = main
        self.files = Files()
        self.reads = 0

    async def read(self) -> None:
        self.reads += 1
        self.files.seen.clear()
        with suppress(PolicyError):
            if name := self.files.text(self.main):
                self.files.text(self.main.parent / name)


def raised(error: BaseException) -> None:
    raise error


async def looks(reader: Reader, watch: Watch) -> int:
    """How often the files were read in some looks."""
    before = reader.reads
    for _ in range(3):
        await watch.look()
    return reader.reads - before


def test_every_file_counts_and_each_change_once(tmp_path: Path) -> None:
    main = tmp_path / "main"
    main.write_text("part")
    (tmp_path / "part").write_text("1")
    reader = Reader(main)

    async def run() -> None:
        await reader.read()
        watch = Watch(reader.files.changed, reader.read, raised)
        assert await looks(reader, watch) == 0
        (tmp_path / "part").write_text("2")
        assert await looks(reader, watch) == 1
        (tmp_path / "new").write_text("2")
        (tmp_path / "new").rename(tmp_path / "part")  # other file, same words
        assert await looks(reader, watch) == 0
        (tmp_path / "part").unlink()
        assert await looks(reader, watch) == 1
        (tmp_path / "part").write_text("3")
        assert await looks(reader, watch) == 1
        main.write_text("other")  # which does not exist yet
        assert await looks(reader, watch) == 1
        (tmp_path / "part").write_text("4")  # no longer a part
        assert await looks(reader, watch) == 0
        (tmp_path / "other").write_text("1")
        assert await looks(reader, watch) == 1
        main.write_text("")
        assert await looks(reader, watch) == 1

    asyncio.run(run())


def test_a_swapped_symbolic_link_counts(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: file -> ..data/file, and ..data -> a new folder at each change."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "main").write_text("" if name == "first" else "x")
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "main").symlink_to("..data/main")
    reader = Reader(tmp_path / "main")

    async def run() -> None:
        await reader.read()
        watch = Watch(reader.files.changed, reader.read, raised)
        (tmp_path / "swap").symlink_to("second")
        (tmp_path / "swap").rename(tmp_path / "..data")
        assert await looks(reader, watch) == 1

    asyncio.run(run())


def test_a_defect_is_reported_and_the_watch_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.watch._EVERY_SECONDS", 0.01)
    reported: list[BaseException] = []
    looked: list[int] = []

    def changed() -> bool:
        looked.append(1)
        if len(looked) == 1:
            raise ValueError("a defect")
        return False

    async def reload() -> None:
        raise AssertionError

    async def run() -> None:
        watch = Watch(changed, reload, reported.append)
        watch.start()
        await asyncio.sleep(0.1)
        await watch.close()

    asyncio.run(run())
    assert [str(error) for error in reported] == ["a defect"]
    assert len(looked) > 2

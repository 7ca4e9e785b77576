"""Policies in several files, and secrets in files."""

import os
from pathlib import Path

import pytest

from policies import PolicyError, Secret, load, parse
from policies.explain import explain
from policies.files import Files

MAIN = """\
include: [parts/backends.yaml, parts/more.yaml]
backends:
  a: {endpoints: [http://h:1]}
routes:
  r: {backend: b}
"""


def problems(file: Path, **environ: str) -> list[str]:
    try:
        load(file, environ)
    except PolicyError as error:
        return [str(problem).replace(f"{file.parent}/", "") for problem in error.problems]
    return []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "parts").mkdir()
    (tmp_path / "p.yaml").write_text(MAIN)
    (tmp_path / "parts/backends.yaml").write_text(
        "x-own: &own [http://h:2]\nbackends:\n  b: {endpoints: *own, headers: {authorization: 'Bearer ${file:key}'}}\n"
    )
    (tmp_path / "parts/more.yaml").write_text("limits: {in_flight: 7}\nroutes:\n  s: {backend: a}\n")
    (tmp_path / "parts/key").write_text("hunter2\n")
    return tmp_path


def test_names_come_together_from_all_files(folder: Path) -> None:
    files = Files()
    policy = load(folder / "p.yaml", {}, files)
    assert (set(policy.backends), set(policy.routes)) == ({"a", "b"}, {"r", "s"})
    assert policy.limits.in_flight == 7
    assert policy.backends["b"].headers["authorization"] == Secret("Bearer hunter2")
    names = [str(path.relative_to(folder)) for path in files.seen]
    assert names == ["p.yaml", "parts/backends.yaml", "parts/key", "parts/more.yaml"]


def test_the_version_is_of_all_texts_and_of_no_secret(folder: Path) -> None:
    before = load(folder / "p.yaml", {})
    (folder / "parts/key").write_text("other")
    secret = load(folder / "p.yaml", {})
    assert secret != before
    assert secret.version == before.version
    (folder / "parts/more.yaml").write_text("routes:\n  s: {backend: b}\n")
    assert load(folder / "p.yaml", {}).version != before.version


def test_explain_names_the_file_of_each_line(folder: Path) -> None:
    path = folder / "p.yaml"
    found = {}

    def walk(setting: object, at: str) -> None:
        for part in setting.parts:  # type: ignore[attr-defined]
            found[f"{at}{part.key}"] = (part.value, part.source.replace(f"{folder}/", ""))
            walk(part, f"{at}{part.key}.")

    walk(explain(path.read_text(), str(path), {}), "")
    assert found["backends.a.endpoints.[0]"][1] == "p.yaml:3"
    assert found["backends.b.headers.authorization"] == ("***", "parts/backends.yaml:3 with ${file:key}")
    assert found["limits.in_flight"] == ("7", "parts/more.yaml:1")
    assert found["routes.s.backend"] == ("a", "parts/more.yaml:3")


def test_what_is_said_twice_is_a_problem_with_both_places(folder: Path) -> None:
    (folder / "parts/more.yaml").write_text(
        "backends:\n  b: {endpoints: [http://h:3]}\nroutes:\n  r: {backend: a}\nlimits: {}\ninclude: x.yaml\n"
    )
    with (folder / "p.yaml").open("a") as file:
        file.write("limits: {}\n")
    assert problems(folder / "p.yaml") == [
        "parts/more.yaml:2: backends.b: stands in parts/backends.yaml:3 already; give it another name",
        "parts/more.yaml:4: routes.r: stands in p.yaml:5 already; give it another name",
        "parts/more.yaml:5: limits: stands in p.yaml:6 already; write it in one file",
        "parts/more.yaml:6: include: an included file includes nothing; include it from the first file",
    ]


def test_problems_of_all_files_come_at_once(folder: Path) -> None:
    (folder / "parts/backends.yaml").write_text("backends:\n  b: {endpoints: [http://h:2], tymeout: 1s}\n")
    (folder / "parts/more.yaml").write_text("backends: [")
    with (folder / "p.yaml").open("a") as file:
        file.write("limits: {in_flight: 0}\n")
    assert problems(folder / "p.yaml") == [
        "parts/more.yaml:1: not YAML: while parsing a flow node, expected the node content, but found '<stream end>'",
        "parts/backends.yaml:2: backends.b.tymeout: unknown key; did you mean 'timeout'?",
        "p.yaml:6: limits.in_flight: expected a whole number from 1 to 1000000, got 0",
    ]


def test_files_that_cannot_be_read(folder: Path) -> None:
    (folder / "parts/more.yaml").unlink()
    (folder / "parts/key").write_bytes(b"\xff")
    assert problems(folder / "p.yaml") == [
        "parts/backends.yaml:3: backends.b.headers.authorization: 'key' not UTF-8 text; save the file as UTF-8",
        "parts/more.yaml: cannot be read: No such file or directory",
    ]
    (folder / "parts/key").unlink()
    assert problems(folder / "p.yaml")[0] == (
        "parts/backends.yaml:3: backends.b.headers.authorization: 'key' cannot be read: No such file or directory"
    )
    (folder / "parts/key").write_text("x" * 70_000)
    assert "has more than 64 KiB" in problems(folder / "p.yaml")[0]


def test_a_file_stands_only_for_what_never_shows(folder: Path) -> None:
    text = "backends: {b: {endpoints: [http://h:1], model: '${file:parts/key}'}}\nproxy: b"
    with pytest.raises(PolicyError) as raised:
        parse(text, str(folder / "p.yaml"), {})
    message = str(raised.value)
    assert "would show here what a file keeps secret; write ${NAME}" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("what", ["include: 3", "include: []", "include: [{}]", "include: [a, [b]]"])
def test_what_names_no_files(folder: Path, what: str) -> None:
    (folder / "p.yaml").write_text(f"{what}\nbackends: {{b: {{endpoints: [http://h:1]}}}}\nproxy: b\n")
    assert problems(folder / "p.yaml")


@pytest.mark.parametrize("name", [r'"a\0b"', r'"\uD800"'])
def test_names_that_no_file_can_have(folder: Path, name: str) -> None:
    base = "backends: {b: {endpoints: [http://h:1]}}\nproxy: b\n"
    for text in (f"include: [{name}]\n{base}", base.replace("}}", f', headers: {{x: "${{file:{name[1:-1]}}}"}}}}}}')):
        with pytest.raises(PolicyError):
            parse(text, str(folder / "p.yaml"), {})


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    (folder / "parts/more.yaml").unlink()
    os.mkfifo(folder / "parts/more.yaml")
    assert problems(folder / "p.yaml") == ["parts/more.yaml: cannot be read: not a regular file"]
    assert not Files().changed()


def test_an_included_name_shows_no_variable(folder: Path) -> None:
    (folder / "p.yaml").write_text("include: ['${DB}']\nbackends: {b: {endpoints: [http://h:1]}}\nproxy: b\n")
    told = problems(folder / "p.yaml", DB="hunter2")
    assert told == ["p.yaml:1: include[0]: a variable in an included file's name; write the name itself"]


def test_more_files_than_are_read_are_a_problem(folder: Path) -> None:
    for number in range(70):
        (folder / f"{number}.yaml").write_text(f"backends:\n  b{number}: {{endpoints: [http://h:{number + 1}]}}\n")
    names = ", ".join(f"{number}.yaml" for number in range(70))
    (folder / "p.yaml").write_text(f"include: [{names}]\nproxy: b0\n")
    assert problems(folder / "p.yaml") == ["p.yaml:1: include[64]: more than 64 files; put some of them together"]


def test_all_files_together_are_bounded(folder: Path) -> None:
    filler = "# " + "x" * (2 * 2**20)
    for name in ("more", "backends"):
        path = folder / f"parts/{name}.yaml"
        path.write_text(path.read_text() + filler)
    assert "the policy is larger than 4 MiB" in problems(folder / "p.yaml")[0]
    (folder / "parts/backends.yaml").write_text("\N{SNOWMAN}" * (2 * 2**20))
    assert "larger than 4 MiB" in problems(folder / "p.yaml")[0]

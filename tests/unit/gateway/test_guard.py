"""Who may ask the admin port, and which files a posted policy may name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from gateway.admin import admin, joined_admin, own
from gateway.app import Gateway
from gateway.cli import app
from gateway.joined import Joined
from policies import parse

POLICY = "backends: {b: {endpoints: [http://127.0.0.1:1]}}\nproxy: b\n"
OTHER = "backends: {b: {endpoints: [http://127.0.0.1:2]}}\nproxy: b\n"
YAML = {"content-type": "application/yaml"}


def asked(
    method: str = "GET", path: str = "/policy", *, made: Gateway | None = None, inner: bool = False, **more: Any
) -> httpx.Response:
    """The answer of the admin port; `inner` says that of a worker's socket."""

    async def run() -> httpx.Response:
        gateway = made or Gateway(parse(POLICY, "policy.yaml", {}))
        transport = httpx.ASGITransport((own if inner else admin)(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8003") as client:
            answer = await client.request(method, path, **more)
        await gateway.close()
        return answer

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["/policy?force=true", "/policy/rollback"])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"} | YAML,
        {"origin": "null"} | YAML,
        {"origin": "http://127.0.0.1:8003"} | YAML,
        {"sec-fetch-site": "cross-site"} | YAML,
        {"sec-fetch-site": "same-site"} | YAML,
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "text/plain; application/yaml"},
        {},
    ],
)
def test_no_page_in_a_browser_changes_the_policy(headers: Mapping[str, str], path: str) -> None:
    made = Gateway(parse(POLICY, "policy.yaml", {}))
    first = made.policy.version
    answer = asked("POST", path, made=made, content=OTHER.encode(), headers=headers)
    assert answer.status_code == 403
    assert len(answer.json()["error"].splitlines()) == 1
    assert made.policy.version == first


@pytest.mark.parametrize(
    "headers", [YAML, {"content-type": "Application/YAML; charset=utf-8"}, YAML | {"sec-fetch-site": "none"}]
)
def test_a_command_does(headers: Mapping[str, str]) -> None:
    assert asked("POST", "/policy?force=true", content=OTHER.encode(), headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8003", "127.0.0.1.evil.example", "evil.", "[::1", "@"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_name_that_somebody_may_have_rebound_is_not_answered(method: str, host: str) -> None:
    answer = asked(method, headers={"host": host} | YAML, content=OTHER.encode())
    assert answer.status_code == 403
    assert "ask by its address, or as localhost" in answer.json()["error"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.1.2.3:8003", "[::1]:8003", "localhost:8003", "headrace", "LOCALHOST"]
)
def test_addresses_and_names_of_no_domain_are(host: str) -> None:
    assert asked(headers={"host": host}).status_code == 200


def test_the_listeners_own_name_is() -> None:
    text = POLICY + "listen: {admin: 'gw.corp.example:8003'}\n"
    made = Gateway(parse(text, "policy.yaml", {}))
    assert asked(made=made, headers={"host": "GW.corp.example:8003"}).status_code == 200


def test_several_workers_are_guarded_at_the_port_and_not_among_themselves() -> None:
    async def run() -> list[int]:
        gateway = Gateway(parse(POLICY, "policy.yaml", {}))
        transport = httpx.ASGITransport(joined_admin(gateway, Joined([])))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            cases = ({"host": "evil.example"}, YAML | {"origin": "http://evil.example"}, {"content-type": "text/plain"})
            return [(await client.post("/policy", headers=headers)).status_code for headers in cases]

    assert asyncio.run(run()) == [403] * 3
    assert asked("POST", "/policy?force=true", inner=True, content=OTHER.encode()).status_code == 200


def test_the_command_says_what_the_port_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.yaml").write_text(OTHER)
    sent: list[dict[str, Any]] = []

    def request(method: str, url: str, **more: Any) -> httpx.Response:
        sent.append(more)
        return httpx.Response(200, json={"version": "1"})

    monkeypatch.setattr(httpx, "request", request)
    for words in (["apply", str(tmp_path / "other.yaml")], ["rollback"]):
        assert CliRunner().invoke(app, ["policy", *words]).exit_code == 0
    assert all(asked("POST", "/policy?force=true", content=OTHER, headers=s["headers"]).is_success for s in sent)


# Files.


@pytest.fixture
def served(tmp_path: Path) -> Gateway:
    """A gateway that serves a policy in a folder of its own; what is beside the folder is nobody's business."""
    folder = tmp_path / "etc"
    (folder / "teams").mkdir(parents=True)
    (folder / "teams/a.yaml").write_text("backends: {a: {endpoints: [http://127.0.0.1:3]}}\n")
    (folder / "token").write_text("t0ken\n")
    (tmp_path / "loot").write_text("hunter2\n")
    (tmp_path / "loot.yaml").write_text("limits: {in_flight: hunter2}\n")
    made = Gateway(parse(POLICY, str(folder / "policy.yaml"), {}))
    made.folder = folder
    return made


def posted(made: Gateway, text: str, file: str = "policy.yaml") -> httpx.Response:
    params = {"force": "true", "file": file}
    return asked("POST", made=made, content=text.encode(), params=params, headers=YAML)


SECRET = "backends: {b: {endpoints: [http://127.0.0.1:1], headers: {x-a: '${file:%s}'}}}\nproxy: b\n"


@pytest.mark.parametrize("name", ["{outside}/loot", "../loot", "teams/../../loot", "teams/../token", "/etc/hostname"])
@pytest.mark.parametrize("file", ["policy.yaml", "{outside}/policy.yaml", "/policy.yaml", "../policy.yaml", ".."])
def test_a_posted_policy_names_no_file_outside_of_the_folder(
    name: str, file: str, served: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    monkeypatch.setattr("policies.files._read", lambda *a, **_: read.append(a))
    name, file = (text.replace("{outside}", str(tmp_path)) for text in (name, file))
    for text in (SECRET % name, f"include: [{name}]\n{OTHER}"):
        answer = posted(served, text, file)
        assert answer.status_code == 400
        (problem,) = answer.json()["problems"]
        assert "is not below the folder of the policy that the gateway serves" in problem
        assert "hunter2" not in problem
    assert read == []


def test_a_posted_policy_names_files_of_the_folder_wherever_it_comes_from(served: Gateway, tmp_path: Path) -> None:
    text = f"include: [teams/a.yaml]\n{SECRET % 'token'}"
    assert posted(served, text, str(tmp_path / "elsewhere/new.yaml")).status_code == 200
    assert {*served.policy.backends} == {"a", "b"}
    assert served.policy.backends["b"].headers["x-a"].value == "t0ken"


def test_a_link_in_the_folder_is_the_operators_own(served: Gateway, tmp_path: Path) -> None:
    assert served.folder is not None
    (served.folder / "linked").symlink_to(tmp_path / "loot")
    assert posted(served, SECRET % "linked").status_code == 200


def test_models_are_relative_to_the_folder_as_in_the_policy_that_is_served(served: Gateway) -> None:
    text = "backends: {b: {local: m.onnx}}\nroutes: {r: {backend: b}}\n"
    assert posted(served, text, "/elsewhere/p.yaml").status_code == 200
    assert str(served.policy.backends["b"].local).count(f"{served.folder}/m.onnx") == 1


def test_without_a_policy_file_a_posted_policy_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("t0ken\n")
    monkeypatch.chdir(tmp_path)
    answer = posted(Gateway(parse(POLICY, "policy.yaml", {})), SECRET % "token")
    assert "names a file, and the gateway serves no policy file" in answer.json()["problems"][0]


@pytest.mark.parametrize("file", ["/home/me/new\n.yaml", "x" * 5000 + ".yaml", "a\0b", "ü.yaml"])
def test_its_name_is_for_messages_alone(file: str, served: Gateway) -> None:
    (problem,) = posted(served, OTHER.replace("proxy: b", "proxy: c"), file).json()["problems"]
    assert problem.isprintable()
    assert len(problem) < 400
    assert str(served.folder) not in problem
    assert file.startswith("x") or problem.startswith(file[:1])

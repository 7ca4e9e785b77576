"""What `deploy/` describes is what is there: Docker and systemd are not run here, so their files are read."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ruamel.yaml import YAML

from gateway.drain import CLOSE_SECONDS
from gateway.telemetry import _FLUSH_SECONDS
from gateway.workers import STOP_SECONDS
from policies import Policy, parse
from policies.spec import Limits
from policies.units import duration

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LONGEST_END = Limits().drain_delay + Limits().drain + max(CLOSE_SECONDS + _FLUSH_SECONDS, STOP_SECONDS)
# A name, perhaps with a registry's, and a version; `latest` is whatever somebody pushed last.
PINNED = re.compile(r"[a-z0-9./-]+:(?!latest)[a-z0-9.-]*[0-9]+\.[0-9]+[a-z0-9.-]*(@sha256:[0-9a-f]{64})?")
PORTS = ("8000", "8001", "8002", "8003")


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return listed.splitlines()


# The image.


class Step(NamedTuple):
    name: str
    rest: str

    @property
    def words(self) -> list[str]:
        """An exec form's words; none where it is a shell's."""
        found = self.rest[self.rest.find("[") :] if "[" in self.rest else ""
        return list(json.loads(found)) if found.endswith("]") else []


def steps() -> list[Step]:
    text = "\n".join(line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [Step(*line.split(maxsplit=1)) for line in lines if line.strip()]


def of(name: str) -> list[Step]:
    return [step for step in steps() if step.name == name]


def copied() -> list[str]:
    """What COPY takes from the context."""
    taken = [shlex.split(step.rest) for step in of("COPY") if "--from=" not in step.rest]
    return [source for words in taken for source in words[:-1]]


def let_in(path: str) -> bool:
    """Whether .dockerignore leaves `path` in the context: the last line that matches it, or a folder of it, decides."""
    parts = path.split("/")
    heads = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        anywhere = pattern.startswith("**/")
        candidates = parts if anywhere else heads
        if not line.startswith("#") and fnmatch.filter(candidates, pattern.removeprefix("**/")):
            kept = line.startswith("!")
    return kept


def test_the_image_is_made_of_what_is_in_git_and_let_into_the_context() -> None:
    files = tracked()
    assert copied()
    for source in copied():
        below = [file for file in files if file == source or file.startswith(f"{source}/")]
        assert below, f"COPY {source}: not in git"
        assert all(map(let_in, below)), f"COPY {source}: .dockerignore keeps it out"
    for kept_out in (
        "deploy/secrets/redis_password",
        ".git/config",
        "build/venv/pyvenv.cfg",
        "gateway/__pycache__/x.pyc",
    ):
        assert not let_in(kept_out), kept_out


def test_every_package_and_what_the_build_reads_is_copied() -> None:
    packages = PROJECT["tool"]["setuptools"]["packages"]
    assert {package.partition(".")[0] for package in packages} <= set(copied())
    assert {"pyproject.toml", PROJECT["project"]["readme"]} <= set(copied())


def test_the_image_is_pinned_small_and_unprivileged() -> None:
    bases = [step.rest.split()[0] for step in of("FROM")]
    assert len(bases) == 2
    assert all(PINNED.fullmatch(base) and "slim" in base for base in bases)
    last = steps()[max(i for i, step in enumerate(steps()) if step.name == "FROM") :]
    assert not [step for step in last if step.name == "RUN"]  # neither pip nor a compiler is ever there
    (user,) = (step.rest for step in last if step.name == "USER")
    assert re.fullmatch(r"[1-9][0-9]*:[1-9][0-9]*", user)


def test_the_image_starts_the_command_without_a_shell() -> None:
    (entry,) = of("ENTRYPOINT")
    assert entry.words[0] in PROJECT["project"]["scripts"]
    assert entry.words == ["headrace", "serve"]
    for name in ("RUN", "CMD", "HEALTHCHECK"):
        assert of(name)
        assert all(step.words for step in of(name)), f"{name} in shell form"
    (exposed,) = (step.rest.split() for step in of("EXPOSE"))
    assert tuple(exposed) == PORTS
    wanted = {extra for step in of("RUN") for word in step.words for extra in re.findall(r"\[(.*)\]", word)}
    assert {name for extras in wanted for name in extras.split(",")} <= set(PROJECT["project"]["optional-dependencies"])


def test_the_health_check_asks_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = of("HEALTHCHECK")
    given = dict(part.split("=", 1) for step in of("ENV") for part in step.rest.split())
    assert given["HEADRACE_LIVE"] == f"http://127.0.0.1:{PORTS[0]}/livez"
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: asked.append((url, timeout)))
    monkeypatch.setenv("HEADRACE_LIVE", "http://127.0.0.1:9000/livez")
    exec(check.words[2])
    assert asked == [("http://127.0.0.1:9000/livez", 2)]


# Compose.


def compose() -> Any:
    """compose.yaml with the defaults of its variables."""
    text = (DEPLOY / "compose.yaml").read_text()
    text = re.sub(r"(?<!\$)\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)
    assert "${" not in text.replace("$$", "")
    return YAML(typ="safe").load(text)


def collector() -> Any:
    return YAML(typ="safe").load((DEPLOY / "otel-collector.yaml").read_text())


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """The policy as the gateway of compose.yaml reads it, with a secret as its comment makes one."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/redis_password").write_text("0123abcd\n")
    text = (DEPLOY / "compose-policy.yaml").read_text()
    return parse(text, str(tmp_path / "compose-policy.yaml"), compose()["services"]["gateway"]["environment"])


def test_images_are_pinned_and_ports_are_on_loopback() -> None:
    services = compose()["services"]
    for name, service in services.items():
        assert PINNED.fullmatch(service["image"]), name
        for port in service.get("ports", ()):
            assert re.fullmatch(r"127\.0\.0\.1:([0-9]+):\1", port), port
        assert service["restart"] == "unless-stopped"
        assert service["mem_limit"]
    assert [port.rpartition(":")[2] for port in services["gateway"]["ports"]] == list(PORTS)
    assert services["gateway"]["image"] == f"headrace:{PROJECT['project']['version']}"
    build = services["gateway"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_mounts_exist_and_the_policys_is_a_directory() -> None:
    document, files = compose(), tracked()
    for service in document["services"].values():
        for mount in service.get("volumes", ()):
            source, target, mode = mount.split(":")
            assert mode == "ro"
            assert (DEPLOY / source).exists(), mount
            if service is document["services"]["gateway"]:
                assert (DEPLOY / source).is_dir()
                (command,) = service["command"]
                assert (DEPLOY / source / Path(command).relative_to(target)).is_file()
    secret = document["secrets"]["redis_password"]["file"].removeprefix("./")
    assert f"deploy/{secret}" not in files
    assert f"deploy/{Path(secret).parent}/.gitignore" in files
    ignored = subprocess.run(["git", "check-ignore", "-q", f"deploy/{secret}"], cwd=ROOT, check=False)
    assert ignored.returncode == 0


def test_the_gateway_has_the_time_it_takes_to_end() -> None:
    assert duration(compose()["services"]["gateway"]["stop_grace_period"]) > LONGEST_END


def test_the_policy_is_good_and_names_the_services_of_compose(policy: Policy) -> None:
    services = compose()["services"]
    assert policy.redis is not None
    assert policy.redis.host in services
    assert policy.redis.password is not None
    assert policy.redis.password.value == "0123abcd"
    assert any(arm.cache and arm.cache.store == "redis" for route in policy.routes.values() for arm in route.arms)
    listening = [getattr(policy.listen, name) for name in ("http", "grpc", "metrics", "admin")]
    assert [str(at.port) for at in listening] == list(PORTS)
    assert all(at.host == "0.0.0.0" for at in listening)  # what a container publishes comes from outside of it
    depends = services["gateway"]["depends_on"]
    assert {"redis", "collector"} == set(depends)
    assert depends["redis"]["condition"] == "service_healthy"
    assert services["redis"]["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")


def test_redis_is_bounded_and_its_password_is_no_argument() -> None:
    redis = compose()["services"]["redis"]
    script = redis["command"][-1].replace("$$", "$")
    options, _, stdin = script.partition("<<END")
    assert "--maxmemory 256mb --maxmemory-policy allkeys-lru" in options
    assert "password" not in options
    assert "requirepass $(cat /run/secrets/redis_password)" in stdin
    subprocess.run(["sh", "-n", "-c", script], check=True)


def test_the_collector_takes_what_the_gateway_sends() -> None:
    services, document = compose()["services"], collector()
    endpoint = services["gateway"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    host, port = re.fullmatch(r"http://([a-z]+):([0-9]+)", endpoint).groups()  # type: ignore[union-attr]
    assert host in services
    assert document["receivers"]["otlp"]["protocols"]["http"]["endpoint"] == f"0.0.0.0:{port}"
    assert port == "4318"
    (scraped,) = document["receivers"]["prometheus"]["config"]["scrape_configs"]
    (target,) = scraped["static_configs"][0]["targets"]
    assert target == f"gateway:{PORTS[2]}"
    mounted = services["collector"]["volumes"][0].split(":")[1]
    assert services["collector"]["command"] == [f"--config={mounted}"]


def test_the_collectors_pipelines_are_made_of_what_is_there() -> None:
    document = collector()
    used: dict[str, set[str]] = {"receivers": set(), "processors": set(), "exporters": set()}
    for pipeline in document["service"]["pipelines"].values():
        for kind, names in used.items():
            names |= set(pipeline[kind])
        assert pipeline["processors"][0] == "memory_limiter"
    assert used == {kind: set(document[kind]) for kind in used}
    assert document["processors"]["memory_limiter"]["limit_mib"] < 256


# systemd.

DIRECTIVES = {
    "Unit": {"Description", "Wants", "After"},
    "Service": {
        "Type", "ExecStart", "ExecReload", "EnvironmentFile", "KillSignal", "KillMode", "TimeoutStopSec", "Restart",
        "RestartSec", "LimitNOFILE", "DynamicUser", "NoNewPrivileges", "CapabilityBoundingSet", "ProtectSystem",
        "ProtectHome", "ProtectClock", "ProtectHostname", "ProtectControlGroups", "ProtectKernelLogs",
        "ProtectKernelModules", "ProtectKernelTunables", "ProtectProc", "PrivateTmp", "PrivateDevices",
        "RestrictAddressFamilies", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "LockPersonality",
        "SystemCallArchitectures", "SystemCallFilter", "UMask",
    },
    "Install": {"WantedBy"},
}  # fmt: skip


def unit() -> dict[str, dict[str, str]]:
    made: dict[str, dict[str, str]] = {}
    for line in (DEPLOY / "headrace.service").read_text().splitlines():
        if line.startswith("["):
            section = made.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            assert key not in section, f"{key} twice"
            section[key] = value
    return made


def test_the_unit_says_what_systemd_knows() -> None:
    found = unit()
    assert found.keys() == DIRECTIVES.keys()
    for section, keys in found.items():
        assert keys.keys() <= DIRECTIVES[section]


def test_the_unit_starts_reloads_and_ends_the_gateway() -> None:
    service = unit()["Service"]
    command = service["ExecStart"].split()
    assert Path(command[0]).name in PROJECT["project"]["scripts"]
    assert command[1] == "serve"
    assert service["Type"] == "exec"
    assert service["ExecReload"] == "kill -HUP $MAINPID"
    assert service["KillSignal"] == "SIGTERM"
    assert float(service["TimeoutStopSec"]) > LONGEST_END
    assert service["Restart"] == "on-failure"
    assert service["EnvironmentFile"].startswith("-")
    assert (service["DynamicUser"], service["NoNewPrivileges"], service["ProtectSystem"]) == ("yes", "yes", "strict")


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return  # not everywhere where this project is tested; what it says of the unit is the same everywhere
    text = (DEPLOY / "headrace.service").read_text()
    copy = tmp_path / "headrace.service"
    copy.write_text(re.sub(r"ExecStart=\S+", f"ExecStart={shutil.which('true')}", text))
    answer = subprocess.run([analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")

"""`headrace policy apply` with files of their own: those beside the policy that is served, and no others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.serve import HEADRACE, Served, served

POLICY = """
include: [teams/a.yaml]
backends:
  b: {endpoints: [http://127.0.0.1:1], headers: {x-a: "${file:NAME}"}}
proxy: b
"""


def apply(gateway: Served, policy: Path) -> subprocess.CompletedProcess[str]:
    line = [HEADRACE, "policy", "apply", str(policy), "--force", "--admin", f"http://{gateway.admin}"]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_policy_is_applied_with_the_files_beside_the_one_that_is_served(workers: str, tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    (folder / "teams").mkdir(parents=True)
    (folder / "teams/a.yaml").write_text("backends: {a: {endpoints: [http://127.0.0.1:3]}}\n")
    (folder / "token").write_text("t0ken\n")
    (tmp_path / "loot").write_text("hunter2\n")
    policy, good, bad = folder / "policy.yaml", folder / "good.yaml", folder / "bad.yaml"
    policy.write_text("backends: {b: {endpoints: [http://127.0.0.1:1]}}\nproxy: b\n")
    good.write_text(POLICY.replace("NAME", "token"))
    bad.write_text(POLICY.replace("NAME", "../loot"))
    with served(tmp_path, str(policy), "--workers", workers, wait=(503,)) as gateway:
        done = apply(gateway, good)
        assert done.returncode == 0, done.stderr
        shown = httpx.get(f"http://{gateway.admin}/policy").json()
        assert {*shown["backends"]} == {"a", "b"}
        refused = apply(gateway, bad)
        assert refused.returncode == 1
        (line,) = refused.stderr.splitlines()
        assert line.startswith(f"{bad}:4: backends.b.headers.x-a: '../loot' is not below the folder of the policy")
        assert httpx.get(f"http://{gateway.admin}/policy").json()["version"] == shown["version"]
        # As curl does, and as a page in a browser would.
        url, yaml = f"http://{gateway.admin}/policy/rollback", {"content-type": "application/yaml"}
        assert httpx.post(url, headers=yaml | {"origin": "http://evil.example"}).status_code == 403
        assert httpx.post(url, headers={"content-type": "text/plain"}).status_code == 403
        assert httpx.post(url, headers=yaml).status_code == 200

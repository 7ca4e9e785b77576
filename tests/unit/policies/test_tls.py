"""The policy's TLS: files that are read, tried and shown by their names alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.admin import plain
from gateway.guard import Below
from policies import PolicyError, load, parse
from policies.explain import Setting, explain
from policies.files import Files
from policies.spec import BackendTls, Policy
from tests.support.certificates import Authority

BACKENDS = "backends: {a: {endpoints: ['https://h:1', {http: 'http://x:1', grpc: 'grpcs://g:2'}]%s}}\nproxy: a\n"
LISTEN = BACKENDS % "" + "listen: {tls: {certificate: server.crt, key: server.key%s}}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tls")
    authority = Authority(made)
    authority.pair("server", "127.0.0.1")
    authority.pair("other")
    (made / "empty.pem").write_text("")
    secret = (made / "server.key").read_text()
    (made / "encrypted.key").write_text(secret.replace("PRIVATE KEY-----", "ENCRYPTED PRIVATE KEY-----"))
    (made / "binary.key").write_bytes(b"\xff\x00")
    return made


def read(folder: Path, text: str, files: Files | None = None) -> Policy:
    return parse(text, str(folder / "p.yaml"), {"KEY": "hunter2"}, files)


def test_the_listeners_certificate_is_what_the_files_say(folder: Path) -> None:
    files = Files()
    tls = read(folder, LISTEN % ", client_ca: ca.pem", files).listen.tls
    assert tls is not None
    assert tls.client_ca is not None
    assert (tls.certificate.path, tls.client_ca.path) == (str(folder / "server.crt"), str(folder / "ca.pem"))
    assert tls.key.text.value == (folder / "server.key").read_text()
    assert {folder / name for name in ("server.crt", "server.key", "ca.pem")} <= set(files.seen)
    assert read(folder, LISTEN % "").listen.tls == replace(tls, client_ca=None)


def test_a_backends_addresses_say_where_tls_is_spoken(folder: Path) -> None:
    backend = read(folder, BACKENDS % ", tls: {ca_file: ca.pem, server_name: inner.test}").backends["a"]
    first, second = backend.endpoints
    assert (first.http, first.tls, str(first)) == ("https://h:1", True, "https://h:1")
    assert (second.grpc, second.grpc_target, second.grpc_tls, second.tls) == ("grpcs://g:2", "g:2", True, True)
    assert (str(backend.tls.ca_file), backend.tls.server_name) == (str(folder / "ca.pem"), "inner.test")
    assert read(folder, BACKENDS % "").backends["a"].tls == BackendTls()
    (alone,) = read(folder, "backends: {a: {endpoints: ['grpcs://g:2']}}\nproxy: a\n").backends["a"].endpoints
    assert (alone.http, alone.grpc, str(alone)) == (None, "grpcs://g:2", "grpcs://g:2")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LISTEN % ", client_ca: empty.pem", "3: listen.tls.client_ca: no certificate is in the file;"
         " expected PEM: -----BEGIN CERTIFICATE-----"),
        (LISTEN.replace("server.key", "other.key") % "", "3: listen.tls.key: the key is not that of the certificate;"
         " write both files of one pair"),
        (LISTEN.replace("server.crt", "server.key") % "", "3: listen.tls.certificate: no certificate is in the file;"
         " expected PEM: -----BEGIN CERTIFICATE-----"),
        (LISTEN.replace("server.key", "server.crt") % "", "3: listen.tls.key: no private key is in the file;"
         " expected PEM: -----BEGIN PRIVATE KEY-----"),
        (LISTEN.replace("server.key", "encrypted.key") % "", "3: listen.tls.key: the key is encrypted,"
         " and nobody is there to be asked for a passphrase; decrypt it"),
        (LISTEN.replace("server.key", "nowhere.key") % "",
         "3: listen.tls.key: 'nowhere.key' cannot be read: No such file or directory"),
        (LISTEN.replace("server.key", "binary.key") % "",
         "3: listen.tls.key: 'binary.key' not UTF-8 text; save the file as UTF-8"),
        (LISTEN.replace("server.key", "'${KEY}'") % "",
         "3: listen.tls.key: '${KEY}' cannot be read: No such file or directory"),
        (BACKENDS % "" + "listen: {tls: {certificate: server.crt}}", "3: listen.tls: the key 'key' is missing"),
        (BACKENDS % ", tls: {certificate: server.crt}", "1: backends.a.tls.certificate: 'certificate' without 'key';"
         " write both, or neither"),
        (BACKENDS % ", tls: {key: server.key}", "1: backends.a.tls.key: 'key' without 'certificate';"
         " write both, or neither"),
        (BACKENDS % ", tls: {server_name: 'https://x'}",
         "1: backends.a.tls.server_name: expected a host's name, got 'https://x'"),
        ("backends:\n  a:\n    endpoints: ['http://h:1']\n    tls: {}\nproxy: a\n",
         "4: backends.a.tls: 'tls' says how TLS is spoken, and no endpoint speaks it;"
         " write https:// or grpcs:// in 'endpoints', or delete it"),
        ("backends: {a: {local: m.onnx, tls: {}}}\nroutes: {r: {backend: a}}\n",
         "1: backends.a.tls: a model in this process has no server; delete 'tls'"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(folder: Path, text: str, problem: str) -> None:
    with pytest.raises(PolicyError) as caught:
        read(folder, text)
    assert str(caught.value) == f"{folder / 'p.yaml'}:{problem}"


def test_a_file_that_changes_is_another_policy_and_the_same_text(folder: Path, tmp_path: Path) -> None:
    pair = Authority(tmp_path).pair("server", "127.0.0.1")
    (tmp_path / "p.yaml").write_text(LISTEN % "")
    files = Files()
    before = load(tmp_path / "p.yaml", {}, files)
    assert not files.changed()
    pair.become(Authority(tmp_path, "fresh").pair("next", "127.0.0.1"))
    assert files.changed()
    after = load(tmp_path / "p.yaml", {}, files)
    assert after != before
    assert after.version == before.version
    # What a process settled when it opened its ports is the same.
    assert after.listen.opened == before.listen.opened
    assert read(folder, LISTEN % ", client_ca: ca.pem").listen.opened != before.listen.opened
    assert read(folder, BACKENDS % "").listen.opened != before.listen.opened


def test_nothing_that_the_files_say_is_shown(folder: Path) -> None:
    text = LISTEN % ", client_ca: ca.pem" + ""
    text = text.replace("]}}", "], tls: {ca_file: ca.pem, certificate: server.crt, key: server.key}}}", 1)
    policy = read(folder, text)
    told = explain(text, str(folder / "p.yaml"), {})
    shown = f"{policy!r} {policy.listen.tls} {plain(policy)} {told}"
    secret = (folder / "server.key").read_text().splitlines()[1]
    assert policy.backends["a"].tls.key is not None
    assert secret in policy.backends["a"].tls.key.text.value
    assert secret not in shown
    assert "BEGIN" not in shown

    def settings(setting: Setting) -> dict[str, str]:
        return {setting.key: setting.value} | {k: v for part in setting.parts for k, v in settings(part).items()}

    assert settings(told)["client_ca"] == str(folder / "ca.pem")


def test_a_posted_policy_names_files_below_the_folder_that_is_served(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for served in (folder, Path()):  # as the command was given it
        assert parse(LISTEN % "", str(served / "policy"), {}, Below(served)).listen.tls is not None
        for name in (f"{folder.parent}/server.key", "../server.key"):
            with pytest.raises(PolicyError, match=r"3: listen\.tls\.key: '.*' is not below the folder of the policy"):
                parse(LISTEN.replace("server.key", name) % "", str(served / "policy"), {}, Below(served))
    with pytest.raises(PolicyError, match="the gateway serves no policy file"):
        parse(LISTEN % "", "policy", {}, Below(None))

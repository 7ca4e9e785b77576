"""Certificates that change under a running gateway: the installed command, before a small model server."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.certificates import Authority, Pair
from tests.support.kserve import kserve
from tests.support.serve import Served, served, within

POLICY = """
listen: {{tls: {{certificate: tls/tls.crt, key: tls/tls.key}}}}
backends: {{b: {{endpoints: [{url}], model: m}}}}
routes: {{r: {{backend: b}}}}
"""
BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}


def mount(folder: Path, pair: Pair, generation: str) -> None:
    """A secret as Kubernetes mounts it: the names are links into `..data`, which is a link that is swapped."""
    secret = folder / "tls"
    (secret / generation).mkdir(parents=True)
    for name, file in (("tls.crt", pair.certificate), ("tls.key", pair.key)):
        (secret / generation / name).write_bytes(file.read_bytes())
        if not (secret / name).is_symlink():
            (secret / name).symlink_to(f"..data/{name}")
    (secret / "..fresh").symlink_to(generation)
    os.replace(secret / "..fresh", secret / "..data")


def shown(address: str, context: ssl.SSLContext) -> str:
    """The serial number of the certificate that a new connection is shown."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as raw,
        context.wrap_socket(raw, server_hostname=host) as secured,
    ):
        return str((secured.getpeercert() or {})["serialNumber"])


def told(gateway: Served, message: str) -> list[dict[str, Any]]:
    lines = (msgspec.json.decode(line) for line in gateway.logged().splitlines())
    return [line for line in lines if line["message"] == message]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path, workers: int) -> None:
    authority = Authority(tmp_path)
    old, new, last = (authority.pair(name, "127.0.0.1") for name in ("old", "new", "last"))
    trusting, grpc = authority.trusting(), authority.trusting()
    grpc.set_alpn_protocols(["h2"])
    mount(tmp_path, old, "first")
    with kserve() as server:
        (tmp_path / "p.yaml").write_text(POLICY.format(url=server.url))
        with served(tmp_path, str(tmp_path / "p.yaml"), f"--workers={workers}", tls=trusting) as gateway:
            assert within(10, lambda: len(told(gateway, "headrace is up")) == workers)

            def everywhere() -> set[str]:
                """Of every worker: the kernel hands connections out."""
                return {shown(at, by) for at, by in ((gateway.http, trusting), (gateway.grpc, grpc)) for _ in range(12)}

            failed: list[Any] = []
            stop = threading.Event()

            def load() -> None:
                """Requests on a connection of their own and on one that is kept, in turn."""
                with httpx.Client(verify=trusting, timeout=20) as client:
                    while not stop.is_set():
                        for headers in ({"connection": "close"}, {}, {}):
                            try:
                                url = f"https://{gateway.http}/v2/models/r/infer"
                                answer = client.post(url, json=BODY, headers=headers)
                                if answer.status_code != 200:
                                    failed.append(answer.text)
                            except httpx.TransportError as error:
                                failed.append(repr(error))

            loading = threading.Thread(target=load)
            loading.start()
            try:
                first = everywhere()
                assert len(first) == 1
                mount(tmp_path, new, "second")
                assert within(10, lambda: len(everywhere() - first) == 1 and not everywhere() & first)
                second = everywhere()
                # What cannot be used is refused in one line, and what was there before stays in force.
                mount(tmp_path, Pair(new.certificate, old.key), "broken")
                assert within(10, lambda: len(told(gateway, "policy refused")) == workers)
                assert everywhere() == second
                problem = told(gateway, "policy refused")[0]["problems"]
                assert problem.endswith(
                    "p.yaml:2: listen.tls.key: the key is not that of the certificate; write both files of one pair"
                )
                refused = httpx.get(f"http://{gateway.admin}/policy").json()["refused"]
                assert refused
                assert "PRIVATE" not in gateway.logged() + str(httpx.get(f"http://{gateway.admin}/policy").json())
                # The next good one ends that.
                mount(tmp_path, last, "third")
                assert within(10, lambda: len(everywhere()) == 1 and not everywhere() & second)
                assert len(told(gateway, "policy refused")) == workers
            finally:
                stop.set()
                loading.join()
            assert failed == []
            # A renewal is nothing that could be rolled back.
            header = {"content-type": "application/yaml"}
            assert httpx.post(f"http://{gateway.admin}/policy/rollback", headers=header).status_code == 409


def test_a_posted_policy_and_a_rollback_leave_the_certificate_alone(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    old, new = (authority.pair(name, "127.0.0.1") for name in ("old", "new"))
    trusting = authority.trusting()
    mount(tmp_path, old, "first")
    header = {"content-type": "application/yaml"}
    with kserve() as server:
        (tmp_path / "p.yaml").write_text(POLICY.format(url=server.url))
        with served(tmp_path, str(tmp_path / "p.yaml"), tls=trusting) as gateway:
            first = shown(gateway.http, trusting)
            posted = POLICY.format(url=server.url).replace("\nlisten", "\nx-listen").replace("{r:", "{s:")
            assert httpx.post(f"http://{gateway.admin}/policy", content=posted, headers=header).status_code == 200
            assert shown(gateway.http, trusting) == first
            mount(tmp_path, new, "second")
            assert within(10, lambda: shown(gateway.http, trusting) != first)
            second = shown(gateway.http, trusting)
            # By the renewal the file is in force again, and what was posted is what a rollback goes back to.
            assert httpx.post(f"http://{gateway.admin}/policy/rollback", headers=header).status_code == 200
            assert shown(gateway.http, trusting) == second
            (tmp_path / "p.yaml").write_text(POLICY.format(url=server.url).replace("\nlisten", "\nx-listen"))
            assert within(10, lambda: bool(told(gateway, "policy refused")))
            assert "the listeners of a running gateway cannot change" in told(gateway, "policy refused")[0]["problems"]
            assert shown(gateway.http, trusting) == second


def test_a_renewed_certificate_is_shown_to_servers(tmp_path: Path) -> None:
    """Two gateways: the first shows the second one a certificate that it does not know, then one that it does."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    mount(tmp_path, authority.pair("server", "127.0.0.1"), "first")
    ours, known = stranger.pair("ours"), authority.pair("known")
    trusting = authority.trusting(known)
    (tmp_path / "outer").mkdir()
    with kserve() as server:
        inner = POLICY.format(url=server.url).replace("tls.key}}", "tls.key, client_ca: ca.pem}}")
        (tmp_path / "p.yaml").write_text(inner)
        with served(tmp_path, str(tmp_path / "p.yaml"), tls=trusting) as behind:
            tls = "{ca_file: ../ca.pem, certificate: ../ours.crt, key: ../ours.key}"
            endpoints = f"endpoints: ['https://{behind.http}', 'https://localhost:{behind.http.rpartition(':')[2]}']"
            outer = f"backends: {{b: {{{endpoints}, model: r, tls: {tls}}}}}\nroutes: {{r: {{backend: b}}}}\n"
            (tmp_path / "outer" / "p.yaml").write_text(outer)
            with served(tmp_path / "outer", str(tmp_path / "outer" / "p.yaml"), wait=(503,)) as gateway:

                def endpoint() -> dict[str, Any]:
                    found = httpx.get(f"http://{gateway.admin}/backends").json()["b"]["endpoints"][0]
                    assert isinstance(found, dict)
                    return found

                assert endpoint()["reason"].startswith(f"cannot connect to {behind.http}: TLS failed: ")
                assert "alert" in endpoint()["reason"]
                ours.become(known)
                assert within(10, lambda: endpoint()["ready"] is True)
                url = f"http://{gateway.http}/v2/models/r/infer"
                assert httpx.post(url, json=BODY).json()["outputs"][0]["data"] == [2.0]
                reason = told(gateway, "endpoint not ready")[-1]["reason"]
                assert "\n" not in reason
                assert "PRIVATE" not in gateway.logged()

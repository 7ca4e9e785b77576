"""TLS all the way: Triton's own clients, two gateways in a row, and a real tritonserver, each with certificates."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from deploy.demo.repository import write_test_models
from deploy.demo.triton import Triton, ensure_venv
from tests.support.certificates import Authority, Pair
from tests.support.serve import HEADRACE, Served, served, within
from tests.support.triton import VENV

INNER = """
listen: {{tls: {{certificate: {folder}/inner.crt, key: {folder}/inner.key, client_ca: {folder}/ca.pem}}}}
backends:
  triton:
    endpoints: [{{http: http://{http}, grpc: grpcs://{grpc}}}]
    protocol: grpc
    tls: {{ca_file: {folder}/ca.pem, certificate: {folder}/client.crt, key: {folder}/client.key}}
proxy: triton
"""
OUTER = """
listen: {{tls: {{certificate: outer.crt, key: outer.key, client_ca: ca.pem}}}}
backends:
  http: &inner
    endpoints: [{{http: https://{http}, grpc: grpcs://{grpc}}}]
    model: rowsum
    protocol: http
    tls: {{ca_file: ca.pem, certificate: client.crt, key: client.key}}
  grpc: {{<<: *inner, protocol: grpc}}
  merged: {{<<: *inner, protocol: http, batch: {{max_rows: 4}}}}
  named: {{<<: *inner, tls: {{ca_file: ca.pem, certificate: client.crt, key: client.key, server_name: inner.test}}}}
  unnamed: {{<<: *inner, tls: {{ca_file: ca.pem, certificate: client.crt, key: client.key, server_name: other.test}}}}
  nameless: {{<<: *inner, protocol: grpc, tls: {{ca_file: ca.pem}}}}
  strange: {{<<: *inner, tls: {{ca_file: stranger.pem, certificate: client.crt, key: client.key}}}}
routes:
  over-http: {{backend: http}}
  over-grpc: {{backend: grpc}}
  over-merged: {{backend: merged}}
  over-named: {{backend: named}}
  over-unnamed: {{backend: unnamed}}
  over-nameless: {{backend: nameless}}
  over-strange: {{backend: strange}}
"""
BAD = ("unnamed", "nameless", "strange")
VALUE = np.arange(32, dtype=np.float32).reshape(2, 16)
_REFUSED = re.compile("ssl|reset|closed|alert", re.IGNORECASE)
GOOD = ("over-http", "over-grpc", "over-merged", "over-named")


class Chain:
    """A caller's files, and the gateway that it meets: behind it another one, and behind that Triton, by gRPC."""

    def __init__(self, folder: Path, authority: Authority, gateway: Served, inner: Served, triton: Triton) -> None:
        self.folder = folder
        self.triton = triton
        with httpclient.InferenceServerClient(triton.http) as client:
            self.want = rowsum(httpclient, client, "rowsum")
        self.authority = authority
        self.gateway = gateway
        self.inner = inner
        self.client = {name: str(folder / f"client.{name}") for name in ("crt", "key")}
        self.ca = str(authority.ca)

    def http(self, pair: str = "client") -> httpclient.InferenceServerClient:
        """With the certificate `pair`; without one where that is empty."""
        ours = {"certfile": f"{self.folder}/{pair}.crt", "keyfile": f"{self.folder}/{pair}.key"} if pair else {}
        return httpclient.InferenceServerClient(self.gateway.http, ssl=True, ssl_options={"ca_certs": self.ca} | ours)

    def grpc(self, **more: Any) -> grpcclient.InferenceServerClient:
        files = {
            "root_certificates": self.ca,
            "private_key": self.client["key"],
            "certificate_chain": self.client["crt"],
        }
        return grpcclient.InferenceServerClient(self.gateway.grpc, ssl=True, **files | more)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    Authority(folder, "stranger").pair("intruder")
    for name in ("triton", "outer"):
        authority.pair(name, "127.0.0.1")
    authority.pair("inner", "127.0.0.1", "inner.test")
    client = authority.trusting(authority.pair("client"))
    own = f"--grpc-server-cert={folder}/triton.crt --grpc-server-key={folder}/triton.key"
    more = ["--grpc-use-ssl=1", "--grpc-use-ssl-mutual=1", *own.split(), f"--grpc-root-cert={folder}/ca.pem"]
    models = write_test_models(folder / "models")
    log = folder / "triton.log"
    with Triton(ensure_venv(VENV), models, log=log, models=["echo", "rowsum"], more=more) as server:
        (folder / "in").mkdir()
        (folder / "in" / "p.yaml").write_text(INNER.format(folder=folder, http=server.http, grpc=server.grpc))
        with served(folder / "in", str(folder / "in" / "p.yaml"), tls=client) as inner:
            (folder / "p.yaml").write_text(OUTER.format(http=inner.http, grpc=inner.grpc))
            with served(folder, str(folder / "p.yaml"), tls=client) as gateway:
                yield Chain(folder, authority, gateway, inner, server)


def rowsum(kind: Any, client: Any, model: str) -> list[float]:
    tensor = kind.InferInput("X", VALUE.shape, "FP32")
    tensor.set_data_from_numpy(VALUE)
    answer: list[float] = client.infer(model, [tensor]).as_numpy("Y").reshape(-1).tolist()
    return answer


@pytest.mark.parametrize("route", GOOD)
def test_tritons_own_clients_are_answered(chain: Chain, route: str) -> None:
    with chain.http() as client:
        assert client.is_server_ready()
        assert rowsum(httpclient, client, route) == chain.want
    with chain.grpc() as client:
        assert client.is_server_ready()
        assert rowsum(grpcclient, client, route) == chain.want


def test_tritons_own_clients_are_refused_without_a_certificate(chain: Chain) -> None:
    for pair in ("", "intruder"):
        with chain.http(pair) as client, pytest.raises((OSError, ssl.SSLError), match=_REFUSED):
            client.is_server_live()
    with (
        chain.grpc(private_key=None, certificate_chain=None) as grpc,
        pytest.raises(InferenceServerException, match="failed to connect"),
    ):
        grpc.is_server_live()
    # Nothing of this is worth a line.
    assert "andshake" not in chain.gateway.logged()


def test_a_stream_passes_both_gateways(chain: Chain) -> None:
    """Relayed as gRPC, message by message."""

    async def main() -> None:
        answers: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        with chain.grpc() as client:
            client.start_stream(lambda result, error: loop.call_soon_threadsafe(answers.put_nowait, (result, error)))
            tensor = grpcclient.InferInput("X", VALUE.shape, "FP32")
            tensor.set_data_from_numpy(VALUE)
            for _ in range(3):
                client.async_stream_infer("over-grpc", [tensor])
                result, error = await asyncio.wait_for(answers.get(), 10)
                assert error is None
                assert result.as_numpy("Y").reshape(-1).tolist() == chain.want
            client.stop_stream()

    asyncio.run(main())


def test_each_backend_says_in_a_line_why_it_is_not_ready(chain: Chain) -> None:
    def backends() -> dict[str, Any]:
        told = httpx.get(f"http://{chain.gateway.admin}/backends").json()
        return {name: backend["endpoints"][0] for name, backend in told.items()}

    assert within(10, lambda: all(backends()[name]["ready"] is False for name in BAD))
    found = backends()
    url = f"cannot connect to {chain.inner.http}: certificate verify failed: "
    assert all(found[name]["ready"] for name in ("http", "grpc", "merged", "named"))
    assert found["http"]["name"] == f"https://{chain.inner.http}"
    assert found["unnamed"]["reason"] == f"{url}Hostname mismatch, certificate is not valid for 'other.test'"
    assert found["strange"]["reason"] == f"{url}self-signed certificate in certificate chain"
    assert found["nameless"]["reason"].endswith("so ends a server that refuses a client's certificate, or wants one")


def test_spans_say_https(chain: Chain) -> None:
    context = chain.authority.trusting(Pair(chain.folder / "client.crt", chain.folder / "client.key"))
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}
    with httpx.Client(verify=context, timeout=20) as client:
        assert client.post(f"https://{chain.gateway.http}/v2/models/over-http/infer", json=body).status_code == 200
    trace = httpx.get(f"http://{chain.gateway.admin}/traces/last").json()
    attributes = [span["attributes"] for span in trace["spans"]]
    (came,) = [each for each in attributes if "url.scheme" in each]
    (goes,) = [each for each in attributes if "url.full" in each]
    assert came["url.scheme"] == "https"
    assert came["server.port"] == int(chain.gateway.http.rpartition(":")[2])
    assert goes["url.full"] == f"https://{chain.inner.http}/v2/models/rowsum/infer"
    assert goes["server.port"] == int(chain.inner.http.rpartition(":")[2])


# The command line.


def headrace(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HEADRACE, *words], capture_output=True, text=True, timeout=60, check=False)


def test_explain_live_asks_by_tls(chain: Chain) -> None:
    done = headrace("explain", "--live", str(chain.folder / "p.yaml"))
    found = [line for line in done.stdout.splitlines() if line.startswith("finding")]
    assert done.returncode == 1
    assert [line for line in found if not any(f"backends.{name}: " in line for name in BAD)] == [
        f"findings: {len(BAD)}"
    ]
    assert done.stderr.strip().splitlines() == []
    assert "not valid for 'other.test'" in done.stdout
    assert "PRIVATE" not in done.stdout + done.stderr


def test_init_and_serve_without_a_policy_trust_what_the_system_trusts(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    text = INNER.format(folder=chain.folder, http=chain.triton.http, grpc=chain.triton.grpc)
    (tmp_path / "open" / "p.yaml").write_text(text.replace(f", client_ca: {chain.ca}", ""))
    with served(tmp_path / "open", str(tmp_path / "open" / "p.yaml"), tls=chain.authority.trusting()) as front:
        words = f"https://{front.http}", "--grpc", f"grpcs://{front.grpc}"
        unknown = headrace("init", *words)
        assert unknown.returncode == 1
        (line,) = unknown.stderr.strip().splitlines()
        assert line.startswith(f"init: nothing answers at https://{front.http}: ")
        assert line.endswith("certificate verify failed: unable to get local issuer certificate")
        monkeypatch.setenv("SSL_CERT_FILE", chain.ca)
        written = headrace("init", *words)
        assert written.returncode == 0, written.stderr
        assert f"  http: https://{front.http}\n  grpc: grpcs://{front.grpc}  #" in written.stdout
        (tmp_path / "made.yaml").write_text(written.stdout)
        assert headrace("check", str(tmp_path / "made.yaml")).returncode == 0
        with (
            served(
                tmp_path, "--backend", f"https://{front.http}", "--backend-grpc", f"grpcs://{front.grpc}"
            ) as gateway,
            httpclient.InferenceServerClient(gateway.http) as http,
            grpcclient.InferenceServerClient(gateway.grpc) as grpc,
        ):
            assert rowsum(httpclient, http, "rowsum") == rowsum(grpcclient, grpc, "rowsum") == chain.want

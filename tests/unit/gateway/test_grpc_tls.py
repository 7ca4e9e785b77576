"""The gRPC edge and the gRPC client under TLS, one before the other: who is let in, and what is said of who is not."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from backends.errors import Unreachable
from backends.proto import kserve_pb2 as pb
from backends.request import Infer, Reply, Request, Tensors
from backends.tensor import Tensor
from backends.tls import ClientTls
from backends.triton_grpc import TritonGrpc
from gateway import grpc_server
from gateway.grpc import GrpcEdge
from policies.spec import BackendTls, ListenTls
from tests.support.certificates import Place, pem

METHOD = "/inference.GRPCInferenceService/ServerLive"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("tls"))


async def nobody(request: Request) -> Reply:
    raise AssertionError("no request should come")


@asynccontextmanager
async def serving(tls: ListenTls) -> AsyncIterator[tuple[GrpcEdge, int]]:
    edge = GrpcEdge(
        nobody,
        now=time.monotonic,
        max_message_bytes=lambda: 1 << 20,
        ready=lambda: True,
        grpc_status=lambda failure: (13, failure.message, ()),
        decision_headers=lambda reply: (),
        refused=lambda failure: None,
        report=lambda error: None,
        tls=tls,
    )
    port = await edge.start(["127.0.0.1:0"])
    try:
        yield edge, port
    finally:
        await edge.stop(0)


async def resolve(host: str) -> tuple[str, ...]:
    return ("127.0.0.1",)


async def unready(address: str, tls: ClientTls) -> str:
    """Why the server is not ready, as our client finds it."""
    client = TritonGrpc(
        address, now=time.monotonic, connect_timeout=2, max_message_bytes=1 << 20, resolve=resolve, tls=tls
    )
    try:
        return await client.unready("", time.monotonic() + 5, {})
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("server", ""),
        ("unknown", "certificate verify failed: unable to get local issuer certificate"),
        ("expired", "certificate verify failed: certificate has expired"),
        ("elsewhere", "certificate verify failed: certificate is not valid for '127.0.0.1'"),
    ],
)
def test_a_server_that_cannot_be_believed_is_unreachable(place: Place, server: str, reason: str) -> None:
    async def main() -> None:
        async with serving(place.listen(getattr(place, server))) as (_, port):
            address = f"127.0.0.1:{port}"
            assert await unready(address, place.tls()) == (f"backend {address}: {reason}" if reason else "")
            if reason:
                client = TritonGrpc(
                    address, now=time.monotonic, connect_timeout=2, max_message_bytes=1 << 20, tls=place.tls()
                )
                inputs = Tensors.of((Tensor("x", "INT8", (1,), b"\1"),))
                with pytest.raises(Unreachable, match="certificate verify failed"):
                    await client(Request(model="m", content=Infer(inputs), deadline=time.monotonic() + 5))
                await client.close()

    asyncio.run(main())


def test_the_name_of_the_host_is_checked_whatever_its_address(place: Place) -> None:
    async def main() -> None:
        async with serving(place.listen(place.server)) as (_, port):
            assert await unready(f"backend.test:{port}", place.tls()) == ""
            assert await unready(f"other.test:{port}", place.tls(name="backend.test")) == ""
            assert await unready(f"127.0.0.1:{port}", place.tls(name="backend.test")) == ""
            wrong = "certificate verify failed: certificate is not valid for 'other.test'"
            assert await unready(f"other.test:{port}", place.tls()) == f"backend other.test:{port}: {wrong}"
            assert (await unready(f"backend.test:{port}", place.tls(name="other.test"))).endswith(wrong)

    asyncio.run(main())


def test_mutual_tls_takes_clients_of_its_authority_alone(place: Place) -> None:
    async def main() -> None:
        async with serving(place.listen(place.server, mutual=True)) as (_, port):
            address = f"127.0.0.1:{port}"
            assert await unready(address, place.tls(place.client)) == ""
            for pair in (None, place.unknown, place.authority.pair("late", expired=True)):
                assert (await unready(address, place.tls(pair))).endswith(
                    "Socket closed; so ends a server that refuses a client's certificate, or wants one"
                )
            assert await unready(address, place.tls(place.client)) == ""

    asyncio.run(main())


def test_without_a_file_the_systems_authorities_are_asked(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(place.listen(place.server)) as (_, port):
            assert "certificate verify failed" in await unready(f"127.0.0.1:{port}", ClientTls(BackendTls()))
            monkeypatch.setenv("SSL_CERT_FILE", str(place.authority.ca))
            assert await unready(f"127.0.0.1:{port}", ClientTls(BackendTls())) == ""

    asyncio.run(main())


def test_who_comes_after_a_renewal_is_shown_another_certificate(place: Place) -> None:
    async def main() -> None:
        async with serving(place.listen(place.server, mutual=True)) as (edge, port):
            address = f"127.0.0.1:{port}"
            client = place.tls(place.client)
            trusted, key, certificate = await client.pems()
            credentials = grpc.ssl_channel_credentials(trusted, key, certificate)
            async with grpc.aio.secure_channel(address, credentials) as channel:
                live = channel.unary_unary(METHOD)
                await live(b"", timeout=5)
                edge.renew(ListenTls(*place.unknown.pems(), pem(place.stranger.ca)))
                assert "certificate verify failed" in await unready(address, client)
                friend = place.stranger.pair("friend").pems()
                assert await unready(address, ClientTls(BackendTls(pem(place.stranger.ca), *friend))) == ""
                # Who was there before goes on.
                assert pb.ServerLiveResponse.FromString(await live(b"", timeout=5)).live

    asyncio.run(main())


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
)
def test_a_failed_handshake_disturbs_nobody_and_has_the_time_of_a_head(
    place: Place, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "_PREFACE_MS", 300)

    async def main() -> None:
        async with serving(place.listen(place.server)) as (_, port):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.settimeout(5)
                raw.sendall(said)
                assert await unready(f"127.0.0.1:{port}", place.tls()) == ""

                def rest() -> None:
                    try:
                        while raw.recv(4096):
                            pass
                    except ConnectionResetError:
                        pass

                await asyncio.to_thread(rest)

    asyncio.run(main())

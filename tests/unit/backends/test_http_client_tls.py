"""The HTTP client over TLS: whom it believes, what a failed handshake is, and where a response ends."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any

import pytest

from backends.errors import BadReply, ConnectionLost, Failure, Unreachable
from backends.http_client import HttpClient
from backends.secured import Secured
from backends.tls import ClientTls
from gateway.tls import server_context
from policies.spec import BackendTls, ListenTls
from tests.support.certificates import Place, pem
from tests.unit.backends.http_peer import (
    AGAIN,
    CLOSE,
    HOLD,
    OK,
    PAUSE,
    REQUEST,
    RESET,
    Line,
    Peer,
    echo,
    transcript,
    until,
)

UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\nall of it"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("tls"))


class TlsPeer(Peer):
    """A scripted server that speaks TLS."""

    def __init__(self, tls: ListenTls, *scripts: list[Any]) -> None:
        super().__init__(*scripts)
        self.context = server_context(tls)

    async def __aenter__(self) -> TlsPeer:
        def arrive() -> Secured:
            return Secured(Line(self), self.context, server_name=None, shaken=lambda secured, error: None)

        self.server = await asyncio.get_running_loop().create_server(arrive, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.clients = []
        return self


async def failure(client: HttpClient, method: str = "POST") -> Failure:
    with pytest.raises(Failure) as caught:
        await client.request(method, "/x", (), b"body")
    return caught.value


@transcript
async def test_exchanges_share_a_connection(place: Place) -> None:
    async with TlsPeer(ListenTls(*place.server.pems()), [REQUEST, echo, AGAIN]) as peer:
        client = peer.client(tls=place.tls())
        for body in (b"", b"a", [b"b", b"", memoryview(b"c")], bytes(range(256)) * 20_000):
            whole = body if isinstance(body, bytes) else b"".join(body)
            response = await client.request("POST", "/x", (), body)
            assert bytes(response.body) == whole
        assert len(peer.lines) == 1
        both = await asyncio.gather(*(client.request("POST", "/x", (), b"%d" % i * 100_000) for i in range(2)))
        assert [bytes(each.body) for each in both] == [b"0" * 100_000, b"1" * 100_000]
        assert peer.lines[0].requests[0].startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % peer.port)


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("unknown", "certificate verify failed: unable to get local issuer certificate"),
        ("expired", "certificate verify failed: certificate has expired"),
        ("elsewhere", "certificate verify failed: IP address mismatch, certificate is not valid for '127.0.0.1'"),
    ],
)
@transcript
async def test_a_server_that_cannot_be_believed_is_unreachable(place: Place, server: str, reason: str) -> None:
    async with TlsPeer(ListenTls(*getattr(place, server).pems())) as peer:
        client = peer.client(tls=place.tls())
        found = await failure(client)
        assert isinstance(found, Unreachable)
        assert found.message == f"cannot connect to 127.0.0.1:{peer.port}: {reason}"
        assert peer.lines == []  # and not a byte of the request was sent


@transcript
async def test_without_a_file_the_systems_authorities_are_asked(place: Place) -> None:
    async with TlsPeer(ListenTls(*place.server.pems())) as peer:
        client = peer.client(tls=ClientTls(BackendTls()))
        assert "certificate verify failed: " in (await failure(client)).message


@transcript
async def test_the_systems_authorities_may_be_named_by_the_environment(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(place.authority.ca))

    async with TlsPeer(ListenTls(*place.server.pems())) as peer:
        response = await peer.client(tls=ClientTls(BackendTls())).request("POST", "/x", (), b"")
        assert response.status == 200


@transcript
async def test_the_name_of_the_host_is_checked_whatever_its_address(place: Place) -> None:
    async def resolve(host: str) -> tuple[str, ...]:
        return ("127.0.0.1",)

    async with TlsPeer(ListenTls(*place.server.pems())) as peer:
        for host, name, good in (
            ("backend.test", "", True),
            ("backend.test.", "", True),
            ("other.test", "", False),
            ("other.test", "backend.test", True),
            ("backend.test", "other.test", False),
        ):
            client = HttpClient(host, peer.port, now=time.monotonic, resolve=resolve, tls=place.tls(name=name))
            if good:
                assert (await client.request("POST", "/x", (), b"")).status == 200
            else:
                assert "certificate is not valid for 'other.test'" in (await failure(client)).message
            await client.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
@transcript
async def test_mutual_tls(place: Place, version: ssl.TLSVersion) -> None:
    """A server that does not take us in has read nothing of the request, even where it says so afterwards."""

    mutual = ListenTls(*place.server.pems(), pem(place.authority.ca))
    async with TlsPeer(mutual, [REQUEST, OK, AGAIN]) as peer:
        peer.context.maximum_version = version
        assert (await peer.client(tls=place.tls(place.client)).request("POST", "/x", (), b"")).status == 200
        for pair in (None, place.unknown):
            found = await failure(peer.client(tls=place.tls(pair)))
            assert isinstance(found, Unreachable), found
            assert found.message.startswith(f"cannot connect to 127.0.0.1:{peer.port}: TLS failed: "), found
            assert ("certificate required" if pair is None and version.name.endswith("3") else "") in found.message
        assert len(peer.lines) == 1


@pytest.mark.parametrize("silent", [True, False])
@transcript
async def test_the_handshake_is_a_part_of_connecting(place: Place, silent: bool) -> None:
    async with Peer([HOLD] if silent else [b"HTTP/1.1 400 Bad Request\r\n\r\n", HOLD]) as peer:
        client = peer.client(tls=place.tls(), connect_timeout=0.2)
        began = time.monotonic()
        found = await failure(client)
        assert isinstance(found, Unreachable)
        words = "no answer within 0.2 s" if silent else "TLS failed: wrong version number"
        assert found.message == f"cannot connect to 127.0.0.1:{peer.port}: {words}"
        assert time.monotonic() - began < 1
        assert client.in_flight == 0
        await asyncio.wait_for(peer.lines[0].lost.wait(), 1)


@transcript
async def test_a_caller_that_leaves_takes_its_handshake_along(place: Place) -> None:
    async with Peer([HOLD]) as peer:
        asking = asyncio.create_task(peer.client(tls=place.tls()).request("POST", "/x", (), b""))
        await until(lambda: peer.lines)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(peer.lines[0].lost.wait(), 1)


async def fin(line: Line) -> None:
    """A step: the connection ends below TLS, which says nothing of it."""
    line.transport._below.close()


@transcript
async def test_only_the_peers_word_ends_a_body_without_a_length(place: Place) -> None:
    scripts = [REQUEST, UNTIL_CLOSE, CLOSE], [REQUEST, UNTIL_CLOSE, fin, HOLD], [REQUEST, UNTIL_CLOSE, PAUSE, RESET]
    async with TlsPeer(ListenTls(*place.server.pems()), *scripts) as peer:
        client = peer.client(tls=place.tls())
        assert bytes((await client.request("POST", "/x", (), b"")).body) == b"all of it"
        for _ in range(2):
            found = await failure(client)
            assert isinstance(found, ConnectionLost)
            assert "after 9 bytes of the body" in found.message


@transcript
async def test_a_connection_that_was_ended_while_idle_is_not_used(place: Place) -> None:
    async with TlsPeer(ListenTls(*place.server.pems()), [REQUEST, OK, CLOSE]) as peer:
        client = peer.client(tls=place.tls())
        for _ in range(5):
            assert (await client.request("POST", "/x", (), b"")).status == 200
        assert len(peer.lines) == 5


@transcript
async def test_a_stream_and_its_back_pressure(place: Place) -> None:
    size = 8 << 20
    sent = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"a" * size
    async with TlsPeer(ListenTls(*place.server.pems()), [REQUEST, sent, AGAIN]) as peer:
        client = peer.client(tls=place.tls())
        stream = await client.stream("GET", "/x", ())
        await asyncio.sleep(0.05)
        assert peer.lines[0].transport.get_write_buffer_size() > 0  # nobody reads: the server has to wait
        assert sum([len(chunk) async for chunk in stream]) == size
        assert (await client.request("GET", "/x", ())).status == 200
        assert len(peer.lines) == 1


@transcript
async def test_what_is_no_tls_after_the_handshake_ends_the_connection(place: Place) -> None:
    async def nonsense(line: Line) -> None:
        line.transport._below.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with TlsPeer(ListenTls(*place.server.pems()), [REQUEST, nonsense, HOLD]) as peer:
        found = await failure(peer.client(tls=place.tls()))
        assert isinstance(found, ConnectionLost | BadReply)
        assert "TLS failed: wrong version number" in found.message

"""Whom a real redis-server lets in, and what it refuses: users, passwords, writes; TLS; servers that are none."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cache import redis as under_test
from policies.spec import Secret
from tests.support.redis import Facts, RedisServer, filled, hit, key, redis_server, run, store, value
from tests.support.serve import free_port


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as started:
        yield started


def test_without_its_password_it_is_down_and_says_why(tmp_path: Path) -> None:
    async def main(port: int) -> None:
        async with store(port) as kept:
            assert (kept.up, kept.reason) == (False, "NOAUTH: it wants a password")
        async with store(port, password=Secret("wr0ng")) as kept:
            assert (kept.up, kept.reason) == (False, "WRONGPASS: it refuses the user or the password")
        async with store(port, password=Secret("right pass")) as kept:
            assert kept.up, kept.reason
            await filled(kept, 2)
            assert await hit(kept)

    with redis_server(tmp_path, "--requirepass", "right pass") as server:
        run(main(server.port))


def test_users_may_what_redis_lets_them(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_REFUSED_SECONDS", 0.2)
    rights = {"full": "+mget +set +select", "reader": "+mget +select", "writer": "+set +select", "nobody": ""}
    for user, may in rights.items():
        server.do("ACL", "SETUSER", user, "on", ">pw", "~headrace:*", *may.split())

    async def main() -> None:
        def as_user(user: str, facts: Facts) -> Any:
            return store(server.port, facts, user=user, password=Secret("pw"), database=3)

        facts = Facts()
        async with as_user("full", facts) as kept:
            await filled(kept, 3)
            assert await hit(kept)
        facts = Facts()
        async with as_user("reader", facts) as kept:
            for _ in range(3):
                await kept.put_many({key(1): b"other"}, 60.0)
                await kept.settled()
            assert await hit(kept)
            assert facts.states == ["up", "read_only"]
            assert facts.told[1][1].startswith("NOPERM: ")
            server.do("ACL", "SETUSER", "reader", "+set")
            await asyncio.sleep(0.25)
            await kept.put_many({key(1): value(1)}, 60.0)
            await kept.settled()
            assert facts.states == ["up", "read_only", "up"]
        for user in ("writer", "nobody"):
            facts = Facts()
            async with as_user(user, facts) as kept:
                await asyncio.sleep(0.3)
                assert facts.states == ["down"]
                assert kept.reason.startswith("NOPERM: ")

    run(main())


@pytest.mark.parametrize(
    ("spoil", "mend", "code"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "READONLY"),
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"), "OOM"),
    ],
)
def test_one_that_takes_no_writes_is_read_on(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, spoil: tuple[str, ...], mend: tuple[str, ...], code: str
) -> None:
    monkeypatch.setattr(under_test, "_REFUSED_SECONDS", 0.2)

    async def main() -> None:
        facts = Facts()
        async with store(server.port, facts) as kept:
            await filled(kept, 3)
            server.do(*spoil)
            for i in range(20):
                await kept.put_many({key(i): b"other"}, 60.0)
            await kept.settled()
            assert await hit(kept)
            assert facts.states == ["up", "read_only"]
            assert (kept.up, kept.reason.partition(":")[0]) == (True, code)
            server.do(*mend)
            await asyncio.sleep(0.25)
            await kept.put_many({key(2): value(1)}, 60.0)
            await kept.settled()
            assert facts.states == ["up", "read_only", "up"]
            assert (await kept.get_many([key(2)])) == [value(1)]

    run(main())


def test_a_cluster_is_told_of_once(tmp_path: Path) -> None:
    async def main(server: RedisServer) -> None:
        facts = Facts()
        async with store(server.port, facts) as kept:
            await asyncio.sleep(0.3)
            server.do("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
            await asyncio.sleep(1)
            assert facts.states == ["down"]
            assert kept.reason == "CROSSSLOT: it is a cluster: a cache needs a Redis of its own"

    with redis_server(tmp_path, "--cluster-enabled", "yes") as server:
        run(main(server))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", "LOADING: it is loading its data"),
        (b"-MASTERDOWN Link with MASTER is down\r\n", "MASTERDOWN: it is a replica that has lost its master"),
        (b"-ERR unknown command 'AUTH', with args beginning with: 'hunter2' \r\n", "it answers with an error"),
        (b"-hunter2 is what you said\r\n", "it answers with an error"),
        (b"-ERR AUTH <password> called without any password configured for the default user. "
         b"Are you sure your configuration is correct?\r\n", "it refuses the user or the password"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ""),
        (b"", ""),
    ],
)  # fmt: skip
def test_whatever_answers_no_secret_is_told(answer: bytes, reason: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(answer)
        with suppress(ConnectionError):
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def main() -> None:
        facts = Facts()
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with store(port, facts, user="gate", password=Secret("hunter2"), timeout=0.3) as kept:
            await asyncio.sleep(0.5)
            assert await kept.get_many([key(1)]) == [None]
            assert facts.states == ["down"]
            assert "hunter2" not in f"{facts.told} {kept.reason} {kept.name}"
            assert kept.reason.startswith(reason)
            assert kept.reason
        listener.close()

    run(main())


UNLIKE = [
    b"$-1",
    b"+OK",
    b":1",
    b"*-1",
    b"*1\r\n$-1",
    b"*2\r\n:1\r\n:2",
    b"*2\r\n$-1\r\n*0",
    b"*3\r\n$-1\r\n$-1\r\n$-1",
]


@pytest.mark.parametrize("reply", UNLIKE)
@pytest.mark.parametrize("proved", [False, True])
def test_what_answers_unlike_redis_is_down_and_no_request_fails(reply: bytes, proved: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = proved
        with suppress(ConnectionError):
            while await reader.read(65536):
                writer.write(b"*2\r\n$-1\r\n$-1\r\n" if first else reply + b"\r\n")
                await writer.drain()
                first = False
        writer.close()

    async def main() -> None:
        facts = Facts()
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with listener, store(listener.sockets[0].getsockname()[1], facts) as kept:
            assert kept.up is proved
            assert await kept.get_many([key(1), key(2)]) == [None, None]
            assert (facts.states, kept.reason) == (["up", "down"][not proved :], "it does not answer as Redis does")

    run(main())


def test_a_put_that_is_not_confirmed_as_redis_does_is_dropped() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while asked := await reader.read(65536):
                writer.write(b"*2\r\n$-1\r\n$-1\r\n" if b"MGET" in asked else b"+OK\r\n:7\r\n")
                await writer.drain()
        writer.close()

    async def main() -> None:
        facts = Facts()
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with listener, store(listener.sockets[0].getsockname()[1], facts) as kept:
            await kept.put_many({key(1): b"a", key(2): b"b"}, 60.0)
            await kept.settled()
            assert (kept.dropped, facts.states[:2]) == (1, ["up", "down"])

    run(main())


# TLS.


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority of its own, and certificates by it for 127.0.0.1 and for another name."""
    folder = tmp_path_factory.mktemp("tls")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(folder, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test CA", "-days", "2")
    for name, subject in (("here", "IP:127.0.0.1"), ("elsewhere", "DNS:elsewhere.test")):
        (folder / f"{name}.ext").write_text(f"subjectAltName={subject}\n")
        openssl(folder, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        line = f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out {name}.pem -days 2"
        openssl(folder, *line.split(), "-extfile", f"{name}.ext")
    return folder


def with_tls(folder: Path, authority: Path, name: str) -> RedisServer:
    port = free_port()
    line = f"--port 0 --tls-port {port} --tls-auth-clients no --tls-ca-cert-file {authority}/ca.pem"
    files = f"--tls-cert-file {authority}/{name}.pem --tls-key-file {authority}/{name}.key --requirepass pw"
    return RedisServer(folder, [*line.split(), *files.split()], port)


def test_tls_with_a_password(tmp_path: Path, authority: Path) -> None:
    async def main(port: int) -> None:
        secure: dict[str, Any] = {"tls": True, "password": Secret("pw")}
        facts = Facts()
        async with store(port, facts, ca_file=str(authority / "ca.pem"), **secure) as kept:
            assert kept.name == f"rediss://127.0.0.1:{port}/0"
            await filled(kept, 300)
            assert await kept.get_many([key(i) for i in range(300)]) == [value(i) for i in range(300)]
        assert facts.states == ["up"]
        async with store(port, **secure) as kept:
            assert kept.up is False
            assert "CERTIFICATE_VERIFY_FAILED" in kept.reason
        async with store(port, ca_file=str(authority / "nowhere.pem"), **secure) as kept:
            assert kept.up is False
            assert "No such file" in kept.reason
        async with store(port, password=Secret("pw")) as kept:
            assert kept.up is False

    with with_tls(tmp_path, authority, "here") as server:
        run(main(server.port))


def test_tls_of_another_host_is_refused(tmp_path: Path, authority: Path) -> None:
    async def main(port: int) -> None:
        async with store(port, tls=True, password=Secret("pw"), ca_file=str(authority / "ca.pem")) as kept:
            assert kept.up is False
            assert "IP address mismatch" in kept.reason

    with with_tls(tmp_path, authority, "elsewhere") as server:
        run(main(server.port))

"""Connections to the gRPC edge: pings, idle ones, and those that do not speak HTTP/2."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.gateway.grpc_edge import edge, infer_message, twice

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


SETTINGS = b"\0\0\0\4\0\0\0\0\0"
PING = b"\0\0\x08\6\0\0\0\0\0" + bytes(8)
GOAWAY, TOO_MANY_PINGS = 7, b"too_many_pings"


@pytest.mark.parametrize(("interval_ms", "kept"), [(10, True), (10_000, False)])
def test_an_idle_client_may_ping_as_often_as_is_allowed(
    interval_ms: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.grpc_server._PING_MS", interval_ms)

    async def main() -> None:
        async with edge(twice) as setup:
            reader, writer = await asyncio.open_connection("127.0.0.1", setup.port)
            writer.write(PREFACE + SETTINGS)
            answered, gone = 0, False
            while answered < 10 and not gone:
                writer.write(PING)
                kind = -1
                while kind not in (PING[3], GOAWAY):
                    head = await asyncio.wait_for(reader.readexactly(9), 5)
                    body = await reader.readexactly(int.from_bytes(head[:3], "big"))
                    kind = head[3]
                answered += kind == PING[3]
                gone = kind == GOAWAY and TOO_MANY_PINGS in body
                await asyncio.sleep(0.02)
            writer.close()
            assert (gone, answered == 10) == (not kept, kept)

    asyncio.run(main())


@pytest.mark.parametrize(
    "said",
    [
        b"GET /v2/health/ready HTTP/1.1\r\nHost: g\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n12345",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),  # TLS
        bytes(range(256)) * 8,
        PREFACE + b"\xff" * 4096,
        PREFACE + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\1\1\5\0\0\0\1\xff",  # settings, then headers that HPACK cannot read
        PREFACE[:10],
        b"",
    ],
)
def test_what_is_not_http2_is_hung_up_on_and_harms_nobody(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.grpc_server._PREFACE_MS", 500)

    async def main() -> None:
        async with edge(twice) as setup:
            reader, writer = await asyncio.open_connection("127.0.0.1", setup.port)
            writer.write(said)
            await asyncio.wait_for(reader.read(), 5)  # to its end
            assert await setup.call(data=infer_message(), timeout=5)
            writer.close()
            assert not setup.reported

    asyncio.run(main())

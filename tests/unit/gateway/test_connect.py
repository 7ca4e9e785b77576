from __future__ import annotations

import asyncio
import time

from gateway.connect import Connect, look_up
from policies import parse
from tests.unit.backends.http_peer import OK, REQUEST, Peer


def test_an_endpoint_follows_its_name() -> None:
    asked: list[str] = []

    async def resolve(host: str) -> tuple[str, ...]:
        asked.append(host)
        return ("127.0.0.1",)

    async def main() -> None:
        async with Peer([REQUEST, OK, REQUEST, OK]) as peer:
            text = f"proxy: b\nbackends: {{b: {{endpoints: [http://backend:{peer.port}]}}}}"
            backend = parse(text, "policy.yaml", {}).backends["b"]
            (endpoint,) = Connect(time.monotonic, resolve=resolve)(backend)
            assert await endpoint.probe(1.0)
            endpoint.refresh()  # not so soon
            assert await endpoint.probe(1.0)
            assert b"Host: backend:%d\r\n" % peer.port in peer.lines[0].requests[0]
            await endpoint.close()

    asyncio.run(main())
    assert asked == ["backend"]


def test_the_systems_resolver() -> None:
    found = asyncio.run(look_up("localhost"))
    assert "127.0.0.1" in found
    assert list(found) == sorted(set(found))

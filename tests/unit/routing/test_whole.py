from __future__ import annotations

import asyncio

import pytest

from backends.request import HttpCall, Infer, Request, Trait
from backends.traits import UNTOLD
from tests.support.gateway import FakeServer, Rig, double
from tests.support.strategies import call

POLICY = """
backends:
  small: {endpoints: [http://127.0.0.1:1], model: small, batch: {max_rows: 8}}
  large: {endpoints: [http://127.0.0.1:1], model: large, batch: {max_rows: 8}}
routes:
  batched: {backend: large}
  cached: {backend: large, cache: {}}
  tiers:
    tiers:
      - {backend: small, accept: {output: Y, values: logits, score: max_probability, threshold: 0.0}}
      - {backend: large}
"""


def rows(traits: dict[str, Trait], route: str) -> tuple[list[int], list[int]]:
    """Rows of each call to the two models when two callers ask `route` the same at once, and once more."""
    server = FakeServer({"small": double, "large": double})
    server.traits = traits
    stack = Rig(POLICY, server)

    async def main() -> None:
        request = Request(model=route, content=call([1.0]))
        for _ in range(2):
            await asyncio.gather(*(stack.services["http"](request) for _ in range(2)))

    asyncio.run(main())
    return server.rows("small"), server.rows("large")


@pytest.mark.parametrize("trait", [Trait(decoupled=True), Trait(stateful=True)])
def test_calls_that_cannot_be_divided_go_straight_to_the_last_tier(trait: Trait) -> None:
    for route in ("batched", "cached", "tiers"):
        assert rows({"large": trait}, route) == ([], [1, 1, 1, 1])
    assert rows({"small": trait}, "tiers") == ([], [1, 1, 1, 1])


@pytest.mark.parametrize("trait", [Trait(), UNTOLD])
def test_other_calls_take_what_the_policy_says(trait: Trait) -> None:
    traits = {"small": trait, "large": trait}
    assert rows(traits, "batched") == ([], [2, 2])
    assert rows(traits, "cached") == ([], [2])
    assert rows(traits, "tiers") == ([2, 2], [2, 2])  # the first tier's answers cannot be scored


def test_a_model_that_is_loaded_anew_is_asked_for_anew() -> None:
    server = FakeServer({"large": double})
    stack = Rig(POLICY, server)
    request = Request(model="batched", content=call([1.0]))

    async def main() -> None:
        await asyncio.gather(*(stack.services["http"](request) for _ in range(2)))
        server.traits = {"large": Trait(decoupled=True)}
        endpoints = stack.endpoints
        load = HttpCall("POST", "/v2/repository/models/large/load")
        for endpoint in endpoints:
            await endpoint(Request(model="large", content=load))
        await asyncio.gather(*(stack.services["http"](request) for _ in range(2)))

    asyncio.run(main())
    sizes = [r.infer.inputs.heads[0].shape[0] for r in server.requests if isinstance(r.content, Infer)]
    assert sizes == [2, 1, 1]


def test_a_server_that_was_down_is_asked_anew() -> None:
    server = FakeServer({"large": double})
    stack = Rig(POLICY, server)

    async def main() -> None:
        (endpoint,) = stack.things.endpoints["large"][1]
        for ready in (True, False, True):
            assert await endpoint.traits.learn("large", "") == Trait()
            server.is_ready = ready
            server.traits = {"large": Trait(decoupled=True)}
            await endpoint.probe(1.0)
        assert endpoint.traits.known("large", "") is None

    asyncio.run(main())

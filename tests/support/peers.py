"""One Triton with the models of the differential tests, and gateways that reach it in every way: session fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.differential import Peer
from tests.support.serve import served
from tests.support.triton import triton_with

MODELS = (
    "identity", "dynamic", "single", "single_text", "single_half", "told", "labelled", "accumulate", "first",
    "configured", "repeat_each", "fails", "ensemble",
)  # fmt: skip

# A whole proxy whose backend has one protocol, so that the other one's callers are bridged; routes that batch; and what
# stands before most servers: both protocols, a route for the model that is asked most, a proxy for the rest.
POLICIES = {
    "http": """
backends:
  all: {{endpoints: [http://{http}], control: true, shared_memory: true}}
  one: {{endpoints: [http://{http}], model: single, version: '1'}}
routes: {{public: {{backend: one}}}}
proxy: all
""",
    "grpc": """
backends:
  all: {{endpoints: [grpc://{grpc}], control: true, shared_memory: true}}
  one: {{endpoints: [grpc://{grpc}], model: single, version: '1'}}
routes: {{public: {{backend: one}}}}
proxy: all
""",
    "batched": """
x-triton: &triton {{http: http://{http}, grpc: '{grpc}'}}
backends:
  over_http: {{endpoints: [*triton], protocol: http, model: identity, batch: {{max_rows: 48, slots: 1}}}}
  over_grpc: {{endpoints: [*triton], protocol: grpc, model: identity, batch: {{max_rows: 48, slots: 1}}}}
  first: {{endpoints: [*triton], protocol: grpc, model: first, batch: {{max_rows: 48, slots: 1}}}}
  classes: {{endpoints: [*triton], protocol: grpc, model: labelled, batch: {{max_rows: 16, slots: 1}}}}
routes:
  over_http: {{backend: over_http}}
  over_grpc: {{backend: over_grpc}}
  one_by_one: {{backend: first}}
  classes: {{backend: classes}}
""",
    "usual": """
x-triton: &triton {{http: http://{http}, grpc: '{grpc}'}}
backends:
  all: {{endpoints: [*triton], protocol: grpc, control: true, shared_memory: true}}
  identity: {{endpoints: [*triton], protocol: grpc, model: identity, batch: {{max_rows: 48}}}}
routes:
  identity: {{backend: identity}}
proxy: all
""",
}


@pytest.fixture(scope="session")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """The server itself."""
    with triton_with(tmp_path_factory.mktemp("differential"), *MODELS) as server:
        yield Peer(server.http, server.grpc)


@pytest.fixture(scope="session")
def gateways(direct: Peer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Peer]]:
    """The gateways of POLICIES, by name."""
    with ExitStack() as stack:
        peers = {}
        for name, text in POLICIES.items():
            folder = tmp_path_factory.mktemp(name)
            policy = folder / "policy.yaml"
            policy.write_text(text.format(http=direct.http, grpc=direct.grpc))
            gateway = stack.enter_context(served(folder, str(policy)))
            peers[name] = Peer(gateway.http, gateway.grpc)
        yield peers

"""What the servers of a policy said, as a tree for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text
from rich.tree import Tree

from gateway.tools.init import shown, tensor_text
from gateway.tools.live import Live, Told
from gateway.tools.survey import Metadata
from policies import Policy


def live_tree(policy: Policy, live: Live) -> Tree:
    """Each backend with its replicas, models in this process, and Redis; models with what decides how to call them."""
    made = Tree(Text("live", "bold"))
    for name, all_told in live.backends.items():
        branch = made.add(Text(name, "bold"))
        for told in all_told:
            replica = branch.add(_state(str(told.endpoint), told.reason, shown(told.server) if told.server else ""))
            for line in _model(told):
                replica.add(Text(line))
        if local := policy.backends[name].local:
            loaded = live.local[name]
            model = branch.add(_state(local.path, loaded.reason))
            for line in _tensors(loaded.metadata):
                model.add(Text(line))
    if live.redis is not None:
        made.add(_state(f"redis {policy.redis}", live.redis))
    return made


def _state(what: str, reason: str, server: str = "") -> Text:
    state = (reason, "red") if reason else ("ready", "green")
    return Text.assemble(f"{what}  ", state, (f"  {server}" if server else "", "dim"))


def _model(told: Told) -> Iterator[str]:
    if told.endpoint.http is None and not told.reason:
        yield "it speaks gRPC; for more, give it an http address"
    if told.metadata is None:
        return
    config = told.config
    facts = ["the server does not tell its configuration"]
    if config is not None:
        facts = [f"max_batch_size {config.max_batch_size}", config.kind]
        facts.append(f"instances {config.instances}" if config.instances else "")
    yield f"{told.model}: {', '.join(filter(None, facts))}"
    yield from _tensors(told.metadata)


def _tensors(metadata: Metadata | None) -> Iterator[str]:
    if metadata is not None:
        for way, tensors in (("in ", metadata.inputs), ("out", metadata.outputs)):
            yield from (f"{way} {tensor_text(tensor)}" for tensor in tensors)

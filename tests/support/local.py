"""Clients of models in this process, and a model that takes as long as a test wants."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from backends.local.client import LocalClient
from backends.local.model import Spec
from backends.tensor import Tensor
from policies.spec import Local


def client(path: str, threads: int = 1, **more: Any) -> LocalClient:
    return LocalClient(Local(path, threads), now=time.monotonic, **more)


def using(path: str, test: Callable[[LocalClient], Coroutine[Any, Any, Any]], **more: Any) -> Any:
    async def main() -> Any:
        local = client(path, **more)
        try:
            return await test(local)
        finally:
            await local.close()

    return asyncio.run(main())


class Slow:
    """A model that answers, or is loaded, when it is let."""

    platform = "test"
    inputs = outputs = (Spec("X", "FP32", (-1, 1)),)

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.runs = 0

    def run(self, inputs: Mapping[str, Tensor], wanted: Any) -> tuple[Tensor, ...]:
        self.runs += 1
        assert self.gate.wait(10)
        return tuple(inputs.values())

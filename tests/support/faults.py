"""What can be wrong with a call, each fault by its name, and calls made at random of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class Spoilt(Protocol):
    """A call that says which faults it has, and whether it `kills` a server."""

    faults: tuple[str, ...]
    kills: bool


_Call = TypeVar("_Call", bound=Spoilt)


class Faults(Generic[_Call]):
    """Faults by name, of calls that `sound` makes without any; those named in `killing` end a server."""

    def __init__(self, sound: Callable[[int, random.Random], _Call], killing: Iterable[str]) -> None:
        self._sound = sound
        self._killing = frozenset(killing)
        self._spoil: dict[str, Callable[[_Call, random.Random], None]] = {}

    def add(self, name: str, spoil: Callable[[_Call, random.Random], None]) -> None:
        self._spoil[name] = spoil

    def fault(self, spoil: Callable[[_Call, random.Random], None]) -> Callable[[_Call, random.Random], None]:
        """A decorator: the function's name is the fault's."""
        self.add(spoil.__name__, spoil)  # type: ignore[attr-defined]
        return spoil

    def made(self, source: int | random.Random) -> _Call:
        """The call of a seed, or of somebody's own chance: every sixth is sound, most have one fault, some two."""
        chance = random.Random(source) if isinstance(source, int) else source
        call = self._sound(source if isinstance(source, int) else -1, chance)
        for name in chance.sample(sorted(self._spoil), chance.choice([0, 1, 1, 1, 1, 2])):
            if call.kills or (call.faults and name in self._killing):
                break  # a second fault may change what kills into what does not
            call.kills = name in self._killing
            call.faults += (name,)
            self._spoil[name](call, chance)
        return call

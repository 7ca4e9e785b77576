"""KServe v2 parameters: which ones say how a body is encoded, which the gateway acts upon, and what they must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from backends.errors import BadRequest, Malformed
from backends.tensor import shown

# How a body is encoded; never passed on to a backend as if it were the caller's.
ENCODING = frozenset({"binary_data", "binary_data_size", "binary_data_output"})
# What the gateway itself acts upon: two callers may differ in these and still share a batch or an answer.
_GATEWAY = ENCODING | {"timeout", "priority"}
# What ties a call to its predecessors: such a call is never merged with another, nor divided.
STATEFUL = frozenset({"sequence_id", "sequence_start", "sequence_end"})

# Where a tensor is that stays in memory which caller and backend share.
REGION = "shared_memory_region"
# Numbers and texts are different sequences to Triton, and 0 and "" are none.
SequenceId = int | str


class Sequence(msgspec.Struct):
    """The sequence that a call belongs to. `ends` becomes true when the last message of a streamed one has passed."""

    id: SequenceId
    starts: bool = False
    ends: bool = False


def sequence(parameters: Mapping[str, Any]) -> Sequence | None:
    """The sequence that these parameters put a call into, None where they name none."""
    if not parameters or not (name := parameters.get("sequence_id")):
        return None
    return Sequence(name, parameters.get("sequence_start") is True, parameters.get("sequence_end") is True)


_VALUES: Any = (bool, int, float, str)
MAX_ID = 128
_UNSIGNED = "an integer from 0 to 2^64 - 1"
_FLAG = "true or false"
_TEXT = "a string"
_OF_REGION = {REGION: _TEXT, "shared_memory_offset": _UNSIGNED, "shared_memory_byte_size": _UNSIGNED}
# Parameters that mean something to us or to Triton, where they do, and what each must be.
OF_REQUEST = {
    "timeout": _UNSIGNED, "priority": _UNSIGNED, "sequence_start": _FLAG, "sequence_end": _FLAG,
    "binary_data_output": _FLAG, "sequence_id": f"{_UNSIGNED}, or a string of at most 128 characters",
}  # fmt: skip
OF_INPUT = _OF_REGION  # `binary_data_size` is compared with what there is
OF_OUTPUT = {"classification": _UNSIGNED, "binary_data": _FLAG, **_OF_REGION}

# Each becomes Python objects, and costs Triton time by the square of their number. No model comes near this.
MAX_PARAMETERS = 1 << 10


def check_parameters(
    parameters: Mapping[str, Any], reserved: Mapping[str, str], fault: type[BadRequest] = Malformed
) -> None:
    """`fault` where a `reserved` parameter is not what it must be, BadRequest where any is no value, or one too many.

    Those that say how an HTTP body is encoded mean nothing elsewhere: gRPC's codec leaves them out of `reserved`.
    """
    if not parameters:
        return
    if len(parameters) > MAX_PARAMETERS:
        raise BadRequest(f"expected at most {MAX_PARAMETERS} parameters, got {len(parameters)}")
    for name, value in parameters.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        if number and name not in reserved and not -(1 << 63) <= value < 1 << 64:
            raise BadRequest(f"parameter {shown(name)}: expected an integer of at most 64 bits, got {shown(value)}")
        if not isinstance(value, _VALUES):
            raise BadRequest(f"parameter {shown(name)}: expected a bool, a number or a string, got {shown(value)}")
        expected = reserved.get(name)
        if expected is None:
            continue
        if expected is _TEXT:
            fits = isinstance(value, str)
        else:
            fits = isinstance(value, bool) if expected is _FLAG else number and 0 <= value < 1 << 64
        # Of a text id Triton takes as much, and whoever remembers ids can.
        if not fits and not (name == "sequence_id" and isinstance(value, str) and len(value) <= MAX_ID):
            raise fault(f"parameter '{name}': expected {expected}, got {shown(value)}")


def passed_on(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that a backend may see, whatever the body is written as."""
    return {name: value for name, value in parameters.items() if name not in ENCODING}


def merged(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a call that serves several callers."""
    return {name: value for name, value in parameters.items() if name not in _GATEWAY}


def significant(parameters: Mapping[str, Any]) -> tuple[tuple[str, str, Any], ...]:
    """The parameters that can change an answer, with their types (True and 1 are different parameters)."""
    if not parameters:
        return ()
    return tuple(sorted((k, type(v).__name__, v) for k, v in parameters.items() if k not in _GATEWAY))

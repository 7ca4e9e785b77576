"""What a model in this process is, and what a call must be to be run by it.

A call is checked against the model's own inputs and outputs before anything is computed, as Triton does: names,
datatypes, fixed axes (-1 is any size), requested outputs. What cannot be honoured is refused and never ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from backends.errors import BadRequest, NotFound, Unsupported
from backends.parameters import ENCODING, STATEFUL
from backends.request import Infer, Parameters
from backends.tensor import Tensor, shown, split_elements

# A model in this process has no history.
VERSION = "1"
# What clients send with any model: how bodies are encoded, what the gateway itself acts upon, and sequences, which a
# model without state answers as it answers everything.
_HARMLESS = ENCODING | STATEFUL | {"timeout", "priority"}


class Unusable(Exception):
    """A model that cannot be loaded; the message is one line."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One input or output. In `shape` -1 is any size; None: nothing is known of it."""

    name: str
    datatype: str
    shape: tuple[int, ...] | None


class Model(Protocol):
    """A loaded model; any number of threads may run it at once."""

    @property
    def platform(self) -> str:
        """What runs it, as KServe's metadata names it."""
        ...

    @property
    def inputs(self) -> tuple[Spec, ...]: ...
    @property
    def outputs(self) -> tuple[Spec, ...]: ...

    def run(self, inputs: Mapping[str, Tensor], wanted: Collection[str]) -> tuple[Tensor, ...]:
        """The outputs that are `wanted`, in the model's order, for inputs that have been checked.

        Raises BadRequest for what only their content shows; any other exception is the model's own failure.
        """
        ...


def check_version(version: str) -> None:
    """NotFound for any version but the one that there is; empty is the caller's "whichever"."""
    if version not in ("", VERSION):
        raise NotFound(f"unknown version {shown(version)}: this model has '{VERSION}' only")


def check_call(model: Model, infer: Infer) -> frozenset[str]:
    """The names of the outputs that the call wants. Raises BadRequest or Unsupported where the model cannot answer."""
    specs = {spec.name: spec for spec in model.inputs}
    _check_parameters("the call", infer.parameters)
    for head in infer.inputs.heads:
        spec = specs.pop(head.name, None)
        if spec is None:
            raise BadRequest(f"unknown input {shown(head.name)}: expected {_names(model.inputs)}")
        if head.datatype != spec.datatype:
            raise BadRequest(f"input {shown(head.name)}: expected {spec.datatype}, got {head.datatype}")
        if spec.shape is not None and not _fits(head.shape, spec.shape):
            raise BadRequest(
                f"input {shown(head.name)}: expected shape {shown(list(spec.shape))}, got {shown(list(head.shape))}"
            )
        _check_parameters(f"input {shown(head.name)}", head.parameters)
    if specs:
        missing = ", ".join(shown(name) for name in specs)
        raise BadRequest(f"missing input: expected {_names(model.inputs)}, got no {missing}")
    known = {spec.name for spec in model.outputs}
    for output in infer.outputs:
        if output.name not in known:
            raise BadRequest(f"unknown output {shown(output.name)}: expected {_names(model.outputs)}")
        _check_parameters(f"output {shown(output.name)}", output.parameters)
    return frozenset(output.name for output in infer.outputs) or frozenset(known)


def texts(tensor: Tensor) -> list[str]:
    """The elements of a BYTES tensor as text. Raises BadRequest, which names the row, where one is not UTF-8."""
    decoded: list[str] = []
    for element in split_elements(tensor.data):
        try:
            decoded.append(element.decode())
        except UnicodeDecodeError as error:
            row = len(decoded) * tensor.rows // tensor.elements
            what = f"input {shown(tensor.name)}: row {row} is not UTF-8"
            raise BadRequest(f"{what}: {error.reason} at byte {error.start}") from None
    return decoded


def _fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    return len(shape) == len(expected) and all(b in (-1, a) for a, b in zip(shape, expected, strict=True))


def _check_parameters(what: str, parameters: Parameters) -> None:
    for name in parameters:
        # Triton reserves the prefix; what its clients send under it speaks of how answers travel.
        if name not in _HARMLESS and not name.startswith("triton_"):
            raise Unsupported(f"{what}: a model in this process has no parameter {shown(name)}")


def _names(specs: Sequence[Spec]) -> str:
    shapes = (
        f"{spec.name} {spec.datatype}{shown(list(spec.shape)) if spec.shape is not None else ''}" for spec in specs
    )
    return ", ".join(shapes)[:500]

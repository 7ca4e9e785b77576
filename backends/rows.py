"""Rows of inference calls and answers: taking some, merging several, splitting and gathering again.

A row is one item on axis 0 of every input. Merging joins bytes and splitting slices views; an answer whose outputs do
not have the rows that were sent is a BadReply, never a guess. Shapes are `[rows, ...]` throughout.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from backends.errors import BadReply
from backends.parameters import STATEFUL, merged, significant
from backends.request import Answer, Infer, Tensors
from backends.tensor import Tensor, row_offsets, shown

# Beyond, a call is not divided: per-row work of any kind would hold up everybody else.
MAX_ROWS = 1 << 16


def count(infer: Infer) -> int | None:
    """Rows of a call: the size of axis 0, where all inputs agree on one of at most MAX_ROWS.

    Else None, and the call cannot be divided; nor can one that belongs to a sequence.
    """
    heads = infer.inputs.heads
    if not heads or not heads[0].shape:
        return None
    rows = heads[0].shape[0]
    if rows > MAX_ROWS:
        return None
    if len(heads) > 1 and any(not head.shape or head.shape[0] != rows for head in heads):
        return None
    return None if STATEFUL & infer.parameters.keys() else rows


def signature(infer: Infer) -> Hashable:
    """What must be equal for two calls to share a batch: inputs but for their rows, parameters, requested outputs."""
    return (
        tuple(sorted([(h.name, h.datatype, h.shape[1:], significant(h.parameters)) for h in infer.inputs.heads])),
        significant(infer.parameters),
        tuple(sorted([(o.name, significant(o.parameters)) for o in infer.outputs])) if infer.outputs else (),
    )


def take(infer: Infer, rows: Sequence[int]) -> Infer:
    """The call with only these rows, in this order; indices are valid."""
    return Infer(
        inputs=Tensors.of(tuple(_take(tensor, rows) for tensor in infer.inputs.decoded)),
        outputs=infer.outputs,
        parameters=infer.parameters,
        id=infer.id,
    )


def take_answer(answer: Answer, rows: Sequence[int]) -> Answer:
    """The answer with only these rows, in this order."""
    outputs = Tensors.of(tuple(_take(tensor, rows) for tensor in answer.outputs.decoded))
    return Answer(outputs, answer.model, answer.version, answer.parameters, answer.id)


def merge(infers: Sequence[Infer]) -> Infer:
    """One call with the rows of all, in order. Their signatures are equal."""
    first = infers[0]
    if len(infers) == 1:
        return first
    by_name = [{tensor.name: tensor for tensor in infer.inputs.decoded} for infer in infers]
    joined = tuple(
        _join([tensors[tensor.name] for tensors in by_name], tensor.parameters) for tensor in first.inputs.decoded
    )
    return Infer(inputs=Tensors.of(joined), outputs=first.outputs, parameters=merged(first.parameters))


def verify(answer: Answer, rows: int) -> Answer:
    """`answer` itself, or BadReply where an output does not have `rows` rows."""
    for head in answer.outputs.heads:
        if not head.shape or head.shape[0] != rows:
            raise BadReply(f"output {shown(head.name)}: expected {rows} rows, got shape {shown(list(head.shape))}")
    return answer


def split(answer: Answer, counts: Sequence[int]) -> list[Answer]:
    """The answer of a merged call divided among its members. Raises BadReply where row counts do not add up."""
    verify(answer, sum(counts))
    parts: list[list[Tensor]] = [[] for _ in counts]
    for tensor in answer.outputs.decoded:
        offsets, view, at = row_offsets(tensor), memoryview(tensor.data), 0
        for part, rows in zip(parts, counts, strict=True):
            data = view[offsets[at] : offsets[at + rows]]
            part.append(Tensor(tensor.name, tensor.datatype, (rows, *tensor.shape[1:]), data, tensor.parameters))
            at += rows
    return [Answer(Tensors.of(tuple(part)), answer.model, answer.version, answer.parameters) for part in parts]


def gather(pieces: Sequence[tuple[Sequence[int], Answer]], rows: int) -> Answer:
    """One answer from pieces `(caller's row indices, answer for them)` that together cover `rows` rows.

    Raises BadReply where pieces disagree on names, datatypes or trailing shapes: rows of different kinds have no
    common tensor.
    """
    first = pieces[0][1]
    if len(pieces) == 1 and list(pieces[0][0]) == list(range(rows)):
        return first
    names = {head.name for head in first.outputs.heads}
    for head in (head for _, answer in pieces for head in answer.outputs.heads):
        if head.name not in names:
            raise BadReply(f"output {shown(head.name)} is missing from a part of the answer")
    gathered = []
    for tensor in first.outputs.decoded:
        slices: list[Any] = [b""] * rows
        for indices, answer in pieces:
            part = _like(tensor, answer)
            offsets, view = row_offsets(part), memoryview(part.data)
            for i, row in enumerate(indices):
                slices[row] = view[offsets[i] : offsets[i + 1]]
        shape = (rows, *tensor.shape[1:])
        gathered.append(Tensor(tensor.name, tensor.datatype, shape, b"".join(slices), tensor.parameters))
    last = pieces[-1][1]
    return Answer(Tensors.of(tuple(gathered)), last.model, last.version, last.parameters)


def _like(tensor: Tensor, answer: Answer) -> Tensor:
    for other in answer.outputs.decoded:
        if other.name == tensor.name:
            if other.datatype != tensor.datatype or other.shape[1:] != tensor.shape[1:]:
                rows, others = shown(list(tensor.shape[1:])), shown(list(other.shape[1:]))
                what = f"{tensor.datatype} {rows}, others {other.datatype} {others}"
                raise BadReply(f"output {shown(tensor.name)}: some rows are {what}")
            return other
    raise BadReply(f"output {shown(tensor.name)} is missing from a part of the answer")


def _take(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    offsets, view = row_offsets(tensor), memoryview(tensor.data)
    data = b"".join([view[offsets[row] : offsets[row + 1]] for row in rows])
    return Tensor(tensor.name, tensor.datatype, (len(rows), *tensor.shape[1:]), data, tensor.parameters)


def _join(tensors: Sequence[Tensor], parameters: Any) -> Tensor:
    first = tensors[0]
    rows = sum(tensor.shape[0] for tensor in tensors)
    data = b"".join([tensor.data for tensor in tensors])
    return Tensor(first.name, first.datatype, (rows, *first.shape[1:]), data, parameters)

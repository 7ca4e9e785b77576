"""Cache keys: when two rows are the same question.

A key is a 128-bit BLAKE2b digest over length-prefixed fields: format, scope (route and tier, model, version), what is
requested, every significant parameter with its type, and every input's name, datatype, row shape and bytes. Length
prefixes make the join unambiguous; parameters that only say how a body is encoded, and `timeout` and `priority`, cannot
change an answer and are left out.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TypeAlias

from backends.parameters import significant
from backends.request import Infer
from backends.tensor import row_offsets

_FORMAT = b"headrace-row-1"
_DIGEST_BYTES = 16

Key: TypeAlias = bytes


def keys(infer: Infer, scope: tuple[str, ...], rows: int) -> list[Key]:
    """One key for each of the `rows` rows of a call. `scope` is whatever else tells answers apart."""
    common = blake2b(digest_size=_DIGEST_BYTES)
    _field(common, _FORMAT)
    for part in scope:
        _field(common, part.encode())
    _field(common, repr(significant(infer.parameters)).encode())
    for output in sorted(infer.outputs, key=lambda output: output.name):
        _field(common, output.name.encode())
        _field(common, repr(significant(output.parameters)).encode())
    _field(common, b"inputs")
    hashes = [common.copy() for _ in range(rows)]
    for tensor in sorted(infer.inputs.decoded, key=lambda tensor: tensor.name):
        what = blake2b(
            repr((tensor.name, tensor.datatype, tensor.shape[1:], significant(tensor.parameters or {}))).encode()
        )
        prefix = what.digest()
        offsets, view = row_offsets(tensor), memoryview(tensor.data)
        for row, digest in enumerate(hashes):
            digest.update(prefix)
            _field(digest, view[offsets[row] : offsets[row + 1]])
    return [digest.digest() for digest in hashes]


def _field(digest: blake2b, data: bytes | memoryview) -> None:
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)

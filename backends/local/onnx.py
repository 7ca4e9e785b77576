"""An ONNX graph as a model; the only importer of onnxruntime.

Each call runs on the thread that makes it and on no other: threads are the policy's to count. Data reaches the runtime
as the bytes that it came as. ONNX's BF16 has no form in the runtime's Python interface, and sequences, maps and
optional values none in KServe's: a graph that has them on its outside is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from backends.local.model import Spec, Unusable, texts
from backends.tensor import Tensor, join_elements

_DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float": "FP32", "double": "FP64",
    "string": "BYTES",
}  # fmt: skip
_NUMPY = {
    "UINT8": "<u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "<i1", "INT16": "<i2", "INT32": "<i4",
    "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
_SILENT = 4  # the runtime's own log, fatal only: it would stand between our lines, and what fails is raised as well


class Onnx:
    """A graph in an ONNX Runtime session on the CPU."""

    platform = "onnxruntime_onnx"

    def __init__(self, session: Any) -> None:
        self._session = session
        self.inputs = tuple(_spec("input", node) for node in session.get_inputs())
        self.outputs = tuple(_spec("output", node) for node in session.get_outputs())

    def run(self, inputs: Mapping[str, Tensor], wanted: Collection[str]) -> tuple[Tensor, ...]:
        asked = [spec for spec in self.outputs if spec.name in wanted]
        feed = {name: _array(tensor) for name, tensor in inputs.items()}
        arrays = self._session.run([spec.name for spec in asked], feed)
        return tuple(_tensor(spec, array) for spec, array in zip(asked, arrays, strict=True))


def load(path: str) -> Onnx:
    """The graph in a file. Raises Unusable, or whatever the runtime raises for a file that is none."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise Unusable("ONNX models need onnxruntime: pip install 'headrace[local]'") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = _SILENT
    return Onnx(onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]))


def _spec(what: str, node: Any) -> Spec:
    kind = str(node.type)
    datatype = _DATATYPES.get(kind.removeprefix("tensor(").removesuffix(")"))
    if datatype is None:
        raise Unusable(f"{what} '{node.name}': expected a tensor of {', '.join(_DATATYPES)}, got {kind}")
    # The runtime gives no axes for a scalar and for a shape that is not known: its own check will have to do.
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
    return Spec(node.name, datatype, shape or None)


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.datatype == "BYTES":
        return np.array(texts(tensor), np.object_).reshape(tensor.shape)
    if tensor.datatype == "BOOL":
        # Any byte but 0 is true; numpy takes only 1 for it.
        return np.frombuffer(tensor.data, np.uint8).astype(np.bool_).reshape(tensor.shape)
    array: np.ndarray = np.frombuffer(tensor.data, _NUMPY[tensor.datatype]).reshape(tensor.shape)
    # A view into a message begins anywhere, and the runtime's kernels expect whole words.
    return array if array.flags.aligned else array.copy()


def _tensor(spec: Spec, array: np.ndarray) -> Tensor:
    if spec.datatype == "BYTES":
        data = join_elements([str(text).encode() for text in array.reshape(-1)])
    else:
        data = np.ascontiguousarray(array).tobytes()
    return Tensor(spec.name, spec.datatype, array.shape, data)

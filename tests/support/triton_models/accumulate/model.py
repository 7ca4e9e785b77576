"""A stateful model: OUTPUT is the sum of INPUT since the sequence began."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self._sums = {}

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        value, start, correlation = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT", "START", "CORRID")
        )
        key = int(correlation.flat[0])
        self._sums[key] = int(value.flat[0]) + (0 if start.flat[0] else self._sums.get(key, 0))
        out = np.array(self._sums[key], np.int32).reshape(value.shape)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", out)])

"""SUM is of each row of X, SAME is TEXT; a text `sleep` takes a second, and `fail` fails."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        x, text = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("X", "TEXT"))
        if b"sleep" in text:
            time.sleep(1)
        if b"fail" in text:
            error = pb_utils.TritonError("it was told to fail", pb_utils.TritonError.INTERNAL)
            return pb_utils.InferenceResponse([], error)
        total = x.sum(axis=1, dtype=np.int32).reshape(-1, 1)
        outputs = [pb_utils.Tensor("SUM", total), pb_utils.Tensor("SAME", text)]
        return pb_utils.InferenceResponse([each for each in outputs if each.name() in request.requested_output_names()])

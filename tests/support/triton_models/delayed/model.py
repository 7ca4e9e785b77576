"""Answers with DELAY after as many milliseconds, two calls at a time; 13 is refused."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        delay = pb_utils.get_input_tensor_by_name(request, "DELAY").as_numpy()
        time.sleep(int(delay[0]) / 1000)
        if int(delay[0]) == 13:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("13 is refused"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", delay)])

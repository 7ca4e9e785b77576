"""Fails with the error code of TritonError that CODE names; without a name it raises."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        name = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy().flat[0].decode()
        if not name:
            raise ValueError("the model raised")
        error = pb_utils.TritonError(f"fails with {name}", getattr(pb_utils.TritonError, name))
        return pb_utils.InferenceResponse(error=error)

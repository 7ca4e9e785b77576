"""A model that was never batched: of all rows it answers the first, whose number is what it got."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(pb_utils.get_input_tensor_by_name(request, "IN_INT32")) for request in requests]

    def _answer(self, tensor):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT_INT32", tensor.as_numpy()[:1])])

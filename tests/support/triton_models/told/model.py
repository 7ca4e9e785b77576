"""What arrives beside the tensors, as text: each output says it once for every row."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        rows = pb_utils.get_input_tensor_by_name(request, "IN").shape()[0]
        told = {
            "PARAMETERS": request.parameters(),
            "ID": request.request_id(),
            "CORRELATION": request.correlation_id(),
            "FLAGS": request.flags(),
            "TIMEOUT": request.timeout(),
            "OUTPUTS": " ".join(sorted(request.requested_output_names())),
        }
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, np.array([[str(text).encode()]] * rows, np.object_)) for name, text in told.items()]
        )

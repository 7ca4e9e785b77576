"""A slow model with a short queue: OUTPUT is INPUT, after a quarter of a second each; a second one may wait."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.25 * len(requests))
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT", pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy())]
            )
            for request in requests
        ]

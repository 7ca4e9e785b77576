"""A decoupled model: one answer for each element of IN, in order; none for an empty one."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for index, value in enumerate(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()):
                outputs = {"OUT": np.array([value], np.int32), "INDEX": np.array([index], np.uint32)}
                sender.send(
                    pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])
                )
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

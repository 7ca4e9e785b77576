"""OUTPUT is INPUT after so many milliseconds, in slices; appends to a file beside the repository how each call ended.

The file is `ends`; a line is the id of a request and `began`, `answered` or `cancelled`.
"""

import os
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        # .../models/slow/1
        self._log = os.open(Path(args["model_repository"]).parents[1] / "ends", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
        self._say(request, "began")
        until = time.monotonic() + int(value.max()) / 1e3
        while time.monotonic() < until:
            if request.is_cancelled():
                self._say(request, "cancelled")
                return pb_utils.InferenceResponse(
                    error=pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
                )
            time.sleep(0.01)
        self._say(request, "answered")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value.astype(np.int32))])

    def _say(self, request, what):
        os.write(self._log, f"{request.request_id()} {what}\n".encode())

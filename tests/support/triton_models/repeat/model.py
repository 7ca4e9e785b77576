"""A decoupled model: one response for each element of IN, each after its own DELAY; WAIT is how long `execute` takes.

Times are in milliseconds. A negative element of IN is answered with an error, and the responses go on. A caller that
cancels ends its responses, which `cancelled.txt` in the model's folder counts.
"""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self._path = args["model_repository"] + "/cancelled.txt"
        self._threads = []

    def execute(self, requests):
        for request in requests:
            values, delays, wait = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY", "WAIT")
            )
            thread = threading.Thread(target=self._respond, args=(request.get_response_sender(), values, delays))
            thread.start()
            self._threads.append(thread)
            time.sleep(int(wait[0]) / 1000)

    def _respond(self, sender, values, delays):
        for index, (value, delay) in enumerate(zip(values, delays, strict=True)):
            time.sleep(int(delay) / 1000)
            if sender.is_cancelled():
                with open(self._path, "a") as file:
                    file.write(f"{index}\n")
                break
            if value < 0:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"refused {value}")))
                continue
            out = pb_utils.Tensor("OUT", np.array([value], np.int32))
            sender.send(pb_utils.InferenceResponse([out, pb_utils.Tensor("IDX", np.array([index], np.uint32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        for thread in self._threads:
            thread.join()

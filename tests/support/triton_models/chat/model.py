"""A decoupled text model: one response for each word of `text_input`, `delay_ms` apart, each `pad` characters longer.

`fail_at` is the index of a word that is answered with an error, and the last. A caller that leaves ends its responses,
which `cancelled.txt` in the model's folder counts.
"""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self._path = args["model_repository"] + "/cancelled.txt"

    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().flat[0].decode()
            given = [_number(request, name) for name in ("delay_ms", "fail_at", "pad")]
            threading.Thread(target=self._respond, args=(request.get_response_sender(), text.split(), *given)).start()

    def _respond(self, sender, words, delay, fail_at, pad):
        for index, word in enumerate(words):
            if sender.is_cancelled():
                with open(self._path, "a") as file:
                    file.write(f"{index}\n")
                break
            if index == fail_at:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"no word for {word}")))
                break
            out = pb_utils.Tensor("text_output", np.array([(word + "." * max(pad, 0)).encode()], np.object_))
            sender.send(pb_utils.InferenceResponse([out]))
            time.sleep(max(delay, 0) / 1000)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _number(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return -1 if tensor is None else int(tensor.as_numpy().flat[0])

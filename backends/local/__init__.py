"""Models that run in this process: a tier without a server, a hop and a copy.

An ordinary `Endpoint` wraps the `client`, so that batches, cascades, caches, metrics and traces see no difference to a
model on a server. A `model` is what runs: `onnx` (any ONNX graph) or `static` (a text classifier over static
embeddings, in a format of our own). The event loop decides what runs when and checks what was asked; a `pool` of
threads loads and computes. The semantics of a call are Triton's; `metadata` answers what is not an inference.

Each heavy library is imported by the one module that needs it, when a model is loaded.
"""

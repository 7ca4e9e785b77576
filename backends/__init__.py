"""What a request is, the wire codecs, and who answers: servers, and models in this process (`backends.local`).

Everything that answers is a `Service` (`backends.request`). A request and its reply are values that do not know the
wire they came by; the codecs (`kserve_json`, `kserve_grpc`) read a body's head always and its tensors only when a
part of the route asks for rows. An untouched body is forwarded as the very bytes it came as.
"""

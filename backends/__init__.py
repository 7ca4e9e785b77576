"""What a request is, the wire codecs, and the servers that answer.

Everything that answers is a `Service` (`backends.request`). A request and its reply are values that do not know the
wire they came by; the codecs (`kserve_json`, `kserve_grpc`) read a body's head always and its tensors only when a
part of the route asks for rows. An untouched body is forwarded as the very bytes it came as.
"""

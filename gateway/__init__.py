"""The process: edges, wiring, telemetry, admin, command line.

`stack.build` composes the parts of the other packages into one service; the edges (`http`, `grpc`) turn bytes into
requests and replies into bytes; `app` makes clocks, chance, clients and servers, and nobody else does.

    http1, connection, exchange   the HTTP/1.1 server under the HTTP edge; `server` is uvicorn, for admin and metrics
    departures, encoding, tls     callers that leave unread, compressed bodies, certificates
    grpc_server, grpc_health      what is under the gRPC edge, and what it answers by itself
    grpc_stream, turns            ModelStreamInfer: flows, and the order of their answers
    body, deadline, admit, drain  what a request may bring, how long it may take, how many there may be, and the end
    relay, replicas, fleet        calls that are no inference: names, all replicas of a backend, changes one at a time
    observe, traced, metrics      what is seen of it; `telemetry` and `semantics` are OpenTelemetry's side
    reload, watch, probe          another policy, its files, and whether endpoints are ready
    workers, joined, sockets      several processes behind one set of ports, and one answer for all of them
"""

"""The process: edges, wiring, telemetry, admin, command line.

`stack.build` composes the parts of the other packages into one service; the edges (`http`, `grpc`) turn bytes into
requests and replies into bytes; `app` makes clocks, chance, clients and servers, and nobody else does.
"""

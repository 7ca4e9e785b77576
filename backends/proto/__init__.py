"""Generated protobuf messages of KServe v2 over gRPC; `kserve.proto` says how they are generated."""

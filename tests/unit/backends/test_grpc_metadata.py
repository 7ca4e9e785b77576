from __future__ import annotations

from backends.grpc_metadata import metadata


def test_metadata_keeps_what_grpc_can_carry() -> None:
    kept = metadata(
        [
            ("Traceparent", "00-1"), ("a-bin", b"\xff"), ("b", b"bytes"), ("c", "ü"), ("d", "x\ny"),
            ("a-bin", "AAH/"), ("a-bin", "no base64!"),
            ("te", "trailers"), ("grpc-timeout", "1S"), (":path", "/"), ("content-type", "x"), ("spaced key", "x"),
            ("triton_grpc_error", "true"), ("n", 1),
            ("twice", ("1", b"2", "3")), ("twice-bin", (b"1", "2!")), ("grpc-status-details-bin", b"\0"),
        ]
    )  # fmt: skip
    assert kept == (
        ("traceparent", "00-1"), ("a-bin", b"\xff"), ("a-bin", b"\0\1\xff"), ("triton_grpc_error", "true"),
        ("twice", "1"), ("twice", "3"), ("twice-bin", b"1"), ("grpc-status-details-bin", b"\0"),
    )  # fmt: skip

"""Where the gateway answers bad input otherwise than a Triton 2.51 does, and why: the whole list.

What needs no entry: under `compat: headrace` a failure may have a better status, which is the same or any 4xx; and of
two faults in one call either may be told, for which of them is found first is nobody's contract.

An entry is for one fault of `bad_http` or `bad_grpc` by its name, and for the statuses of Triton and of the gateway
that are meant to differ (0: gRPC's OK). The fuzz fails where a difference has no entry, and in its long form where an
entry was of no use. Not compared are the words of errors, and their content type.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """`theirs` and `ours` are statuses; `reason` is one line."""

    faults: tuple[str, ...]
    theirs: tuple[int, ...]
    ours: tuple[int, ...]
    reason: str


DIFFERENCES = (
    # Triton answers, and the gateway refuses: what it would decide upon (route, batch, cache) is not what a model got.
    Difference(
        ("key_twice",), (200, 400, 500), (400, 500), "of a key that occurs twice every parser takes another one"
    ),
    Difference(("json_no_utf8",), (200,), (400, 500), "JSON is UTF-8 (RFC 8259, 8.1), and gRPC has no other text"),
    Difference(("json_byte_order_mark",), (200,), (400, 500), "JSON has no byte order mark (RFC 8259, 8.1)"),
    Difference(
        ("json_nul_behind",), (200,), (400, 500), "Triton reads a C string; what stands behind its end is hidden"
    ),
    Difference(
        ("json_inf",), (200,), (400, 500), "NaN and Infinity are known far and wide, Inf to Triton's parser only"
    ),
    Difference(
        ("parameter_giant",), (200,), (400,), "beyond 64 bits Triton makes a float of it, gRPC has no place for it"
    ),
    Difference(
        ("input_parameters_no_object",), (200, 400), (400, 500), "Triton never looks; gRPC has no place for such"
    ),
    Difference(
        ("input_parameter_no_value", "output_parameter_no_value"),
        (200, 400),
        (400,),
        "Triton never looks; gRPC has no place for such",
    ),
    Difference(("very_many", "grpc_very_many"), (200, 0), (400, 3), "Triton's time goes by the square of their number"),
    Difference(
        ("compressed_badly",), (200, 400, 500), (400,), "a body that is cut, or has something behind it, is broken"
    ),
    Difference(
        ("data_no_array", "data_of_other_types"),
        (200, 400),
        (400, 500),
        "of a tensor without elements Triton ignores the data; for a gRPC backend it has to be read",
    ),
    Difference(
        ("datatype_unknown", "grpc_datatype_unknown"), (200, 500, 0), (400, 3), "a NUL in it ends it for Triton"
    ),
    Difference(("grpc_raw_one_too_many",), (0,), (3,), "raw contents without a tensor: somebody has miscounted"),
    Difference(("grpc_timeout_negative",), (0,), (3,), "the gateway acts upon deadlines, and this is none"),
    # The gateway answers, and Triton refuses.
    Difference(
        ("relayed_index", "relayed_generate"),
        (200, 400, 500),
        (200, 400, 415, 500, 501),
        "Triton decompresses bodies of infer only, the gateway those of any call, to look into them",
    ),
    Difference(("grpc_shape_other_than_the_data",), (0,), (3,), "Triton counts rows in 32 bits: 2^40 of them are none"),
    Difference(
        ("grpc_timeout_unsigned",), (3,), (0,), "a number is a number: over HTTP it has no sign bit to differ in"
    ),
    Difference(("json_number_malformed",), (500,), (200,), "an unknown key is not read where it goes to gRPC"),
    # Both refuse, with other statuses under `compat: triton`.
    Difference(("inputs_of_no_objects",), (400,), (500,), "a number for an input is no input without data"),
    Difference(("shape_beyond_64_bits",), (500,), (400,), "one bound for shapes, on either side of 64 bits"),
    Difference(("shape_of_rank_17",), (500,), (400,), "refused by its rank, before its data is counted"),
    Difference(
        ("data_empty", "shape_of_another_rank"), (400,), (500,), "too short for its shape is told before it is read"
    ),
    Difference(
        ("header_length_no_number",), (500,), (400,), "Triton takes the digits before the first other character"
    ),
    Difference(("grpc_version_no_number",), (0, 3), (5,), "over HTTP it is a path that Triton does not have"),
    Difference(("version_no_number",), (404,), (400,), "over gRPC it is an argument that Triton cannot read"),
    Difference(("grpc_noise",), (5,), (13,), "a group is no part of proto3, and skipped by Triton's parser"),
)


def explained(faults: tuple[str, ...], theirs: int, ours: int) -> Difference | None:
    """The entry for a difference in statuses, if there is one."""
    for difference in DIFFERENCES:
        if set(faults) & set(difference.faults) and theirs in difference.theirs and ours in difference.ours:
            return difference
    return None

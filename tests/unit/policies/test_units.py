import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.problem import Wrong
from policies.units import BYTES, SECONDS, duration, format_duration, format_size, size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250us", 0.00025), ("10ms", 0.01), ("2s", 2.0), ("1.5 s", 1.5), ("5m", 300.0), ("1h", 3600.0), ("1d", 86400.0)],
)
def test_durations_are_seconds(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512", 512),
        ("0B", 0),
        ("10KB", 10_000),
        ("10kB", 10_000),
        ("10MB", 10**7),
        ("64MiB", 2**26),
        ("1.5GiB", 3 * 2**29),
    ],
)
def test_sizes_are_bytes(text: str, count: int) -> None:
    assert size(text) == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10", "'10' has no unit; write 10s or 10ms"),
        ("10 sec", "'10 sec' has the unknown unit 'sec'; write 10s"),
        ("3minutes", "'3minutes' has the unknown unit 'minutes'; write 3m"),
        ("2 Hours", "'2 Hours' has the unknown unit 'Hours'; write 2h"),
        ("7days", "'7days' has the unknown unit 'days'; write 7d"),
        ("4seconds", "'4seconds' has the unknown unit 'seconds'; write 4s"),
        ("2w", "'2w' has the unknown unit 'w'; expected one of us, ms, s, m, h, d"),
        ("soon", "'soon' is not a duration; write a number and one of us, ms, s, m, h, d, such as 250ms or 2s"),
        ("-1s", "'-1s' is not a duration; write a number and one of us, ms, s, m, h, d, such as 250ms or 2s"),
        ("1\n", "'1\\n' is not a duration; write a number and one of us, ms, s, m, h, d, such as 250ms or 2s"),
    ],
)
def test_what_is_not_a_duration(text: str, message: str) -> None:
    with pytest.raises(Wrong) as caught:
        duration(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("64M", "'64M' has the unknown unit 'M'; write 64MiB or 64MB"),
        ("64mb", "'64mb' has the unknown unit 'mb'; write 64MiB or 64MB"),
        ("3x", "'3x' has the unknown unit 'x'; expected one of B, kB, KB, MB, GB, TB, KiB, MiB, GiB, TiB"),
        ("1.5", "'1.5' is not a whole number of bytes"),
        ("big", "'big' is not a size; write a number and one of KB, MB, GB, KiB, MiB, GiB, such as 64MiB"),
    ],
)
def test_what_is_not_a_size(text: str, message: str) -> None:
    with pytest.raises(Wrong) as caught:
        size(text)
    assert str(caught.value) == message


@given(st.floats(0, 1e9).map(lambda seconds: round(seconds, 9)))
def test_a_formatted_duration_reads_back(seconds: float) -> None:
    assert duration(format_duration(seconds)) == seconds


@given(st.integers(0, 10**6), st.sampled_from(sorted(SECONDS)))
def test_a_written_duration_formats_to_an_equal_one(number: int, unit: str) -> None:
    seconds = duration(f"{number}{unit}")
    assert duration(format_duration(seconds)) == seconds


@given(st.integers(0, 2**50))
def test_a_formatted_size_reads_back(count: int) -> None:
    assert size(format_size(count)) == count


@given(st.text(max_size=30))
def test_anything_else_is_wrong_in_one_line(text: str) -> None:
    for read in (duration, size):
        message = ""
        try:
            read(text)
        except Wrong as wrong:
            message = str(wrong)
        assert message.isprintable()


def test_formats_choose_the_largest_exact_unit() -> None:
    assert [format_duration(s) for s in (0.00025, 0.01, 1.5, 90.0, 86400.0, 0.0)] == [
        "250us", "10ms", "1500ms", "90s", "1d", "0s",
    ]  # fmt: skip
    assert [format_size(n) for n in (0, 1000, 1024, 2**28)] == ["0B", "1000B", "1KiB", "256MiB"]
    assert set(BYTES) >= {"B", "KiB", "MiB", "GiB", "TiB"}

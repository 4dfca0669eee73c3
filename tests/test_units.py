"""Quantities with units: what is read, what is refused, what people are shown."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.units import (
    exact_bytes,
    exact_flops_rate,
    exact_mean_bytes,
    exact_rate,
    exact_seconds,
    exact_share,
    format_bytes,
    format_flops,
    format_rate,
    format_ratio,
    format_seconds,
    is_integer,
    parse_bytes,
    parse_flops_rate,
    parse_mean_bytes,
    parse_rate,
    parse_samples_rate,
    parse_seconds,
    parse_share,
)


@for_each(
    ("text", "expected"),
    [
        ("4 GB", 4_000_000_000),
        ("4GB", 4_000_000_000),
        (" 1.5 kB ", 1500),
        ("1 KB", 1000),
        ("512 MiB", 536_870_912),
        ("2 TiB", 2_199_023_255_552),
        ("0 B", 0),
        ("1e3 B", 1000),
        (123, 123),
        (123.0, 123),
    ],
)
def test_a_size_is_read_in_the_unit_it_is_written_in(text: str | int | float, expected: int) -> None:
    assert parse_bytes(text) == expected


@for_each(
    ("text", "expected"),
    [("200 MB/s", 2e8), ("10 Gbit/s", 1.25e9), ("1 GiB/s", 2.0**30), (5e6, 5e6), (math.inf, math.inf)],
)
def test_a_rate_is_read_in_bytes_per_second(text: str | float, expected: float) -> None:
    assert parse_rate(text) == expected


@for_each(
    ("text", "expected"),
    [("5 ms", 0.005), ("2 min", 120.0), ("10 us", 1e-5), ("10 µs", 1e-5), ("inf s", math.inf)],
)
def test_a_time_is_read_in_seconds(text: str, expected: float) -> None:
    assert parse_seconds(text) == expected


def test_a_training_speed_is_read_in_samples_per_second() -> None:
    assert parse_samples_rate("640 samples/s") == 640.0


def test_a_rate_of_operations_is_written_and_read_back() -> None:
    assert parse_flops_rate("1.5 TFLOP/s") == 1.5e12
    assert exact_flops_rate(1e11) == "100 GFLOP/s"
    assert parse_flops_rate(exact_flops_rate(1 / 3)) == 1 / 3
    assert format_flops(4.19e6) == "4.19 MFLOP"
    with pytest.raises(ConfigError, match="'GB/s' is not one of FLOP/s, MFLOP/s"):
        parse_flops_rate("1 GB/s")


@for_each(
    "value",
    [
        "-1 B",
        -1,
        math.nan,
        "nan B",
        math.inf,
        "inf B",
        1.5,
        True,
        None,
        "GB",
        "4",
        "4 GB/s",
        "1e999 GB",
        "1e9999 B",
    ],
)
def test_what_is_not_a_size_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(value)  # type: ignore[arg-type]


@for_each("value", ["0 MB/s", 0, "-5 MB/s", math.nan, "5 MB", "5 ms", ""])
def test_what_is_not_a_rate_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        parse_rate(value)  # type: ignore[arg-type]


@for_each("value", ["-1 s", "5", "5 m", "5 MB", math.nan])
def test_what_is_not_a_time_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        parse_seconds(value)  # type: ignore[arg-type]


def test_an_unknown_unit_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'5 parsec': 'parsec' is not one of ns, us, µs, ms, s, min, h"):
        parse_seconds("5 parsec")


def test_bits_that_look_like_bytes_are_pointed_out() -> None:
    with pytest.raises(ConfigError, match=re.escape("'Gb/s' may mean bits or bytes, write Gbit/s or GB/s")):
        parse_rate("10 Gb/s")


def test_a_missing_unit_is_answered_with_an_example() -> None:
    with pytest.raises(ConfigError, match="'200' has no unit: write for example '200 MB/s'"):
        parse_rate("200")


@for_each(
    ("size", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (118_304, "118 kB"),
        (999_600, "1 MB"),
        (1.25e9, "1.25 GB"),
        (2.5e16, "25 PB"),
    ],
)
def test_people_are_shown_three_digits_of_a_size(size: float, expected: str) -> None:
    assert format_bytes(size) == expected


@for_each(
    ("seconds", "expected"),
    [
        (0.0, "0 s"),
        (0.005, "5 ms"),
        (1.2345, "1.23 s"),
        (2.5e-6, "2.5 us"),
        (3e-10, "0.3 ns"),
        (250.0, "250 s"),
    ],
)
def test_people_are_shown_three_digits_of_a_time(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


@for_each(
    ("ratio", "expected"),
    [(1, "1.00 x"), (1.666, "1.67 x"), (100, "100.00 x"), (100.1, "> 100 x"), (math.inf, "> 100 x")],
)
def test_people_are_shown_how_many_times_up_to_a_hundred(ratio: float, expected: str) -> None:
    assert format_ratio(ratio) == expected


def test_people_are_shown_three_digits_of_a_rate() -> None:
    assert format_rate(50e6) == "50 MB/s"
    assert format_rate(math.inf) == "inf B/s"


@given(st.integers(0, 2**63))
def test_a_size_written_for_a_file_is_read_back_equal(size: int) -> None:
    assert parse_bytes(exact_bytes(size)) == size


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_a_rate_written_for_a_file_is_read_back_bit_for_bit(rate: float) -> None:
    assert parse_rate(exact_rate(rate)) == rate


@given(st.floats(min_value=0, max_value=1e300))
def test_a_time_written_for_a_file_is_read_back_bit_for_bit(seconds: float) -> None:
    assert parse_seconds(exact_seconds(seconds)) == seconds


@given(st.floats(min_value=0, max_value=1e18))
def test_a_mean_size_written_down_is_read_back_bit_for_bit(size: float) -> None:
    assert parse_mean_bytes(exact_mean_bytes(size)) == size


@given(st.floats(min_value=0, max_value=1e9))
def test_a_share_written_for_a_file_is_read_back_bit_for_bit(share: float) -> None:
    assert parse_share(exact_share(share)) == share


def test_a_mean_size_is_not_rounded_to_a_byte_and_is_finite() -> None:
    assert parse_mean_bytes("2.7 B") == 2.7
    with pytest.raises(ConfigError, match="it must be finite"):
        parse_mean_bytes("inf B")
    with pytest.raises(ConfigError, match="zero or more"):
        parse_mean_bytes("-1 kB")


def test_round_figures_are_written_as_people_would() -> None:
    assert exact_rate(50e6) == "50 MB/s"
    assert exact_mean_bytes(27_500.0) == "27.5 kB"
    assert exact_seconds(0.005) == "5 ms"
    assert exact_bytes(4 * 10**9) == "4 GB"
    assert exact_share(0.15) == "15 %"


@for_each(
    ("text", "expected"),
    [("30%", 0.3), (" 29 % ", 0.29), ("0.29", 0.29), ("1", 1.0), ("0", 0.0), (".5%", 0.005), ("250%", 2.5)],
)
def test_a_share_is_read_with_or_without_its_sign(text: str, expected: float) -> None:
    assert parse_share(text) == expected


@for_each(
    ("text", "message"),
    [
        ("5", "'5' is more than all of it"),
        ("nan", "'nan' is no share"),
        ("inf%", "'inf%' is no share"),
        ("-1%", "zero or more"),
        ("-0.1", "zero or more"),
        ("30 percent", "'percent' is not one of %"),
        ("much", "'much' does not begin with a number: write for example '30%'"),
        ("", "does not begin with a number"),
    ],
)
def test_a_share_that_is_none_or_may_mean_two_things_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_share(text)


@for_each(
    ("value", "expected"),
    [
        *((kind(3), True) for kind in (int, np.int64, np.int8, np.uint64)),
        *((value, False) for value in (True, np.True_, 3.0, np.float64(3.0), "3", None, np.array([3]))),
    ],
)
def test_integers_of_numpy_are_integers_and_booleans_are_none(value: object, expected: bool) -> None:
    assert is_integer(value) is expected


def test_a_size_may_be_a_number_of_numpy() -> None:
    assert type(parse_bytes(np.uint8(200))) is int  # type: ignore[arg-type]

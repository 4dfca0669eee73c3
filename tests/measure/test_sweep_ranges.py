"""Ranges, prices and tolerances as people write them, and what is said of those that cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.measure.sweep import Point
from penstock.measure.sweep_ranges import Prices, parse_counts, parse_prices, parse_sizes

GB = 10**9


@for_each(
    ("text", "sizes"),
    [
        ("10GB", (10 * GB,)),
        ("0,20GB, 40 GB", (0, 20 * GB, 40 * GB)),
        ("40GB,10GB", (10 * GB, 40 * GB)),
        ("10GB..80GB*2", (10 * GB, 20 * GB, 40 * GB, 80 * GB)),
        ("10GB..70GB*2", (10 * GB, 20 * GB, 40 * GB)),
        ("1GB..2GB+512MB", (GB, 1_512_000_000)),
        ("0,1GB..3GB+1GB", (0, GB, 2 * GB, 3 * GB)),
        ("512MiB", (2**29,)),
    ],
)
def test_lists_and_ranges_of_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text, "--memory", may_be_zero=True) == sizes


@for_each(
    ("text", "said"),
    [
        ("10", r"--memory '10': '10' has no unit"),
        ("", r"a value is missing"),
        ("10GB,,20GB", r"a value is missing"),
        ("-1GB", r"'-1GB' cannot be"),
        ("nanGB", r"cannot be"),
        ("infGB", r"must be finite"),
        ("10Gb", r"may mean bits or bytes"),
        ("10GB,20GB,10GB", r"names 10,000,000,000 twice"),
        ("10GB..20GB", r"range without its step"),
        ("20GB..10GB*2", r"is no range"),
        ("0..10GB*2", r"is no range"),
        ("10GB..20GB*1", r"'1' is not an integer factor"),
        ("10GB..20GB*1.5", r"'1.5' is not an integer factor"),
        ("1GB..2GB+0", r"step is zero"),
        ("1B..1GB+1B", r"more than 1,000 values"),
    ],
)
def test_a_size_that_cannot_be_is_named_with_its_option(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_sizes(text, "--memory", may_be_zero=True)


def test_a_staging_buffer_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--staging '0': '0' is no space at all"):
        parse_sizes("0", "--staging", may_be_zero=False)


def test_numbers_of_ranks() -> None:
    assert parse_counts("2,4, 8", "--ranks") == (2, 4, 8)
    assert parse_counts("2..16*2", "--ranks") == (2, 4, 8, 16)
    assert parse_counts("2..8+3", "--ranks") == (2, 5, 8)
    for wrong in ("0", "-2", "2.5", "four", "nan"):
        with pytest.raises(ConfigError, match="--ranks"):
            parse_counts(wrong, "--ranks")


def test_prices_are_of_all_hosts_and_staging_is_memory() -> None:
    """Two hosts of 1000, with 10 + 2 GB of memory at 3 and 100 GB of disk at 0.1."""
    prices = parse_prices(["memory=3/GB", "local-disk=100/TB", "rank=1000"])

    assert prices.of(Point(2, 2 * GB, 10 * GB, 100 * GB)) == pytest.approx(2 * (1000 + 3 * 12 + 0.1 * 100))
    assert parse_prices(["staging=1/GB"]).of(Point(3, 2 * GB, 10 * GB, 0)) == pytest.approx(6)


@for_each(
    ("texts", "said"),
    [
        (["memory"], "prices none of"),
        (["rum=3/GB"], "prices none of rank, memory, local-disk, staging"),
        (["memory=3"], "with what it is for"),
        (["rank=3/GB"], "of one host"),
        (["memory=-3/GB"], "not a finite number"),
        (["memory=nan/GB"], "not a finite number"),
        (["rank=inf"], "not a finite number"),
        (["memory=3/Gb"], "may mean bits"),
        (["memory=3/GB", "memory=4/GB"], "twice"),
    ],
)
def test_a_price_that_cannot_be_is_named(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_prices(texts)


@given(st.text(alphabet="0123456789.,*+-eGBMiT naif", max_size=24))
def test_any_text_is_either_a_list_of_sizes_or_an_error_of_ours(text: str) -> None:
    try:
        sizes = parse_sizes(text, "--memory", may_be_zero=True)
    except ConfigError as error:
        told = str(error)
        sizes = (0,) if told.startswith("--memory ") else ()
    assert sizes
    assert list(sizes) == sorted(set(sizes))
    assert min(sizes) >= 0


def test_what_costs_nothing_is_free() -> None:
    assert Prices().of(Point(4, GB, GB, GB)) == 0.0

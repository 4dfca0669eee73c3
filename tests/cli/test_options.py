"""What stands behind options is read alike by every command, and errors name the option."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from tests.for_each import for_each

from penstock.cli.options import (
    check_folder,
    parsed,
    parsed_amount,
    parsed_count,
    parsed_names,
    parsed_share,
    refuse_together,
)
from penstock.errors import ConfigError
from penstock.units import parse_bytes, parse_seconds


def test_what_is_written_well_is_read() -> None:
    assert parsed("--memory", parse_bytes, "8 GB") == 8 * 10**9
    assert parsed_amount("--step", parse_seconds, "5 ms") == 0.005
    assert parsed_share("--reach", "25%") == parsed_share("--reach", "0.25") == 0.25
    assert [parsed_count("--parameters", text) for text in ("7e9", " 3 ", "9007199254740993")] == [
        7_000_000_000,
        3,
        2**53 + 1,
    ]
    assert parsed_names("lru, min,lru", "--policies") == ["lru", "min"]


@pytest.mark.parametrize("text", ["0 s", "inf s"])
def test_an_amount_is_finite_and_above_zero(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--step is '{text}'; it must be finite and above zero"):
        parsed_amount("--step", parse_seconds, text)


@for_each("text", ["0", "1.5", "-3", "nan", "inf", "many", ""])
def test_a_count_is_a_whole_number_of_at_least_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--parameters is .*; it must be an integer of at least 1"):
        parsed_count("--parameters", text)


def test_errors_of_units_say_which_option_they_are_about() -> None:
    with pytest.raises(ConfigError, match="--memory: '8' has no unit"):
        parsed("--memory", parse_bytes, "8")
    with pytest.raises(ConfigError, match="--reach is '130%'; it is a share from 0 to 1"):
        parsed_share("--reach", "130%")


def test_options_that_would_be_ignored_are_refused() -> None:
    options = argparse.Namespace(paper=True, per_day="5 GB", models=None, small=False)

    refuse_together(options, "paper", ["models", "small"])
    refuse_together(options, "models", ["per_day"])
    with pytest.raises(ConfigError, match="--paper and --per-day do not go together: leave one out"):
        refuse_together(options, "paper", ["models", "per_day"])


def test_a_file_needs_a_folder_that_is_there(tmp_path: Path) -> None:
    check_folder("--out", tmp_path / "a")
    check_folder("--out", Path("a"))
    with pytest.raises(ConfigError, match=r"--out .*: there is no folder .*none: make it first"):
        check_folder("--out", tmp_path / "none" / "a")

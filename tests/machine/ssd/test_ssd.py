"""A drive that cannot be is refused with the field, the rule and the next move; one that can is read from text."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.machine.ssd import Ssd

PAPER = Ssd.paper()
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "ssd.md"


def test_the_papers_drive_is_that_of_tables_4_and_8() -> None:
    assert PAPER.blocks == 8 * 16_384
    assert PAPER.gc_free_blocks * PAPER.chips == 6_592  # Table 8: free
    assert PAPER.exported_pages == (111_432 - 8) * 63  # Table 8: valid, without the 8 open blocks
    assert PAPER.transfer_seconds == pytest.approx(8 * (512 + 16) * 0.000025e-3)
    assert PAPER.pages(229_146_326) == 55_944


@for_each(
    ("changes", "message"),
    [
        ({"channels": 0}, "channels is 0; it must be at least 1"),
        ({"blocks_per_chip": 2.5}, "blocks_per_chip is 2.5; it must be an integer"),
        ({"page_bytes": True}, "page_bytes is True; it must be an integer"),
        ({"spare_bytes": -1}, "spare_bytes is -1; it must be at least 0"),
        ({"page_read_seconds": float("nan")}, "page_read_seconds is nan; it must be finite"),
        ({"block_erase_seconds": -1.0}, "block_erase_seconds is -1.0"),
        ({"channel_bytes_per_second": 0.0}, "channel_bytes_per_second is 0.0; a rate must be above zero"),
        ({"channel_bytes_per_second": float("nan")}, "channel_bytes_per_second is nan"),
        ({"over_provisioning": 1.0}, "over_provisioning is 1.0; it is a share"),
        ({"over_provisioning": "15 %"}, "over_provisioning is '15 %'; it must be a number"),
        ({"gc_threshold": None}, "gc_threshold is None; it must be a number"),
        ({"page_read_seconds": "25 us"}, "page_read_seconds is '25 us'; it must be a number"),
        (
            {"channel_bytes_per_second": "40 MB/s"},
            "channel_bytes_per_second is '40 MB/s'; it must be a number",
        ),
        ({"channel_bytes_per_second": True}, "channel_bytes_per_second is True; it must be a number"),
        ({"gc_threshold": float("nan")}, "gc_threshold is nan; it is a share"),
        ({"summary_pages": 64}, "summary_pages is 64 of 64 pages_per_block"),
        ({"open_pages": 63}, "open_pages is 63; an open block holds fewer than its 63"),
        ({"planes_per_chip": 7}, "planes_per_chip is 7; it must divide the 16384"),
        ({"host_link": "both"}, "host_link is 'both'; it must be one of per channel, shared"),
        ({"copy_back": 1}, "copy_back is 1; it must be true or false"),
        ({"levelling_interval": 1}, "levelling_interval is 1; it must be at least 2"),
        ({"rated_cycles": 0}, "rated_cycles is 0; it must be at least 1"),
        ({"blocks_per_chip": 2**24}, "more than can be numbered"),
        ({"over_provisioning": 0.05}, "collect garbage: raise over_provisioning or lower gc_threshold"),
        ({"planes_per_chip": 1, "gc_threshold": 1e-5}, "gc_threshold is 1e-05, which keeps 1 block"),
    ],
)
def test_a_drive_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(PAPER, **changes)


def test_a_drive_of_which_the_host_sees_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves the host no block"):
        replace(PAPER, blocks_per_chip=8, planes_per_chip=1, over_provisioning=1 - 1e-12, open_pages=0)


@given(
    st.floats(0.06, 0.9),
    st.floats(1e-3, 0.05),
    st.floats(1e-9, 1e3),
    st.sampled_from([None, 2, 1_000]),
    st.floats(1.0, 1e12) | st.just(float("inf")),
)
def test_a_drive_is_read_back_bit_for_bit(
    over_provisioning: float, gc_threshold: float, seconds: float, count: int | None, rate: float
) -> None:
    ssd = replace(
        PAPER,
        over_provisioning=over_provisioning,
        gc_threshold=gc_threshold,
        page_read_seconds=seconds,
        levelling_interval=count,
        rated_cycles=count,
        channel_bytes_per_second=rate,
        host_link="shared",
        copy_back=False,
    )

    assert Ssd.from_toml(ssd.to_toml()) == ssd


def test_what_may_be_left_out_has_a_default() -> None:
    text = """
        channels = 2
        blocks_per_chip = 100
        pages_per_block = 64
        page = "16 KiB"
        page_read = "50 us"
        page_write = "600 us"
        block_erase = "3 ms"
        bus = "800 MB/s"
        over_provisioning = "7 %"
        gc_threshold = "2.5 %"
    """

    ssd = Ssd.from_toml(text)

    assert (ssd.chips_per_channel, ssd.planes_per_chip, ssd.summary_pages, ssd.spare_bytes) == (1, 1, 0, 0)
    assert (ssd.host_link, ssd.copy_back, ssd.levelling_interval) == ("per channel", True, None)
    assert (ssd.over_provisioning, ssd.gc_threshold, ssd.page_bytes) == (0.07, 0.025, 16_384)


@for_each(
    ("old", "new", "message"),
    [
        ('"15 %"', "0.15", "over_provisioning: 0.15 has no unit: write for example '15 %'"),
        ('"15 %"', '"-15 %"', "over_provisioning: '-15 %' cannot be: it must be zero or more"),
        ('"15 %"', '"0.15"', "over_provisioning: '0.15' is not a share in percent"),
        ('"25 us"', "25", "page_read: 25 has no unit"),
        ("channels = 8", "chanels = 8", "chanels is not a field; did you mean channels"),
        ("channels = 8", "channels = 0", "channels: 0 is below 1"),
        ("copy_back = true", "copy_back = 1", "copy_back: 1 is neither true nor false"),
        ('host_link = "per channel"', 'host_link = "none"', "host_link is 'none'; it must be one of"),
        ("channels = 8", "", "channels is missing: add it"),
        ("channels = 8", "channels = ", "the SSD is not valid TOML: .*line 1"),
    ],
)
def test_a_wrong_field_is_named(old: str, new: str, message: str) -> None:
    text = PAPER.to_toml()
    assert old in text

    with pytest.raises(ConfigError, match=message):
        Ssd.from_toml(text.replace(old, new, 1))


def test_the_file_in_the_documentation_is_the_papers_drive() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)

    assert Ssd.from_toml(example) == PAPER

"""An SSD as a TOML text. Every quantity carries its unit; shares are in percent:

channels = 8
chips_per_channel = 1
planes_per_chip = 8
blocks_per_chip = 16384
pages_per_block = 64
summary_pages = 1               # of each block, without data of the host
page = "4096 B"
spare = "128 B"                 # of each page, on the bus with it
page_read = "25 us"             # the cells, without the transfer
page_write = "200 us"
block_erase = "1.5 ms"
bus = "40 MB/s"                 # one channel's bus
host_link = "per channel"       # or "shared": one page of all channels at a time
copy_back = true                # moved pages stay inside their chip
over_provisioning = "15 %"      # of all blocks
gc_threshold = "5 %"            # of all blocks
levelling_interval = 1000       # erases of a chip; left out: wear is not levelled
rated_cycles = 100000           # left out: not known
open_pages = 15                 # of each chip's open block, once warm
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.machine.tables import (
    Field,
    count,
    flag,
    integer,
    load_toml,
    seconds,
    size,
    text,
    to_toml,
    unbounded_rate,
    with_unit,
    write_fields,
)
from penstock.units import exact_bytes, exact_rate, exact_seconds, exact_share, parse_share

if TYPE_CHECKING:
    from penstock.machine.ssd.ssd import Ssd


def ssd_fields(toml: str) -> dict[str, Any]:
    """Return the fields of the drive that a TOML text describes.

    Raises: ConfigError naming the field, or the line where the text is not TOML.
    """
    table = load_toml(toml, "the SSD")
    arguments = table.read_all(_FIELDS)
    table.refuse_unknown()
    return arguments


def write_ssd(ssd: Ssd) -> str:
    """Return the text from which `Ssd.from_toml` makes an equal drive."""
    return to_toml(write_fields(_FIELDS, ssd))


def _write_rate(rate: float) -> str | float:
    return rate if rate == float("inf") else exact_rate(rate)


def _share(value: object) -> float:
    written = with_unit(value, "15 %")
    if not written.rstrip().endswith("%"):
        raise ConfigError(f"{value!r} is not a share in percent: write for example '15 %'")
    return parse_share(written)


_FIELDS = (
    Field("channels", "channels", count),
    Field("chips_per_channel", "chips_per_channel", count, default=1),
    Field("planes_per_chip", "planes_per_chip", count, default=1),
    Field("blocks_per_chip", "blocks_per_chip", count),
    Field("pages_per_block", "pages_per_block", count),
    Field("summary_pages", "summary_pages", integer, default=0),
    Field("page", "page_bytes", size, exact_bytes),
    Field("spare", "spare_bytes", size, exact_bytes, 0),
    Field("page_read", "page_read_seconds", seconds, exact_seconds),
    Field("page_write", "page_write_seconds", seconds, exact_seconds),
    Field("block_erase", "block_erase_seconds", seconds, exact_seconds),
    Field("bus", "channel_bytes_per_second", unbounded_rate, _write_rate),
    Field("host_link", "host_link", text, default="per channel"),
    Field("copy_back", "copy_back", flag, default=True),
    Field("over_provisioning", "over_provisioning", _share, exact_share),
    Field("gc_threshold", "gc_threshold", _share, exact_share),
    Field("open_pages", "open_pages", integer, default=0),
    Field("levelling_interval", "levelling_interval", count, default=None),
    Field("rated_cycles", "rated_cycles", count, default=None),
)

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
    count,
    flag,
    load_toml,
    seconds,
    size,
    text,
    to_toml,
    unbounded_rate,
    whole,
    with_unit,
)
from penstock.units import exact_bytes, exact_rate, exact_seconds, exact_share, parse_share

if TYPE_CHECKING:
    from penstock.machine.ssd.ssd import Ssd


def ssd_fields(toml: str) -> dict[str, Any]:
    """Return the fields of the drive that a TOML text describes.

    Raises: ConfigError naming the field, or the line where the text is not TOML.
    """
    table = load_toml(toml, "the SSD")
    arguments: dict[str, Any] = {
        "channels": table.read("channels", count),
        "chips_per_channel": table.read("chips_per_channel", count, 1),
        "planes_per_chip": table.read("planes_per_chip", count, 1),
        "blocks_per_chip": table.read("blocks_per_chip", count),
        "pages_per_block": table.read("pages_per_block", count),
        "summary_pages": table.read("summary_pages", whole, 0),
        "page_bytes": table.read("page", size),
        "spare_bytes": table.read("spare", size, 0),
        "page_read_seconds": table.read("page_read", seconds),
        "page_write_seconds": table.read("page_write", seconds),
        "block_erase_seconds": table.read("block_erase", seconds),
        "channel_bytes_per_second": table.read("bus", unbounded_rate),
        "host_link": table.read("host_link", text, "per channel"),
        "copy_back": table.read("copy_back", flag, True),
        "over_provisioning": table.read("over_provisioning", _share),
        "gc_threshold": table.read("gc_threshold", _share),
        "levelling_interval": table.read("levelling_interval", count, None),
        "rated_cycles": table.read("rated_cycles", count, None),
        "open_pages": table.read("open_pages", whole, 0),
    }
    table.refuse_unknown()
    return arguments


def write_ssd(ssd: Ssd) -> str:
    """Return the text from which `Ssd.from_toml` makes an equal drive."""
    values: dict[str, Any] = {
        "channels": ssd.channels,
        "chips_per_channel": ssd.chips_per_channel,
        "planes_per_chip": ssd.planes_per_chip,
        "blocks_per_chip": ssd.blocks_per_chip,
        "pages_per_block": ssd.pages_per_block,
        "summary_pages": ssd.summary_pages,
        "page": exact_bytes(ssd.page_bytes),
        "spare": exact_bytes(ssd.spare_bytes),
        "page_read": exact_seconds(ssd.page_read_seconds),
        "page_write": exact_seconds(ssd.page_write_seconds),
        "block_erase": exact_seconds(ssd.block_erase_seconds),
        "bus": ssd.channel_bytes_per_second
        if ssd.channel_bytes_per_second == float("inf")
        else exact_rate(ssd.channel_bytes_per_second),
        "host_link": ssd.host_link,
        "copy_back": ssd.copy_back,
        "over_provisioning": exact_share(ssd.over_provisioning),
        "gc_threshold": exact_share(ssd.gc_threshold),
        "open_pages": ssd.open_pages,
    }
    for field in ("levelling_interval", "rated_cycles"):
        if getattr(ssd, field) is not None:
            values[field] = getattr(ssd, field)
    return to_toml(values)


def _share(value: object) -> float:
    written = with_unit(value, "15 %")
    if not written.rstrip().endswith("%"):
        raise ConfigError(f"{value!r} is not a share in percent: write for example '15 %'")
    return parse_share(written)

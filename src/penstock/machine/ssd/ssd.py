"""What an SSD is made of, what its operations cost, and when it collects garbage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.errors import ConfigError
from penstock.machine.ssd.toml import ssd_fields, write_ssd
from penstock.validate import check_count, check_rate, check_seconds, check_share

HostLink = Literal["per channel", "shared"]
#: Pages and blocks are numbered with 32 bits.
_MOST_PAGES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Ssd:
    """A page-mapped SSD: chips of blocks of pages behind channels, and the rules of its housekeeping.

    channels, chips_per_channel: logical page p lies on chip p mod (channels x chips_per_channel), and chip c on
        channel c mod channels.
    blocks_per_chip, pages_per_block: what is erased, what is written.
    page_bytes: data of a page, as the host counts.
    page_read_seconds, page_write_seconds, block_erase_seconds: of the flash cells, without the transfer.
    channel_bytes_per_second: of one channel's bus.
    over_provisioning: share of the blocks that the host never sees, above 0 and below 1; of all blocks, not of
        the exported ones. Rounded down to whole blocks of a plane.
    gc_threshold: garbage is collected in a chip as soon as its free blocks are this share of its blocks or
        fewer, and until they are more. Compared plane by plane, in whole blocks.
    spare_bytes: of each page; they cross the bus with it.
    summary_pages: of each block, written when its other pages are full; they hold no data of the host.
    planes_per_chip: a divisor of blocks_per_chip. Planes round the two shares above, as DiskSim counts; they are
        neither written nor collected apart.
    host_link: whether the channels transfer at the same time ("per channel"), or one page of all at a time
        ("shared").
    copy_back: whether a page that garbage collection moves stays inside its chip, or crosses the bus twice.
    levelling_interval: at every so many erases of a chip the block with the fewest erases is collected instead
        of the emptiest one, so that data at rest does not keep a block from its share of wear; at least 2, None
        for never.
    rated_cycles: erases that a block is good for, None where it is not known.
    open_pages: pages in each chip's open block once the drive is warm, below the data pages of a block.

    Raises: ConfigError naming the field.
    """

    channels: int
    chips_per_channel: int
    blocks_per_chip: int
    pages_per_block: int
    page_bytes: int
    page_read_seconds: float
    page_write_seconds: float
    block_erase_seconds: float
    channel_bytes_per_second: float
    over_provisioning: float
    gc_threshold: float
    spare_bytes: int = 0
    summary_pages: int = 0
    planes_per_chip: int = 1
    host_link: HostLink = "per channel"
    copy_back: bool = True
    levelling_interval: int | None = None
    rated_cycles: int | None = None
    open_pages: int = 0

    def __post_init__(self) -> None:
        for field in ("channels", "chips_per_channel", "blocks_per_chip", "page_bytes", "planes_per_chip"):
            check_count(field, getattr(self, field), 1)
        check_count("pages_per_block", self.pages_per_block, 1)
        for field in ("spare_bytes", "summary_pages", "open_pages"):
            check_count(field, getattr(self, field), 0)
        for field in ("page_read_seconds", "page_write_seconds", "block_erase_seconds"):
            check_seconds(field, getattr(self, field))
        check_rate("channel_bytes_per_second", self.channel_bytes_per_second)
        check_share("over_provisioning", self.over_provisioning)
        check_share("gc_threshold", self.gc_threshold)
        if self.host_link not in get_args(HostLink):
            raise ConfigError(
                f"host_link is {self.host_link!r}; it must be one of {', '.join(get_args(HostLink))}"
            )
        if not isinstance(self.copy_back, bool):
            raise ConfigError(f"copy_back is {self.copy_back!r}; it must be true or false")
        if self.levelling_interval is not None:
            check_count("levelling_interval", self.levelling_interval, 2)
        if self.rated_cycles is not None:
            check_count("rated_cycles", self.rated_cycles, 1)
        self._check_together()

    def _check_together(self) -> None:
        if self.summary_pages >= self.pages_per_block:
            raise ConfigError(
                f"summary_pages is {self.summary_pages} of {self.pages_per_block} pages_per_block: "
                "leave at least one page for data"
            )
        if self.open_pages >= self.data_pages_per_block:
            raise ConfigError(
                f"open_pages is {self.open_pages}; an open block holds fewer than its "
                f"{self.data_pages_per_block} data pages"
            )
        if self.blocks_per_chip % self.planes_per_chip:
            raise ConfigError(
                f"planes_per_chip is {self.planes_per_chip}; it must divide the {self.blocks_per_chip} "
                "blocks_per_chip"
            )
        # Space for page numbers of whole powers of two per block, as the drive numbers them.
        if self.blocks * 2 * self.pages_per_block > _MOST_PAGES:
            raise ConfigError(
                f"the drive has {self.blocks * self.pages_per_block:,} pages, more than can be numbered: "
                "model it with larger pages (page_bytes) or as several drives"
            )
        if self.exported_pages < 1:
            raise ConfigError(
                f"over_provisioning is {self.over_provisioning!r}, which leaves the host no block of the "
                f"{self.blocks_per_chip} of a chip: lower it"
            )
        if self.gc_free_blocks < 2:
            raise ConfigError(
                f"gc_threshold is {self.gc_threshold!r}, which keeps {self.gc_free_blocks} block of a chip "
                "free; moving pages needs 2: raise it"
            )
        if self.reserved_blocks_per_chip <= self.gc_free_blocks:
            raise ConfigError(
                f"over_provisioning is {self.over_provisioning!r}, {self.reserved_blocks_per_chip} blocks of a "
                f"chip, but gc_threshold keeps {self.gc_free_blocks} free: at least one more is needed to "
                "collect garbage: raise over_provisioning or lower gc_threshold"
            )

    @property
    def chips(self) -> int:
        """Return how many chips there are."""
        return self.channels * self.chips_per_channel

    @property
    def blocks(self) -> int:
        """Return how many blocks there are, all chips together."""
        return self.chips * self.blocks_per_chip

    @property
    def data_pages_per_block(self) -> int:
        """Return how many pages of a block hold the host's data."""
        return self.pages_per_block - self.summary_pages

    @property
    def reserved_blocks_per_chip(self) -> int:
        """Return how many blocks of a chip are over-provisioned."""
        return self.planes_per_chip * _floor(self.over_provisioning * self._blocks_per_plane)

    @property
    def gc_free_blocks(self) -> int:
        """Return how many blocks garbage collection keeps free in each chip."""
        return self.planes_per_chip * (_floor(self.gc_threshold * self._blocks_per_plane) + 1)

    @property
    def exported_pages(self) -> int:
        """Return how many logical pages the host can write, all chips together."""
        return self.chips * (self.blocks_per_chip - self.reserved_blocks_per_chip) * self.data_pages_per_block

    @property
    def exported_bytes(self) -> int:
        """Return the size of the drive, as the host sees it."""
        return self.exported_pages * self.page_bytes

    @property
    def transfer_seconds(self) -> float:
        """Return the time of a page, data and spare, on the bus."""
        return (self.page_bytes + self.spare_bytes) / self.channel_bytes_per_second

    @property
    def _blocks_per_plane(self) -> int:
        return self.blocks_per_chip // self.planes_per_chip

    def pages(self, size_bytes: int) -> int:
        """Return how many pages hold so many bytes."""
        return -(-size_bytes // self.page_bytes)

    @classmethod
    def paper(cls) -> Ssd:
        """Return the drive on which delta snapshots were evaluated.

        Source: Wang, Boukhobza and Shao, "Preserving SSD lifetime in deep learning applications with delta
        snapshots", Tables 4 and 8 and section 6 (100,000 cycles of an SLC flash). Not in the paper: 16 spare
        bytes for each 512, a summary page in each block, 8 planes and copy-back are DiskSim's SSD extension's,
        and with them come Table 8's and 9's figures; 15 open pages lie in the middle of the 13 to 17 with which
        all of Table 9's agree.

        >>> Ssd.paper().gc_free_blocks * 8
        6592
        """
        return cls(
            channels=8,
            chips_per_channel=1,
            blocks_per_chip=16_384,
            pages_per_block=64,
            page_bytes=4_096,
            page_read_seconds=25e-6,
            page_write_seconds=200e-6,
            block_erase_seconds=1.5e-3,
            channel_bytes_per_second=40e6,
            over_provisioning=0.15,
            gc_threshold=0.05,
            spare_bytes=128,
            summary_pages=1,
            planes_per_chip=8,
            rated_cycles=100_000,
            open_pages=15,
        )

    def to_toml(self) -> str:
        """Return the text from which `from_toml` makes an equal drive."""
        return write_ssd(self)

    @classmethod
    def from_toml(cls, text: str) -> Ssd:
        """Return the drive that a TOML text describes.

        The fields are those of the example in `penstock.machine.ssd.toml`.
        Raises: ConfigError naming the field.
        """
        return cls(**ssd_fields(text))


def _floor(amount: float) -> int:
    # A share such as 0.29 of 100 blocks is 29 blocks, though the product is 28.999999999999996.
    return math.floor(amount + 1e-9)

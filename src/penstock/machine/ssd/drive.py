"""An SSD's memory, as arrays: where each page lies, which blocks are free, how often each was erased."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.machine.ssd.flash import Flash, Rules
from penstock.machine.ssd.ssd import Ssd


class PageOp(IntEnum):
    """What a host does to a run of logical pages."""

    WRITE = 0
    TRIM = 1
    READ = 2


_WORK = slice(5, 11)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What the chips did.

    per_chip: int64[chips, 6]: pages the host wrote, pages moved by garbage collection, summary pages written,
        pages read, pages trimmed, blocks erased.
    """

    per_chip: NDArray[np.int64]

    def __sub__(self, earlier: Work) -> Work:
        return Work(self.per_chip - earlier.per_chip)

    def __add__(self, other: Work) -> Work:
        return Work(self.per_chip + other.per_chip)

    def _total(self, column: int) -> int:
        return int(self.per_chip[:, column].sum())

    @property
    def written_pages(self) -> int:
        """Return the pages that the host wrote."""
        return self._total(0)

    @property
    def moved_pages(self) -> int:
        """Return the pages that garbage collection wrote again."""
        return self._total(1)

    @property
    def summary_pages(self) -> int:
        """Return the summary pages that were written."""
        return self._total(2)

    @property
    def read_pages(self) -> int:
        """Return the pages that the host read and that hold something."""
        return self._total(3)

    @property
    def trimmed_pages(self) -> int:
        """Return the pages that the host gave up and that held something."""
        return self._total(4)

    @property
    def erases(self) -> int:
        """Return the blocks that were erased."""
        return self._total(5)

    @property
    def programmed_pages(self) -> int:
        """Return all pages that were written to flash."""
        return self.written_pages + self.moved_pages + self.summary_pages

    @property
    def write_amplification(self) -> float | None:
        """Return pages written to flash for each page that the host wrote, None where it wrote none."""
        return self.programmed_pages / self.written_pages if self.written_pages else None

    def seconds(self, ssd: Ssd) -> float:
        """Return how long the drive is busy, with enough asked at once to keep every chip busy.

        A chip reads, writes and erases one after the other, and is busy while its page crosses the bus; chips of
        a channel share its bus; channels work side by side. The busiest of all chips and buses says how long.
        """
        written, moved, summaries, read, _trimmed, erased = self.per_chip.T.astype(np.float64)
        crossings = written + summaries + read + (0.0 if ssd.copy_back else 2.0) * moved
        busy = (
            (read + moved) * ssd.page_read_seconds
            + (written + summaries + moved) * ssd.page_write_seconds
            + erased * ssd.block_erase_seconds
            + crossings * ssd.transfer_seconds
        )
        of_channels = crossings.reshape(ssd.chips_per_channel, ssd.channels).sum(axis=0)
        bus = of_channels.sum() if ssd.host_link == "shared" else of_channels.max()
        return float(max(busy.max(), bus * ssd.transfer_seconds))


def _ops(ops: ArrayLike) -> NDArray[np.uint8]:
    numbers = _whole("ops", ops)
    unknown = (numbers < 0) | (numbers > max(PageOp))
    if unknown.any():
        index = int(unknown.argmax())
        raise ConfigError(
            f"run {index}: operation {numbers[index]} is none of {', '.join(PageOp.__members__)}"
        )
    return numbers.astype(np.uint8)


def _whole(name: str, numbers: ArrayLike) -> NDArray[np.int64]:
    """Return int64[n] of numbers that are integers, whatever their type. Raises: ConfigError naming the first other."""
    given = np.atleast_1d(np.asarray(numbers))
    if given.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            is_integral = (given == np.trunc(given)) & (np.abs(given) < 2.0**63)
    else:
        is_integral = np.full(given.shape, given.dtype.kind in "iu")
    if not is_integral.all():
        index = int(is_integral.argmin())
        raise ConfigError(
            f"run {index}: {name} holds {given.ravel().tolist()[index]!r}; pages and operations are integers of "
            "at most 63 bits"
        )
    # What 64 bits hold without a sign becomes negative, and is refused as that.
    return np.ascontiguousarray(given, np.int64)


class Drive:
    """An SSD in use: fresh from the factory, then as its writes have left it.

    Not safe to use from several threads at once.
    """

    def __init__(self, ssd: Ssd) -> None:
        blocks, chips, lists = ssd.blocks, ssd.chips, ssd.data_pages_per_block + 2
        self.ssd = ssd
        self._shift = (ssd.data_pages_per_block - 1).bit_length()
        # The chip's first block is open; all others are free, in their order.
        number = np.arange(blocks, dtype=np.int32).reshape(chips, -1)
        of_block = np.zeros((chips, ssd.blocks_per_chip, 4), np.int32)
        of_block[:, :, 1], of_block[:, :, 2] = number - 1, number + 1
        of_block[:, 1, 1] = of_block[:, -1, 2] = -1
        ends = np.full((chips, lists, 2), -1, np.int32)
        ends[:, -1] = number[:, [1, -1]]
        of_chip = np.zeros((chips, 11), np.int64)
        of_chip[:, 0], of_chip[:, 2], of_chip[:, 3] = number[:, 0], ssd.blocks_per_chip - 1, lists - 2
        self._flash = Flash(
            page_of=np.full(ssd.exported_pages, -1, np.int32),
            logical_of=np.full(blocks << self._shift, -1, np.int32),
            blocks=of_block.reshape(blocks, 4),
            ends=ends,
            chips=of_chip,
        )

    def copy(self) -> Drive:
        """Return a drive in the same state that changes independently."""
        other = object.__new__(Drive)
        other.ssd, other._shift = self.ssd, self._shift
        page_of, logical_of, blocks, ends, chips = self._flash
        other._flash = Flash(page_of.copy(), logical_of.copy(), blocks.copy(), ends.copy(), chips.copy())
        return other

    def become(self, other: Drive) -> None:
        """Take on the state of another drive of the same make: a copy without new memory."""
        if other.ssd != self.ssd:
            raise ConfigError(
                "a drive can only take on the state of one of the same make: copy the other one"
            )
        for field in Flash._fields:
            np.copyto(getattr(self._flash, field), getattr(other._flash, field))

    def run(self, ops: ArrayLike, firsts: ArrayLike, counts: ArrayLike) -> Work:
        """Write, trim and read runs of logical pages in their order; return what that made the chips do.

        ops: uint8[n], of `PageOp`. firsts, counts: int64[n], each run inside of the exported pages.
        What was never written, or was trimmed, costs nothing to read or to trim.
        Raises: ConfigError naming the first run that does not fit the drive; then nothing was done.
        """
        from penstock.machine.ssd._kernels import run_extents

        firsts, counts = _whole("firsts", firsts), _whole("counts", counts)
        ops = _ops(ops)
        self._check(ops, firsts, counts)
        before = self.work()
        ssd = self.ssd
        interval = ssd.levelling_interval or 0
        rules = Rules(self._shift, ssd.data_pages_per_block, ssd.summary_pages, ssd.gc_free_blocks, interval)
        run_extents(ops, firsts, counts, self._flash, rules)
        return self.work() - before

    def _check(self, ops: NDArray[np.uint8], firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        if not ops.shape == firsts.shape == counts.shape or ops.ndim != 1:
            raise ConfigError(
                f"ops, firsts and counts have shapes {ops.shape}, {firsts.shape} and {counts.shape}; "
                "each run needs one of each"
            )
        pages = self.ssd.exported_pages
        # counts are compared with what is left, so that no sum overflows.
        wrong = (firsts < 0) | (counts < 0) | (firsts > pages) | (counts > pages - firsts)
        if wrong.any():
            index = int(wrong.argmax())
            raise ConfigError(
                f"run {index}: {counts[index]:,} pages from page {firsts[index]:,} are not within the drive's "
                f"{pages:,} pages"
            )

    def write(self, first: int, count: int = 1) -> Work:
        """Write a run of logical pages."""
        return self.run(PageOp.WRITE, first, count)

    def trim(self, first: int, count: int = 1) -> Work:
        """Give up a run of logical pages."""
        return self.run(PageOp.TRIM, first, count)

    def read(self, first: int, count: int = 1) -> Work:
        """Read a run of logical pages."""
        return self.run(PageOp.READ, first, count)

    def warm_up(self) -> None:
        """Bring a fresh drive to where garbage collection is about to begin, and count from there.

        All exported pages are written in their order, and again from the first on, until no chip can open another
        block without collecting one; then `open_pages` more of each chip. Every page holds something then.
        Source: the paper's Table 8, whose blocks come out of this: 111,432 valid, 13,048 invalid, 6,592 free.
        """
        ssd = self.ssd
        self.write(0, ssd.exported_pages)
        spare_blocks = ssd.reserved_blocks_per_chip - 1 - ssd.gc_free_blocks
        left = ssd.chips * (spare_blocks * ssd.data_pages_per_block + ssd.open_pages)
        while left:
            count = min(left, ssd.exported_pages)
            self.write(0, count)
            left -= count
        self.forget()

    def forget(self) -> None:
        """Count work and erases from here on; everything else stays."""
        self._flash.chips[:, 4:] = 0
        self._flash.blocks[:, 3] = 0

    def work(self) -> Work:
        """Return what the chips did since counting began."""
        return Work(self._flash.chips[:, _WORK].copy())

    def erases(self) -> NDArray[np.int32]:
        """Return int32[blocks], how often each block was erased since counting began."""
        return self._flash.blocks[:, 3].copy()

    def places(self) -> NDArray[np.int64]:
        """Return int64[exported pages, 2], block and page in it of each logical page; -1 where nothing is."""
        places = self._flash.page_of.astype(np.int64)
        inside = places & ((1 << self._shift) - 1)
        return np.stack([places >> self._shift, np.where(places < 0, -1, inside)], axis=1)

    def block_states(self) -> tuple[int, int, int]:
        """Return how many blocks are valid (open, or with a valid page), invalid, and free."""
        free = int(self._flash.chips[:, 2].sum())
        is_valid = self._flash.blocks[:, 0] > 0
        is_valid[self._flash.chips[:, 0]] = True
        valid = int(is_valid.sum())
        return valid, self.ssd.blocks - valid - free, free

"""The compiled loop of the drive. Imported only when a drive is used: it loads numba.

Every operation takes constant time: the two page maps are arrays, and the closed blocks of a chip hang in one
list for each number of valid pages, so the emptiest one is the oldest of the lowest list that has any. Measured:
`benchmarks/wear.py`; figures in docs/howto/ssd-wear.md.

The plain version of the same rules is tests/machine/ssd/test_drive.py; both agree page by page.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.machine.ssd.flash import Flash, Rules
from penstock.uncounted import kernel

# Columns, as drive.py has them.
_VALID, _OLDER, _NEWER, _ERASES = range(4)
_OPEN, _FILL, _FREE, _LOWEST, _CYCLES, _WRITTEN, _MOVED, _SUMMARIES, _READ, _TRIMMED, _ERASED = range(11)
_OLDEST, _NEWEST = range(2)
_WRITE, _TRIM = range(2)
_NONE = -1


@kernel
def _append(flash: Flash, chip: int, level: int, block: int) -> None:
    blocks, ends = flash.blocks, flash.ends
    last = ends[chip, level, _NEWEST]
    blocks[block, _OLDER] = last
    blocks[block, _NEWER] = _NONE
    if last >= 0:
        blocks[last, _NEWER] = block
    else:
        ends[chip, level, _OLDEST] = block
    ends[chip, level, _NEWEST] = block


@kernel
def _unlink(flash: Flash, chip: int, level: int, block: int) -> None:
    blocks, ends = flash.blocks, flash.ends
    before, after = blocks[block, _OLDER], blocks[block, _NEWER]
    if before >= 0:
        blocks[before, _NEWER] = after
    else:
        ends[chip, level, _OLDEST] = after
    if after >= 0:
        blocks[after, _OLDER] = before
    else:
        ends[chip, level, _NEWEST] = before


@kernel
def _open_next(flash: Flash, chip: int, data_pages: int) -> None:
    """Take the block that has been free for longest: what was erased waits its turn, which evens wear."""
    chips = flash.chips
    block = flash.ends[chip, data_pages + 1, _OLDEST]
    _unlink(flash, chip, data_pages + 1, block)
    chips[chip, _OPEN] = block
    chips[chip, _FILL] = 0
    chips[chip, _FREE] -= 1


@kernel
def _close(flash: Flash, chip: int, block: int) -> None:
    level = flash.blocks[block, _VALID]
    _append(flash, chip, level, block)
    if level < flash.chips[chip, _LOWEST]:
        flash.chips[chip, _LOWEST] = level


@kernel
def _invalidate(flash: Flash, chip: int, place: int, shift: int) -> None:
    block = place >> shift
    flash.logical_of[place] = _NONE
    level = flash.blocks[block, _VALID]
    flash.blocks[block, _VALID] = level - 1
    if block != flash.chips[chip, _OPEN]:
        _unlink(flash, chip, level, block)
        _close(flash, chip, block)


@kernel
def _program(flash: Flash, rules: Rules, chip: int, logical: int) -> bool:
    """Write a page into the open block; return whether that filled it, so that another was opened."""
    chips = flash.chips
    block = chips[chip, _OPEN]
    fill = chips[chip, _FILL]
    place = (block << rules.shift) + fill
    flash.page_of[logical] = place
    flash.logical_of[place] = logical
    flash.blocks[block, _VALID] += 1
    chips[chip, _FILL] = fill + 1
    if fill + 1 < rules.data_pages:
        return False
    chips[chip, _SUMMARIES] += rules.summary_pages
    _close(flash, chip, block)
    _open_next(flash, chip, rules.data_pages)
    return True


@kernel
def _choose(flash: Flash, chip: int, levelling_interval: int) -> int:
    """Return the block to collect: the emptiest; of several, the one that has been so empty for longest."""
    blocks, ends, chips = flash.blocks, flash.ends, flash.chips
    level = chips[chip, _LOWEST]
    while ends[chip, level, _OLDEST] < 0:
        level += 1
    chips[chip, _LOWEST] = level
    chosen = int(ends[chip, level, _OLDEST])
    if levelling_interval == 0 or (chips[chip, _CYCLES] + 1) % levelling_interval != 0:
        return chosen
    # Data at rest is what keeps a block from wear: only blocks that hold any are looked at.
    blocks_per_chip = blocks.shape[0] // chips.shape[0]
    begin = chip * blocks_per_chip
    for block in range(begin, begin + blocks_per_chip):
        is_less_worn = blocks[block, _ERASES] < blocks[chosen, _ERASES]
        if is_less_worn and blocks[block, _VALID] > 0 and block != chips[chip, _OPEN]:
            chosen = block
    return chosen


@kernel
def _collect(flash: Flash, rules: Rules, chip: int) -> None:
    """Move what is valid in one block, erase it, and put it at the end of the free list."""
    blocks, chips = flash.blocks, flash.chips
    victim = _choose(flash, chip, rules.levelling_interval)
    _unlink(flash, chip, blocks[victim, _VALID], victim)
    if blocks[victim, _VALID] > 0:
        first = victim << rules.shift
        for place in range(first, first + rules.data_pages):
            logical = flash.logical_of[place]
            if logical >= 0:
                flash.logical_of[place] = _NONE
                _program(flash, rules, chip, logical)
                chips[chip, _MOVED] += 1
        blocks[victim, _VALID] = 0
    blocks[victim, _ERASES] += 1
    chips[chip, _ERASED] += 1
    chips[chip, _CYCLES] += 1
    _append(flash, chip, rules.data_pages + 1, victim)
    chips[chip, _FREE] += 1


@kernel
def run_extents(
    ops: NDArray[np.uint8], firsts: NDArray[np.int64], counts: NDArray[np.int64], flash: Flash, rules: Rules
) -> None:
    """Write, trim or read runs of logical pages, in their order.

    ops: uint8[n], of `PageOp`. firsts, counts: int64[n], runs of pages inside of the exported ones.
    flash: changed in place.
    """
    chips = flash.chips
    for run in range(ops.size):
        op = ops[run]
        first = firsts[run]
        chip = first % chips.shape[0]
        for logical in range(first, first + counts[run]):
            place = flash.page_of[logical]
            if op == _WRITE:
                if place >= 0:
                    _invalidate(flash, chip, place, rules.shift)
                chips[chip, _WRITTEN] += 1
                is_filled = _program(flash, rules, chip, logical)
                while is_filled and chips[chip, _FREE] < rules.gc_free_blocks:
                    _collect(flash, rules, chip)
            elif place >= 0:
                if op == _TRIM:
                    _invalidate(flash, chip, place, rules.shift)
                    flash.page_of[logical] = _NONE
                    chips[chip, _TRIMMED] += 1
                else:
                    chips[chip, _READ] += 1
            chip += 1
            if chip == chips.shape[0]:
                chip = 0

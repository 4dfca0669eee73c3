"""The compiled loop of the drive. Imported only when a drive is used: it loads numba.

Every operation takes constant time: the two page maps are arrays, and the closed blocks of a chip hang in one
list for each number of valid pages, so the emptiest one is the oldest of the lowest list that has any. Measured:
`benchmarks/wear.py`; figures in docs/howto/ssd-wear.md.

The plain version of the same rules is tests/machine/ssd/test_drive.py; both agree page by page.

The arrays are those of `penstock.machine.ssd.drive.Flash`, passed one by one to small functions that are compiled
into the loop: as calls they are three times slower, and with the arrays held in one tuple ten times.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import inlined, kernel

Ints = NDArray[np.int32]
Counts = NDArray[np.int64]

# Columns, as drive.py has them.
_VALID, _OLDER, _NEWER, _ERASES = range(4)
_OPEN, _FILL, _FREE, _LOWEST, _CYCLES, _WRITTEN, _MOVED, _SUMMARIES, _READ, _TRIMMED, _ERASED = range(11)
_OLDEST, _NEWEST = range(2)
_WRITE, _TRIM = range(2)
_NONE = -1


@inlined
def _append(blocks: Ints, ends: Ints, chip: int, level: int, block: int) -> None:
    last = ends[chip, level, _NEWEST]
    blocks[block, _OLDER] = last
    blocks[block, _NEWER] = _NONE
    if last >= 0:
        blocks[last, _NEWER] = block
    else:
        ends[chip, level, _OLDEST] = block
    ends[chip, level, _NEWEST] = block


@inlined
def _unlink(blocks: Ints, ends: Ints, chip: int, level: int, block: int) -> None:
    before, after = blocks[block, _OLDER], blocks[block, _NEWER]
    if before >= 0:
        blocks[before, _NEWER] = after
    else:
        ends[chip, level, _OLDEST] = after
    if after >= 0:
        blocks[after, _OLDER] = before
    else:
        ends[chip, level, _NEWEST] = before


@inlined
def _open_next(blocks: Ints, ends: Ints, chips: Counts, chip: int, data_pages: int) -> None:
    """Take the block that has been free for longest: what was erased waits its turn, which evens wear."""
    block = ends[chip, data_pages + 1, _OLDEST]
    _unlink(blocks, ends, chip, data_pages + 1, block)
    chips[chip, _OPEN] = block
    chips[chip, _FILL] = 0
    chips[chip, _FREE] -= 1


@inlined
def _close(blocks: Ints, ends: Ints, chips: Counts, chip: int, block: int) -> None:
    level = blocks[block, _VALID]
    _append(blocks, ends, chip, level, block)
    if level < chips[chip, _LOWEST]:
        chips[chip, _LOWEST] = level


@inlined
def _invalidate(
    logical_of: Ints, blocks: Ints, ends: Ints, chips: Counts, chip: int, place: int, shift: int
) -> None:
    block = place >> shift
    logical_of[place] = _NONE
    level = blocks[block, _VALID]
    blocks[block, _VALID] = level - 1
    if block != chips[chip, _OPEN]:
        _unlink(blocks, ends, chip, level, block)
        _close(blocks, ends, chips, chip, block)


@inlined
def _program(
    page_of: Ints,
    logical_of: Ints,
    blocks: Ints,
    ends: Ints,
    chips: Counts,
    chip: int,
    logical: int,
    shift: int,
    data_pages: int,
    summary_pages: int,
) -> bool:
    """Write a page into the open block; return whether that filled it, so that another was opened."""
    block = chips[chip, _OPEN]
    fill = chips[chip, _FILL]
    place = (block << shift) + fill
    page_of[logical] = place
    logical_of[place] = logical
    blocks[block, _VALID] += 1
    chips[chip, _FILL] = fill + 1
    if fill + 1 < data_pages:
        return False
    chips[chip, _SUMMARIES] += summary_pages
    _close(blocks, ends, chips, chip, block)
    _open_next(blocks, ends, chips, chip, data_pages)
    return True


@inlined
def _choose(
    blocks: Ints, ends: Ints, chips: Counts, chip: int, blocks_per_chip: int, levelling_interval: int
) -> int:
    """Return the block to collect: the emptiest; of several, the one that has been so empty for longest."""
    level = chips[chip, _LOWEST]
    while ends[chip, level, _OLDEST] < 0:
        level += 1
    chips[chip, _LOWEST] = level
    chosen = int(ends[chip, level, _OLDEST])
    if levelling_interval == 0 or (chips[chip, _CYCLES] + 1) % levelling_interval != 0:
        return chosen
    # Data at rest is what keeps a block from wear: only blocks that hold any are looked at.
    begin = chip * blocks_per_chip
    for block in range(begin, begin + blocks_per_chip):
        is_less_worn = blocks[block, _ERASES] < blocks[chosen, _ERASES]
        if is_less_worn and blocks[block, _VALID] > 0 and block != chips[chip, _OPEN]:
            chosen = block
    return chosen


@inlined
def _collect(
    page_of: Ints,
    logical_of: Ints,
    blocks: Ints,
    ends: Ints,
    chips: Counts,
    chip: int,
    shift: int,
    data_pages: int,
    summary_pages: int,
    blocks_per_chip: int,
    levelling_interval: int,
) -> None:
    """Move what is valid in one block, erase it, and put it at the end of the free list."""
    victim = _choose(blocks, ends, chips, chip, blocks_per_chip, levelling_interval)
    _unlink(blocks, ends, chip, blocks[victim, _VALID], victim)
    if blocks[victim, _VALID] > 0:
        first = victim << shift
        for place in range(first, first + data_pages):
            logical = logical_of[place]
            if logical >= 0:
                logical_of[place] = _NONE
                _program(
                    page_of, logical_of, blocks, ends, chips, chip, logical, shift, data_pages, summary_pages
                )
                chips[chip, _MOVED] += 1
        blocks[victim, _VALID] = 0
    blocks[victim, _ERASES] += 1
    chips[chip, _ERASED] += 1
    chips[chip, _CYCLES] += 1
    _append(blocks, ends, chip, data_pages + 1, victim)
    chips[chip, _FREE] += 1


@kernel
def run_extents(
    ops: NDArray[np.uint8],
    firsts: Counts,
    counts: Counts,
    page_of: Ints,
    logical_of: Ints,
    blocks: Ints,
    ends: Ints,
    chips: Counts,
    shift: int,
    data_pages: int,
    summary_pages: int,
    gc_free_blocks: int,
    levelling_interval: int,
) -> None:
    """Write, trim or read runs of logical pages, in their order.

    ops: uint8[n], of `PageOp`. firsts, counts: int64[n], runs of pages inside of the exported ones.
    page_of, logical_of, blocks, ends, chips: of `Flash`, changed in place.
    shift: a block's pages begin at block << shift. levelling_interval: 0 for never.
    """
    number_of_chips = chips.shape[0]
    blocks_per_chip = blocks.shape[0] // number_of_chips
    for run in range(ops.size):
        op = ops[run]
        first = firsts[run]
        chip = first % number_of_chips
        for logical in range(first, first + counts[run]):
            place = page_of[logical]
            if op == _WRITE:
                if place >= 0:
                    _invalidate(logical_of, blocks, ends, chips, chip, place, shift)
                chips[chip, _WRITTEN] += 1
                is_filled = _program(
                    page_of, logical_of, blocks, ends, chips, chip, logical, shift, data_pages, summary_pages
                )
                while is_filled and chips[chip, _FREE] < gc_free_blocks:
                    _collect(
                        page_of,
                        logical_of,
                        blocks,
                        ends,
                        chips,
                        chip,
                        shift,
                        data_pages,
                        summary_pages,
                        blocks_per_chip,
                        levelling_interval,
                    )
            elif place >= 0:
                if op == _TRIM:
                    _invalidate(logical_of, blocks, ends, chips, chip, place, shift)
                    page_of[logical] = _NONE
                    chips[chip, _TRIMMED] += 1
                else:
                    chips[chip, _READ] += 1
            chip += 1
            if chip == number_of_chips:
                chip = 0

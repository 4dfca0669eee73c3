"""What the loop of a drive works on: the arrays that it changes, and the numbers that it uses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Flash(NamedTuple):
    """The arrays that the kernel changes. Blocks are numbered through all chips; chip c owns the c-th run of them.

    Each block is in one of three states: free (in its chip's free list), open (being written, in no list) or
    closed (in its chip's list for its number of valid pages). Lists run from the oldest to the newest member.
    """

    #: int32[exported pages]: the place of a logical page, -1 where nothing was written.
    page_of: NDArray[np.int32]
    #: int32[places]: the logical page that is valid there, or -1; the inverse of page_of.
    logical_of: NDArray[np.int32]
    #: int32[blocks, 4]: valid pages, older and newer neighbour in the block's list or -1, erases.
    blocks: NDArray[np.int32]
    #: int32[chips, data pages + 2, 2]: oldest and newest of the lists: of 0 to all pages valid, then the free.
    ends: NDArray[np.int32]
    #: int64[chips, 11]: open block, pages in it, free blocks, number of valid pages below which no list has
    #: members, erases, then the columns of `Work`.
    chips: NDArray[np.int64]


class Rules(NamedTuple):
    """What of a drive decides how its blocks are filled and collected.

    shift: a block's pages begin at block << shift. levelling_interval: 0 for never.
    """

    shift: int
    data_pages: int
    summary_pages: int
    gc_free_blocks: int
    levelling_interval: int

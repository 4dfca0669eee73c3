"""The loop that draws random words: those of `penstock.plan.random.draw_words`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernel import entry, machine_code
from penstock.loader.draws import SIGNATURE
from penstock.loader.transforms._group_kernels import _words
from penstock.machine_code import MachineCode


@entry
def draw(key: int, epoch: int, items: NDArray[np.uint64], out: NDArray[np.uint32]) -> None:
    """Draw words for items of an epoch.

    items: uint64[n]. out: uint32[words, n], written.

    Items are the inner loop and their words lie side by side, so that LLVM makes vector instructions of it.
    """
    count = out.shape[0]
    for at in range(0, count, 4):
        left = count - at
        for item in range(items.size):
            words = _words(key, epoch, items[item], at // 4)
            out[at, item] = words[0]
            if left > 1:
                out[at + 1, item] = words[1]
            if left > 2:
                out[at + 2, item] = words[2]
            if left > 3:
                out[at + 3, item] = words[3]


def compile_part(name: str) -> MachineCode:
    """Return the machine code of a kernel: of "draw"."""
    return machine_code(globals()[name], SIGNATURE)

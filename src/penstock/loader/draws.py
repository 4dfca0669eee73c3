"""Random words by compiled code: what decides, `penstock.plan`, compiles nothing by itself."""

from __future__ import annotations

from penstock.compiling import Part
from penstock.machine_code import Signature
from penstock.plan import bijection, random

SIGNATURES = {
    "draw": Signature(("uint64", "uint64", "uint64[:]", "uint32[:, :]")),
    "shuffle": Signature(("uint64", "uint64", "uint64", "uint64[:]", "uint64[:]"), ("int64",)),
}
DRAW = Part(
    "penstock.loader._draw_kernels",
    "draw",
    SIGNATURES["draw"],
    "how random numbers are drawn",
    "NumPy draws them, more slowly,",
)
SHUFFLE = Part(
    "penstock.loader._draw_kernels",
    "shuffle",
    SIGNATURES["shuffle"],
    "how a small data set is shuffled",
    "NumPy does it, more slowly,",
)


# Samples after which it is worth compiling, which takes 2 s of a processor; and worth loading where it was compiled.
_WORTH_COMPILING_SAMPLES, _WORTH_LOADING_SAMPLES = 10_000, 1_000


def draw_compiled(samples: int) -> None:
    """Have this process draw for so many samples by compiled code from here on, if that is there and worth it.

    How many are shuffled in one block is known once the first samples of a plan have been asked for; orders that are
    not shuffled so, and larger ones, need no loop for it.
    """
    uses = ((DRAW, random.use, samples), (SHUFFLE, bijection.use, bijection.most_shuffled()))
    for part, use, count in uses:
        is_worth_loading = count >= _WORTH_LOADING_SAMPLES and part.is_cached
        is_worth_it = count >= _WORTH_COMPILING_SAMPLES or is_worth_loading
        if is_worth_it and (loop := part.ask()) is not None:
            use(loop)

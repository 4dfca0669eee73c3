"""Random words by compiled code: what decides, `penstock.plan`, compiles nothing by itself."""

from __future__ import annotations

from penstock.compiling import Part
from penstock.machine_code import Signature
from penstock.plan import random

SIGNATURE = Signature(("uint64", "uint64", "uint64[:]", "uint32[:, :]"))
DRAW = Part(
    "penstock.loader._draw_kernels",
    "draw",
    SIGNATURE,
    "how random numbers are drawn",
    "NumPy draws them, more slowly,",
)


def draw_compiled() -> None:
    """Have this process draw by compiled code from here on, if it is compiled."""
    if (draw := DRAW.ask()) is not None:
        random.use(draw)

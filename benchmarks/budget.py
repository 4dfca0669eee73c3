"""How long it takes to plan batches of so many tokens, and to pack documents into rows of as many.

    python benchmarks/budget.py          10**8 lengths, as a memory map holds them
    python benchmarks/budget.py --quick  10**5 of them

Lengths are log-normal, 2 to 2,000 tokens, 200 in the mean. A plan is checked before it is timed. Making a `TokenBudget`
looks at all lengths once; planning an epoch makes its bounds; the samples are then arranged pool by pool as they come.
Packing is planned once for all epochs.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Sequence

import numpy as np

from penstock.plan import AccessPlan, Packing, TokenBudget

TOKENS, RANKS = 16_384, 8


def lengths_of(samples: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    rng = np.random.default_rng(0)
    lengths = np.empty(samples, np.int32)
    for begin in range(0, samples, 1 << 22):
        part = lengths[begin : begin + (1 << 22)]
        part[:] = np.clip(rng.lognormal(5, 0.8, part.size), 2, 2_000)
    return lengths


def check(order: TokenBudget) -> None:
    """Make sure that every sample is in one batch, and none is beyond the budget."""
    ids = order.at(0, np.arange(order.samples))
    lengths = np.asarray(order.lengths)[ids]
    bounds = order.bounds(0, RANKS)
    longest = np.maximum.reduceat(lengths, bounds[:-1])
    assert (np.bincount(ids, minlength=order.samples) == 1).all()
    assert (longest * np.diff(bounds)).max() <= TOKENS
    assert (bounds.size - 1) % RANKS == 0


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few lengths, once: figures mean nothing")
    options = parser.parse_args(words)
    samples, repetitions = (10**5, 1) if options.quick else (10**8, 3)
    check(TokenBudget(lengths_of(100_000), TOKENS))
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, NumPy {np.__version__}, one thread; {samples:,} lengths"
    )
    lengths = lengths_of(samples)
    for pool, what in ((1 << 16, "pools of 65,536 sorted"), (1, "none sorted")):
        seconds = []
        for _ in range(repetitions):
            begin = time.perf_counter()
            order = TokenBudget(lengths, TOKENS, pool=pool)
            plan = AccessPlan.of_batches(order, epochs=1, ranks=RANKS)
            made = time.perf_counter()
            steps = plan.steps(0)
            planned = time.perf_counter()
            count = plan.stream(0, 0, 0, 10**6).size
            seconds.append((made - begin, planned - made, (time.perf_counter() - planned) / count))
        made_seconds, plan_seconds, each_seconds = np.median(seconds, axis=0)
        share = order.padding(0).share
        print(
            f"{what}: {made_seconds:.2f} s to look at, {plan_seconds:.2f} s to plan, {each_seconds * 1e6:.2f} us for "
            f"each sample that a rank of {RANKS} asks for; {steps:,} steps, {100 * share:.2g} % padding"
        )
    packed_seconds = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        packing = Packing(lengths, 2_048, too_long="error")
        packed_seconds.append(time.perf_counter() - begin)
    print(f"packed: {np.median(packed_seconds):.2f} s; {packing}")


if __name__ == "__main__":
    main()

"""How well a small model learns from bundles, and what a cache hits, counted beside computed.

    python benchmarks/bundles.py               128 trainings on handwritten digits, and the paper's Table 1
    python benchmarks/bundles.py --quick       the same with 2 seeds and 3 epochs, to see that it runs
    python benchmarks/bundles.py --optimizer sgd
                                               a training that forgives less
    python benchmarks/bundles.py --file-sizes  what files of unequal sizes do to Table 1 (a minute)
    python benchmarks/bundles.py --out FILE    keep the trainings; those of `penstock paper bundles-figure-9`
                                               are src/penstock.papers.convergence.json

Accuracies repeat on one machine and version of PyTorch; on others they differ as seeds do.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.cli.output import progress
from penstock.papers.bundles import count_hits
from penstock.papers.convergence import NUMBERINGS, RATIOS, compare, train_digits
from penstock.plan import AccessPlan, BundleShuffle, FullShuffle
from penstock.plan.random import derive_key, generator_for
from penstock.simulate.bundles import expected_hit_ratio
from penstock.simulate.caches import hit_ratios


def unequal_files(nodes: int) -> None:
    """Print Table 1's hit rates by block, with half of the blocks cached, for lognormal sizes of 8 blocks on average.

    Nodes of 6,798 samples, a sixteenth of SUN397. Where half of the samples are not half of the blocks, the bundles at
    one end of the data set do not fit: hits are lost, and nodes differ.
    """
    samples, epochs = 6_798, 5
    for variation in (0.0, 0.5, 1.0, 1.5):
        hits = []
        for node in range(nodes):
            deviation = math.sqrt(math.log1p(variation**2))
            drawn = generator_for(derive_key(0, "blocks of a file"), 0, node).lognormal(
                math.log(8) - deviation**2 / 2, deviation, samples
            )
            blocks = np.maximum(1, np.rint(drawn)).astype(np.int64)
            half = int(blocks.sum()) // 2
            orders = (FullShuffle(samples, node), BundleShuffle(samples, node))
            strings = (by_block(AccessPlan(order, samples, epochs).string(0), blocks) for order in orders)
            hits.append([hit_ratios(string, [half], "lru")[0] for string in strings])
        mean, spread = 100 * np.mean(hits, axis=0), 100 * np.std(hits, axis=0, ddof=1)
        print(
            f"coefficient of variation {variation:.1f}: original {mean[0]:.2f} +- {spread[0]:.2f} %, "
            f"proposed {mean[1]:.2f} +- {spread[1]:.2f} % ({nodes} nodes, mean and standard deviation)"
        )


def by_block(string: NDArray[np.int64], blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the blocks that reading whole files asks for, one after the other."""
    count = blocks[string]
    first_of_file = np.cumsum(blocks) - blocks
    first_of_read = np.cumsum(count) - count
    return np.repeat(first_of_file[string] - first_of_read, count) + np.arange(count.sum())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 seeds, 3 epochs, 3 ratios")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the trainings as JSON")
    parser.add_argument(
        "--file-sizes", action="store_true", help="Table 1 by block, for files of unequal sizes"
    )
    parser.add_argument("--optimizer", default="adam", metavar="NAME", help="adam or sgd (%(default)s)")
    options = parser.parse_args(arguments)

    if options.file_sizes:
        unequal_files(nodes=4 if options.quick else 10)
        return
    ratios, seeds, epochs = ((1.0, 0.1, 0.02), 2, 3) if options.quick else (RATIOS, 8, 20)
    begin = time.perf_counter()
    with progress("training", len(NUMBERINGS) * (len(ratios) + 1) * seeds) as done:
        study = train_digits(
            ratios=ratios, seeds=seeds, epochs=epochs, optimizer=options.optimizer, done=done
        )
    print(
        f"{len(study.runs)} trainings of {epochs} epochs in {time.perf_counter() - begin:.0f} s; {study.versions}"
    )
    if options.out is not None:
        options.out.write_text(study.to_json(), encoding="utf-8")
    for row in compare(study):
        verdict = "within noise" if row.is_within_noise else "differs"
        print(
            f"ids {row.numbering:9} bundle_ratio {row.bundle_ratio:<8.3g} accuracy {row.mean:6.2%} +- {row.spread:.2%}"
            f"  less full shuffle {100 * row.difference:+6.2f} +- {100 * row.standard_error:.2f} points"
            f"  p = {row.p_value:.3f}  {verdict}"
        )

    begin = time.perf_counter()
    rows = count_hits((2,) if options.quick else (2, 4, 8, 16), [0.5])
    counted = np.mean([row.hit_ratio[0] for row in rows], axis=0)
    seconds = time.perf_counter() - begin
    computed = [expected_hit_ratio(54_377, 27_188, 5, bundle) for bundle in (54_377, 5_438)]
    np.testing.assert_allclose(counted, computed, atol=0.005)
    print(
        f"Table 1 with the whole cache: original {counted[0]:.2%} (computed {computed[0]:.2%}), "
        f"proposed {counted[1]:.2%} (computed {computed[1]:.2%}); {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()

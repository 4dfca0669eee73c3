"""How well a small model learns from bundles, and what a cache hits, counted beside computed.

    python benchmarks/bundles.py               128 trainings on handwritten digits, and the paper's Table 1
    python benchmarks/bundles.py --quick       the same with 2 seeds and 3 epochs, to see that it runs
    python benchmarks/bundles.py --optimizer sgd
                                               a training that forgives less
    python benchmarks/bundles.py --file-sizes  what files of unequal sizes do to Table 1 (a minute)
    python benchmarks/bundles.py --out FILE    keep the trainings; those of `penstock paper bundles-figure-9`
                                               are src/penstock/papers/convergence.json

Accuracies repeat on one machine and version of PyTorch; on others they differ as seeds do.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.cli.output import progress
from penstock.papers.bundles import count_hits
from penstock.papers.convergence import BY_CLASS, NUMBERINGS, RATIOS, Run, Study, compare
from penstock.plan import AccessPlan, BundleShuffle, FullShuffle, Order, Scattered
from penstock.plan.random import derive_key, generator_for
from penstock.simulate.bundles import expected_hit_share
from penstock.simulate.caches import hit_shares

if TYPE_CHECKING:
    from torch import Tensor, nn

_TEST_EVERY = 5
#: What the network is trained with, and how a reader would write it.
_OPTIMIZERS = {"adam": "Adam, rate 0.001", "sgd": "SGD, rate 0.02, momentum 0.9"}


def train_digits(
    *,
    ratios: Sequence[float] = RATIOS,
    numberings: Sequence[str] = NUMBERINGS,
    seeds: int = 8,
    epochs: int = 20,
    batch_size: int = 32,
    single: bool = True,
    optimizer: str = "adam",
    done: Callable[[int], None] = lambda _: None,
) -> Study:
    """Train a small convolutional network on scikit-learn's 1,797 handwritten digits in each order, and test it.

    ratios: of the bundles; full shuffle (1) is added if it is not there. single: also bundles of a single sample,
        one sequence back and forth. optimizer: "adam" or "sgd", its rate falling to 0 along a cosine. done: told
        after each training how many are done.
    Every fifth scan of a class is tested on, 1,442 are trained on. One seed gives the weights at the start, the order
    and the scattering, so that runs of one seed differ in order alone. One thread; one to two
    seconds of a processor per training of 20 epochs.
    """
    import sklearn
    import torch

    scans = _Digits()
    samples = scans.labels.numel()
    wanted = sorted({1.0, *ratios, *([1 / samples] if single else [])}, reverse=True)
    jobs = list(product(numberings, wanted, range(seeds)))
    runs = []
    with _one_thread():
        for count, (numbering, ratio, seed) in enumerate(jobs, start=1):
            bundles = BundleShuffle(samples, seed, ratio)
            order: Order = bundles if numbering == BY_CLASS else Scattered(bundles, seed)
            runs.append(Run(numbering, ratio, seed, scans.train(order, seed, epochs, batch_size, optimizer)))
            done(count)
    return Study(
        data="scikit-learn's handwritten digits, 8 x 8 pixels, 10 classes",
        model=f"2 convolutions (16, 32), 2 linear layers (64, 10); {_OPTIMIZERS[optimizer]}, falling along a cosine",
        training_samples=samples,
        test_samples=scans.test_labels.numel(),
        batch_size=batch_size,
        epochs=epochs,
        versions=f"PyTorch {torch.__version__}, scikit-learn {sklearn.__version__}, {platform.machine()}",
        runs=tuple(runs),
    )


class _Digits:
    """The scans as tensors, sorted by class as files in a folder per class are."""

    def __init__(self) -> None:
        import torch
        from sklearn.datasets import load_digits

        digits = load_digits()
        by_class = np.argsort(digits.target, kind="stable")
        images = (digits.images[by_class] / 16).astype(np.float32)[:, None]
        labels = digits.target[by_class].astype(np.int64)
        rank_in_class = np.arange(labels.size) - np.searchsorted(labels, labels)
        is_test = rank_in_class % _TEST_EVERY == _TEST_EVERY - 1
        self.images, self.labels = torch.from_numpy(images[~is_test]), torch.from_numpy(labels[~is_test])
        self.test_images, self.test_labels = (
            torch.from_numpy(images[is_test]),
            torch.from_numpy(labels[is_test]),
        )

    def train(self, order: Order, seed: int, epochs: int, batch_size: int, rule: str) -> tuple[float, ...]:
        import torch

        model = _model(derive_key(seed, "weights at the start"))
        optimizer = (
            torch.optim.Adam(model.parameters(), lr=0.001)
            if rule == "adam"
            else torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        )
        steps = epochs * -(-order.samples // batch_size)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        loss = torch.nn.CrossEntropyLoss()
        accuracy = []
        for epoch in range(epochs):
            ids = torch.from_numpy(order.at(epoch, np.arange(order.length(epoch))))
            for begin in range(0, len(ids), batch_size):
                batch = ids[begin : begin + batch_size]
                optimizer.zero_grad()
                loss(model(self.images[batch]), self.labels[batch]).backward()
                optimizer.step()
                falling.step()
            accuracy.append(self._test(model))
        return tuple(accuracy)

    def _test(self, model: nn.Module) -> float:
        import torch

        with torch.no_grad():
            named: Tensor = model(self.test_images).argmax(1)
        # Whole scans counted: five digits say all there is to say.
        return round(int((named == self.test_labels).sum()) / self.test_labels.numel(), 5)


def _model(key: int) -> nn.Module:
    import torch
    from torch import nn

    # Layers draw from PyTorch's global generator; the caller's is given back as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small layers gain nothing from threads, and lose much where other processes want the processors."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
            hits.append([hit_shares(string, [half], "lru")[0] for string in strings])
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
    parser.add_argument("--optimizer", default="adam", choices=tuple(_OPTIMIZERS), help="(%(default)s)")
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
    counted = np.mean([row.hit_share[0] for row in rows], axis=0)
    seconds = time.perf_counter() - begin
    computed = [expected_hit_share(54_377, 27_188, 5, bundle) for bundle in (54_377, 5_438)]
    np.testing.assert_allclose(counted, computed, atol=0.005)
    print(
        f"Table 1 with the whole cache: original {counted[0]:.2%} (computed {computed[0]:.2%}), "
        f"proposed {counted[1]:.2%} (computed {computed[1]:.2%}); {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()

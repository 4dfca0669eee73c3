"""How well a small model learns when its data comes in bundles: real trainings, several seeds, the same start each.

Needs PyTorch and scikit-learn to train (`pip install penstock[demo]`), and neither to read what was measured.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, FormatError
from penstock.plan import BundleShuffle, Order, Scattered
from penstock.plan.random import derive_key
from penstock.units import is_integer

if TYPE_CHECKING:
    from torch import Tensor, nn

#: In which order ids are numbered: by class, as a folder of images is, or by one random permutation of that.
BY_CLASS, SCATTERED = "by class", "scattered"
NUMBERINGS = (BY_CLASS, SCATTERED)
#: Full shuffle first: the others are compared with it.
RATIOS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
_TEST_EVERY = 5
#: What the network is trained with, and how a reader would write it.
_OPTIMIZERS = {"adam": "Adam, rate 0.001", "sgd": "SGD, rate 0.02, momentum 0.9"}
_VERSION = 1
#: All sign patterns of so many differences are tried; of more, the test says nothing new.
_MOST_SEEDS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """One training: which order, which seed, and the share of the test set named rightly after each epoch."""

    numbering: str
    bundle_ratio: float
    seed: int
    accuracy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Study:
    """Trainings that differ in order and seed alone, and what they have in common."""

    data: str
    model: str
    training_samples: int
    test_samples: int
    batch_size: int
    epochs: int
    versions: str
    runs: tuple[Run, ...]

    def final(self, numbering: str, bundle_ratio: float) -> NDArray[np.float64]:
        """Return the accuracy after the last epoch, by ascending seed: float64[seeds]."""
        return self.by_epoch(numbering, bundle_ratio)[:, -1]

    def by_epoch(self, numbering: str, bundle_ratio: float) -> NDArray[np.float64]:
        """Return the accuracy after each epoch: float64[seeds, epochs], by ascending seed."""
        chosen = [run for run in self.runs if (run.numbering, run.bundle_ratio) == (numbering, bundle_ratio)]
        if not chosen:
            raise ConfigError(f"bundle_ratio {bundle_ratio:g} with ids {numbering} was not trained")
        return np.array([run.accuracy for run in sorted(chosen, key=lambda run: run.seed)])

    @property
    def ratios(self) -> tuple[float, ...]:
        """Those trained, the largest first."""
        return tuple(sorted({run.bundle_ratio for run in self.runs}, reverse=True))

    @property
    def numberings(self) -> tuple[str, ...]:
        """Those trained, in the order of `NUMBERINGS`."""
        return tuple(each for each in NUMBERINGS if any(run.numbering == each for run in self.runs))

    def to_json(self) -> str:
        """Return text that `read_study` reads back; a training per line."""
        common = {name: value for name, value in asdict(self).items() if name != "runs"}
        lines = [json.dumps(asdict(run)) for run in self.runs]
        head = json.dumps({"format": "penstock convergence", "version": _VERSION, **common}, indent=1)
        return head[:-2] + ',\n "runs": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One order beside the full shuffle of the same numbering, seed by seed: the same start, another order."""

    numbering: str
    bundle_ratio: float
    mean: float
    #: Standard deviation over seeds.
    spread: float
    #: Mean over seeds of this order's accuracy less the full shuffle's, and its standard error.
    difference: float
    standard_error: float
    #: Share of all patterns of signs of the differences whose mean is as far from 0 (an exact permutation test).
    p_value: float
    #: Standard deviation over seeds of the full shuffle: the noise that anybody's result has.
    noise: float

    @property
    def is_within_noise(self) -> bool:
        """Whether the difference is at most the noise, and could be chance (p above 0.05)."""
        return abs(self.difference) <= self.noise and self.p_value > 0.05


def compare(study: Study) -> list[Comparison]:
    """Return each order of a study beside full shuffle, by numbering, then ratio, the largest first."""
    rows = []
    for numbering in study.numberings:
        full = study.final(numbering, 1.0)
        for ratio in study.ratios:
            own = study.final(numbering, ratio)
            if own.size != full.size or own.size < 2:
                raise ConfigError(
                    f"bundle_ratio {ratio:g} was trained with {own.size} seeds, full shuffle with {full.size}: "
                    "train both with the same seeds, two at least"
                )
            rows.append(
                Comparison(
                    numbering,
                    ratio,
                    mean=float(own.mean()),
                    spread=float(own.std(ddof=1)),
                    difference=float((own - full).mean()),
                    standard_error=float((own - full).std(ddof=1)) / math.sqrt(own.size),
                    p_value=_sign_test(own - full),
                    noise=float(full.std(ddof=1)),
                )
            )
    return rows


def _sign_test(differences: NDArray[np.float64]) -> float:
    """Share of the 2**n patterns of signs whose mean is at least as far from 0 (Fisher's exact test of pairs)."""
    count = differences.size
    if count > _MOST_SEEDS:
        raise ConfigError(
            f"{count} seeds are compared; the exact test tries 2**n patterns: {_MOST_SEEDS} at most"
        )
    signs = 1 - 2 * (np.arange(2**count)[:, None] >> np.arange(count) & 1)
    means = np.abs(signs @ differences)
    return float((means >= abs(differences.sum()) - 1e-9).mean())


def read_study(path: str | os.PathLike[str] | None = None) -> Study:
    """Read a study from a file that `Study.to_json` made; what was measured for Penstock's documentation unless given.

    Raises: FormatError for a file that is none; OSError if it cannot be read.
    """
    if path is None:
        name = "convergence.json"
        text = resources.files(__package__).joinpath(name).read_bytes()
    else:
        name = os.fspath(path)
        with open(path, "rb") as file:
            text = file.read()
    try:
        fields: dict[str, Any] = json.loads(text)
        if fields.pop("format") != "penstock convergence" or fields.pop("version") != _VERSION:
            raise ValueError("another format or version")
        runs = [Run(**{**run, "accuracy": tuple(map(float, run["accuracy"]))}) for run in fields.pop("runs")]
        study = Study(**fields, runs=tuple(runs))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{name} is no study of trainings ({error}): write one with benchmarks/bundles.py --out {name}"
        ) from error
    for run in study.runs:
        if run.numbering not in NUMBERINGS or len(run.accuracy) != study.epochs:
            raise FormatError(
                f"{name}: the run of seed {run.seed} does not have {study.epochs} epochs or a known order"
            )
    return study


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
    Raises: ConfigError for counts that cannot be, unknown names and ratios that `BundleShuffle` refuses;
        ImportError without PyTorch or scikit-learn.
    """
    for name, value in (("seeds", seeds), ("epochs", epochs), ("batch_size", batch_size)):
        if not is_integer(value) or value < 1:
            raise ConfigError(f"{name} is {value!r}; give an integer of at least 1")
    unknown = set(numberings) - set(NUMBERINGS)
    if unknown:
        raise ConfigError(f"numberings are {', '.join(NUMBERINGS)}; there is no {sorted(unknown)[0]!r}")
    if optimizer not in _OPTIMIZERS:
        raise ConfigError(f"optimizer is {optimizer!r}; known are {' and '.join(_OPTIMIZERS)}")
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

"""How well a small model learns when its data comes in bundles: real trainings, several seeds, the same start each.

`benchmarks/bundles.py` trained them and kept what was measured as JSON.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError

#: In which order ids are numbered: by class, as a folder of images is, or by one random permutation of that.
BY_CLASS, SCATTERED = "by class", "scattered"
NUMBERINGS = (BY_CLASS, SCATTERED)
#: Full shuffle first: the others are compared with it.
RATIOS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
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
        """Return text as `read_study` reads it; a training per line."""
        common = {name: value for name, value in asdict(self).items() if name != "runs"}
        lines = [json.dumps(asdict(run)) for run in self.runs]
        head = json.dumps({"format": "penstock convergence", "version": _VERSION, **common}, indent=1)
        return head[:-2] + ',\n "runs": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One order against the full shuffle of the same numbering, seed by seed: the same start, another order."""

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
    """Return each order of a study against full shuffle, by numbering, then ratio, the largest first."""
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


def read_study() -> Study:
    """Return the trainings that were measured for Penstock's documentation."""
    fields: dict[str, Any] = json.loads(
        resources.files(__package__).joinpath("convergence.json").read_bytes()
    )
    del fields["format"], fields["version"]
    runs = tuple(Run(**{**run, "accuracy": tuple(run["accuracy"])}) for run in fields.pop("runs"))
    return Study(**fields, runs=runs)

"""What the delta-snapshot paper says of snapshots themselves: Tables 1, 6, 7 and 10, Figures 8 and 9.

Ten snapshots of a training that takes a second here: a perceptron with ReLU, by SGD with momentum and a falling rate as
Caffe's, on random classes. What they are like and take when they are stored is found by what the command
`penstock snapshots study` runs. Source: as `penstock.papers.deltas`, "the paper".
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.measure.picture import Colour, Panel, Series, draw_panels
from penstock.measure.snapshot_sequences import common_layouts, open_snapshots
from penstock.measure.snapshot_study import SnapshotStudy, advise, study_snapshots
from penstock.papers.catalog import Repeated, Result
from penstock.policy.snap_distance import useful_bytes
from penstock.simulate.snapshots import METHODS, SNAP_DISTANCES, method_named, recorded_sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: By same heading bits, the share of CaffeNet's weights at iterations 10,000, 15,000, ... 50,000, compared with the
#: snapshot before.
TABLE_1: Mapping[int, tuple[float, ...]] = {
    12: (0.1714, 0.2576, 0.3323, 0.3740, 0.4059, 0.4120, 0.4182, 0.4277, 0.4381),
    11: (0.2870, 0.4042, 0.4938, 0.5259, 0.5460, 0.5498, 0.5536, 0.5533, 0.5535),
    10: (0.4320, 0.5610, 0.6462, 0.6972, 0.7294, 0.7417, 0.7440, 0.7464, 0.7465),
    9: (0.5825, 0.6995, 0.7680, 0.8057, 0.8229, 0.8242, 0.8255, 0.8281, 0.8282),
    8: (0.7148, 0.8055, 0.8543, 0.8862, 0.9004, 0.9012, 0.9019, 0.9090, 0.9090),
    7: (0.8188, 0.8805, 0.9111, 0.9221, 0.9245, 0.9249, 0.9254, 0.9294, 0.9294),
    6: (0.8713, 0.9245, 0.9474, 0.9551, 0.9565, 0.9567, 0.9570, 0.9597, 0.9597),
    5: (0.9229, 0.9547, 0.9685, 0.9766, 0.9776, 0.9778, 0.9780, 0.9797, 0.9797),
    4: (0.9275, 0.9552, 0.9729, 0.9885, 0.9911, 0.9922, 0.9933, 0.9999, 0.9999),
}
#: Pages and parameters of CaffeNet that two snapshots in a row have alike.
TABLE_6 = (0, 0, 0, 0, 0, 0, 0, 1, 2)
TABLE_7 = (12, 14, 27, 350, 481, 532, 585, 9_361, 101_066)
#: Bytes written as a share of complete snapshots', at best: at snap_dis 10, of GoogleNet (section 5.4).
FIGURE_9 = {"gzip-delta": 0.80, "rle4": 0.75, "rle4-gzip": 0.73, "dynrle-progressive": 0.69}
#: Exponents, of 8 bits, into which most weights fall.
FIGURE_8 = (115, 121)

SNAPSHOTS, STEPS = 10, 300
# Small enough that BLAS multiplies in one thread: its threads wait for each other on a busy machine.
_WIDTHS, _BATCH = (64, 192, 64, 10), 16
_RATE, _MOMENTUM, _DECAY = 0.03, 0.9, 0.75
#: Of an image, beside the distance of the classes: so much that there is something to learn until the end.
_NOISE = np.float32(4)
_WHY = "CaffeNet has 57 million weights and 5,000 iterations between snapshots, the perceptron here 25,000 and 300"


def train() -> list[dict[str, NDArray[np.float32]]]:
    """Return the weights after every `STEPS` steps of a training: `SNAPSHOTS` dicts."""
    draw = np.random.default_rng(0)
    centres = draw.standard_normal((_WIDTHS[-1], _WIDTHS[0]), np.float32)
    weights = [
        draw.standard_normal((before, after), np.float32) * np.float32((2 / before) ** 0.5)
        for before, after in pairwise(_WIDTHS)
    ]
    speeds = [np.zeros_like(each) for each in weights]
    snapshots = []
    for snapshot in range(SNAPSHOTS):
        rate = np.float32(_RATE * _DECAY**snapshot)
        for _ in range(STEPS):
            classes = draw.integers(0, _WIDTHS[-1], _BATCH)
            images = centres[classes] + _NOISE * draw.standard_normal((_BATCH, _WIDTHS[0]), np.float32)
            for weight, speed, gradient in zip(
                weights, speeds, _gradients(weights, images, classes), strict=True
            ):
                speed *= np.float32(_MOMENTUM)
                speed -= rate * gradient
                weight += speed
        snapshots.append({f"layer{number}": each.copy() for number, each in enumerate(weights)})
    return snapshots


def _gradients(
    weights: Sequence[NDArray[np.float32]], images: NDArray[np.float32], classes: NDArray[np.int64]
) -> list[NDArray[np.float32]]:
    """Return those of the mean cross-entropy of a batch."""
    values = [images]
    for weight in weights[:-1]:
        values.append(np.maximum(values[-1] @ weight, 0))
    scores = values[-1] @ weights[-1]
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    error = shares / shares.sum(axis=1, keepdims=True)
    error[np.arange(len(classes)), classes] -= 1
    error /= len(classes)
    found = []
    for value, weight in zip(reversed(values), reversed(weights), strict=True):
        found.append(value.T @ error)
        error = (error @ weight.T) * (value > 0)
    return found[::-1]


@cache
def study() -> SnapshotStudy:
    """Return what the training's snapshots are like."""
    with tempfile.TemporaryDirectory(prefix="penstock-paper-") as folder:
        for number, weights in enumerate(train()):
            # numpy's type of savez has no place for arrays by name that are a dict's.
            np.savez(Path(folder, f"step-{(number + 1) * STEPS}.npz"), **weights)  # type: ignore[arg-type]
        with closing(open_snapshots(folder)) as snapshots:
            layouts, _ = common_layouts(snapshots)
            return study_snapshots(snapshots, layouts, name="perceptron")


def table_1() -> Repeated:
    """Return the share of weights whose first 12, 11, ... 4 bits are those of the snapshot before."""
    found = study().likenesses
    results = [
        Result(f"{bits} bits, snapshot {number + 2}", likeness.share(bits), share, "share")
        for bits, shares in TABLE_1.items()
        for number, (likeness, share) in enumerate(zip(found, shares, strict=True))
    ]
    why = f"{_WHY}; in both, more bits stay the same the longer it is trained and the smaller its steps are."
    return Repeated(results, why, lambda: _draw_bits(results))


def table_6() -> Repeated:
    """Return how many pages of 4 KiB two snapshots in a row have alike."""
    found = study().likenesses
    results = [
        Result(f"snapshots {number + 1}, {number + 2}", likeness.equal_pages, pages, "count")
        for number, (likeness, pages) in enumerate(zip(found, TABLE_6, strict=True))
    ]
    why = f"{_WHY}; no page of 1,024 weights is left alone by a step, so that saving changed pages saves nothing."
    return Repeated(results, why, lambda: _draw_counts(results, "equal pages"))


def table_7() -> Repeated:
    """Return how many weights two snapshots in a row have alike."""
    found = study().likenesses
    results = [
        Result(f"snapshots {number + 1}, {number + 2}", likeness.equal_words, words, "count")
        for number, (likeness, words) in enumerate(zip(found, TABLE_7, strict=True))
    ]
    results += [
        Result(
            f"snapshots {number + 1}, {number + 2}, share of all",
            each.equal_words / each.words,
            None,
            "share",
        )
        for number, each in enumerate(found)
    ]
    why = f"{_WHY}; equal weights are few in both, and grow in number as the learning rate falls."
    return Repeated(results, why, lambda: _draw_counts(results[: len(TABLE_7)], "equal weights"))


def figure_8() -> Repeated:
    """Return the share of weights by exponent."""
    (counts,) = study().exponents.values()
    shares = counts / counts.sum()
    begin, end = FIGURE_8
    results = [
        Result(f"exponent {each}", float(shares[each]), None, "share") for each in range(begin - 3, end + 6)
    ]
    results.append(Result(f"exponents {begin} to {end}", float(shares[begin : end + 1].sum()), None, "share"))
    why = (
        'The paper draws five models without numbers, "most" of whose exponents are 115 to 121; a small network begins '
        "with larger weights, as it has fewer inputs to each neuron."
    )
    return Repeated(results, why, lambda: _draw_exponents(shares))


def figure_9() -> Repeated:
    """Return the bytes that each of the seven methods writes, as a share of complete snapshots'."""
    models = recorded_sizes()
    results = []
    for model in models:
        for distance in SNAP_DISTANCES:
            for method in METHODS[1:]:
                stored = model.stored_bytes(method, distance)
                whole = model.stored_bytes(METHODS[0], distance)
                assert whole is not None, "complete sizes are recorded"
                if stored is not None:
                    published = FIGURE_9.get(method.name) if distance == max(SNAP_DISTANCES) else None
                    of = f"{model.name}, {method.name}, snap_dis {distance}"
                    results.append(Result(of, sum(stored) / sum(whole), published, "share"))
    why = (
        "The numbers are GoogleNet's, at best; these are the snapshots of two models that were trained for this "
        "documentation, whose weights change more, or less, from one to the next."
    )
    return Repeated(results, why, lambda: _draw_written(results))


def table_10() -> Repeated:
    """Return which snap_dis is chosen for each scheme, without a bound of the storage and with one."""
    found = study()
    results = []
    for method in map(method_named, ("dynrle-progressive", "dynrle-chain")):
        free = advise(found, method)
        published = len(found.names) if method.scheme == "progressive" else None
        results.append(Result(f"{method.scheme}, no bound of storage", free.snap_dis, published, "count"))
        stored = found.sizes.stored_bytes(method, 3)
        assert stored is not None, "a study has all sizes of dynrle"
        bound = max(useful_bytes(method.scheme, stored, 3))
        advice = advise(found, method, bound)
        of = f"{method.scheme}, storage of the largest that snap_dis 3 needs"
        results.append(Result(of, advice.snap_dis, None, "count"))
    why = (
        "The table gives rules, not numbers: for the progressive scheme the largest snap_dis that the storage allows, "
        "for the chain the one that writes least; these are what the rules choose for the snapshots here."
    )
    return Repeated(results, why, lambda: _draw_counts(results, "snap_dis"))


def _draw_bits(results: Sequence[Result]) -> Figure:
    snapshots = np.arange(2, SNAPSHOTS + 1)
    panels = []
    for title, of in (("here", "computed"), ("Table 1", "published")):
        shares = np.array([getattr(each, of) for each in results]).reshape(len(TABLE_1), -1)
        colours = (Colour.INK, Colour.BLUE, Colour.SKY, Colour.GREEN, Colour.ORANGE)
        series = [
            Series(f"{bits} bits", snapshots, 100 * shares[list(TABLE_1).index(bits)], colour, marker="o")
            for bits, colour in zip((12, 10, 8, 6, 4), colours, strict=True)
        ]
        panels.append(Panel(title, series))
    return draw_panels(panels, x_label="snapshot", y_label="weights with the same first bits (%)")


def _draw_counts(results: Sequence[Result], y_label: str) -> Figure:
    names = [each.of for each in reversed(results)]
    series = [Series("here", [each.computed or 0 for each in reversed(results)], names, Colour.BLUE, "", "o")]
    said = [each for each in reversed(results) if each.published is not None]
    if said:
        counts = [each.published or 0 for each in said]
        series.append(Series("the paper", counts, [each.of for each in said], Colour.INK, "", "x", size=8.0))
    return draw_panels([Panel("", series)], x_label=y_label, y_label="", size=(7.2, 4.4))


def _draw_exponents(shares: NDArray[np.float64]) -> Figure:
    shown = np.flatnonzero(shares > 1e-5)
    series = [Series("perceptron", shown, 100 * shares[shown], Colour.BLUE, marker="o")]
    return draw_panels([Panel("exponents of weights", series)], x_label="exponent", y_label="weights (%)")


def _draw_written(results: Sequence[Result]) -> Figure:
    panels = []
    for model in dict.fromkeys(each.of.partition(",")[0] for each in results):
        series = []
        for method, colour in zip(
            METHODS[1:],
            (Colour.FAINT, Colour.SKY, Colour.GREEN, Colour.ORANGE, Colour.BLUE, Colour.RED),
            strict=True,
        ):
            own = [each for each in results if each.of.startswith(f"{model}, {method.name}, ")]
            distances = [int(each.of.rpartition(" ")[2]) for each in own]
            shares = [100 * (each.computed or 0) for each in own]
            series.append(Series(method.label, distances, shares, colour, marker="o"))
        panels.append(Panel(model, series))
    return draw_panels(panels, x_label="snap_dis", y_label="written (% of complete)", legend="below")

"""Which rank reads which samples of a global batch.

Offsets count the samples of one global batch from 0. A batch may be shorter than the others (the last of an
epoch), so every method takes its size. In boxes, 10 samples over 4 ranks:

    balanced    0 0 0 1 1 1 2 2 3 3      slices whose sizes differ by one at most, the longer ones first
    uniform     0 0 0 1 1 1 2 2 2 3      slices of ceil(10 / 4), the last rank takes the rest
    strided     0 1 2 3 0 1 2 3 0 1      dealt like cards
    imbalanced  0 0 0 0 1 1 1 1 2 3      half of the ranks have four times the share of the other half
    replicated  all ranks read all of them
    local       as balanced, of samples that are dealt so that ranks read what they have read before
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan._recent import Recent

Ids = NDArray[np.int64]


@runtime_checkable
class Split(Protocol):
    """Shares of a global batch over ranks."""

    def size(self, rank: int, ranks: int, batch: int) -> int:
        """Return how many of the `batch` samples the rank reads, perhaps 0."""
        ...

    def offsets(self, rank: int, ranks: int, batch: int) -> Ids:
        """Return the offsets that the rank reads, in its order: int64[size]."""
        ...

    def reader(self, ranks: int, batch: int, offsets: Ids) -> Ids:
        """Return the rank that reads each offset, the first one where several do: int64, offsets' shape."""
        ...


@dataclass(frozen=True, slots=True)
class Balanced:
    """Consecutive slices whose sizes differ by one at most: the first batch % ranks ranks read one sample more.

    The slices of `numpy.array_split`. Where the ranks divide the batch, they are those of `Uniform`. A batch of fewer
    samples than ranks leaves the last ranks nothing.
    """

    def size(self, rank: int, ranks: int, batch: int) -> int:
        return batch // ranks + (rank < batch % ranks)

    def offsets(self, rank: int, ranks: int, batch: int) -> Ids:
        begin = rank * (batch // ranks) + min(rank, batch % ranks)
        return np.arange(begin, begin + self.size(rank, ranks, batch))

    def reader(self, ranks: int, batch: int, offsets: Ids) -> Ids:
        share, longer = divmod(batch, ranks)
        # Counted as if the first slices had no sample more: each of them moves what follows by one.
        in_longer = offsets // (share + 1)
        return np.where(in_longer < longer, in_longer, (offsets - longer) // max(share, 1))


@dataclass(frozen=True, slots=True)
class Local(Balanced):
    """Shares of the same sizes, in which a rank has the samples of the batch that it was the first of all to read.

    Which samples these are no split knows: a plan with this one arranges each batch before, see `penstock.plan.local`.
    """


@dataclass(frozen=True, slots=True)
class Uniform:
    """Consecutive slices of ceil(batch / ranks); the last ranks take the rest, perhaps nothing.

    Source: thesis, section 4.1.3.
    """

    def size(self, rank: int, ranks: int, batch: int) -> int:
        share = -(-batch // ranks)
        return max(0, min(share, batch - rank * share))

    def offsets(self, rank: int, ranks: int, batch: int) -> Ids:
        begin = min(batch, rank * -(-batch // ranks))
        return np.arange(begin, begin + self.size(rank, ranks, batch))

    def reader(self, ranks: int, batch: int, offsets: Ids) -> Ids:
        return offsets // -(-batch // ranks)


@dataclass(frozen=True, slots=True)
class Strided:
    """Rank r reads offsets r, r + ranks, r + 2 ranks, ...: as torch's DistributedSampler deals samples."""

    def size(self, rank: int, ranks: int, batch: int) -> int:
        return max(0, -(-(batch - rank) // ranks))

    def offsets(self, rank: int, ranks: int, batch: int) -> Ids:
        return np.arange(rank, batch, ranks)

    def reader(self, ranks: int, batch: int, offsets: Ids) -> Ids:
        return offsets % ranks


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank reads the whole batch (model parallelism). Source: thesis, section 4.1.3."""

    def size(self, rank: int, ranks: int, batch: int) -> int:
        return batch

    def offsets(self, rank: int, ranks: int, batch: int) -> Ids:
        return np.arange(batch)

    def reader(self, ranks: int, batch: int, offsets: Ids) -> Ids:
        """Return 0: rank 0 is the first of all that read each offset."""
        return np.zeros_like(offsets)


@dataclass(frozen=True, slots=True)
class Shares:
    """Consecutive slices in proportion to one integer per rank.

    weights: int[ranks], not negative and not all 0. Where they add up to the batch they are the local batches
        themselves; else slice r ends at floor(batch * (weights[0] + ... + weights[r]) / sum(weights)).
    """

    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(not isinstance(w, int | np.integer) or w < 0 for w in self.weights) or sum(self.weights) == 0:
            raise ConfigError(
                f"split shares are {self.weights!r}; they are integers, one per rank, not negative and "
                "not all 0: give the local batch sizes, or their proportions"
            )

    def size(self, rank: int, ranks: int, batch: int) -> int:
        bounds = self._bounds(ranks, batch)
        return int(bounds[rank + 1] - bounds[rank])

    def offsets(self, rank: int, ranks: int, batch: int) -> Ids:
        bounds = self._bounds(ranks, batch)
        return np.arange(bounds[rank], bounds[rank + 1])

    def reader(self, ranks: int, batch: int, offsets: Ids) -> Ids:
        return np.subtract(np.searchsorted(self._bounds(ranks, batch), offsets, side="right"), 1)

    def _bounds(self, ranks: int, batch: int) -> Ids:
        if len(self.weights) != ranks:
            raise ConfigError(
                f"split has {len(self.weights)} shares for {ranks} ranks; each rank needs one: "
                "give as many shares as ranks"
            )
        cumulative = np.cumsum((0, *self.weights), dtype=np.int64)
        bounds: Ids = cumulative * batch // cumulative[-1]
        return bounds


def imbalanced(ranks: int) -> Shares:
    """Return shares by which half of the ranks read four times as much as the other half.

    Thesis 4.1.3 gives one half local batches of 2 ceil(B / N) and the other half of ceil(B / N) / 2. These
    add up to 1.25 B, so they cannot be shares of one batch; what they intend is kept, as a partition with
    shares 4 : 1. The first floor(ranks / 2) ranks have the large share.
    """
    large = ranks // 2
    return Shares((4,) * large + (1,) * (ranks - large))


@dataclass(frozen=True, slots=True)
class Assigned:
    """The user says which rank reads each offset.

    assign: called as assign(batch, ranks), returns int[batch], the rank of each offset. Each rank reads its
        offsets in ascending order. Must return the same for the same arguments.
    """

    assign: Callable[[int, int], ArrayLike]
    _made: Recent[tuple[int, int], Ids] = field(
        default_factory=lambda: Recent(4), init=False, repr=False, compare=False
    )

    def size(self, rank: int, ranks: int, batch: int) -> int:
        return int(np.count_nonzero(self._ranks_of(ranks, batch) == rank))

    def offsets(self, rank: int, ranks: int, batch: int) -> Ids:
        return np.flatnonzero(self._ranks_of(ranks, batch) == rank)

    def reader(self, ranks: int, batch: int, offsets: Ids) -> Ids:
        return self._ranks_of(ranks, batch)[offsets]

    def _ranks_of(self, ranks: int, batch: int) -> Ids:
        return self._made.get((ranks, batch), lambda: self._call(ranks, batch))

    def _call(self, ranks: int, batch: int) -> Ids:
        assigned = np.asarray(self.assign(batch, ranks))
        if assigned.shape != (batch,) or assigned.dtype.kind not in "iu":
            raise ConfigError(
                f"the split's function returned {assigned.dtype} of shape {assigned.shape} for a batch of "
                f"{batch}; it returns the rank of each sample, integers of shape ({batch},): "
                "a short last batch asks for fewer than the others"
            )
        if assigned.min() < 0 or assigned.max() >= ranks:
            raise ConfigError(
                f"the split's function returned ranks {assigned.min()} to {assigned.max()} for {ranks} "
                f"ranks; each is in [0, {ranks}): correct the function"
            )
        return assigned.astype(np.int64)


_NAMES = ("balanced", "uniform", "strided", "replicated", "imbalanced", "local")


def as_split(split: str | Split | Sequence[int] | Callable[[int, int], ArrayLike], ranks: int) -> Split:
    """Return the split that is meant by a name, by shares, by a function (see `Assigned`) or by itself.

    Raises: ConfigError if it is none of them.
    """
    match split:
        case "balanced":
            return Balanced()
        case "uniform":
            return Uniform()
        case "strided":
            return Strided()
        case "replicated":
            return Replicated()
        case "imbalanced":
            return imbalanced(ranks)
        case "local":
            return Local()
    if isinstance(split, Split):
        return split
    if isinstance(split, Sequence) and not isinstance(split, str):
        return Shares(tuple(split))
    if callable(split):
        return Assigned(split)
    raise ConfigError(
        f"split is {split!r}; it is one of {', '.join(map(repr, _NAMES))}, a share per rank, "
        "or a function (batch, ranks) -> rank of each sample: choose one"
    )

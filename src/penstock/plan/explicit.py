"""An order that somebody else made: listed ids, a function, a sampler, a recorded trace."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from itertools import islice
from os import PathLike
from pathlib import PurePath
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan._recent import Recent
from penstock.plan.bijection import as_ids
from penstock.plan.orders import LARGEST_EPOCH, check_epoch, check_samples
from penstock.trace.schema import AS_PLANNED, GroupIds, Kind, Spans
from penstock.validate import check_count

Ids = NDArray[np.int64]
#: int32 where the ids fit, else int64.
Stored = NDArray[np.signedinteger[Any]]

_EPOCHS_KEPT = 3
#: More epochs of a function are kept while all of them take no more.
_BYTES_KEPT = 1 << 29
_LENGTHS_KEPT = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Explicit:
    """Each epoch reads the ids that are listed for it, in that order, repeats included.

    A weighted or oversampling order is one whose ids repeat. An epoch may leave samples out.

    ids: one of
        - int[length]: every epoch reads this list;
        - int[epochs, length], or a sequence of lists: epoch e reads ids[e], and there are no more epochs;
        - a function, called as ids(epoch), that returns the list of the epoch. It must return the same for
          the same epoch at any time, on any thread: its answers are kept, so that it is called once for each epoch.
          Where they come to more than 512 MiB it is called again for an old one: for a loader's state, which has a
          digest of the first epochs, and when it is read.
        Checked and copied here, 4 or 8 bytes an id; the lists of a function are checked when it is called.
    samples: F; ids are in [0, F).
    Raises: ConfigError for ids that are not integers in [0, F), or an epoch without any.

    >>> Explicit([[3, 1, 1], [0, 2]], samples=4).at(0, [0, 2])
    array([3, 1])
    """

    repeats: ClassVar[bool] = True
    ids: ArrayLike | Sequence[ArrayLike] | Callable[[int], ArrayLike] = field(repr=False)
    samples: int
    _lists: tuple[Stored, ...] | None = field(init=False, repr=False)
    _repeats_list: bool = field(init=False, repr=False)
    _made: Recent[int, Stored] = field(
        default_factory=lambda: Recent(_EPOCHS_KEPT, _BYTES_KEPT), init=False, repr=False
    )
    #: A plan asks for the length of each epoch again and again, long after its ids are no longer kept.
    _lengths: Recent[int, int] = field(
        default_factory=lambda: Recent(_LENGTHS_KEPT), init=False, repr=False, compare=False
    )
    _places: Recent[int, tuple[Stored, Ids]] = field(
        default_factory=lambda: Recent(_EPOCHS_KEPT), init=False, repr=False
    )

    def __post_init__(self) -> None:
        check_samples(self.samples)
        lists, repeats_list = (None, False) if callable(self.ids) else _as_lists(self.ids)
        checked = None if lists is None else tuple(self._check(ids, e) for e, ids in enumerate(lists))
        if checked == ():
            raise ConfigError("ids list no epochs; an order needs at least one: pass its ids")
        object.__setattr__(self, "_lists", checked)
        object.__setattr__(self, "_repeats_list", repeats_list)
        if not callable(self.ids):
            object.__setattr__(self, "ids", checked)  # the copy that was checked, not the caller's

    @classmethod
    def from_file(cls, path: str | PathLike[str], samples: int) -> Explicit:
        """Read the ids from a NumPy file (``.npy``, of one or two dimensions) or a text file.

        A text file has one epoch per line, ids between blanks or commas; with a single id on every line it is
        one list that every epoch reads.
        Raises: ConfigError for contents that are not ids; OSError if the file cannot be read.
        """
        if PurePath(path).suffix == ".npy":
            try:
                return cls(np.load(path, allow_pickle=False), samples)
            except (ValueError, EOFError) as error:
                raise ConfigError(f"{path}: {error}") from None
        try:
            with open(path, encoding="utf-8") as text:
                lines = [line.replace(",", " ").split() for line in text if line.strip()]
            epochs = [[int(word) for word in line] for line in lines]
        except ValueError as error:
            raise ConfigError(f"{path}: {error}; a list of ids holds integers: correct the file") from None
        is_one_list = bool(epochs) and all(len(epoch) == 1 for epoch in epochs)
        try:
            return cls([epoch[0] for epoch in epochs] if is_one_list else epochs, samples)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_sampler(
        cls, sampler: Iterable[int], samples: int, epochs: int, horizon: int | None = None
    ) -> Explicit:
        """Draw `epochs` epochs from a sampler (torch's or any other iterable of ids), now and once.

        Drawn ahead because a sampler cannot be asked for an epoch twice. `set_epoch` is called before each
        epoch where the sampler has it. An iterator, which has no beginning to go back to, is read on.

        horizon: most ids of an epoch. Needed where the sampler has no length.
        Memory: 4 bytes an id (8 from 2**31 samples on), all epochs.
        """
        if horizon is None and not isinstance(sampler, Sized):
            raise ConfigError(
                f"{type(sampler).__name__} has no length, so an epoch of it has no end: pass horizon=, the "
                "number of ids that make an epoch"
            )
        if horizon is not None:
            check_count("horizon", horizon)
        drawn = []
        for epoch in range(epochs):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            try:
                ids = np.fromiter(map(operator.index, islice(sampler, horizon)), np.int64)
            except TypeError as error:
                raise ConfigError(
                    f"{type(sampler).__name__} yields something that is no id ({error}): pass a sampler of "
                    "single ids, not of batches"
                ) from None
            drawn.append(_compact(as_ids(ids, samples, f"ids of epoch {epoch}"), samples))
        return cls(drawn, samples)

    @classmethod
    def from_trace(cls, spans: Spans, samples: int, ids: GroupIds | None = None) -> Explicit:
        """Repeat the reads of a recorded run: its epochs in order, numbered from 0.

        A step's samples are those decoded for it or, where nothing was decoded, those read or taken from a
        tier for it; first those of rank 0, then of rank 1 and so on, each rank's in the order of their start.

        ids: which samples the groups are, as `penstock.Trace.ids` has them; those of a group that was loaded
            in several parts come with its first part, in their order there. Of several steps that were loaded
            together, each has its part of all their samples in that order.
        Raises: ConfigError where spans are of groups, and which samples these are was not recorded.
        """
        used = spans[(spans["sample"] >= 0) & (spans["step"] >= 0)]
        decoded = used[used["kind"] == Kind.DECODE]
        used = decoded if decoded.size else used[np.isin(used["kind"], (Kind.READ, Kind.HIT))]
        used = used[np.lexsort((used["start"], used["rank"], used["step"], used["epoch"]))]
        ends = np.flatnonzero(np.diff(used["epoch"])) + 1
        return cls([_samples_of(part, ids or {}) for part in np.split(used, ends)], samples)

    @property
    def even_from(self) -> int:
        """See `EvenOrder.even_from`: what a function lists may have another length in every epoch."""
        if self._lists is None:
            return LARGEST_EPOCH
        return 0 if self._repeats_list else len(self._lists) - 1

    def length(self, epoch: int) -> int:
        """Return the number of ids listed for the epoch."""
        check_epoch(epoch)
        return self._lengths.get(epoch, lambda: self._of(epoch).size)

    def at(self, epoch: int, positions: ArrayLike) -> Ids:
        ids = self._of(epoch)
        return ids[as_ids(positions, ids.size, "positions")].astype(np.int64)

    def position_of(self, epoch: int, samples: ArrayLike) -> Ids:
        wanted = as_ids(samples, self.samples, "samples")
        ids = self._of(epoch)
        distinct, first = self._places.get(epoch, lambda: np.unique(ids, return_index=True))
        number = np.minimum(np.searchsorted(distinct, wanted), distinct.size - 1)
        return np.where(distinct[number] == wanted, first[number], -1)

    def _of(self, epoch: int) -> Stored:
        check_epoch(epoch)
        if self._lists is None:
            assert callable(self.ids), "without lists there is a function"
            function = self.ids
            return self._made.get(epoch, lambda: self._check(function(epoch), epoch))
        if self._repeats_list:
            return self._lists[0]
        if epoch >= len(self._lists):
            raise ConfigError(
                f"epoch {epoch} is asked of an order that lists {len(self._lists)} epochs: list more, "
                "or plan fewer"
            )
        return self._lists[epoch]

    def _check(self, ids: ArrayLike, epoch: int) -> Stored:
        checked = as_ids(ids, self.samples, f"ids of epoch {epoch}")
        if checked.ndim != 1 or checked.size == 0:
            raise ConfigError(
                f"ids of epoch {epoch} have shape {checked.shape}; an epoch is a list of one id or more: "
                "leave out an empty epoch, flatten batches"
            )
        return _compact(checked, self.samples)


def _as_lists(ids: ArrayLike | Sequence[ArrayLike]) -> tuple[list[ArrayLike], bool]:
    """The ids of each epoch, and whether the only list serves every epoch."""
    if isinstance(ids, np.ndarray) and ids.ndim == 1:
        return [ids], True
    rows = cast("list[ArrayLike]", list(ids)) if isinstance(ids, Iterable) else []
    if rows and all(np.ndim(row) == 0 for row in rows):
        return [np.asarray(rows)], True
    return rows, False


def _compact(ids: Ids, samples: int) -> Stored:
    return ids.astype(np.int32) if samples <= 2**31 else ids.astype(np.int64)


def _samples_of(spans: Spans, ids: GroupIds) -> NDArray[np.int64]:
    """Return the samples that spans of one epoch stand for, in their order; those of a group once."""
    is_together = (spans["kind"] == Kind.DECODE) & (spans["bytes"] > 0)
    if (spans["samples"] <= 1).all() and not is_together.any():
        alone: NDArray[np.int64] = spans["sample"]
        return alone
    found: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
    steps: dict[tuple[int, int], int] = {}
    seen: set[tuple[int, int]] = set()
    for span in spans:
        batch = int(span["step"]), int(span["rank"])
        of_batch = found.setdefault(batch, [])
        steps[batch] = int(span["bytes"]) + 1 if span["kind"] == Kind.DECODE else 1
        group = int(span["rank"]), int(span["flow"])
        if span["samples"] <= 1 and group not in ids:
            of_batch.append(np.array([span["sample"]], np.int64))
        elif group not in ids:
            is_planned = int(span["flow"]) & AS_PLANNED
            known = (
                "its plan does, so read it by penstock.read_trace"
                if is_planned
                else "give the order that the run had"
            )
            raise ConfigError(
                f"{span['samples']} samples from {span['sample']} on were loaded by one call, and the trace does not "
                f"say which: {known}"
            )
        elif group not in seen:
            seen.add(group)
            of_batch.append(ids[group])
    by_step = {
        (step + number, rank): part
        for (step, rank), parts in found.items()
        if parts
        for number, part in enumerate(_in_steps(np.concatenate(parts), steps[step, rank]))
    }
    return np.concatenate([by_step[step] for step in sorted(by_step)])


def _in_steps(ids: NDArray[np.int64], steps: int) -> list[NDArray[np.int64]]:
    sizes = sizes_of_steps(np.array([ids.size]), np.array([steps]))
    return np.split(ids, np.cumsum(sizes)[:-1])


def sizes_of_steps(loaded: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many samples each step has where so many were loaded for so many steps together, in their order.

    >>> sizes_of_steps(np.array([7, 4]), np.array([2, 1])).tolist()
    [4, 3, 4]
    """
    steps = np.minimum(steps, loaded)
    number = np.arange(steps.sum()) - np.repeat(np.cumsum(steps) - steps, steps)
    sizes: NDArray[np.int64] = np.repeat(loaded // steps, steps) + (number < np.repeat(loaded % steps, steps))
    return sizes

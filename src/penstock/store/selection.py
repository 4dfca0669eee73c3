"""Some of the samples of a source, as a source: those that are chosen, a part of a split, all but the bad ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan import FullShuffle
from penstock.plan.orders import check_seed
from penstock.plan.random import derive_key
from penstock.store.group import Bytes, Failed, Ids, check_group, observer, prepare_group, read_group
from penstock.store.labels import labels_of
from penstock.store.ranged import RangedSource
from penstock.store.source import FileBacked, Numeric, Source
from penstock.units import format_count, is_integer

#: By so much shares may differ from one in their sum: they are written by hand, or are thirds.
_ROUNDING = 1e-6
_SHOWN = 5


class Selectable:
    """What every source has to choose from its samples; a source of one's own has it as `Selection(source)`."""

    def select(
        self: Any, ids: ArrayLike | slice | None = None, *, labels: Iterable[str | int] | None = None
    ) -> Selection:
        """Return a source of some samples, numbered in the order that they are given in.

        ids: integers, which may repeat, one bool for each sample, or a slice. labels: names or numbers of classes, all
            of whose samples are taken; of the ids, if both are given. Labels keep their numbers.
        Raises: ConfigError for ids or labels that there are not, and where nothing is left.
        """
        chosen = _checked_ids(ids, len(self))
        if labels is not None:
            known = _labels_for("labels", self)
            chosen = chosen[np.isin(known[chosen], _numbers_of(labels, known, self.classes))]
        return Selection(self, chosen)

    def split(
        self: Any, shares: Sequence[float], *, seed: int = 0, stratify: bool | str = False
    ) -> tuple[Selection, ...]:
        """Return parts of the samples, at random: each sample is in one of them, in the order of the source.

        shares: of the parts: 0.9 and 0.1, one in sum, or numbers of samples, as many as there are in sum.
        seed: the same one makes the same parts of a source of as many samples, on any machine.
        stratify: True gives each part its share of every label, to one or two samples; the name of a label, where
            there are several.
        Raises: ConfigError for other shares, a part without a sample, and labels that are no integers.
        """
        counts = _counts_of(shares, len(self))
        check_seed(seed)
        # In a random order, or in that within each label; then every part is spread evenly over it.
        left = FullShuffle(len(self), derive_key(seed, "split")).at(0, np.arange(len(self)))
        if stratify is not False:
            labels = _labels_for("stratify", self, None if stratify is True else stratify)
            left = left[np.argsort(labels[left], kind="stable")]
        parts = []
        for number, count in reversed(list(enumerate(counts))):
            phase = derive_key(seed, f"split, part {number}") % left.size
            steps = (np.arange(left.size + 1) * count + phase) // left.size
            is_taken = np.diff(steps) > 0
            parts.append(Selection(self, np.sort(left[is_taken])))
            left = left[~is_taken]
        return tuple(reversed(parts))


class Selection(Selectable):
    """Some of the samples of a source, numbered anew: sample k is the source's sample ids[k].

    source: any `Source`; of a selection, what that selects from. ids: int64[samples], which may repeat; all unless
        given. Nothing is copied but sizes and labels.

    Everything is asked of the source. It has `numbers` where the source has, and `path_of`.
    Raises: ConfigError if there is no such sample, or none is left.
    """

    def __init__(self, source: Source, ids: ArrayLike | None = None) -> None:
        chosen = _checked_ids(ids, len(source))
        if not chosen.size:
            raise ConfigError(f"nothing is selected of {source!r}: choose one sample at least")
        if isinstance(source, Selection):
            chosen = source.ids[chosen]
            source = source.source
        self.source: Source = source
        self.ids: Ids = chosen
        self.sizes_bytes = source.sizes_bytes[chosen]
        labels = labels_of(source.labels, len(source))
        self.labels = (
            {name: array[chosen] for name, array in labels.items()}
            if isinstance(labels, dict)
            else labels[chosen]
        )
        self.classes = source.classes
        places = (getattr(source, name, None) for name in ("list_file", "root", "place"))
        #: What was opened, for people.
        self.place = next((place for place in places if isinstance(place, str)), "")
        if isinstance(source, Numeric):
            self.numbers = source.numbers
        if isinstance(source, FileBacked):
            self.path_of = self._path_of
        known = self.labels.values() if isinstance(self.labels, dict) else [self.labels]
        for array in (self.ids, self.sizes_bytes, *known):
            array.flags.writeable = False

    @property
    def is_text(self) -> bool:
        """Whether the samples are text, as the source says."""
        return bool(getattr(self.source, "is_text", False))

    def __reduce__(self) -> tuple[Any, ...]:
        return Selection, (self.source, self.ids)

    def __repr__(self) -> str:
        return f"{len(self):,} of {self.source!r}"

    def __len__(self) -> int:
        return self.ids.size

    @property
    def is_everything(self) -> bool:
        """Whether it has the samples of the source, in their order."""
        return np.array_equal(self.ids, np.arange(len(self.source)))

    def describe(self, sample: int) -> str:
        return self.source.describe(self._id_of(sample))

    def read(self, sample: int) -> bytes:
        return self.source.read(self._id_of(sample))

    def read_into(self, sample: int, buffer: memoryview) -> int:
        return self.source.read_into(self._id_of(sample), buffer)

    def prepare_group(self) -> None:
        prepare_group(self.source)

    def read_group(self, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        """Read samples in one call, if the source can; see `penstock.store.read_group`."""
        check_group(self, ids, into, begins)
        chosen, at = self.ids[ids], observer()

        def at_chosen(sample: int) -> None:
            if at is not None:
                at(int(ids[np.argmax(chosen == sample)]))

        return read_group(self.source, chosen, into, begins, at_chosen)

    def extents(self, ids: Ids) -> tuple[Ids, Ids, Ids] | None:
        return self._ranged.extents(self.ids[ids]) if hasattr(self.source, "extents") else None

    def unit_bytes(self, units: Ids) -> Ids:
        return self._ranged.unit_bytes(units)

    def read_ranges(self, unit: int, ranges: Ids, into: Sequence[memoryview]) -> None:
        self._ranged.read_ranges(unit, ranges, into)

    @property
    def _ranged(self) -> RangedSource:
        return cast(RangedSource, self.source)

    def _path_of(self, sample: int) -> str:
        return cast(FileBacked, self.source).path_of(self._id_of(sample))

    def _id_of(self, sample: int) -> int:
        if not 0 <= sample < len(self):
            raise IndexError(f"there is no sample {sample}: {self!r}")
        return int(self.ids[sample])


def unselected(source: Any) -> Any:
    """Return what a selection is of; anything else as it is."""
    return source.source if isinstance(source, Selection) else source


def _checked_ids(ids: ArrayLike | slice | None, samples: int) -> Ids:
    """Return ids as an array of their own. Raises: ConfigError."""
    if ids is None:
        return np.arange(samples)
    if isinstance(ids, slice):
        return np.arange(samples)[ids]
    found = np.array(list(ids) if isinstance(ids, Iterable) and not isinstance(ids, np.ndarray) else ids)
    if found.dtype == np.bool_ and found.shape == (samples,):
        return np.flatnonzero(found)
    if found.ndim == 1 and not found.size:
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ConfigError(
            f"ids is {found.dtype}{list(found.shape)}; it is a list of sample numbers, or {samples:,} bools"
        )
    wrong = (found < 0) | (found >= samples)
    if wrong.any():
        raise ConfigError(
            f"ids has {found[wrong][0]:,} at position {int(wrong.argmax()):,}; the source has "
            f"{format_count(samples, 'sample')}, the first is 0"
        )
    return found.astype(np.int64)


def _labels_for(argument: str, source: Source, name: str | None = None) -> NDArray[Any]:
    """Return the integer labels that samples are chosen by. name: which of several. Raises: ConfigError."""
    labels = labels_of(source.labels, len(source))
    if isinstance(labels, dict):
        if name not in labels:
            known = ", ".join(map(repr, labels)) or "none"
            raise ConfigError(
                f"{argument}: there is no label {name!r}; the source has {known}"
                if name
                else f"{argument} needs one label for each sample, and those of the source have names: {known}"
            )
        labels = labels[name]
    elif name is not None:
        raise ConfigError(f"{argument} is {name!r}, and the labels of the source have no names: give True")
    if labels.ndim != 1 or labels.dtype.kind not in "biu":
        raise ConfigError(
            f"{argument} needs one integer for each sample, and the labels are {labels.dtype}{list(labels.shape)}"
        )
    return labels


def _numbers_of(labels: Iterable[str | int], known: NDArray[Any], classes: Sequence[str]) -> list[int]:
    """Return labels as numbers. known: those of all samples. Raises: ConfigError for one that there is not."""
    if isinstance(labels, str):
        raise ConfigError(f"labels is {labels!r}; give a list, such as [{labels!r}]")
    numbers = []
    for label in labels:
        number = int(label) if is_integer(label) else classes.index(label) if label in classes else None
        if number is None or not (known == number).any():
            some = ", ".join(map(repr, classes[:_SHOWN])) + (" ..." if len(classes) > _SHOWN else "")
            raise ConfigError(
                f"labels has {label!r}, which no sample has; there are {some or 'numbers alone'}"
            )
        numbers.append(number)
    return numbers


def _counts_of(shares: Sequence[float], samples: int) -> list[int]:
    """Return how many samples each part has. Raises: ConfigError."""
    given = list(shares)
    if not given or not all(isinstance(share, (int, float, np.number)) and share > 0 for share in given):
        raise ConfigError(
            f"shares is {shares!r}; it has one number for each part, above zero, such as [0.9, 0.1]"
        )
    if all(map(is_integer, given)):
        if sum(given) != samples:
            raise ConfigError(
                f"shares is {shares!r}, {sum(given):,} in sum, and the source has {format_count(samples, 'sample')}: "
                "give as many, or shares such as [0.9, 0.1]"
            )
        return [int(count) for count in given]
    if not math.isclose(sum(given), 1, abs_tol=_ROUNDING):
        raise ConfigError(
            f"shares is {shares!r}, {sum(given):g} in sum: give parts of one, such as [0.9, 0.1]"
        )
    ends = [round(sum(given[:number]) * samples) for number in range(len(given))] + [samples]
    counts = [end - begin for begin, end in itertools.pairwise(ends)]
    if 0 in counts:
        raise ConfigError(
            f"shares is {shares!r}, and {given[counts.index(0)]:g} of {format_count(samples, 'sample')} is none: give "
            "larger shares"
        )
    return counts

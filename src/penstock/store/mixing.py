"""Several sources as one, from which a loader draws by turns: a mixture of folders, of token files, of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan import Mixture
from penstock.plan.bijection import _groups
from penstock.plan.mixing import AtEnd, Weights
from penstock.plan.random import derive_key
from penstock.store.group import Bytes, Failed, Ids, check_group, observer, prepare_group, read_group
from penstock.store.labels import labels_of
from penstock.store.ranged import RangedSource, is_decoded
from penstock.store.remote import objects_in
from penstock.store.selection import Selectable, Selection, unselected
from penstock.store.source import FileBacked, Numeric, Source
from penstock.units import format_names


class Mixed:
    """Several collections of samples end to end, and by which weights a loader draws from them; see `Mixture`.

    sources: each has a length. begins: int64[sources + 1], where the ids of each begin, and the end of all.
    Raises: ConfigError for a source without samples; what `Mixture` raises.
    """

    def __init__(self, sources: Sequence[Any], weights: Weights, at_end: AtEnd) -> None:
        self.sources = tuple(sources)
        self.weights: Weights = weights
        self.at_end: AtEnd = at_end
        sizes = [len(source) for source in self.sources]
        for source, size in zip(self.sources, sizes, strict=True):
            if not size:
                raise ConfigError(f"{source!r} has no samples: leave it out of the mixture")
        self.begins: Ids = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        self.weights = self.order(shuffle=False).weights  # says what is wrong with them, and with at_end

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sources, self.weights, self.at_end)

    def __len__(self) -> int:
        return int(self.begins[-1])

    def order(
        self, *, shuffle: bool = True, seed: int = 0, batch_size: int = 1, drop_last: bool = False
    ) -> Mixture:
        """Return the order of a run over the mixture; arguments as of `Mixture`."""
        sizes = tuple(np.diff(self.begins).tolist())
        return Mixture(
            sizes,
            self.weights,
            at_end=self.at_end,
            shuffle=shuffle,
            seed=seed,
            batch_size=batch_size,
            drop_last=drop_last,
        )

    def place_of(self, sample: int) -> tuple[int, int]:
        """Return the number of the source that a sample is of, and the sample's number there. Raises: IndexError."""
        if not 0 <= sample < len(self):
            raise IndexError(f"there is no sample {sample}: {self!r}")
        number = int(np.searchsorted(self.begins, sample, side="right")) - 1
        return number, int(sample - self.begins[number])

    def source_of(self, ids: ArrayLike) -> Ids:
        """Return the number of the source that each sample is of: int64, the shape of ids."""
        return np.searchsorted(self.begins, np.asarray(ids), side="right") - 1

    def by_source(self, ids: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Yield each source that some samples are of: its number, which of the ids, and their numbers there."""
        for number, members in _groups(self.source_of(ids)):
            yield number, members, ids[members] - self.begins[number]


class MixedSource(Mixed, Selectable):
    """A source of several, of which a loader reads by turns; made by `penstock.loader.mix`.

    Labels are those of all, which have the same names, types and shapes. Where they are classes by name, `classes` are
    the names of all sources, each once, and labels are numbered anew.

    sources: any `Source`; all of numbers of one type and shape, or none.
    Raises: ConfigError naming the source whose labels or numbers are of another kind than those of the first.
    """

    def __init__(self, sources: Sequence[Source], weights: Weights, at_end: AtEnd) -> None:
        super().__init__(sources, weights, at_end)
        self.sizes_bytes: NDArray[np.int64] = np.concatenate([source.sizes_bytes for source in sources])
        self.classes, self.labels = _labels_of_all(sources)
        numeric = [source for source in sources if isinstance(source, Numeric)]
        if numeric:
            self.numbers = _numbers_of_all(sources)
        if all(isinstance(source, FileBacked) for source in sources):
            self.path_of = partial(_ask, self, "path_of")
        if all(map(_reads_pieces, sources)):
            self.read_pieces = self._read_pieces
            self.objects = objects_in(sources[0])
        known = self.labels.values() if isinstance(self.labels, dict) else [self.labels]
        for array in (self.sizes_bytes, *known):
            array.flags.writeable = False

    def __repr__(self) -> str:
        return f"MixedSource of {format_names(map(repr, self.sources))}"

    def describe(self, sample: int) -> str:
        return str(_ask(self, "describe", sample))

    @property
    def is_text(self) -> bool:
        """Whether the samples are text. Raises: ConfigError if those of some sources are, or some are lines of JSON."""
        return self._kind != "bytes"

    @property
    def is_json(self) -> bool:
        """Whether they are lines of JSON; raises as `is_text`."""
        return self._kind == "lines of JSON"

    @cached_property
    def _kind(self) -> str:
        kinds = list(map(_kind_of_samples, self.sources))
        for number, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise ConfigError(
                    f"source {number} of the mixture, {self.sources[number]!r}, has {kind}, and source 0 has "
                    f"{kinds[0]}: samples of a batch are alike"
                )
        return kinds[0]

    def read(self, sample: int) -> bytes:
        return cast(bytes, _ask(self, "read", sample))

    def read_into(self, sample: int, buffer: memoryview) -> int:
        number, own = self.place_of(sample)
        return int(self.sources[number].read_into(own, buffer))

    def prepare_group(self) -> None:
        for source in self.sources:
            prepare_group(source)

    def read_group(self, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        """Read samples, by one call for each source; see `penstock.store.read_group`."""
        check_group(self, ids, into, begins)
        failed, at = Failed(), observer()
        for number, members, own in self.by_source(ids):
            places = np.append(begins[members], begins[members[-1] + 1])
            at_own = None if at is None else _shifted(at, int(self.begins[number]))
            found = read_group(self.sources[number], own, into, places, at_own)
            failed += [(int(members[index]), error) for index, error in found]
        return sorted(failed, key=lambda each: each[0])

    # Where samples lie: unit u of source s is unit u * len(sources) + s here.

    def extents(self, ids: Ids) -> tuple[Ids, Ids, Ids] | None:
        found = np.empty((3, ids.size), np.int64)
        for number, members, own in self.by_source(ids):
            source = self.sources[number]
            answer = source.extents(own) if hasattr(source, "extents") else None
            if answer is None:
                return None
            found[:, members] = answer
            units = found[0, members]
            found[0, members] = np.where(units < 0, units, units * len(self.sources) + number)
        units, offsets, lengths = found
        return units, offsets, lengths

    def unit_bytes(self, units: Ids) -> Ids:
        found, sources = np.empty_like(units), len(self.sources)
        for number, members in _groups(units % sources):
            found[members] = self.sources[number].unit_bytes(units[members] // sources)
        return found

    def read_ranges(self, unit: int, ranges: Ids, into: Sequence[memoryview]) -> None:
        own, number = divmod(unit, len(self.sources))
        cast(RangedSource, self.sources[number]).read_ranges(own, ranges, into)

    def _read_pieces(self, units: Ids, offsets: Ids, into: Sequence[memoryview]) -> Failed:
        failed, sources = Failed(), len(self.sources)
        for number, members in _groups(units % sources):
            source = getattr(self.sources[number], "source", self.sources[number])
            buffers = [into[index] for index in members.tolist()]
            found = source.read_pieces(units[members] // sources, offsets[members], buffers)
            failed += [(int(members[index]), error) for index, error in found]
        return sorted(failed, key=lambda each: each[0])

    # Parts of a mixture are mixtures, by the same weights

    def select(
        self, ids: ArrayLike | slice | None = None, *, labels: Iterable[str | int] | None = None
    ) -> Any:
        """Return the mixture of some samples, in the order of their ids; as `Selectable.select`.

        Raises: ConfigError for ids that are not ascending, and where a source has none left.
        """
        chosen = super().select(ids, labels=labels)
        if (np.diff(chosen.ids) < 0).any():
            raise ConfigError(
                "ids of a mixture have to ascend, as its weights say whose turn it is: select from each source, and "
                "mix what is selected"
            )
        parts = {number: own for number, _, own in self.by_source(chosen.ids)}
        for number in range(len(self.sources)):
            if number not in parts:
                raise ConfigError(
                    f"nothing is selected of {self.sources[number]!r}: leave it out of the mixture"
                )
        selected = [Selection(source, parts[number]) for number, source in enumerate(self.sources)]
        return self._with(selected)

    def split(
        self, shares: Sequence[float], *, seed: int = 0, stratify: bool | str = False
    ) -> tuple[Any, ...]:
        """Return mixtures of parts of each source; as `Selectable.split`. shares: parts of one."""
        parts = [
            cast(Any, Selection(source)).split(
                shares, seed=derive_key(seed, f"split of source {number}"), stratify=stratify
            )
            for number, source in enumerate(self.sources)
        ]
        return tuple(map(self._with, zip(*parts, strict=True)))

    def _with(self, sources: Sequence[Source]) -> Self:
        return type(self)(sources, self.weights, self.at_end)


def sources_in(source: Any) -> Iterator[Any]:
    """Yield what a source reads from: those of a mixture, what a selection is of, or itself."""
    if isinstance(source, MixedSource):
        for each in source.sources:
            yield from sources_in(each)
    else:
        yield from sources_in(source.source) if isinstance(source, Selection) else [source]


def _ask(mixed: MixedSource, method: str, sample: int) -> Any:
    number, own = mixed.place_of(sample)
    return getattr(mixed.sources[number], method)(own)


def _shifted(at: Callable[[int], None], by: int) -> Callable[[int], None]:
    return lambda sample: at(by + sample)


def _reads_pieces(source: Any) -> bool:
    """Whether ranges of objects are read all at once; of what is decoded they are not."""
    whole = getattr(source, "source", source)
    return hasattr(whole, "read_pieces") and objects_in(whole) is not None and not is_decoded(whole)


def _kind_of_samples(source: Source) -> str:
    if not getattr(source, "is_text", False):
        return "bytes"
    return "lines of JSON" if getattr(unselected(source), "is_json", False) else "text"


def _numbers_of_all(sources: Sequence[Source]) -> Any:
    numbers = [source.numbers if isinstance(source, Numeric) else None for source in sources]
    for number, (source, found) in enumerate(zip(sources, numbers, strict=True)):
        if found != numbers[0]:
            raise ConfigError(
                f"source {number} of the mixture, {source!r}, has {_shown(found)}, and source 0 has "
                f"{_shown(numbers[0])}: samples of a batch are alike"
            )
    return numbers[0]


def _shown(numbers: Any) -> str:
    return "bytes" if numbers is None else f"samples of {np.dtype(numbers.dtype).name}{list(numbers.shape)}"


def _labels_of_all(
    sources: Sequence[Source],
) -> tuple[tuple[str, ...], NDArray[Any] | dict[str, NDArray[Any]]]:
    """Return classes and labels of all samples. Raises: ConfigError."""
    found = [labels_of(source.labels, len(source)) for source in sources]
    kinds = [_kind_of(labels) for labels in found]
    has_names = [bool(source.classes) for source in sources]
    for number, source in enumerate(sources):
        if kinds[number] != kinds[0] or has_names[number] != has_names[0]:
            both = [
                f"{kind}{' of named classes' * named}" for kind, named in zip(kinds, has_names, strict=True)
            ]
            raise ConfigError(
                f"source {number} of the mixture, {source!r}, has {both[number]}, and source 0 has {both[0]}: give all "
                "of them labels of the same names, types and shapes"
            )
    classes = tuple(dict.fromkeys(name for source in sources for name in source.classes))
    if isinstance(found[0], dict):
        if any(tuple(source.classes) != tuple(sources[0].classes) for source in sources):
            raise ConfigError(
                "sources of the mixture have labels by name and other classes each, so that their numbers mean "
                "different things: open them with the same classes"
            )
        tables = cast("list[dict[str, NDArray[Any]]]", found)
        return classes, {name: np.concatenate([labels[name] for labels in tables]) for name in tables[0]}
    arrays = cast("list[NDArray[Any]]", found)
    if classes:
        places = {name: place for place, name in enumerate(classes)}
        arrays = [
            # Behind the last, -1 stands for no label, which stays.
            np.array([*(places[name] for name in source.classes), -1], np.int64)[labels]
            for source, labels in zip(sources, arrays, strict=True)
        ]
    return classes, np.concatenate(arrays)


def _kind_of(labels: NDArray[Any] | dict[str, NDArray[Any]]) -> str:
    """Say in words what labels are, the same for those that can be joined."""
    if isinstance(labels, dict):
        each = sorted(
            f"{name!r}: {array.dtype.name}{list(array.shape[1:])}" for name, array in labels.items()
        )
        return f"labels {', '.join(each)}" if each else "no labels"
    return f"labels of {labels.dtype.name}{list(labels.shape[1:])}"

"""The samples of a source as a map-style data set: text and numbers in place of their bytes.

What it returns a loader takes as it takes those of any data set: with `ragged=`, `padded=`, `optional=`, `collate_fn=`,
`cache="rows"` and worker processes.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from penstock.errors import ConfigError, DataError
from penstock.loader.asked import NAMES, AskedDataset, InnerCode, asked_by, each_of, known
from penstock.loader.structure import as_json_leaf
from penstock.loader.transforms.stages import describe
from penstock.loader.user_code import name_of_code
from penstock.store import Numeric, Source
from penstock.store.group import Bytes, Ids, read_group
from penstock.store.labels import labels_of
from penstock.store.mixing import Mixed
from penstock.store.selection import unselected


class OverSource:
    """A data set whose sample k is made of sample k of its `source`, which is a source or another data set."""

    source: Any

    def __len__(self) -> int:
        return len(self.source)

    @property
    def described(self) -> list[str]:
        """What fixes its samples besides the source, as a run's state has it."""
        return []


class ReadSamples(OverSource, ABC):
    """A data set that reads its samples from a source, several together."""

    source: Source

    def __getitem__(self, sample: int) -> Any:
        return self.__getitems__([sample])[0]

    @abstractmethod
    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        """Return several samples, which are read together. Raises: the error of the first that cannot be."""

    @abstractmethod
    def over(self, source: Source) -> ReadSamples:
        """Return some of the samples. source: a selection of what it reads."""

    def map(self, function: Callable[..., Any]) -> Mapped | MappedWithDraws:
        """Return the samples as a function makes them; see `penstock.loader.mapped`."""
        return mapped(self, function)


def below(data: Any, kinds: tuple[type[OverSource], ...] = (OverSource,)) -> Any:
    """Return what the samples of a data set are made of in the end; anything else as it is.

    kinds: of data sets to look below.
    """
    while isinstance(data, kinds):  # numbers of samples are the same all the way
        data = data.source
    return data


def stored_of(data: Any) -> Source | None:
    """Return the source whose bytes the samples of a data set are made of, sample k of sample k; None without one."""
    found = below(data, (Mapped, MappedWithDraws))
    stored = found.source if isinstance(found, ReadSamples) else None
    return stored if isinstance(stored, Source) else None


def over(data: Any, source: Source) -> Any:
    """Return some of the samples of a data set that has `stored_of`. source: a selection of that."""
    if isinstance(data, ReadSamples):
        return data.over(source)
    return mapped(over(data.source, source), data.function)


def kind_of(data: Any) -> str:
    """Name what a data set is by its class; what `mapped` makes, by its function too."""
    if not isinstance(data, Mapped | MappedWithDraws):
        return type(data).__name__
    return f"{kind_of(data.source)}.map({getattr(data.function, '__name__', type(data.function).__name__)})"


def describe_sample(data: Any, sample: int) -> str:
    """Name a sample of a data set: by the file and row, where it is made of a source's."""
    found = below(data)
    is_named = isinstance(found, Mixed) or (found is not data and isinstance(found, Source))
    return str(found.describe(sample)) if is_named else f"{kind_of(data)}[{sample}]"


def made_by(data: Any, sample: int) -> str:
    """Name the function that makes a sample of a data set; "" where the data set itself does."""
    if isinstance(data, Mixed):
        number, own = data.place_of(sample)
        return made_by(data.sources[number], own)
    return name_of_code(data.function) if isinstance(data, Mapped | MappedWithDraws) else ""


class SourceSamples(ReadSamples):
    """The samples of a source as their values, in place of bytes: a data set whose `data[k]` is sample k.

    Text is a str, a line of JSON a dict, rows of numbers are arrays, all else is bytes. With labels a sample is a pair
    of value and label: the number of a class or an array of numbers, a dict of such where labels have names.

    source: any `Source`, such as `ParquetFiles(path, sample="text")`, or a mixture of such, which a loader
        reads by its weights.

    Reading raises DataError naming the sample, also where text is not in UTF-8.
    """

    def __init__(self, source: Source) -> None:
        if not isinstance(source, Source):
            raise ConfigError(
                f"source is {source!r:.200}; it is a source of penstock.store, such as ParquetFiles"
            )
        self.source = source
        self._is_text = is_text(source)
        self._is_json = self._is_text and getattr(unselected(source), "is_json", False)
        #: What opens a part of the samples reads their classes here, as a loader does.
        self.classes = source.classes
        self._labels = labels_of(source.labels, len(source))
        self._has_labels = (
            bool(self._labels) if isinstance(self._labels, dict) else bool((self._labels != -1).any())
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source!r})"

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        return [
            self._with_label(sample, self._value(sample, data))
            for sample, data in zip(samples, read_samples(self.source, samples), strict=True)
        ]

    def over(self, source: Source) -> SourceSamples:
        return SourceSamples(source)

    def _value(self, sample: int, data: Bytes) -> Any:
        whole = unselected(self.source)
        if isinstance(whole, Numeric):
            numbers = whole.numbers
            return data.view(numbers.dtype).reshape(numbers.shape)
        if not self._is_text:
            return data.tobytes()
        name = self.source.describe(sample)
        try:
            text = str(data.data, "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name} is no text in UTF-8 ({error.reason}): write it in UTF-8, or as bytes"
            ) from error
        return _record_of(text, name) if self._is_json else text

    def _with_label(self, sample: int, value: Any) -> Any:
        if not self._has_labels:
            return value
        if isinstance(self._labels, dict):
            return value, {name: each[sample] for name, each in self._labels.items()}
        return value, self._labels[sample]


def _record_of(text: str, name: str) -> dict[str, Any]:
    """Return the object of a line of JSON. Raises: DataError naming the line for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is no JSON ({error}): correct the line") from error
    if not isinstance(found, dict):
        raise DataError(f'{name} is {text:.40}; a line is an object, such as {{"text": "first"}}')
    return {field: as_json_leaf(value) for field, value in found.items()}


def is_text(source: object) -> bool:
    """Return whether the samples of a source are text."""
    return bool(getattr(source, "is_text", False))


#: Of a thread, the source and by sample the bytes that `lending` has it take; None.
_lent = threading.local()


@contextmanager
def lending(source: Source, ids: Ids, data: Sequence[Bytes]) -> Iterator[None]:
    """Have `read_samples` in this thread take samples of a source from what there is of them. data: bytes of each."""
    _lent.samples = source, dict(zip(ids.tolist(), data, strict=True))
    try:
        yield
    finally:
        _lent.samples = None


def read_samples(source: Source, samples: Sequence[int]) -> list[Bytes]:
    """Return the bytes of some samples, which are read together; an empty one has none.

    Raises: IndexError for a sample that there is not; the error of the first that cannot be read.
    """
    if wrong := [sample for sample in samples if not -len(source) <= sample < len(source)]:
        raise IndexError(f"there is no sample {wrong[0]}: {source!r}")
    ids = np.array(samples, np.int64) % len(source)
    lent = getattr(_lent, "samples", None)
    if lent is not None and lent[0] is source and lent[1].keys() >= set(ids.tolist()):
        return [lent[1][sample].copy() for sample in ids.tolist()]  # whose memory the next samples get
    sizes = source.sizes_bytes[ids]
    begins = np.concatenate(([0], np.cumsum(sizes)))
    into = np.empty(int(begins[-1]), np.uint8)
    which = np.flatnonzero(sizes)
    # Those without bytes are in none of the places between.
    failed = read_group(source, ids[which], into, np.append(begins[which], into.size)) if which.size else []
    for _, error in failed:
        raise error
    return [into[begin:end] for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)]


def mapped(samples: Any, function: Callable[..., Any]) -> Mapped | MappedWithDraws:
    """Return a data set whose samples a function makes of those of another one.

    samples: a data set. function: called with a sample, and, in a loader, with what it has parameters for: `rng`, a
        generator of the sample's own, and `epoch`. The data set may ask for them, too, and draws first.
    """
    if not callable(function):
        raise ConfigError(f"{function!r:.200} is no function of a sample")
    draws = asked_by(function).intersection(NAMES) or AskedDataset(samples).asks
    return MappedWithDraws(samples, function) if draws else Mapped(samples, function)


class Mapped(OverSource):
    """See `mapped`."""

    def __init__(self, source: Any, function: Callable[..., Any]) -> None:
        self.source, self.function = source, function
        self._asked = AskedDataset(source)

    def __getitem__(self, sample: int) -> Any:
        return _called(self.function, self._asked.one(sample, {}), {})

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        return [_called(self.function, sample, {}) for sample in self._asked.several(samples, {})]


class MappedWithDraws(OverSource):
    """See `mapped`."""

    def __init__(self, source: Any, function: Callable[..., Any]) -> None:
        self.source, self.function = source, function
        self._asked, self._code = AskedDataset(source), InnerCode(function, kind_of(self))

    def __getitem__(
        self, sample: int, epoch: int | None = None, rng: np.random.Generator | None = None
    ) -> Any:
        given = known(epoch=epoch, rng=rng)
        return self._made(self._asked.one(sample, given), given)

    def __getitems__(
        self,
        samples: Sequence[int],
        epoch: int | None = None,
        rngs: Sequence[np.random.Generator] | None = None,
    ) -> list[Any]:
        given = known(epoch=epoch, rngs=rngs)
        found = self._asked.several(samples, given)
        return list(map(self._made, found, each_of(given, len(found))))

    def _made(self, sample: Any, given: Mapping[str, Any]) -> Any:
        return _called(self.function, sample, self._code.arguments(given))


def _called(function: Callable[..., Any], sample: Any, given: Mapping[str, Any]) -> Any:
    """Return what a function makes of a sample; its error says which function that is."""
    try:
        return function(sample, **given)
    except Exception as error:
        error.add_note(f"in {name_of_code(function)}, which map calls with {describe(sample)}")
        raise

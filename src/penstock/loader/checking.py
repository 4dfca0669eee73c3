"""Reading and decoding every sample of a data set once, to find the bad ones."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.errors import ConfigError, DataError, printable, reason_of
from penstock.flow.work import Failed
from penstock.loader.config import LoaderConfig
from penstock.loader.fetching import SourceFetcher
from penstock.loader.loader import Loader
from penstock.loader.opened import reader_of
from penstock.loader.skips import BadSample, SkipList
from penstock.loader.source_samples import SourceSamples, below, is_text, read_samples
from penstock.loader.tar_samples import TarSamples, decode_member, usual_decoder
from penstock.loader.transforms import Resize
from penstock.policy.merge import cut_windows
from penstock.store import Numeric, Source, TarShards
from penstock.store.selection import unselected

_BATCH = 64
#: Read at a time, by one thread, where nothing is decoded.
_READ_BYTES = 8 << 20
#: Keys of JSON that are counted.
_MOST_KEYS = 1000
#: Takes note of an error and its sample.
Note = Callable[[Exception, int], Literal["skip"]]
#: Reads some samples.
Look = Callable[[list[int]], object]
#: So often a list that is written is brought up to date: what a kill may cost.
_KEEP_SECONDS = 10.0


def check_source(
    source: Source | TarSamples,
    *,
    decodes: bool = True,
    optional: Collection[str] = (),
    found: SkipList | None = None,
    keep: Path | None = None,
    done: Callable[[int], None] = lambda samples: None,
    clock: Callable[[], float] = time.monotonic,
) -> SkipList:
    """Return which samples cannot be read or decoded, by the threads and the decoder of a loader.

    Pictures are decoded; text has to be UTF-8, and lines of JSON objects; members of tar shards are what their endings
    say; of numbers and arrays the bytes are read. `TarSamples` are checked with all their fields, and one that a key
    lacks is bad; the list is of their `source`. Keys that only some lines of JSON have are in `lacking` of the list.

    decodes: False reads samples alone. optional: fields of `TarSamples` that a key may lack.
    found: what an earlier check of the same source found, to continue from. It is updated batch by batch, so that it is
        right when this is interrupted.
    keep: a file to write it to, now and then and at the end. done: called with how many samples are checked.
    Raises: ConfigError if `found` is of another source, or for a field that there is not; DataError if the file cannot
        be written.
    """
    stored: Source = below(source)
    found = SkipList.of(stored) if found is None else found
    if not found.is_of(stored):
        raise ConfigError("the list is of another data set, or of this one before it changed: begin anew")
    seen: dict[int, BadSample] = {}

    def note(error: Exception, sample: int) -> Literal["skip"]:
        seen[sample] = BadSample(sample, printable(stored.describe(sample)), printable(reason_of(error)))
        return "skip"

    kept, keys = clock(), _Keys(len(stored))
    looks: list[Look] = []
    fields = source.fields if isinstance(source, TarSamples) else []
    if wrong := next((name for name in optional if name not in fields), None):
        raise ConfigError(f"optional has {wrong!r}; fields are {', '.join(fields) or 'of TarSamples alone'}")
    if isinstance(source, TarSamples):
        looks.append(partial(_note_lacking, source, frozenset(optional), note))
    if not decodes:
        looks.append(partial(_read_alone, stored, reader_of(stored), note))
    elif (values := _values_of(source, keys)) is not None:
        looks.append(partial(_noting, values, note))
    with Loader(_config_of_reads(stored, looks) if looks else _config(stored, note), report=None) as loader:
        try:
            if not found.is_complete:
                done(found.checked)
                loader.start(0, found.checked // _BATCH)
                for _ in _passed(loader, seen):
                    _take(found, seen, loader)
                    done(found.checked)
                    if keep is not None and clock() - kept >= _KEEP_SECONDS:
                        found.write(keep)
                        kept = clock()
                _take(found, seen, loader)
                done(found.checked)
        finally:
            found.lacking = keys.lacking()
            if keep is not None:
                found.write(keep)
    return found


def _config(source: Source, note: Note) -> LoaderConfig:
    """Return what has a loader read and decode each sample once."""
    return LoaderConfig(
        source,
        batch_size=_BATCH,
        epochs=1,
        # A whole picture is decoded to be made small, as for a training.
        transforms=[] if isinstance(source, Numeric) else [Resize((8, 8))],
        dtype=None if isinstance(source, Numeric) else "uint8",
        shuffle=False,
        rank=0,
        world_size=1,
        policy="staging",
        on_error=note,
    )


def _config_of_reads(source: Source, looks: Sequence[Look]) -> LoaderConfig:
    return LoaderConfig(
        _Reads(source, looks), batch_size=_BATCH, epochs=1, shuffle=False, rank=0, world_size=1
    )


class _Reads:
    """A source as a data set of the sizes that were read, so that a loader's threads read it.

    looks: read some samples; called by any thread.
    """

    def __init__(self, source: Source, looks: Sequence[Look]) -> None:
        self._sizes, self._looks = source.sizes_bytes, looks

    def __len__(self) -> int:
        return self._sizes.size

    def __getitem__(self, index: int) -> np.int64:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[np.int64]:
        cuts = np.flatnonzero(np.diff(cut_windows(self._sizes[indices], _READ_BYTES))) + 1
        for group in np.split(indices, cuts):
            for look in self._looks:
                look(group.tolist())
        return list(self._sizes[indices])


class _Keys:
    """Counts which objects of JSON lines have which keys. Threads add to it."""

    def __init__(self, samples: int) -> None:
        self._is_counted = np.zeros(samples, np.bool_)
        self._objects, self._counts, self._lock = 0, Counter[str](), threading.Lock()

    def add(self, ids: list[int], values: list[Any]) -> None:
        """Count those of some samples. A loader asks for the first twice, to see its shape."""
        with self._lock:
            for sample, value in zip(ids, values, strict=True):
                if isinstance(value, dict) and not self._is_counted[sample]:
                    self._objects += 1
                    for key in value:
                        if key in self._counts or len(self._counts) < _MOST_KEYS:
                            self._counts[key] += 1
            self._is_counted[ids] = True

    def lacking(self) -> dict[str, int]:
        """Return how many objects lack each key that others have."""
        return {key: self._objects - count for key, count in self._counts.items() if count < self._objects}


def _note_lacking(samples: TarSamples, optional: frozenset[str], note: Note, ids: list[int]) -> None:
    """Note the keys that lack a field's member, but for fields that are optional."""
    for sample in ids:
        lacking = [field for field in samples.lacking(sample) if field not in optional]
        if fields := " and ".join(map(repr, lacking)):
            name = samples.source.describe(sample)
            advice = "add the member, or train with a default by optional="
            note(DataError(f"{name} lacks {fields}: {advice}"), sample)


def _read_alone(source: Source, fetcher: SourceFetcher, note: Note, samples: list[int]) -> None:
    """Read samples. An empty text is one."""
    if is_text(source):
        samples = [sample for sample in samples if source.sizes_bytes[sample]]
    if not samples:
        return
    for sample, each in zip(samples, fetcher.read(samples), strict=True):
        if isinstance(each, Failed):
            note(each.error, sample)


def _values_of(samples: Source | TarSamples, keys: _Keys) -> Look | None:
    """Return what reads samples and makes their values; None for pictures and numbers, which a loader decodes.

    It raises the error of the first that is bad. keys: counts those of objects of JSON.
    """
    if isinstance(samples, TarSamples):
        return samples.__getitems__
    if is_text(samples):
        texts = SourceSamples(samples)
        return lambda ids: keys.add(ids, texts.__getitems__(ids))
    shards = unselected(samples)
    if isinstance(shards, TarShards) and any(usual_decoder(each) != "rgb" for each in shards.endings):
        return partial(_decode_members, samples)
    return None


def _decode_members(source: Source, samples: Sequence[int]) -> None:
    for sample, data in zip(samples, read_samples(source, samples), strict=True):
        decode_member(source.describe(sample), data.tobytes())


def _noting(look: Look, note: Note, samples: list[int]) -> None:
    """Look at samples, and one by one where one is bad."""
    try:
        look(samples)
    except Exception as error:
        if len(samples) == 1:
            note(error, samples[0])
            return
        for sample in samples:
            _noting(look, note, [sample])


def _passed(loader: Loader, seen: dict[int, BadSample]) -> Any:
    """Yield for each batch. An epoch of nothing but bad samples ends as any other."""
    try:
        for _ in loader:
            yield
    except DataError:
        if loader.position[0] == 0 or not seen:
            raise


def _take(found: SkipList, seen: dict[int, BadSample], loader: Loader) -> None:
    """Bring a list up to date with what a loader has passed."""
    epoch, step = loader.position
    found.checked = found.samples if epoch else min(step * _BATCH, found.samples)
    for sample in [each for each in list(seen) if each < found.checked]:  # threads add to it
        found.bad[sample] = seen.pop(sample)

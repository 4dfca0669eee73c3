"""Which samples of a data set are bad, as a file: `penstock check` writes it, and a loader leaves them out.

JSON lines that people may read and change. The first names the data set and says how far it was checked:

    {"penstock": "samples to skip", "version": 1, "kind": "ImageFolder", "names_sizes_labels": "5e8...",
     "samples": 2000, "checked": 2000}
    {"sample": 17, "name": "/data/cat/17.jpg", "reason": "truncated JPEG: ..."}

Samples are named by their numbers in the whole data set, which stay; a loader numbers those that are left anew, so that
batches are complete, and equal on all ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError, DataError
from penstock.files import write_whole
from penstock.loader.resume import describe_data
from penstock.store import MixedSource, Selection, Source
from penstock.store.selection import unselected
from penstock.store.text_rows import read_records
from penstock.trace.trace import JSON
from penstock.units import is_integer

_TITLE, _VERSION = "samples to skip", 1


class BadSample(NamedTuple):
    """A sample that cannot be read or decoded. name: what its source calls it."""

    sample: int
    name: str
    reason: str


@dataclass
class SkipList:
    """The bad samples of a data set.

    data: of `describe_data`, with the number of its samples. checked: how many were, from the first on. bad: by sample.
    lacking: how many lines of JSON lack a key that others have, by key; of the last check, and not written.
    """

    data: Mapping[str, JSON]
    samples: int
    checked: int = 0
    bad: dict[int, BadSample] = field(default_factory=dict)
    lacking: dict[str, int] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(source: Source) -> SkipList:
        """Return the list of a source of which nothing was checked."""
        return SkipList(describe_data(source), len(source))

    @property
    def is_complete(self) -> bool:
        return self.checked == self.samples

    def is_of(self, source: Source) -> bool:
        """Return whether it was made for a source with these samples."""
        return len(source) == self.samples and describe_data(source) == self.data

    def write(self, path: Path) -> None:
        """Write it in one go. Raises: DataError."""
        head = {
            "penstock": _TITLE,
            "version": _VERSION,
            **self.data,
            "samples": self.samples,
            "checked": self.checked,
        }
        lines = [head, *(self.bad[sample]._asdict() for sample in sorted(self.bad))]
        try:
            write_whole(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror or error}") from error

    @staticmethod
    def read(path: str | os.PathLike[str]) -> SkipList:
        """Return what `write` wrote. Raises: DataError naming file and line for anything else."""
        records = read_records(os.fspath(path))
        line, head = records[0] if records else (1, {})
        samples, checked = head.get("samples"), head.get("checked")
        if head.get("penstock") != _TITLE or not is_integer(samples) or not is_integer(checked):
            raise DataError(
                f"{path}, line {line}: is no list of samples to skip: let penstock check write one"
            )
        if head.get("version") != _VERSION:
            raise DataError(
                f"{path} has version {head.get('version')!r:.20}, and this Penstock reads {_VERSION}"
            )
        if not 0 <= checked <= samples:
            raise DataError(
                f"{path}, line {line}: {checked:,} of {samples:,} samples cannot have been checked"
            )
        data: dict[str, JSON] = {name: head[name] for name in ("kind", "names_sizes_labels") if name in head}
        found = SkipList(data, samples, checked)
        for line, record in records[1:]:
            sample = record.get("sample")
            if not is_integer(sample) or not 0 <= sample < samples:
                raise DataError(
                    f"{path}, line {line}: sample is {sample!r:.40}; the data set has {samples:,}, the first is 0"
                )
            name, reason = (str(record.get(each, "")) for each in ("name", "reason"))
            found.bad[sample] = BadSample(sample, name, reason)
        return found


def without_bad(
    source: Any, path: str | os.PathLike[str], one: Callable[..., Any]
) -> Selection | MixedSource:
    """Return a source less the samples that a list names, which was made for it, or for what it selects from.

    one: reads the file, as `Calls.one` does.
    Raises: ConfigError for a list of another data set, of one that was checked in part, and for a data set, whose own
        code makes the samples; DataError for no list.
    """
    if not isinstance(source, Source):
        raise ConfigError(
            f"skip is given with the data set {type(source).__name__}, which reads by itself: leave them out there"
        )
    found: SkipList = one(os.fspath(path), lambda: SkipList.read(path))
    if not found.is_complete:
        raise ConfigError(
            f"skip: of {path} {found.checked:,} of {found.samples:,} samples were checked: let penstock check finish"
        )
    whole = source if found.is_of(source) else unselected(source)
    if not found.is_of(whole):
        raise ConfigError(
            f"skip: {path} is of another data set, or of this one before it changed: let penstock check write it anew"
        )
    ids = source.ids if whole is not source and isinstance(source, Selection) else np.arange(len(source))
    is_good = ~np.isin(ids, list(found.bad))
    if not is_good.any():
        raise ConfigError(f"skip: {path} leaves no sample of {source!r}: look at what it says")
    return source.select(is_good) if isinstance(source, MixedSource) else Selection(source, is_good)

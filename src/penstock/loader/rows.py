"""Samples of a data set kept in memory, and on disks, as bytes: what its code has made once is not made again."""

from __future__ import annotations

import copyreg
import io
import pickle
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.flow.channel import Reducers
from penstock.flow.work import Failed, Fetcher, FetcherOver, Request
from penstock.loader.local_disk import KeptOnDisks
from penstock.loader.structure import is_same
from penstock.store import MemoryTier
from penstock.store.direct import new_memory
from penstock.trace.schema import SOURCE, STAGING

#: A sample as it is kept.
Row = bytes | memoryview


class RowPickler:
    """Turns samples into bytes, as they are. reducers: how some types are pickled, in place of their own way."""

    def __init__(self, reducers: Reducers) -> None:
        self._reducers = {**copyreg.dispatch_table, **reducers}

    def dump(self, value: Any) -> bytes:
        """Return a sample as bytes for `pickle.loads`. Raises: what pickling raises."""
        file = io.BytesIO()
        pickler = pickle.Pickler(file, 5)
        pickler.dispatch_table = self._reducers
        pickler.dump(value)
        return file.getvalue()


class KeepingFetcher(FetcherOver):
    """A `Fetcher` of the samples of another that keeps in tiers what a plan says is worth it.

    What is asked of a tier that has no space for it, as samples turned out larger, or has lost it, is made again.

    memory: the tier of number 1, if any. disks: tiers by number, and what goes there besides.
    """

    def __init__(
        self, fetcher: Fetcher, memory: MemoryTier | None, disks: KeptOnDisks, pickler: RowPickler
    ) -> None:
        super().__init__(fetcher)
        self._memory, self._slow, self._copied_to = memory, disks.tiers, disks.copied
        self._pickler = pickler

    def fetch(self, request: Request) -> list[Any]:
        """Return samples, from a tier or made, and have a tier keep them where it is to; see `Fetcher`."""
        if request.origin == SOURCE:
            found = self._made(request)
            for sample, rest, value in zip(request.samples, request.rests, found, strict=False):
                if rest != STAGING and not isinstance(value, Failed):
                    self._keep(sample, self._pickler.dump(value), rest)
            return found
        request.at(request.samples[0])
        kept = list(self._kept(request))
        for sample, rest, data in zip(request.samples, request.rests, kept, strict=False):
            if rest != STAGING and data is not None:
                self._keep(sample, data, rest)
        found = [None if data is None else pickle.loads(data) for data in kept]
        missing = [index for index, data in enumerate(kept) if data is None]
        if missing:
            made = self._made(request._replace(ids=request.ids[missing]))
            for index, value in zip(missing, made, strict=True):
                found[index] = value
                if isinstance(value, Failed):
                    continue
                rest = request.rests[index] if request.rests else STAGING
                tiers = ({rest} - {STAGING}) | ({request.origin} & self._slow.keys())
                data = self._pickler.dump(value) if tiers else b""
                for tier in tiers:
                    self._keep(request.samples[index], data, tier)
        return found

    def evict(self, ids: NDArray[np.int64]) -> None:
        """Keep samples in no tier any longer; see `Fetcher`."""
        if self._memory is not None:
            self._memory.evict(ids)
        for disk in self._slow.values():
            disk.evict(ids)
        super().evict(ids)

    def _made(self, request: Request) -> list[Any]:
        return list(self._fetcher.fetch(request._replace(origin=SOURCE, rests=())))

    def _kept(self, request: Request) -> Iterator[Row | None]:
        """Yield what a tier has of samples, None where it has none."""
        if request.origin not in self._slow:
            assert self._memory is not None, "it is the only other tier"
            for sample in request.samples:
                yield self._memory.view(sample) if self._memory.contains(sample) else None
            return
        tier, ids = self._slow[request.origin], request.ids
        sizes = tier.sizes_of(ids)
        there = np.flatnonzero(sizes >= 0)
        memory, begins, failed = tier.read(ids[there], sizes[there], new_memory)
        begin_of = dict(zip(there.tolist(), begins, strict=True))
        for lost, _ in failed:
            del begin_of[int(there[lost])]
        for index in range(ids.size):
            begin = begin_of.get(index)
            yield None if begin is None else memory[begin : begin + sizes[index]].data

    def _keep(self, sample: int, data: Row, rest: int) -> None:
        """Have a tier keep a sample, and disks that have a copy of what memory keeps."""
        if rest in self._slow:
            self._slow[rest].put(sample, np.frombuffer(data, np.uint8))
            return
        assert self._memory is not None, "the plan knows which tiers there are"
        if self._memory.put(sample, data) and self._memory.contains(sample):
            for number, is_copied in self._copied_to.items():
                if is_copied[sample]:
                    view = np.frombuffer(self._memory.view(sample), np.uint8)
                    self._slow[number].put(sample, view, stays=True)

    def close(self) -> None:
        for disk in self._slow.values():  # they may still write what memory keeps
            disk.close()
        if self._memory is not None:
            self._memory.close()
        super().close()


def row_bytes(samples: Iterable[Any], pickler: RowPickler, place: str) -> int:
    """Return how many bytes a sample takes, on average over some. place: the data set, for messages.

    Raises: ConfigError if one cannot be pickled.
    """
    try:
        sizes = [len(pickler.dump(sample)) for sample in samples]
    except Exception as error:
        raise ConfigError(
            f'cache="rows" keeps the samples of {place} pickled, and one cannot be ({error}): return arrays, numbers '
            "and text, or leave cache out"
        ) from error
    return -(-sum(sizes) // len(sizes))


def warn_unless_same(first: Any, second: Any, name: str) -> None:
    """Warn where two calls for one sample gave other values: later epochs would have those of the first."""
    if not is_same(first, second):
        warnings.warn(
            f'{name} gave other values when it was asked for twice, and cache="rows" keeps those of the first time for '
            "all epochs: move what draws random numbers behind the loader, or leave cache out",
            RuntimeWarning,
            stacklevel=2,
        )

"""Samples of a data set kept in memory as bytes: what its code has made once is not made again."""

from __future__ import annotations

import copyreg
import io
import pickle
import warnings
from collections.abc import Iterable
from typing import Any

from penstock.errors import ConfigError
from penstock.flow.channel import Reducers
from penstock.flow.work import Failed, Fetcher, FetcherOver, Request
from penstock.loader.structure import is_same
from penstock.store import MemoryTier
from penstock.trace.schema import SOURCE, STAGING


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

    What is asked of a tier that has no space for it, as samples turned out larger, is made again.
    """

    def __init__(self, fetcher: Fetcher, tiers: dict[int, MemoryTier], pickler: RowPickler) -> None:
        super().__init__(fetcher)
        self._tiers, self._pickler = tiers, pickler

    def fetch(self, request: Request) -> list[Any]:
        """Return samples, from a tier or made, and have a tier keep them where it is to; see `Fetcher`."""
        samples = request.samples
        if request.origin == SOURCE:
            found = self._made(request)
            for sample, rest, value in zip(samples, request.rests, found, strict=False):
                if rest != STAGING and not isinstance(value, Failed):
                    self._tiers[rest].put(sample, self._pickler.dump(value))
            return found
        tier = self._tiers[request.origin]
        request.at(samples[0])
        found = [pickle.loads(tier.view(sample)) if tier.contains(sample) else None for sample in samples]
        missing = [index for index, sample in enumerate(samples) if not tier.contains(sample)]
        if missing:
            made = self._made(request._replace(ids=request.ids[missing]))
            for index, value in zip(missing, made, strict=True):
                found[index] = value
        return found

    def _made(self, request: Request) -> list[Any]:
        return list(self._fetcher.fetch(request._replace(origin=SOURCE, rests=())))

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.close()
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

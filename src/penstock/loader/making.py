"""Samples that a data set makes of stored bytes, which a loader reads and keeps as those of any other source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from penstock.flow.staging import Field
from penstock.flow.work import Brought, Request, without_failed
from penstock.loader.collating import CollatingDecoder
from penstock.loader.dataset import DatasetFetcher, SampleDecoder
from penstock.loader.source_samples import lending, stored_of
from penstock.policy import Load


class MakingDecoder:
    """A `Decoder` of stored bytes: a data set makes samples of them, and another decoder batches of these.

    fetcher: of a data set that has `stored_of`, whose bytes these are. decoder: of its samples.
    """

    def __init__(self, fetcher: DatasetFetcher, decoder: SampleDecoder | CollatingDecoder) -> None:
        source = stored_of(fetcher.dataset)
        assert source is not None, "it was asked before"
        self._source, self._fetcher, self.decoder = source, fetcher, decoder

    def __reduce__(self) -> Any:
        """Pickle what it was made of: a worker process has a copy of the data set, and of its source."""
        return MakingDecoder, (self._fetcher, self.decoder)

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.decoder.fields

    def place_of(self, rows: range, arrays: tuple[NDArray[Any], ...]) -> None:
        """Bytes are not what a slot has."""

    def decode(
        self, load: Load, brought: Brought, arrays: tuple[NDArray[Any], ...], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """Make samples and copy them into their rows; see `Decoder`."""
        rows, ids, data, shared = brought
        with lending(self._source, ids, data):
            samples = self._fetcher.fetch(Request(ids, at, epoch=load.epoch))
        made, had, failed = without_failed(Brought(rows, ids, samples, shared))
        wrong = self.decoder.decode(load, made, arrays, at) if had else []
        return failed + [(had[index], error) for index, error in wrong]

    def finish(self, slot: int, arrays: tuple[NDArray[Any], ...], rows: Sequence[int]) -> Any:
        return self.decoder.finish(slot, arrays, rows)

    def apart(self) -> MakingDecoder:
        """See `MovableDecoder`."""
        return MakingDecoder(self._fetcher, self.decoder.apart())

    def take(self, slot: int, rows: Sequence[int]) -> Any:
        """See `MovableDecoder`."""
        return self.decoder.take(slot, rows)

    def put(self, slot: int, rows: Sequence[int], what: Any) -> None:
        """See `MovableDecoder`."""
        self.decoder.put(slot, rows, what)

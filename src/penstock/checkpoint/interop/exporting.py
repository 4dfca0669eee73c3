"""A snapshot of a store as a state to be read tensor by tensor, such as for writing it as other people read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

import numpy as np

from penstock.checkpoint.files.catalog import Catalog, Link, looking_again, open_links, read_first
from penstock.checkpoint.files.fast_folders import look_and_choose
from penstock.checkpoint.files.reading import Chain, Wanted, parts_by_name, read_wanted, tree_of
from penstock.checkpoint.interop.foreign import Readable
from penstock.checkpoint.state.tensors import Bytes
from penstock.checkpoint.tiers.tier import Tier
from penstock.flow.cpus import default_coders
from penstock.flow.ordered import Workers

T = TypeVar("T")


@contextmanager
def open_readable(
    tiers: Sequence[Tier], step: int | None = None, *, report: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[int, Readable]]:
    """Open a snapshot for as long as the block lasts; a tensor's bytes are decoded when they are read.

    Tensors that are spread over ranks are put together. Where a copy is damaged the next one is read.
    tiers: of the store, the nearest first. step: of the snapshot; None: the one that was saved last.
    report: called with a line on each copy that is skipped.
    Yields: the step, and the state, in memory one tensor at a time.
    Raises: ConfigError if there is no such snapshot, naming the nearest; FormatError naming what is damaged; DataError.
    """
    catalog = Catalog(tiers)

    def open_chosen(is_again: bool) -> _Snapshot:
        chosen = look_and_choose(catalog, step, report, was_there=is_again)
        return _Snapshot(catalog, chosen, workers, report)

    with (
        Workers(default_coders(), "penstock-export") as workers,
        closing(looking_again(open_chosen)) as snapshot,
    ):
        manifest = snapshot.manifest
        yield manifest.step, Readable(tree_of(manifest, parts_by_name(manifest)), snapshot.read)


class _Snapshot:
    """A snapshot that is read from the nearest of its copies that is good as far as was seen."""

    def __init__(self, catalog: Catalog, step: int, workers: Workers, report: Callable[[str], None]) -> None:
        """Open it. Raises: `Removed`; FormatError, DataError if no copy can be opened."""
        self._catalog = catalog
        self._workers = workers
        self._report = report
        if other := catalog.describe_other_versions(step):
            report(other)
        chains = catalog.chains(step)
        #: The restore chains that are left, of which the first is open; none to another snapshot of this step.
        self._chains = [links for links in chains if links[-1].uid == chains[0][-1].uid]
        self._chain: Chain | None = None
        self.manifest = self._of_first_good(lambda chain: chain.manifest)

    def _of_first_good(self, read: Callable[[Chain], T]) -> T:
        """Return what a function returns of the first chain on which it does not fail; that is the one read next."""

        def attempt(links: Sequence[Link]) -> T:
            if links is not self._chains[0]:
                self.close()
                self._chain, self._chains = None, self._chains[self._chains.index(list(links)) :]
            self._chain = self._chain or open_links(self._catalog, links)
            return read(self._chain)

        return read_first(self._chains, attempt, self._catalog.was_removed, self._report)

    def read(self, name: str) -> Bytes:
        """Return a tensor's bytes. Raises: FormatError, DataError: what is wrong with the last copy."""

        def read_of(chain: Chain) -> Bytes:
            parts = parts_by_name(chain.manifest)[name]
            layout = parts[0].layout.whole
            out = np.empty(layout.nbytes, np.uint8)
            for _ in read_wanted(chain, [Wanted(layout, parts, out)], self._workers):
                pass
            return out

        return self._of_first_good(read_of)

    def close(self) -> None:
        if self._chain is not None:
            self._chain.close()

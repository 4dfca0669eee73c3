"""A snapshot of a store as a state to be read tensor by tensor, such as for writing it as other people read it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np

from penstock.checkpoint.files.reading import Chain, Wanted, parts_by_name, read_wanted, tree_of
from penstock.checkpoint.foreign import Readable
from penstock.checkpoint.state.tensors import Bytes
from penstock.checkpoint.tiers.catalog import Catalog, Removed, looking_again, naming_dependents, open_links
from penstock.checkpoint.tiers.fast_folders import look_and_choose
from penstock.checkpoint.tiers.tier import Tier
from penstock.errors import DataError, FormatError
from penstock.flow.cpus import default_coders
from penstock.flow.ordered import Workers


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
        manifest = snapshot.chain.manifest
        yield manifest.step, Readable(tree_of(manifest, parts_by_name(manifest)), snapshot.read)


class _Snapshot:
    """A snapshot that is read from the nearest of its copies that is good as far as was seen."""

    def __init__(self, catalog: Catalog, step: int, workers: Workers, report: Callable[[str], None]) -> None:
        """Open it. Raises: `Removed`; FormatError, DataError if no copy can be opened."""
        self._catalog = catalog
        self._step = step
        self._workers = workers
        self._report = report
        self._left = deque(catalog.chains(step))
        if other := catalog.describe_other_versions(step):
            report(other)
        self._chain_links = self._left.popleft()
        self.chain = self._open()

    def _open(self) -> Chain:
        while True:
            try:
                with naming_dependents(self._chain_links):
                    return open_links(self._catalog, self._chain_links)
            except (FormatError, DataError) as error:
                self._pass_over(error)

    def _pass_over(self, error: FormatError | DataError) -> None:
        """Go on to the next restore chain. Raises: the error, if there is none; `Removed`."""
        if self._catalog.was_removed(self._chain_links):
            raise Removed(f"the snapshot of step {self._step} was removed meanwhile: {error}") from error
        if not self._left:
            raise error
        self._report(f"step {self._step} is read from another copy: {error}")
        self._chain_links = self._left.popleft()

    def read(self, name: str) -> Bytes:
        """Return a tensor's bytes. Raises: FormatError, DataError: what is wrong with the last copy."""
        uid = self.chain.manifest.uid
        while True:
            try:
                with naming_dependents(self._chain_links):
                    return self._read(name)
            except (FormatError, DataError) as error:
                fault = error
            self._pass_over(fault)
            self.chain.close()
            self.chain = self._open()
            if self.chain.manifest.uid != uid:
                raise fault  # what is left is another snapshot of this step

    def _read(self, name: str) -> Bytes:
        parts = parts_by_name(self.chain.manifest)[name]
        layout = parts[0].layout.whole
        out = np.empty(layout.nbytes, np.uint8)
        for _ in read_wanted(self.chain, [Wanted(layout, parts, out)], self._workers):
            pass
        return out

    def close(self) -> None:
        self.chain.close()

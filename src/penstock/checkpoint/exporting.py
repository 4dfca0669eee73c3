"""A snapshot of a store as a state to be read tensor by tensor, such as for writing it as other people read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np

from penstock.checkpoint.catalog import Catalog, open_way
from penstock.checkpoint.foreign import Readable
from penstock.checkpoint.reading import Wanted, parts_by_name, read_wanted, whole_layout
from penstock.checkpoint.tensors import Bytes
from penstock.checkpoint.tier import Tier
from penstock.checkpoint.tree import read_tree
from penstock.errors import ConfigError
from penstock.flow.cpus import default_coders
from penstock.flow.ordered import Workers


@contextmanager
def open_readable(tiers: Sequence[Tier], step: int | None = None) -> Iterator[tuple[int, Readable]]:
    """Open a snapshot for as long as the block lasts; a tensor's bytes are decoded when they are read.

    Tensors that are spread over ranks are put together.
    tiers: of the store, the nearest first. step: of the snapshot; None: the one that was saved last.
    Yields: the step, and the state, in memory one tensor at a time.
    Raises: ConfigError if there is no such snapshot, naming the nearest; FormatError naming what is damaged; DataError.
    """
    catalog = Catalog(tiers)
    catalog.look()
    steps = catalog.steps()
    if step is None and not steps:
        raise ConfigError(f"there is no snapshot in {tiers[-1].name}: nothing was saved there")
    step = steps[-1] if step is None else step
    way = catalog.ways(step)[0]
    with (
        closing(open_way(catalog, way)) as chain,
        Workers(default_coders(), f"penstock-export-{step}") as workers,
    ):
        by_name = parts_by_name(chain.manifest)
        layouts = {name: whole_layout(parts) for name, parts in by_name.items()}

        def read(name: str) -> Bytes:
            out = np.empty(layouts[name].nbytes, np.uint8)
            for _ in read_wanted(chain, [Wanted(layouts[name], by_name[name], out)], workers):
                pass
            return out

        yield step, Readable(read_tree(chain.manifest.tree, layouts.values()), read)

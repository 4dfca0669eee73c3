"""One rank lists the data set of a job, and the others receive its catalog."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.loader.config import LoaderConfig
from penstock.ranks import Ranks
from penstock.ranks.exchange import raise_own_error
from penstock.store import Catalog, FileSource, PackedFiles, open_source
from penstock.store.calls import Calls
from penstock.store.catalog import DIGEST_BYTES
from penstock.store.listing import is_listed_here, read_same
from penstock.store.object_store import is_address
from penstock.store.patterns import place_of_paths
from penstock.store.remote import Objects

#: What the exchanges of a loader's start are called in messages.
START = "the start of a loader"

#: A catalog of more bytes is sent to ranks only if one of them cannot read it where it is kept.
_SENT_AT_ONCE_BYTES = 1 << 20


def list_once(
    job: Ranks, config: LoaderConfig, calls: Calls
) -> Callable[[], FileSource | PackedFiles | None]:
    """Return what opens the data set that rank 0 listed; it returns None where that is not found at the same path.

    All ranks call this, before each opens what it gets None for. A host may have a copy of its own at the path, whose
    folder has another inode: it is listed there.
    Raises: on every rank, what listing raised on rank 0.
    """
    try:
        path = None if config.paths is None else place_of_paths(config.paths)
    except Exception as error:
        job.leave(error, START)
        raise
    source: FileSource | PackedFiles | None = None
    written = b""

    def list_it() -> bytes:
        nonlocal source, written
        if path is None:
            return b""
        source = open_source(
            path, refresh=config.refresh, calls=calls, storage_options=config.storage_options
        )
        if source.catalog is None:  # nothing had to be listed
            return b""
        written = source.catalog.to_bytes()
        return written if len(written) <= _SENT_AT_ONCE_BYTES else source.catalog.digest()

    answer: bytes = raise_own_error(partial(job.on_rank_zero, START), list_it)
    kept: Catalog | None = None
    if len(answer) == DIGEST_BYTES:

        def has_it() -> bool:
            nonlocal kept
            if source is None and path is not None:
                objects = Objects(config.storage_options) if is_address(path) else None
                kept = read_same(path, answer, calls, objects)
            return source is not None or kept is not None or path is None

        sent = raise_own_error(
            lambda part: job.gather_then_decide(START, part, lambda have: b"" if all(have) else written),
            has_it,
        )
    else:
        sent = answer

    def open_it() -> FileSource | PackedFiles | None:
        if source is None and path is not None and (kept is not None or sent):
            catalog = kept or Catalog.from_bytes(sent)
            if is_listed_here(path, catalog, config.refresh, calls):
                return open_source(path, catalog=catalog, calls=calls, storage_options=config.storage_options)
        return source

    return open_it

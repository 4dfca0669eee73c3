"""Reading and decoding every sample of a data set once, to find the bad ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ConfigError, DataError, printable
from penstock.loader.loader import Loader
from penstock.loader.skips import BadSample, SkipList
from penstock.loader.transforms import Resize
from penstock.store import Numeric, Source

_BATCH = 64
#: So often a list that is written is brought up to date: what a kill may cost.
_KEEP_SECONDS = 10.0


def check_source(
    source: Source,
    *,
    found: SkipList | None = None,
    keep: Path | None = None,
    done: Callable[[int], None] = lambda samples: None,
    clock: Callable[[], float] = time.monotonic,
) -> SkipList:
    """Return which samples cannot be read or decoded, by the threads and the decoder of a loader.

    found: from where it goes on: of the same source, checked in part. It is brought up to date batch by batch, so that
        it is right when this is interrupted.
    keep: a file to write it to, now and then and at the end. done: called with how many samples are checked.
    Raises: ConfigError if `found` is of another source; DataError if the file cannot be written.
    """
    found = SkipList.of(source) if found is None else found
    if not found.is_of(source):
        raise ConfigError("the list is of another data set, or of this one before it changed: begin anew")
    # A whole picture is decoded to be made small, as for a training.
    transforms: list[Any] = [] if isinstance(source, Numeric) else [Resize((8, 8))]
    seen: dict[int, BadSample] = {}

    def note(error: Exception, sample: int) -> Literal["skip"]:
        seen[sample] = BadSample(sample, printable(source.describe(sample)), printable(str(error)))
        return "skip"

    kept = clock()
    with Loader(
        source,
        batch_size=_BATCH,
        epochs=1,
        shuffle=False,
        rank=0,
        world_size=1,
        transforms=transforms,
        dtype=None if isinstance(source, Numeric) else "uint8",
        policy="staging",
        on_error=note,
        report=None,
    ) as loader:
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
            if keep is not None:
                found.write(keep)
    return found


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
    for sample in [sample for sample in seen if sample < found.checked]:
        found.bad[sample] = seen.pop(sample)

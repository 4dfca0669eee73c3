"""The source that a configuration names, opened, and the plan over it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.loader.batch_sampler import DrawnBatches
from penstock.loader.config import DTYPE, LoaderConfig, plan_over
from penstock.loader.dataset import MapDataset
from penstock.loader.fetching import Near, SourceFetcher
from penstock.loader.skips import without_bad
from penstock.loader.source_samples import (
    Mapped,
    MappedWithDraws,
    SourceSamples,
    below,
    is_text,
    kind_of,
    over,
    stored_of,
)
from penstock.loader.transforms import DecodeRaw, Pipeline, compile_pipeline
from penstock.plan import AccessPlan, CutOrder, FullShuffle, Order, Sequential
from penstock.policy import AllExtents, ExtentRuns, Extents
from penstock.policy.merge import runs_of
from penstock.store import (
    FileBacked,
    JsonLines,
    Numeric,
    PackedFiles,
    Selection,
    Source,
    TarShards,
    extents_of,
    open_source,
)
from penstock.store.calls import Calls
from penstock.store.mixing import Mixed, sources_in
from penstock.store.mounts import is_on_network
from penstock.store.object_store import without_secrets
from penstock.store.remote import objects_in
from penstock.store.selection import unselected
from penstock.store.table import ArrowTable
from penstock.units import format_count

# Of how many samples a source is asked at a time where they lie.
_ASKED_AT_ONCE = 1 << 20
# Where samples lie is kept by the run if runs have so many on average: a run takes as much memory as two samples, and a
# look into runs a few steps more.
_SAMPLES_OF_RUN = 8
# What is assumed of a machine that nobody measured; observed reads correct it.
UNKNOWN_BYTES_PER_SECOND = 100e6
UNKNOWN_LATENCY_SECONDS = 1e-3


class Data(NamedTuple):
    """What is read, in words.

    name: in one word, for lines about an epoch. place: of what kind it is, and where.
    classes: names of the labels, as `Source.classes`.
    """

    name: str
    place: str
    classes: tuple[str, ...]


def data_of(source: Source | MapDataset) -> Data:
    """Name a source or data set, by what its samples are made of.

    Its classes are what torchvision calls the names of labels.
    """
    classes, found_below = tuple(getattr(source, "classes", ())), below(source)
    kind = kind_of(unselected(below(source, (SourceSamples, Mapped, MappedWithDraws))))
    if isinstance(found_below, Mixed):
        return Data(kind, repr(found_below), classes)
    found = (getattr(found_below, name, None) for name in ("list_file", "root", "place"))
    path = next((each for each in found if isinstance(each, str)), None)
    name, place = kind, kind
    if isinstance(found_below, Source) and path:
        part = "a part of " if isinstance(found_below, Selection) else ""
        shown = without_secrets(path)
        name, place = os.path.basename(shown), f"{part}{kind} {shown!r}"
    return Data(name, place, classes)


def open_source_of(config: LoaderConfig, calls: Calls, listed: Source | None = None) -> Source | MapDataset:
    """Open what a path names, less the samples to skip; a source or data set is taken as it is.

    Text that gets no transforms becomes a data set of str; so does a mixture of text, by its weights.
    listed: what a path names, if it is open. Raises: what `open_source` and `without_bad` raise.
    """
    source: Source | MapDataset | None = listed
    if source is None and config.paths is not None:
        source = open_source(
            config.paths, refresh=config.refresh, calls=calls, storage_options=config.storage_options
        )
    if source is None:
        assert not isinstance(config.source, (str, os.PathLike)), "what is no path is a source or data set"
        given = config.source
        source = calls.one("a datasets.Dataset", lambda: ArrowTable(given)) if config.is_of_table else given
    if config.skip is not None:
        stored = stored_of(source)
        left = without_bad(source if stored is None else stored, config.skip, calls.one)
        source = left if stored is None else over(source, left)
    if config.transforms and isinstance(unselected(source), JsonLines):
        raise ConfigError(
            f"transforms are of pictures and numbers, and the samples of {source!r} are lines of JSON: leave them out, "
            "and give penstock.store.Manifest(path, file=COLUMN) where the lines name files"
        )
    if config.transforms or not isinstance(source, Source):
        return source
    if not calls.one(f"whether {source!r} is of text", partial(is_text, source)):
        config.check_not_of_samples()
        return source
    samples = SourceSamples(source)
    replace(config, source=samples, storage_options=None, skip=None)  # which refuses what is for bytes alone
    return samples


def stored_for(config: LoaderConfig, dataset: MapDataset, calls: Calls) -> Source | None:
    """Return the source of a data set's samples, whose bytes the loader reads and keeps; None where the data set does.

    It does so of bytes that are on other hosts, and where an argument asks for it.
    Raises: ConfigError where one does and a sample is empty, which nothing can be kept of.
    """
    stored = stored_of(dataset)
    if stored is None or config.why_not_stored:
        return None
    asked = config.asks_for_stored
    if not asked and not any(_is_far(each, calls) for each in sources_in(stored)):
        return None
    if stored.sizes_bytes.all():
        return stored
    if asked:
        empty = stored.describe(int(np.argmin(stored.sizes_bytes)))
        raise ConfigError(
            f"{asked} is given, and {empty} is empty, of which nothing can be kept: leave {asked} out, or that sample, "
            "with source.select(...)"
        )
    return None


def not_predictable(dataset: Source | MapDataset) -> ConfigError:
    """Return what to raise where a data set that reads by itself is to be predicted."""
    place = data_of(dataset).place
    if stored_of(dataset) is None:
        return ConfigError(
            f"what a sample of {place} costs is known to its own code alone, so that nothing can be predicted: give a "
            "folder or a source, with transforms, to have a prediction"
        )
    return ConfigError(
        f"{place} is read by the code that makes its samples, whose costs are not known: policy=, such as "
        'policy="frequency", has the loader read it, and that can be predicted'
    )


def _is_far(source: Source, calls: Calls) -> bool:
    """Return whether a source reads an address, or a file system that is mounted over the network."""
    if objects_in(source) is not None:
        return True
    files = source.files[:1] if isinstance(source, PackedFiles) else ()
    if isinstance(source, FileBacked):
        files = (source.path_of(0),)
    return any(calls.one(path, partial(is_on_network, path)) for path in files)


class Opened(NamedTuple):
    """A source that was opened, and the plan over it."""

    source: Source | MapDataset
    plan: AccessPlan


def open_run(config: LoaderConfig, calls: Calls) -> Opened:
    """Open the source of a configuration and make its plan. Raises: as `open_source_of` and `plan_of`."""
    source = open_source_of(config, calls)
    samples = samples_of(source, calls)
    if isinstance(source, Source):
        _check_source(source, samples)
    return Opened(source, plan_of(config, source, samples))


def _check_source(source: Source, samples: int) -> None:
    sizes, classes = source.sizes_bytes, source.classes
    is_array = isinstance(sizes, np.ndarray)
    if not is_array or sizes.dtype.kind not in "iu" or sizes.shape != (samples,):
        found = f"{sizes.dtype}{list(sizes.shape)}" if is_array else f"of type {type(sizes).__name__}"
        raise ConfigError(
            f"sizes_bytes of {type(source).__name__} is {found}; it is a NumPy array int64[{samples}]"
        )
    if not isinstance(classes, Iterable):
        raise ConfigError(
            f"classes of {type(source).__name__} is {classes!r}; it is a tuple of names, () without any"
        )


def samples_of(source: Source | MapDataset, calls: Calls) -> int:
    """Return how many samples a source has. calls: what it is asked with."""
    return calls.one(f"the length of {kind_of(source)}", lambda: len(source))


def seed_of(config: LoaderConfig) -> int:
    """Return the seed; 0 for a configuration whose seed is still to be drawn, which fixes no order."""
    return 0 if config.seed is None else config.seed


def plan_of(config: LoaderConfig, source: Source | MapDataset, samples: int) -> AccessPlan:
    """Return who reads which of so many samples of a source when.

    Raises: ConfigError if the order is over another number of samples, or an epoch has no step that all ranks share.
    """
    if samples == 0:
        raise ConfigError("source has no samples: give one that has some")
    order, given = config.shuffle, "shuffle"
    if config.batch_sampler is not None:
        sampler, given = config.batch_sampler, "batch_sampler"
        order = sampler.order(samples) if isinstance(sampler, DrawnBatches) else cast(CutOrder, sampler)
    if isinstance(mixture := below(source), Mixed):
        order = _mixed_order(config, mixture)
    elif isinstance(order, bool):
        order = FullShuffle(samples, seed_of(config)) if order else Sequential(samples)
    elif order.samples != samples:
        raise ConfigError(
            f"{given} is an order over {format_count(order.samples, 'sample')} and the source has {samples:,}: make "
            "it for as many"
        )
    plan = plan_over(order, config)
    plan.check_equal_steps()
    return plan


def _mixed_order(config: LoaderConfig, source: Mixed) -> Order:
    if config.batch_sampler is not None or not isinstance(config.shuffle, bool):
        given, pack = "shuffle", ""
        if config.batch_sampler is not None:
            given, pack = "batch_sampler", "; for batches of equally many tokens, mix PackedDocuments of each"
        raise ConfigError(
            f"{given} is given with a mixture, whose weights say which source comes next: leave it out, or give the "
            f"sources end to end without weights, such as ConcatDataset makes of data sets{pack}"
        )
    return source.order(
        shuffle=config.shuffle,
        seed=seed_of(config),
        batch_size=config.batch_size or 1,
        drop_last=config.drop_last,
    )


def pipeline_of(config: LoaderConfig, source: Source, *, runs: bool) -> Pipeline:
    """Return the compiled transforms of a configuration; without any, what a source of numbers suggests.

    runs: as of `compile_pipeline`. Raises: ConfigError if there are no transforms, or they cannot follow each other.
    """
    transforms, dtype = config.transforms, config.dtype
    if not transforms and isinstance(source, Numeric):
        numbers = source.numbers
        transforms, dtype = [DecodeRaw(numbers.dtype, numbers.shape)], dtype or numbers.batch_dtype
    if not transforms:
        of_fields = ", or give penstock.loader.TarSamples, whose samples have members as fields"
        raise ConfigError(
            f"transforms is empty, and the samples of {data_of(source).place} are bytes: name at least one, for "
            "example Resize(...) and ToTensor() for pictures, DecodeRaw(dtype, shape) for numbers"
            + (of_fields if isinstance(unselected(source), TarShards) else "")
        )
    return compile_pipeline(transforms, seed_of(config), dtype or DTYPE, config.layout, runs=runs)


def reader_of(source: Source) -> SourceFetcher:
    """Return what reads samples from a store that nobody measured, those together that lie near each other."""
    extents = all_extents(source, Calls())
    if extents is None:
        return SourceFetcher(source, {})

    def price(requests: float, nbytes: float) -> float:
        return requests * UNKNOWN_LATENCY_SECONDS + nbytes / UNKNOWN_BYTES_PER_SECOND

    return SourceFetcher(source, {}, Near(extents, price, UNKNOWN_BYTES_PER_SECOND))


def all_extents(source: Source, calls: Calls) -> AllExtents | None:
    """Return where all samples lie, where the source gives them. calls: what it is asked with."""
    samples, sizes = len(source), source.sizes_bytes
    lengths = sizes
    runs: list[NDArray[np.int64]] = []
    table: NDArray[np.int64] | None = None
    for first in range(0, samples, _ASKED_AT_ONCE):
        part = slice(first, min(first + _ASKED_AT_ONCE, samples))
        ids = np.arange(part.start, part.stop)
        found = calls.one(f"where the samples of {source!r} lie", partial(extents_of, source, ids))
        if found is None:
            return None
        if table is None:
            runs.append(runs_of(found[0].units, found[0].offsets, first))
        else:
            table[part] = found[0].table
        if lengths is sizes and not np.array_equal(found[0].lengths, lengths[part]):
            lengths = lengths.copy()
        if lengths is not sizes:
            lengths[part] = found[0].lengths
        if table is None and _SAMPLES_OF_RUN * sum(map(len, runs)) > part.stop:
            table = np.empty((samples, 2), np.int64)
            table[: part.stop] = ExtentRuns(np.concatenate(runs), lengths).of(np.arange(part.stop)).table
    if table is not None:
        return Extents(table[:, 0], table[:, 1], lengths)
    return ExtentRuns(np.concatenate(runs), lengths) if samples else None

"""What a loader runs on: the source opened, the threads' work, the memory shared out, the machine assumed."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError, WaitTimeout
from penstock.flow.channel import Reducers
from penstock.flow.cpus import cpu_limit, default_readers, memory_limit_bytes, ranks_on_this_host
from penstock.flow.staging import Field, slot_bytes
from penstock.flow.work import Decoder, Fetcher
from penstock.loader.batch_sampler import DrawnBatches
from penstock.loader.beside import Beside
from penstock.loader.budget import MemoryBudget, share_memory
from penstock.loader.collating import CollatingDecoder
from penstock.loader.config import DTYPE, HOST, HOSTS, JOBS, LoaderConfig, check_machine, plan_over
from penstock.loader.crops import CropDecoder, CropFetcher, KeptCrops
from penstock.loader.dataset import DatasetFetcher, MapDataset, SampleDecoder
from penstock.loader.decode_servers import connect, served_by
from penstock.loader.fetching import Near, SourceFetcher, located
from penstock.loader.front_end import FrontEnd
from penstock.loader.global_draws import keeping_global_states
from penstock.loader.image_mixing import MixingDecoder, mixed_fields
from penstock.loader.images import ImageDecoder, Masks, image_fields, picture_bytes
from penstock.loader.jobs import JobsOfHost
from penstock.loader.jobs_pixels import JobsCropDecoder, JobsPictureDecoder
from penstock.loader.keep import AUTO, DECODED, auto_form, check_keep, crop_form
from penstock.loader.local_disk import (
    Content,
    Disk,
    KeptOnDisks,
    check_space,
    content_of,
    disk_classes,
    has_space,
    kept_on,
    open_disks,
)
from penstock.loader.optional import Defaults
from penstock.loader.pickling import pickled
from penstock.loader.pictures import KeptPictures, PictureDecoder, WholePictures, decoded_form, front_of_crops
from penstock.loader.pixels_on_disk import describe_form
from penstock.loader.probing import from_first, raise_interrupt
from penstock.loader.processes import THREADS_A_PROCESS, ProcessPlan
from penstock.loader.ranks_memory import RanksMemory
from penstock.loader.row_code import row_code
from penstock.loader.rows import KeepingFetcher, RowPickler, row_bytes, warn_unless_same
from penstock.loader.skips import without_bad
from penstock.loader.transforms import DecodeRaw, Pipeline, compile_pipeline
from penstock.loader.transforms.crops import CropPass
from penstock.loader.transforms.joint import MaskPass
from penstock.loader.transforms.memory import DecodeMemory
from penstock.loader.transforms.mixing import Mixing
from penstock.loader.transforms.sink import ByteValues
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, CutOrder, FullShuffle, Order, Sequential
from penstock.policy import Extents, Placement, StagingLimits
from penstock.policy.decisions import OWN_BYTES
from penstock.policy.forms import CropForm, with_disks
from penstock.policy.loading import Job, LoadingPolicy, Staging
from penstock.policy.placement import Shared
from penstock.policy.runnable import placement_of, shared_by
from penstock.store import MemoryTier, Numeric, Selection, Source, extents_of, labels_of, open_source
from penstock.store.calls import Calls
from penstock.store.mixing import Mixed, sources_in
from penstock.store.object_store import without_secrets
from penstock.store.pairs import masks_of
from penstock.store.remote import objects_in
from penstock.store.selection import unselected
from penstock.store.table import ArrowTable
from penstock.store.write_behind import WriteBehind
from penstock.units import format_bytes, format_count, parse_bytes

# Of samples that wait to be written to a disk; and which share of the memory they may have.
_MOST_QUEUED_BYTES, _QUEUED_SHARE = 256 << 20, 1 / 16

# Of decoded pictures, and of a data set's samples, the first say how large they are: disks have so many times that.
_STRAY = 2.0

# Small steps share a slot up to these: more gain little. The eight slots that are usual take a quarter of the memory at
# most, and half as much where samples are kept in the rest.
_STAGED_TOGETHER, _STAGED_TOGETHER_BYTES = 4096, 16 << 20
_STAGED_SHARE, _STAGED_SHARE_BESIDE_TIERS = 1 / 32, 1 / 64

# Of how many samples a source is asked at a time where they lie.
_ASKED_AT_ONCE = 1 << 20

# Samples to try where the first cannot be had and its shape is wanted.
_PROBES = 16

# Reads of a remote store that may be wanted at once. More threads cost more than they bring: docs/decisions/0024.
_REMOTE_READERS = 128

# Samples beside the first that show how long those of unequal fields are.
_LENGTHS = 7
# Samples that are made twice, to see whether they are the same.
_TWICE = 2

# What is assumed of a machine that nobody measured; observed reads correct it.
_UNKNOWN_BYTES_PER_SECOND = 100e6
_UNKNOWN_LATENCY_SECONDS = 1e-3
_MEMORY_BYTES_PER_SECOND = 5e9


class Data(NamedTuple):
    """What is read, in words.

    name: in one word, for lines about an epoch. place: of what kind it is, and where.
    classes: names of the labels, as `Source.classes`.
    """

    name: str
    place: str
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """A rank's part of a run, before any thread is started.

    sizes_bytes: int64[samples], as stored; zeros for a data set, which does not tell.
    pipeline: what the decoder does to each sample; None for a data set, whose own code reads and decodes.
    machine: with the memory budget as its storage classes.
    is_measured: whether the machine was given, rather than guessed until reads have been observed.
    cpus: how many threads can compute at once.
    decoders_because, readers_because: why there are as many decode and reading threads, for people.
    machine_file: that the machine was read from; None where an object or none was given.
    seed: of the order, the policy and every random transform.
    extents: of all samples, where the source gives them.
    draws_seed: of the random numbers that change samples; None where nothing draws any.
    processes: what worker processes are started with; None where threads do the work.
    held: by tier, samples that an earlier run left on a disk.
    byte_values: what a device makes of images, which are bytes in slots; None where slots have what the caller gets.
    collates: whether collate_fn makes the batches.
    form: in which memory, or disks, too, keep samples, if not as they are stored.
    jobs_form: in which the jobs of a host keep them, besides.
    sharing: what ranks of a host keep for each other; None where each reads for itself.
    """

    plan: AccessPlan
    rank: int
    sizes_bytes: NDArray[np.int64]
    data: Data
    fetcher: Fetcher
    decoder: Decoder
    pipeline: Pipeline | None
    budget: MemoryBudget
    machine: Machine
    is_measured: bool
    policy: LoadingPolicy
    placement: Placement
    limits: StagingLimits
    cpus: int
    decoders_because: str
    source: Source | MapDataset
    readers_because: str = ""
    machine_file: str | None = None
    works_in_own_thread: bool = False
    seed: int = 0
    extents: Extents | None = None
    draws_seed: int | None = None
    processes: ProcessPlan | None = None
    held: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    byte_values: ByteValues | None = None
    collates: bool = False
    form: CropForm | None = None
    jobs_form: CropForm | None = None
    sharing: Sharing | None = None

    @property
    def dtype_in_slot(self) -> str | None:
        """Number format of images in slots; None for a data set."""
        if self.byte_values is not None:
            return "uint8"
        return None if self.pipeline is None else self.pipeline.dtype

    @property
    def kept_bytes(self) -> int:
        """What memory keeps for later epochs, at most."""
        if not self.budget.tier_bytes:
            return 0
        kept = self.placement.samples_in(1)
        return int(self.sizes_bytes[kept].sum()) if self.form is None else self.form.bytes_for(kept.size)

    @property
    def beside(self) -> Beside | None:
        """What the decoder has beside slots; None where that is nothing."""
        return self.decoder.beside if isinstance(self.decoder, SampleDecoder) else None

    @property
    def calls_python(self) -> bool:
        """Whether a user's own code runs for each sample, in threads."""
        return self.processes is None and self._has_python

    @property
    def may_switch(self) -> bool:
        """Whether worker processes could take over: threads call a data set, and their number follows measurement."""
        return isinstance(self.fetcher, DatasetFetcher) and self.limits.most_decoders > 0 and self.cpus > 1

    @property
    def _has_python(self) -> bool:
        return self.pipeline is None or self.pipeline.calls_python


def open_source_of(config: LoaderConfig, calls: Calls, listed: Source | None = None) -> Source | MapDataset:
    """Open what a path names, less the samples to skip; a source or data set is taken as it is.

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
    return source if config.skip is None else without_bad(source, config.skip, calls.one)


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
    return calls.one(f"the length of {type(source).__name__}", lambda: len(source))


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
    if isinstance(source, Mixed):
        order = _mixed_order(config, source)
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
        given = "shuffle" if config.batch_sampler is None else "batch_sampler"
        raise ConfigError(
            f"{given} is given with a mixture, whose weights say which source comes next: leave it out, or give the "
            "sources end to end without weights, such as ConcatDataset makes of data sets"
        )
    return source.order(
        shuffle=config.shuffle,
        seed=seed_of(config),
        batch_size=config.batch_size or 1,
        drop_last=config.drop_last,
    )


def read_machine(machine: Machine | str | os.PathLike[str] | None, calls: Calls) -> Machine | None:
    """Return a machine, read from its file where a path is given.

    calls: what the file is read with.
    Raises: DataError if the file cannot be read; ConfigError naming the file and the field that is wrong, or what is
        neither a machine nor a path.
    """
    if machine is None or isinstance(machine, Machine):
        return machine
    check_machine(machine)
    try:
        return Machine.from_toml(calls.one(f"machine {machine!r}", lambda: Path(machine).read_text("utf-8")))
    except WaitTimeout:
        raise
    except OSError as error:
        raise DataError(f"machine: {error}; penstock calibrate writes such a file") from error
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(machine)}: {error}") from error
    except ValueError as error:  # not UTF-8, or no path
        raise DataError(f"machine: {machine!r} cannot be read as text: {error}") from error


def set_up(
    config: LoaderConfig,
    front_end: FrontEnd,
    calls: Calls,
    *,
    opened: Opened | None = None,
    runs: bool = True,
) -> Setup:
    """Open the source, compile the transforms, share the memory out, and open what local disks keep.

    calls: what the source and its first sample are read with. opened: source and plan, if that was done before.
    runs: False for a prediction. Then nothing is read but the source's listing, and the first sample is taken for a
        photograph; a data set cannot be predicted.

    Raises: ConfigError naming the argument that cannot work; DataError if the source or a disk cannot be opened.
    """
    if not runs and config.is_of_data_set:
        raise not_predictable(type(config.source).__name__)
    with ExitStack() as closing:
        setup = finish(drafted(config, front_end, calls, closing, opened=opened, runs=runs))
        closing.pop_all()  # from here on the fetcher closes what was opened
    return setup


@dataclass(frozen=True, slots=True)
class Sharing:
    """What ranks of a host, or of the job, keep for each other.

    ranks: all that do, this one among them, ascending. tier: the memory of this one. peers: of the others.
    Both None in a prediction.
    """

    shared: Shared
    ranks: tuple[int, ...]
    tier: MemoryTier | None = None
    peers: RanksMemory | None = None


class Draft(NamedTuple):
    """What is known before it is decided what is kept: the arguments, what was opened, and how memory is shared out."""

    config: LoaderConfig
    runs: bool
    opened: Opened
    rank: int
    cpus: int
    threads: _Threads
    samples: _Samples
    steps: int
    disks: list[Disk]
    queue_bytes: int
    budget: MemoryBudget
    is_measured: bool
    on: Machine
    form: CropForm | None


def drafted(
    config: LoaderConfig,
    front_end: FrontEnd,
    calls: Calls,
    closing: ExitStack,
    *,
    opened: Opened | None,
    runs: bool = True,
) -> Draft:
    """Do the first part of `set_up`. closing: closes the disks that are opened."""
    source, plan = opened or open_run(config, calls)
    machine = read_machine(config.machine, calls)
    memory_bytes = _memory_bytes(config.memory, is_taken=runs)
    policy, rank = config.loading_policy, config.rank or 0
    classes, contents = _disks_of(config, machine, source, policy, front_end, calls)
    cpus, cpu_reason = cpu_limit()
    threads = _threads(config, machine, cpus, cpu_reason, is_remote=any(map(objects_in, sources_in(source))))
    probes = plan.stream(rank, 0, 0, _PROBES).tolist()
    samples = (
        _of_source(
            source,
            config,
            plan,
            probes,
            calls,
            front_end,
            _costs(machine, plan, threads),
            memory_bytes,
            runs=runs,
        )
        if isinstance(source, Source)
        else _of_data_set(source, config, plan, probes, calls, front_end)
    )
    sizes_bytes, local_batch = samples.sizes_bytes, plan.max_local_batch(rank)
    share = _STAGED_SHARE if isinstance(policy, Staging) else _STAGED_SHARE_BESIDE_TIERS
    steps = _steps_of_a_slot(config, samples.slot_bytes(plan, rank), local_batch, int(share * memory_bytes))
    queue_bytes = min(_MOST_QUEUED_BYTES, int(memory_bytes * _QUEUED_SHARE)) if classes(1) else 0
    budget = share_memory(
        memory_bytes - queue_bytes,
        slot_bytes=samples.slot_bytes(plan, rank, steps),
        local_batch=local_batch,
        readers=threads.readers,
        largest_sample_bytes=max(int(sizes_bytes.max(initial=0)), samples.served_bytes),
        keep_bytes=_keep_bytes(config, policy, machine, samples),
        picture_bytes=samples.picture_bytes,
        large_picture_bytes=samples.large_picture_bytes,
        decoders=max(threads.decoders, threads.most_decoders),
        # One more for the batch that the training has, which lies in its slot unless a function made it.
        most_slots=0 if config.prefetch is None else config.prefetch + (config.collate_fn is None),
    )
    if runs and config.share == JOBS:
        budget = replace(budget, tier_bytes=0, jobs_bytes=budget.tier_bytes)
    without_disks = with_memory(machine, budget, threads.decoders, plan.ranks)
    form, storage, content = _form_and_disks(samples, budget, without_disks, contents, classes)
    disks = [Disk(each) for each in storage]
    if runs and content is not None:
        # What this run may use of memory, and does not take itself, is the page cache's.
        cached = memory_limit_bytes() // ranks_on_this_host() - memory_bytes
        is_new = config.refresh == "full"
        disks = open_disks(storage, content, rank, calls, closing, is_new=is_new, page_cache_bytes=cached)
    on = with_memory(machine, budget, threads.decoders, plan.ranks, [each.storage for each in disks])
    is_measured = machine is not None
    opened = Opened(source, plan)
    return Draft(
        config,
        runs,
        opened,
        rank,
        cpus,
        threads,
        samples,
        steps,
        disks,
        queue_bytes,
        budget,
        is_measured,
        on,
        form,
    )


def job_among(
    draft: Draft,
    ranks: Sequence[int],
    tiers_bytes: Sequence[int],
    first: tuple[int, int] = (0, 0),
    held: Mapping[int, NDArray[np.int64]] | None = None,
) -> Job:
    """Return what a policy may know of ranks that keep samples for each other, of a run that begins at (epoch, step).

    tiers_bytes: that each of them has for it, in memory and on disks. held: by rank, what is on its disks.
    """
    storage, plan = draft.on.storage, draft.opened.plan
    tiers = (
        replace(tier, capacity_bytes=max(1, nbytes))
        for tier, nbytes in zip(storage[1:], tiers_bytes, strict=False)
    )
    on = replace(draft.on, storage=(storage[0], *tiers))
    sizes_bytes, seed = draft.samples.sizes_bytes, seed_of(draft.config)
    return Job(plan, sizes_bytes, on, seed, draft.rank, sharing=ranks, first=first, held=held)


def tiers_of(draft: Draft) -> list[int]:
    """Return the bytes that a rank can keep, in memory and on disks."""
    return [draft.budget.tier_bytes, *(disk.storage.capacity_bytes for disk in draft.disks)]


def without_disks(draft: Draft) -> Draft:
    """Return the same without local disks."""
    storage = draft.on.storage
    return draft._replace(disks=[], on=replace(draft.on, storage=storage[: len(storage) - len(draft.disks)]))


def finish(draft: Draft, sharing: Sharing | None = None) -> Setup:
    """Do the second part of `set_up`. sharing: with other ranks; None where they do not meet."""
    config, (source, plan), rank, threads, samples = (
        draft.config,
        draft.opened,
        draft.rank,
        draft.threads,
        draft.samples,
    )
    budget, on, policy, sizes_bytes = draft.budget, draft.on, config.loading_policy, samples.sizes_bytes
    if (
        sharing is None and config.share in (HOST, HOSTS) and plan.ranks > 1
    ):  # of one host, or each of its own
        ranks = range(plan.ranks)
        shared = shared_by(policy, job_among(draft, ranks, tiers_of(draft)), [rank])
        sharing = Sharing(replace(shared, is_mapped=config.share == HOST), tuple(ranks))
    if sharing is None:
        job = Job(plan, sizes_bytes, on, seed_of(config), rank, draft.form)
        placement = placement_of(policy, job, rank)
    else:
        placement = sharing.shared.kept[rank].as_placement(plan.samples)
    first, on_disks = (
        len(on.storage) - len(draft.disks),
        draft.form if draft.form is not None and draft.form.is_on_disks else None,
    )
    kept = kept_on(draft.disks, first, placement, sizes_bytes, draft.queue_bytes, on_disks)
    fetcher, decoder, extents = samples.parts(budget, on, kept, placement, sharing)
    return Setup(
        plan=plan,
        rank=rank,
        sizes_bytes=sizes_bytes,
        data=data_of(source),
        fetcher=fetcher,
        decoder=decoder,
        pipeline=samples.pipeline,
        budget=budget,
        machine=on,
        is_measured=draft.is_measured,
        policy=policy,
        placement=placement,
        held=kept.held,
        form=draft.form,
        jobs_form=samples.form if _pixels_bytes(budget, sizes_bytes, samples.form) else None,
        sharing=sharing,
        limits=StagingLimits(
            budget.slots,
            threads.readers,
            threads.decoders,
            samples.stored_for(budget.undecoded_bytes),
            threads.most_decoders,
            draft.steps,
            _STAGED_TOGETHER_BYTES if samples.reads_in_place else OWN_BYTES,
            loads_all=config.collate_fn is not None,
            most_readers=threads.most_readers,
            reads_ahead=bool(config.decode_servers),
            most_slots=_most_slots(config, budget),
        ),
        cpus=draft.cpus,
        decoders_because=threads.decoders_because,
        source=source,
        readers_because=threads.readers_because,
        works_in_own_thread=config.decoders == 0,
        machine_file=config.machine if isinstance(config.machine, str) else None,
        seed=seed_of(config),
        extents=extents,
        draws_seed=samples.draws_seed,
        processes=samples.processes,
        byte_values=samples.byte_values,
        collates=config.collate_fn is not None,
    )


#: Returns the disks that samples of so many bytes may be kept on; what they keep, given arguments of `content_of`.
_Classes = Callable[[int], list[StorageClass]]
_Contents = Callable[..., Content]


def _disks_of(
    config: LoaderConfig,
    machine: Machine | None,
    source: Source | MapDataset,
    policy: LoadingPolicy,
    front_end: FrontEnd,
    calls: Calls,
) -> tuple[_Classes, _Contents]:
    """Return which disks may keep samples, and what of them."""

    def classes(total_bytes: int) -> list[StorageClass]:
        found = disk_classes(config.local_disk, machine, total_bytes)
        # Ranks read each other's files; and who can write to a store of the user's own could have rows run any code.
        is_any = config.share is None and isinstance(source, Source)
        return found if is_any else [each for each in found if each.backend == "filesystem"]

    none: _Classes = lambda total_bytes: []  # noqa: E731
    if isinstance(policy, Staging) or config.share == JOBS:
        return none, content_of
    if isinstance(source, Source):
        return classes, partial(content_of, source)
    if not config.cache or not classes(1):
        return none, content_of
    place = type(source).__name__
    try:
        code = calls.one(
            f"the code of {place}", lambda: row_code(source, config.optional, front_end.reducers)
        )
    except ConfigError as error:
        calls.report(f"no disk keeps rows of {place}: {error}")
        return none, content_of
    sizes_bytes = np.full(len(source), -1)
    return classes, lambda *_: Content(code.fingerprint, sizes_bytes, code.about, code.changed_since)


def _most_slots(config: LoaderConfig, budget: MemoryBudget) -> int:
    """Return how many slots may come to be used; 0 where their number is fixed, as it is where a run is predicted."""
    if config.machine is not None or config.prefetch is not None or config.decoders == 0:
        return 0
    return min(_MORE_SLOTS * budget.slots, budget.staging_bytes // max(1, budget.slot_bytes))


def _form_and_disks(
    samples: _Samples,
    budget: MemoryBudget,
    on: Machine,
    contents: _Contents,
    classes: _Classes,
) -> tuple[CropForm | None, list[StorageClass], Content | None]:
    """Return in which form samples are kept, on which disks, and what these keep; None without any.

    on: the machine of the run, without disks. contents, classes: as `_disks_of` returns them.
    """
    form, sizes_bytes = samples.form if budget.tier_bytes else None, samples.sizes_bytes
    disks = classes(int((1.0 if samples.pipeline is not None else _STRAY) * sizes_bytes.sum()))
    if not disks:
        return form, [], None
    check_space(disks, int(sizes_bytes.max(initial=0)))
    if form is not None and all(each.backend == "filesystem" for each in disks):
        more = _STRAY if form.is_decoded else 1.0
        larger = classes(int(more * form.bytes_for(sizes_bytes.size)))
        in_form = with_disks(form, larger, sizes_bytes, on)
        if in_form.is_on_disks:
            content = contents(samples.pixels, -1 if form.is_decoded else form.crop_bytes)
            if has_space(larger, content.fingerprint):
                return in_form, larger, content
    return form, disks, contents(None)


class _Samples(NamedTuple):
    """What is known of the samples before the memory is shared out.

    fields: of a batch. picture_bytes, large_picture_bytes: see `share_memory`; 0 for a data set.
    parts: makes what fetches and decodes them of memory, machine and disks, and where they lie.
    draws_seed, processes, byte_values, form: see `Setup`. beside_bytes: of a sample, about, that are not in its slot.
    served_bytes: of one that a decode server has decoded; 0 without any. pixels: of `describe_form`.
    """

    sizes_bytes: NDArray[np.int64]
    fields: tuple[Field, ...]
    parts: Callable[
        [MemoryBudget, Machine, KeptOnDisks, Placement, Sharing | None],
        tuple[Fetcher, Decoder, Extents | None],
    ]
    pipeline: Pipeline | None = None
    picture_bytes: int = 0
    large_picture_bytes: int = 0
    draws_seed: int | None = None
    processes: ProcessPlan | None = None
    beside_bytes: int = 0
    byte_values: ByteValues | None = None
    form: CropForm | None = None
    served_bytes: int = 0
    pixels: Mapping[str, object] | None = None

    def stored_for(self, undecoded_bytes: int) -> int:
        """Return the bytes of as many samples, as they are stored, as memory of so many bytes has space for."""
        mean_bytes = float(self.sizes_bytes.mean())
        return max(1, int(undecoded_bytes * mean_bytes / max(mean_bytes, self.served_bytes, 1)))

    def slot_bytes(self, plan: AccessPlan, rank: int, steps: int = 1) -> int:
        """Return what a slot for so many steps takes, with what their batches have beside it."""
        in_slot = slot_bytes(self.fields, steps * plan.max_local_batch(rank))
        return in_slot + steps * self.beside_bytes * _usual_batch(plan, rank)

    @property
    def reads_in_place(self) -> bool:
        """Whether bytes are read to their place in the batch."""
        return self.pipeline is not None and self.pipeline.reads_in_place


def _of_source(
    source: Source,
    config: LoaderConfig,
    plan: AccessPlan,
    probes: list[int],
    calls: Calls,
    front_end: FrontEnd,
    machine: Machine | None,
    memory_bytes: int,
    *,
    runs: bool,
) -> _Samples:
    """See `set_up`. probes: samples to look at. machine: with the ranks and decode threads of the run."""
    whole = _pipeline(source, config, probes, calls if runs else None)
    pipeline, byte_values = _split(whole, config, front_end, has_masks=masks_of(source) is not None)
    sizes_bytes, labels = source.sizes_bytes, labels_of(source.labels, plan.samples)
    first = _first_picture(source, probes[0], calls) if runs else None
    masks = _masks(source, pipeline)
    processes = _decoding_processes(config, pipeline) if config.is_in_processes else None
    mixing = None if config.mix_images is None else _mixing(config, pipeline, labels, masks)
    crops, form = _crops(
        config,
        pipeline,
        plan,
        masks,
        partial(decoded_form, pipeline, sizes_bytes, first),
        partial(auto_form, machine, memory_bytes, sizes_bytes),
    )

    def parts(
        budget: MemoryBudget,
        machine: Machine,
        disks: KeptOnDisks,
        placement: Placement,
        sharing: Sharing | None,
    ) -> tuple[Fetcher, Decoder, Extents | None]:
        extents = _all_extents(source, calls)
        near = None if extents is None else _near(extents, machine, plan.ranks, sizes_bytes)
        tiers: dict[int, MemoryTier | WriteBehind] = dict(disks.tiers)
        count = 1 if processes is None else processes.count
        how = pipeline, labels, source.describe, DecodeMemory(budget.decoding_bytes), masks, count
        if budget.tier_bytes and runs and form is not None:
            made = form, pipeline, crops, budget.tier_bytes, placement, plan.epochs, disks
            fetcher, decoder = _kept_in_form(*made, (source, tiers, near), how)
        else:
            if sharing is not None and sharing.tier is not None:
                tiers[1] = sharing.tier
            elif budget.tier_bytes and runs:
                tiers[1] = MemoryTier(budget.tier_bytes)
            peers = None if sharing is None else sharing.peers
            jobs = _jobs_of_host(source, budget, form, pipeline) if budget.jobs_bytes else None
            near = near if jobs is None else None  # a sample is taken, or read, by itself
            reads = source, tiers, near, disks.copied, peers, jobs
            if config.decode_servers and runs:
                servers = connect(config.decode_servers, pipeline, source, plan.epochs, calls.report)
                fetcher, decoder = served_by(servers, pipeline, reads, how)
            else:
                fetcher, decoder = SourceFetcher(*reads), _jobs_decoder(jobs, form, pipeline, crops, how)
        return fetcher, decoder if mixing is None else MixingDecoder(decoder, mixing), extents

    sizes_of_pictures = sizes_bytes if masks is None else masks.front_bytes
    picture, large_picture = picture_bytes(pipeline, sizes_of_pictures, first)
    fields, is_random = image_fields(pipeline, labels, masks), pipeline.is_random or mixing is not None
    if mixing is not None:
        fields = mixed_fields(fields[0], mixing)
    return _Samples(
        sizes_bytes,
        fields,
        parts,
        whole,
        picture,
        large_picture,
        pipeline.seed if is_random else None,
        processes,
        byte_values=byte_values,
        form=form,
        served_bytes=_served_bytes(config, pipeline, masks),
        pixels=None if form is None else describe_form(form, pipeline),
    )


def _served_bytes(config: LoaderConfig, pipeline: Pipeline, masks: Masks | None) -> int:
    """Return what a sample takes that a decode server has decoded; 0 without servers.

    Raises: ConfigError where they could not make what this pipeline begins with.
    """
    if not config.decode_servers:
        return 0
    if masks is not None:
        raise ConfigError(
            "decode_servers are given, and images have masks, which they do not decode: leave them out"
        )
    if pipeline.front is None:
        raise ConfigError(
            "decode_servers are given, and the transforms do not begin with steps of Penstock that fix the size of a "
            "picture, such as RandomResizedCrop(224): put these first, or leave decode_servers out"
        )
    return math.prod(pipeline.front.shape)


def _kept_in_form(
    form: CropForm,
    pipeline: Pipeline,
    crops: CropPass | None,
    capacity_bytes: int,
    placement: Placement,
    epochs: int,
    disks: KeptOnDisks,
    reads: tuple[Any, ...],
    how: tuple[Any, ...],
) -> tuple[SourceFetcher, ImageDecoder]:
    """Return what fetches and decodes where memory, and disks perhaps, keep decoded pictures, or crops.

    reads, how: arguments of a `SourceFetcher`, and of an `ImageDecoder`.
    """
    form = replace(form, is_on_disks=disks.is_pixels)
    if form.is_decoded:
        pictures = KeptPictures(form, pipeline, capacity_bytes, placement, disks)
        return CropFetcher(pictures, *reads), PictureDecoder(pictures, *how)
    assert crops is not None, "they are of that form"
    crops.prepare()
    kept = KeptCrops(form, crops, capacity_bytes, placement, epochs, disks)
    return CropFetcher(kept, *reads), CropDecoder(kept, crops, *how)


def _pixels_bytes(budget: MemoryBudget, sizes_bytes: NDArray[np.int64], form: CropForm | None) -> int:
    """Return what the jobs of a host have for pixels beside samples as stored; 0 where that is not one picture's."""
    left_bytes = budget.jobs_bytes - int(sizes_bytes.sum())
    return left_bytes if form is not None and left_bytes >= form.crop_bytes else 0


def _jobs_of_host(
    source: Source, budget: MemoryBudget, form: CropForm | None, pipeline: Pipeline
) -> JobsOfHost:
    """Return what the jobs of a host keep: samples as stored, and as many crops or pictures as find space then."""
    pixels, pixels_bytes = None, _pixels_bytes(budget, source.sizes_bytes, form)
    if form is not None and pixels_bytes:
        each_bytes = int(_STRAY * form.crop_bytes) if form.is_decoded else form.crop_bytes
        pixels = JobsOfHost(content_of(source, describe_form(form, pipeline), each_bytes), pixels_bytes)
    try:
        return JobsOfHost(content_of(source, None), budget.jobs_bytes - pixels_bytes, pixels)
    except BaseException:
        if pixels is not None:
            pixels.close()
        raise


def _jobs_decoder(
    jobs: JobsOfHost | None,
    form: CropForm | None,
    pipeline: Pipeline,
    crops: CropPass | None,
    how: tuple[Any, ...],
) -> ImageDecoder:
    """Return what decodes, with what other jobs of the host have decoded where they share that."""
    if jobs is None or jobs.pixels is None or form is None:
        return ImageDecoder(*how)
    if form.is_decoded:
        return JobsPictureDecoder(jobs.pixels, WholePictures(pipeline), *how)
    assert crops is not None, "they are of that form"
    crops.prepare()
    return JobsCropDecoder(jobs.pixels, crops, *how)


def _split(
    pipeline: Pipeline, config: LoaderConfig, front_end: FrontEnd, *, has_masks: bool
) -> tuple[Pipeline, ByteValues | None]:
    """Return what is done to images here, and what a device makes of their bytes, where it does.

    Raises: ConfigError where it is asked to and cannot.
    """
    device = front_end.device
    if device is None or device.finishes is False:
        return pipeline, None
    found = None if has_masks or config.mix_images is not None else pipeline.split()
    if found is not None:
        return found
    if device.finishes:
        raise ConfigError(
            "normalize_on_device is True, and images are no bytes before the last steps: it takes Penstock's own "
            "transforms with a float dtype, without callables, masks or mix_images; leave it out"
        )
    return pipeline, None


def _decoding_processes(config: LoaderConfig, pipeline: Pipeline) -> ProcessPlan:
    """Return what worker processes are started with that decode what this process reads.

    Raises: ConfigError where no step is Python code, or one cannot be pickled.
    """
    if not pipeline.calls_python:
        raise ConfigError(
            f"workers is {config.workers}, and no step of transforms is Python code, which processes are for: leave "
            "workers out, as Penstock's own steps run in threads without the interpreter's lock"
        )
    pickled(config.transforms, "transforms", {})
    return process_plan(None, config, {}, int(config.workers))


def _costs(machine: Machine | None, plan: AccessPlan, threads: _Threads) -> Machine | None:
    """Return a machine with the ranks and decode threads of the run."""
    return machine and replace(machine, ranks=plan.ranks, decode_threads=max(1, threads.decoders))


def _crops(
    config: LoaderConfig,
    pipeline: Pipeline,
    plan: AccessPlan,
    masks: Masks | None,
    decoded: Callable[[], CropForm],
    auto: Callable[..., CropForm | None],
) -> tuple[CropPass | None, CropForm | None]:
    """Return what makes crops that memory keeps, and their form, where keep= asks for some. Raises: ConfigError.

    decoded, auto: `decoded_form` and `auto_form`, for this run.
    """
    if check_keep(config.keep) is None:
        return None, None
    if config.keep == AUTO:
        if masks is not None or config.is_in_processes or pipeline.front is None:
            return None, None
        crops = CropPass(pipeline)
        picture_bytes = 0 if front_of_crops(pipeline) is None else decoded().crop_bytes
        how = {"is_random": crops.is_random, "picture_bytes": picture_bytes}
        return crops, auto(crops.shape, plan.epochs, **how)
    if masks is not None or config.is_in_processes:
        why = (
            f"workers is {config.workers}, and processes keep"
            if masks is None
            else "images have masks, which have"
        )
        raise ConfigError(f"keep is {config.keep!r}, and {why} no crops: leave one of them out")
    if config.keep == DECODED:
        return None, decoded()
    crops = CropPass(pipeline)
    form = crop_form(config.keep, crops.shape, plan.ranks, is_random=crops.is_random)
    if config.share == JOBS and form.epochs:
        raise ConfigError(
            f'keep is {config.keep!r} and share "{JOBS}", and random crops are of one job\'s seed: give '
            f'keep="{DECODED}"'
        )
    return crops, form


def _masks(source: Source, pipeline: Pipeline) -> Masks | None:
    """Return what writes the masks of a source that has some. Raises: ConfigError as `MaskPass` and `masks_of`."""
    found = masks_of(source)
    if found is None:
        return None
    return Masks(found.image_bytes, MaskPass(pipeline, found.dtype, found.fill), found.describe)


def _mixing(
    config: LoaderConfig,
    pipeline: Pipeline,
    labels: NDArray[Any] | dict[str, NDArray[Any]],
    masks: Masks | None,
) -> Mixing:
    """Return what mixes batches. Raises: ConfigError for samples that are no images with one label each."""
    if masks is not None or isinstance(labels, dict) or labels.ndim != 1 or labels.dtype != np.int64:
        raise ConfigError(
            "mix_images is given, and samples do not have one label each, which is mixed with images: leave it out"
        )
    if not pipeline.is_visual or len(pipeline.output_shape) != 3:
        raise ConfigError(
            f"mix_images is given, and samples are {list(pipeline.output_shape)}, no images: leave it out"
        )
    return Mixing(config.mix_images, seed_of(config), pipeline.layout)


def _read_picture(source: Source, sample: int) -> bytes:
    """Return the bytes of a sample's picture, without its mask."""
    masks, data = masks_of(source), source.read(sample)
    return data if masks is None else data[: masks.image_bytes[sample]]


def _of_data_set(
    dataset: MapDataset,
    config: LoaderConfig,
    plan: AccessPlan,
    probes: list[int],
    calls: Calls,
    front_end: FrontEnd,
) -> _Samples:
    """See `set_up`. probes: samples to look at."""
    defaults, unequal = Defaults(config.optional or {}), config.unequal
    # Before the data set is asked for a sample: many open what cannot be pickled then.
    processes = None
    if config.is_in_processes:
        processes = process_plan(dataset, config, front_end.reducers, int(config.workers))
    fetcher = DatasetFetcher(dataset, seed_of(config), defaults)
    decoder: CollatingDecoder | SampleDecoder
    beside_bytes = 0
    if config.collate_fn is not None:
        decoder = CollatingDecoder(config.collate_fn, leaves_out=config.on_error != "raise")
    else:
        example = fetcher.example(probes, calls, on_error_raise=config.on_error == "raise")
        more = _more_of(fetcher, [each for each in probes if each != example[0]], calls) if unequal else []
        decoder = SampleDecoder(
            example, fetcher.describe, front_end.as_array, front_end.copy_leaves, unequal, more
        )
        beside_bytes = decoder.beside_bytes
        if defaults:
            _check_defaults(defaults, example[1], decoder)
    if fetcher.global_draws and processes is None and config.decoders != 0:
        _warn_of_global_draws(f"{fetcher.place}.__getitem__ draws", "__getitem__", fetcher.global_draws)
    pickler = RowPickler(front_end.reducers)
    row = _row_bytes(fetcher, probes, calls, pickler) if config.cache else 0

    def parts(
        budget: MemoryBudget,
        machine: Machine,
        disks: KeptOnDisks,
        placement: Placement,
        sharing: Sharing | None,
    ) -> tuple[Fetcher, Decoder, Extents | None]:
        if not row or not (budget.tier_bytes or disks.tiers):
            return fetcher, decoder, None
        memory = MemoryTier(budget.tier_bytes) if budget.tier_bytes else None
        return KeepingFetcher(fetcher, memory, disks, pickler), decoder, None

    return _Samples(
        np.full(plan.samples, row, np.int64),
        decoder.fields,
        parts,
        draws_seed=seed_of(config) if fetcher.draws else None,
        processes=processes,
        beside_bytes=beside_bytes,
    )


def _warn_of_global_draws(who: str, whom: str, libraries: set[str]) -> None:
    """who: draws. whom: it is that may have a parameter."""
    warnings.warn(
        f"{who} from the global random generator of {' and '.join(sorted(libraries))}, which all threads share: "
        f"what a sample gets depends on their timing, and no seed repeats it. Give {whom} a parameter rng, a NumPy "
        "generator of the sample's own, or take workers=1 or more, processes whose global generators are seeded for "
        "each sample",
        RuntimeWarning,
        stacklevel=2,
    )


def process_plan(
    dataset: MapDataset | None,
    config: LoaderConfig,
    reducers: Reducers,
    count: int,
    most_bytes: float = math.inf,
) -> ProcessPlan:
    """Return what worker processes are started with. dataset: None where they decode what this process reads.

    Raises: ConfigError where the data set cannot be pickled, or not into so many bytes.
    """
    copy = pickled(dataset, "dataset", reducers, most_bytes=most_bytes)
    return ProcessPlan(count, seed_of(config), copy, dataset, config.worker_init_fn, reducers)


def _row_bytes(fetcher: DatasetFetcher, probes: Sequence[int], calls: Calls, pickler: RowPickler) -> int:
    """Return what a sample takes that is kept, by some of them. Raises: ConfigError where none can be kept."""
    if fetcher.asks:
        raise ConfigError(
            f'cache="rows" keeps samples for all epochs, and __getitem__ of {fetcher.place} asks for '
            f"{' and '.join(sorted(fetcher.asks))}, so that they change: leave cache out"
        )
    samples = _more_of(fetcher, probes, calls)
    if not samples:
        raise DataError(
            f"none of the first samples of {fetcher.place} could be had, to see how large they are"
        )
    for sample, again in zip(samples[:_TWICE], _more_of(fetcher, probes[:_TWICE], calls), strict=False):
        warn_unless_same(sample, again, f"a sample of {fetcher.place}")
    return row_bytes(samples, pickler, fetcher.place)


def _more_of(fetcher: DatasetFetcher, samples: Sequence[int], calls: Calls) -> list[Any]:
    """Return some samples, less those that cannot be had: whose batch asks for them says why."""
    found = []
    for sample in samples[:_LENGTHS]:
        try:
            found.append(fetcher.example([sample], calls, on_error_raise=True)[1])
        except WaitTimeout:
            raise
        except Exception as error:
            raise_interrupt(error)
    return found


def _usual_batch(plan: AccessPlan, rank: int) -> int:
    """Return how many samples a rank's batch has: at most, or on average where an order fills batches by size."""
    if not plan.is_cut_by_order:
        return plan.max_local_batch(rank)
    return -(-plan.length(0) // (plan.steps(0) * plan.ranks))


def _check_defaults(defaults: Defaults, example: Any, decoder: SampleDecoder) -> None:
    """Raise ConfigError for a default that is not like the field of a sample that has it."""
    try:
        decoder.check(defaults.fill(example, always=True), "with optional=, a sample without its fields")
    except DataError as error:
        raise ConfigError(f"{error}; give defaults of the same type and shape") from error


def _steps_of_a_slot(config: LoaderConfig, batch_bytes: int, local_batch: int, most_bytes: int) -> int:
    """Return how many steps a slot of so many bytes at most has space for: several where they are small."""
    # Without threads a batch is loaded when it is asked for, and no other; with prefetch so many; with collate_fn a
    # slot holds what it made, with mix_images what is mixed.
    if config.decoders == 0 or any(
        each is not None for each in (config.prefetch, config.collate_fn, config.mix_images)
    ):
        return 1
    most_bytes = min(_STAGED_TOGETHER_BYTES, most_bytes)
    return max(1, min(most_bytes // max(1, batch_bytes), _STAGED_TOGETHER // max(1, local_batch)))


def _near(extents: Extents, machine: Machine, ranks: int, sizes_bytes: NDArray[np.int64]) -> Near:
    """Return what says which samples are read together: where they lie, and what a read costs."""
    mean_bytes = max(float(sizes_bytes.mean()), 1.0)
    return Near(extents, machine.source_price(ranks, mean_bytes), machine.sequential_rate(ranks))


def reader_of(source: Source) -> SourceFetcher:
    """Return what reads samples from a store that nobody measured, those together that lie near each other."""
    extents = _all_extents(source, Calls())
    if extents is None:
        return SourceFetcher(source, {})

    def price(requests: float, nbytes: float) -> float:
        return requests * _UNKNOWN_LATENCY_SECONDS + nbytes / _UNKNOWN_BYTES_PER_SECOND

    return SourceFetcher(source, {}, Near(extents, price, _UNKNOWN_BYTES_PER_SECOND))


def _all_extents(source: Source, calls: Calls) -> Extents | None:
    """Return where all samples lie, where the source gives them. calls: what it is asked with."""
    samples, sizes = len(source), source.sizes_bytes
    lengths = sizes
    places = np.empty((samples, 2), np.int64)
    for first in range(0, samples, _ASKED_AT_ONCE):
        part = slice(first, min(first + _ASKED_AT_ONCE, samples))
        ids = np.arange(part.start, part.stop)
        found = calls.one(f"where the samples of {source!r} lie", partial(extents_of, source, ids))
        if found is None:
            return None
        places[part, 0], places[part, 1] = found[0].units, found[0].offsets
        if lengths is sizes and not np.array_equal(found[0].lengths, lengths[part]):
            lengths = lengths.copy()
        if lengths is not sizes:
            lengths[part] = found[0].lengths
    return Extents(places[:, 0], places[:, 1], lengths) if samples else None


def data_of(source: Source | MapDataset) -> Data:
    """Name a source or data set. Its classes are what torchvision calls the names of labels."""
    kind = type(unselected(source)).__name__
    if isinstance(source, Mixed):
        return Data(kind, repr(source), tuple(getattr(source, "classes", ())))
    found = (getattr(source, name, None) for name in ("list_file", "root", "place"))
    path = next((each for each in found if isinstance(each, str)), None)
    name, place = kind, kind
    if isinstance(source, Source) and path:
        part = "a part of " if isinstance(source, Selection) else ""
        shown = without_secrets(path)
        name, place = os.path.basename(shown), f"{part}{kind} {shown!r}"
    return Data(name, place, tuple(getattr(source, "classes", ())))


def pipeline_of(config: LoaderConfig, source: Source, *, runs: bool) -> Pipeline:
    """Return the compiled transforms of a configuration; without any, what a source of numbers suggests.

    runs: as of `compile_pipeline`. Raises: ConfigError if there are no transforms, or they cannot follow each other.
    """
    transforms, dtype = config.transforms, config.dtype
    if not transforms and isinstance(source, Numeric):
        numbers = source.numbers
        transforms, dtype = [DecodeRaw(numbers.dtype, numbers.shape)], dtype or numbers.batch_dtype
    if not transforms:
        raise ConfigError(
            f"transforms is empty, and the samples of {data_of(source).place} are bytes: name at least one, for "
            "example Resize(...) and ToTensor() for pictures, DecodeRaw(dtype, shape) for numbers"
        )
    return compile_pipeline(transforms, seed_of(config), dtype or DTYPE, config.layout, runs=runs)


def _pipeline(source: Source, config: LoaderConfig, probes: list[int], calls: Calls | None) -> Pipeline:
    """Return what is done to the samples of a source. calls: what one is read with; None for a prediction."""
    pipeline = pipeline_of(config, source, runs=calls is not None)
    if not pipeline.needs_probe:
        return pipeline
    if calls is None:
        raise ConfigError(
            "transforms do not fix the shape of a sample, and no sample is read for a prediction: put "
            "Resize((height, width)) or a crop among them (DecodeRaw takes shape=), or make a loader and ask its "
            "predict()"
        )

    drawn = set[str]()

    def probe(sample: int) -> None:
        try:
            name = source.describe(sample)
            picture = calls.one(name, lambda: _read_picture(source, sample))
            drawn.update(keeping_global_states(lambda: pipeline.probe(picture, name)))
        except Exception as error:
            if (placed := located(error, sample, source.describe)) is error:
                raise
            raise placed from error

    from_first(probes, probe, on_error_raise=config.on_error == "raise")
    if drawn and not config.is_in_processes and config.decoders != 0:
        _warn_of_global_draws("transforms draw", "the callable that does", drawn)
    return pipeline


def _first_picture(source: Source, sample: int, calls: Calls) -> bytes | None:
    try:
        return calls.one(source.describe(sample), lambda: _read_picture(source, sample))
    except WaitTimeout:
        raise
    except Exception as error:  # who reads it for a batch says what is wrong
        raise_interrupt(error)
        return None


#: How many times as many readers as usual may be tried: small samples of a store that answers late want more. And
#: batch slots: a store that stops for a while wants more batches ahead.
_MORE_READERS = _MORE_SLOTS = 4


class _Threads(NamedTuple):
    """How many threads read and decode, and why; see `StagingLimits`."""

    readers: int
    decoders: int
    most_decoders: int
    decoders_because: str
    readers_because: str
    most_readers: int = 0


def _threads(
    config: LoaderConfig, machine: Machine | None, cpus: int, cpu_reason: str, *, is_remote: bool
) -> _Threads:
    decoders, readers = config.decoders, config.readers
    if decoders == 0:
        return _Threads(0, 1, 0, "as decoders= says", "")
    because = f"one per core ({cpu_reason})" if decoders is None else "as decoders= says"
    if config.is_in_processes:
        decoders, because = THREADS_A_PROCESS * int(config.workers), "as workers= says"
    if config.is_of_data_set:
        if decoders is None:
            because += ", more while they wait and more load faster, fewer where they wait for each other"
        # Its own code reads and decodes in one go: the threads may be as many as those that wait for a store.
        return _Threads(0, decoders or cpus, 0 if decoders else default_readers(cpus), because, "")
    most_readers = 0
    if readers is not None:
        readers_because = "as readers= says"
    elif is_remote:
        # They wait for the source, whose own limit says how many requests are under way.
        readers, readers_because = _REMOTE_READERS, "as many requests as the store rewards, at most"
    elif machine is not None:
        readers, readers_because = machine.source.threads, "as the machine has it"
    else:
        readers, readers_because = default_readers(cpus), "the usual number where no machine= is given"
        most_readers = _MORE_READERS * readers
    most_decoders = 0 if decoders else 2 * cpus
    return _Threads(readers, decoders or cpus, most_decoders, because, readers_because, most_readers)


def not_predictable(place: str) -> ConfigError:
    """Return what to raise where a data set is to be predicted."""
    return ConfigError(
        f"what a sample of {place} costs is known to its own code alone, so that nothing can be predicted: give a "
        "folder or a source, with transforms, to have a prediction"
    )


def _memory_bytes(memory: str | int | None, is_taken: bool) -> int:
    limit_bytes = memory_limit_bytes()
    if memory is None:
        return limit_bytes // 4 // ranks_on_this_host()
    memory_bytes = parse_bytes(memory)
    if is_taken and memory_bytes > limit_bytes:
        raise ConfigError(
            f"memory is {format_bytes(memory_bytes)}, and this process may use {format_bytes(limit_bytes)} in all "
            "(the machine's memory or its control group's limit): give less"
        )
    return memory_bytes


def with_memory(
    machine: Machine | None,
    budget: MemoryBudget,
    decoders: int,
    ranks: int,
    disks: Sequence[StorageClass] = (),
) -> Machine:
    """Return the machine, or a guess at an unknown one, with a loader's memory and disks as its storage classes."""
    if machine is None:
        store = SharedStore(None, Curve(((1, _UNKNOWN_BYTES_PER_SECOND),)), _UNKNOWN_LATENCY_SECONDS)
        fast, source = Curve(((1, _MEMORY_BYTES_PER_SECOND),)), store
    else:
        fast, source = _memory_of(machine).read, machine.source
    storage = [StorageClass("staging", max(1, budget.staging_bytes), decoders, fast)]
    if budget.tier_bytes:
        storage.append(StorageClass("memory", budget.tier_bytes, decoders, fast))
    storage += disks
    if machine is None:
        return Machine(source, tuple(storage), ranks, decode_threads=decoders)
    return replace(machine, storage=tuple(storage), ranks=ranks, decode_threads=decoders)


def _memory_of(machine: Machine) -> StorageClass:
    """Return the slowest storage class of a machine that is memory."""
    return [each for each in machine.storage if each.backend == "memory"][-1]


def _keep_bytes(
    config: LoaderConfig, policy: LoadingPolicy, machine: Machine | None, samples: _Samples
) -> int:
    """Return what is kept for later epochs at most, by this job or by all of the host."""
    if isinstance(policy, Staging):
        return 0
    most_bytes, form = _most_kept_bytes(machine, samples.sizes_bytes, samples.form), samples.form
    if config.share != JOBS or form is None:
        return most_bytes
    # Beside pixels, whatever they turn out to take, are samples as stored.
    return int(samples.sizes_bytes.sum() + (_STRAY if form.is_decoded else 1.0) * most_bytes)


def _most_kept_bytes(machine: Machine | None, sizes_bytes: NDArray[np.int64], form: CropForm | None) -> int:
    """What the memory tier could use: the data set in its form, or the capacity that the machine names."""
    total_bytes = int(sizes_bytes.sum()) if form is None else form.bytes_for(sizes_bytes.size)
    if machine is None:
        return total_bytes
    tiers = [each for each in machine.storage[1:] if each.backend == "memory"]
    largest_bytes = int(sizes_bytes.max(initial=0)) if form is None else form.bytes_for(1)
    for tier in tiers:
        if tier.capacity_bytes < largest_bytes:
            raise ConfigError(
                f"machine.storage: {tier.name!r} holds {tier.capacity_bytes:,} bytes; a tier needs at least "
                f"the largest sample ({largest_bytes:,} bytes): raise it or leave the class out"
            )
        if not tier.is_memory:
            raise ConfigError(
                f"machine.storage: {tier.name!r} is a disk by its name, and in memory by its backend: give it backend "
                '"filesystem" and the path of a folder there, or leave it out'
            )
    return min(total_bytes, sum(tier.capacity_bytes for tier in tiers))

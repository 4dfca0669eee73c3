"""What a loader runs on: the threads, the memory shared out, the disks, the machine assumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError, WaitTimeout
from penstock.flow.cpus import cpu_limit, default_readers, memory_limit_bytes, ranks_on_this_host
from penstock.flow.work import Decoder, Fetcher
from penstock.loader.beside import Beside
from penstock.loader.budget import STAGED_TOGETHER_BYTES, MemoryBudget, share_memory
from penstock.loader.config import HOST, HOSTS, JOBS, LoaderConfig, check_machine
from penstock.loader.dataset import DatasetFetcher, MapDataset, SampleDecoder
from penstock.loader.decode_servers import given_together, wanted_under_way
from penstock.loader.front_end import FrontEnd
from penstock.loader.images import ImageDecoder
from penstock.loader.local_disk import (
    Content,
    Disk,
    check_space,
    content_of,
    disk_classes,
    has_space,
    kept_on,
    open_disks,
    padded_bytes,
)
from penstock.loader.making import MakingDecoder
from penstock.loader.opened import (
    UNKNOWN_BYTES_PER_SECOND,
    UNKNOWN_LATENCY_SECONDS,
    Data,
    Opened,
    data_of,
    open_run,
    seed_of,
    stored_for,
)
from penstock.loader.processes import PROCESS_LOAD_SECONDS, THREADS_A_PROCESS, ProcessPlan
from penstock.loader.ranks_memory import Sharing
from penstock.loader.row_code import row_code
from penstock.loader.samples import Samples, pixels_bytes, samples_of_data_set, samples_of_source
from penstock.loader.source_samples import kind_of
from penstock.loader.transforms import Pipeline
from penstock.loader.transforms.sink import ByteValues
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan
from penstock.policy import AllExtents, Placement, StagingLimits
from penstock.policy.decisions import LEAST_LOAD_SECONDS
from penstock.policy.forms import STRAY, CropForm, DiskPart, disk_parts
from penstock.policy.loading import Job, LoadingPolicy, Staging
from penstock.policy.runnable import NO_QUEUE, WriteQueue, placement_of, shared_by
from penstock.store import Source
from penstock.store.calls import Calls
from penstock.store.mixing import sources_in
from penstock.store.remote import objects_in
from penstock.units import format_bytes, parse_bytes

#: Of the memory of a loader with a local disk.
_QUEUE = WriteQueue(1 / 16, 256 << 20)


# Small steps share a slot up to these: more gain little. The eight slots that are usual take a quarter of the memory at
# most, and half as much where samples are kept in the rest.
_STAGED_TOGETHER = 4096
_STAGED_SHARE, _STAGED_SHARE_BESIDE_TIERS = 1 / 32, 1 / 64


T = TypeVar("T")
# Samples to try where the first cannot be had and its shape is wanted.
_PROBES = 16

# Reads of a remote store that may be wanted at once, until its limit of requests is higher: more threads cost more than
# they bring where a link is slow, or answers soon: docs/decisions/0024.
_REMOTE_READERS = 128


_MEMORY_BYTES_PER_SECOND = 5e9


@dataclass(frozen=True, slots=True)
class Setup:
    """A rank's part of a run, before any thread is started.

    sizes_bytes: int64[samples], as stored; zeros for a data set, which does not tell.
    pipeline: what the decoder does to each sample; None for a data set, whose own code does, and may read, too.
    machine: with the memory budget as its storage classes.
    is_measured: whether the machine was given, rather than guessed until reads have been observed.
    cpus: how many threads can compute at once.
    decoders_because, readers_because: why there are as many decode and reading threads, for people.
    machine_file: that the machine was read from; None where an object or none was given.
    seed: of the order, the policy and every random transform.
    extents: of all samples, where the source gives them.
    draws_seed: of the random numbers that change samples; None where nothing draws any.
    processes: what worker processes are started with; None where threads do the work.
    held: by tier, samples that an earlier run left on a disk. copied: by disk, what it gets of what memory keeps.
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
    extents: AllExtents | None = None
    draws_seed: int | None = None
    processes: ProcessPlan | None = None
    held: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    copied: Mapping[int, NDArray[np.bool_]] = field(default_factory=dict)
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
        return self.batches.beside if isinstance(self.batches, SampleDecoder) else None

    @property
    def batches(self) -> Decoder:
        """The decoder itself, or what has the samples that it makes."""
        return self.decoder.decoder if isinstance(self.decoder, MakingDecoder) else self.decoder

    @property
    def is_of_data_set(self) -> bool:
        """Whether a data set's own code reads."""
        return self.pipeline is None and not isinstance(self.decoder, MakingDecoder)

    @property
    def calls_python(self) -> bool:
        """Whether a user's own code runs for each sample, in threads."""
        return self.processes is None and self._has_python

    @property
    def may_switch(self) -> bool:
        """Whether worker processes could take over: threads run Python code, and their number follows measurement.

        Processes keep no rows, crops or pictures, and mix no images: as with workers=n.
        """
        is_made = isinstance(self.decoder, MakingDecoder) and not self.collates
        is_movable = is_made or isinstance(self.fetcher, DatasetFetcher) or type(self.decoder) is ImageDecoder
        return is_movable and self.calls_python and self.limits.most_decoders > 0 and self.cpus > 1

    @property
    def _has_python(self) -> bool:
        return self.pipeline is None or self.pipeline.calls_python


def read_machine(machine: Machine | str | os.PathLike[str] | None, calls: Calls) -> Machine | None:
    """Return a machine, read from its file where a path is given.

    calls: what the file is read with.
    Raises: DataError if the file cannot be read; ConfigError naming the file and the field that is wrong, or what is
        neither a machine nor a path.
    """
    if machine is None or isinstance(machine, Machine):
        return machine
    return read_machine_file(machine, calls, Machine.from_toml)


def read_machine_file(path: str | os.PathLike[str], calls: Calls, parse: Callable[[str], T]) -> T:
    """Return what `parse` makes of a machine's file. Raises: as `read_machine`."""
    check_machine(path)
    try:
        return parse(calls.one(f"machine {path!r}", lambda: Path(path).read_text("utf-8")))
    except WaitTimeout:
        raise
    except OSError as error:
        raise DataError(f"machine: {error}; penstock calibrate writes such a file") from error
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from error
    except ValueError as error:  # not UTF-8, or no path
        raise DataError(f"machine: {path!r} cannot be read as text: {error}") from error


def set_up(
    config: LoaderConfig,
    front_end: FrontEnd,
    calls: Calls,
    *,
    opened: Opened | None = None,
    runs: bool = True,
) -> Setup:
    """Compile the transforms, share the memory out, and open what local disks keep; open the source if nobody has.

    calls: what the source and its first sample are read with.
    opened: the source and the plan over it, which a loader has from `open_together`; those of `open_run` unless given.
    runs: False for a prediction. Then no memory is taken, and no disk opened. A data set whose own code reads cannot be
        predicted.

    Raises: ConfigError naming the argument that cannot work; DataError if the source or a disk cannot be opened.
    """
    with ExitStack() as closing:
        setup = finish(drafted(config, front_end, calls, closing, opened=opened, runs=runs))
        closing.pop_all()  # from here on the fetcher closes what was opened
    return setup


class Draft(NamedTuple):
    """What is known before it is decided what is kept: the arguments, what was opened, and how memory is shared out."""

    config: LoaderConfig
    runs: bool
    opened: Opened
    rank: int
    cpus: int
    threads: _Threads
    samples: Samples
    steps: int
    disks: list[Disk]
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
    source, plan = opened = opened or open_run(config, calls)
    stored = source if isinstance(source, Source) else stored_for(config, source, calls)
    machine, memory_bytes = read_machine(config.machine, calls), _memory_bytes(config.memory, is_taken=runs)
    policy, rank = config.loading_policy, config.rank or 0
    if runs and (line := _left_out(config, machine)):
        calls.report(line)
    classes, contents = _disks_of(config, machine, stored or source, policy, front_end, calls)
    cpus, cpu_reason = cpu_limit()
    threads = _threads(config, machine, cpus, cpu_reason, stored)
    probes = plan.stream(rank, 0, 0, _PROBES).tolist()
    samples = (
        samples_of_source(
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
        else samples_of_data_set(source, config, plan, probes, calls, front_end, stored, runs=runs)
    )
    sizes_bytes, local_batch = samples.sizes_bytes, plan.max_local_batch(rank)
    share = _STAGED_SHARE if isinstance(policy, Staging) else _STAGED_SHARE_BESIDE_TIERS
    steps = _steps_of_a_slot(config, samples.slot_bytes(plan, rank), local_batch, int(share * memory_bytes))
    budget = share_memory(
        memory_bytes,
        slot_bytes=samples.slot_bytes(plan, rank, steps),
        local_batch=local_batch,
        readers=threads.readers,
        largest_sample_bytes=max(int(sizes_bytes.max(initial=0)), samples.served_bytes),
        keep_bytes=_keep_bytes(config, policy, machine, samples),
        picture_bytes=(samples.picture_bytes, samples.large_picture_bytes),
        decoders=max(threads.decoders, threads.most_decoders),
        # One more for the batch that the training has, which lies in its slot unless a function made it.
        most_slots=0 if config.prefetch is None else config.prefetch + (config.collate_fn is None),
        under_way=wanted_under_way(len(config.decode_servers)),
        queue=_QUEUE if classes(1) else NO_QUEUE,
    )
    if runs and config.share == JOBS:
        budget = replace(budget, tier_bytes=0, jobs_bytes=budget.tier_bytes)
    without_disks = with_memory(machine, budget, threads.decoders, plan.ranks)
    form, parts, kept = _form_and_disks(samples, budget, without_disks, contents, classes)
    disks = [Disk(each) for each in parts]
    if runs and parts:
        # What this run may use of memory, and does not take itself, is the page cache's.
        cached, is_new = memory_limit_bytes() // ranks_on_this_host() - memory_bytes, config.refresh == "full"
        disks = open_disks(parts, kept, rank, calls, closing, is_new=is_new, page_cache_bytes=cached)
    if form is not None:
        form = replace(form, disks=sum(each.part.is_in_form for each in disks))
    on = with_memory(machine, budget, threads.decoders, plan.ranks, [each.storage for each in disks])
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
        budget,
        machine is not None,
        on,
        form,
    )


def job_among(
    draft: Draft,
    ranks: Sequence[int],
    tiers_bytes: Mapping[int, Sequence[int]],
    first: tuple[int, int] = (0, 0),
    held: Mapping[int, NDArray[np.int64]] | None = None,
) -> Job:
    """Return what a policy may know of ranks that keep samples for each other, of a run that begins at (epoch, step).

    tiers_bytes: by rank, what it has for it, in memory and on disks. held: by rank, what is on its disks.
    """
    storage, plan = draft.on.storage, draft.opened.plan
    # Of a rank without memory for samples there is no tier.
    of_ranks = {
        rank: [max(1, each) for each in nbytes][: len(storage) - 1] for rank, nbytes in tiers_bytes.items()
    }
    tiers = (
        replace(tier, capacity_bytes=max(each))
        for tier, *each in zip(storage[1:], *of_ranks.values(), strict=False)
    )
    on = replace(draft.on, storage=(storage[0], *tiers))
    sizes_bytes, seed = draft.samples.sizes_bytes, seed_of(draft.config)
    return Job(plan, sizes_bytes, on, seed, draft.rank, draft.form, ranks, first, held, of_ranks)


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
        job = job_among(draft, ranks, dict.fromkeys(ranks, tiers_of(draft)))
        shared = replace(shared_by(policy, job, [rank]), is_mapped=config.share == HOST)
        sharing = Sharing(shared, tuple(ranks), job.tiers_bytes)
    if sharing is None:
        job = Job(plan, sizes_bytes, on, seed_of(config), rank, draft.form)
        placement = placement_of(policy, job, rank)
    else:
        placement = sharing.shared.kept[rank].as_placement(plan.samples)
    first = len(on.storage) - len(draft.disks)
    is_shared = sharing is not None
    kept = kept_on(
        draft.disks, first, placement, sizes_bytes, budget.queued_bytes, draft.form, is_shared=is_shared
    )
    fetcher, decoder, extents = samples.parts(budget, on, kept, placement, sharing)
    readers_bytes, own_bytes = _read_bytes(draft)
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
        copied=kept.copied,
        form=draft.form,
        jobs_form=samples.form if pixels_bytes(budget, sizes_bytes, samples.form) else None,
        sharing=sharing,
        limits=StagingLimits(
            budget.slots,
            threads.readers,
            threads.decoders,
            readers_bytes,
            threads.most_decoders,
            draft.steps,
            own_bytes,
            loads_all=config.collate_fn is not None,
            least_load_seconds=PROCESS_LOAD_SECONDS if config.is_in_processes else LEAST_LOAD_SECONDS,
            most_readers=threads.most_readers,
            read_together=given_together(
                budget.slots * draft.steps * plan.max_local_batch(rank),
                len(config.decode_servers),
                samples.served_bytes,
            ),
            most_slots=_most_slots(config, budget),
            unwritten_bytes=budget.queued_bytes // max(1, len(draft.disks)),
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
    if config.shares_form and classes(1):
        raise ConfigError(
            f"keep is {config.keep!r} and share {config.share!r}, by which ranks keep pixels for each other in memory "
            "alone, and a disk is given: leave local_disk, and the disks of machine, out, or keep"
        )
    if isinstance(source, Source):
        return classes, partial(content_of, source)
    if not config.cache or not classes(1):
        return none, content_of
    place = kind_of(source)
    try:
        code = calls.one(
            f"the code of {place}", lambda: row_code(source, config.optional, front_end.reducers)
        )
    except ConfigError as error:
        calls.report(f"no disk keeps rows of {place}: {error}")
        return none, content_of
    sizes_bytes = np.full(len(source), -1)
    return classes, lambda *_: Content(code.fingerprint, sizes_bytes, code.about, code.changed_since)


def _left_out(config: LoaderConfig, machine: Machine | None) -> str:
    """Return a line that names the storage classes of a machine that share= has keep nothing; "" if there are none."""
    is_any = config.share is None or isinstance(config.loading_policy, Staging)
    found = [] if is_any else disk_classes(config.local_disk, machine, 1)
    if config.share == JOBS:
        why = "jobs share memory alone, as a disk tier has one process that writes it"
    else:
        found = [each for each in found if each.backend != "filesystem"]
        why = "ranks read each other's disks by their files, which a backend of your own has none of"
    names = ", ".join(repr(each.name) for each in found)
    return names and f'machine.storage: nothing is kept by {names}, as share is "{config.share}": {why}'


def _read_bytes(draft: Draft) -> tuple[int, int]:
    """Return the bytes that readers read ahead, as stored, and those that a thread reads itself for a Load."""
    samples, threads = draft.samples, draft.threads
    decoders = max(threads.decoders, threads.most_decoders)
    readers_bytes, own_bytes = draft.budget.read_bytes(decoders, in_place=samples.reads_in_place)
    if draft.config.collate_fn is not None and threads.readers:
        # The earliest step's come beside them; see `StagingLimits.loads_all`.
        count = min(draft.opened.plan.max_local_batch(draft.rank), samples.sizes_bytes.size)
        largest = np.partition(samples.sizes_bytes, -count)[-count:]
        readers_bytes = max(1, readers_bytes - int(largest.sum()))
    return samples.stored_for(readers_bytes), own_bytes


def _most_slots(config: LoaderConfig, budget: MemoryBudget) -> int:
    """Return how many slots may come to be used; 0 where their number is fixed."""
    if config.prefetch is not None or config.decoders == 0:
        return 0
    return min(_MORE_SLOTS * budget.slots, budget.staging_bytes // max(1, budget.slot_bytes))


def _form_and_disks(
    samples: Samples,
    budget: MemoryBudget,
    on: Machine,
    contents: _Contents,
    classes: _Classes,
) -> tuple[CropForm | None, list[DiskPart], dict[bool, Content]]:
    """Return in which form samples are kept, on which disks, and what these keep, as of `open_disks`.

    on: the machine of the run, without disks. contents, classes: as `_disks_of` returns them.
    """
    form, sizes_bytes = samples.form if budget.tier_bytes else None, samples.sizes_bytes
    disks = classes(int((STRAY if samples.are_rows else 1.0) * sizes_bytes.sum()))
    if not disks:
        return form, [], {}
    check_space(disks, int(sizes_bytes.max(initial=0)))
    if form is not None and all(each.backend == "filesystem" for each in disks):
        larger = classes(int(form.space_share * form.bytes_for(sizes_bytes.size)))
        if parts := disk_parts(form, larger, sizes_bytes, on):
            kept = {True: contents(samples.pixels, -1 if form.is_decoded else form.crop_bytes)}
            if has_space(parts, kept[True]):
                if not parts[-1].is_in_form:
                    kept[False] = contents(None)
                return form, parts, kept
    padded = disks if samples.are_rows else classes(padded_bytes(sizes_bytes))
    parts = [
        DiskPart(each, padding_bytes=wide.capacity_bytes - each.capacity_bytes)
        for each, wide in zip(disks, padded, strict=True)
    ]
    return form, parts, {False: contents(None)}


def _costs(machine: Machine | None, plan: AccessPlan, threads: _Threads) -> Machine | None:
    """Return a machine with the ranks and decode threads of the run."""
    return machine and replace(machine, ranks=plan.ranks, decode_threads=max(1, threads.decoders))


def _steps_of_a_slot(config: LoaderConfig, batch_bytes: int, local_batch: int, most_bytes: int) -> int:
    """Return how many steps a slot of so many bytes at most has space for: several where they are small."""
    # Without threads a batch is loaded when it is asked for, and no other; with prefetch so many; with collate_fn a
    # slot holds what it made, with mix_images what is mixed.
    if config.decoders == 0 or any(
        each is not None for each in (config.prefetch, config.collate_fn, config.mix_images)
    ):
        return 1
    most_bytes = min(STAGED_TOGETHER_BYTES, most_bytes)
    return max(1, min(most_bytes // max(1, batch_bytes), _STAGED_TOGETHER // max(1, local_batch)))


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
    config: LoaderConfig,
    machine: Machine | None,
    cpus: int,
    cpu_reason: str,
    source: Source | None,
) -> _Threads:
    """source: that readers read; None where a data set's own code does."""
    decoders, readers = config.decoders, config.readers
    if decoders == 0:
        return _Threads(0, 1, 0, "as decoders= says", "")
    because = f"one per core ({cpu_reason})" if decoders is None else "as decoders= says"
    if config.is_in_processes:
        decoders, because = THREADS_A_PROCESS * int(config.workers), "as workers= says"
    if source is None:
        if decoders is None:
            because += ", more while they wait and more load faster, fewer where they wait for each other"
        # Its own code reads and decodes in one go: the threads may be as many as those that wait for a store.
        return _Threads(0, decoders or cpus, 0 if decoders else default_readers(cpus), because, "")
    most_readers = 0
    most_requests = [each.most for each in map(objects_in, sources_in(source)) if each is not None]
    if readers is not None:
        readers_because = "as readers= says"
    elif most_requests:
        # They wait for the source, whose own limit says how many requests are under way.
        readers, most_readers = _REMOTE_READERS, sum(most_requests)
        readers_because = "as many requests as the store rewards, at most"
        if most_readers > readers:
            readers_because = f"up to {most_readers:,} where the store rewards as many requests"
    else:
        readers, readers_because = default_readers(cpus), "the usual number where no machine= is given"
        if machine is not None:
            readers, readers_because = machine.source.threads, "as the machine has it"
        most_readers = _MORE_READERS * readers
    most_decoders = 0 if decoders else 2 * cpus
    return _Threads(readers, decoders or cpus, most_decoders, because, readers_because, most_readers)


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
        store = SharedStore(None, Curve(((1, UNKNOWN_BYTES_PER_SECOND),)), UNKNOWN_LATENCY_SECONDS)
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
    config: LoaderConfig, policy: LoadingPolicy, machine: Machine | None, samples: Samples
) -> int:
    """Return what is kept for later epochs at most, by this job or by all of the host."""
    if isinstance(policy, Staging):
        return 0
    most_bytes, form = _most_kept_bytes(machine, samples.sizes_bytes, samples.form), samples.form
    if form is None or not (config.share == JOBS or config.shares_form):
        return most_bytes
    if config.shares_form:  # each rank guesses by another picture
        return int(form.space_share * most_bytes)
    # Beside pixels, whatever they turn out to take, are samples as stored.
    return int(samples.sizes_bytes.sum() + form.space_share * most_bytes)


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

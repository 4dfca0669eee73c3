"""What a loader runs on: the source opened, the threads' work, the memory shared out, the machine assumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError, WaitTimeout
from penstock.flow.cpus import cpu_limit, default_readers, memory_limit_bytes, ranks_on_this_host
from penstock.flow.staging import slot_bytes
from penstock.loader.budget import MemoryBudget, share_memory
from penstock.loader.dataset import DatasetWork, MapDataset
from penstock.loader.images import ImageWork
from penstock.loader.transforms import compile_pipeline
from penstock.loader.transforms.pipeline import Transform
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle, Order, Sequential
from penstock.policy import Placement, StagingLimits
from penstock.policy.loading import Job, LoadingPolicy, Staging
from penstock.policy.runnable import placement_of, why_not_kept
from penstock.simulate.policies import policy_of
from penstock.store import MemoryTier, Source, open_source
from penstock.store.calls import Calls
from penstock.units import format_bytes, format_count, is_integer, parse_bytes

# More than any store rewards: a slip of the hand, and every thread costs a stack.
_MOST_THREADS = 1024
#: How samples are kept in memory, unless another policy is given.
POLICY = "frequency"
# Samples to try where the first cannot be had and its shape is wanted.
_PROBES = 16

# What is assumed of a machine that nobody measured; observed reads correct it.
_UNKNOWN_BYTES_PER_SECOND = 100e6
_UNKNOWN_LATENCY_SECONDS = 1e-3
_MEMORY_BYTES_PER_SECOND = 5e9


@dataclass(frozen=True, slots=True)
class Setup:
    """A rank's part of a run, before any thread is started.

    sizes_bytes: int64[samples], as stored; zeros for a data set, which does not tell.
    machine: with the memory budget as its storage classes.
    is_measured: whether the machine was given, rather than guessed until reads have been observed.
    cpus: how many threads can compute at once.
    decoders_because, readers_because: why there are as many decode and reading threads, for people.
    machine_file: that the machine was read from; None where an object or none was given.
    """

    plan: AccessPlan
    rank: int
    sizes_bytes: NDArray[np.int64]
    work: ImageWork | DatasetWork
    budget: MemoryBudget
    machine: Machine
    is_measured: bool
    policy: LoadingPolicy
    placement: Placement
    limits: StagingLimits
    cpus: int
    decoders_because: str
    readers_because: str = ""
    machine_file: str | None = None


def open_any(source: str | os.PathLike[str] | Source | MapDataset, calls: Calls) -> Source | MapDataset:
    """Open what a path names; a source or data set is taken as it is.

    Raises: ConfigError for anything else; what `open_source` raises.
    """
    if isinstance(source, (str, os.PathLike)):
        return open_source(source, calls=calls)
    if reason := _why_no_source(source):
        raise ConfigError(f"source is {reason}")
    return source


_SOURCES = "a folder, a list file, a Source or a data set with a length and samples by number"


def _why_no_source(source: Any) -> str | None:
    kind = type(source)
    if isinstance(source, type):
        return f"the class {source.__name__}: make an instance of it"
    if isinstance(source, Source):
        return None
    if hasattr(source, "dataset") and hasattr(source, "batch_size"):
        return (
            f"of type {kind.__name__}, itself a loader: give the data set that it was made from, its .dataset"
        )
    if any(base.__name__ == "IterableDataset" for base in kind.__mro__):
        return f"of type {kind.__name__}, which can only be iterated; it must be {_SOURCES}"
    if isinstance(source, Mapping):
        return f"of type {kind.__name__}, of data sets or columns: give one data set"
    if isinstance(source, (list, tuple)) and source and isinstance(source[0], (str, bytes, os.PathLike)):
        return f"of type {kind.__name__} and holds paths: write them into a text file, one a line, and give its path"
    if isinstance(source, bytes):
        return f"{source!r}; a path is text: give os.fsdecode(...) of it"
    if isinstance(source, bytearray) or not all(hasattr(kind, name) for name in ("__len__", "__getitem__")):
        return f"{source!r}; it must be {_SOURCES}"
    return None


def order_of(shuffle: bool | Order, samples: int, seed: int) -> Order:
    """Return the order that `shuffle` stands for.

    Raises: ConfigError if it is no order, or one over another number of samples.
    """
    if isinstance(shuffle, bool):
        return FullShuffle(samples, seed) if shuffle else Sequential(samples)
    if isinstance(shuffle, type) or not isinstance(shuffle, Order):
        raise ConfigError(
            f"shuffle is {shuffle!r}; it is True, False or an order of penstock.plan; a sampler of torch or a list of "
            "ids becomes one by Explicit.from_sampler(sampler, samples, epochs) or Explicit(ids, samples)"
        )
    if shuffle.samples != samples:
        raise ConfigError(
            f"shuffle is an order over {format_count(shuffle.samples, 'sample')} and the source has {samples:,}: make "
            "it for as many"
        )
    return shuffle


def read_machine(machine: Machine | str | os.PathLike[str] | None, calls: Calls) -> Machine | None:
    """Return a machine, read from its file where a path is given.

    calls: what the file is read with.
    Raises: DataError if the file cannot be read; ConfigError naming the file and the field that is wrong, or what is
        neither a machine nor a path.
    """
    if machine is None or isinstance(machine, Machine):
        return machine
    if not isinstance(machine, str | os.PathLike):
        raise ConfigError(f"machine is {machine!r}; give a Machine, or the path of its file")
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
    opened: Source | MapDataset,
    plan: AccessPlan,
    rank: int,
    *,
    transforms: Sequence[Transform],
    seed: int,
    dtype: str,
    layout: str,
    memory: str | int | None,
    machine: Machine | None,
    machine_file: str | None,
    policy: str | LoadingPolicy,
    readers: int | None,
    decoders: int | None,
    as_array: Callable[[Any], NDArray[Any] | None],
    on_error_raise: bool,
    calls: Calls,
    copy_leaves: Callable[[Sequence[Any], NDArray[Any]], bool],
) -> Setup:
    """Compile the transforms and share the memory out. The arguments are those of `BaseLoader`.

    calls: what the first sample is read with. machine_file: that the machine was read from.

    Raises: ConfigError naming the argument that cannot work.
    """
    for name, count in (("readers", readers), ("decoders", decoders)):
        if count is not None and not (is_integer(count) and 1 <= count <= _MOST_THREADS):
            raise ConfigError(f"{name} is {count!r}; it is an integer, 1 to {_MOST_THREADS}")
    memory_bytes = _memory_bytes(memory)
    chosen = policy_of(policy)
    cpus, cpu_reason = cpu_limit()
    because = f"one per core ({cpu_reason})" if decoders is None else "as decoders= says"
    probes = plan.stream(rank, 0, 0, _PROBES).tolist()
    tiers: dict[int, MemoryTier] = {}
    work: ImageWork | DatasetWork
    readers_because = ""
    if isinstance(opened, Source):
        readers_because = (
            "as readers= says"
            if readers
            else "as the machine has it"
            if machine is not None
            else "the usual number where no machine= is given"
        )
        readers = readers or (machine.source.threads if machine is not None else default_readers(cpus))
        most_decoders = 0 if decoders else 2 * cpus
        sizes_bytes = opened.sizes_bytes
        work = ImageWork(opened, compile_pipeline(transforms, seed=seed, dtype=dtype, layout=layout), tiers)
        work.learn_shape(probes, on_error_raise, calls)
    else:
        if transforms:
            raise ConfigError(
                f"transforms are given with the data set {type(opened).__name__}, which makes its samples itself: "
                "give them to the data set, or give a folder here"
            )
        if readers is not None:
            raise ConfigError(
                f"readers is {readers}, but the data set {type(opened).__name__} reads by itself, on the threads of "
                "decoders="
            )
        if chosen.name != POLICY:
            raise ConfigError(
                f"policy is {chosen.name!r}, but the data set {type(opened).__name__} reads by itself, so that nothing "
                "is kept: leave it out"
            )
        if decoders is None:
            because += ", more while they wait and more load faster, fewer where they wait for each other"
        # Its own code reads and decodes in one go: the threads may be as many as those that wait for a store.
        readers, most_decoders = 0, 0 if decoders else default_readers(cpus)
        sizes_bytes = np.zeros(len(opened), np.int64)
        work = DatasetWork(opened, probes, as_array, on_error_raise, calls, copy_leaves)

    decoders = decoders or cpus
    local_batch = plan.max_local_batch(rank)
    picture_bytes, large_picture_bytes = (
        work.picture_bytes(sizes_bytes, probes[0], calls) if isinstance(work, ImageWork) else (0, 0)
    )
    budget = share_memory(
        memory_bytes,
        slot_bytes=slot_bytes(work.fields, local_batch),
        local_batch=local_batch,
        readers=readers,
        largest_sample_bytes=int(sizes_bytes.max(initial=0)),
        keep_bytes=0 if isinstance(chosen, Staging) else _most_kept_bytes(machine, sizes_bytes),
        picture_bytes=picture_bytes,
        large_picture_bytes=large_picture_bytes,
        decoders=max(decoders, most_decoders),
    )
    if isinstance(work, ImageWork):
        work.limit_decoding(budget.decoding_bytes)
    on = with_memory(machine, budget, decoders, plan.ranks)
    if budget.tier_bytes:
        tiers[1] = MemoryTier(budget.tier_bytes)
    placement = placement_of(chosen, Job(plan, sizes_bytes, on, seed, rank), rank)
    limits = StagingLimits(budget.slots, readers, decoders, budget.undecoded_bytes, most_decoders)
    return Setup(
        plan,
        rank,
        sizes_bytes,
        work,
        budget,
        on,
        machine is not None,
        chosen,
        placement,
        limits,
        cpus,
        because,
        readers_because,
        machine_file,
    )


def _memory_bytes(memory: str | int | None) -> int:
    limit_bytes = memory_limit_bytes()
    if memory is None:
        return limit_bytes // 4 // ranks_on_this_host()
    try:
        memory_bytes = parse_bytes(memory)
    except ConfigError as error:
        raise ConfigError(f"memory: {error}") from error
    if memory_bytes > limit_bytes:
        raise ConfigError(
            f"memory is {format_bytes(memory_bytes)}, and this process may use {format_bytes(limit_bytes)} in all "
            "(the machine's memory or its control group's limit): give less"
        )
    return memory_bytes


def with_memory(machine: Machine | None, budget: MemoryBudget, decoders: int, ranks: int) -> Machine:
    """Return the machine, or a guess at an unknown one, with a loader's memory as its storage classes."""
    if machine is None:
        store = SharedStore(None, Curve(((1, _UNKNOWN_BYTES_PER_SECOND),)), _UNKNOWN_LATENCY_SECONDS)
        fast, source = Curve(((1, _MEMORY_BYTES_PER_SECOND),)), store
    else:
        fast, source = machine.storage[-1].read, machine.source
    storage = [StorageClass("staging", max(1, budget.staging_bytes), decoders, fast)]
    if budget.tier_bytes:
        storage.append(StorageClass("memory", budget.tier_bytes, decoders, fast))
    if machine is None:
        return Machine(source, tuple(storage), ranks, decode_threads=decoders)
    return replace(machine, storage=tuple(storage), ranks=ranks, decode_threads=decoders)


def _most_kept_bytes(machine: Machine | None, sizes_bytes: NDArray[np.int64]) -> int:
    """What the memory tier could use: the data set, or the capacity that the machine names."""
    total_bytes = int(sizes_bytes.sum())
    if machine is None:
        return total_bytes
    tiers = machine.storage[1:]
    largest_bytes = int(sizes_bytes.max(initial=0))
    for tier in tiers:
        if tier.capacity_bytes < largest_bytes:
            raise ConfigError(
                f"machine.storage: {tier.name!r} holds {tier.capacity_bytes:,} bytes; a tier needs at least "
                f"the largest sample ({largest_bytes:,} bytes): raise it or leave the class out"
            )
        if reason := why_not_kept(tier):
            raise ConfigError(f"machine.storage: {reason}: leave that class out")
    return min(total_bytes, sum(tier.capacity_bytes for tier in tiers))

"""What the loader of this version can run, of all that can be simulated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Machine, StorageClass
from penstock.plan.frequency import uses_of
from penstock.policy.loading import Job, Loading, LoadingPolicy, NotSupported
from penstock.policy.placement import Placement
from penstock.trace.schema import SOURCE

#: The loading policies of the package that the loader follows.
LOADER_POLICIES = ("frequency", "frequency-unordered", "staging")


def why_not_kept(tier: StorageClass) -> str | None:
    """Return why the loader keeps no samples in a storage class; None where it does."""
    if tier.backend != "memory":
        return f"storage {tier.name!r} is of backend {tier.backend!r}, and the loader keeps samples in memory only"
    if not tier.is_memory:
        return f"storage {tier.name!r} is a disk by its name, and the loader keeps samples in memory only"
    return None


def why_not_run(machine: Machine, policy: str) -> str | None:
    """Return why the loader does not run a loading policy, by its name, on a machine; None where it does.

    Neither of these runs yet: samples kept on a disk, samples read from another rank's memory, and a policy that is
    more than what each rank keeps of its own reads (see `placement_of`).

    >>> from penstock.machine import Curve, SharedStore
    >>> store = SharedStore(Curve.flat(1e8))
    >>> staging, ram, ssd = (StorageClass(name, 10**9, 2, Curve.flat(1e9)) for name in ("staging", "ram", "ssd"))
    >>> why_not_run(Machine(store, (staging, ram)), "frequency")
    >>> why_not_run(Machine(store, (staging, ssd)), "frequency")
    "storage 'ssd' is a disk by its name, and the loader keeps samples in memory only"
    >>> why_not_run(Machine(store, (staging, ram), ranks=2), "frequency")
    "the loader reads no samples from other ranks' memory"
    """
    if policy not in LOADER_POLICIES:
        return f"the loader's policies are {', '.join(LOADER_POLICIES)}"
    if policy == "staging":  # keeps nothing
        return None
    for tier in machine.storage[1:]:
        if reason := why_not_kept(tier):
            return reason
    if machine.ranks > 1 and len(machine.storage) > 1:
        return "the loader reads no samples from other ranks' memory"
    return None


def placement_of(policy: LoadingPolicy, job: Job, rank: int) -> Placement:
    """Return what a rank keeps by a policy, and in which order it fills its tiers, as the scheduler runs it.

    Where a policy fills several tiers, the next sample is that of the fill whose samples so far are used first.

    Raises: NotSupported naming the policy and what the loader cannot run of it; ConfigError for a policy that fills a
        tier which the machine has not, keeps more than fits, or a sample twice: it names policy, rank and tier.
    """
    loading = prepared(policy, job)
    if reason := _why_not_run(loading, rank):
        raise NotSupported(
            f"the loader does not run policy {policy.name!r} yet, which {reason}. It runs "
            f"{', '.join(LOADER_POLICIES)}, "
            "and those of your own that fill each rank's tiers from the store; penstock simulate loading predicts all"
        )
    fills = [fill for fill in loading.fills if fill.rank == rank and fill.samples.size]
    tier_of = np.full(job.plan.samples, SOURCE, np.int8)
    for fill in fills:
        tier_of[fill.samples] = fill.tier
    order = np.concatenate([fill.samples for fill in fills]) if fills else np.empty(0, np.int64)
    if len(fills) > 1:
        uses = uses_of(job.plan, rank)
        first_use = np.full(job.plan.samples, np.iinfo(np.int64).max)
        first_use[uses.samples] = uses.first
        used_by = np.concatenate([np.maximum.accumulate(first_use[fill.samples]) for fill in fills])
        order = order[np.argsort(used_by, kind="stable")]
    return Placement(tier_of, order.astype(np.int64, copy=False))


def _why_not_run(loading: Loading, rank: int) -> str | None:
    """Return what a policy's decisions ask for that the loader does not do; None if there is nothing."""
    own = [fill for fill in loading.fills if fill.rank == rank]
    asked = {
        "changes who reads what": loading.strings is not None,
        "stages nothing ahead": not loading.stages or loading.is_ready,
        "does not stage from the store": not loading.stages_from_store,
        "hands samples from rank to rank": loading.hits is not None
        or any(fill.origin != "store" for fill in own),
        "fills tiers before the training begins": any(fill.before_training for fill in own),
        "drops samples that it kept": loading.drops,
    }
    return next((what for what, is_asked in asked.items() if is_asked), None)


def prepared(policy: LoadingPolicy, job: Job) -> Loading:
    """Return what a policy decides for a job.

    Raises: NotSupported where the policy cannot run it; ConfigError for decisions that cannot be carried out on the
        job's machine: it names policy, rank and tier.
    """
    loading = policy.prepare(job)
    if not isinstance(loading, Loading):
        raise ConfigError(
            f"policy {policy.name!r} prepared a {type(loading).__name__}: return a penstock.policy.loading.Loading"
        )
    name, storage, samples = policy.name, job.machine.storage, job.plan.samples
    nbytes = np.zeros((job.ranks, len(storage)), np.int64)
    of_ranks: list[list[NDArray[np.int64]]] = [[] for _ in range(job.ranks)]
    for fill in loading.fills:
        where = f"policy {name!r} fills tier {fill.tier} of rank {fill.rank}"
        if not 0 <= fill.rank < job.ranks:
            raise ConfigError(f"{where}, and the ranks are 0 to {job.ranks - 1}")
        if not 1 <= fill.tier < len(storage):
            raise ConfigError(f"{where}, and the tiers are 1 to {len(storage) - 1}: job.machine.storage[1:]")
        _check_ids(f"{where} with", fill.samples, samples)
        nbytes[fill.rank, fill.tier] += job.sizes_bytes[fill.samples].sum()
        if nbytes[fill.rank, fill.tier] > (room := storage[fill.tier].capacity_bytes):
            raise ConfigError(
                f"{where} with {nbytes[fill.rank, fill.tier]:,} bytes, and it holds {room:,}: keep fewer samples"
            )
        of_ranks[fill.rank].append(fill.samples)
    for what, arrays in (("strings", loading.strings), ("hits", loading.hits)):
        if arrays is not None and [each.size for each in arrays] != [each.size for each in job.strings]:
            raise ConfigError(
                f"policy {name!r} gives {what} of other lengths than the plan's strings: keep them"
            )
    for rank, string in enumerate(loading.strings or ()):
        _check_ids(f"policy {name!r} lets rank {rank} read", string, samples)
    if loading.spares is not None and len(loading.spares) != job.ranks:
        raise ConfigError(
            f"policy {name!r} gives spares for {len(loading.spares)} of {job.ranks} ranks: one array each"
        )
    for rank, spares in enumerate(loading.spares or ()):
        _check_ids(f"policy {name!r} gives rank {rank} as a spare", spares, samples)
        of_ranks[rank].append(spares)
    for rank, listed in enumerate(of_ranks):
        ids = np.sort(np.concatenate(listed)) if listed else np.empty(0, np.int64)
        if (twice := np.flatnonzero(ids[1:] == ids[:-1])).size:
            raise ConfigError(
                f"policy {name!r} lets rank {rank} keep sample {ids[twice[0]]} twice: list it in one fill, once, or in "
                "spares"
            )
    for rank, hits in enumerate(loading.hits or ()):
        if hits.max(initial=SOURCE) >= len(storage):
            raise ConfigError(
                f"policy {name!r} has hits in tier {hits.max()} of rank {rank}; tiers are 1 to {len(storage) - 1}"
            )
    return loading


def _check_ids(does: str, ids: NDArray[np.int64], samples: int) -> None:
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= samples:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ConfigError(f"{does} sample {wrong}; samples are 0 to {samples - 1:,}")

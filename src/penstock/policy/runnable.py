"""What the loader of this version can run, of all that can be simulated."""

from __future__ import annotations

import numpy as np

from penstock.errors import ConfigError
from penstock.machine import Machine, StorageClass
from penstock.plan.frequency import uses_of
from penstock.policy.loading import Fill, Job, Loading, LoadingPolicy, NotSupported
from penstock.policy.placement import Placement
from penstock.trace.schema import SOURCE

#: Storage classes of these names are local disks, whatever their backend.
DISK_NAMES = ("ssd", "nvme", "disk")
#: The loading policies of the package that the loader follows.
LOADER_POLICIES = ("frequency", "frequency-unordered", "staging")


def why_not_kept(tier: StorageClass) -> str | None:
    """Return why the loader keeps no samples in a storage class; None where it does."""
    if tier.backend != "memory":
        return f"storage {tier.name!r} is of backend {tier.backend!r}, and the loader keeps samples in memory only"
    if tier.name.lower() in DISK_NAMES:
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
    loading = policy.prepare(job)
    if not isinstance(loading, Loading):
        raise ConfigError(
            f"policy {policy.name!r} prepared a {type(loading).__name__}: return a penstock.policy.loading.Loading"
        )
    if reason := _why_not_run(loading, rank):
        raise NotSupported(
            f"the loader does not run policy {policy.name!r} yet, which {reason}. It runs "
            f"{', '.join(LOADER_POLICIES)}, "
            "and those of your own that fill each rank's tiers from the store; penstock simulate loading predicts all"
        )
    fills = [fill for fill in loading.fills if fill.rank == rank and fill.samples.size]
    tier_of = np.full(job.plan.samples, SOURCE, np.int8)
    for fill in fills:
        _check_fits(policy.name, fill, job, tier_of)
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


def _check_fits(
    policy: str, fill: Fill, job: Job, tier_of: np.ndarray[tuple[int], np.dtype[np.int8]]
) -> None:
    tiers = len(job.machine.storage) - 1
    where = f"policy {policy!r} fills tier {fill.tier} of rank {fill.rank}"
    if not 1 <= fill.tier <= tiers:
        raise ConfigError(f"{where}, and the tiers are 1 to {tiers}: job.machine.storage[1:]")
    if fill.samples.min() < 0 or fill.samples.max() >= job.plan.samples:
        raise ConfigError(f"{where} with a sample outside 0 to {job.plan.samples - 1:,}")
    twice = fill.samples[tier_of[fill.samples] != SOURCE]
    listed = np.zeros(job.plan.samples, np.bool_)
    listed[fill.samples] = True
    if twice.size or np.count_nonzero(listed) < fill.samples.size:
        raise ConfigError(f"{where} with a sample that is already kept: a rank keeps a sample once")
    kept = np.flatnonzero(tier_of == fill.tier)
    nbytes = int(job.sizes_bytes[fill.samples].sum()) + int(job.sizes_bytes[kept].sum())
    if nbytes > (room := job.machine.storage[fill.tier].capacity_bytes):
        raise ConfigError(f"{where} with {nbytes:,} bytes, and it holds {room:,}: keep fewer samples")

"""What the loader of this version can run, of all that can be simulated."""

from __future__ import annotations

from penstock.machine import Machine, StorageClass

#: Storage classes of these names are local disks, whatever their backend.
DISK_NAMES = ("ssd", "nvme", "disk")
#: The loading policies that the loader follows.
LOADER_POLICIES = ("frequency",)


def why_not_kept(tier: StorageClass) -> str | None:
    """Return why the loader keeps no samples in a storage class; None where it does."""
    if tier.backend != "memory":
        return f"storage {tier.name!r} is of backend {tier.backend!r}, and the loader keeps samples in memory only"
    if tier.name.lower() in DISK_NAMES:
        return f"storage {tier.name!r} is a disk by its name, and the loader keeps samples in memory only"
    return None


def why_not_run(machine: Machine, policy: str) -> str | None:
    """Return why the loader does not run a loading policy, by its name, on a machine; None where it does.

    Neither of these runs yet: samples kept on a disk, samples read from another rank's memory, and any policy other
    than "frequency".

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
        return f"the loader's only policy is {' and '.join(LOADER_POLICIES)}"
    for tier in machine.storage[1:]:
        if reason := why_not_kept(tier):
            return reason
    if machine.ranks > 1 and len(machine.storage) > 1:
        return "the loader reads no samples from other ranks' memory"
    return None

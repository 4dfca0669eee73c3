"""What all other ranks of a job keep: memory that this rank maps, on its own host, and what others send it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.policy.placement import Shared
from penstock.ranks.remote_peers import RemotePeers
from penstock.store import MemoryTier
from penstock.store.blocks import BlockTier
from penstock.store.host_memory import Bytes, HostMemory, Ids


class RanksMemory:
    """The same as `HostMemory`, of all ranks.

    near: of this host. far: of others; None where there are none.
    """

    def __init__(self, near: HostMemory, far: RemotePeers | None = None) -> None:
        self._near, self.far = near, far

    @property
    def misses(self) -> int:
        """Samples that a rank had announced and that were not had from it."""
        return self._near.misses + (0 if self.far is None else self.far.misses)

    @property
    def has_news(self) -> bool:
        """Whether ranks keep samples that they did not keep the last time, or give none any more."""
        return self._near.has_news or (self.far is not None and self.far.has_news)

    def take_news(self) -> Sequence[tuple[int, Ids | None]]:
        """Return, by rank, the samples that it keeps since the last time; None where it gives none from now on."""
        return [*self._near.take_news(), *(() if self.far is None else self.far.take_news())]

    def read(self, rank: int, ids: Ids) -> Sequence[Bytes | DataError]:
        """Return the bytes of samples that a rank keeps, read-only; an error in the place of what is not had."""
        holder = self.far if self.far is not None and rank in self.far.ranks else self._near
        return holder.read(rank, ids)

    def end_waits(self) -> None:
        """Have reads that wait for another rank fail."""
        if self.far is not None:
            self.far.end_waits()

    def close(self) -> None:
        """Let all memory go, and end all connections. Twice is harmless."""
        if self.far is not None:
            self.far.close()
        self._near.close()


@dataclass(frozen=True, slots=True)
class Sharing:
    """What ranks of a host, or of the job, keep for each other.

    ranks: all that do, this one among them, ascending. tiers_bytes: by rank, what its tiers hold.
    held: by rank, what an earlier run left on its disks; empty in a prediction without a loader.
    tier: the memory of this one; of blocks for crops. peers: of the others. Both None in a prediction.
    """

    shared: Shared
    ranks: tuple[int, ...]
    tiers_bytes: Mapping[int, Sequence[int]]
    held: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    tier: MemoryTier | BlockTier | None = None
    peers: RanksMemory | None = None

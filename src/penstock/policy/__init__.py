"""What to keep, what to fetch next and from where: decisions taken from plan and machine, without any I/O.

Nothing here knows whether time is real: threads over real stores and a virtual clock drive the same objects.
"""

from penstock.policy.homes import Homes, place_by_first_read, place_by_hash, place_cover
from penstock.policy.merge import AllExtents, ExtentRuns, Extents, MergedRead, MergedReads, merge_reads
from penstock.policy.placement import Kept, Placement, Shared, place_by_frequency
from penstock.policy.push import Handed, decide_push
from penstock.policy.scheduler import (
    Drop,
    Evict,
    Instruction,
    Load,
    Move,
    OwnRead,
    Ready,
    Scheduler,
    Staged,
    StagingLimits,
)
from penstock.policy.thread_count import ThreadCount, ThreadFacts

__all__ = [
    "AllExtents",
    "Drop",
    "Evict",
    "ExtentRuns",
    "Extents",
    "Handed",
    "Homes",
    "Instruction",
    "Kept",
    "Load",
    "MergedRead",
    "MergedReads",
    "Move",
    "OwnRead",
    "Placement",
    "Ready",
    "Scheduler",
    "Shared",
    "Staged",
    "StagingLimits",
    "ThreadCount",
    "ThreadFacts",
    "decide_push",
    "merge_reads",
    "place_by_first_read",
    "place_by_frequency",
    "place_by_hash",
    "place_cover",
]

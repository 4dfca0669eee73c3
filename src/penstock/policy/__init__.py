"""What to keep, what to fetch next and from where: decisions taken from plan and machine, without any I/O.

Nothing here knows whether time is real: threads over real stores and a virtual clock drive the same objects.
"""

from penstock.policy.choice import FetchCosts
from penstock.policy.placement import Placement, place_by_frequency
from penstock.policy.scheduler import Instruction, Load, Read, Ready, Scheduler, Staged, StagingLimits

__all__ = [
    "FetchCosts",
    "Instruction",
    "Load",
    "Placement",
    "Read",
    "Ready",
    "Scheduler",
    "Staged",
    "StagingLimits",
    "place_by_frequency",
]

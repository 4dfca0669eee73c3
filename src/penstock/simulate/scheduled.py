"""A scenario's run as the loaders of all ranks would run it: their schedulers in virtual time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.machine import Machine
from penstock.plan import AccessPlan
from penstock.policy import StagingLimits
from penstock.policy.loading import Job
from penstock.policy.runnable import placement_of, why_not_run
from penstock.simulate.assumptions import PHYSICAL
from penstock.simulate.loading import Run, run_in_virtual_time, steps_of
from penstock.simulate.policies import policy_named
from penstock.simulate.scenario import Scenario

#: What a read takes at most, of all ranks, compiled, on one core. Measured: 0.3 to 0.5 us.
SECONDS_PER_READ = 1e-6
#: The spans of runs of more reads would take more than 4 GB.
MOST_READS = 30_000_000
#: More slots than this change nothing: a batch is staged long before it is due.
_MOST_SLOTS = 64


def is_scheduled(scenario: Scenario, policy: str) -> bool:
    """Whether the loaders' schedulers can predict a scenario under a policy, by its name, if `MOST_READS` allows it.

    A policy and machine that the loader runs (`why_not_run`), and nothing assumed but what is physical.
    """
    return scenario.assumptions == PHYSICAL and why_not_run(scenario.machine, policy) is None


def predict_job(scenario: Scenario, policy: str) -> Run:
    """Run a scenario for which `is_scheduled` holds as the loaders would, with as many readers as the store rewards.

    Time: `SECONDS_PER_READ`. Raises: ConfigError if the machine's compute is unknown.
    """
    plan, sizes_bytes, machine = scenario.plan(), scenario.sizes_bytes(), scenario.machine
    if machine.compute is None:
        raise ConfigError(
            "machine.compute is unknown: say how fast the training consumes, for example '100 MB/s'"
        )
    ranks = range(plan.ranks)
    chosen = policy_named(policy)
    kept = [
        placement_of(chosen, Job(plan, sizes_bytes, machine, scenario.seed, rank), rank).kept
        for rank in ranks
    ]
    limits = limits_of(plan, machine, sizes_bytes, machine.source.threads)
    return run_in_virtual_time(steps_of(plan, ranks, plan.strings()), machine, sizes_bytes, kept, limits)


def limits_of(
    plan: AccessPlan, machine: Machine, sizes_bytes: NDArray[np.int64], readers: int
) -> StagingLimits:
    """Return what a rank has under way at most: half of the staging buffer is slots, half is for bytes on their way."""
    staging_bytes = machine.storage[0].capacity_bytes
    batch_bytes = plan.max_local_batch(0) * max(1.0, float(sizes_bytes.mean()))
    return StagingLimits(
        slots=int(np.clip(staging_bytes / 2 // batch_bytes, 2, _MOST_SLOTS)),
        readers=readers,
        decoders=machine.decode_threads,
        undecoded_bytes=staging_bytes // 2,
    )

"""A scenario's run on one rank as the loader would run it: its scheduler on a virtual clock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.machine import Machine
from penstock.plan import AccessPlan
from penstock.policy import StagingLimits
from penstock.policy.runnable import why_not_run
from penstock.simulate.assumptions import PHYSICAL
from penstock.simulate.loading import predict
from penstock.simulate.scenario import Scenario
from penstock.trace import Trace

#: What the scheduler takes for a sample that is read, on one core. Measured: 20 to 30 us.
SECONDS_PER_READ = 25e-6
#: Runs of more reads would take minutes, and a gigabyte for their spans.
MOST_READS = 2_000_000
#: More slots than this change nothing: a batch is staged long before it is due.
_MOST_SLOTS = 64


def is_scheduled(scenario: Scenario, policy: str) -> bool:
    """Whether the loader's scheduler can predict a scenario under a policy, by its name, if `MOST_READS` allows it.

    One rank, a policy and machine that the loader runs (`why_not_run`), and nothing assumed but what is physical.
    """
    return (
        scenario.ranks == 1
        and scenario.assumptions == PHYSICAL
        and why_not_run(scenario.machine, policy) is None
    )


def predict_one_rank(scenario: Scenario, policy: str) -> Trace:
    """Run a scenario for which `is_scheduled` holds as the loader would, with as many readers as the store rewards.

    Time: about 25 us a read. Raises: ConfigError if the machine's compute is unknown.
    """
    plan, sizes_bytes, machine = scenario.plan(), scenario.sizes_bytes(), scenario.machine
    return predict(
        plan,
        machine,
        sizes_bytes,
        limits=limits_of(plan, machine, sizes_bytes, machine.source.threads),
        policy=policy,
    )


def limits_of(
    plan: AccessPlan, machine: Machine, sizes_bytes: NDArray[np.int64], readers: int
) -> StagingLimits:
    """Return what rank 0 has under way at most: half of the staging buffer is slots, half is for bytes on their way."""
    staging_bytes = machine.storage[0].capacity_bytes
    batch_bytes = plan.max_local_batch(0) * max(1.0, float(sizes_bytes.mean()))
    return StagingLimits(
        slots=int(np.clip(staging_bytes / 2 // batch_bytes, 2, _MOST_SLOTS)),
        readers=readers,
        decoders=machine.decode_threads,
        undecoded_bytes=staging_bytes // 2,
    )

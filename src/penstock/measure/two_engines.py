"""One rank's run by both time engines: the loader's own scheduler on a virtual clock, and the request model.

Where both can predict a run, they share plan, sizes, placement and machine. What differs is how time passes; the
differences are explained in docs/howto/two-engines.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.loader.prediction import prepare_clock
from penstock.machine import Curve, Machine
from penstock.plan import AccessPlan, Explicit
from penstock.policy.loading import Frequency, Job, LoadingPolicy, Staging
from penstock.simulate import predict
from penstock.simulate.assumptions import Assumptions
from penstock.simulate.requests import readers_of, simulate_job
from penstock.simulate.scenario import Scenario
from penstock.simulate.scheduled import limits_of


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Rank 0 under one policy, without peers, while all ranks read the store; both engines' run time and waiting."""

    policy: str
    scheduler_seconds: float
    requests_seconds: float
    scheduler_stall_seconds: float
    requests_stall_seconds: float


def run_two_engines(scenario: Scenario) -> list[SideBySide]:
    """Return rank 0's run under staging alone and with its own tiers filled by frequency.

    The rank has its share of the store, as if all ranks read it all the time, and waits for no other rank.
    Half of the staging buffer is batch slots and half is for bytes on their way; readers are as many as the request
    model's, those of the tiers included, because the scheduler has one pool for both.
    Raises: ConfigError for a split that gives rank 0 nothing to read.
    """
    whole = scenario.plan()
    machine = _alone(scenario.machine)
    plan = AccessPlan(
        Explicit(lambda epoch: whole.stream(0, epoch, 0, _reads(whole, epoch)), whole.samples),
        batch_size=whole.local_batch_size(0, 0, 0),
        epochs=whole.epochs,
    )
    sizes_bytes = scenario.sizes_bytes()
    own = Frequency(stages_from_peers=False)
    without_tiers = replace(machine, storage=machine.storage[:1])
    return [
        _run(Job(plan, sizes_bytes, without_tiers, scenario.seed), Staging(), scenario.assumptions),
        _run(Job(plan, sizes_bytes, machine, scenario.seed), own, scenario.assumptions),
    ]


def _alone(machine: Machine) -> Machine:
    """Return the machine of one rank that has a rank's share of the store."""
    clients = machine.source.clients
    if clients is None:
        return replace(machine, ranks=1)
    share = Curve.flat(clients.at(machine.ranks) / machine.ranks)
    return replace(machine, ranks=1, source=replace(machine.source, clients=share))


def _reads(plan: AccessPlan, epoch: int) -> int:
    return sum(plan.local_batch_size(0, epoch, step) for step in range(plan.steps(epoch)))


def _run(job: Job, policy: LoadingPolicy, assumptions: Assumptions) -> SideBySide:
    machine = job.machine
    readers = readers_of(machine, assumptions) + sum(tier.threads for tier in machine.storage[1:])
    limits = limits_of(job.plan, machine, job.sizes_bytes, readers)
    prepare_clock(job.plan.reads(0))
    trace = predict(job.plan, machine, job.sizes_bytes, limits=limits)
    epochs = trace.epochs()
    result = simulate_job(job, policy, assumptions)
    return SideBySide(
        policy.name,
        sum(epoch.own_seconds + epoch.stall_seconds for epoch in epochs),
        result.run_seconds,
        sum(epoch.stall_seconds for epoch in epochs),
        float(result.stall_seconds[0]),
    )

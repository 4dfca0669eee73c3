"""Loading policies side by side: the same job under each, for several seeds and numbers of ranks.

The compiled loops run without the interpreter's lock, so threads run them at once over one copy of the access strings.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from penstock.flow.cpus import available_cpus
from penstock.measure.own_policy import with_errors_in_one_line
from penstock.policy.loading import Job, LoadingPolicy, NotSupported
from penstock.simulate.scenario import Scenario
from penstock.simulate.scheduled import ORIGINS, LoadingResult, simulate_job


@dataclass(frozen=True, slots=True)
class PolicyRuns:
    """One policy on so many ranks.

    run_seconds: of each seed. result: of the first seed; None where the policy cannot run the job: `reason` says why.
    total_bytes: S of the first seed.
    """

    policy: str
    ranks: int
    run_seconds: tuple[float, ...]
    result: LoadingResult | None
    total_bytes: int
    reason: str = ""

    @property
    def not_runnable_reason(self) -> str | None:
        """Why the loader of this version does not run it; None where it does."""
        return self.reason or None if self.result is None else self.result.not_runnable_reason

    @property
    def mean_seconds(self) -> float | None:
        """Mean run time over the seeds; None where the policy cannot run."""
        return float(np.mean(self.run_seconds)) if self.run_seconds else None

    @property
    def spread_seconds(self) -> float | None:
        """Standard deviation of the run time over the seeds; None with fewer than two."""
        return float(np.std(self.run_seconds, ddof=1)) if len(self.run_seconds) > 1 else None

    def shares(self) -> dict[str, float]:
        """Return which share of the samples that were read came from where, of the first seed: names as in ORIGINS."""
        if self.result is None:
            return {}
        reads = self.result.reads.sum(axis=0)
        return dict(zip(ORIGINS, (reads / max(1, reads.sum())).tolist(), strict=True))


def run_policies(
    scenario: Scenario,
    policies: Sequence[LoadingPolicy],
    *,
    repeats: int = 1,
    ranks: Sequence[int] = (),
    simulate: Callable[[Job, LoadingPolicy], LoadingResult] = simulate_job,
    done: Callable[[int], None] = lambda _done: None,
) -> list[PolicyRuns]:
    """Run every policy for every number of ranks, the scenario's own unless given, and `repeats` seeds from its own on.

    simulate: runs a job under a policy.
    done: called with how many of len(ranks) * repeats * len(policies) runs are done.
    Returns: by number of ranks, then in the order of the policies.
    Raises: what `simulate` raises, but for NotSupported.
    """
    rows = []
    count_done = 0
    for count in ranks or (scenario.ranks,):
        times: list[list[float]] = [[] for _ in policies]
        results: list[LoadingResult | None] = [None] * len(policies)
        reasons = [""] * len(policies)
        total_bytes = 0
        for offset in range(repeats):
            job = _job(scenario, count, offset)
            total_bytes = total_bytes or job.total_bytes
            # Closed at once, not when it is collected, where `done` is interrupted.
            with closing(_run_all(job, policies, simulate)) as outcomes:
                for place, outcome in outcomes:
                    count_done += 1
                    done(count_done)
                    if isinstance(outcome, NotSupported):
                        reasons[place] = str(outcome)
                        continue
                    times[place].append(outcome.run_seconds)
                    if offset == 0:
                        results[place] = outcome
        rows += [
            PolicyRuns(policy.name, count, tuple(seconds), result, total_bytes, reason)
            for policy, seconds, result, reason in zip(policies, times, results, reasons, strict=True)
        ]
    return rows


def _job(scenario: Scenario, ranks: int, seed_offset: int) -> Job:
    scaled = scenario.with_ranks(ranks)
    sizes_bytes = scaled.sizes_bytes(seed_offset)
    job = Job(scaled.plan(seed_offset), sizes_bytes, scaled.machine, scenario.seed + seed_offset)
    # Computed here, once, and not by the first of several threads that ask.
    assert job.strings is not None
    assert job.total_bytes >= 0
    return job


def _run_all(
    job: Job, policies: Sequence[LoadingPolicy], simulate: Callable[[Job, LoadingPolicy], LoadingResult]
) -> Generator[tuple[int, LoadingResult | NotSupported], None, None]:
    def run(policy: LoadingPolicy) -> LoadingResult | NotSupported:
        try:
            return simulate(job, with_errors_in_one_line(policy))
        except NotSupported as error:
            return error

    pool = ThreadPoolExecutor(available_cpus(), "penstock-simulate")
    try:
        yield from enumerate(pool.map(run, policies))
    finally:
        pool.shutdown(cancel_futures=True)

"""How fast whole jobs are simulated, and how the time grows.

    python benchmarks/requests.py [--quick] [--large]

Checks first that every sample is consumed once. Then: samples
per second under some policies; Scenario 4 under all policies, as `penstock simulate loading scenario4` runs it
(target: under 20 s on 2 cores); one rank and four without tiers (target: 1.3 million samples x 3 epochs under 10 s);
how time grows with F, N and E, as exponents of a fitted power. --large: F = 10^8 on N = 1,024 ranks for one epoch, with
the peak of memory; it takes minutes. Warm: all is compiled before it is timed.
"""

from __future__ import annotations

import argparse
import platform
import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date

import numpy as np

from penstock.flow.cpus import available_cpus
from penstock.loader.prediction import prepare_clock
from penstock.measure.policies import run_policies
from penstock.policy.loading import Job
from penstock.simulate import predict
from penstock.simulate.loading import WORTH_COMPILING_READS
from penstock.simulate.policies import POLICY_NAMES, policy_named
from penstock.simulate.scenario import Scenario, scenario_named
from penstock.simulate.scheduled import limits_of, simulate_loading
from penstock.simulate.sizes import SizeDistribution

POLICIES = ("naive", "staging", "frequency", "cover", "push")


def main(arguments: list[str] | None = None) -> None:
    """Check the answers, time them, print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small: shows that it runs, not how fast")
    parser.add_argument("--large", action="store_true", help="F = 10^8, N = 1,024, one epoch, staging alone")
    options = parser.parse_args(arguments)
    quick: bool = options.quick
    print(
        f"{date.today()}, {platform.processor() or platform.machine()}, {available_cpus()} cores, "
        f"Python {platform.python_version()}"
    )
    check_answers()
    if options.large:
        show_large()
        return
    show_speed(2_000 if quick else 50_000)
    show_scenario_4(2_000 if quick else 400_000)
    show_schedulers([2_000, 4_000] if quick else [50_000, 1_300_000])
    show_growth(*((1_000, (1, 2)) if quick else (70_000, (1, 2, 4, 8))))


def a_scenario(samples: int, ranks: int, epochs: int) -> Scenario:
    """Return scenario 4 with other numbers: tiers hold the share of the data set that they hold there."""
    scenario = scenario_named("scenario4")
    assert isinstance(scenario.data, SizeDistribution)
    share = samples * 4 / (scenario.samples * ranks)
    staging, *tiers = scenario.machine.storage
    smaller = [replace(tier, capacity_bytes=int(tier.capacity_bytes * share)) for tier in tiers]
    return replace(
        scenario,
        machine=replace(scenario.machine, ranks=ranks, storage=(staging, *smaller)),
        data=replace(scenario.data, samples=samples),
        batch_size=25 * ranks,
        epochs=epochs,
    )


def check_answers() -> None:
    """Raise when a run does not come out as it must; compiles virtual time on the way."""
    prepare_clock(WORTH_COMPILING_READS)
    small = a_scenario(1_000, 4, 2)
    for name in POLICY_NAMES:
        if not name.startswith("lbann"):
            reads = simulate_loading(small, policy_named(name)).reads
            assert reads.sum() == 2_000, f"{name} consumes every sample once an epoch"


def timed(scenario: Scenario, policy: str) -> float:
    """Return the seconds of a run, strings and decisions included; the least of two."""
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        simulate_loading(scenario, policy_named(policy))
        times.append(time.perf_counter() - begin)
    return min(times)


def show_speed(samples: int) -> None:
    """Print samples per second under some policies."""
    print(f"\nthousand samples per second, one core, F = {samples:,}, N = 4, E = 5")
    print("".join(f"{name:>12}" for name in POLICIES))
    scenario = a_scenario(samples, 4, 5)
    print("".join(f"{5 * samples / timed(scenario, name) / 1e3:12,.0f}" for name in POLICIES))


def show_scenario_4(samples: int) -> None:
    """Print what all policies of scenario 4 take together, on all cores."""
    print(f"\nscenario 4, F = {samples:,}, all {len(POLICY_NAMES)} policies")
    scenario = scenario_named("scenario4")
    assert isinstance(scenario.data, SizeDistribution)
    scenario = replace(scenario, data=replace(scenario.data, samples=samples))
    wall, cpu = time.perf_counter(), time.process_time()
    run_policies(scenario, [policy_named(name) for name in POLICY_NAMES])
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{wall:8.2f} s wall {cpu:8.2f} s CPU")


def show_schedulers(sizes: Sequence[int]) -> None:
    """Print what the schedulers of one rank and of four take in virtual time, without spans and with them."""
    print("\nschedulers in virtual time, staging, one core, E = 3: seconds, and microseconds a read")
    for samples in sizes:
        for ranks in (1, 4):
            scenario = a_scenario(samples, ranks, 3)
            machine = replace(scenario.machine, storage=scenario.machine.storage[:1])
            alone = replace(scenario, machine=machine)
            begin = time.perf_counter()
            result = simulate_loading(alone, policy_named("staging"))
            seconds = time.perf_counter() - begin
            assert result.reads.sum() == 3 * samples, "every sample is consumed once an epoch"
            print(f"F = {samples:9,}, N = {ranks}: {seconds:6.2f} s, {seconds / samples / 3 * 1e6:.1f} us")
        plan, sizes_bytes = alone.with_ranks(1).plan(), alone.sizes_bytes()
        on = replace(machine, ranks=1)
        limits = limits_of(plan, on, sizes_bytes, on.source.threads)
        begin = time.perf_counter()
        trace = predict(Job(plan, sizes_bytes, on), limits=limits)
        seconds = time.perf_counter() - begin
        print(f"F = {samples:9,}, N = 1: {seconds:6.2f} s with {trace.spans.size:,} spans (penstock.predict)")


def show_growth(base: int, factors: Sequence[int]) -> None:
    """Print seconds against F, N and E, one at a time, and the exponent of each."""
    grows = ", ".join(map(str, factors))
    print(f"\nseconds as one number grows by {grows} (from F = {base:,}, N = 4, E = 2), and its exponent")
    for name in POLICIES:
        for letter in "FNE":
            seconds = [
                timed(
                    a_scenario(
                        base * (factor if letter == "F" else 1),
                        4 * (factor if letter == "N" else 1),
                        2 * (factor if letter == "E" else 1),
                    ),
                    name,
                )
                for factor in factors
            ]
            cells = "".join(f"{each:9.3f}" for each in seconds)
            print(f"{name:12}{letter}{cells}   {exponent(factors, seconds):5.2f}")


def exponent(factors: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope of seconds against factors on logarithmic axes."""
    return float(np.polyfit(np.log(factors), np.log(seconds), 1)[0])


def show_large() -> None:
    """Print time and peak memory of 10^8 samples on 1,024 ranks, staged for one epoch."""
    scenario = a_scenario(10**8, 1024, 1)
    begin = time.perf_counter()
    result = simulate_loading(scenario, policy_named("staging"))
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert result.reads.sum() == 10**8 - 10**8 % scenario.batch_size
    print(
        f"\nF = 10^8, N = 1,024, E = 1, staging: {seconds:.0f} s, peak {peak / 1e9:.1f} GB, "
        f"a run of {result.run_seconds:,.0f} s"
    )


if __name__ == "__main__":
    main()

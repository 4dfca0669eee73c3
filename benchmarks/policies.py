"""What the rules about loading policies rest on: the loader's default, and the tiers that stay empty.

    python benchmarks/policies.py           run times under each of the loader's policies over those of its default
    python benchmarks/policies.py --tiers   run times with a tier that is slow beside the store over those without

The first predicts jobs of one to three epochs on a spread of machines, by the schedulers in virtual time. No rank reads
from another, as in the loader. Its last line is what the default rests on, see docs/decisions. The second has policies
keep samples in the tier however slow it is; `penstock.policy.loading.LEAST_SHARE` is where that no longer pays.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.loader.prediction import prepare_clock
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.policy.loading import Job, Loading, LoadingPolicy
from penstock.policy.runnable import LOADER_POLICIES
from penstock.simulate.loading import WORTH_COMPILING_READS
from penstock.simulate.policies import policy_named
from penstock.simulate.scenario import Scenario
from penstock.simulate.scheduled import simulate_job
from penstock.simulate.sizes import SizeDistribution

DEFAULT = "frequency"
#: Policies that fill tiers, and how many times slower than the store a disk is.
FILLS_TIERS = ("frequency", "cover", "push")
SLOWER = (1, 1.5, 2, 2.5, 3, 5, 10)
EPOCHS = (1, 2, 3)
#: Decode threads of a rank, bytes/s that they take together, and bytes/s at which the training consumes.
THREADS, DECODE, COMPUTE = 8, 400e6, 200e6
MEMORY = Curve.flat(5e9)

#: Of each: bytes/s of all ranks, seconds before a read's bytes flow, reads in flight, seconds of each read besides.
STORES = {
    "slow store": SharedStore(Curve.flat(30e6), latency_seconds=0.02, threads=16),
    "store of few requests": SharedStore(Curve.flat(500e6), threads=16, request_seconds=0.002),
    "local disk": SharedStore(None, Curve.flat(500e6), latency_seconds=1e-4, threads=8),
    "fast store": SharedStore(Curve.flat(5e9), latency_seconds=1e-3, threads=32),
}
SAMPLE_BYTES = {"2 kB": 2e3, "100 kB": 100e3, "5 MB": 5e6}
#: What a rank keeps: share of the data set, seconds before a read of it, bytes/s.
KEPT = {
    "no memory": (0.0, 0.0, 5e9),
    "memory for 10 %": (0.1, 0.0, 5e9),
    "memory for 60 %": (0.6, 0.0, 5e9),
    "memory for all": (1.0, 0.0, 5e9),
    "far memory for 60 %": (0.6, 5e-3, 20e6),  # slower than every store but the first
}


def machines(samples: int) -> Iterator[tuple[str, Scenario]]:
    """Yield each machine with its job, by name."""
    for (store, source), (size, sample_bytes), (kept, (share, latency, rate)), ranks in itertools.product(
        STORES.items(), SAMPLE_BYTES.items(), KEPT.items(), (1, 4)
    ):
        local_batch, count = (64, samples) if sample_bytes < 1e6 else (16, samples // 4)
        staging = StorageClass("staging", int(16 * sample_bytes * local_batch), 8, MEMORY)
        nbytes = int(share * count * sample_bytes)
        tier = StorageClass("memory", max(1, nbytes), 8, Curve.flat(rate), latency_seconds=latency)
        machine = Machine(
            source,
            (staging, tier) if share else (staging,),
            ranks,
            preprocess_bytes_per_second=DECODE / THREADS,
            compute=Rate(COMPUTE),
            decode_threads=THREADS,
        )
        sizes = SizeDistribution("normal", count, (("loc", sample_bytes), ("scale", sample_bytes / 4)))
        yield f"{store}, {size}, {kept}, {ranks}", Scenario(store, machine, sizes, local_batch * ranks, 1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiers", action="store_true", help="slow tiers instead of the default")
    parser.add_argument("--quick", action="store_true", help="few and small: shows that it runs")
    options = parser.parse_args(arguments)
    prepare_clock(0 if options.quick else WORTH_COMPILING_READS)
    samples, most = (200, 3) if options.quick else (20_000, None)
    if options.tiers:
        show_tiers(samples // 5, most)
    else:
        show_default(samples, most)


def show_default(samples: int, most: int | None) -> None:
    """Compare the loader's policies on the first so many machines, or all."""
    others = [name for name in LOADER_POLICIES if name != DEFAULT]
    print(f"run time under {' and '.join(others)} over that under {DEFAULT}, after 1, 2 and 3 epochs")
    print("store, size of a sample, what a rank keeps, ranks")
    savings = [(0.0, "none saves any")]
    for name, scenario in itertools.islice(machines(samples), most):
        texts = []
        for epochs in EPOCHS:
            run_seconds = predicted(replace(scenario, epochs=epochs))
            default = run_seconds[DEFAULT]
            savings += [
                (1 - run_seconds[other] / default, f"{other} on {name}, epochs: {epochs}") for other in others
            ]
            ratios = " ".join(f"{run_seconds[other] / default:6.3f}" for other in others)
            texts.append(f"{default:8.2f} s: {ratios}")
        print(f"{name:55} {'   '.join(texts)}", flush=True)
    share, where = max(savings)
    print(f"The most that another than {DEFAULT} saves: {100 * share:.2f} % of the run ({where})")


@dataclass(frozen=True)
class Alone:
    """A policy of ranks that, as in the loader, read nothing from each other."""

    policy: LoadingPolicy

    @property
    def name(self) -> str:
        return self.policy.name

    def prepare(self, job: Job) -> Loading:
        return replace(self.policy.prepare(job), stages_from_peers=False)


def predicted(scenario: Scenario) -> dict[str, float]:
    """Return the run time of a job under each policy of the loader, in seconds."""
    job = Job(scenario.plan(), scenario.sizes_bytes(), scenario.machine, scenario.seed)
    run_seconds = {}
    for name in LOADER_POLICIES:
        result = simulate_job(job, Alone(policy_named(name)))
        assert result.not_runnable_reason is None, result.not_runnable_reason
        run_seconds[name] = result.run_seconds
    return run_seconds


class Willing(Job):
    """A job in which no tier is too slow."""

    def worthwhile_bytes(self, least_share: float = 0.0, rank: int | None = None) -> list[int]:
        """See `Job.worthwhile_bytes`."""
        return self.capacities_bytes(rank)


def show_tiers(samples: int, most: int | None) -> None:
    """Compare runs with a disk for three quarters of the samples and without, on the first so many machines, or all."""
    print("run time with the disk over that without, under " + " / ".join(FILLS_TIERS))
    print(f"{'ranks, reads, batches':24} " + "   ".join(f"{times:^16g}" for times in SLOWER))
    cases = itertools.product((1, 4), ((4, 0.0), (16, 0.01)), (4, 16))
    for ranks, (threads, latency), batches in itertools.islice(cases, most):
        texts = []
        for times in SLOWER:
            scenario = before_a_disk(samples, ranks, threads, latency, batches, 100e6 / ranks / times)
            ratios = [compared(scenario, name) for name in FILLS_TIERS]
            texts.append(" / ".join(f"{ratio:.2f}" for ratio in ratios))
        name = f"{ranks}, {threads} x {1e3 * latency:g} ms, {batches}"
        print(f"{name:24} " + "   ".join(f"{text:^16}" for text in texts), flush=True)


def before_a_disk(
    samples: int, ranks: int, threads: int, latency: float, batches: int, bytes_per_second: float
) -> Scenario:
    """Return three epochs from a store of 100 MB/s, on machines that stage so many batches and have such a disk."""
    sample_bytes, local_batch = 100_000, min(64, samples // ranks)
    staging = StorageClass("staging", batches * local_batch * sample_bytes, THREADS, MEMORY)
    disk = StorageClass("ssd", samples * sample_bytes * 3 // 4, THREADS, Curve.flat(bytes_per_second), MEMORY)
    machine = Machine(
        SharedStore(Curve.flat(100e6), latency_seconds=latency, threads=threads),
        (staging, disk),
        ranks,
        network_bytes_per_second=1e9,
        preprocess_bytes_per_second=DECODE,
        compute=Rate(COMPUTE),
        decode_threads=THREADS,
    )
    sizes = SizeDistribution("constant", samples, (("loc", sample_bytes),))
    return Scenario("disk", machine, sizes, local_batch * ranks, 3)


def compared(scenario: Scenario, policy: str) -> float:
    """Return the run time of a scenario over that without its disk."""
    storage, run_seconds = scenario.machine.storage, []
    for some in (storage, storage[:1]):
        job = Willing(scenario.plan(), scenario.sizes_bytes(), replace(scenario.machine, storage=some))
        run_seconds.append(simulate_job(job, policy_named(policy)).run_seconds)
    return run_seconds[0] / run_seconds[1]


if __name__ == "__main__":
    main()

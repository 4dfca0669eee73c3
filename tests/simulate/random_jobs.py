"""Random jobs: drawn from a seed, because hypothesis takes longer to draw one value by value than models to run it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import inf
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy.loading import Fill, Job


def random_rate(random: Random) -> float:
    # Sevenths: no two ways cost the same by accident, which would leave the choice to the last bit.
    return random.randint(7, 400) / 7


def random_curve(random: Random) -> Curve:
    users = random.sample(range(1, 7), random.randint(1, 3))
    return Curve(tuple((float(count), random_rate(random)) for count in sorted(users)))


def random_plan(random: Random) -> AccessPlan:
    return AccessPlan(
        FullShuffle(random.randint(1, 12), random.randint(0, 99)),
        random.randint(1, 8),
        random.randint(1, 3),
        random.randint(1, 4),
        random.choice(["uniform", "strided", "imbalanced"]),
    )


def random_machine(random: Random, ranks: int, *, has_latency: bool) -> Machine:
    """Return a machine of one to three classes. has_latency: whether some of its reads, and of the store's, wait."""
    storage = tuple(
        StorageClass(
            f"class {number}",
            random.randint(1, 150),
            random.randint(1, 3),
            random_curve(random),
            random.choice([None, random_curve(random)]),
            random.choice([0.0, 0.0, 1 / 3]) if number and has_latency else 0.0,
        )
        for number in range(random.randint(1, 3))
    )
    clients = random.choice([None, random_curve(random), random_curve(random)])
    own = random.choice([None, random_curve(random)]) if clients else random_curve(random)
    waits = (random.choice([0.0, 0.0, 0.7]), random.randint(1, 4)) if has_latency else ()
    return Machine(
        SharedStore(clients, own, *waits),
        storage,
        ranks,
        random.choice([inf, random_rate(random)]),
        random.choice([inf, random_rate(random)]),
        random.choice([inf, random_rate(random)]),
        Rate(random_rate(random), random.choice(["bytes", "samples"])),
        random.randint(1, 3),
    )


def random_job(random: Random, *, has_latency: bool) -> Job:
    plan = random_plan(random)
    machine = random_machine(random, plan.ranks, has_latency=has_latency)
    sizes = np.array([random.randint(1, 40) for _ in range(plan.samples)], np.int64)
    return Job(plan, sizes, machine, random.randint(0, 9))


def random_fills(
    random: Random, job: Job, origins: Sequence[str]
) -> tuple[list[Fill], list[NDArray[np.int64]]]:
    """Return fills that no policy decides, as far as tiers have space, and of each rank the samples that none has.

    origins: of fills that go on while the training runs; others are from the store or from peers.
    """
    storage, samples = job.machine.storage, job.plan.samples
    fills, spares = [], []
    for rank in range(job.ranks):
        order = random.sample(range(samples), samples)
        cuts = sorted(random.randint(0, samples) for _ in storage[1:])
        for tier, (begin, end) in enumerate(itertools.pairwise([0, *cuts]), start=1):
            kept = np.array(order[begin:end], np.int64)
            fits = np.cumsum(job.sizes_bytes[kept]) <= storage[tier].capacity_bytes
            is_before = random.random() < 0.5
            origin: Any = random.choice(["store", "peers"] if is_before else origins)
            fills.append(Fill(rank, tier, kept[fits], origin, is_before))
        spares.append(np.array(order[cuts[-1] if cuts else samples :], np.int64))
    return fills, spares

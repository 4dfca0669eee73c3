"""What the split "local" does to a model with BatchNorm: accuracy by either split, of the same global batches.

    python benchmarks/scale/local_batches.py

Points of ten classes that overlap, a perceptron of two hidden layers with BatchNorm behind each, trained as 8 ranks do:
each takes the statistics of its own 8 samples, gradients are averaged. By "local" six of seven samples of a rank are
the same in every epoch. Printed for each seed: how many other points the model gets right, with the running statistics
of rank 0, trained by "balanced" and by "local". A busy machine prints the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import mean, stdev

import numpy as np
import torch
from torch import nn

from penstock.plan import AccessPlan, FullShuffle

RANKS, LOCAL_BATCH, CLASSES, WIDTH = 8, 8, 10, 32


def points(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points around the centres of their classes, and the classes."""
    centres = np.random.default_rng(0).normal(size=(CLASSES, WIDTH))
    draws = np.random.default_rng(seed)
    classes = draws.integers(0, CLASSES, count)
    found = centres[classes] + 1.6 * draws.normal(size=(count, WIDTH))
    return torch.tensor(found, dtype=torch.float32), torch.tensor(classes)


def accuracy(split: str, seed: int, samples: int, epochs: int) -> float:
    """Train, and return the share of other points whose class is found."""
    plan = AccessPlan(FullShuffle(samples, seed), RANKS * LOCAL_BATCH, epochs, RANKS, split)
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for width in (WIDTH, 64):
        layers += [nn.Linear(width, 64), nn.BatchNorm1d(64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * plan.steps(0))
    of_rank_0 = [each for each in model if isinstance(each, nn.BatchNorm1d)]
    data, classes = points(samples, 1)
    for epoch in range(epochs):
        for step in range(plan.steps(epoch)):
            optimizer.zero_grad()
            for rank in range(RANKS):
                for each in of_rank_0:
                    each.momentum = 0.1 if rank == 0 else 0.0
                ids = torch.from_numpy(plan.local_batch(rank, epoch, step))
                loss = nn.functional.cross_entropy(model(data[ids]), classes[ids]) / RANKS
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    model.eval()
    others, truth = points(16_384, 2)
    with torch.no_grad():
        return float((model(others).argmax(1) == truth).float().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few points, two seeds")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args(arguments)
    samples, epochs, seeds = (256, 2, 2) if given.quick else (2_048, 15, given.seeds)
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"balanced": [], "local": []}
    for seed in range(seeds):
        for split, accuracies in found.items():
            accuracies.append(accuracy(split, seed, samples, epochs))
        both = ", ".join(f"{split} {100 * accuracies[-1]:.2f} %" for split, accuracies in found.items())
        print(f"seed {seed}: {both}", flush=True)
    if seeds == 1:
        return
    spread = ", ".join(
        f"{split} {100 * mean(each):.2f} +- {100 * stdev(each):.2f} %" for split, each in found.items()
    )
    print(f"over seeds: {spread}")


if __name__ == "__main__":
    main()

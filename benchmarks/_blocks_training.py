"""A small training, as people write them, of which benchmarks/blocks.py records the block references.

    python benchmarks/_blocks_training.py DATA SAVES [--sampler torch|bundle|alternate] [--epochs E] [--workers W]

Trains on a folder of raw float32 files with PyTorch's DataLoader, saves the weights after every epoch, and prints for
each epoch the ids in the order in which the sampler gave them out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from penstock.torch import BundleRandomSampler

FEATURES = 2_000


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """float32[FEATURES] and its label from each file of a folder."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.f32"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.frombuffer(bytearray(self.files[index].read_bytes()), dtype=torch.float32), index % 2


class Told(Sampler[int]):
    """Another sampler, whose ids are printed."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        ids = list(self.sampler)
        print("epoch", *ids)
        return iter(ids)


def make_data(folder: Path, samples: int, seed: int = 0) -> None:
    """Write `samples` files of 8,000 bytes: two blocks of 4 KiB each."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    for sample in range(samples):
        values = generator.normal(sample % 2, 1.0, FEATURES).astype(np.float32)
        (folder / f"{sample:05}.f32").write_bytes(values.tobytes())


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description="a small training")
    parser.add_argument("data", type=Path)
    parser.add_argument("saves", type=Path)
    parser.add_argument("--sampler", choices=("torch", "bundle", "alternate"), default="torch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dataset = Folder(options.data)
    sampler: Sampler[int] = (
        RandomSampler(dataset)
        if options.sampler == "torch"
        else BundleRandomSampler(dataset, bundle_ratio=0.1, alternate=options.sampler == "alternate")
    )
    loader = DataLoader(dataset, batch_size=32, sampler=Told(sampler), num_workers=options.workers)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    options.saves.mkdir(parents=True, exist_ok=True)
    for epoch in range(options.epochs):
        for values, labels in loader:
            optimizer.zero_grad()
            loss: torch.Tensor = torch.nn.functional.cross_entropy(model(values), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        unfinished = options.saves / "unfinished"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
        os.replace(unfinished, options.saves / f"epoch-{epoch}.pt")


if __name__ == "__main__":
    main()

"""How large the snapshots of two small, really trained models are under the seven methods of Figure 9, and ours.

    python benchmarks/snapshots/record_sizes.py --out src/penstock/simulate/recorded_sizes.json [--quick]

Trains a convolutional network on scikit-learn's digits (SGD with momentum, the rate cut twice) and a small
transformer on the text of Python's help topics (Adam, the rate falling to zero), keeps 25 snapshots of each (the
float32 weights, as the paper does; no optimizer state), and writes sizes, never weights. About two minutes on one
core. Needs penstock[demo].

The sizes are those of the package's codecs (`penstock.checkpoint.codecs.paper`), as `penstock snapshots study` finds
them. The paper: Wang, Boukhobza and Shao, "Preserving SSD lifetime in deep learning applications with delta
snapshots", sections 3.1 to 3.3. References: the snapshot before (progressive), and each baseline at any distance
(chain: dynrle alone).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.checkpoint.files.writing import Scratch
from penstock.checkpoint.state.dtypes import dtype_named
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes, Layout
from penstock.measure.snapshot_study import study_snapshots

Words = NDArray[np.uint32]

SEED = 7


def main(arguments: list[str] | None = None) -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the sizes, as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="four snapshots of a few steps: shows that it runs"
    )
    options = parser.parse_args(arguments)
    snapshots, steps = (4, 2) if options.quick else (25, 50)
    torch.set_num_threads(1)
    models = []
    for name, description, train in (
        ("digits-cnn", "convolutional network on scikit-learn's digits, SGD with momentum", train_digits),
        ("text-gpt", "transformer on the text of Python's help topics, Adam", train_text),
    ):
        begin = time.perf_counter()
        kept = list(train(snapshots, steps))
        trained = time.perf_counter()
        losses = [loss for loss, _ in kept]
        models.append(
            {
                "name": name,
                "description": f"{description}; a snapshot every {steps} steps, loss {losses[0]:.3g} at the "
                f"first and {losses[-1]:.3g} at the last",
                **sizes_of([words for _, words in kept]),
            }
        )
        print(
            f"{name}: {kept[0][1].size:,} weights, trained in {trained - begin:.0f} s, "
            f"measured in {time.perf_counter() - trained:.0f} s, loss {losses[0]:.3g} to {losses[-1]:.3g}"
        )
    written = {
        "format": "penstock snapshot sizes 1",
        "made_by": f"benchmarks/snapshots/record_sizes.py, {date.today()}, Python {platform.python_version()}, "
        f"PyTorch {torch.__version__}, NumPy {np.__version__}",
        "models": models,
    }
    options.out.write_text(json.dumps(written, indent=1) + "\n")


# -- Two models, really trained --------------------------------------------------------------------------


def train_digits(snapshots: int, steps: int) -> Iterator[tuple[float, Words]]:
    """Yield loss and weights after every so many steps of SGD."""
    from sklearn.datasets import load_digits

    torch.manual_seed(SEED)
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    classes = torch.tensor(labels)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 4 * 4, 512),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(512, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    total = snapshots * steps
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2 * total // 5, 4 * total // 5], gamma=0.1)

    def loss_of() -> torch.Tensor:
        batch = torch.randint(len(classes), (64,))
        return torch.nn.functional.cross_entropy(model(pixels[batch]), classes[batch])

    yield from train(model, optimizer, schedule, loss_of, snapshots, steps)


class Transformer(torch.nn.Module):
    """A decoder of two layers over characters."""

    def __init__(self, symbols: int, width: int, length: int) -> None:
        super().__init__()
        self.symbol = torch.nn.Embedding(symbols, width)
        self.place = torch.nn.Embedding(length, width)
        layer = torch.nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, symbols)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next symbol at each place."""
        states = self.symbol(text) + self.place(torch.arange(text.shape[1]))
        scores: torch.Tensor = self.head(self.layers(states, mask=self.mask, is_causal=True))
        return scores


def train_text(snapshots: int, steps: int) -> Iterator[tuple[float, Words]]:
    """Yield loss and weights after every so many steps of Adam."""
    from pydoc_data.topics import topics

    torch.manual_seed(SEED)
    text = "".join(topics[name] for name in sorted(topics))
    symbols = sorted(set(text))
    ids = torch.tensor(np.searchsorted(symbols, list(text)))
    length = 64
    model = Transformer(len(symbols), 128, length)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, snapshots * steps)

    def loss_of() -> torch.Tensor:
        first = torch.randint(len(ids) - length - 1, (16, 1))
        window = ids[first + torch.arange(length + 1)]
        return torch.nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())

    yield from train(model, optimizer, schedule, loss_of, snapshots, steps)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    loss_of: Callable[[], torch.Tensor],
    snapshots: int,
    steps: int,
) -> Iterator[tuple[float, Words]]:
    """Yield mean loss and weights after every `steps` steps."""
    for _ in range(snapshots):
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        yield float(np.mean(losses)), weights.numpy().copy().view(np.uint32)


# -- Sizes -----------------------------------------------------------------------------------------------


class Kept:
    """Snapshots in memory, as a study takes them: one tensor each."""

    def __init__(self, snapshots: list[Words]) -> None:
        self.names = [str(number) for number in range(1, len(snapshots) + 1)]
        self._snapshots = snapshots

    def layouts(self, snapshot: int) -> list[Layout]:
        """Return the tensors of one."""
        return [Layout("weights", dtype_named("float32"), self._snapshots[snapshot].shape)]

    def block(self, snapshot: int, layout: Layout, number: int, scratch: Scratch) -> Bytes:
        """Return a block of one."""
        words = self._snapshots[snapshot][number * BLOCK_VALUES : (number + 1) * BLOCK_VALUES]
        return words.view(np.uint8)

    def close(self) -> None:
        """Nothing is open."""


def sizes_of(snapshots: list[Words]) -> dict[str, Any]:
    """Return the sizes of each snapshot alone, and of the deltas that the schemes need."""
    kept = Kept(snapshots)
    study = study_snapshots(kept, kept.layouts(0))
    sizes = study.sizes
    deltas = []
    for snapshot, reference in sorted(sizes.deltas["dynrle"]):
        delta = {
            "snapshot": snapshot,
            "reference": reference,
            "heading_bits": study.heading_bits[snapshot, reference][32],
        }
        for codec, sizes_by_pair in sizes.deltas.items():
            if (snapshot, reference) in sizes_by_pair:
                delta[f"{codec}_bytes"] = sizes_by_pair[snapshot, reference]
        deltas.append(delta)
    return {
        "parameters": sizes.parameters,
        **{f"{codec}_bytes": list(baselines) for codec, baselines in sizes.baselines.items()},
        "deltas": deltas,
    }


if __name__ == "__main__":
    main()

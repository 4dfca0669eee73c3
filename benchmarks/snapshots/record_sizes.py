"""How large the snapshots of two small, really trained models are under the seven methods of Figure 9.

    python benchmarks/snapshots/record_sizes.py --out src/penstock/simulate/recorded_sizes.json [--quick]

Trains a convolutional network on scikit-learn's digits (SGD with momentum, the rate cut twice) and a small
transformer on the text of Python's help topics (Adam, the rate falling to zero), keeps 25 snapshots of each (the
float32 weights, as the paper does; no optimizer state), and writes sizes, never weights. About a minute and a half
on one core. Needs penstock[demo].

The sizes are those of Wang, Boukhobza and Shao, "Preserving SSD lifetime in deep learning applications with delta
snapshots", sections 3.1 to 3.3, worked out plainly:

    gzip           the weights' bytes by gzip -6
    huffman        8-bit exponents by a Huffman code (256 bytes for its lengths), sign and mantissa as they are
    rle4           per weight, 4 bits for min(15, leading zeros of the XOR with the reference), then what is left
    rle4_gzip      the packed bits of rle4 by gzip -6
    dynrle         as rle4, with the width of 0 to 5 bits that makes this delta smallest (Algorithm 1), a byte for it
    delta gzip     the XOR's bytes by gzip -6

References: the snapshot before (progressive), and each baseline at snap_dis 3, 5 and 10 (chain: dynrle alone).
"""

from __future__ import annotations

import argparse
import gzip
import heapq
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

Words = NDArray[np.uint32]

SNAP_DISTANCES = (3, 5, 10)
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


def sizes_of(snapshots: list[Words]) -> dict[str, Any]:
    """Return the sizes of each snapshot alone, and of the deltas that the schemes need."""
    pairs = {(later, later - 1) for later in range(1, len(snapshots))}
    chained = {
        (later, later - later % distance)
        for distance in SNAP_DISTANCES
        for later in range(len(snapshots))
        if later % distance
    }
    deltas = []
    for snapshot, reference in sorted(pairs | chained):
        difference = snapshots[snapshot] ^ snapshots[reference]
        bits = heading_bits(difference)
        delta = {
            "snapshot": snapshot,
            "reference": reference,
            "heading_bits": bits,
            "dynrle_bytes": 1 + -(-rle_bits(difference, bits) // 8),
        }
        if (snapshot, reference) in pairs:
            delta |= {
                "gzip_bytes": gzip_bytes(difference),
                "rle4_bytes": -(-rle_bits(difference, 4) // 8),
                "rle4_gzip_bytes": gzip_bytes(rle_packed(difference, 4)),
            }
        deltas.append(delta)
    return {
        "parameters": snapshots[0].size,
        "complete_bytes": [4 * words.size for words in snapshots],
        "gzip_bytes": [gzip_bytes(words) for words in snapshots],
        "huffman_bytes": [huffman_bytes(words) for words in snapshots],
        "deltas": deltas,
    }


def gzip_bytes(data: NDArray[Any]) -> int:
    """Return the size by gzip -6, as the tool does by default."""
    return len(gzip.compress(data.tobytes(), 6, mtime=0))


def leading_zeros(words: Words) -> NDArray[np.int64]:
    """Return the zero bits before the first one bit of each 32-bit word; 32 for zero."""
    # The exponent of a float64 is the place of the first one bit; 32 bits fit its mantissa.
    return 32 - np.frexp(words.astype(np.float64))[1].astype(np.int64)


def rle_bits(difference: Words, bits: int) -> int:
    """Return the size in bits with so many heading bits. Source: the paper's Algorithm 1, line 5."""
    return int((32 + bits - np.minimum(2**bits - 1, leading_zeros(difference))).sum())


def heading_bits(difference: Words) -> int:
    """Return the width of 0 to 5 that makes the delta smallest. Source: Algorithm 1."""
    return min(range(6), key=lambda bits: rle_bits(difference, bits))


def rle_packed(difference: Words, bits: int) -> NDArray[np.uint8]:
    """Return the delta as it would be stored: each word's heading, then its bits from there on."""
    skipped = np.minimum(2**bits - 1, leading_zeros(difference))
    lengths = 32 + bits - skipped
    rest = np.uint64(32) - skipped.astype(np.uint64)
    codes = (skipped.astype(np.uint64) << rest) | difference.astype(np.uint64)
    ends = np.cumsum(lengths)
    stored = np.zeros(int(ends[-1]), np.uint8)
    for place in range(32 + bits):  # the last bit of every word, then the one before it, ...
        has = lengths > place
        stored[ends[has] - 1 - place] = (codes[has] >> np.uint64(place)) & np.uint64(1)
    return np.packbits(stored)


def huffman_bytes(words: Words) -> int:
    """Return the size with exponents in a Huffman code. Source: the paper, section 3.3.2."""
    counts = np.bincount((words >> np.uint32(23)) & np.uint32(0xFF), minlength=256)
    heap = [int(count) for count in counts if count]
    heapq.heapify(heap)
    coded = 0 if len(heap) > 1 else heap[0]
    while len(heap) > 1:
        # Each joining of two nodes puts one bit more on every exponent below them.
        joined = heapq.heappop(heap) + heapq.heappop(heap)
        coded += joined
        heapq.heappush(heap, joined)
    return 256 + -(-(coded + 24 * words.size) // 8)


if __name__ == "__main__":
    main()

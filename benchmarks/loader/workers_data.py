"""Eight kinds of data set as their users write them, for workers.py: what DataLoader's users have."""

from __future__ import annotations

import io
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps

_WORDS = [f"word{number}" for number in range(5000)]


class Small:
    """Rows of 32 numbers in memory, and a label: what a sample costs besides its bytes."""

    def __init__(self, count: int) -> None:
        # Each side makes the data set anew, and all of them get the same one.
        draws = torch.Generator().manual_seed(0)
        self.rows, self.labels = torch.randn(count, 32, generator=draws), torch.arange(count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.labels[index]


class Listed(Small):
    """The same by `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> Any:
        return list(zip(self.rows[indices], self.labels[indices], strict=True))


class Large:
    """Arrays of 1.2 MB, computed by NumPy."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.base = np.random.default_rng(0).random((3, 320, 320), np.float32)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.base * np.float32(index), index


class Dicts:
    """Several fields, some of them made by Python code."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        boxes = [[index % 7, corner, corner + 1, index % 11] for corner in range(40)]
        return {
            "boxes": torch.tensor(boxes),
            "weights": np.linspace(0, 1, 64, dtype=np.float32),
            "name": f"sample {index}",
            "score": 0.5 * index,
        }


class Photographs:
    """PIL and Python: small JPEGs, decoded and changed, and a loop in Python that holds the interpreter's lock."""

    def __init__(self, count: int) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((96, 96)).save(file, "JPEG")
        self.count, self.jpeg = count, file.getvalue()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        draw = random.Random(index)
        picture = Image.open(io.BytesIO(self.jpeg)).convert("RGB")
        picture = ImageOps.mirror(picture) if draw.random() < 0.5 else picture
        picture = ImageEnhance.Contrast(picture).enhance(draw.uniform(0.8, 1.2))
        curve = [min(255, int((value / 255) ** 0.9 * 255)) for value in range(256)] * 3
        picture = picture.point(curve).crop((8, 8, 72, 72))
        histogram = sum(value * count for value, count in enumerate(picture.histogram()))
        array = np.asarray(picture, np.float32).transpose(2, 0, 1) / 255
        return torch.from_numpy(array.copy()), histogram % 10


class Texts:
    """A tokeniser in Python; texts of 100 to 200 words, cut or filled to 128 tokens."""

    def __init__(self, count: int) -> None:
        draw = random.Random(0)
        self.texts = [" ".join(draw.choices(_WORDS, k=draw.randint(100, 200))) for _ in range(200)]
        self.count = count
        self.ids = {word: number for number, word in enumerate(_WORDS)}

    def __len__(self) -> int:
        return self.count

    def tokens(self, index: int) -> list[int]:
        return [self.ids.get(word, 0) for word in re.findall(r"\w+", self.texts[index % 200].lower())]

    def __getitem__(self, index: int) -> Any:
        tokens = self.tokens(index)[:128]
        return torch.tensor(tokens + [0] * (128 - len(tokens))), self.texts[index % 200][:20]


class Unequal(Texts):
    """The same, of their own lengths, for a collate_fn that pads."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.tokens(index)), index


def pad(samples: list[Any]) -> Any:
    """Return texts filled to the longest, and their indices."""
    texts = torch.nn.utils.rnn.pad_sequence([text for text, _ in samples], batch_first=True)
    return texts, torch.tensor([index for _, index in samples])


class Files:
    """Files of 16 KB that each take 5 ms to open, as of a remote folder."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.path = Path(tempfile.gettempdir()) / "penstock_workers_benchmark.bin"
        self.path.write_bytes(bytes(16 << 10))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        time.sleep(5e-3)
        return torch.frombuffer(bytearray(self.path.read_bytes()), dtype=torch.float32), index


#: By name: the class, how many samples an epoch has, and collate_fn.
KINDS: dict[str, tuple[Any, int, Any]] = {
    "small tensors": (Small, 50_000, None),
    "lists of small tensors": (Listed, 100_000, None),
    "large arrays": (Large, 1_500, None),
    "dicts": (Dicts, 10_000, None),
    "PIL and Python": (Photographs, 3_000, None),
    "tokeniser": (Texts, 10_000, None),
    "tokeniser, collate_fn": (Unequal, 10_000, pad),
    "waiting for files": (Files, 1_000, None),
}


def ask() -> None:
    """For each "go" of the standard input, ask for samples first, first + step, ... and then write a line."""
    kind, count, first, step = sys.argv[1], *map(int, sys.argv[2:])
    data = KINDS[kind][0](count)
    while sys.stdin.readline() == "go\n":
        for index in range(first, count, step):
            data[index]
        print("done", flush=True)

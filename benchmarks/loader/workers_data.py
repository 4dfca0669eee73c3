"""Kinds of data set as their users write them, for workers.py and promise.py: what DataLoader's users have."""

from __future__ import annotations

import io
import os
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass
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


def _jpeg(height: int, width: int, times: int) -> bytes:
    """Return a JPEG file of random pixels, so many times as large: as smooth as a photograph."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((width * times, height * times)).save(file, "JPEG")
    return file.getvalue()


class Photographs:
    """PIL and Python: small JPEGs, decoded and changed, and a loop in Python that holds the interpreter's lock."""

    def __init__(self, count: int) -> None:
        self.count, self.jpeg = count, _jpeg(8, 8, 12)

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
        own = self.path.with_suffix(f".{os.getpid()}")  # another process may read the file
        own.write_bytes(bytes(16 << 10))
        own.replace(self.path)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        time.sleep(5e-3)
        return torch.frombuffer(bytearray(self.path.read_bytes()), dtype=torch.float32), index


class Pictures:
    """JPEG files in memory of 320 x 240, which PIL decodes and resizes without the interpreter's lock."""

    def __init__(self, count: int) -> None:
        self.count, self.jpeg = count, _jpeg(15, 20, 16)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        picture = Image.open(io.BytesIO(self.jpeg)).convert("RGB")
        picture = picture.resize(
            (128, 128), Image.Resampling.BILINEAR, (index % 60, 0, 240 + index % 60, 240)
        )
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div(255), index % 10


class Windows:
    """Windows of 513 tokens of a memory map, as of a language model: input and target."""

    def __init__(self, count: int) -> None:
        self.path = Path(tempfile.gettempdir()) / "penstock_windows_benchmark.bin"
        (np.arange(512 * count + 1) % 50_000).astype(np.uint16).tofile(self.path)
        self.count, self.tokens = count, np.memmap(self.path, np.uint16, "r")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        window = torch.from_numpy(self.tokens[512 * index : 512 * index + 513].astype(np.int64))
        return window[:-1], window[1:]


@dataclass
class Turn:
    """Something of a user's own."""

    speaker: str
    text: str
    length: int


class Objects(Texts):
    """Objects of a class of one's own, which a collate_fn leaves as they are."""

    def __getitem__(self, index: int) -> Any:
        text = self.texts[index % 200].title()
        return Turn(f"speaker {index % 2}", text, len(text.split()))


def listed(samples: list[Any]) -> Any:
    """Return objects as they are, and how long they are."""
    return samples, torch.tensor([each.length for each in samples])


def levelled(picture: Any) -> Any:
    """Bring a picture to one brightness by a loop in Python, which holds the interpreter's lock, as users may."""
    levels = picture[::2, ::2].reshape(-1).tolist()
    power = sum(level * level for level in levels) / len(levels)
    table = [min(255, int(level * 128 / max(power**0.5, 1.0))) for level in range(256)]
    return np.array(table, np.uint8)[picture]


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
    "pictures": (Pictures, 2_000, None),
    "windows of tokens": (Windows, 20_000, None),
    "objects": (Objects, 10_000, listed),
}


def ask() -> None:
    """For each "go" of the standard input, ask for samples first, first + step, ... and then write a line."""
    kind, count, first, step = sys.argv[1], *map(int, sys.argv[2:])
    data = KINDS[kind][0](count)
    while sys.stdin.readline() == "go\n":
        for index in range(first, count, step):
            data[index]
        print("done", flush=True)

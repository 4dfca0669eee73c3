"""Data sets that worker processes import."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from penstock.loader.structure import JsonObject

COUNT, WIDTH = 50, 3000


class Mixed:
    """Arrays, numbers, texts and objects, with the process they come from. Sample `broken` cannot be had."""

    def __init__(self, broken: int = -1) -> None:
        self.table = np.arange(COUNT * WIDTH, dtype=np.float32).reshape(COUNT, WIDTH)
        self.broken = broken

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int, rng: Any, epoch: int) -> dict[str, Any]:
        if index == self.broken:
            raise OSError(2, "no such picture", f"{index}.jpg")
        return {
            "array": self.table[index] + rng.random(WIDTH, np.float32) + epoch,
            "name": f"number {index}",
            "index": index,
            "pid": f"{os.getpid()} {os.getpgid(0)}",
            "where": Path(f"{index}.jpg"),
        }


def of_line(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
    """Return numbers and text of a line of JSON."""
    return sample | {"draw": rng.random(3), "text": f"{sample['text']}, {rng.integers(1000)}"}


def named_by_global(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the same numbers in every process, and text by a global."""
    return sample | {"text": f"level {level}"}


def described_by_global(sample: dict[str, Any]) -> dict[str, Any]:
    """The same with an object of JSON."""
    return sample | {"text": JsonObject({"level": level})}


class SlowlyImported(Mixed):
    """A process has it once a file is there."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        while not self.path.exists():
            time.sleep(0.01)


class Lists:
    """Lists of samples, by `__getitems__`, with an array whose length differs."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, str, Any]:
        return index, str(index), np.full(index % 4, index)

    def __getitems__(self, indices: list[int]) -> list[tuple[int, str, Any]]:
        return [self[index] for index in indices]


class Drawn:
    """What the global generators give; PyTorch's only where the class of the loader has it loaded."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        import torch

        return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002


class Informed:
    """What PyTorch says of the worker, and what was set when the process began."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, int, int, int, bool]:
        import torch

        info = torch.utils.data.get_worker_info()
        assert info is not None
        print(f"sample {index} passes by")
        return info.id, info.num_workers, begun[0], torch.get_num_threads(), id(info.dataset) == id(self)


begun: list[int] = []


class Fatal:
    """Ends its process at sample 7."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        if index == 7:
            match self.how:
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "exits":
                    os._exit(3)
        return index


class Hanging:
    """Hangs at sample 4 or a later one, and has written which to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        if index >= 4:
            part = self.path.with_suffix(".part")
            part.write_text(str(index))
            part.rename(self.path)
            time.sleep(3600)
        return index


class Faulting:
    """Allocates 32 MiB, frees them, and returns how many page faults that took."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        arrays = [np.ones(1 << 20, np.uint8) for _ in range(32)]
        del arrays
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


class Odd(Exception):
    """Takes other arguments than it keeps."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Raising:
    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise KeyError("no key") if self.how == "key" else Odd(1, 2)
        return index


class Holding:
    """Holds what belongs to one process."""

    def __init__(self, held: Any) -> None:
        self.parts = {"first": 1, "second": [held]}

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


def note_begin(number: int) -> None:
    begun.append(number)


def padded(samples: list[dict[str, Any]]) -> Any:
    """Collate to arrays, tensors and objects of unequal sizes."""
    import torch

    indices = [sample["index"] for sample in samples]
    images = torch.zeros(len(samples), 4 * max(indices) + 4, 64)
    for row, index in zip(images, indices, strict=True):
        row[: 4 * index] = index
    few = torch.utils.data.default_collate(list(map(torch.tensor, indices)))
    names = {sample["name"] for sample in samples}
    return {"images": images, "few": few, "names": names, "is_shared": few.is_shared()}


def drawn(picture: Any, rng: Any) -> Any:
    """A transform: a picture changed by draws of its own."""
    return picture // 2 + rng.integers(0, 9, picture.shape, np.uint8)


def noisy(picture: Any, rng: Any) -> Any:
    """The same, with its process in the first pixel."""
    changed = drawn(picture, rng)
    changed[0, 0] = [os.getpid() >> shift & 255 for shift in (16, 8, 0)]
    return changed


def marked(picture: Any, rng: Any) -> Any:
    """The same, with a draw of Python's, too."""
    return noisy(picture + np.uint8(random.randrange(100)), rng)


#: What `by_global` makes of a picture; a program may set it.
level = 0


def by_global(picture: Any) -> Any:
    return picture * 0 + np.uint8(level)


def by_global_draw(picture: Any) -> Any:
    return picture * 0 + np.uint8(random.randrange(256))


class Curriculum:
    """A transform whose attribute changes."""

    level = 0

    def __call__(self, picture: Any) -> Any:
        return picture * 0 + np.uint8(self.level)


def only_here(picture: Any) -> Any:
    """Fail in any other process than one that set a global."""
    if not level:
        raise KeyError("it is not set here")
    return picture

"""What benchmarks check before they begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.ranks import Ranks

#: Steps of a training's run, unless given.
MOST_STEPS = 20
#: Networks that `penstock.bench.models` makes; here, where PyTorch is not imported.
MODELS = ("alexnet", "resnet50", "transformer")


def check_model(name: str) -> None:
    """Refuse a network that is not there. Raises: ConfigError."""
    if name not in MODELS:
        raise ConfigError(f"--model is {name!r}; it is one of {', '.join(MODELS)}")


def check_repeats(repeats: int, do: str) -> None:
    """Refuse less than two runs. do: what a run does, in a word. Raises: ConfigError."""
    if repeats < 2:
        raise ConfigError(f"repeats is {repeats}; the first is left out, so {do} at least twice")


def rounds(
    repeats: int, max_seconds: float, ranks: Ranks, clock: Callable[[], float] = time.perf_counter
) -> Iterator[int]:
    """Yield the numbers of rounds: two at least, and more while one like the last ends in time. Rank 0 decides.

    repeats: rounds at most.
    """
    begin = last = clock()
    for number in range(repeats):
        now = clock()
        fits = number < 2 or (now - begin) + (now - last) <= max_seconds
        last = now
        if not ranks.all_gather("beginning a round", fits)[0]:
            return
        yield number


def check_shared(batch_size: int, ranks: int) -> None:
    """Refuse a batch that ranks cannot share equally. Raises: ConfigError."""
    if batch_size % ranks:
        raise ConfigError(
            f"a batch of {batch_size} samples cannot be shared equally by {ranks} ranks: give a multiple of {ranks}"
        )


def installed(names: Sequence[str], find: Callable[[str], object]) -> tuple[list[str], list[str]]:
    """Return the names whose packages are here, and what to say of the others. find: imports what a name stands for."""
    found, left_out = [], []
    for name in names:
        try:
            find(name)
        except ModuleNotFoundError as error:
            left_out.append(f"{name} was left out: {error.name} is not installed")
        else:
            found.append(name)
    return found, left_out

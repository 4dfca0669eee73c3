"""One pass over some samples by a named loader: Penstock's own, or another library's where that is installed."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.measure.calibrate import StoreReader, read_until
from penstock.measure.fit import steady_level
from penstock.plan import Explicit
from penstock.store import FileBacked, Source
from penstock.store.remote import objects_in

OWN = "penstock"
#: Loaders of other libraries, by the name of the package, and the module here that drives each.
PEERS = {"torch": "penstock.bench.peer_torch", "tensorflow": "penstock.bench.peer_tensorflow"}
#: As the source has it: decoded, converted to numbers in [0, 1], resized to 224 x 224.
SIDE = 224
TRANSFORMS = (Resize((SIDE, SIDE)), ToTensor())


class Work(StrEnum):
    """What is done with each sample: read alone, or read, decoded and resized."""

    READ = "read"
    DECODE = "decode"


class Pass(NamedTuple):
    """One pass. samples: that count. seconds: that they took. skipped: samples that could not be read or decoded."""

    samples: int
    seconds: float
    skipped: int


#: Reads the samples of these ids, in batches, and returns what came of it.
RunPass = Callable[[Sequence[int]], Pass]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a pass is made. threads: of the loader, or its worker processes. batch_size: of this rank."""

    source: Source
    work: Work
    threads: int
    batch_size: int
    on_error: Literal["raise", "skip"]


#: Makes a loader ready; what it holds is given back at the end of the context.
OpenLoader = Callable[[Setting], AbstractContextManager[RunPass]]


def loader_named(name: str) -> OpenLoader:
    """Return what opens a loader. Raises: ModuleNotFoundError where its package is not installed."""
    if name == OWN:
        return open_own
    return cast(OpenLoader, importlib.import_module(PEERS[name]).open_loader)


@contextmanager
def open_own(setting: Setting) -> Iterator[RunPass]:
    """Yield Penstock's passes. Reads alone are the source's own, by threads that do nothing else."""
    yield lambda ids: (_read if setting.work is Work.READ else _load)(setting, ids)


def _read(setting: Setting, ids: Sequence[int]) -> Pass:
    reader = StoreReader(setting.source, time.perf_counter)
    samples = np.asarray(ids, np.int64)
    timed = read_until(reader, samples, setting.threads, math.inf, math.inf, time.perf_counter, keep=False)
    if timed.errors and (setting.on_error == "raise" or not timed.ends):
        raise timed.errors[0]
    level = steady_level(
        setting.threads, np.array(timed.starts), np.array(timed.ends), np.array(timed.sizes_bytes, np.int64)
    )
    counted = int(level.sizes_bytes.size)
    return Pass(counted, float(level.sizes_bytes.sum()) / level.bytes_per_second, len(timed.errors))


def _load(setting: Setting, ids: Sequence[int]) -> Pass:
    loader = Loader(
        setting.source,
        batch_size=setting.batch_size,
        epochs=1,
        shuffle=Explicit(ids, len(setting.source)),
        transforms=TRANSFORMS,
        policy="staging",
        readers=setting.threads,
        decoders=setting.threads,
        on_error=setting.on_error,
        rank=0,
        world_size=1,
        report=None,
    )
    with loader:
        begin = time.perf_counter()
        for _ in loader:
            pass
        return checked(ids, time.perf_counter() - begin, len(loader.skipped))


def checked(ids: Sequence[int], seconds: float, skipped: int) -> Pass:
    """Return the pass over these samples. Raises: DataError if none of them could be used."""
    if skipped >= len(ids):
        raise DataError(
            f"none of {len(ids)} samples could be decoded: are they pictures? --work read reads alone"
        )
    return Pass(len(ids) - skipped, seconds, skipped)


def check_loaders(names: Sequence[str]) -> None:
    """Refuse names of loaders that there are not. Raises: ConfigError."""
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"there is no loader {name!r} to compare with: {', '.join(PEERS)}")


def files_of(source: Source, ids: NDArray[np.int64]) -> Iterator[str]:
    """Yield the files of this host that samples lie in; none where they lie elsewhere."""
    if objects_in(source) is not None:
        return
    if isinstance(source, FileBacked):
        yield from (source.path_of(sample) for sample in ids.tolist())
    else:
        yield from getattr(source, "files", ())

"""What a decode server is asked for: crops of named samples in named epochs, in words that mean the same to both.

A description says versions, decoder, data, seed, and the steps that a pipeline begins with. It has no code: steps are
named, with their arguments, and only Penstock's own: those that make a crop, and those behind them that leave its size.
A crop is asked for by one number, epoch * samples + sample.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import takewhile
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.flow.work import Failed
from penstock.loader.fetching import SourceFetcher
from penstock.loader.images import FRONTS
from penstock.loader.resume import describe_data, describe_pixels
from penstock.loader.transforms import (
    Draws,
    Pipeline,
    RandomApply,
    RandomHorizontalFlip,
    RandomVerticalFlip,
    Scratch,
    Transform,
    compile_pipeline,
)
from penstock.loader.transforms.augment import SAME_SIZE, is_random
from penstock.loader.transforms.decoders import decoder_versions
from penstock.loader.transforms.memory import DecodeMemory
from penstock.loader.transforms.stages import PictureStep
from penstock.plan.orders import LARGEST_EPOCH
from penstock.plan.random import generator_for
from penstock.store import MemoryTier, Source
from penstock.store.group import Ids

#: Of a description's own form.
_FORM = 2
_STEPS = {step.__name__: step for step in (*get_args(PictureStep), *SAME_SIZE)}
#: The picture that steps are tried on, and how often: each operation of RandAugment is tried, too.
_TRIAL_SHAPE, _TRIALS = (224, 224, 3), 64


def steps_served(pipeline: Pipeline) -> list[int]:
    """Return how many of a pipeline's steps servers may make: the most, and those of the crop alone, if fewer.

    The most are the front, and behind it those that leave the crop's size and are described without code. The pipeline
    has a front.
    """
    assert pipeline.front is not None, "it was checked when the loader was configured"
    front = len(pipeline.front.stages)
    more = sum(1 for _ in takewhile(_is_served, pipeline.transforms[front:]))
    return [front + more, front] if more else [front]


def _is_served(step: Transform) -> bool:
    """Return whether a step behind a crop leaves its size, and JSON says all of it."""
    # A subclass may be a user's code.
    if type(step) not in (*SAME_SIZE, RandomHorizontalFlip, RandomVerticalFlip):
        return False
    if isinstance(step, RandomApply) and not all(map(_is_served, step.transforms)):
        return False
    try:
        json.dumps(_described(step))
    except TypeError:  # NumPy's numbers, of which some compare otherwise than Python's
        return False
    return True


def _described(step: Transform) -> list[Any]:
    given = asdict(step)
    if isinstance(step, RandomApply):
        given["transforms"] = [_described(each) for each in step.transforms]
    return [type(step).__name__, given]


def _step_of(described: Any) -> Transform:
    """Return the step that was described: JSON has lists where arguments have tuples."""
    kind, given = _STEPS[described[0]], described[1]
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if kind is RandomApply:
        arguments["transforms"] = [_step_of(each) for each in given["transforms"]]
    return kind(**arguments)


def _trial(steps: Sequence[Transform]) -> str:
    """Return a digest of what steps behind a crop make of a picture.

    NumPy draws for them and OpenCV computes, in parts in float32, and not with the same bits in every version and on
    every processor: one multiplies and adds at once, another rounds in between.
    """
    numbers = np.arange(math.prod(_TRIAL_SHAPE), dtype=np.uint32) * np.uint32(0x9E3779B1)
    picture = (numbers >> np.uint32(24)).astype(np.uint8).reshape(_TRIAL_SHAPE)
    digest = hashlib.blake2b(digest_size=16)
    for step in steps:
        for number in range(_TRIALS) if isinstance(step, SAME_SIZE) else ():
            made = step(picture, generator_for(0, 0, number)) if is_random(step) else step(picture)
            digest.update(made.tobytes())
    return digest.hexdigest()


def describe_work(pipeline: Pipeline, source: Source, steps: int) -> bytes:
    """Return what the first steps of a pipeline make of a source. steps: one of `steps_served`."""
    lead = pipeline.transforms[:steps]
    described = {
        "form": _FORM,
        **_here(source),
        "seed": pipeline.seed,
        "steps": [_described(step) for step in lead],
        "trial": _trial(lead),
    }
    return json.dumps(described, sort_keys=True).encode("utf-8", "surrogateescape")


def _here(source: Source) -> dict[str, Any]:
    """Return what has to be the same on both sides."""
    return {
        "penstock": version("penstock"),
        "pixels": describe_pixels() | decoder_versions(),  # those of formats besides JPEG, too
        "samples": len(source),
        "data": describe_data(source),
    }


class CropMaker:
    """A `Maker` of the crops of one description.

    stored: of the same data. steps, seed: of the crops. memory: bounds what all threads of the server take to decode.
    Raises: ConfigError where the steps do not fix the size of a crop.
    """

    def __init__(
        self, stored: StoredSamples, steps: Sequence[Transform], seed: int, memory: DecodeMemory
    ) -> None:
        self._stored, self._memory = stored, memory
        self._pipeline = compile_pipeline(steps, seed, "uint8", "NHWC")
        self._threads = threading.local()
        if self._pipeline.front is None:
            raise ConfigError("the steps that it asks for do not begin with some that fix the size of a crop")
        self._shape = self._pipeline.front.shape

    @property
    def each_bytes(self) -> int:
        return math.prod(self._shape)

    def make(self, ids: Ids) -> list[NDArray[np.uint8] | None]:
        """See `Maker`: uint8[height, width, 3] of each."""
        found: list[NDArray[np.uint8] | None] = [None] * ids.size
        epochs, samples = np.divmod(ids, self._stored.samples)
        is_named = (ids >= 0) & (epochs <= LARGEST_EPOCH)
        for epoch in np.unique(epochs[is_named]).tolist():
            which = np.flatnonzero((epochs == epoch) & is_named)
            for index, crop in zip(which.tolist(), self._of_epoch(epoch, samples[which]), strict=True):
                found[index] = crop
        return found

    def _of_epoch(self, epoch: int, samples: Ids) -> list[NDArray[np.uint8] | None]:
        scratch: Scratch | None = getattr(self._threads, "scratch", None)
        if scratch is None:
            scratch = self._threads.scratch = Scratch(memory=self._memory)
        read = self._stored.read(samples.tolist())
        had = [index for index, each in enumerate(read) if each is not None]
        data = [each for each in read if each is not None]
        crops: list[NDArray[np.uint8] | None] = [None] * samples.size
        if not had:
            return crops
        out = np.empty((len(had), *self._shape), np.uint8)
        draws = self._pipeline.draw(epoch, samples[had])
        left, wrong = self._pipeline.run_group(data, out, draws, range(len(had)), scratch), set[int]()
        for some in (left[first : first + FRONTS] for first in range(0, len(left), FRONTS)):
            fronts = self._pipeline.run_front([data[row] for row in some], draws, some, scratch)
            for row, front in zip(some, fronts, strict=True):
                if not self._is_made(data[row], out[row], draws, row, scratch, front):
                    wrong.add(row)
        for row, index in enumerate(had):
            crops[index] = None if row in wrong else out[row]
        return crops

    def _is_made(
        self,
        data: NDArray[np.uint8],
        out: NDArray[np.uint8],
        draws: Draws,
        row: int,
        scratch: Scratch,
        front: NDArray[np.uint8] | None,
    ) -> bool:
        """Make a crop of one picture; return whether that can be done: what is wrong, who asked finds out by itself."""
        try:
            self._pipeline.run(data.data, out, draws, row, scratch, front)
        except Exception:
            return False
        return True


class StoredSamples:
    """Samples of a source as they are stored, of which memory keeps those that are read first. Any thread may read.

    reader: of the source; closed with this. memory_bytes: for what is kept; 0 for none.
    """

    def __init__(self, source: Source, reader: SourceFetcher, memory_bytes: int) -> None:
        self.source, self.samples = source, len(source)
        self._reader = reader
        total_bytes = int(source.sizes_bytes.sum())
        self._tier = MemoryTier(min(memory_bytes, total_bytes)) if memory_bytes and total_bytes else None

    def read(self, samples: list[int]) -> list[NDArray[np.uint8] | None]:
        """Return the bytes of each sample, until this thread's next call; None for one that cannot be read."""
        tier, found = self._tier, list[NDArray[np.uint8] | None]([None] * len(samples))
        if tier is not None:
            places = tier.places_of(np.array(samples, np.int64)).tolist()
            found = [tier.array[begin:end] if begin >= 0 else None for begin, end in places]
        missing = [index for index, each in enumerate(found) if each is None]
        if not missing:
            return found
        for index, each in zip(
            missing, self._reader.read([samples[index] for index in missing]), strict=True
        ):
            if not isinstance(each, Failed):
                found[index] = each
                if tier is not None:
                    tier.put(samples[index], each.data)
        return found

    def close(self) -> None:
        self._reader.close()
        if self._tier is not None:
            self._tier.close()


def maker_of(description: bytes, stored: StoredSamples, memory: DecodeMemory) -> CropMaker:
    """Return what makes that which a description asks for. Raises: ConfigError where that would be something else."""
    try:
        asked = json.loads(description)
        if asked["form"] != _FORM:
            raise ConfigError(f"it asks in form {asked['form']!r:.20}, and this server knows {_FORM}")
        _check_same(asked, _here(stored.source), stored.source)
        steps = [_step_of(each) for each in asked["steps"]]
        maker = CropMaker(stored, steps, asked["seed"], memory)
        if asked["trial"] != _trial(steps):
            raise ConfigError(
                "steps behind the crop make other bytes here: of another NumPy or OpenCV, or kind of processor"
            )
        return maker
    except ConfigError:
        raise
    except Exception as error:  # steps are tried by any arguments: whatever these do, the server goes on
        raise ConfigError(f"what it asks for is malformed: {type(error).__name__}: {error}") from error


def _check_same(asked: dict[str, Any], here: dict[str, Any], source: Source) -> None:
    """Raise ConfigError if a training and this server differ in what decides the bits of a crop."""
    advice = {
        "penstock": ("Penstock", "install the same version on both"),
        "pixels": ("decoder", "install the same version of it on both, or bits would differ"),
        "samples": ("number of samples", "start the server on the data set that is trained on"),
        "data": (f"data than {source!r:.200}", "start the server on the data set that is trained on"),
    }
    for name, (what, move) in advice.items():
        if asked[name] != here[name]:
            both = f": {_shown(asked[name])} there, {_shown(here[name])} here"
            raise ConfigError(f"the training has another {what}{both}; {move}")


def _shown(value: Any) -> str:
    return ", ".join(map(str, value.values())) if isinstance(value, dict) else str(value)

"""A list of transforms, compiled: from the bytes of a sample to its place in the batch slot.

Built-in transforms before `ToTensor` only change a `Geometry`; pixels move when a callable needs them or at
the end, in one pass that resamples, crops, mirrors, normalises and lays out. A `Pipeline` is shared by all
threads; each thread has a `Scratch` of its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.loader.transforms.augment import AUGMENTS
from penstock.loader.transforms.compiled import CROP_KERNELS
from penstock.loader.transforms.decoders import Picture
from penstock.loader.transforms.draws import Draws, draw_crops
from penstock.loader.transforms.foreign import (
    Called,
    InCompose,
    as_picture,
    is_tensor,
    library_of,
    takes_pil,
    takes_rng,
    translate,
)
from penstock.loader.transforms.geometry import StepNumbers, numbers_of
from penstock.loader.transforms.group import NOTHING_LATER, GroupPass, Later
from penstock.loader.transforms.jpeg import Encoded, JpegHeader
from penstock.loader.transforms.memory import Counted, Counter
from penstock.loader.transforms.pixels import Pixels
from penstock.loader.transforms.raw import place_of, raw_stage, write_group
from penstock.loader.transforms.sink import IMAGE_DTYPES, ByteValues, Sink, encode_bfloat16
from penstock.loader.transforms.stages import (
    CHANNELS,
    Beside,
    Image,
    PictureStep,
    Plain,
    Scratch,
    Stage,
    Value,
    as_array,
    call_stage,
    describe,
    in_numbers,
    is_rgb,
    name_of,
    normalize_array,
    numbers_stage,
    picture_stage,
    to_tensor_array,
)
from penstock.loader.transforms.steps import (
    CenterCrop,
    DecodeRaw,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToTensor,
)
from penstock.plan.random import derive_key, draw_uniform

LAYOUTS = ("NCHW", "NHWC")
#: Random crops to look at for what decoding takes.
_DRAWS = 32
Transform = Any  # a built-in step or a callable


def check_transforms(transforms: Sequence[Transform], dtype: str, layout: str) -> tuple[Transform, ...]:
    """Return transforms as `compile_pipeline` takes them. Raises: ConfigError if they cannot follow each other."""
    steps = _as_list(transforms)
    if not steps:
        raise ConfigError("transforms is empty: name at least one, for example ToTensor()")
    for place, step in enumerate(steps):
        if isinstance(step, type):
            raise ConfigError(
                f"transform {place} ({step}) is a class; make an instance of it: {step.__name__}(...)"
            )
    _check(_translated(steps), dtype, layout)
    return steps


def _translated(steps: tuple[Transform, ...]) -> tuple[Transform, ...]:
    return translate(steps, of_pictures=_are_visual(steps))


def check_draws(transforms: Sequence[Transform]) -> None:
    """Raise ConfigError if one of checked transforms draws from global generators, which threads share."""
    for step in _translated(tuple(transforms)):
        if isinstance(step, Called) and step.draws == "global":
            name = name_of(step)
            ours = (
                f"give {name} arguments that penstock.loader.transforms.{name} has, too; "
                if name in _NAMES
                else ""
            )
            raise ConfigError(
                f"{name} among the transforms draws from global random generators, which threads share, so that no "
                f"seed would fix its draws: {ours}give workers=n, processes where they are seeded for each sample, or "
                "decoders=0, where they are, too; or write a function of a picture and rng"
            )


def compile_pipeline(
    transforms: Sequence[Transform],
    seed: int,
    dtype: str = "float32",
    layout: str = "NCHW",
    *,
    runs: bool = True,
) -> Pipeline:
    """Check transforms and bring everything in that running them needs (OpenCV, compiled kernels).

    transforms: built-in steps, transforms of torchvision and albumentations, and callables, first to last. A
        callable gets what comes before it: the picture as a NumPy array uint8[height, width, 3], after `ToTensor`
        float32[3, height, width]; a PIL image if its first parameter is annotated so (`image: PIL.Image.Image`);
        behind a transform of torchvision, or in its `Compose`, a PIL image or tensor, as it would there; or the stored
        bytes if the list begins with it and no built-in is in it. And `rng=`, a
        NumPy generator of its own for each epoch and sample, if its signature has that name. What it returns is
        recognised by its type:
        - a NumPy array uint8[height, width, 3] or a PIL image in RGB is a picture, for any step after it;
        - a torch tensor is taken as it is, in its own axes, by torchvision's habit [channels, height, width];
        - a NumPy array after `ToTensor` is [channels, height, width];
        - without `ToTensor`, a NumPy array of three axes is [height, width, channels] if the last of them is
          1, 3 or 4 long, and else taken as it is; where the first is too, it could be either and is refused;
        - any other number of axes, or a number, is taken as it is.
    seed: of all random draws, a non-negative integer below 2**64.
    dtype: "float32", "float16", "bfloat16" (stored as its bits in uint16) or "uint8"; behind a callable, any
        number type of NumPy. Without `ToTensor`, values are 0 to 255 in every dtype.
    layout: of a sample with three axes, "NCHW" or "NHWC", unless it is taken as it is.
    runs: False if only its shapes and sizes are asked for: then nothing is brought in.

    Raises: ConfigError if the transforms cannot follow each other or no image decoder is installed.

    >>> compile_pipeline([CenterCrop(224), ToTensor()], seed=0).output_shape
    (3, 224, 224)
    """
    pipeline = Pipeline(check_transforms(transforms, dtype, layout), seed, dtype, layout)
    if runs:
        pipeline.prepare()
    return pipeline


class Front(NamedTuple):
    """The built-in steps that a pipeline begins with, which make a picture of it.

    stages, numbers, keys: of each step. shape: (height, width, 3) of the result.
    is_random: whether that differs from epoch to epoch.
    """

    stages: tuple[Stage, ...]
    numbers: Sequence[StepNumbers]
    keys: Sequence[int]
    shape: tuple[int, ...]
    is_random: bool


class Pipeline:
    """Compiled transforms, for one seed, number format and layout; made by `compile_pipeline`."""

    def __init__(self, given: tuple[Transform, ...], seed: int, dtype: str, layout: str) -> None:
        #: As they were given, and as they are done.
        self.given = given
        self.transforms = transforms = _translated(given)
        self.seed = seed
        #: Name of the number format.
        self.dtype = dtype
        self.layout = layout
        #: The array type that holds it in the slot.
        self.storage_dtype: np.dtype[Any] = IMAGE_DTYPES[dtype] if dtype in IMAGE_DTYPES else np.dtype(dtype)
        self._keys = tuple(
            derive_key(seed, f"transform {place}: {name_of(step)}") for place, step in enumerate(transforms)
        )
        #: Whether samples are pictures: a built-in step asks for them.
        self.is_visual = _are_visual(given)
        self._has_tensor = any(isinstance(step, ToTensor) for step in transforms)
        tail = len(transforms)
        while tail and isinstance(transforms[tail - 1], ToTensor | Normalize):
            tail -= 1
        #: Steps that the last pass does along with the rest.
        self._tail: tuple[ToTensor | Normalize, ...] = transforms[tail:]
        #: Whether an array of pixels that comes out is one for the last pass.
        self._ends_as_picture = dtype in IMAGE_DTYPES and self._has_tensor == any(
            isinstance(step, ToTensor) for step in self._tail
        )
        self._stages = self._make_stages(transforms[:tail])
        self._output_shape = _known_shape(transforms, layout)
        #: Where a sample had to say the shape, its name.
        self._shape_is_of = ""
        self._is_raw = isinstance(transforms[0], DecodeRaw)
        #: The type of the stored bytes where nothing is done but to take them as numbers of the slot's type.
        self._stored: np.dtype[Any] | None = None
        if len(transforms) == 1 and isinstance(transforms[0], DecodeRaw) and dtype != "bfloat16":
            stored = np.dtype(transforms[0].dtype)
            if stored == self.storage_dtype or transforms[0].shape is not None:
                self._stored = stored
        #: None where a step is a user's own, or the slot has another kind of numbers than pictures.
        self._group_pass = (
            GroupPass(self._step_numbers, self._step_keys, self._sink)
            if self.is_visual and dtype in IMAGE_DTYPES and not self.calls_python
            else None
        )
        #: Where Python follows: how many steps come before it, which are done for several samples by one call.
        self._lead = self._count_lead()
        #: None where they do not fix the size of what they make.
        self.front = self._make_front()
        self._front_pass = (
            GroupPass(self.front.numbers, self.front.keys, Sink("uint8", "NHWC"))
            if self.front is not None and self._group_pass is None
            else None
        )

    def _make_stages(self, transforms: tuple[Transform, ...]) -> tuple[Stage, ...]:
        if not self.is_visual:
            return tuple(
                raw_stage(step)
                if isinstance(step, DecodeRaw)
                else call_stage(step, place, self._keys[place], None)
                for place, step in enumerate(transforms)
            )
        to_array = Sink("uint8", "NHWC")
        if self.dtype in IMAGE_DTYPES:
            self._sink = Sink(self.dtype, self.layout, self._tail)
        stages: list[Stage] = []
        #: The steps that move pixels.
        self._step_numbers: list[StepNumbers] = []
        #: Of each, the key of its draws.
        self._step_keys: list[int] = []
        column = 0
        for place, step in enumerate(transforms):
            if isinstance(step, ToTensor | Normalize):
                if place == 0 or not isinstance(transforms[place - 1], ToTensor | Normalize):
                    behind = takewhile(
                        lambda each: isinstance(each, ToTensor | Normalize), transforms[place:]
                    )
                    stages.append(numbers_stage(list(behind), to_array))
            elif isinstance(step, PictureStep):
                self._step_numbers.append(in_numbers(step, column))
                self._step_keys.append(self._keys[place])
                stages.append(picture_stage(step, place, self._step_numbers[-1], to_array))
                column += numbers_of(self._step_numbers[-1].what)
            else:
                stages.append(call_stage(step, place, self._keys[place], to_array))
        return tuple(stages)

    def _count_lead(self) -> int:
        """Return how many steps that move pixels the list begins with."""
        if not self.is_visual:
            return 0
        moves = [isinstance(step, PictureStep) for step in self.transforms]
        return moves.index(False) if False in moves else len(moves)

    def _make_front(self) -> Front | None:
        lead = self._lead
        shape = _known_shape(self.transforms[:lead], "NHWC") if lead else None
        if shape is None:
            return None
        numbers = self._step_numbers[:lead]
        is_random = any(numbers_of(step.what) for step in numbers)
        return Front(self._stages[:lead], numbers, self._step_keys[:lead], shape, is_random)

    def prepare(self) -> None:
        """Bring in what running it needs: OpenCV, and compiled kernels or a process that compiles them."""
        if not self.is_visual:
            return
        if importlib.util.find_spec("cv2") is not None:
            importlib.import_module("cv2")
        if self.dtype in IMAGE_DTYPES:
            self._sink.prepare()
        if self._has_tensor and not any(isinstance(step, ToTensor) for step in self._tail):
            CROP_KERNELS["crops_to_numbers"].ask()
        for group_pass in (self._group_pass, self._front_pass):
            if group_pass is not None:
                group_pass.prepare()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes the same."""
        state = self._output_shape, self._shape_is_of
        return _made_again, (self.given, self.seed, self.dtype, self.layout, *state)

    def __repr__(self) -> str:
        steps = ", ".join(repr(step) for step in self.transforms)
        return f"Pipeline([{steps}], seed={self.seed}, dtype={self.dtype!r}, layout={self.layout!r})"

    @property
    def has_byte_values(self) -> bool:
        """Whether pictures come as numbers from 0 to 255 in a type of more than a byte: no step divides them."""
        return self.dtype != "uint8" and all(isinstance(step, PictureStep) for step in self.transforms)

    @property
    def is_random(self) -> bool:
        """Whether a step draws random numbers."""
        random = RandomResizedCrop | RandomHorizontalFlip | RandomVerticalFlip
        return any(
            step.draws != "none"
            if isinstance(step, Called)
            else isinstance(step, random) or (not _is_built_in(step) and takes_rng(step))
            for step in self.transforms
        )

    @property
    def calls_python(self) -> bool:
        """Whether a step is a user's own function."""
        return not all(_is_built_in(step) for step in self.transforms)

    def split(self) -> tuple[Pipeline, ByteValues] | None:
        """Return a pipeline that ends with bytes, and what becomes of these; None where that is not the same.

        Bytes are pictures, resampled: what `ToTensor` and `Normalize` make of one depends on nothing else. A callable
        may make anything.
        """
        bytes_before = self.transforms[: len(self.transforms) - len(self._tail)]
        if self._group_pass is None or not bytes_before or (values := self._sink.byte_values) is None:
            return None
        front = Pipeline(bytes_before, self.seed, "uint8", self.layout)
        front._output_shape, front._shape_is_of = self._output_shape, self._shape_is_of
        front.prepare()
        return front, values

    def steps_in_numbers(self) -> Iterator[tuple[Transform, int, StepNumbers | None]]:
        """Yield each step, the key of its draws, and what it is to `geometry` if that does it."""
        numbers = iter(self._step_numbers)
        for key, step in zip(self._keys, self.transforms, strict=True):
            yield step, key, next(numbers) if isinstance(step, PictureStep) else None

    def summary(self) -> str:
        """Return which transforms of other libraries Penstock does itself, and which Python does; "" without any."""
        foreign = sum(library_of(step) is not None for step in self.given)
        own = [step for step in self.given if library_of(step) is None]
        called = [
            name_of(step) for step in self.transforms if isinstance(step, Called) and step.step not in own
        ]
        if not foreign:
            return ""
        replaced = (
            f"{foreign - len(called)} of {foreign} transforms of other libraries are Penstock's own code"
        )
        return f"{replaced}, and Python does {', '.join(called)}" if called else replaced

    @property
    def needs_probe(self) -> bool:
        """Whether one sample must be run before the shape of the result is known."""
        return self._output_shape is None

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of one sample in the slot, for example (3, 224, 224).

        Raises: ConfigError if it depends on the data and `probe` has not been called.
        """
        if self._output_shape is None:
            raise ConfigError(
                "the transforms do not fix the shape of a sample: call probe(data) with one first"
            )
        return self._output_shape

    def probe(self, data: Encoded, name: str = "", beside: Beside | None = None) -> tuple[int, ...]:
        """Run one sample to find the shape of the result; all others must have the same. Returns the shape.

        Call it before threads share the pipeline. name: of the sample, for errors of others. beside: see `run`.
        Raises: DataError if the sample cannot be decoded; whatever a callable raises.
        """
        if self._output_shape is None:
            scratch = Scratch()
            scratch.beside = beside
            value = self._ended(self._transformed(data, self.draw(0, np.zeros(1, np.int64)), 0, scratch))
            if isinstance(value, Image):
                self._output_shape = self._sink.shape(value.geometry.size)
            else:
                self._output_shape = self._finished(value).shape
            self._shape_is_of = name
        return self._output_shape

    def decode_bytes(self, height: int, width: int, like: JpegHeader | bytes) -> int:
        """Return about how much memory it takes to decode a picture of this size, the most of a few random draws.

        like: of a JPEG of the same kind; what the file begins with for a picture that is no JPEG.
        """
        draws, most = self.draw(0, np.arange(_DRAWS)), 0
        scratch = Scratch(memory=Counter())
        for index in range(_DRAWS):
            value: Value = Image(Picture.imagined(height, width, like, scratch.decoders))
            try:
                for stage in self._stages:
                    value = stage(value, draws, index, scratch)
                value.write(self._sink, np.empty(0), scratch)
            except Counted as counted:
                most = max(most, counted.nbytes)
        return most

    def draw(self, epoch: int, samples: NDArray[np.int64]) -> Draws:
        """Draw all random numbers of a batch's samples at once.

        samples: int64[n]. The numbers of a sample depend on seed, transform, epoch and sample alone.
        """
        samples = np.ascontiguousarray(samples, np.int64)
        return Draws(epoch, samples, partial(self._drawn, epoch, samples))

    def _drawn(self, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        columns = [np.empty((len(samples), 0))]
        for key, step in zip(self._keys, self.transforms, strict=True):
            if isinstance(step, RandomResizedCrop):
                columns.append(draw_crops(step, key, epoch, samples))
            elif isinstance(step, RandomHorizontalFlip | RandomVerticalFlip):
                columns.append(draw_uniform(key, epoch, samples, 1))
        return np.concatenate(columns, axis=1)

    @property
    def reads_in_place(self) -> bool:
        """Whether samples can be read to their places in a slot, as they are stored."""
        return self._stored is not None and self._stored.itemsize <= self.storage_dtype.itemsize

    def place_of(self, rows: range, out: NDArray[Any]) -> NDArray[np.uint8] | None:
        """Return where in `out` the stored bytes of some rows can be; None where they can not."""
        stored = self._stored
        return place_of(stored, out, rows) if stored is not None and self.reads_in_place else None

    @property
    def ends_in_group(self) -> bool:
        """Whether `run_group` does all steps: no callable is among them."""
        return self._group_pass is not None

    def run_group(
        self,
        data: Sequence[NDArray[np.uint8]],
        out: NDArray[Any],
        draws: Draws,
        rows: Sequence[int],
        scratch: Scratch,
        later: Later = NOTHING_LATER,
    ) -> list[int]:
        """Transform samples by one call; return the indices of those that are left to `run`.

        data: of each sample, uint8[bytes], contiguous, or its pixels, uint8[rows, columns, 3].
        rows: of each, its place in `out` and in the draws. out: [batch, *output_shape].
        later: gets what `front` makes of them for later epochs, where `ends_in_group`.
        """
        if self._stored is not None:
            return write_group(data, self._stored, out, rows)
        if self._group_pass is None:
            return list(range(len(data)))
        return self._group_pass.run(data, out, draws.samples[list(rows)], draws.epoch, rows, scratch, later)

    def run_front(
        self, data: Sequence[NDArray[np.uint8]], draws: Draws, rows: Sequence[int], scratch: Scratch
    ) -> list[NDArray[np.uint8] | None]:
        """Do the steps before the first callable by one call; return the pictures for `run`, None where it does all.

        data, draws, rows: as for `run_group`. The pictures take their memory together: a few at a time.
        """
        found: list[NDArray[np.uint8] | None] = [None] * len(data)
        if self._front_pass is None or self.front is None:
            return found
        pictures = np.empty((len(data), *self.front.shape), np.uint8)
        samples = draws.samples[list(rows)]
        left = set(self._front_pass.run(data, pictures, samples, draws.epoch, range(len(data)), scratch))
        return [None if index in left else pictures[index] for index in range(len(data))]

    def run(
        self,
        data: Encoded,
        out: NDArray[Any],
        draws: Draws,
        index: int,
        scratch: Scratch,
        front: NDArray[np.uint8] | None = None,
        beside: Beside | None = None,
    ) -> None:
        """Transform one sample into its place in the slot.

        data: the sample as stored, or its pixels: uint8[rows, columns, 3]. front: of `run_front`.
        out: `output_shape` of `storage_dtype`, C-contiguous; all of it is written.
        draws, index: the batch's draws and the sample's row in them.
        scratch: used by no other thread meanwhile. beside: the sample's mask; steps that take masks change it.

        Raises: DataError if the data are damaged or no image (the message says what is wrong, the caller
            knows which file); ConfigError if the result has another shape than the slot; whatever a
            callable raises, with a note that names it.
        """
        scratch.beside = beside
        try:
            if front is None:
                value = self._transformed(data, draws, index, scratch)
            else:
                value = self._staged(front, draws, index, scratch, self._lead)
            self._write(value, out, scratch)
        finally:
            scratch.beside = None
            if self.is_visual:
                scratch.end_picture()

    def run_crop(
        self,
        crop: NDArray[np.uint8],
        out: NDArray[Any],
        draws: Draws,
        index: int,
        scratch: Scratch,
        first: int,
    ) -> None:
        """Transform what the first steps have made of a sample into its place in the slot; as `run`.

        crop: uint8[height, width, 3], C-contiguous; unchanged. first: how many steps have made it, before `ToTensor`.
        """
        # The next step gets an array of its own, as from the step before.
        value: Value = np.array(crop) if first < len(self._stages) else crop
        try:
            self._write(self._staged(value, draws, index, scratch, first), out, scratch)
        finally:
            scratch.end_picture()

    def prepare_crops(self, first: int) -> None:
        """Bring in what `write_crops` needs."""
        if self._ends_after(first):
            self._sink.prepare_crops()

    def write_crops(
        self, crops: Sequence[NDArray[np.uint8]], out: NDArray[Any], rows: Sequence[int], first: int
    ) -> bool:
        """Do what `run_crop` does to several by one call; return whether that was done: not where Python follows.

        crops, first: as of `run_crop`. rows: of each, its place in `out`, [batch, *output_shape].
        """
        return self._ends_after(first) and self._sink.write_crops(crops, out, rows)

    def _ends_after(self, steps: int) -> bool:
        """Whether what so many steps have made is a picture for the last pass."""
        return steps == len(self._stages) and self._ends_as_picture

    def _write(self, value: Value, out: NDArray[Any], scratch: Scratch) -> None:
        if (picture := self._picture_in(value)) is not None:
            self._check_shape(self._sink.shape(picture.shape[:2]), out)
            if picture.flags.c_contiguous and self._sink.write_crops([picture], out[None], [0]):
                return
            value = Image.of(picture)
        if isinstance(value, Image):
            self._check_shape(self._sink.shape(value.geometry.size), out)
            value.write(self._sink, out, scratch)
        else:
            result = self._finished(value)
            self._check_shape(result.shape, out)
            np.copyto(out, result, casting="unsafe")

    def run_picture(
        self,
        picture: NDArray[np.uint8],
        draws: Draws,
        index: int,
        scratch: Scratch,
        beside: Beside | None = None,
    ) -> NDArray[Any]:
        """Return what becomes of decoded pixels, uint8[height, width, 3]; as `run`."""
        scratch.beside = beside
        value = self._ended(self._staged(Image.of(picture), draws, index, scratch))
        if not isinstance(value, Image):
            return np.array(self._finished(value), self.storage_dtype)
        out: NDArray[Any] = np.empty(self._sink.shape(value.geometry.size), self.storage_dtype)
        value.write(self._sink, out, scratch)
        return out

    def _transformed(self, data: Encoded, draws: Draws, index: int, scratch: Scratch) -> Value:
        """Apply all stages; returns an `Image`, its last steps outstanding, or what a callable returned."""
        value: Value
        if self.is_visual and isinstance(data, memoryview) and data.ndim == 3:
            pixels = np.asarray(data)
            value = Image(Plain(Pixels(pixels.reshape(-1), *pixels.shape[:2])))
        elif self.is_visual:
            value = Image(Picture(data, scratch.decoders, scratch.reserve))
        else:  # a copy either way: whoever gets it may keep it, or write to its array
            value = bytearray(data) if self._is_raw else bytes(data)
        return self._staged(value, draws, index, scratch)

    def _staged(self, value: Value, draws: Draws, index: int, scratch: Scratch, first: int = 0) -> Value:
        """Apply the stages from one on."""
        for stage in self._stages[first:]:
            value = stage(value, draws, index, scratch)
        return value

    def _picture_in(self, value: Value) -> NDArray[np.uint8] | None:
        """Return the picture that a callable returned, if the last pass is for one; None for anything else."""
        if not self.is_visual or not self._ends_as_picture or isinstance(value, Image):
            return None
        picture = as_picture(value)
        return picture if is_rgb(picture) else None

    def _ended(self, value: Value) -> Value:
        """Return a value with a picture that a callable returned as an `Image`."""
        picture = self._picture_in(value)
        return value if picture is None else Image.of(picture)

    def _finished(self, value: Value) -> NDArray[Any]:
        """Apply the last steps to an array that is no picture, and bring it into layout and number format."""
        for step in self._tail:
            value = to_tensor_array(value) if isinstance(step, ToTensor) else normalize_array(value, step)
        array = as_array(value)
        if self.is_visual and array.ndim == 3:
            array = self._laid_out(array, value)
        return encode_bfloat16(array.astype(np.float32)) if self.dtype == "bfloat16" else array

    def _laid_out(self, array: NDArray[Any], value: Value) -> NDArray[Any]:
        """Bring three axes into the layout; `value` is what the array was made from."""
        first, _, last = array.shape
        if self._has_tensor and not is_tensor(value):
            return array.transpose(1, 2, 0) if self.layout == "NHWC" else array
        if is_rgb(value) or (last in CHANNELS and first not in CHANNELS and not is_tensor(value)):
            return array.transpose(2, 0, 1) if self.layout == "NCHW" else array
        if first in CHANNELS and last in CHANNELS and not is_tensor(value):
            raise ConfigError(
                f"{self._last_callable} returned {describe(value)}, of which the first and the last axis could be the "
                "channels: return a torch tensor, which is taken in its own axes, or uint8[height, width, 3]"
            )
        if self.layout == "NHWC" and first in CHANNELS and last not in CHANNELS:
            raise ConfigError(
                f"layout is 'NHWC', and {self._last_callable} returned {describe(value)}, which is taken in its own "
                "axes: return [height, width, channels], or leave layout at 'NCHW'"
            )
        return array

    @property
    def _last_callable(self) -> str:
        return name_of([step for step in self.transforms if not _is_built_in(step)][-1])

    def _check_shape(self, shape: tuple[int, ...], out: NDArray[Any]) -> None:
        if shape != out.shape:
            shaping = [step for step in self.transforms if not isinstance(step, ToTensor | Normalize)]
            after = f" after {name_of(shaping[-1])}" if shaping else ""
            because = f", the shape of {self._shape_is_of}" if self._shape_is_of else ""
            raise ConfigError(
                f"the sample has shape {shape}{after}, and the batch has space for {out.shape}{because}: "
                "all must have one shape (Resize((height, width)) or CenterCrop sees to it)"
            )


def _as_list(transforms: object) -> tuple[Transform, ...]:
    """Return transforms as a list, with those that a `Compose` holds in its place."""
    what = f"transforms is {transforms!r}"
    if _is_composed(transforms) or library_of(transforms) is not None:
        transforms = [transforms]
    if hasattr(transforms, "transforms"):
        raise ConfigError(f"{what}, which {_CHOOSES}")
    if _is_built_in(transforms) or callable(transforms):
        raise ConfigError(f"{what}, a single one: put it into a list, transforms=[...]")
    if isinstance(transforms, str) or not isinstance(transforms, Iterable):
        raise ConfigError(f"{what}; it is a list of transforms, for example [Resize((224, 224)), ToTensor()]")
    steps: list[Transform] = []
    for step in transforms:
        steps += _held_by(step) if _is_composed(step) else [step]
    return tuple(steps)


def _is_composed(step: object) -> bool:
    """Whether it is torchvision's `Compose`, or one like it: it does what it holds, one after the other.

    That of albumentations does more.
    """
    is_one = type(step).__name__ == "Compose" and isinstance(getattr(step, "transforms", None), list | tuple)
    return is_one and library_of(step) != "albumentations"


def _held_by(compose: Any) -> tuple[Transform, ...]:
    steps = _as_list(list(compose.transforms))
    if library_of(compose) is None:
        return steps
    is_known = [isinstance(step, (*get_args(_BUILT_INS), *AUGMENTS)) or library_of(step) for step in steps]
    return tuple(step if known else InCompose(step) for step, known in zip(steps, is_known, strict=True))


_CHOOSES = (
    "chooses among the transforms that it holds: write a function of a picture and rng that does, and gets a "
    "generator of its own for each sample"
)

_BUILT_INS = DecodeRaw | PictureStep | ToTensor | Normalize
_NAMES = frozenset(step.__name__ for step in (*get_args(_BUILT_INS), *AUGMENTS))


def _is_built_in(step: Transform) -> bool:
    return isinstance(step, _BUILT_INS)


def _are_visual(transforms: Sequence[Transform]) -> bool:
    """Whether samples are pictures to these: a built-in step asks for them, or the first is for pictures alone."""
    first = transforms[0]
    return (
        library_of(first) is not None
        or takes_pil(first)
        or any(
            isinstance(step, (*get_args(_BUILT_INS), *AUGMENTS)) and not isinstance(step, DecodeRaw)
            for step in transforms
        )
    )


def _check(transforms: tuple[Transform, ...], dtype: str, layout: str) -> None:
    if not transforms:
        raise ConfigError("transforms change nothing: name at least one that does, for example ToTensor()")
    if layout not in LAYOUTS:
        raise ConfigError(f"layout is {layout!r}; it is one of {', '.join(LAYOUTS)}")
    has_tensor = False
    is_picture = True
    is_visual = _are_visual(transforms)
    for place, step in enumerate(transforms):
        label = f"transform {place} ({step})"
        if hasattr(step, "transforms") and not isinstance(step, AUGMENTS):
            raise ConfigError(f"{label} {_CHOOSES}")
        if isinstance(step, PictureStep) and has_tensor:
            raise ConfigError(f"{label} works on pictures and stands behind ToTensor: put it before")
        if isinstance(step, ToTensor):
            if has_tensor:
                raise ConfigError(f"{label} stands behind another ToTensor: drop one of them")
            has_tensor = True
        elif isinstance(step, Normalize):
            if not has_tensor:
                raise ConfigError(f"{label} works on numbers from 0 to 1: put ToTensor before it")
        elif isinstance(step, DecodeRaw):
            if place:
                raise ConfigError(f"{label} takes the stored bytes: put it first")
            if is_visual:
                raise ConfigError(
                    f"{label} takes no pictures, and the other steps of Penstock do: drop it or them"
                )
            is_picture = False
        elif not _is_built_in(step):
            if not callable(step) and not isinstance(step, Called):
                raise ConfigError(f"{label} is neither a transform of Penstock nor callable")
            is_picture = False
    if is_picture and dtype not in IMAGE_DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; for images it is one of {', '.join(IMAGE_DTYPES)}")
    if is_picture and has_tensor and dtype == "uint8":
        raise ConfigError(
            "ToTensor makes numbers from 0 to 1, which uint8 cannot hold: drop it or take a float dtype"
        )
    if dtype not in IMAGE_DTYPES:
        try:
            is_number = np.dtype(dtype).kind in "biuf"
        except TypeError:
            is_number = False
        if not is_number:
            raise ConfigError(
                f"dtype is {dtype!r}; it is one of {', '.join(IMAGE_DTYPES)} or a NumPy number type"
            )
    if isinstance(transforms[0], DecodeRaw):
        _check_fits(f"transform 0 ({transforms[0]})", transforms[0], dtype)


def _check_fits(label: str, step: DecodeRaw, dtype: str) -> None:
    """Refuse numbers that a batch would hold as others: they wrap around, or lose what is behind the point."""
    held = np.dtype(IMAGE_DTYPES.get(dtype, dtype)) if dtype != "bfloat16" else np.dtype("float32")
    stored = np.dtype(step.dtype)
    if held.kind in "iub" and not np.can_cast(stored, held, "safe"):
        raise ConfigError(
            f"{label} reads {stored.name}, which dtype={dtype!r} cannot hold: give dtype={stored.name!r}, or a float"
        )


def _made_again(
    given: tuple[Transform, ...],
    seed: int,
    dtype: str,
    layout: str,
    output_shape: tuple[int, ...] | None,
    shape_is_of: str,
) -> Pipeline:
    pipeline = compile_pipeline(given, seed, dtype, layout)
    pipeline._output_shape, pipeline._shape_is_of = output_shape, shape_is_of
    return pipeline


def _known_shape(transforms: tuple[Transform, ...], layout: str) -> tuple[int, ...] | None:
    """Return the shape of a sample where the transforms alone fix it."""
    size: tuple[int, int] | None = None
    if len(transforms) == 1 and isinstance(transforms[0], DecodeRaw):
        return transforms[0].shape
    for step in transforms:
        if isinstance(step, CenterCrop | RandomResizedCrop):
            size = step.target
        elif isinstance(step, Resize):
            if not isinstance(step.size, int):
                size = step.size
            elif size is not None:
                size = step.target(*size)
        elif not _is_built_in(step):
            size = None
    if size is None:
        return None
    return (3, *size) if layout == "NCHW" else (*size, 3)

"""The steps of a pipeline at work: each takes a sample's value and returns what follows.

A value is the stored `bytes`, an `Image` (a picture whose pixels have not moved yet), or what a callable
returned. Stages are made once per pipeline and hold no state; the thread's buffers come in `Scratch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.loader.transforms.augment import AUGMENTS
from penstock.loader.transforms.compiled import CROP_KERNELS
from penstock.loader.transforms.decoders import Decoders
from penstock.loader.transforms.draws import Draws, log_ratio
from penstock.loader.transforms.foreign import (
    Called,
    Caller,
    WithMask,
    as_picture,
    in_form,
    is_pil,
    is_tensor,
    takes_rng,
)
from penstock.loader.transforms.geometry import (
    CENTER_CROP,
    CUBIC,
    MIRROR,
    RANDOM_CROP,
    RESIZE,
    RESIZE_SHORTER,
    TURN_OVER,
    WIDENED,
    Box,
    StepNumbers,
    center_border,
    choose_shrink,
    is_resampled,
    needs_padding,
    resized_to,
    size_after,
    whole,
    without_resize,
)
from penstock.loader.transforms.memory import Memory, Need
from penstock.loader.transforms.pixels import Buffer, Pixels
from penstock.loader.transforms.sink import Blended, Sink
from penstock.loader.transforms.steps import (
    CenterCrop,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToTensor,
)
from penstock.plan.random import generator_for

Value = Any  # bytes, Image or an array
PictureStep = Resize | CenterCrop | RandomResizedCrop | RandomHorizontalFlip | RandomVerticalFlip

#: What an array between two steps is counted for: itself, what a step makes of it, and a copy for the next step.
_COPIES = 3

#: How long the axis of channels of a picture may be: grey, red-green-blue, and with opacity.
CHANNELS = (1, 3, 4)


class Beside(Protocol):
    """The mask of the picture that a thread transforms, for steps that are called with both."""

    def before(self, place: int, draws: Draws, index: int) -> NDArray[Any]:
        """Return it as it is before a step, an array of its own. draws, index: as of `Pipeline.run`."""
        ...

    def replace(self, mask: NDArray[Any]) -> None:
        """Take what that step has made of it."""
        ...


class Scratch:
    """The decoder and the buffers of one thread, reused from sample to sample.

    decoder: one of `decoders.JPEG_DECODERS`; None for the best that is installed.
    memory: shared with other threads, bounds what decoding takes.
    """

    def __init__(self, decoder: str | None = None, memory: Memory | None = None) -> None:
        self.decoders = Decoders(decoder)
        self.blended = Blended()
        self._memory = memory
        #: Of the picture that is transformed; None where it has no mask.
        self.beside: Beside | None = None
        #: What `GroupPass` keeps here: a function, and what it is for.
        self.group_call: tuple[tuple[object, ...], Callable[..., int] | None] = (), None

    @property
    def kept(self) -> Need:
        """See `memory.Buffers`."""
        return Need(self.decoders.buffer.nbytes, self.blended.nbytes, 0)

    def drop(self) -> None:
        """See `memory.Buffers`."""
        self.decoders.buffer.drop()
        self.blended.drop()

    def reserve(self, need: Need | None) -> None:
        """Wait until there is memory for a picture; see `DecodeMemory.take`. Once for each picture."""
        if self._memory is not None:
            self._memory.take(self, need)

    def reserve_kept(self, passing_bytes: int) -> bool:
        """Wait until pictures may be decoded that fit into the buffers as they are; return whether they ever may.

        passing_bytes: what one takes besides.
        """
        try:
            self.reserve(self.kept._replace(passing=passing_bytes))
        except DataError:
            return False
        return True

    def end_picture(self) -> None:
        """Give back what the picture took, but for the buffers. More than once is harmless."""
        if self._memory is not None:
            self._memory.give_back(self)


Stage = Callable[[Value, Draws, int, Scratch], Value]


class Plain:
    """Pixels that need no decoding."""

    __slots__ = ("_pixels", "height", "width")

    def __init__(self, pixels: Pixels) -> None:
        self._pixels = pixels
        self.height, self.width = pixels.rows, pixels.columns

    def need(self, box: Box, shrink: int) -> None:
        """Nothing: they have the memory that they are in."""

    def decode(self, box: Box, shrink: int) -> Pixels:
        return self._pixels


class PixelSource(Protocol):
    """A picture of known size. See `Picture`."""

    height: int
    width: int

    def need(self, box: Box, shrink: int) -> Need | None:
        """Return what `decode` of the same takes; None if that is nothing more."""
        ...

    def decode(self, box: Box, shrink: int) -> Pixels:
        """Return the pixels of at least a box."""
        ...


class Image:
    """A picture on its way: where its pixels come from, and what is still to be done to them."""

    __slots__ = ("geometry", "source")

    def __init__(self, source: PixelSource) -> None:
        self.source = source
        self.geometry = whole(source.height, source.width)

    @classmethod
    def of(cls, array: NDArray[np.uint8]) -> Image:
        """Wrap uint8[rows, columns, 3] (copied)."""
        return cls(Plain(Buffer().hold(array)))

    def write(self, sink: Sink, out: NDArray[Any], scratch: Scratch, passing_bytes: int = 0) -> None:
        """Do everything that is still to be done, into `out`. passing_bytes: taken besides, until the picture ends."""
        box, shrink = self.geometry.box, choose_shrink(self.geometry)
        if (need := self.source.need(box, shrink)) is not None:
            blended = Blended.bytes_for(self.geometry, shrink)
            scratch.reserve(Need(need.pixels, blended, need.passing + passing_bytes))
        pixels = self.source.decode(box, shrink)
        sink.write(pixels, self.geometry, out, scratch.blended)

    def settled(self, sink: Sink, scratch: Scratch, itemsize: int = 1) -> NDArray[np.uint8]:
        """Return the picture so far as a new array uint8[rows, columns, 3]. itemsize: of what a step makes of it."""
        array = np.empty((*self.geometry.size, 3), np.uint8)
        self.write(sink, array, scratch, _COPIES * itemsize * array.nbytes)
        return array


def is_rgb(value: Value) -> bool:
    """Whether a callable returned a picture, uint8[rows, columns, 3]."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 3:
        return False
    return value.shape[2] == 3 and value.size > 0


def _resampling(step: Resize | RandomResizedCrop) -> int:
    return WIDENED * step.antialias + CUBIC * (step.interpolation == "bicubic")


def in_numbers(step: PictureStep, column: int) -> StepNumbers:
    """Return a built-in that moves pixels as the functions of `geometry` take it.

    column: of a sample's random numbers, where its own begin.
    """
    match step:
        case Resize(size=int(size)):
            return StepNumbers(RESIZE_SHORTER, column, size, size, resampling=_resampling(step))
        case Resize(size=(height, width)):
            return StepNumbers(RESIZE, column, height, width, resampling=_resampling(step))
        case CenterCrop(target=(height, width)):
            return StepNumbers(CENTER_CROP, column, height, width)
        case RandomResizedCrop(target=(height, width)):
            return StepNumbers(
                RANDOM_CROP,
                column,
                height,
                width,
                *step.ratio,
                _resampling(step),
                *step.scale,
                *log_ratio(step),
            )
        case RandomHorizontalFlip():
            return StepNumbers(MIRROR, column, high=step.p)
        case RandomVerticalFlip():
            return StepNumbers(TURN_OVER, column, high=step.p)
    raise AssertionError(f"{step!r} is a built-in that moves pixels")


def picture_stage(step: PictureStep, place: int, numbers: StepNumbers, to_array: Sink) -> Stage:
    """Return the stage of a built-in that moves pixels. numbers: of `in_numbers`."""

    def as_image(value: Value) -> Image:
        if isinstance(value, Image):
            return value
        if is_rgb(picture := as_picture(value)):
            return Image.of(picture)
        raise ConfigError(
            f"transform {place} ({step}) was given {describe(value)} by the one before; "
            "it works on pictures, uint8[height, width, 3] or PIL images in RGB"
        )

    def run(value: Value, draws: Draws, index: int, scratch: Scratch) -> Value:
        image = as_image(value)
        if needs_padding(image.geometry, numbers):
            image = Image.of(pad(image.settled(to_array, scratch), (numbers.height, numbers.width)))
        image.geometry = without_resize(image.geometry, numbers, draws.numbers[index].tolist())
        height, width = size_after(image.geometry, numbers)
        if (height, width) != image.geometry.size:
            if is_resampled(image.geometry):
                image = Image.of(image.settled(to_array, scratch))
            image.geometry = resized_to(image.geometry, height, width, numbers.resampling)
        return image

    return run


def pad(array: NDArray[np.uint8], target: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the picture amid zeros, at least as large as target, as torchvision's center_crop pads."""
    height, width = array.shape[:2]
    left, above, right, below = center_border(height, width, *target)
    return np.pad(array, ((above, below), (left, right), (0, 0)))


def call_stage(step: Callable[..., Any] | Called, place: int, key: int, to_array: Sink | None) -> Stage:
    """Return the stage of a callable: a user's, another library's or one of AUGMENTS.

    It is called with a picture of its own, or bytes; with `rng=` where its signature has that name.
    """
    call = _caller(step)
    name = name_of(step)
    takes_mask = isinstance(step, Called) and step.takes_mask

    def run(value: Value, draws: Draws, index: int, scratch: Scratch) -> Value:
        if isinstance(value, Image):
            assert to_array is not None, "pictures are decoded only where a built-in asks for them"
            value = value.settled(to_array, scratch)
        if to_array is not None:
            scratch.end_picture()  # the user's code may wait for another thread, which waits for this memory
        beside = scratch.beside if takes_mask else None
        given = value if beside is None else WithMask(value, beside.before(place, draws, index))
        try:
            made = call(given, lambda: generator_for(key, draws.epoch, int(draws.samples[index])))
        except Exception as error:
            error.add_note(f"in transform {place} ({name}), called with {_given(step, value)}")
            raise
        if made is None:
            raise ConfigError(
                f"transform {place} ({name}) returned None: return what it makes, also where it changes it in place"
            )
        if beside is None:
            return made
        _check_mask(made, given.mask, f"transform {place} ({name})")
        beside.replace(made.mask)
        return made.picture

    return run


def _check_mask(made: WithMask, before: NDArray[Any], label: str) -> None:
    """Raise ConfigError unless a step left a mask of its picture's size and of the type that it had."""
    picture, mask = made
    shape = picture.size[::-1] if is_pil(picture) else tuple(getattr(picture, "shape", ()))
    size = shape[-2:] if is_tensor(picture) else shape[:2]
    if mask.shape != (*size, *before.shape[2:]) or mask.dtype != before.dtype:
        raise ConfigError(
            f"{label} returned {describe(picture)} with a mask {describe(mask)}: a mask has the height and width of "
            f"its image, and stays {before.dtype}"
        )


def _caller(step: Callable[..., Any] | Called) -> Callable[[Value, Callable[[], Any]], Value]:
    """Return what calls a step with a value, and with what makes the sample's generator."""
    if isinstance(step, Called):
        called, threads = step, threading.local()

        def call(value: Value, generator: Callable[[], Any]) -> Value:
            caller: Caller | None = getattr(threads, "caller", None)
            if caller is None:
                caller = threads.caller = Caller(called)
            return caller(value, generator)

        return call
    function, is_random, is_ours = step, takes_rng(step), isinstance(step, AUGMENTS)

    def call_plainly(value: Value, generator: Callable[[], Any]) -> Value:
        value = in_form(value, "array") if is_ours else value
        return function(value, rng=generator()) if is_random else function(value)

    return call_plainly


def _given(step: object, value: Value) -> str:
    """Name what a callable was given, for those who expected what torchvision gives."""
    if isinstance(step, Called):
        return describe(in_form(value, step.form))
    if isinstance(value, bytes):
        return (
            "the stored bytes, as no step of penstock.loader.transforms is in the list: put one in to get pictures, or "
            f"{_PIL_ADVICE}"
        )
    about = f": a NumPy array [height, width, 3], no PIL image; {_PIL_ADVICE}" if is_rgb(value) else ""
    return describe(value) + about


#: To those who expected what torchvision gives.
_PIL_ADVICE = (
    "annotate its first parameter as PIL.Image.Image to get a PIL image: def f(image: PIL.Image.Image)"
)


def numbers_stage(steps: Sequence[ToTensor | Normalize], to_array: Sink) -> Stage:
    """Return the stage of `ToTensor` and of `Normalize` behind it, or behind a callable, which a callable follows.

    Numbers of a picture are looked up, bit for bit as NumPy computes them: 0.1 ms for 224 x 224 where that takes 0.5.
    """

    def computed(value: Value) -> NDArray[np.float32]:
        for step in steps:
            value = to_tensor_array(value) if isinstance(step, ToTensor) else normalize_array(value, step)
        return cast(NDArray[np.float32], value)

    #: float32[3, 256]: what becomes of each byte.
    table = None
    if isinstance(steps[0], ToTensor):
        every_byte = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
        table = np.ascontiguousarray(computed(every_byte)[:, 0])

    def run(value: Value, draws: Draws, index: int, scratch: Scratch) -> Value:
        if isinstance(value, Image):
            value = value.settled(to_array, scratch, np.dtype(np.float32).itemsize)
        picture = as_picture(value)
        loop = CROP_KERNELS["crops_to_numbers"].ask() if table is not None and is_rgb(picture) else None
        if loop is None:
            return computed(value)
        picture = np.ascontiguousarray(picture)
        height, width, _ = picture.shape
        numbers = np.empty((1, 3, height, width), np.float32)
        loop((table,), False, height, width, np.array([[id(picture)], [0]]), numbers)
        return numbers[0]

    return run


def to_tensor_array(value: Value) -> NDArray[np.float32]:
    """Return `ToTensor` of what a callable made: bytes to 0...1, (rows, columns[, n]) to (n, ...)."""
    value = as_picture(value)
    array = np.empty(0) if is_tensor(value) else as_array(value)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in CHANNELS:
        raise ConfigError(
            f"ToTensor was given {describe(value)} by the callable before it; it takes NumPy arrays "
            "[height, width] or [height, width, channels] of 1, 3 or 4 channels: return such an array or, where the "
            "callable does ToTensor's work itself, drop ToTensor"
        )
    array = array.transpose(2, 0, 1)
    if array.dtype == np.uint8:
        return array.astype(np.float32) / np.float32(255)
    return np.ascontiguousarray(array, np.float32)


def normalize_array(value: Value, step: Normalize) -> NDArray[np.float32]:
    """Return `Normalize` of float32[3, height, width]."""
    array = as_array(value).astype(np.float32, copy=False)
    if array.ndim != 3 or array.shape[0] != 3:
        raise ConfigError(f"{step} was given {describe(value)}; it works on (3, height, width)")
    mean, std = np.array(step.mean, np.float32), np.array(step.std, np.float32)
    return (array - mean[:, None, None]) / std[:, None, None]


def as_array(value: Value) -> NDArray[Any]:
    """Return the numbers of what a callable made, in their own axes; as float32 where NumPy lacks their type.

    Raises: ConfigError if it holds anything but real numbers.
    """
    if is_tensor(value):
        tensor = value.detach().cpu()
        try:
            array = np.asarray(tensor)
        except TypeError:
            array = np.asarray(tensor.float())
    else:
        try:
            array = np.asarray(value)
        except ValueError:  # parts of several shapes, such as an image and its label
            array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise ConfigError(
            f"the last callable among the transforms returned {describe(value)}; a batch needs numbers: return one "
            "array or tensor of real numbers"
        )
    return array


def describe(value: Value) -> str:
    """Name a value's kind for a message: ``float32[3, 8, 8]``."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if is_tensor(value):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if is_pil(value):
        return f"a PIL image of mode {value.mode}"
    return f"a value of type {type(value).__name__}"


def name_of(step: object) -> str:
    """Return the name by which messages and random keys know a transform."""
    step = step.step if isinstance(step, Called) else step
    return getattr(step, "__qualname__", type(step).__name__)

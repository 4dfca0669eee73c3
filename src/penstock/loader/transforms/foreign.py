"""Transforms of torchvision and albumentations in a list: which Penstock does itself, and how others are called.

They are known by the names of their class and module; neither library is imported. A transform of torchvision whose
arguments one of Penstock's has is replaced by it: the same operation and distribution, drawn by the loader's seed.
Every other is called with what it expects: torchvision's with a PIL image, behind `ToImage` or `ToTensor` with a
tensor; albumentations' with an array by the name `image`. So is a callable whose signature says that it takes a PIL
image. albumentations' and torchvision's v2 are called with a picture's mask as well, where it has one.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.loader.asked import parameters_of
from penstock.loader.global_draws import seed_all
from penstock.loader.transforms.augment import (
    AUGMENTS,
    ColorJitter,
    GaussianBlur,
    Grayscale,
    Pad,
    RandAugment,
    RandomApply,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomRotation,
    TrivialAugmentWide,
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

#: What a step is called with: uint8[height, width, 3], a PIL image, or a tensor [3, height, width].
Form = Literal["array", "pil", "tensor"]
Draws = Literal["none", "own", "global", "rng"]
Library = Literal["torchvision", "albumentations"]

#: Of torchvision's, those that draw nothing.
_WITHOUT_DRAWS = frozenset(
    (
        *("CenterCrop", "ConvertImageDtype", "FiveCrop", "Grayscale", "Identity", "LinearTransformation"),
        *("Normalize", "PILToTensor", "Pad", "RGB", "Resize", "TenCrop"),
        *("ToDtype", "ToImage", "ToPILImage", "ToPureTensor", "ToTensor"),
    )
)
#: Those that work on batches.
_OF_BATCHES = frozenset(("CutMix", "MixUp"))
_PACKAGES: tuple[Library, ...] = ("torchvision", "albumentations")


@dataclass(frozen=True, slots=True)
class Called:
    """A step that is called as Python code, with pictures in a form.

    draws: where its random numbers come from: a generator of its own that can be set; the global ones, which are seeded
        for each sample and put back; or a generator that it is given as `rng=`.
    """

    step: Callable[..., Any]
    form: Form
    draws: Draws = "none"

    def __repr__(self) -> str:
        return repr(self.step)

    @property
    def takes_mask(self) -> bool:
        """Whether it moves a picture and its mask alike, called with both."""
        is_v2 = type(self.step).__module__.startswith("torchvision.transforms.v2")
        return is_v2 or library_of(self.step) == "albumentations"


class WithMask(NamedTuple):
    """A picture, and its mask: [height, width] or [height, width, masks] of integers."""

    picture: Any
    mask: Any


@dataclass(frozen=True, slots=True)
class InCompose:
    """A callable of a user's in a `Compose` of torchvision, which gets what torchvision would give it."""

    step: Callable[..., Any]

    def __repr__(self) -> str:
        return repr(self.step)


def library_of(step: object) -> Library | None:
    """Return which library a transform is of, by its module."""
    if isinstance(step, InCompose):
        return "torchvision"
    package = str(getattr(step, "__module__", "")).partition(".")[0]
    return next((each for each in _PACKAGES if each == package), None)


def takes_rng(function: Callable[..., Any]) -> bool:
    """Whether a callable wants a random generator."""
    return "rng" in parameters_of(function)


def takes_pil(function: Callable[..., Any]) -> bool:
    """Whether a callable's first parameter is annotated as a `PIL.Image.Image`."""
    parameters = parameters_of(function)
    with suppress(Exception):  # an annotation may raise anything: its text is looked at then
        parameters = inspect.signature(function, eval_str=True).parameters
    kind = next((each.annotation for each in parameters.values()), None)
    if isinstance(kind, str):
        return kind in ("Image.Image", "PIL.Image.Image")
    return (getattr(kind, "__module__", ""), getattr(kind, "__name__", "")) == ("PIL.Image", "Image")


def translate(steps: Sequence[Any], *, of_pictures: bool) -> tuple[Any, ...]:
    """Return the steps of a list of transforms, those of other libraries replaced or as `Called`.

    of_pictures: whether the first gets a picture; else it gets the stored bytes, and nothing is replaced.
    Raises: ConfigError for one that works on batches, or that gets numbers and works on pictures.
    """
    translation = _Translation(steps, is_open=not of_pictures)
    for place, step in enumerate(steps):
        translation.add(place, step)
    return tuple(translation.found)


class _Translation:
    """What a list becomes, and what a sample is to the step that comes next.

    form: of the picture, or of the numbers behind `ToTensor`. has_numbers: whether it is numbers.
    is_open: whether nothing is known of it: a callable may have made anything.
    """

    def __init__(self, steps: Sequence[Any], *, is_open: bool) -> None:
        self._steps = steps
        self.found: list[Any] = []
        self._form: Form = "array"
        self._has_numbers, self._is_open = False, is_open

    def add(self, place: int, step: Any) -> None:
        library = library_of(step)
        if library == "albumentations":
            self._add_albumentations(place, step)
        elif isinstance(step, InCompose):
            self._add_callable(place, step.step, self._form_of_torchvision)
        elif library == "torchvision":
            self._add_torchvision(place, step)
        elif isinstance(step, _OWN):
            self.found.append(step)
            self._has_numbers |= isinstance(step, ToTensor)
            self._form, self._is_open = "array", False
        elif takes_pil(step):
            if self._has_numbers:
                raise ConfigError(
                    f"transform {place} ({step}) takes a PIL image, and stands behind ToTensor: put it before"
                )
            self._add_callable(place, step, "pil")
        else:
            self._add_callable(place, step, self._form)

    @property
    def _form_of_torchvision(self) -> Form:
        """What a transform of torchvision gets."""
        return self._form if self._form != "array" else "tensor" if self._has_numbers else "pil"

    def _add_callable(self, place: int, step: Any, form: Form) -> None:
        draws: Draws = "rng" if takes_rng(step) else "none"
        self.found.append(step if form == "array" else Called(step, form, draws))
        self._form = form
        # What is turned to numbers later is a picture still.
        rest = self._steps[place + 1 :]
        self._is_open |= not self._has_numbers and not any(map(_makes_numbers, rest))

    def _add_albumentations(self, place: int, step: Any) -> None:
        if self._has_numbers:
            raise ConfigError(
                f"transform {place} ({step}) is albumentations', which takes pictures, and stands behind ToTensor: put "
                "it before"
            )
        draws: Draws = "own" if hasattr(step, "set_random_state") else "global"
        self.found.append(Called(step, "array", draws))
        self._form, self._is_open = "array", True

    def _add_torchvision(self, place: int, step: Any) -> None:
        name, form = type(step).__name__, self._form_of_torchvision
        if name == "Lambda":
            self._add_callable(place, step, form)
            return
        if name in _OF_BATCHES:
            raise ConfigError(
                f"transform {place} ({step}) mixes the samples of a batch, and transforms get one sample: give it as "
                "mix_images="
            )
        replaced = None if self._is_open else self._replaced(step, name, form)
        if replaced is None:
            is_random = name not in _WITHOUT_DRAWS and not hasattr(step, "__qualname__")
            self.found.append(Called(step, form, "global" if is_random else "none"))
            self._is_open |= name in _OPEN or (name in _TO_NUMBERS and not self._has_numbers)
        else:
            self.found += replaced
            self._has_numbers |= any(isinstance(each, ToTensor) for each in replaced)
        if name in _TO_TENSORS:
            form = "tensor"
        self._form = "pil" if name == "ToPILImage" else form

    def _replaced(self, step: Any, name: str, form: Form) -> list[Any] | None:
        """Return the steps of Penstock that do the same; None where there are none."""
        if name in ("Identity", "ToPureTensor") or (name in ("ToImage", "RGB") and self._has_numbers):
            return []
        if name in ("ToDtype", "ConvertImageDtype"):
            return self._converted(step, name, form)
        if self._has_numbers:
            make = _OF_NUMBERS.get(name)
        elif name in ("ToImage", "PILToTensor", "ToPILImage", "RGB"):
            return []
        else:
            make = _OF_PICTURES.get(name)
        try:
            return None if make is None else [make(step, form)]
        except (ConfigError, AttributeError, TypeError, ValueError):  # arguments that ours has not
            return None

    def _converted(self, step: Any, name: str, form: Form) -> list[Any] | None:
        if form == "pil":
            raise ConfigError(
                f"{step} leaves PIL images as they are, and gets them here: put torchvision's ToImage() before it"
            )
        dtype, scales = str(step.dtype), getattr(step, "scale", name == "ConvertImageDtype")
        if dtype == "torch.float32" and (self._has_numbers or scales):
            return [] if self._has_numbers else [ToTensor()]
        return [] if dtype == "torch.uint8" and not self._has_numbers else None


_OWN = (
    *(CenterCrop, DecodeRaw, Normalize, RandomHorizontalFlip, RandomResizedCrop, RandomVerticalFlip),
    *(Resize, ToTensor, *AUGMENTS),
)
#: Those of torchvision behind which a sample is a tensor, and numbers from 0 to 1.
_TO_TENSORS = frozenset(("ToTensor", "ToImage", "PILToTensor"))
_TO_NUMBERS = frozenset(("ToTensor", "ToDtype", "ConvertImageDtype"))
#: Those behind which it may be several, or of one channel.
_OPEN = frozenset(("FiveCrop", "Grayscale", "TenCrop"))


def _makes_numbers(step: object) -> bool:
    return isinstance(step, ToTensor) or (
        library_of(step) == "torchvision" and type(step).__name__ in _TO_NUMBERS
    )


# -- Which of Penstock's does the same --------------------------------------------------------------------------


def _text(value: Any) -> str:
    """Return the name of an interpolation or of a padding mode."""
    return str(getattr(value, "value", value))


def _demand(*conditions: bool) -> None:
    """Raise ValueError unless Penstock's step has the arguments of torchvision's."""
    if not all(conditions):
        raise ValueError


def _size(size: Any) -> Any:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes[0] if len(sizes) == 1 else sizes


def _fill(fill: Any) -> Any:
    values = (0,) if fill is None else (fill,) if isinstance(fill, int | float) else tuple(fill)
    whole = tuple(int(value) for value in values)
    _demand(whole == values, not isinstance(fill, dict))
    return whole[0] if len(whole) == 1 else whole


def _factors(value: Any, neutral: float) -> tuple[float, float]:
    return (neutral, neutral) if value is None else (float(value[0]), float(value[1]))


def _is_antialiased(step: Any, form: Form) -> bool:
    """Whether it is: PIL images always are."""
    return form == "pil" or step.antialias is not False


def _resize(step: Any, form: Form) -> Resize:
    _demand(getattr(step, "max_size", None) is None, step.size is not None)
    return Resize(_size(step.size), _text(step.interpolation), _is_antialiased(step, form))


def _random_resized_crop(step: Any, form: Form) -> RandomResizedCrop:
    interpolation, antialias = _text(step.interpolation), _is_antialiased(step, form)
    return RandomResizedCrop(_size(step.size), tuple(step.scale), tuple(step.ratio), interpolation, antialias)


def _border(step: Any) -> dict[str, Any]:
    padding = step.padding
    sides = padding if padding is None or isinstance(padding, int) else tuple(padding)
    return {"padding": sides, "fill": _fill(step.fill), "padding_mode": _text(step.padding_mode)}


def _rotation(step: Any, form: Form) -> RandomRotation:
    interpolation: Any = _text(step.interpolation)
    _demand(not step.expand, step.center is None)
    return RandomRotation(tuple(step.degrees), interpolation, _fill(step.fill))


def _blur(step: Any, form: Form) -> GaussianBlur:
    height, width = step.kernel_size
    _demand(height == width)
    return GaussianBlur(int(height), (float(step.sigma[0]), float(step.sigma[1])))


def _jitter(step: Any, form: Form) -> ColorJitter:
    brightness, contrast, saturation = (
        _factors(value, 1.0) for value in (step.brightness, step.contrast, step.saturation)
    )
    return ColorJitter(brightness, contrast, saturation, _factors(step.hue, 0.0))


def _erasing(step: Any, form: Form) -> RandomErasing:
    value = step.value
    if isinstance(value, list | tuple):
        value = value[0] if len(value) == 1 else tuple(value)
    _demand(form == "tensor")
    return RandomErasing(step.p, tuple(step.scale), tuple(step.ratio), "random" if value is None else value)


def _erasing_of_pictures(step: Any, form: Form) -> RandomErasing:
    _demand((found := _erasing(step, form)).value != "random")
    return found


def _randaugment(step: Any, form: Form) -> RandAugment:
    _demand(_text(step.interpolation) == "nearest")
    return RandAugment(step.num_ops, step.magnitude, step.num_magnitude_bins, _fill(step.fill))


def _trivialaugment(step: Any, form: Form) -> TrivialAugmentWide:
    _demand(_text(step.interpolation) == "nearest")
    return TrivialAugmentWide(step.num_magnitude_bins, _fill(step.fill))


def _grayscale(step: Any, form: Form) -> Grayscale:
    _demand(step.num_output_channels == 3)
    return Grayscale()


def _apply(step: Any, form: Form) -> RandomApply:
    inner = [_OF_PICTURES[type(each).__name__](each, form) for each in step.transforms]
    _demand(all(library_of(each) == "torchvision" for each in step.transforms))
    return RandomApply(inner, float(step.p))


#: By the name of torchvision's, what makes ours of it and the form that it gets.
_OF_PICTURES: dict[str, Callable[[Any, Form], Any]] = {
    "Resize": _resize,
    "CenterCrop": lambda step, form: CenterCrop(_size(step.size)),
    "RandomResizedCrop": _random_resized_crop,
    "RandomHorizontalFlip": lambda step, form: RandomHorizontalFlip(step.p),
    "RandomVerticalFlip": lambda step, form: RandomVerticalFlip(step.p),
    "ToTensor": lambda step, form: ToTensor(),
    "Normalize": lambda step, form: Normalize(tuple(step.mean), tuple(step.std)),
    "Pad": lambda step, form: Pad(**_border(step)),
    "RandomCrop": lambda step, form: RandomCrop(
        _size(step.size), pad_if_needed=step.pad_if_needed, **_border(step)
    ),
    "Grayscale": _grayscale,
    "RandomGrayscale": lambda step, form: RandomGrayscale(step.p),
    "ColorJitter": _jitter,
    "GaussianBlur": _blur,
    "RandomRotation": _rotation,
    "RandomErasing": _erasing_of_pictures,
    "RandAugment": _randaugment,
    "TrivialAugmentWide": _trivialaugment,
    "RandomApply": _apply,
}
_OF_NUMBERS: dict[str, Callable[[Any, Form], Any]] = {
    "Normalize": _OF_PICTURES["Normalize"],
    "RandomErasing": _erasing,
}


# -- What others are called with --------------------------------------------------------------------------------


def is_pil(value: object) -> bool:
    """Tell a PIL image by its module: those without Pillow need not import it to be asked."""
    return type(value).__module__.startswith("PIL.") and hasattr(value, "convert")


def is_tensor(value: object) -> bool:
    """Tell a torch tensor by its methods: those without torch need not import it to be asked."""
    return hasattr(value, "detach") and hasattr(value, "permute")


def as_picture(value: Any) -> Any:
    """Return a PIL image in RGB or a tensor uint8[3, height, width] as an array; anything else as it is."""
    if is_pil(value) and value.mode == "RGB":
        return np.asarray(value)
    if is_tensor(value) and value.ndim == 3 and value.shape[0] == 3 and str(value.dtype) == "torch.uint8":
        return np.ascontiguousarray(value.detach().cpu().permute(1, 2, 0).numpy())
    return value


def in_form(value: Any, form: Form) -> Any:
    """Return a picture or numbers [3, height, width] in a form; anything else as it is."""
    if form == "array":
        value = as_picture(value)
        return np.asarray(value) if is_pil(value) or is_tensor(value) else value
    is_array = isinstance(value, np.ndarray)
    is_picture = is_array and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3
    if form == "pil":
        return importlib.import_module("PIL.Image").fromarray(value) if is_picture else value
    if is_picture or is_pil(value):
        planes = np.asarray(value)
        value = np.ascontiguousarray((planes if planes.ndim == 3 else planes[:, :, None]).transpose(2, 0, 1))
    return importlib.import_module("torch").from_numpy(value) if isinstance(value, np.ndarray) else value


class Caller:
    """Calls a step for one sample, so that what it draws belongs to the sample. One for each thread."""

    def __init__(self, called: Called) -> None:
        self._called = called
        # It keeps the generators that it is given: of a thread's own.
        self._step: Any = deepcopy(called.step) if called.draws == "own" else called.step

    def __call__(self, value: Any, generator: Callable[[], np.random.Generator]) -> Any:
        """Return what the step makes of a value. generator: makes the sample's own.

        value: a `WithMask` where `Called.takes_mask`, too; the result is one then.
        """
        form = self._called.form
        if isinstance(value, WithMask):
            value = value._replace(picture=in_form(value.picture, form))
        else:
            value = in_form(value, form)
        if self._called.draws == "own":
            rng = generator()
            self._step.set_random_state(rng, random.Random(int(rng.integers(2**63))))
            return self._of(value)
        if self._called.draws == "global":
            with seeded_globals(generator()):
                return self._of(value)
        if self._called.draws == "rng":
            return self._step(value, rng=generator())
        return self._of(value)

    def _of(self, value: Any) -> Any:
        is_named = library_of(self._step) == "albumentations"
        if isinstance(value, WithMask):
            return self._of_both(*value, is_named=is_named)
        return self._step(image=value)["image"] if is_named else self._step(value)

    def _of_both(self, picture: Any, mask: NDArray[Any], *, is_named: bool) -> WithMask:
        if is_named:
            made = self._step(image=picture, mask=mask)
            return WithMask(made["image"], np.asarray(made["mask"]))
        # torchvision has height and width last.
        planes = np.ascontiguousarray(np.moveaxis(mask, (0, 1), (-2, -1)))
        torch, kinds = importlib.import_module("torch"), importlib.import_module("torchvision.tv_tensors")
        picture, moved = self._step(picture, kinds.Mask(torch.from_numpy(planes)))
        return WithMask(picture, np.moveaxis(np.asarray(moved), (-2, -1), (0, 1)))


@contextmanager
def seeded_globals(rng: np.random.Generator) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and PyTorch by draws of a generator; put them back at the end.

    Only where no other thread draws from them meanwhile. Those of devices are left alone.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch = sys.modules.get("torch")
    of_torch = None if torch is None else torch.default_generator.get_state()
    seed_all(int(rng.integers(2**63)), "transform")
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        if torch is not None:
            torch.default_generator.set_state(of_torch)

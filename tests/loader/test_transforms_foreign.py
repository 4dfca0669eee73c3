"""Transforms of torchvision and albumentations as they are, against these libraries and Pillow."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from numpy.typing import NDArray
from tests.for_each import for_each

from penstock import Loader
from penstock.errors import ConfigError
from penstock.loader import transforms as ours
from penstock.loader.transforms import Pipeline, Scratch, compile_pipeline
from penstock.store import ImagesAndMasks


def installed(name: str) -> Any:
    """Return a module, or None."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # it asks a server for its newest version
albumentations = installed("albumentations")
if importlib.util.find_spec("torchvision") is not None and torch.version.cuda is None:
    # Its package is built for CUDA, and looks for two of its operators, which no transform needs.
    for operator in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # where they are there
            torch.library.define(f"torchvision::{operator}", "(Tensor a, Tensor b, float c) -> Tensor")
v1, v2 = installed("torchvision.transforms"), installed("torchvision.transforms.v2")
needs_torchvision = pytest.mark.skipif(v2 is None, reason="torchvision is not installed")
needs_albumentations = pytest.mark.skipif(albumentations is None, reason="albumentations is not installed")

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
ROWS, COLUMNS = np.mgrid[0:48, 0:64]
PHOTO: NDArray[np.uint8] = np.stack(
    [127 + 120 * np.sin(ROWS / 9 + COLUMNS / 17), 4.0 * COLUMNS, 250.0 - 5 * ROWS], axis=2
).astype(np.uint8)


def of(library: str, name: str, **attributes: Any) -> Any:
    """Return what is known of another library's transform: its module, its name, and its attributes."""
    methods = {"__module__": library, "__call__": lambda self, *given, **named: None}
    made = type(name, (), methods)()
    vars(made).update(attributes)
    return made


def of_torchvision(name: str, **attributes: Any) -> Any:
    return of("torchvision.transforms.v2._any", name, **attributes)


def composed(*steps: Any) -> Any:
    return of_torchvision("Compose", transforms=list(steps))


def enumerated(value: str) -> Any:
    """An interpolation of torchvision's."""
    return SimpleNamespace(value=value)


def png(picture: NDArray[np.uint8] = PHOTO) -> bytes:
    stream = io.BytesIO()
    PIL.Image.fromarray(picture).save(stream, "PNG")
    return stream.getvalue()


def run(pipeline: Pipeline, data: bytes, sample: int = 0, epoch: int = 0) -> NDArray[Any]:
    pipeline.probe(data)
    out: NDArray[Any] = np.empty(pipeline.output_shape, pipeline.storage_dtype)
    pipeline.run(data, out, pipeline.draw(epoch, np.array([sample])), 0, Scratch())
    return out


TO_IMAGE = of_torchvision("ToImage")
TO_TENSOR = of_torchvision("ToTensor")
TO_FLOAT = of_torchvision("ToDtype", dtype=torch.float32, scale=True)
NORMALIZE = of_torchvision("Normalize", mean=list(MEAN), std=list(STD), inplace=False)
RESIZED_CROP = of_torchvision(
    "RandomResizedCrop",
    size=(224, 224),
    scale=(0.08, 1.0),
    ratio=(3 / 4, 4 / 3),
    interpolation=enumerated("bicubic"),
    antialias=True,
)
FLIP = of_torchvision("RandomHorizontalFlip", p=0.3)


def test_a_recipe_of_torchvision_becomes_the_steps_of_penstock_with_its_arguments() -> None:
    """Attributes as torchvision 0.28 sets them."""
    recipe = composed(TO_IMAGE, RESIZED_CROP, composed(FLIP), TO_FLOAT, NORMALIZE)

    pipeline = compile_pipeline(recipe, 0)

    assert pipeline.transforms == (
        ours.RandomResizedCrop((224, 224), interpolation="bicubic"),
        ours.RandomHorizontalFlip(0.3),
        ours.ToTensor(),
        ours.Normalize(MEAN, STD),
    )
    assert pipeline.summary() == "5 of 5 transforms of other libraries are Penstock's own code"
    assert not pipeline.calls_python


@for_each(
    ("name", "attributes", "expected"),
    [
        (
            "Resize",
            {"size": [256], "interpolation": "bilinear", "max_size": None, "antialias": True},
            ours.Resize(256),
        ),
        (
            "Resize",
            {"size": [8, 9], "interpolation": "bicubic", "antialias": False},
            ours.Resize((8, 9), "bicubic"),
        ),
        ("CenterCrop", {"size": (224, 224)}, ours.CenterCrop((224, 224))),
        ("RandomVerticalFlip", {"p": 0.5}, ours.RandomVerticalFlip()),
        (
            "RandomCrop",
            {
                "size": (32, 32),
                "padding": [4, 4, 4, 4],
                "pad_if_needed": False,
                "fill": 0,
                "padding_mode": "edge",
            },
            ours.RandomCrop((32, 32), (4, 4, 4, 4), padding_mode="edge"),
        ),
        ("Pad", {"padding": 3, "fill": [1, 2, 3], "padding_mode": "constant"}, ours.Pad(3, (1, 2, 3))),
        (
            "ColorJitter",
            {"brightness": (0.6, 1.4), "contrast": None, "saturation": (0.5, 1.0), "hue": (-0.1, 0.1)},
            ours.ColorJitter(0.4, 0, (0.5, 1.0), 0.1),
        ),
        (
            "RandAugment",
            {
                "num_ops": 3,
                "magnitude": 7,
                "num_magnitude_bins": 31,
                "interpolation": "nearest",
                "fill": None,
            },
            ours.RandAugment(3, 7),
        ),
        (
            "TrivialAugmentWide",
            {"num_magnitude_bins": 31, "interpolation": "nearest", "fill": None},
            ours.TrivialAugmentWide(),
        ),
        ("Grayscale", {"num_output_channels": 3}, ours.Grayscale()),
        ("RandomGrayscale", {"p": 0.2}, ours.RandomGrayscale(0.2)),
        ("GaussianBlur", {"kernel_size": (23, 23), "sigma": [0.1, 2.0]}, ours.GaussianBlur(23)),
        (
            "RandomRotation",
            {
                "degrees": [-30.0, 30.0],
                "interpolation": "bilinear",
                "expand": False,
                "center": None,
                "fill": 0,
            },
            ours.RandomRotation(30, "bilinear"),
        ),
        (
            "RandomApply",
            {"transforms": [of_torchvision("RandomGrayscale", p=1.0)], "p": 0.8},
            ours.RandomApply([ours.RandomGrayscale(1.0)], 0.8),
        ),
        # Arguments that Penstock's has not.
        ("Resize", {"size": [256], "interpolation": "bilinear", "max_size": 300, "antialias": True}, None),
        ("Resize", {"size": [256], "interpolation": "nearest", "antialias": True}, None),
        ("Grayscale", {"num_output_channels": 1}, None),
        ("GaussianBlur", {"kernel_size": (3, 5), "sigma": [0.1, 2.0]}, None),
        ("Pad", {"padding": 3, "fill": {"any": 1}, "padding_mode": "constant"}, None),
        (
            "RandomRotation",
            {"degrees": [0.0, 9.0], "interpolation": "nearest", "expand": True, "center": None, "fill": 0},
            None,
        ),
        ("ElasticTransform", {"alpha": 3}, None),
    ],
)
def test_a_transform_is_replaced_if_its_arguments_are_one_of_penstocks(
    name: str, attributes: dict[str, Any], expected: Any
) -> None:
    step = of_torchvision(name, **attributes)

    first, *_ = compile_pipeline([step, of_torchvision("ToTensor")], 0).transforms

    assert (first == expected) if expected is not None else (first.step is step)


def test_behind_to_image_pictures_are_antialiased_as_the_argument_says() -> None:
    """PIL images always are."""
    resize = of_torchvision("Resize", size=[8, 9], interpolation="bilinear", antialias=False)

    assert compile_pipeline([resize], 0).transforms == (ours.Resize((8, 9)),)
    assert compile_pipeline([TO_IMAGE, resize], 0).transforms == (ours.Resize((8, 9), antialias=False),)


def test_a_callable_gets_what_it_would_get_in_the_same_place_of_torchvisions_compose() -> None:
    seen: list[Any] = []

    def look(value: Any) -> Any:
        is_image = isinstance(value, PIL.Image.Image)
        seen.append(value.mode if is_image else (type(value).__name__, value.dtype, tuple(value.shape)))
        return value

    steps = [of_torchvision("Resize", size=[8, 9], interpolation="bilinear", antialias=True), look, TO_TENSOR]
    run(compile_pipeline(composed(look, *steps, look), 0), png())
    run(compile_pipeline([TO_IMAGE, look, TO_FLOAT], 0), png())
    run(compile_pipeline([ours.Resize((8, 9)), look, ours.ToTensor()], 0), png())

    assert list(dict.fromkeys(seen)) == [  # probed first, then run
        "RGB",
        ("Tensor", torch.float32, (3, 8, 9)),
        ("Tensor", torch.uint8, (3, 48, 64)),
        ("ndarray", np.dtype(np.uint8), (8, 9, 3)),
    ]


def test_what_a_callable_makes_of_a_pil_image_goes_on_through_the_fused_steps() -> None:
    turned = composed(lambda image: image.transpose(PIL.Image.Transpose.ROTATE_180), TO_TENSOR, NORMALIZE)

    found = run(compile_pipeline(turned, 0), png())

    expected = (PHOTO[::-1, ::-1] / 255 - MEAN) / STD
    np.testing.assert_allclose(found, expected.transpose(2, 0, 1), atol=1e-5)
    with pytest.raises(ConfigError, match=r"a PIL image of mode L .*PIL images in RGB"):
        run(compile_pipeline(composed(lambda image: image.convert("L"), RESIZED_CROP, TO_TENSOR), 0), png())


@for_each(
    ("steps", "text"),
    [
        ([of_torchvision("MixUp", alpha=1.0)], r"transform 0 .*mixes the samples of a batch.*mix_images="),
        ([TO_FLOAT], r"leaves PIL images as they are.*put torchvision's ToImage\(\) before it"),
        ([ours.ToTensor(), of("albumentations.core", "Blur")], "takes pictures, and stands behind ToTensor"),
        ([type(TO_TENSOR)], "is a class; make an instance of it: ToTensor"),
        ([TO_IMAGE], "transforms change nothing"),
        (of("elsewhere", "OneOf", transforms=[TO_TENSOR]), "which chooses among the transforms"),
    ],
)
def test_what_cannot_work_is_refused_with_advice(steps: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        compile_pipeline(steps, 0)


def test_a_transform_that_draws_globally_is_refused_in_threads(image_folder: Callable[..., Path]) -> None:
    folder, elastic = image_folder(4), of_torchvision("ElasticTransform")
    rotation = of_torchvision("RandomRotation", degrees=[0, 9], expand=True)
    for step, advice in ((elastic, "give workers=n"), (rotation, "give RandomRotation arguments that pen")):
        with pytest.raises(ConfigError, match=f"{type(step).__name__}.* global random generators.*{advice}"):
            Loader(folder, batch_size=2, epochs=1, transforms=[step, TO_TENSOR])


class Shifted:
    """Draws as torchvision's transforms do, and as Python's and NumPy's code does."""

    __module__ = "torchvision.transforms.mine"

    def __call__(self, image: PIL.Image.Image) -> Any:
        draws = [torch.rand(1).item(), random.random(), np.random.rand()]  # noqa: NPY002
        return PIL.Image.fromarray(np.full((4, 4, 3), [255 * draw for draw in draws], np.uint8))


def test_global_draws_are_the_samples_own_and_leave_the_trainings_alone(
    image_folder: Callable[..., Path],
) -> None:
    folder, seen = image_folder(12), []
    for batch_size in (3, 4):
        torch.manual_seed(5)
        random.seed(5)
        untouched = torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        torch.manual_seed(5)
        random.seed(5)
        with Loader(
            folder,
            batch_size=batch_size,
            epochs=2,
            transforms=[Shifted(), TO_TENSOR],
            shuffle=False,
            decoders=0,
            report=None,
        ) as loader:
            seen.append(np.concatenate([batch[0].copy() for _ in range(2) for batch in loader]))
        assert (torch.rand(1), random.random()) == untouched[:2]
    one, other = seen
    assert np.array_equal(one, other)
    assert len(np.unique(one[:, 0, 0, 0])) > 20, "samples and epochs differ"


def test_a_transform_that_returns_nothing_is_named_with_its_sample(image_folder: Callable[..., Path]) -> None:
    def forgets(picture: NDArray[np.uint8]) -> None:
        picture[:] = 0

    steps = [ours.Resize((8, 8)), forgets, ours.ToTensor()]
    with pytest.raises(ConfigError, match=r"transform 1 \(.*forgets\) returned None: return what") as caught:
        Loader(image_folder(4), batch_size=2, epochs=1, transforms=steps, report=None)
    assert any("while loading sample" in note for note in caught.value.__notes__)


def test_a_pipeline_is_the_same_in_another_process() -> None:
    pipeline = compile_pipeline([ours.Resize((8, 9)), ours.ColorJitter(0.4), ours.ToTensor()], 3)
    pipeline.probe(png())

    other = pickle.loads(pickle.dumps(pipeline))

    assert other.output_shape == (3, 8, 9)
    assert np.array_equal(run(other, png()), run(pipeline, png()))


# -- The libraries themselves ------------------------------------------------------------------------------------


@needs_torchvision
@pytest.mark.parametrize("kind", ["v1 of PIL images", "v2 of PIL images", "v2 of tensors"])
def test_a_recipe_without_draws_gives_torchvisions_own_numbers(kind: str) -> None:
    module = v1 if kind.startswith("v1") else v2
    begin, end = [], [v1.ToTensor()]
    if kind.endswith("tensors"):
        begin, end = [v2.ToImage()], [v2.ToDtype(torch.float32, scale=True)]
    steps = [module.Resize(32), module.CenterCrop((28, 30)), module.Pad(2), *end]
    recipe = module.Compose([*begin, *steps, module.Normalize(MEAN, STD)])

    pipeline = compile_pipeline(recipe, 0)

    assert "Penstock's own code" in pipeline.summary()
    assert "Python" not in pipeline.summary()
    expected = recipe(PIL.Image.fromarray(PHOTO))
    # Rows and columns are resampled in another order: a level of 255.
    np.testing.assert_allclose(run(pipeline, png()), expected.numpy(), atol=1.1 / 255 / min(STD))


@needs_torchvision
def test_every_transform_that_has_torchvisions_name_is_replaced() -> None:
    for module in (v1, v2):
        steps = [
            *(module.Resize(32), module.RandomResizedCrop(28), module.CenterCrop(24), module.Pad(2)),
            *(module.RandomHorizontalFlip(), module.RandomVerticalFlip(), module.RandomCrop(20, padding=4)),
            *(module.ColorJitter(0.4, 0.4, 0.4, 0.1), module.RandomGrayscale(), module.RandomRotation(30)),
            *(module.RandAugment(), module.TrivialAugmentWide(), module.Grayscale(3)),
            *(module.RandomApply([module.GaussianBlur(3)]), v1.ToTensor(), module.RandomErasing()),
            module.Normalize(MEAN, STD),
        ]
        assert "Python" not in compile_pipeline(module.Compose(steps), 0).summary()


@needs_torchvision
def test_other_transforms_of_torchvision_are_torchvisions_own() -> None:
    expected = v1.ToTensor()(v1.Grayscale(1)(PIL.Image.fromarray(PHOTO)))
    tensor = torch.from_numpy(PHOTO.transpose(2, 0, 1).copy())

    grey = run(compile_pipeline([v1.Grayscale(1), v1.ToTensor(), v1.Normalize([0.5], [0.5])], 0), png())
    np.testing.assert_allclose(grey, (expected.numpy() - 0.5) / 0.5, atol=1e-6)
    inverted = run(compile_pipeline([v2.ToImage(), v2.RandomInvert(1.0), TO_FLOAT], 0), png())
    np.testing.assert_allclose(inverted, (255 - tensor).numpy() / 255, atol=1e-6)


class Brightened:
    """Called as transforms of albumentations 2.0.8 are, which keep the generators that they are given."""

    __module__ = "albumentations.mine"

    thread = 0

    def set_random_state(self, random_generator: np.random.Generator, py_random: random.Random) -> None:
        self.random_generator, self.py_random = random_generator, py_random
        self.thread = self.thread or threading.get_ident()
        assert self.thread == threading.get_ident(), "another thread's generators are overwritten"

    def __call__(self, *, image: NDArray[np.uint8]) -> dict[str, Any]:
        shift = self.random_generator.integers(99) + self.py_random.randrange(9)
        return {"image": image[:16, :16] // 2 + np.uint8(shift)}


def brightened() -> Any:
    return Brightened()


def of_albumentations() -> Any:
    of = albumentations
    return of.Compose([of.HorizontalFlip(), of.RandomBrightnessContrast(p=1.0), of.RandomCrop(16, 16)])


@pytest.mark.parametrize("make", [brightened, pytest.param(of_albumentations, marks=needs_albumentations)])
def test_albumentations_draws_by_sample_in_any_thread(
    make: Callable[[], Any], image_folder: Callable[..., Path]
) -> None:
    folder, seen = image_folder(24), []
    for decoders in (0, 1, 3):
        options: dict[str, Any] = {"batch_size": 8, "epochs": 2, "decoders": decoders, "report": None}
        steps = [ours.Resize((20, 20)), make(), ours.ToTensor()]
        with Loader(folder, transforms=steps, **options) as loader:
            seen.append(np.stack([batch[0].copy() for _ in range(2) for batch in loader]))

    assert seen[0].shape == (6, 8, 3, 16, 16)
    assert np.array_equal(seen[0], seen[1])
    assert np.array_equal(seen[0], seen[2])
    assert not np.array_equal(seen[0][0], seen[0][3])


def of_albumentations_with_masks() -> Any:
    of = albumentations
    steps = [of.CropNonEmptyMaskIfExists(32, 40), of.InvertImg(p=1.0), of.D4(p=1.0), of.InvertImg(p=1.0)]
    return of.Compose([*steps, of.RandomCrop(24, 24)])


def of_torchvision_with_masks() -> Any:
    return v2.RandomChoice([v2.RandomRotation((turn, turn), expand=True) for turn in (0, 90, 180, 270)])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(of_albumentations_with_masks, marks=needs_albumentations),
        pytest.param(of_torchvision_with_masks, marks=needs_torchvision),
    ],
)
def test_a_mask_is_moved_as_its_image(make: Callable[[], Any], tmp_path: Path) -> None:
    for number in range(6):
        for name, array in (("images", PHOTO), ("masks", PHOTO[:, :, 1])):
            (tmp_path / name).mkdir(exist_ok=True)
            PIL.Image.fromarray(array).save(tmp_path / name / f"{number}.png")
    source = ImagesAndMasks(tmp_path / "images", tmp_path / "masks")
    steps = [ours.RandomHorizontalFlip(), make(), ours.CenterCrop(24)]
    options: dict[str, Any] = {"batch_size": 6, "epochs": 1, "dtype": "uint8", "decoders": 0, "report": None}
    with Loader(source, transforms=steps, **options) as loader:
        batch = next(iter(loader))

    assert np.array_equal(batch["images"][:, 1], batch["masks"])
    assert len({mask.tobytes() for mask in batch["masks"]}) > 2


@needs_albumentations
def test_albumentations_gives_its_own_pixels() -> None:
    flip = albumentations.Compose([albumentations.HorizontalFlip(p=1.0), albumentations.Normalize(MEAN, STD)])

    found = run(compile_pipeline([flip], 0), png())

    np.testing.assert_allclose(found, ((PHOTO[:, ::-1] / 255 - MEAN) / STD).transpose(2, 0, 1), atol=1e-5)

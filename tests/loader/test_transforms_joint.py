"""One crop and flip for image, mask, boxes and key points, against Pillow and against pixels that know their place."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.for_each import for_each

from penstock import Loader
from penstock.errors import ConfigError, DataError
from penstock.loader import mix
from penstock.loader.transforms import (
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Joint,
    Normalize,
    Pad,
    RandAugment,
    RandomApply,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    ToTensor,
)
from penstock.store import ImagesAndMasks, read_group

HEIGHT, WIDTH = 120, 160
ROWS, COLUMNS = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.uint8)
#: Red tells the row, green the column.
PLACES: NDArray[np.uint8] = np.stack([ROWS, COLUMNS, ROWS], axis=2)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def far(one: Any, other: Any) -> int:
    return int(np.abs(np.asarray(one, np.int64) - np.asarray(other, np.int64)).max())


MOVES: list[list[Any]] = [
    [RandomResizedCrop((40, 56), scale=(0.2, 0.7)), RandomHorizontalFlip(), RandomVerticalFlip()],
    [RandomHorizontalFlip(), RandomCrop((64, 64), padding=(3, 5), pad_if_needed=True), RandomVerticalFlip()],
    [Resize((60, 80)), RandomHorizontalFlip(), Pad(4), RandomCrop(48), ColorJitter(0.0)],
    [CenterCrop((130, 100)), Resize(50), Resize((44, 90))],
]


@for_each("steps", MOVES)
def test_each_pixel_of_a_mask_is_that_of_its_image(steps: list[Any]) -> None:
    joint = Joint(steps, dtype="uint8", layout="NHWC")
    for seed in range(8):
        for channel, mask in ((0, ROWS), (1, COLUMNS)):
            made = joint(rng(seed), image=PLACES, mask=mask)
            image, moved = made["image"][:, :, channel].astype(int), made["mask"].astype(int)
            assert image.shape == moved.shape
            assert moved.dtype.kind == "i"
            # A picture is blended where it shrinks, and at the edge of what was put around it.
            apart = np.abs(image - moved)
            assert np.quantile(apart, 0.85) <= 2, (seed, channel)


@for_each(
    "steps",
    [
        *MOVES,
        [RandomRotation(30), CenterCrop(50)],
        [RandomResizedCrop(40), ColorJitter(0.5), RandomErasing(1.0)],
    ],
)
def test_a_second_image_and_stacked_masks_get_the_same_crop_and_flip(steps: list[Any]) -> None:
    joint = Joint(steps, dtype="uint8", layout="NHWC", mask_fill=3)
    stacked = np.stack([ROWS, COLUMNS, ROWS, COLUMNS, ROWS], axis=2)
    for seed in range(4):
        made = joint(
            rng(seed),
            image=PLACES,
            mask=ROWS,
            images={"after": PLACES},
            masks={"columns": COLUMNS, "all": stacked},
        )
        alone = joint(rng(seed), image=PLACES, mask=ROWS)

        assert list(made) == ["image", "after", "mask", "columns", "all"]
        assert np.array_equal(made["after"], made["image"])
        assert np.array_equal(
            made["all"], np.stack([made["mask"], made["columns"]] * 2 + [made["mask"]], axis=2)
        )
        assert all(np.array_equal(made[name], part) for name, part in alone.items())
    other = joint(rng(0), image=PLACES, images={"after": 255 - PLACES})
    assert not np.array_equal(other["after"], other["image"])


def test_a_mask_is_resized_to_pillows_nearest_pixels() -> None:
    mask = rng().integers(0, 200, (HEIGHT, WIDTH), np.uint8)
    image = PIL.Image.fromarray(mask)
    # No centre of a pixel lies on the edge of one of the mask's.
    resize, crop, flip = Resize((64, 64)), CenterCrop((40, 30)), RandomHorizontalFlip(1.0)

    made = Joint([resize, crop, flip])(rng(), image=PLACES, mask=mask)["mask"]

    expected = np.asarray(image.resize((64, 64), PIL.Image.Resampling.NEAREST))[12:52, 17:47][:, ::-1]
    assert np.array_equal(made, expected)


@given(st.integers(0, 999), st.integers(0, 80), st.integers(0, 100), st.integers(8, 40), st.integers(8, 60))
@settings(max_examples=60)
def test_a_box_is_moved_to_where_its_pixels_go(
    seed: int, top: int, left: int, height: int, width: int
) -> None:
    """The box is drawn into the mask; what is left of it there is where it must be."""
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[top : top + height, left : left + width] = 1
    box = [left, top, min(left + width, WIDTH), min(top + height, HEIGHT)]
    for steps in MOVES:
        made = Joint(steps)(rng(seed), image=PLACES, mask=mask, boxes=[box], labels=[7])
        rows, columns = np.nonzero(made["mask"])
        if made["boxes"].size:
            moved = made["boxes"][0]
            assert made["labels"].tolist() == [7]
            if rows.size:
                drawn = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                # Half a pixel of the result, and one of the picture where it is enlarged.
                assert np.abs(moved - drawn).max() <= 2.6
        else:
            assert rows.size == 0 or min(np.ptp(rows), np.ptp(columns)) <= 1


def test_a_rotation_turns_mask_boxes_and_points_about_the_same_centre() -> None:
    mask = np.zeros((HEIGHT, WIDTH), np.int32)
    mask[50:60, 70:90] = 70_000
    joint = Joint([RandomRotation((90, 90), "bilinear")], mask_fill=-1)

    made = joint(rng(), image=PLACES, mask=mask, boxes=[[70, 50, 90, 60]], keypoints=[[[80.0, 55.0, 2.0]]])

    # A quarter counter-clockwise about (80, 60): (x, y) goes to (80 + y - 60, 60 - x + 80).
    rows, columns = np.nonzero(made["mask"] == 70_000)
    assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (70, 50, 80, 70)
    np.testing.assert_allclose(made["boxes"], [[70, 50, 80, 70]], atol=1e-4)
    np.testing.assert_allclose(made["keypoints"], [[[75, 60, 2]]], atol=1e-4)
    assert made["mask"][60, 0] == -1


def test_boxes_outside_are_left_out_with_their_labels_and_points_outside_are_unseen() -> None:
    joint = Joint([CenterCrop((60, 80))], least_side=2)  # rows from 30 on, columns from 40 on

    made = joint(
        rng(),
        image=PIL.Image.fromarray(PLACES),
        boxes=np.array([[0, 0, 41, 160], [30, 20, 50, 50], [50, 40, 200, 50]]),
        labels=["thin", "cut", "long"],
        keypoints=[[[41, 31, 2], [39, 31, 2]]],
    )

    assert made["boxes"].tolist() == [[0, 0, 10, 20], [10, 10, 80, 20]]
    assert made["labels"].tolist() == ["cut", "long"]
    assert made["keypoints"].tolist() == [[[1, 1, 2], [-1, 1, 0]]]
    none = joint(rng(), image=PLACES, boxes=[], labels=[])
    assert none["boxes"].shape == (0, 4)
    assert "mask" not in none


def test_the_same_generator_gives_the_same_parts_also_from_a_copy_in_another_process() -> None:
    joint = Joint([RandomResizedCrop(32), ColorJitter(0.4), ToTensor(), RandomErasing(1.0)])
    one = joint(rng(3), image=PLACES, mask=ROWS)
    again = pickle.loads(pickle.dumps(joint))(rng(3), image=PLACES, mask=ROWS)
    other = joint(rng(4), image=PLACES, mask=ROWS)

    assert one["image"].shape == (3, 32, 32)
    assert np.array_equal(one["image"], again["image"])
    assert np.array_equal(one["mask"], again["mask"])
    assert not np.array_equal(one["mask"], other["mask"])


@for_each(
    ("parts", "text"),
    [
        ({"image": ROWS}, r"image is uint8\[120, 160\]; it is uint8\[height, width, 3\]"),
        ({"image": PIL.Image.fromarray(ROWS)}, "image is a PIL image of mode L"),
        ({"image": PLACES, "mask": ROWS[1:]}, r"mask is uint8\[119, 160\]; .*\[120, 160\]"),
        ({"image": PLACES, "mask": ROWS / 2}, "mask is float64"),
        ({"image": PLACES, "masks": {"a": ROWS[None, None]}}, r"a is uint8\[1, 1, 120, 160\]"),
        ({"image": PLACES, "images": {"after": ROWS}}, r"after is uint8\[120, 160\]; it is uint8"),
        (
            {"image": PLACES, "images": {"after": PLACES[1:]}},
            "after has 160 x 119 pixels, and image 160 x 120",
        ),
        ({"image": PLACES, "boxes": [[1, 2, 3]]}, r"boxes is \[1, 3\]; it is \[n, 4\]"),
        ({"image": PLACES, "boxes": [[1, 2, 3, 4]], "labels": [1, 2]}, "labels has 2 rows for 1 boxes"),
        ({"image": PLACES, "keypoints": [1]}, r"keypoints is \[1\]"),
    ],
)
def test_a_part_of_another_shape_is_named(parts: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        Joint([Resize((8, 8))])(rng(), **parts)


@for_each(
    "parts",
    [
        {"images": {"image": PLACES}},
        {"masks": {"boxes": ROWS}},
        {"images": {"a": PLACES}, "masks": {"a": ROWS}},
    ],
)
def test_a_name_that_another_part_has_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"(image|mask)s has '\w+', which another part is called"):
        Joint([Resize((8, 8))])(rng(), image=PLACES, **parts)


# -- Steps of other libraries, called with image and mask ------------------------------------------------------------


def same(value: Any) -> Any:
    return value


class Cut:
    """Called as transforms of albumentations 2.0.8 are: with image= and mask=, and generators that it is given.

    change: what becomes of the mask besides.
    """

    __module__ = "albumentations.mine"

    def __init__(self, change: Callable[[Any], Any] = same) -> None:
        self.change = change

    def __reduce__(self) -> tuple[Any, ...]:
        return made_again, (type(self).__name__, self.change)

    def set_random_state(self, random_generator: np.random.Generator, py_random: Any) -> None:
        self.rng = random_generator

    def __call__(self, *, image: NDArray[np.uint8], mask: Any = None) -> dict[str, Any]:
        top, left = self.rng.integers(0, 20, 2)
        place = slice(top, top + 60), slice(left, left + 70)
        found = {"image": image[place]}
        return found if mask is None else {**found, "mask": self.change(mask[place])}


def made_again(name: str, change: Callable[[Any], Any]) -> Any:
    return globals()[name](change)


class Inverted(Cut):
    """Photometric: it leaves the mask."""

    __module__ = "albumentations.mine"

    def __call__(self, *, image: NDArray[np.uint8], mask: Any = None) -> dict[str, Any]:
        return {"image": 255 - image, "mask": mask}


@for_each(
    "steps",
    [
        [Cut()],
        [RandomCrop((100, 120)), Cut(), RandomVerticalFlip(), Pad(2), Inverted(), Inverted(), RandomCrop(56)],
        [RandomVerticalFlip(), lambda picture: picture, Cut(), Cut(torch.from_numpy), RandomHorizontalFlip()],
    ],
)
def test_a_step_that_is_called_with_image_and_mask_moves_both_where_it_stands(steps: list[Any]) -> None:
    joint = Joint(steps, dtype="uint8", layout="NHWC")
    seen = set[bytes]()
    for seed in range(6):
        for channel, mask in ((0, ROWS), (1, COLUMNS)):
            made = joint(rng(seed), image=PLACES, mask=mask)
            assert made["mask"].dtype == np.uint8
            assert np.array_equal(made["image"][:, :, channel], made["mask"]), (seed, channel)
            seen.add(made["mask"].tobytes())
        stacked = joint(rng(seed), image=PLACES, mask=np.stack([COLUMNS, ROWS], axis=2))
        assert np.array_equal(stacked["mask"], made["image"][:, :, [1, 0]])
        assert np.array_equal(joint(rng(seed), image=PLACES)["image"], made["image"])
    assert len(seen) > 8, "draws differ from sample to sample"


@for_each(
    ("change", "text"),
    [
        (
            lambda mask: mask[1:],
            r"uint8\[60, 70, 3\] with a mask uint8\[59, 70\]: a mask has the height and width",
        ),
        (lambda mask: mask.astype(np.int64), r"a mask int64\[60, 70\]: .*and stays uint8"),
        (lambda mask: mask[:, :, None], r"a mask uint8\[60, 70, 1\]"),
    ],
)
def test_a_mask_of_another_size_or_type_than_before_is_an_error_with_step_and_sample(
    tmp_path: Path, change: Any, text: str
) -> None:
    steps = [RandomVerticalFlip(), Cut(change), ToTensor()]
    with pytest.raises(ConfigError, match=rf"transform 1 \(Cut\) returned .*{text}"):
        Joint(steps)(rng(), image=PLACES, mask=ROWS)
    images, masks = write_pairs(tmp_path, 2)
    with pytest.raises(ConfigError, match=rf"transform 1 \(Cut\) returned .*{text}") as caught:
        Loader(ImagesAndMasks(images, masks), batch_size=2, epochs=1, transforms=steps, report=None)
    assert any(f"{images}/a/" in note for note in caught.value.__notes__)


def test_joint_refuses_what_a_step_of_another_library_does_not_take() -> None:
    for parts in ({"boxes": [[0, 0, 2, 2]]}, {"masks": {"a": ROWS}}, {"images": {"b": PLACES}}):
        with pytest.raises(
            ConfigError, match=f"image= and mask= alone, and Joint has {next(iter(parts))}: leave"
        ):
            Joint([Cut()])(rng(), image=PLACES, **parts)
    with pytest.raises(ConfigError, match="draws from global random generators, and Joint is given"):
        Joint([Turned()])


class Turned:
    """Called as transforms of torchvision's v2 are, and draws as they do."""

    __module__ = "torchvision.transforms.v2.mine"

    def __call__(self, image: PIL.Image.Image, mask: Any = None) -> Any:
        turns = int(torch.randint(4, (1,)))
        turned = image.rotate(90 * turns)
        if mask is None:
            return turned
        assert type(mask) is torch.Tensor
        return turned, torch.rot90(mask, turns, (-2, -1))


class OfVersion1(Turned):
    __module__ = "torchvision.transforms.mine"


@pytest.mark.parametrize("step", [RandAugment(), RandomApply([RandomCrop(3)]), OfVersion1()])
def test_steps_that_move_pixels_by_rules_of_their_own_are_refused(step: Any) -> None:
    with pytest.raises(ConfigError, match="may move pixels, and what goes with a picture would not move"):
        Joint([step])
    Joint([RandomApply([GaussianBlur(3)]), lambda picture: picture])


# -- Folders of images and masks ---------------------------------------------------------------------------------------


def write_pairs(folder: Path, count: int = 12, **endings: str) -> tuple[Path, Path]:
    images, masks = folder / "images", folder / "masks"
    for number in range(count):
        size = (HEIGHT - 2 * number, WIDTH - number)
        picture = PLACES[: size[0], : size[1]]
        for root, name, array in (
            (images, f"a/{number}{endings.get('image', '')}.png", picture),
            (masks, f"a/{number}{endings.get('mask', '')}.png", picture[:, :, number % 2]),
        ):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(np.ascontiguousarray(array)).save(root / name)
    return images, masks


@pytest.mark.parametrize("who", [{"decoders": 0}, {"decoders": 2}, {"workers": 2}])
def test_images_and_masks_of_two_folders_are_cropped_alike(tmp_path: Path, who: dict[str, int]) -> None:
    images, masks = write_pairs(tmp_path)
    source = ImagesAndMasks(images, masks, mask_dtype="int64")
    steps: list[Any] = [RandomHorizontalFlip(), RandomCrop((64, 80)), RandomVerticalFlip()]
    steps += [same] if "workers" in who else []  # they take Python code alone
    options: dict[str, Any] = {"batch_size": 4, "dtype": "uint8", "report": None, **who}

    with Loader(source, epochs=2, transforms=steps, shuffle=False, **options) as loader:
        for batch in [*loader, *loader]:
            assert batch["masks"].dtype == np.int64
            for number, (image, mask) in enumerate(zip(batch["images"], batch["masks"], strict=True)):
                assert np.array_equal(image[number % 2], mask)
    with Loader(source.select([5, 3]), epochs=1, transforms=steps, shuffle=False, **options) as loader:
        part = next(iter(loader))
    assert np.array_equal(part["images"][:, 1], part["masks"])
    PIL.Image.fromarray(ROWS[:99]).save(masks / "a" / "0.png")
    source = ImagesAndMasks(images, masks)
    with (
        Loader(source, epochs=1, transforms=steps, shuffle=False, **options) as loader,
        pytest.raises(DataError, match=r"/a/0\.png: .*(its mask|/a/0\.png): it has 160 x 99 pixels"),
    ):
        next(iter(loader))


@for_each(
    ("step", "runs"),
    [(Cut(), [{"decoders": 0}, {"decoders": 2}, {"workers": 2}]), (Turned(), [{"decoders": 0}])],
)
def test_a_step_of_another_library_moves_images_and_masks_of_two_folders_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Any, runs: list[dict[str, Any]]
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.tv_tensors", SimpleNamespace(Mask=lambda tensor: tensor))
    images, masks = write_pairs(tmp_path, 8)
    source = ImagesAndMasks(images, masks, mask_dtype="int64").select([6, 1, 4, 3])
    steps = [RandomCrop((80, 80)), step, RandomVerticalFlip(), CenterCrop(50)]
    seen: list[NDArray[Any]] = []
    for run in runs:
        options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "dtype": "uint8", "report": None, **run}
        with Loader(source, transforms=steps, shuffle=False, **options) as loader:
            batches = [
                {name: array.copy() for name, array in batch.items()} for _ in range(2) for batch in loader
            ]
        for batch in batches:
            assert batch["masks"].shape == (4, 50, 50)
            for number, image, mask in zip([6, 1, 4, 3], batch["images"], batch["masks"], strict=True):
                assert np.array_equal(image[number % 2], mask)
        seen.append(np.stack([batch["masks"] for batch in batches]))
    assert not np.array_equal(seen[0][0], seen[0][1])
    assert all(np.array_equal(seen[0], other) for other in seen[1:])


def test_a_mask_of_a_palette_or_of_few_bits_has_the_indices(tmp_path: Path) -> None:
    images, masks = write_pairs(tmp_path, 3)
    classes = ROWS % 2
    palette = PIL.Image.fromarray(classes).convert("P")
    palette.putpalette([0, 0, 0, 255, 128, 64])
    palette.save(masks / "a" / "0.png")
    PIL.Image.fromarray(classes.astype(bool)[: HEIGHT - 2, : WIDTH - 1]).save(masks / "a" / "1.png")
    PIL.Image.fromarray((classes.astype(np.uint16) * 1000)[: HEIGHT - 4, : WIDTH - 2]).save(
        masks / "a" / "2.png"
    )
    source = ImagesAndMasks(images, masks, mask_dtype="int32", mask_fill=255)
    with Loader(source, batch_size=3, epochs=1, transforms=[CenterCrop((130, 9))], report=None) as loader:
        batch = next(iter(loader))
    found = sorted(tuple(np.unique(mask)) for mask in batch["masks"])

    assert found == [(0, 1, 255), (0, 1, 255), (0, 255, 1000)]


@for_each(
    ("mask", "text"),
    [
        (PLACES, "mode RGB, and a mask has one number for each pixel"),
        (ROWS[:9], "it has 160 x 9 pixels, and its picture has 160 x 120"),
        (ROWS.astype(np.uint16) * 99, 'class 11,781, which uint8 cannot hold: give mask_dtype="int32"'),
        (None, "Pillow cannot decode it"),
    ],
)
def test_a_mask_that_does_not_fit_is_named_with_its_image(tmp_path: Path, mask: Any, text: str) -> None:
    images, masks = write_pairs(tmp_path, 2)
    path = masks / "a" / "0.png"
    path.write_bytes(b"nothing") if mask is None else PIL.Image.fromarray(mask).save(path)
    steps = [Resize((8, 8)), ToTensor(), Normalize((0.5,) * 3, (0.5,) * 3)]
    with (
        Loader(
            ImagesAndMasks(images, masks), batch_size=2, epochs=1, transforms=steps, report=None
        ) as loader,
        pytest.raises(DataError, match=text) as caught,
    ):
        next(iter(loader))
    assert f"{images}/a/0.png: {path}: " in str(caught.value)


def test_images_and_masks_find_each_other_by_name(tmp_path: Path) -> None:
    images, masks = write_pairs(tmp_path, 4, image="_left", mask="_ids")
    with pytest.raises(
        DataError, match=r"0_left.png has no mask 'a/0_left' .*0 of 4 images have one.*image_suf"
    ):
        ImagesAndMasks(images, masks)
    (masks / "a" / "2_ids.png").unlink()
    with pytest.raises(DataError, match=r"2_left.png has no mask 'a/2' .*3 of 4.*unpaired=\"skip\""):
        ImagesAndMasks(images, masks, image_suffix="_left", mask_suffix="_ids")

    source = ImagesAndMasks(images, masks, image_suffix="_left", mask_suffix="_ids", unpaired="skip")

    assert [Path(source.describe(number)).name for number in range(3)] == [f"{n}_left.png" for n in (0, 1, 3)]
    assert source.describe_mask(2).endswith("a/3_ids.png")
    assert source.read(2) == (images / "a/3_left.png").read_bytes() + (masks / "a/3_ids.png").read_bytes()
    (masks / "a" / "3_ids.jpg").write_bytes(b"again")
    with pytest.raises(DataError, match="are masks of one image"):
        ImagesAndMasks(images, masks, image_suffix="_left", mask_suffix="_ids")
    with pytest.raises(ConfigError, match="mask_fill is 300, which uint8 cannot hold"):
        ImagesAndMasks(images, masks, mask_fill=300)


def test_pairs_are_read_by_the_group_and_a_missing_mask_fails_its_own_sample_alone(tmp_path: Path) -> None:
    images, masks = write_pairs(tmp_path, 5)
    source = ImagesAndMasks(images, masks)
    (masks / "a" / "3.png").unlink()
    ids = np.array([4, 3, 0, 4])
    begins = np.concatenate([[0], np.cumsum(source.sizes_bytes[ids])])
    into = np.empty(begins[-1], np.uint8)

    failed = read_group(source, ids, into, begins)

    assert [index for index, _ in failed] == [1]
    for index in (0, 2, 3):
        assert into[begins[index] : begins[index + 1]].tobytes() == source.read(int(ids[index]))


def test_a_mixture_of_pairs_has_the_masks_of_all_and_one_with_images_alone_is_refused(tmp_path: Path) -> None:
    sources = [ImagesAndMasks(*write_pairs(tmp_path / name, 4)) for name in ("one", "two")]
    options: dict[str, Any] = {"batch_size": 4, "epochs": 1, "dtype": "uint8", "report": None}
    mixture = mix([sources[0].select([1, 3]), sources[1]], [1, 1], at_end="stop")

    with Loader(mixture, transforms=[RandomCrop((64, 80))], shuffle=False, **options) as loader:
        batch = next(iter(loader))

    rows, columns = batch["images"][:, 0], batch["images"][:, 1]
    assert all(
        np.array_equal(mask, row) or np.array_equal(mask, column)
        for mask, row, column in zip(batch["masks"], rows, columns, strict=True)
    )
    other = ImagesAndMasks(tmp_path / "one" / "images", tmp_path / "one" / "masks", mask_fill=9)
    mixture = mix([sources[0], other], [1, 1], at_end="stop")
    with pytest.raises(ConfigError, match="some sources of the mixture have masks of another mask_dtype"):
        Loader(mixture, transforms=[RandomCrop((64, 80))], **options)

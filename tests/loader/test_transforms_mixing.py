"""MixUp and CutMix of a loader's batches, against the batches that are not mixed, as torchvision mixes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import penstock.torch
from penstock import Loader
from penstock.errors import ConfigError
from penstock.loader.transforms import CutMix, MixUp, RandomResizedCrop, Resize, ToTensor

STEPS = [RandomResizedCrop((16, 24)), ToTensor()]


def batches(folder: Path, **options: Any) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    settings: dict[str, Any] = {"batch_size": 5, "epochs": 2, "transforms": STEPS, "report": None}
    with Loader(folder, **{**settings, **options}) as loader:
        epochs = loader.plan.epochs - loader.position[0]
        return [(batch[0].copy(), batch[1].copy()) for _ in range(epochs) for batch in loader]


def share_of(labels: NDArray[Any], plain: NDArray[np.int64]) -> float:
    """Return the share of an image's own label, from one whose neighbour has another."""
    place = next(place for place in range(len(plain)) if plain[place] != plain[place - 1])
    return float(labels[place, plain[place]])


def mixed_labels(share: float, plain: NDArray[np.int64]) -> torch.Tensor:
    """As `_mixup_label` of torchvision 0.28."""
    label = torch.nn.functional.one_hot(torch.from_numpy(plain), 2).float()
    return label.roll(1, 0).mul_(1.0 - share).add_(label.mul(share))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_images_and_labels_are_mixed_as_torchvision_does(
    image_folder: Callable[..., Path], dtype: str
) -> None:
    folder = image_folder(24)
    options: dict[str, Any] = {
        "batch_size": 5,
        "epochs": 1,
        "transforms": STEPS,
        "report": None,
        "dtype": dtype,
    }
    shares = []
    with (
        penstock.torch.Loader(folder, **options) as plain_loader,
        penstock.torch.Loader(folder, mix_images=MixUp(num_classes=2, alpha=0.8), **options) as loader,
    ):
        for (images, labels), (mixed, soft) in zip(plain_loader, loader, strict=True):
            if len(set(labels.tolist())) < 2:
                continue  # of one label alone, which says no share
            shares.append(share := share_of(soft.numpy(), labels.numpy()))
            expected = images.float().roll(1, 0).mul_(1.0 - share).add_(images.float().mul(share))
            assert mixed.dtype == images.dtype
            torch.testing.assert_close(mixed.float(), expected, atol=0.005, rtol=0.01)
            torch.testing.assert_close(soft, mixed_labels(share, labels.numpy()))

    assert len({round(share, 3) for share in shares}) == len(shares) >= 2


@pytest.mark.parametrize(("layout", "dtype"), [("NCHW", "float32"), ("NHWC", "uint8")])
def test_an_area_comes_from_the_image_before_and_labels_have_its_share(
    image_folder: Callable[..., Path], layout: str, dtype: str
) -> None:
    folder = image_folder(40)
    steps = STEPS if dtype == "float32" else STEPS[:1]
    options: dict[str, Any] = {"batch_size": 8, "dtype": dtype, "layout": layout, "transforms": steps}
    shares = []
    for (plain, labels), (mixed, soft) in zip(
        batches(folder, **options), batches(folder, mix_images=CutMix(2), **options), strict=True
    ):
        axes = (0, 2, 3, 1) if layout == "NCHW" else (0, 1, 2, 3)
        images, found, other = (each.transpose(axes) for each in (plain, mixed, np.roll(plain, 1, 0)))
        is_other = (found != images).any(axis=(0, 3))
        assert np.array_equal(found, np.where(is_other[None, :, :, None], other, images))
        rows, columns = np.nonzero(is_other)
        area = (np.ptp(rows) + 1) * (np.ptp(columns) + 1) if rows.size else 0
        assert area == rows.size, "it is a rectangle"
        np.testing.assert_allclose(
            soft, mixed_labels(1 - area / (16 * 24), labels).numpy(), atol=0.005 if area else 1e-6
        )
        shares.append(area)
    assert len(set(shares)) > 5


def test_draws_are_the_steps_own_at_any_rank_count_and_after_a_resume(
    image_folder: Callable[..., Path],
) -> None:
    folder = image_folder(32)
    options: dict[str, Any] = {"batch_size": 8, "mix_images": [MixUp(2), CutMix(2)], "seed": 4}
    alone = batches(folder, decoders=3, **options)

    for other in (batches(folder, decoders=0, **options), batches(folder, readers=1, **options)):
        assert all(
            np.array_equal(one, two)
            for a, b in zip(alone, other, strict=True)
            for one, two in zip(a, b, strict=True)
        )
    with Loader(folder, epochs=2, transforms=STEPS, report=None, **options) as loader:
        for _, _batch in zip(range(2), loader, strict=False):
            pass
        state = loader.state_dict()
    resumed = batches(folder, state=state, **options)
    assert np.array_equal(resumed[0][0], alone[2][0])
    assert np.array_equal(resumed[-1][1], alone[-1][1])
    # Each rank mixes its own part, all by the same share.
    plain = batches(folder, batch_size=8, seed=4)
    part = batches(folder, rank=1, world_size=2, ranks=penstock.ranks.alone, **options)
    for (_, labels), (_, soft), (_, of_all) in zip(plain, part, alone, strict=True):
        own = labels[4:]
        if len(set(own.tolist())) > 1:
            assert share_of(soft, own) == pytest.approx(share_of(of_all, labels))


def test_a_sample_that_is_skipped_is_mixed_with_none(image_folder: Callable[..., Path]) -> None:
    folder = image_folder(10)
    broken = sorted(folder.rglob("*.jpg"))[2]
    broken.write_bytes(broken.read_bytes()[:50] + bytes(100))
    options: dict[str, Any] = {"on_error": "skip", "shuffle": False, "batch_size": 10, "epochs": 1}

    (plain, labels), (mixed, soft) = batches(folder, **options) + batches(
        folder, mix_images=MixUp(2), **options
    )

    share = share_of(soft, labels)
    assert len(mixed) == 9
    np.testing.assert_allclose(mixed, share * plain + (1 - share) * np.roll(plain, 1, 0), atol=1e-5)
    np.testing.assert_allclose(soft.sum(axis=1), 1, atol=1e-6)


def test_p_is_the_share_of_steps_that_are_mixed(image_folder: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"batch_size": 2, "epochs": 10}
    found = batches(image_folder(12), mix_images=MixUp(2, p=0.5), **options)

    is_hard = [bool(((labels == 0) | (labels == 1)).all() and len(labels) == 2) for _, labels in found]
    assert 25 < sum(is_hard) < 59  # those of one label twice look the same


def of_torchvision(name: str, **attributes: Any) -> Any:
    made = type(name, (), {"__module__": "torchvision.transforms.v2._augment"})()
    vars(made).update(attributes)
    return made


@pytest.mark.parametrize(
    ("mix", "options", "text"),
    [
        (3, {}, r"mix_images is 3; it is MixUp\(num_classes\) or CutMix"),
        ([], {}, "mix_images is .*list of some"),
        ([MixUp(2), CutMix(3)], {}, "a list of some for the same num_classes"),
        (of_torchvision("MixUp", alpha=1.0, num_classes=None), {}, r"MixUp\(num_classes=None\)"),
        (
            MixUp(2),
            {"dtype": "uint8", "transforms": [Resize((8, 8))]},
            'dtype is "uint8", which holds no mix',
        ),
        (
            MixUp(2),
            {"source": [torch.zeros(2)], "transforms": ()},
            "mix_images is given with a data set.*collate_fn",
        ),
        (MixUp(1), {}, "num_classes=1, and a sample has the label 1"),
    ],
)
def test_what_cannot_be_mixed_is_refused(
    image_folder: Callable[..., Path], mix: Any, options: dict[str, Any], text: str
) -> None:
    source = options.pop("source", None) or image_folder(4)
    with pytest.raises(ConfigError, match=text):
        batches(source, mix_images=mix, **options)


@pytest.mark.parametrize("make", [lambda: MixUp(0), lambda: CutMix(2, alpha=0), lambda: MixUp(2, p=2)])
def test_arguments_that_cannot_work_are_named(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"(MixUp|CutMix)\((num_classes|alpha|p)="):
        make()


def test_torchvisions_objects_are_taken(image_folder: Callable[..., Path]) -> None:
    both = [of_torchvision(name, alpha=0.5, num_classes=2) for name in ("MixUp", "CutMix")]
    choice = of_torchvision("RandomChoice", transforms=both)

    folder = image_folder(8)
    ours, theirs = (batches(folder, mix_images=mix) for mix in ([MixUp(2, 0.5), CutMix(2, 0.5)], choice))

    assert all(np.array_equal(one[0], other[0]) for one, other in zip(ours, theirs, strict=True))

"""A loader as a data set of TensorFlow."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.bench.loaders import Setting, Work, loader_named
from penstock.errors import ConfigError
from penstock.loader.transforms import Resize, ToTensor
from penstock.store import FlatFolder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tensorflow as tf

from penstock.tensorflow import as_dataset

Pair = namedtuple("Pair", "first second")


class Numbers:
    def __len__(self) -> int:
        return 22

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {
            "x": np.full((4, 4), k, np.float32),
            "parts": [k, 2.0 * k],
            "pair": Pair(k, -k),
            "name": f"{k}",
        }


def test_each_pass_is_an_epoch_of_the_loader() -> None:
    with penstock.Loader(Numbers(), batch_size=4, epochs=3, seed=5, report=None) as loader:
        order = [loader.plan.order.at(epoch, np.arange(22)).tolist() for epoch in range(3)]
        dataset = as_dataset(loader)

        assert len(dataset) == 6
        for epoch in range(2):
            batches = list(dataset)
            assert [k for batch in batches for k in batch["x"][:, 3, 3].numpy()] == order[epoch]
            assert [k for batch in batches for k in batch["parts"][1].numpy()] == [
                2 * k for k in order[epoch]
            ]
            assert [k for batch in batches for k in batch["pair"].second.numpy()] == [
                -k for k in order[epoch]
            ]
            assert [int(k) for batch in batches for k in batch["name"].numpy()] == order[epoch]
        for first in dataset.take(1):  # the rest of its epoch is left
            assert first["x"][:, 0, 0].numpy().tolist() == order[2][:4]
        assert loader.position == (3, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pictures_and_labels_are_those_of_the_loader(image_folder: Callable[..., Path], dtype: str) -> None:
    steps = (Resize((8, 8)), ToTensor())
    options: dict[str, Any] = {
        "batch_size": 5,
        "epochs": 1,
        "transforms": steps,
        "dtype": dtype,
        "report": None,
    }
    with (
        penstock.Loader(image_folder(), **options) as expected,
        penstock.Loader(image_folder(), **options) as loader,
    ):
        dataset = as_dataset(loader)
        assert dataset.element_spec[0] == tf.TensorSpec([None, 3, 8, 8], dtype)
        for (images, labels), (found, found_labels) in zip(expected, dataset, strict=True):
            assert found.numpy().tobytes() == images.tobytes()
            assert found_labels.numpy().tolist() == labels.tolist()


def test_batches_that_are_kept_never_change() -> None:
    """TensorFlow may lay its tensors over the loader's memory."""
    with penstock.Loader(Numbers(), batch_size=2, epochs=4, memory="32 KiB", report=None) as loader:
        dataset = as_dataset(loader)
        for epoch in range(4):
            order = loader.plan.order.at(epoch, np.arange(22))
            kept = [batch["x"] for batch in dataset]
            assert np.array_equal(tf.concat(kept, 0)[:, 0, 0].numpy(), order)


def test_a_loader_of_another_framework_is_refused() -> None:
    import penstock.torch as pt

    message = "a Tensor, and TensorFlow takes NumPy arrays: make it with penstock"
    with (
        pt.Loader(Numbers(), batch_size=4, epochs=1, report=None) as loader,
        pytest.raises(ConfigError, match=message),
    ):
        as_dataset(loader)


def test_the_pipeline_of_penstock_bench_counts_what_it_skips(tmp_path: Path) -> None:
    import cv2

    for number in range(4):
        assert cv2.imwrite(str(tmp_path / f"{number}.png"), np.full((9, 9, 3), number, np.uint8))
    (tmp_path / "2.png").write_bytes(b"no picture")
    source = FlatFolder(tmp_path)

    for work, skipped in ((Work.READ, 0), (Work.DECODE, 1)):
        with loader_named("tensorflow")(Setting(source, work, 2, 2, "skip")) as passes:
            assert passes([2, 0, 3])[::2] == (3 - skipped, skipped)
    with (
        loader_named("tensorflow")(Setting(source, Work.DECODE, 1, 2, "raise")) as passes,
        pytest.raises(tf.errors.InvalidArgumentError),
    ):
        passes([2, 1])

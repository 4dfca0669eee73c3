"""Data sets whose samples depend on threads or on other samples are reported, with what to do."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.loader.made import Made

from penstock.errors import DataError
from penstock.loader import Loader
from penstock.loader.global_draws import global_states
from penstock.loader.transforms import ToTensor
from penstock.torch import DataLoader


def make(sample: Callable[[int], Any], **arguments: Any) -> Loader:
    chosen = {"batch_size": 8, "epochs": 1, "shuffle": False, "report": None, **arguments}
    return Loader(Made(sample, 40), **chosen)


def load(sample: Callable[[int], Any], **arguments: Any) -> list[Any]:
    with make(sample, **arguments) as loader:
        return list(loader)


@pytest.mark.parametrize(
    ("draw", "library"),
    [
        (lambda index: index + random.random(), "random"),
        (lambda index: index + np.random.random(), "NumPy"),  # noqa: NPY002 - as users do
        (lambda index: index + float(torch.rand(())), "PyTorch"),
    ],
)
def test_draws_from_a_global_generator_are_warned_about_where_threads_share_it(
    draw: Any, library: str
) -> None:
    def collate(samples: list[Any]) -> list[Any]:
        return [draw(sample) for sample in samples]

    of_sample = (
        f"Made.__getitem__ draws from the global random generator of {library}.*__getitem__ a parameter rng"
    )
    of_batch = f"collate_fn, .* draws from the global random generator of {library}.*Loader a parameter rng"
    before = global_states()
    for arguments in ({}, {"collate_fn": list}):
        with pytest.warns(RuntimeWarning, match=of_sample), make(draw, **arguments):
            assert global_states() == before, "looking at a sample drew nothing"
    with pytest.warns(RuntimeWarning, match=of_batch) as caught:
        load(int, collate_fn=collate, decoders=3)
    assert len(caught) == 1
    plain: Any = Made(int, 40)
    drawing: Any = Made(draw, 40)
    with pytest.warns(RuntimeWarning, match=of_batch):
        list(DataLoader(plain, 8, num_workers=2, workers="threads", collate_fn=collate))
    with pytest.warns(RuntimeWarning, match=of_sample):
        list(DataLoader(drawing, 8, num_workers=2, workers="threads"))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(draw, decoders=0)  # one thread draws in the order of the plan
        load(int, collate_fn=collate, decoders=0)
        load(lambda index: np.random.default_rng(index).random(), collate_fn=list)


def test_a_callable_among_transforms_that_draws_from_one_is_warned_about(tmp_path: Path) -> None:
    for number in range(2):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / f"{number}.png")

    def noisy(picture: Any) -> Any:
        return picture + np.uint8(np.random.random() * 2)  # noqa: NPY002 - as users do

    def run(*steps: Any, **arguments: Any) -> None:
        arguments = {"batch_size": 2, "epochs": 1, "report": None, **arguments}
        with Loader(tmp_path, transforms=[*steps, ToTensor()], **arguments) as loader:
            list(loader)

    with pytest.warns(RuntimeWarning, match=r"transforms draw from the global .* of NumPy, .* the callable"):
        run(noisy)
    before = global_states()
    with (
        pytest.warns(RuntimeWarning, match="transforms draw from the global"),
        Loader(tmp_path, transforms=[noisy, ToTensor()], batch_size=2, epochs=1, report=None),
    ):
        after = global_states()
    assert before == after, "trying it out drew nothing"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(noisy, decoders=0)
        run(lambda picture, rng: picture + rng.integers(2, dtype=np.uint8))


@pytest.mark.parametrize("arguments", [{}, {"collate_fn": list}, {"on_error": "skip"}])
def test_a_buffer_that_is_filled_again_is_an_error_and_no_batch_of_equal_rows(arguments: Any) -> None:
    buffer = np.zeros(4)

    def sample(index: int) -> Any:
        buffer[:] = index
        return {"x": buffer}

    with pytest.raises(DataError, match=r"Made\[\d+\] changed after it was returned.*buffer\.copy"):
        load(sample, decoders=1, **arguments)

    batches = load(lambda index: {"x": sample(index)["x"].copy()}, decoders=1)
    assert np.concatenate([batch["x"][:, 0] for batch in batches]).tolist() == list(range(40))


def test_a_sample_that_is_none_is_named_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r'Made\[3\] is None: return a sample.*on_error="skip"'):
        load(lambda index: None if index == 3 else index)

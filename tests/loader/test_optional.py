"""Optional fields get their defaults, and fields that are not alike are named."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.for_each import for_each
from tests.loader.made import Made

from penstock import Loader, LoaderConfig
from penstock.errors import ConfigError, DataError
from penstock.loader.optional import Defaults
from penstock.loader.transforms import ToTensor
from penstock.torch import Loader as TorchLoader

COUNT = 20
Pair = namedtuple("Pair", "image caption")


@dataclass(frozen=True)
class Photo:
    image: Any
    caption: Any = None
    boxes: Any = None


def batches(make: Callable[[int], Any], kind: Any = Loader, **arguments: Any) -> list[Any]:
    settings = {"batch_size": 8, "epochs": 1, "shuffle": False, "memory": "1 MB", "report": None, **arguments}
    with kind(Made(make, COUNT), **settings) as loader:
        return list(loader)


@for_each("first", ["has it", "lacks it"])
@for_each("decoders", [0, 2])
def test_a_field_that_some_samples_lack_has_its_default_there(first: str, decoders: int) -> None:
    def has(index: int) -> bool:
        return index % 2 == (first == "lacks it")

    def make(index: int) -> Any:
        row = {"id": index, "boxes": np.full((2, 4), index, np.float32) if has(index) else None}
        return {**row, "caption": f"photo {index}"} if has(index) else row

    found = batches(
        make, optional={"caption": "", "boxes": np.full((2, 4), -1, np.float32)}, decoders=decoders
    )

    ids = [index for batch in found for index in batch["id"].tolist()]
    assert ids == list(range(COUNT))
    assert [text for batch in found for text in batch["caption"]] == [
        f"photo {index}" if has(index) else "" for index in ids
    ]
    boxes = np.concatenate([batch["boxes"] for batch in found])
    assert (boxes == np.where([[[has(index)]] for index in ids], np.reshape(ids, (-1, 1, 1)), -1)).all()


def test_a_batch_of_dataclasses_is_the_dataclass_with_arrays_and_lists() -> None:
    def make(index: int) -> Photo:
        return Photo(np.full(3, index), None if index % 3 else f"photo {index}", (index, index / 2))

    first, *_ = batches(make, optional={"caption": "none"})

    assert isinstance(first, Photo)
    assert (first.image == np.arange(8)[:, None]).all()
    assert first.image.shape == (8, 3)
    assert first.caption == [f"photo {k}" if k % 3 == 0 else "none" for k in range(8)]
    assert first.boxes[0].tolist() == list(range(8))
    assert first.boxes[1].tolist() == [k / 2 for k in range(8)]


def test_a_batch_of_dataclasses_has_tensors_for_users_of_pytorch() -> None:
    first, *_ = batches(lambda index: {"photo": Photo(torch.full((3,), index), "", index)}, TorchLoader)

    assert isinstance(first["photo"], Photo)
    assert torch.equal(first["photo"].image, torch.arange(8)[:, None].expand(8, 3))
    assert torch.equal(first["photo"].boxes, torch.arange(8))


def test_arrays_of_texts_and_objects_come_in_lists() -> None:
    names = np.array(["a", "b"])
    first, *_ = batches(lambda index: (index, names, np.array([None, {}])), TorchLoader)

    assert all(each is names for each in first[1])
    assert len(first[2]) == 8


@for_each(
    ("sample", "name", "filled"),
    [
        ({"a": 1}, "b", {"a": 1, "b": 0}),
        ({"a": 1, "b": None}, "b", {"a": 1, "b": 0}),
        ({"a": 1, "b": 2}, "b", {"a": 1, "b": 2}),
        ({"a": {"x": 1}}, "a.b", {"a": {"x": 1, "b": 0}}),
        ({"seg": {"png": 1}, "seg.png": None}, "seg.png", {"seg": {"png": 1}, "seg.png": 0}),
        ({"a": 1}, "seg.png", {"a": 1, "seg.png": 0}),
        ({3: None}, 3, {3: 0}),
        ((1, None), 1, (1, 0)),
        ([1, None], "1", [1, 0]),
        ((1, {"x": (None, 2)}), "1.x.0", (1, {"x": (0, 2)})),
        (Pair(1, None), "caption", Pair(1, 0)),
        (Photo(1), "caption", Photo(1, 0)),
        ((Photo(1, boxes=(1, None)),), "0.boxes.1", (Photo(1, boxes=(1, 0)),)),
    ],
)
def test_names_of_fields_are_keys_names_numbers_and_paths(sample: Any, name: Any, filled: Any) -> None:
    before = repr(sample)

    assert Defaults({name: 0}).fill(sample) == filled
    assert repr(sample) == before, "the sample itself is not changed"
    assert type(Defaults({name: 0}).fill(sample)) is type(filled)


@for_each(
    ("sample", "name"),
    [((1, 2), 5), ((1, 2), "caption"), (7, "caption"), (Photo(1), "text"), (Pair(1, 2), -1)],
)
def test_a_name_that_a_sample_cannot_have_is_refused(sample: Any, name: Any) -> None:
    with pytest.raises(ConfigError, match=f"optional names {name!r}"):
        batches(lambda index: sample, optional={name: 0})


def test_a_default_of_a_field_that_the_first_sample_lacks_is_said_at_the_start() -> None:
    lines: list[str] = []

    def make(index: int) -> Any:
        return {"id": index, "target": {"caption": "one", "boxes": None}}

    optional = {"captoin": "", "target.captoin": "", "target.boxes": 0}
    batches(make, optional=optional, report=lines.append)
    batches(make, optional={"target.boxes": 0}, report=lines.append)

    (line,) = (line for line in lines if "optional=" in line)
    assert line.endswith(
        "the first sample, Made[0], does not have 'captoin', 'target.captoin', which optional= gives it; it has "
        "'id', 'target'"
    )


def test_a_default_unlike_the_field_is_refused_before_the_run() -> None:
    def make(index: int) -> Any:
        return {"id": index, "score": np.float32(index)}

    message = (
        r"without its fields\['score'\] is int64\[\], and Made\[0\]\['score'\] is float32\[\].*give defaults"
    )
    with pytest.raises(ConfigError, match=message):
        batches(make, optional={"score": 0})


@for_each(
    ("first", "later", "message"),
    [
        (
            np.ones(2),
            None,
            r"Made\[11\]\['field'\] is NoneType, and Made\[0\]\['field'\] is float64\[2\]: .* optional=",
        ),
        (None, np.ones(2), r"Made\[11\]\['field'\] is float64\[2\], and Made\[0\]\['field'\] is no array"),
        ("text", 5, r"Made\[11\]\['field'\] is int64\[\], and Made\[0\]\['field'\] is no array"),
        (
            Photo(1),
            Pair(1, 2),
            r"Made\[11\]\['field'\] is a Pair of 2 parts, in the first sample it was a Photo",
        ),
        (np.ones(2), np.ones(2, np.int8), r"Made\[11\]\['field'\] is int8\[2\]"),
    ],
)
def test_a_field_unlike_that_of_the_first_sample_is_named(first: Any, later: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        batches(lambda index: {"id": index, "field": later if index == 11 else first})


def test_defaults_are_checked_and_compared() -> None:
    arguments: dict[str, Any] = {"batch_size": 8, "epochs": 1}
    with pytest.raises(ConfigError, match="optional is 'caption'; it maps names"):
        LoaderConfig(Made(int, COUNT), optional="caption", **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="optional has None for 'caption'"):
        LoaderConfig(Made(int, COUNT), optional={"caption": None}, **arguments)
    with pytest.raises(ConfigError, match="optional is for the samples of a data set"):
        LoaderConfig("photos", optional={"caption": ""}, transforms=[ToTensor()], **arguments)
    source = Made(int, COUNT)
    one, other = (LoaderConfig(source, optional={"a": np.zeros(2)}, **arguments) for _ in range(2))
    assert one == one
    assert one != other

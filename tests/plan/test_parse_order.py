"""Orders by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.plan import BundleShuffle, FullShuffle, Scattered, Sequential
from penstock.plan.parse_order import OrderName
from penstock.plan.torch_order import TorchShuffle, TwisterState


@for_each(
    ("name", "order"),
    [
        ("full", FullShuffle(50, 7)),
        ("sequential", Sequential(50)),
        ("bundle", BundleShuffle(50, 7, 0.1)),
        ("bundle:0.02", BundleShuffle(50, 7, 0.02)),
        ("scattered-sequential", Scattered(Sequential(50), 7)),
        ("scattered-bundle", Scattered(BundleShuffle(50, 7, 0.1), 7)),
        ("scattered-bundle:0.02", Scattered(BundleShuffle(50, 7, 0.02), 7)),
    ],
)
def test_an_order_is_named(name: str, order: object) -> None:
    assert OrderName(name).of(50, 7) == order


@for_each(
    "name",
    [
        *(
            "shuffled",
            "full:0.5",
            "sequential:1",
            "bundle:x",
            "bundle:",
            "bundle:0",
            "bundle:1.5",
            "bundle:nan",
            "",
        ),
        *(
            "scattered-full",
            "scattered-torch",
            "torch:1",
            "ids.csv",
            "scattered-",
            "scattered",
            "scattered-scattered-bundle",
            "scattered-bundle:2",
        ),
    ],
)
def test_an_unknown_order_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"order|bundle_ratio"):
        OrderName(name)


def test_torchs_order_is_that_of_a_generator_with_the_seed() -> None:
    named, order = OrderName("torch").of(50, 7), TorchShuffle(50, TwisterState.from_seed(7))

    for epoch in range(3):
        assert named.at(epoch, np.arange(50)).tolist() == order.at(epoch, np.arange(50)).tolist()


def test_a_file_of_ids_is_an_order(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([[2, 0, 1], [0, 1, 2]]))
    (tmp_path / "ids.txt").write_text("2 0 1\n0 1 2\n")

    for name in ("ids.npy", "ids.txt"):
        named = OrderName(str(tmp_path / name))
        assert (named.kind, named.is_scattered, named.bundle_ratio) == ("file", False, None)
        order = named.of(3, seed=0)
        assert [order.at(epoch, range(3)).tolist() for epoch in range(2)] == [[2, 0, 1], [0, 1, 2]]


@for_each(
    ("name", "content", "match"),
    [
        ("a.npy", b"no array", "a.npy: "),
        ("a.npy", b"", "a.npy: "),
        ("a.txt", b"\xff\xfe", "a.txt: .*utf-8"),
        ("a.txt", b"", "a.txt: ids list no epochs"),
        ("a.txt", b"0 1 9\n", r"a.txt: .*9"),
    ],
)
def test_a_file_that_holds_no_ids_of_these_samples_is_named(
    name: str, content: bytes, match: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigError, match=match):
        OrderName(str(tmp_path / name)).of(3, seed=0)


def test_what_is_told_of_an_order_is_what_its_name_says() -> None:
    name = OrderName("scattered-bundle:0.25")

    assert (name.kind, name.bundle_ratio, name.is_scattered) == ("bundle", 0.25, True)

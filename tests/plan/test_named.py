"""Orders by name."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.plan import BundleShuffle, FullShuffle, Scattered, Sequential
from penstock.plan.named import OrderName


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
        *("scattered-full", "scattered-", "scattered", "scattered-scattered-bundle", "scattered-bundle:2"),
    ],
)
def test_an_unknown_order_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"order|bundle_ratio"):
        OrderName(name)


def test_what_is_told_of_an_order_is_what_its_name_says() -> None:
    name = OrderName("scattered-bundle:0.25")

    assert (name.kind, name.bundle_ratio, name.is_scattered) == ("bundle", 0.25, True)

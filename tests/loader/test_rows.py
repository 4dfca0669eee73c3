"""cache="rows": what a data set has made once is read from memory afterwards, and nothing else changes."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.torch import Loader as TorchLoader
from penstock.trace.schema import Kind

COUNT = 60


class Counted:
    """What a function makes of each number, and how often it was asked."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make
        self.calls: Counter[int] = Counter()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        self.calls[index] += 1
        return self.make(index)


def row(index: int) -> dict[str, Any]:
    return {"x": torch.full((500,), index), "name": f"no. {index}", "y": np.arange(index % 3)}


def epochs_of(
    made: Counted, kind: Any = TorchLoader, **arguments: Any
) -> tuple[list[Any], list[Counter[int]], Any]:
    """Return the batches of three epochs, how often each sample was asked for in each, and the last one's metrics."""
    chosen = {"batch_size": 8, "epochs": 3, "report": None, "ragged": ["y"], "cache": "rows", **arguments}
    batches: list[Any] = []
    calls: list[Counter[int]] = []
    with kind(made, **chosen) as loader:
        made.calls.clear()  # of the constructor, which looks at some
        for _ in range(3):
            made.calls.clear()
            batches += map(copy.deepcopy, loader)  # whose slots are free then
            calls.append(made.calls.copy())
        return batches, calls, loader.metrics[-1]


def is_same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(left["x"], right["x"])
        and left["name"] == right["name"]
        and torch.equal(left["y"].values, right["y"].values)
        for left, right in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("decoders", [0, 2])
def test_each_sample_is_made_once_where_memory_holds_them_all(decoders: int) -> None:
    made = Counted(row)
    batches, calls, metrics = epochs_of(made, decoders=decoders)

    wanted, _, _ = epochs_of(Counted(row), decoders=decoders, cache=None)
    assert is_same(batches, wanted)
    assert [sum(each.values()) for each in calls[1:]] == [0, 0]
    hits = sum(stage.samples for name, stage in metrics.stages.items() if name.kind == Kind.HIT)
    assert hits == COUNT


def test_what_memory_does_not_hold_is_made_again_each_epoch_and_the_rest_is_not() -> None:
    made = Counted(row)
    batches, calls, _ = epochs_of(made, decoders=0, memory="300 KB")

    wanted, _, _ = epochs_of(Counted(row), decoders=0, cache=None)
    assert is_same(batches, wanted)
    assert sum(calls[0].values()) == COUNT
    assert calls[1] == calls[2]
    assert 0 < sum(calls[1].values()) < COUNT / 2


def test_samples_that_grow_beyond_what_the_first_ones_took_are_made_again_and_are_right() -> None:
    def make(index: int) -> dict[str, Any]:
        return row(index) | {"x": torch.full((500,), index), "y": np.full(1 if index < 20 else 4000, index)}

    made = Counted(make)
    batches, calls, _ = epochs_of(made, decoders=0, shuffle=False, memory="2 MB")

    wanted, _, _ = epochs_of(Counted(make), decoders=0, shuffle=False, cache=None)
    assert is_same(batches, wanted)
    assert 0 < sum(calls[2].values()) < COUNT


def test_collate_fn_may_change_samples_in_place_and_those_that_fail_are_skipped_each_time() -> None:
    def make(index: int) -> Any:
        if index == 7:
            raise OSError("gone")
        return np.full(3, index)

    def doubled(samples: list[Any]) -> Any:
        for sample in samples:
            sample *= 2
        return np.stack(samples)

    made = Counted(make)
    arguments = {"ragged": (), "collate_fn": doubled, "on_error": "skip", "shuffle": False, "decoders": 0}
    batches, calls, _ = epochs_of(made, Loader, **arguments)

    found = np.concatenate([batch[:, 0] for batch in batches]).tolist()
    assert found == 3 * [2 * index for index in range(COUNT) if index != 7]
    assert calls[1:] == [Counter({7: 1})] * 2


class Drawing(Counted):
    def __getitem__(self, index: int, rng: Any = None) -> Any:
        return rng.random(3)


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (Drawing(row), {}, "__getitem__ of Drawing asks for rng, so that they change"),
        (Counted(lambda index: (index, threading.Lock())), {}, "keeps the samples of Counted pickled.*lock"),
        (Counted(row), {"workers": 1}, "worker processes keep no samples"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_reason(data: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(data, batch_size=4, epochs=2, cache="rows", report=None, **arguments)


def test_samples_that_differ_from_call_to_call_are_warned_about() -> None:
    random = np.random.default_rng(0)
    with pytest.warns(RuntimeWarning, match="gave other values when it was asked for twice"):
        Loader(
            Counted(lambda index: random.random(3)), batch_size=4, epochs=2, cache="rows", report=None
        ).close()

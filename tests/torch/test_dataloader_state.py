"""A pass of the drop-in DataLoader resumes where its state says, as one of torchdata's StatefulDataLoader does; and
what trainers make of it."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.for_each import for_each
from torch.utils.data import DataLoader as PyTorchs
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from penstock.errors import ConfigError
from penstock.torch import DataLoader as OfPenstock

COUNT = 30
DataLoader: Any = partial(OfPenstock, workers="threads")


class Numbers(Dataset[int]):
    """Samples are their numbers; notes which were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


class Counting(Dataset[tuple[int, int, float]]):
    """Counts its samples, and draws from PyTorch's generator, whose state it saves, as in torchdata's README."""

    def __init__(self, *, draws: bool = True) -> None:
        self.count, self.draws = 0, draws

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        self.count += 1
        return index, self.count, float(torch.rand(())) if self.draws else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        torch.set_rng_state(state["rng"])


class OfRandom(Sampler[int]):
    """Draws from Python's and NumPy's generators, all at once."""

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(COUNT), 10) + np.random.permutation(COUNT)[:9].tolist()  # noqa: NPY002


class Stateful(Sampler[int]):
    """Each pass begins with another number, which no generator tells."""

    def __init__(self) -> None:
        self.begin = 0

    def __iter__(self) -> Iterator[int]:
        self.begin += 1
        yield from range(self.begin, COUNT)

    def state_dict(self) -> dict[str, int]:
        return {"begin": self.begin}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["begin"]


ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"shuffle": True},
    "with a generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(8)},
    "with a sampler's generator": lambda: {
        "sampler": RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(9))
    },
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0, 3.0], 20)},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(5, 25))},
    "distributed": lambda: {"sampler": DistributedSampler(Numbers(), 2, 0)},
    "of Python's and NumPy's": lambda: {"sampler": OfRandom()},
    "with a state of its own": lambda: {"sampler": Stateful()},
}


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def epoch_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@for_each("name", ARGUMENTS)
@for_each("consumed", [0, 3, None])
def test_a_pass_resumes_where_its_state_says_whatever_loads_it(name: str, consumed: int | None) -> None:
    """In the second pass, after some batches or all of them; saved to a file, and loaded with other workers."""
    arguments, set_epoch = ARGUMENTS[name], name == "distributed"
    seed(3)
    loader = DataLoader(Numbers(), 4, num_workers=2, **arguments())
    epoch_of(loader)
    if set_epoch:
        loader.sampler.set_epoch(1)
    batches = iter(loader)
    for _ in range(100 if consumed is None else consumed):
        next(batches, None)
    buffer = io.BytesIO()
    torch.save(loader.state_dict(), buffer)
    rest = epoch_of(batches)
    afterwards = epoch_of(loader)

    for workers in (0, 2):
        seed(77)
        resumed = DataLoader(Numbers(), 4, num_workers=workers, **arguments())
        buffer.seek(0)
        resumed.load_state_dict(torch.load(buffer, weights_only=True))
        own = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]  # noqa: NPY002
        if consumed is None:
            if name in (
                "with a generator",
                "with a sampler's generator",
                "with a state of its own",
                "distributed",
            ):
                assert epoch_of(resumed) == afterwards
            continue
        batches = iter(resumed)
        assert [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()] == own  # type: ignore[index]  # noqa: NPY002
        assert epoch_of(batches) == rest
        if name in ("with a generator", "with a sampler's generator", "with a state of its own"):
            assert epoch_of(resumed) == afterwards


def test_what_was_consumed_is_not_loaded_again() -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True)
    batches = iter(loader)
    consumed = [number for _ in range(3) for number in next(batches).tolist()]
    state = loader.state_dict()

    dataset = Numbers()
    resumed = DataLoader(dataset, 4, shuffle=True)
    resumed.load_state_dict(state)
    epoch_of(resumed)

    assert sorted(dataset.asked + consumed) == list(range(COUNT))


@pytest.mark.parametrize("passes", [1, 2])
def test_persistent_workers_resume_in_any_pass(passes: int) -> None:
    class Asking:
        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, index: int, rng: np.random.Generator) -> float:
            return index + rng.random()

    def make(workers: int) -> Any:
        return DataLoader(Asking(), 4, True, num_workers=workers, persistent_workers=workers > 0)

    seed(5)
    loader = make(2)
    for _ in range(passes - 1):
        epoch_of(loader)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    rest = epoch_of(batches)

    for workers in (0, 2):
        resumed = make(workers)
        resumed.load_state_dict(state)
        assert resumed.state_dict().keys() == state.keys(), "before the first batch, it is that state"
        assert epoch_of(resumed) == rest


@for_each("batches_before", [None, 3, 100])
def test_a_data_sets_own_state_is_saved_where_the_trainings_thread_loads(batches_before: int | None) -> None:
    """Before the first pass, within one, and after all of its batches."""
    seed(3)
    loader = DataLoader(Counting(), 4, shuffle=True)
    if batches_before is not None:
        batches = iter(loader)
        for _ in range(batches_before):
            next(batches, None)
    state = loader.state_dict()
    rest = list(batches if batches_before == 3 else loader)

    seed(77)
    resumed = DataLoader(Counting(), 4, shuffle=True)
    resumed.load_state_dict(state)
    assert repr(resumed.state_dict()) == repr(state), "before the first batch, it is that state"
    assert repr(list(resumed)) == repr(rest)


def test_a_data_sets_own_state_is_not_saved_but_loaded_where_others_load_and_a_warning_says_so() -> None:
    alone = DataLoader(Counting(draws=False), 4)
    batches = iter(alone)
    next(batches), next(batches)
    with pytest.warns(
        RuntimeWarning, match="Counting has state_dict and load_state_dict, and num_workers=1 "
    ):
        loader = DataLoader(Counting(draws=False), 4, num_workers=1)

    loader.load_state_dict(alone.state_dict())
    _, counts, _ = next(iter(loader))

    assert min(counts.tolist()) > 8
    assert "dataset" not in loader.state_dict()
    stateless = DataLoader(Numbers(), 4)
    stateless.load_state_dict(alone.state_dict())
    with pytest.warns(RuntimeWarning, match="Numbers has no state_dict and load_state_dict: it is left out"):
        assert epoch_of(stateless)[0] == [8, 9, 10, 11]


def test_states_of_others_are_refused_and_an_empty_one_begins_anew() -> None:
    loader = DataLoader(Numbers(), 4)
    assert loader.state_dict() == {}

    with pytest.raises(ConfigError, match=r"no state of a penstock.torch.DataLoader"):
        loader.load_state_dict({"_num_yielded": 3})
    next(iter(loader))
    loader.load_state_dict({})

    assert epoch_of(loader)[0] == [0, 1, 2, 3]


def test_other_batches_than_those_that_were_consumed_are_a_warning() -> None:
    loader = DataLoader(Numbers(), 4)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    resumed = DataLoader(Numbers(), 5)
    resumed.load_state_dict(state)

    with pytest.warns(RuntimeWarning, match="first 2 batches are not those that were consumed"):
        iter(resumed)


@for_each(
    "arguments",
    [
        {"batch_size": 4, "shuffle": True, "drop_last": True},
        {"batch_size": None, "sampler": [3, 1]},
        {"batch_sampler": [[1, 2], [3]]},
        {"batch_size": 5, "collate_fn": sum, "num_workers": 1, "timeout": 60, "persistent_workers": True},
    ],
)
def test_a_loader_is_made_like_another(arguments: dict[str, Any]) -> None:
    theirs = PyTorchs(Numbers(), **arguments)

    mine = OfPenstock.of(theirs, workers="threads")

    assert type(mine) is OfPenstock
    assert mine.dataset is theirs.dataset
    assert mine.sampler is theirs.sampler or mine.batch_sampler is theirs.batch_sampler
    assert (mine.batch_size, mine.drop_last, mine.timeout) == (
        theirs.batch_size,
        theirs.drop_last,
        theirs.timeout,
    )
    assert (
        OfPenstock.of(mine, num_workers=0, timeout=0, persistent_workers=False, prefetch_factor=None).workers
        == "threads"
    )
    seed(1)
    expected = list(map(repr, theirs))
    seed(1)
    assert list(map(repr, mine)) == expected


def test_accelerate_gives_the_right_batches_of_it_by_a_loader_of_its_own() -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(2))
    theirs = PyTorchs(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(2))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import Accelerator

        prepared = Accelerator(cpu=True).prepare(loader)

    assert epoch_of(prepared) == epoch_of(theirs)
    prepared.base_dataloader = OfPenstock.of(prepared.base_dataloader)
    assert epoch_of(prepared) == epoch_of(theirs), "and so does one of Penstock's that is put in its place"
    assert type(prepared.base_dataloader) is OfPenstock

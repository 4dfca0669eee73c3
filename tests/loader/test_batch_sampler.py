"""A batch sampler in place of batch_size and shuffle: its batches, as PyTorch's DataLoader gives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from tests.for_each import for_each
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

import penstock
from penstock.errors import ConfigError
from penstock.loader import Loader, LoaderConfig
from penstock.loader.batch_sampler import DrawnBatches
from penstock.loader.transforms import Resize, ToTensor
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import Batches, TokenBudget

COUNT = 37


class Numbers:
    """A data set whose samples are their numbers."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return np.int64(index)


class Uneven:
    """Batches of one to five samples, others in each epoch; counts how often it is gone through."""

    def __init__(self) -> None:
        self.epoch = 0
        self.asked: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        self.asked.append(self.epoch)
        random = np.random.default_rng(self.epoch)
        ids = random.permutation(COUNT)
        cuts = np.cumsum(random.integers(1, 6, COUNT))
        return iter([part.tolist() for part in np.split(ids, cuts[cuts < COUNT])])


def load(sampler: Any, **arguments: Any) -> Loader:
    settings: dict[str, Any] = {"epochs": 3, "report": None, **arguments}
    return Loader(Numbers(), batch_sampler=sampler, **settings)


def epochs_of(loader: Loader) -> list[list[list[int]]]:
    with loader:
        return [[batch.tolist() for batch in loader] for _ in range(loader.plan.epochs)]


@pytest.mark.parametrize("decoders", [0, 2])
def test_batches_are_those_of_pytorchs_dataloader_epoch_by_epoch(decoders: int) -> None:
    def sampler() -> BatchSampler:
        return BatchSampler(RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(3)), 5, False)

    theirs: Any = DataLoader(Numbers(), batch_sampler=sampler())  # type: ignore[arg-type]

    expected = [[batch.tolist() for batch in theirs] for _ in range(3)]
    assert epochs_of(load(sampler(), decoders=decoders)) == expected
    assert expected[0] != expected[1]


def test_a_sampler_is_told_the_epoch_and_gone_through_once_for_each() -> None:
    sampler = Uneven()
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected.append(list(sampler))
    sampler.asked.clear()

    assert epochs_of(load(sampler)) == expected
    assert sampler.asked == [0, 1, 2]


def test_the_sampler_inside_a_batch_sampler_is_told_the_epoch() -> None:
    inside: Any = DistributedSampler(range(COUNT), num_replicas=1, rank=0, seed=4)  # type: ignore[arg-type]
    found = epochs_of(load(BatchSampler(inside, 5, drop_last=False)))

    for epoch in range(3):
        inside.set_epoch(epoch)
        assert [sample for batch in found[epoch] for sample in batch] == list(inside)


def test_ranks_get_the_batches_in_turn() -> None:
    lists = [[0, 1, 2], [3], [4, 5], [6], [7, 8], [9]]
    parts = [epochs_of(load(lists, epochs=1, rank=rank, world_size=2))[0] for rank in range(2)]

    assert parts == [lists[0::2], lists[1::2]]
    with pytest.raises(ConfigError, match="has 6 batches for 4 ranks"):
        load(lists, rank=1, world_size=4)
    assert epochs_of(load(lists, epochs=1, rank=3, world_size=4, drop_last=True)) == [[lists[3]]]


def test_a_run_without_end_or_of_so_many_steps_draws_epochs_as_they_come() -> None:
    sampler = Uneven()
    with load(sampler, epochs=None) as loader:
        assert next(iter(loader)).tolist() == list(loader.plan.local_batch(0, 0, 0))
        assert sampler.asked[:1] == [0]
        assert len(sampler.asked) < 5
    steps = len(list(Uneven())) + 2
    found = epochs_of(load(Uneven(), epochs=None, steps=steps))
    assert [len(each) for each in found] == [steps - 2, 2]


def test_a_run_goes_on_with_the_next_batch() -> None:
    whole = epochs_of(load(Uneven()))
    with load(Uneven()) as loader:
        for _ in loader:
            pass
        batches = iter(loader)
        next(batches)
        state = json.loads(json.dumps(loader.state_dict()))

    with load(Uneven(), state=state) as loader:
        assert [batch.tolist() for batch in loader] == whole[1][1:]
        assert [batch.tolist() for batch in loader] == whole[2]
    with pytest.raises(ConfigError, match=r"plan\.order was"):
        load([[0]], state=state)


def test_a_state_of_other_ranks_is_counted_in_batches_of_one() -> None:
    lists = [[number] for number in range(12)]
    with load(lists, rank=0, world_size=2) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
    assert state["step"] == 2

    with pytest.raises(ConfigError, match=r"plan\.ranks was 2 and is 4 here"):
        load(lists, rank=0, world_size=4).load_state_dict(state)
    with load(lists, rank=1, world_size=4) as loader:
        loader.load_state_dict(state, allow=["plan.ranks"])
        assert next(iter(loader)).tolist() == [5]
    with (
        load(lists, rank=1, world_size=3) as loader,
        pytest.raises(ConfigError, match="4 batches into epoch 0"),
    ):
        loader.load_state_dict(state, allow=["plan.ranks"])


def test_what_it_repeats_or_leaves_out_is_said_at_the_start() -> None:
    def lines(sampler: Any) -> str:
        with load(sampler) as loader:
            return "\n".join(loader.start_lines)

    assert "leaves out 34 samples and reads 2 samples more than once of 37" in lines([[0, 1], [1, 2, 1]])
    assert "leaves out" not in lines(Uneven())
    assert "in the order of Uneven: 3 epochs, the first of" in lines(Uneven())


def test_batches_of_so_many_tokens_are_loaded_and_their_padding_is_said_at_the_start() -> None:
    lengths = np.arange(COUNT) % 11 + 1

    def ranks_of() -> list[Loader]:
        return [
            load(TokenBudget(lengths, 24, seed=1), rank=rank, world_size=2, epochs=2) for rank in range(2)
        ]

    first, second = map(epochs_of, ranks_of())
    for epoch in range(2):
        assert len(first[epoch]) == len(second[epoch])
        batches = first[epoch] + second[epoch]
        assert sorted(sample for batch in batches for sample in batch) == list(range(COUNT))
        assert max(len(batch) * lengths[batch].max() for batch in batches) <= 24
    assert first[0] != first[1]

    loader, other = ranks_of()
    with loader, other:
        (line,) = [line for line in loader.start_lines if "padding" in line]
        assert "batches of at most 24 tokens, " in line
        assert " in the order TokenBudget(seed=1): 2 epochs, the first of " in "".join(loader.start_lines)
        it = iter(loader)
        next(it)
        state = json.loads(json.dumps(loader.state_dict()))
    with load(TokenBudget(lengths, 24, seed=1), rank=0, world_size=2, epochs=2, state=state) as loader:
        assert [batch.tolist() for batch in loader] == first[0][1:]
    with pytest.raises(ConfigError, match=r"plan\.order was"):
        load(TokenBudget(lengths, 24, seed=2), rank=0, world_size=2, epochs=2, state=state)


def test_a_collate_function_gets_each_of_such_batches() -> None:
    sampler = Uneven()
    with load(sampler, collate_fn=tuple, epochs=1) as loader:
        found = [[int(sample) for sample in batch] for batch in loader]
    sampler.set_epoch(0)
    assert found == list(sampler)


class Failing(Uneven):
    def __iter__(self) -> Iterator[list[int]]:
        if self.epoch == 1:
            raise ValueError("no second epoch")
        return super().__iter__()


@for_each(
    ("sampler", "message"),
    [
        ([[0, 37]], r"ids of epoch 0 contain 37"),
        ([[0], []], "batch 1 of epoch 0 is empty"),
        ([], "epoch 0 has no batch"),
        (SequentialSampler(range(3)), "are no lists of ids"),
        (iter([[0]]), "which can be gone through once"),
        (BatchSampler, "it is an iterable of lists"),
        ("abc", "it is an iterable of lists"),
        (Batches([[0, 1]], 2), "batch_sampler is an order over 2 samples and the source has 37"),
    ],
    ids=[
        "out of range",
        "empty batch",
        "no batch",
        "single ids",
        "an iterator",
        "a class",
        "text",
        "another length",
    ],
)
def test_what_is_no_batch_sampler_is_refused(sampler: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(sampler)


@pytest.mark.parametrize("arguments", [{"batch_size": 4}, {"shuffle": False}, {"split": "strided"}])
def test_what_a_batch_sampler_says_itself_is_not_given_beside_it(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ConfigError, match=f"{name} is .* beside batch_sampler, .*: leave {name} out"):
        load([[0]], **arguments)


def test_without_either_the_batch_size_is_missing() -> None:
    for make in (lambda: LoaderConfig(Numbers(), epochs=1), lambda: Loader(Numbers(), epochs=1)):
        with pytest.raises(ConfigError, match="batch_size is missing: give the samples of one step"):
            make()


@pytest.mark.parametrize("decoders", [0, 2])
def test_a_sampler_that_raises_ends_the_run_with_its_error(decoders: int) -> None:
    with pytest.raises(ValueError, match="no second epoch"):
        epochs_of(load(Failing(), decoders=decoders))


def test_many_threads_that_ask_for_one_epoch_get_one_drawing_of_it() -> None:
    sampler = Uneven()
    drawn = DrawnBatches(sampler, keeps_all=True)
    threads = [Thread(target=drawn, args=(2,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sampler.asked == [2]


def test_a_folder_of_pictures_is_read_and_predicted_in_such_batches(
    image_folder: Callable[..., Path],
) -> None:
    folder = image_folder(22)
    lists: Sequence[Sequence[int]] = [[3, 1, 2], [0], [4, 5, 6, 7], [1, 1]]
    machine = Machine(
        SharedStore(None, Curve(((1, 10e6),)), 1e-3),
        (StorageClass("staging", 2**26, 2, Curve(((1, 1e9),))),),
        1,
        decode_threads=2,
    )
    config = LoaderConfig(
        folder, batch_sampler=lists, epochs=2, transforms=[Resize((8, 8)), ToTensor()], machine=machine
    )
    with (
        Loader(config, report=None) as loader,
        Loader(
            folder, batch_size=1, shuffle=False, epochs=1, transforms=config.transforms, report=None
        ) as alone,
    ):
        pictures = [images[0].copy() for images, _ in alone]
        for _ in range(2):
            for batch, (images, _) in zip(lists, loader, strict=True):
                assert np.array_equal(images, np.stack([pictures[sample] for sample in batch]))
    trace = penstock.predict(config, step_seconds=1e-3)
    assert [epoch.samples for epoch in trace.epochs()] == [10, 10]
    assert replace(config, seed=4).batch_sampler == config.batch_sampler

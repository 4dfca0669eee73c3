"""Orders as samplers of PyTorch's own DataLoader."""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from penstock.errors import ConfigError
from penstock.plan import BundleShuffle, Explicit, FullShuffle
from penstock.torch.sampler import BundleRandomSampler, OrderSampler


class Squares(Dataset[int]):
    """A dataset of which the sample with id i is i * i."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, sample: int) -> int:
        return sample * sample


def epoch_of(loader: DataLoader[int]) -> list[int]:
    return [int(value) for batch in loader for value in batch]


def squares_in(order: FullShuffle | BundleShuffle, epoch: int) -> list[int]:
    return [int(sample) ** 2 for sample in order.at(epoch, np.arange(order.samples))]


def test_a_dataloader_reads_bundle_by_bundle_and_back() -> None:
    dataset = Squares()
    loader = DataLoader(dataset, batch_size=8, sampler=BundleRandomSampler(dataset, bundle_ratio=0.2, seed=3))
    order = BundleShuffle(50, seed=3, bundle_ratio=0.2)

    first, second, third = (epoch_of(loader) for _ in range(3))

    assert [first, second, third] == [squares_in(order, epoch) for epoch in range(3)]
    assert sorted(first[:10]) == [sample**2 for sample in range(10)]
    assert sorted(second[:10]) == [sample**2 for sample in range(40, 50)]
    assert len(loader) == 7


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_processes_and_unbatched_loading_skip_no_epoch(workers: int) -> None:
    """A loader with workers and without batches makes two iterators of its sampler and draws from one."""
    order = FullShuffle(50, seed=1)
    loader = DataLoader(Squares(), batch_size=None, sampler=OrderSampler(order), num_workers=workers)

    for epoch in range(3):
        assert [int(value) for value in loader] == squares_in(order, epoch)


def test_set_epoch_chooses_the_epoch_that_comes_next() -> None:
    sampler = OrderSampler(FullShuffle(50, seed=1))
    first = list(OrderSampler(sampler.order))

    sampler.set_epoch(7)
    assert list(sampler) == sampler.order.at(7, np.arange(50)).tolist()
    assert list(sampler) == sampler.order.at(8, np.arange(50)).tolist()
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_an_epoch_left_early_is_over() -> None:
    sampler = OrderSampler(FullShuffle(50, seed=1))

    assert next(iter(sampler)) == int(sampler.order.at(0, 0))
    assert next(iter(sampler)) == int(sampler.order.at(1, 0))


def test_the_length_is_that_of_the_epoch_under_way_to_the_end() -> None:
    sampler = OrderSampler(Explicit([[0, 1, 2], [3]], samples=4))

    assert [(sample, len(sampler)) for sample in sampler] == [(0, 3), (1, 3), (2, 3)]
    assert [(sample, len(sampler)) for sample in sampler] == [(3, 1)]
    with pytest.raises(ConfigError, match="epoch 2 is asked of an order that lists 2 epochs"):
        next(iter(sampler))
    with pytest.raises(ConfigError, match="epoch 2 is asked"):
        sampler.set_epoch(2)


def test_long_epochs_are_yielded_piece_by_piece_without_a_seam() -> None:
    order = FullShuffle(150_000, seed=2)

    assert list(OrderSampler(order)) == order.at(0, np.arange(150_000)).tolist()


def test_what_is_no_order_is_refused() -> None:
    for order in ("x", [0, 1], FullShuffle):
        with pytest.raises(ConfigError, match=r"order is .*FullShuffle\(len\(dataset\)\)"):
            OrderSampler(order)  # type: ignore[arg-type]


def test_a_bundle_sampler_refuses_what_its_order_refuses() -> None:
    for ratio in (0.0, 1.5):
        with pytest.raises(ConfigError, match=f"bundle_ratio is {ratio}"):
            BundleRandomSampler(range(10), bundle_ratio=ratio)
    with pytest.raises(ConfigError, match="is the data set empty"):
        BundleRandomSampler([])

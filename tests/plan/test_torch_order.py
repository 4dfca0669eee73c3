"""PyTorch's orders against the PyTorch that is installed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.for_each import for_each
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, TorchDistributed, TorchShuffle, TwisterState
from penstock.plan.torch_order import _Twister, randperm_words


class Ids(Dataset[int]):
    """A dataset whose samples are their ids."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, sample: int) -> int:
        return sample


def loader(samples: int, batch_size: int | None, **arguments: object) -> DataLoader[int]:
    def collate(batch: list[int]) -> list[int]:
        return batch

    return DataLoader(Ids(samples), batch_size, collate_fn=collate, **arguments)  # type: ignore[arg-type]


def whole_epoch(order: TorchShuffle | TorchDistributed, epoch: int) -> list[int]:
    return order.at(epoch, np.arange(order.length(epoch))).tolist()  # type: ignore[no-any-return]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def _global_generator_is_restored() -> Iterable[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


# -- The generator -------------------------------------------------------------------------------------

# Around the length of the generator's state (624 words) and the size from which a kernel shuffles (65,536).
SIZES = [1, 2, 3, 10, 623, 624, 625, 626, 5000, 65_535, 65_536, 70_001]


@for_each("n", SIZES)
@for_each("seed", [1, 2**32 + 5, 2**63 - 1])
def test_a_permutation_and_the_state_after_it_are_torchs(n: int, seed: int) -> None:
    generator = seeded(seed)
    twister = _Twister(TwisterState.from_seed(seed))

    for _ in range(2):
        assert twister.randperm(n).tolist() == torch.randperm(n, generator=generator).tolist()

    expected = torch.empty((), dtype=torch.int64).random_(generator=generator).item()
    assert twister.random() == expected


@for_each("drawn", [0, 1, 2, 622, 623, 624, 625, 1248, 2000])
def test_a_state_taken_from_torch_at_any_time_goes_on_as_torch_does(drawn: int) -> None:
    generator = seeded(3)
    for _ in range(drawn // 2):
        torch.empty((), dtype=torch.int64).random_(generator=generator)
    if drawn % 2:
        torch.randperm(2, generator=generator)  # draws a single word

    twister = _Twister(TwisterState.from_torch(generator.get_state()))

    assert twister.randperm(1000).tolist() == torch.randperm(1000, generator=generator).tolist()


def test_as_many_words_are_counted_as_torch_draws() -> None:
    for n in SIZES:
        generator = seeded(8)
        twister = _Twister(TwisterState.from_seed(8))
        torch.randperm(n, generator=generator)
        twister.skip(randperm_words(n))
        assert twister.random() == torch.empty((), dtype=torch.int64).random_(generator=generator).item()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_permutation_so_long_that_torch_draws_64_bits_a_step_is_torchs() -> None:
    """5 GB and two minutes: torch's algorithm changes at (2**32 - 1) // 20 samples."""
    for n in ((2**32 - 1) // 20 - 1, (2**32 - 1) // 20):
        generator = seeded(5)
        twister = _Twister(TwisterState.from_seed(5))
        expected: NDArray[np.int64] = torch.randperm(n, generator=generator).numpy()
        assert np.array_equal(twister.randperm(n), expected)
        assert twister.random() == torch.empty((), dtype=torch.int64).random_(generator=generator).item()


# -- DistributedSampler --------------------------------------------------------------------------------


@for_each(
    ("samples", "ranks"),
    [*((samples, ranks) for samples in (1, 5, 1003) for ranks in (1, 2, 16)), (65_600, 3)],
)
@for_each("shuffle", [True, False])
@for_each("drop_last", [True, False])
def test_ranks_read_what_the_distributed_sampler_gives_them(
    samples: int, ranks: int, shuffle: bool, drop_last: bool
) -> None:
    """Padding included, also where a rank gets more padding than there are samples."""
    order = TorchDistributed(samples, ranks, seed=6, shuffle=shuffle, drop_last=drop_last)

    for epoch in (0, 1, 7):
        ids = whole_epoch(order, epoch)
        for rank in {0, ranks // 2, ranks - 1}:
            sampler: DistributedSampler[int] = DistributedSampler(
                Ids(samples), ranks, rank, shuffle=shuffle, seed=6, drop_last=drop_last
            )
            sampler.set_epoch(epoch)
            assert ids[rank::ranks] == list(sampler)


@pytest.mark.parametrize(("sampler_drops", "loader_drops"), [(False, False), (True, False), (False, True)])
def test_a_strided_plan_gives_every_rank_the_batches_of_its_dataloader(
    sampler_drops: bool, loader_drops: bool
) -> None:
    plan = AccessPlan(
        TorchDistributed(103, ranks=4, seed=2, drop_last=sampler_drops),
        batch_size=4 * 8,
        epochs=3,
        ranks=4,
        split="strided",
        drop_last=loader_drops,
    )

    for rank in range(4):
        sampler: DistributedSampler[int] = DistributedSampler(
            Ids(103), 4, rank, seed=2, drop_last=sampler_drops
        )
        batches = loader(103, 8, sampler=sampler, drop_last=loader_drops)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            steps = range(plan.steps(epoch))
            assert [plan.local_batch(rank, epoch, step).tolist() for step in steps] == list(batches)


@for_each(("samples", "ranks"), [(10, 4), (3, 8), (12, 4)])
@for_each("shuffle", [True, False])
def test_a_padded_sample_is_found_where_it_stands_first(samples: int, ranks: int, shuffle: bool) -> None:
    order = TorchDistributed(samples, ranks, seed=1, shuffle=shuffle)
    ids = whole_epoch(order, 5)

    assert order.position_of(5, np.arange(samples)).tolist() == [ids.index(s) for s in range(samples)]


def test_a_sampler_that_drops_its_tail_leaves_samples_unread() -> None:
    order = TorchDistributed(10, ranks=4, seed=1, drop_last=True)
    ids = whole_epoch(order, 0)

    assert order.position_of(0, np.arange(10)).tolist() == [
        ids.index(s) if s in ids else -1 for s in range(10)
    ]
    assert len(ids) == 8


# -- DataLoader(shuffle=True) --------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 2, 30, 701, pytest.param(65_537, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("batch_size", "drop_last"), [(10, False), (7, True), (None, False)])
def test_epochs_of_a_dataloader_with_its_own_generator_are_foreseen(
    samples: int, batch_size: int | None, drop_last: bool
) -> None:
    """The draw of the workers' seed before each epoch and the unused permutation after it are counted."""
    generator = seeded(4)
    torch.randperm(77, generator=generator)
    batches = loader(samples, batch_size, shuffle=True, generator=generator, drop_last=drop_last)
    order = TorchShuffle(samples, generator.get_state())

    for epoch in range(3):
        read = flat(batches) if batch_size else list(batches)
        assert whole_epoch(order, epoch)[: len(read)] == read
        assert len(read) > samples - (batch_size or 1)


@for_each("samples", [1, 30, 701, 65_537])
def test_epochs_of_a_dataloader_without_a_generator_are_foreseen_from_the_global_one(samples: int) -> None:
    torch.manual_seed(2**33 + 9)
    order = TorchShuffle(samples, TwisterState.from_seed(2**33 + 9), is_global=True)
    batches = loader(samples, 16, shuffle=True)

    for epoch in range(3):
        assert whole_epoch(order, epoch) == flat(batches)


def test_a_state_captured_at_iter_serves_although_others_draw_in_between() -> None:
    """Weights are initialised and dropout draws from the global generator between epochs."""
    torch.manual_seed(1)
    batches = loader(100, 16, shuffle=True)

    for epoch in range(3):
        captured = TorchShuffle(100, torch.get_rng_state(), is_global=True, first_epoch=epoch)
        assert whole_epoch(captured, epoch) == flat(batches)
        torch.rand(epoch + 5)


@pytest.mark.parametrize("persistent_workers", [True, False])
def test_epochs_of_a_dataloader_with_worker_processes_are_foreseen(persistent_workers: bool) -> None:
    """Workers that persist are seeded once, so their loader draws less from the second epoch on."""
    generator = seeded(12)
    order = TorchShuffle(20, generator.get_state(), persistent_workers=persistent_workers)
    batches = loader(
        20, 8, shuffle=True, generator=generator, num_workers=1, persistent_workers=persistent_workers
    )

    for epoch in range(3):
        assert whole_epoch(order, epoch) == flat(batches)
    if batches._iterator is not None:
        batches._iterator._shutdown_workers()  # type: ignore[attr-defined]


def test_epochs_may_be_asked_for_in_any_order() -> None:
    in_order = TorchShuffle(200, TwisterState.from_seed(3))
    expected = [whole_epoch(in_order, epoch) for epoch in range(12)]

    jumping = TorchShuffle(200, TwisterState.from_seed(3))
    for epoch in (11, 2, 7, 0, 11):
        assert whole_epoch(jumping, epoch) == expected[epoch]
        assert jumping.position_of(epoch, expected[epoch]).tolist() == list(range(200))


# -- Bad input -----------------------------------------------------------------------------------------


def test_states_of_another_kind_of_generator_are_refused() -> None:
    """A GPU's state has 16 bytes."""
    for wrong in (torch.zeros(16, dtype=torch.uint8), np.zeros(5056), 7):
        with pytest.raises(ConfigError, match=r"generator state is .*pass generator.get_state\(\) of a CPU"):
            TorchShuffle(10, wrong)


def test_sizes_ranks_and_seeds_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="samples is 0; an order needs"):
        TorchShuffle(0, TwisterState.from_seed(0))
    with pytest.raises(ConfigError, match="samples is 0; an order needs"):
        TorchDistributed(0, 1)
    with pytest.raises(ConfigError, match="ranks is 0; a job has at least 1"):
        TorchDistributed(10, 0)
    with pytest.raises(ConfigError, match="seed is -1; it is from 0"):
        TorchDistributed(10, 1, seed=-1)


def test_an_epoch_before_the_captured_one_is_refused() -> None:
    order = TorchShuffle(10, TwisterState.from_seed(0), first_epoch=3)

    with pytest.raises(ConfigError, match="epoch 2 is before 3, the first that the generator's state gives"):
        order.at(2, 0)

"""The access plan against a run that is simply listed."""

from __future__ import annotations

import re
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.plan import (
    AccessPlan,
    Assigned,
    Batches,
    BundleShuffle,
    Explicit,
    FullShuffle,
    Order,
    Scattered,
    Sequential,
    Shares,
    Strided,
    TorchDistributed,
    split_locally,
)
from penstock.plan import access as module
from penstock.plan.access import epochs_of_steps


@dataclass(frozen=True)
class Read:
    """One read of a listed run."""

    epoch: int
    position: int
    step: int
    rank: int
    sample: int


def listed(plan: AccessPlan) -> list[Read]:
    """Every read of the run in order, from the ids of each epoch and the split's shares of each batch."""
    reads = []
    if isinstance(plan.order, Batches):
        return listed_batches(plan, plan.order)
    for epoch in range(plan.epochs):
        ids = plan.order.at(epoch, np.arange(plan.order.length(epoch))).tolist()
        if plan.drop_last:
            ids = ids[: len(ids) // plan.batch_size * plan.batch_size]
        if plan.last_steps is not None and epoch == plan.epochs - 1:
            ids = ids[: plan.last_steps * plan.batch_size]
        for step, begin in enumerate(range(0, len(ids), plan.batch_size)):
            batch = ids[begin : begin + plan.batch_size]
            for rank in range(plan.ranks):
                offsets = plan._split.offsets(rank, plan.ranks, len(batch)).tolist()
                reads += [Read(epoch, begin + o, step, rank, batch[o]) for o in offsets]
    return reads


def listed_batches(plan: AccessPlan, order: Batches) -> list[Read]:
    """Every read of a run whose order lists its batches."""
    reads = []
    for epoch in range(plan.epochs):
        bounds = order.bounds(epoch, plan.ranks).tolist()
        steps = (len(bounds) - 1) // plan.ranks
        if plan.last_steps is not None and epoch == plan.epochs - 1:
            steps = plan.last_steps
        for batch in range(steps * plan.ranks):
            for position in range(bounds[batch], bounds[batch + 1]):
                sample = int(order.at(epoch, position))
                reads.append(Read(epoch, position, batch // plan.ranks, batch % plan.ranks, sample))
    return reads


def dealt_by_twos(batch: int, ranks: int) -> list[int]:
    return [offset // 2 % ranks for offset in range(batch)]


@st.composite
def orders(draw: st.DrawFn, epochs: int) -> Order:
    samples = draw(st.integers(1, 40))
    seed = draw(st.integers(0, 1000))
    lists = st.lists(st.integers(0, samples - 1), min_size=1, max_size=60)
    return draw(
        st.one_of(
            st.just(Sequential(samples)),
            st.just(FullShuffle(samples, seed)),
            st.floats(0.05, 1).map(lambda ratio: BundleShuffle(samples, seed, ratio)),
            st.integers(1, 50).map(lambda ranks: TorchDistributed(samples, ranks, seed)),
            st.lists(lists, min_size=epochs, max_size=epochs).map(lambda ids: Explicit(ids, samples)),
        )
    )


@st.composite
def plans_of_batches(draw: st.DrawFn, epochs: int, ranks: int) -> AccessPlan:
    samples = draw(st.integers(1, 40))
    batches = st.lists(st.integers(0, samples - 1), min_size=1, max_size=6)
    drop_last = draw(st.booleans())
    lists = [
        draw(
            st.lists(batches, min_size=ranks, max_size=4 * ranks).filter(
                lambda each: drop_last or len(each) % ranks == 0
            )
        )
        for _ in range(epochs)
    ]
    order = Batches(lists if draw(st.booleans()) else lists.__getitem__, samples, largest=7)
    return AccessPlan.of_batches(order, epochs, ranks, drop_last)


@st.composite
def plans(draw: st.DrawFn) -> AccessPlan:
    epochs = draw(st.integers(1, 4))
    ranks = draw(st.integers(1, 5))
    if draw(st.integers(0, 3)) == 0:
        plan = draw(plans_of_batches(epochs, ranks))
        steps = plan.steps(epochs - 1)
        return replace(plan, last_steps=draw(st.integers(1, steps))) if draw(st.booleans()) else plan
    shares = st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks).filter(any)
    named = st.sampled_from(["balanced", "uniform", "strided", "replicated", "imbalanced"])
    plan = AccessPlan(
        draw(orders(epochs)),
        batch_size=draw(st.integers(1, 20)),
        epochs=epochs,
        ranks=ranks,
        split=draw(st.one_of(named, shares.map(tuple), st.just(Assigned(dealt_by_twos)))),
        drop_last=draw(st.booleans()),
    )
    steps = plan.steps(epochs - 1)
    return replace(plan, last_steps=draw(st.integers(1, steps))) if steps and draw(st.booleans()) else plan


@given(plans(), st.data())
def test_a_run_of_so_many_steps_ends_with_the_last_of_them(plan: AccessPlan, data: st.DataObject) -> None:
    plan = replace(plan, last_steps=None)
    counts = [plan.steps(epoch) for epoch in range(plan.epochs)]
    steps = data.draw(st.integers(1, sum(counts))) if any(counts) else 0
    if steps:
        epochs, last = epochs_of_steps(plan.order, plan.batch_size, steps, plan.drop_last, plan.ranks)
        cut = replace(plan, epochs=epochs, last_steps=last)

        assert sum(cut.steps(epoch) for epoch in range(epochs)) == steps
        assert counts[: epochs - 1] == [cut.steps(epoch) for epoch in range(epochs - 1)]
        assert cut.string(0).tolist() == plan.string(0)[: cut.reads(0)].tolist()


def test_steps_that_an_order_does_not_have_are_refused() -> None:
    lists = Explicit([[1, 2, 3], [4]], 5)
    assert epochs_of_steps(lists, 2, 3) == (2, 1)
    with pytest.raises(
        ConfigError, match="steps is 9, and the order has fewer: epoch 7 is asked of an order"
    ):
        epochs_of_steps(lists, 2, 9)
    with pytest.raises(ConfigError, match="drop_last leaves no batch: an epoch reads 3 samples"):
        epochs_of_steps(Sequential(3), 4, 1, drop_last=True)
    with pytest.raises(ConfigError, match="last_steps is 3, and the last epoch has 2"):
        AccessPlan(Sequential(3), 2, 5, last_steps=3)


def test_a_long_run_of_steps_is_counted_at_once() -> None:
    assert epochs_of_steps(Sequential(10), 4, 3 * 10**9 + 2) == (10**9 + 1, 2)


# A plan has many moving parts and its questions are cheap: try more of them than usual.
thoroughly = settings(max_examples=250)


@thoroughly
@given(plans())
def test_steps_batches_and_positions_are_those_of_the_listed_run(plan: AccessPlan) -> None:
    reads = listed(plan)

    for epoch in range(plan.epochs):
        of_epoch = [read for read in reads if read.epoch == epoch]
        assert plan.steps(epoch) == len({read.step for read in of_epoch})
        assert plan.length(epoch) == len({read.position for read in of_epoch})
        by_position = {read.position: read.sample for read in of_epoch}
        positions = sorted(by_position)
        assert plan.sample_at(epoch, positions).tolist() == [by_position[p] for p in positions]
        for step in range(plan.steps(epoch)):
            for rank in range(plan.ranks):
                expected = [r for r in of_epoch if (r.rank, r.step) == (rank, step)]
                assert plan.local_batch(rank, epoch, step).tolist() == [r.sample for r in expected]
                assert plan.local_positions(rank, epoch, step).tolist() == [r.position for r in expected]


@thoroughly
@given(plans())
def test_the_reader_of_a_sample_has_it_in_its_local_batch(plan: AccessPlan) -> None:
    reads = listed(plan)

    for epoch in range(plan.epochs):
        first: dict[int, Read] = {}
        for read in sorted(reads, key=lambda r: (r.position, r.rank)):
            if read.epoch == epoch:
                first.setdefault(read.sample, read)
        ranks, steps = plan.reader_of(epoch, np.arange(plan.samples))
        positions = plan.position_of(epoch, np.arange(plan.samples))
        for sample in range(plan.samples):
            read = first.get(sample, Read(epoch, -1, -1, -1, sample))
            assert (ranks[sample], steps[sample], positions[sample]) == (read.rank, read.step, read.position)


@thoroughly
@given(plans(), st.integers(1, 9), st.booleans())
def test_a_ranks_string_its_frequencies_and_first_uses_are_those_of_the_listed_run(
    plan: AccessPlan, at_once: int, is_compiled: bool
) -> None:
    reads = listed(plan)

    for rank in range(plan.ranks):
        string = [read.sample for read in reads if read.rank == rank]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_PIECE", at_once)
            patch.setattr(module, "_WORTH_COMPILING_READS", 0 if is_compiled else 1 << 24)
            assert plan.string(rank).tolist() == string
            counts, first = plan.uses(rank)
        assert counts.tolist() == [string.count(sample) for sample in range(plan.samples)]
        assert first.tolist() == [
            string.index(sample) if sample in string else -1 for sample in range(plan.samples)
        ]
        local = [
            sum((r.rank, r.epoch, r.step) == (rank, epoch, step) for r in reads)
            for epoch in range(plan.epochs)
            for step in range(plan.steps(epoch))
        ]
        assert plan.max_local_batch(rank) == (7 if plan.is_cut_by_order else max(local, default=0))
        assert [
            size for epoch in range(plan.epochs) for size in plan.local_batch_sizes(rank, epoch).tolist()
        ] == local


@thoroughly
@given(plans(), st.integers(1, 9), st.data())
def test_the_strings_of_all_ranks_and_of_some_are_those_of_each(
    plan: AccessPlan, at_once: int, data: st.DataObject
) -> None:
    some = data.draw(st.lists(st.integers(0, plan.ranks - 1), min_size=1, unique=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", at_once)
        strings, of_some = plan.strings(), plan.strings(some)

    reads = listed(plan)
    assert [string.tolist() for string in strings] == [
        [read.sample for read in reads if read.rank == rank] for rank in range(plan.ranks)
    ]
    assert all(string.dtype == np.int64 for string in strings)
    assert [string.tolist() for string in of_some] == [strings[rank].tolist() for rank in some]


def test_the_strings_of_many_ranks_ask_for_each_position_once() -> None:
    """Orders that arrange whole batches (`split_locally`) would otherwise arrange each for every rank."""
    asked: list[int] = []

    class Counted(Sequential):
        __slots__ = ()

        def at(self, epoch: int, positions: ArrayLike) -> NDArray[np.int64]:
            asked.append(np.size(positions))
            return super().at(epoch, positions)

    AccessPlan(Counted(1_003), 10, epochs=2, ranks=5).strings()

    assert sum(asked) == 2 * 1_003


@thoroughly
@given(plans(), st.data())
def test_a_stream_is_the_ranks_next_samples_over_epoch_ends(plan: AccessPlan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, plan.ranks - 1))
    epoch = data.draw(st.integers(0, plan.epochs - 1))
    step = data.draw(st.integers(0, max(0, plan.steps(epoch) - 1)))
    count = data.draw(st.integers(0, 200))
    expected = [r.sample for r in listed(plan) if r.rank == rank and (r.epoch, r.step) >= (epoch, step)]

    assert plan.stream(rank, epoch, step, count).tolist() == expected[:count]


@thoroughly
@given(plans(), st.data(), st.integers(1, 50))
def test_batches_are_those_of_the_listed_run_however_many_are_asked_for_at_once(
    plan: AccessPlan, data: st.DataObject, ahead: int
) -> None:
    rank = data.draw(st.integers(0, plan.ranks - 1))
    epoch = data.draw(st.integers(0, plan.epochs - 1))
    step = data.draw(st.integers(0, plan.steps(epoch)))
    expected: dict[tuple[int, int], list[int]] = {}
    for read in listed(plan):
        if read.rank == rank and (read.epoch, read.step) >= (epoch, step):
            expected.setdefault((read.epoch, read.step), []).append(read.sample)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_AHEAD", ahead)
        found = [
            ((later, first + number), batch)
            for later, first, batches in plan.batches(rank, epoch, step)
            for number, batch in enumerate(batches.tolist())
        ]

    assert found == list(expected.items())


def test_ranks_read_every_sample_of_every_epoch_once_between_them() -> None:
    plan = AccessPlan(FullShuffle(100_003, seed=1), batch_size=96, epochs=2, ranks=7)

    uses = np.sum([plan.uses(rank)[0] for rank in range(7)], axis=0)

    assert uses.tolist() == [2] * 100_003


def test_dropping_the_last_batch_leaves_its_samples_unread() -> None:
    plan = AccessPlan(Sequential(10), batch_size=4, epochs=2, drop_last=True)

    assert plan.steps(0) == 2
    assert plan.position_of(0, [7, 8, 9]).tolist() == [7, -1, -1]
    assert [part.tolist() for part in plan.reader_of(0, [7, 8])] == [[0, -1], [1, -1]]
    assert AccessPlan(Sequential(10), batch_size=16, epochs=2, drop_last=True).steps(0) == 0


def test_the_samples_of_a_huge_data_set_are_found_in_constant_memory() -> None:
    """10**12 samples over 4,096 ranks: listing an epoch would take 8 terabytes."""
    plan = AccessPlan(FullShuffle(10**12, seed=1), batch_size=64 * 4096, epochs=90, ranks=4096)
    plan.stream(0, 0, 0, 10)  # compile the kernels before memory is counted

    tracemalloc.start()
    ids = plan.stream(17, 40, 1000, 10_000)
    ranks, steps = plan.reader_of(40, ids)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert np.unique(ids).size == 10_000
    assert (ranks == 17).all()
    assert steps.tolist() == [1000 + index // 64 for index in range(10_000)]
    assert plan.max_local_batch(4095) == 64
    assert peak_bytes < 5_000_000


def test_a_distributed_samplers_run_is_a_strided_plan() -> None:
    plan = AccessPlan(TorchDistributed(10, ranks=4, seed=3), batch_size=8, epochs=1, ranks=4, split="strided")
    order = plan.order.at(0, np.arange(12)).tolist()

    for rank in range(4):
        assert plan.string(rank).tolist() == order[rank::4]


def test_a_plan_shows_what_it_is() -> None:
    plan = AccessPlan(FullShuffle(10, 1), 4, 3, ranks=2, split=(3, 1))

    assert plan.split == Shares((3, 1))
    assert plan.samples == 10
    assert AccessPlan(FullShuffle(10, 1), 4, 3, split="strided").split == Strided()
    assert repr(plan) == (
        "AccessPlan(order=FullShuffle(samples=10, seed=1), batch_size=4, epochs=3, ranks=2, "
        "split=Shares(weights=(3, 1)), drop_last=False, last_steps=None)"
    )


@for_each("name", ["batch_size", "epochs", "ranks"])
@for_each(
    ("value", "said"),
    [
        *((value, f"{value}; it must be at least 1") for value in (0, -3)),
        *((value, f"{value}; it must be an integer") for value in (2.0, True)),
        (10**40, "10+; it must be at most 281,474,976,710,656"),
    ],
)
def test_sizes_that_cannot_be_are_refused(name: str, value: object, said: str) -> None:
    sizes: dict[str, object] = {"batch_size": 4, "epochs": 2, "ranks": 2, name: value}

    with pytest.raises(ConfigError, match=f"{name} is {said}"):
        AccessPlan(Sequential(10), **sizes)  # type: ignore[arg-type]


def test_dropping_the_last_batch_is_a_yes_or_a_no() -> None:
    with pytest.raises(ConfigError, match="drop_last is 'yes'; it is True or False"):
        AccessPlan(Sequential(10), batch_size=4, epochs=2, drop_last="yes")  # type: ignore[arg-type]


def test_a_training_of_which_every_batch_would_be_dropped_is_refused() -> None:
    one_long_epoch = AccessPlan(Explicit([[1], [0, 1, 2]], samples=3), 2, 2, drop_last=True)
    one_long_epoch.check_equal_steps()

    with pytest.raises(
        ConfigError, match=r"drop_last leaves no batch: an epoch reads 10 samples, .*batch_size \(16\)"
    ):
        AccessPlan(Sequential(10), 16, 2, drop_last=True).check_equal_steps()


@for_each(
    ("samples", "batch_size", "ranks", "split"),
    [
        (50_000, 256, 48, "uniform"),
        (50_000, 100, 64, "uniform"),
        (100, 8, 7, "uniform"),
        (100, 7, 8, "balanced"),
        (103, 10, 8, "balanced"),
        (103, 10, 8, "strided"),
        (13, 5, 2, (1, 0)),
        (10_000, 256, 48, "balanced"),
    ],
)
def test_each_argument_that_the_refusal_of_an_idle_rank_names_makes_the_plan_work(
    samples: int, batch_size: int, ranks: int, split: str | tuple[int, ...]
) -> None:
    plan = AccessPlan(Sequential(samples), batch_size, 2, ranks, split)

    with pytest.raises(ConfigError, match=r"leaves none for rank .* forever: use ") as refusal:
        plan.check_equal_steps()

    named = str(refusal.value).split("forever: use ")[1]
    remedies = [replace(plan, drop_last=True)] if "drop_last=True" in named else []
    remedies += [replace(plan, split="balanced")] if 'split="balanced"' in named else []
    remedies += [replace(plan, batch_size=int(size)) for size in re.findall(r"batch_size=(\d+)", named)]
    if "TorchDistributed" in named:
        remedies.append(replace(plan, order=TorchDistributed(samples, ranks)))
    assert remedies
    for remedy in remedies:
        remedy.check_equal_steps()


def test_padding_is_named_where_it_gives_every_rank_a_sample() -> None:
    with pytest.raises(ConfigError, match=r"or an order that repeats samples .* as TorchDistributed does"):
        AccessPlan(Sequential(10_000), 256, 3, 48).check_equal_steps()


def test_fewer_samples_than_ranks_are_refused_whatever_the_batch_size() -> None:
    with pytest.raises(ConfigError, match=r"has 5 samples and leaves none for rank 5 of 8.*fewer ranks"):
        AccessPlan(Sequential(5), 8, 2, 8).check_equal_steps()


@dataclass(frozen=True)
class Counting:
    """Another order, which notes for what epochs it is asked for the length or for samples."""

    order: Order
    asked: list[int] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return self.order.samples

    @property
    def even_from(self) -> int:
        return 0

    def length(self, epoch: int) -> int:
        self.asked.append(epoch)
        return self.order.length(epoch)

    def at(self, epoch: int, positions: ArrayLike) -> NDArray[np.int64]:
        self.asked.append(epoch)
        return self.order.at(epoch, positions)

    def position_of(self, epoch: int, samples: ArrayLike) -> NDArray[np.int64]:
        return self.order.position_of(epoch, samples)


def test_a_plan_of_very_many_epochs_is_checked_by_a_few_questions() -> None:
    order = Counting(FullShuffle(10, 1))
    epochs = 10**9

    for ranks, drop_last in ((1, False), (2, False), (2, True)):
        plan = AccessPlan(order, 4, epochs, ranks, drop_last=drop_last)
        plan.check_equal_steps()
        assert plan.max_local_batch(0) == 4 // ranks
        assert plan.reads(0) == epochs * (10 // ranks if not drop_last else 4)
        assert plan.first_read_from(0, 0, 0) == (0, 0)
        assert plan.stream(0, 0, 0, 2).size == 2
    assert AccessPlan(order, 4, epochs).uses(0)[0].tolist() == [epochs] * 10
    for wrapped in (Scattered(order), split_locally(AccessPlan(order, 4, 1, 2), np.zeros(10, int)).order):
        AccessPlan(wrapped, 4, epochs, 2).check_equal_steps()

    assert len(order.asked) < 100


@thoroughly
@given(plans())
def test_epochs_are_counted_by_their_lengths(plan: AccessPlan) -> None:
    lengths = [plan.length(epoch) for epoch in range(plan.epochs)]

    assert plan.epochs_by_length() == {
        length: (lengths.index(length), count) for length, count in Counter(lengths).items()
    }
    reads = Counter(read.rank for read in listed(plan))
    assert [plan.reads(rank) for rank in range(plan.ranks)] == [reads[rank] for rank in range(plan.ranks)]


def test_questions_outside_the_plan_are_refused() -> None:
    plan = AccessPlan(Sequential(10), batch_size=4, epochs=2, ranks=3)

    for rank in (-1, 3, 0.0):
        with pytest.raises(ConfigError, match=rf"rank is {rank}; the plan's ranks are \[0, 3\)"):
            plan.local_batch(rank, 0, 0)  # type: ignore[arg-type]
    for epoch in (-1, 2):
        with pytest.raises(ConfigError, match=rf"epoch is {epoch}; the plan's epochs are \[0, 2\)"):
            plan.steps(epoch)
    for step in (-1, 3):
        with pytest.raises(ConfigError, match=rf"step {step} of epoch 0 is outside \[0, 3\)"):
            plan.local_batch(0, 0, step)
    with pytest.raises(ConfigError, match="samples contain 10, which is outside"):
        plan.reader_of(0, [10])
    with pytest.raises(ConfigError, match="positions contain 10, which is outside"):
        plan.sample_at(0, [10])


def test_a_plan_beyond_the_epochs_that_an_order_lists_is_refused() -> None:
    with pytest.raises(ConfigError, match="epoch 2 is asked of an order that lists 2 epochs: list more"):
        AccessPlan(Explicit([[0], [1]], samples=2), batch_size=1, epochs=3)

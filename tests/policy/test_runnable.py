"""What the loader runs of what can be simulated: the same answer for predictions and for the loader itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle
from penstock.policy.loading import Fill, Job, Loading, NotSupported
from penstock.policy.runnable import LOADER_POLICIES, placement_of, why_not_run
from penstock.simulate.policies import POLICY_NAMES, policy_named
from penstock.trace import Kind, read_trace


def machine(*tiers: StorageClass, ranks: int = 1) -> Machine:
    return Machine(SharedStore(Curve.flat(1e8)), (tier("staging"), *tiers), ranks)


def tier(name: str, path: str | None = None) -> StorageClass:
    return StorageClass(
        name, 10**9, 2, Curve.flat(1e9), backend="memory" if path is None else "filesystem", path=path
    )


def test_the_loader_keeps_what_one_rank_reads_most_in_its_own_memory() -> None:
    assert why_not_run(machine(), "frequency") is None
    assert why_not_run(machine(tier("ram")), "frequency") is None
    assert why_not_run(machine(ranks=8), "frequency") is None

    assert "other ranks" in str(why_not_run(machine(tier("ram"), ranks=8), "frequency"))


@pytest.mark.parametrize("disk", [tier("SSD"), tier("nvme"), tier("scratch", path="/scratch")])
def test_a_machine_with_a_disk_is_refused_by_the_loader_for_the_same_reason(
    disk: StorageClass, image_folder: Callable[..., Path]
) -> None:
    on = machine(tier("ram"), disk)

    reason = why_not_run(on, "frequency")

    assert reason is not None
    assert "in memory only" in reason
    with pytest.raises(ConfigError) as refusal:
        Loader(image_folder(), batch_size=2, epochs=1, transforms=[Resize(8), ToTensor()], machine=on)
    assert reason in str(refusal.value)


SAMPLES = 12


def job(ranks: int = 1, tiers: int = 1) -> Job:
    plan = AccessPlan(FullShuffle(SAMPLES, 3), 4, 3, ranks)
    return Job(plan, np.full(SAMPLES, 10**8), machine(*(tier(f"ram{n}") for n in range(tiers)), ranks=ranks))


@dataclass
class Keeps:
    """A policy of one's own, which keeps the given samples on every rank."""

    fills: Sequence[tuple[int, Sequence[int]]] = ()
    options: dict[str, object] = field(default_factory=dict)
    name: str = "mine"

    def prepare(self, job: Job) -> Loading:
        fills = [
            Fill(rank, tier, np.array(samples, np.int64))
            for tier, samples in self.fills
            for rank in job.asking
        ]
        return Loading(fills, **self.options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_the_loader_runs_the_policies_that_are_said_to_run_and_refuses_all_others(name: str) -> None:
    four = job(ranks=4, tiers=2)
    if name in LOADER_POLICIES:
        assert why_not_run(machine(), name) is None
        assert placement_of(policy_named(name), four, 2).tier_of.shape == (SAMPLES,)
    else:
        assert why_not_run(machine(), name) is not None
        with pytest.raises(
            NotSupported, match=f"the loader does not run policy '{name.replace('+', '.')}' yet, which"
        ):
            placement_of(policy_named(name), four, 2)


def test_frequency_keeps_by_rank_what_all_ranks_together_would() -> None:
    four = job(ranks=4, tiers=1)
    alone = Job(four.plan, four.sizes_bytes, four.machine, rank=2)

    for name in ("frequency", "frequency-unordered"):
        by_all, by_one = (placement_of(policy_named(name), each, 2) for each in (four, alone))
        assert by_all.fill_order.tolist() == by_one.fill_order.tolist()
        assert by_all.tier_of.tolist() == by_one.tier_of.tolist()


def test_tiers_are_filled_in_the_order_of_first_use_and_each_in_its_own() -> None:
    two = job(tiers=2)
    first_use = {sample: place for place, sample in reversed(list(enumerate(two.plan.strings()[0].tolist())))}
    listed = sorted(range(SAMPLES), key=first_use.__getitem__)
    fast, slow = listed[0::2], listed[1::2]

    placement = placement_of(Keeps([(1, fast), (2, slow)]), two, 0)
    assert placement.fill_order.tolist() == listed
    assert placement.samples_in(2).tolist() == slow

    backwards = placement_of(Keeps([(1, fast[::-1]), (2, slow)]), two, 0)
    assert backwards.samples_in(1).tolist() == fast[::-1]


@pytest.mark.parametrize(
    ("fills", "expected"),
    [
        ([(2, [0])], "policy 'mine' fills tier 2 of rank 0, and the tiers are 1 to 1"),
        ([(0, [0])], "policy 'mine' fills tier 0 of rank 0, and the tiers are 1 to 1"),
        ([(1, range(11))], r"tier 1 of rank 0 with 1,100,000,000 bytes, and it holds 1,000,000,000"),
        ([(1, range(6)), (1, range(6, 12))], r"with 1,200,000,000 bytes, and it holds"),
        ([(1, [3, 3])], "lets rank 0 keep sample 3 twice"),
        ([(1, [3]), (1, [3])], "lets rank 0 keep sample 3 twice"),
        ([(1, [12])], "samples are 0 to 11"),
        ([(1, [-1])], "samples are 0 to 11"),
    ],
)
def test_a_policy_that_keeps_what_cannot_be_kept_is_named_with_rank_and_tier(
    fills: list[tuple[int, list[int]]], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        placement_of(Keeps(fills), job(), 0)


def test_a_policy_that_answers_something_else_is_refused() -> None:
    class Lists(Keeps):
        def prepare(self, job: Job) -> Loading:
            return [1]  # type: ignore[return-value]

    with pytest.raises(ConfigError, match="policy 'mine' prepared a list: return a penstock"):
        placement_of(Lists(), job(), 0)


def read_by(loader: Loader, trace: Path) -> list[int]:
    """Return what two epochs read from the source."""
    with loader:
        for _ in range(2):
            for _ in loader:
                pass
    recorded = read_trace(trace)
    reads = recorded.spans[recorded.spans["kind"] == Kind.READ]
    groups = (recorded.ids.get((0, int(read["flow"])), read["sample"]) for read in reads)
    return [int(sample) for group in groups for sample in np.atleast_1d(group)]


@pytest.mark.parametrize(
    ("policy", "kept"), [("staging", []), ("frequency", range(12)), (Keeps([(1, [4, 2])]), [2, 4])]
)
def test_a_policy_by_name_or_ones_own_runs_and_is_predicted(
    policy: str | Keeps, kept: Sequence[int], image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    lines: list[str] = []
    loader = Loader(
        image_folder(),
        batch_size=2,
        epochs=2,
        transforms=[Resize(8), ToTensor()],
        policy=policy,
        machine=machine(tier("ram")),
        trace=tmp_path / "trace",
        report=lines.append,
    )
    predicted = loader.predict(step_seconds=0.01).spans
    read = read_by(loader, tmp_path / "trace")

    # A sample that the next epoch needs while it is on its way is read once, kept or not.
    reads = Counter(read)
    assert sorted(reads) == list(range(12))
    assert all(reads[sample] == 1 for sample in kept)
    for count in (reads.total(), predicted["samples"][predicted["kind"] == Kind.READ].sum()):
        assert 12 <= count <= 24 - len(kept)
        assert (count > 12) == (len(kept) < 12)
    name = policy if isinstance(policy, str) else policy.name
    assert read_trace(tmp_path / "trace").meta["policy"] == name
    assert (f"(policy {name})" in lines[1]) == bool(kept)


def test_what_is_no_policy_is_refused_by_name(image_folder: Callable[..., Path]) -> None:
    def load(policy: Any, source: Any = None) -> Loader:
        changes = () if source else (Resize(8), ToTensor())
        return Loader(source or image_folder(), batch_size=2, epochs=1, transforms=changes, policy=policy)

    with pytest.raises(ConfigError, match="policy 'frequent' is not known; 'frequency' is meant, perhaps"):
        load("frequent")
    for wrong in (Keeps, 3, None):
        with pytest.raises(
            ConfigError, match=r"policy is .*; it is a name, such as 'frequency', or an object"
        ):
            load(wrong)
    with pytest.raises(NotSupported, match="policy 'cover' yet, which hands samples from rank to rank"):
        load("cover")
    with pytest.raises(ConfigError, match="policy is 'staging', but the data set list reads by itself"):
        load("staging", [np.zeros(3)])

"""What the loader runs of what can be simulated: the same answer for predictions and for the loader itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import AccessPlan, FullShuffle
from penstock.plan.orders import ENDLESS
from penstock.plan.recorded import read_trace
from penstock.policy.loading import Fill, Job, Loading, LoadingPolicy, NotSupported
from penstock.policy.push import decide_push
from penstock.policy.runnable import LOADER_POLICIES, placement_of, prepared, shared_by, why_not_run
from penstock.simulate.policies import POLICY_NAMES, policy_named
from penstock.trace import Kind
from penstock.trace.schema import SOURCE


def machine(*tiers: StorageClass, ranks: int = 1) -> Machine:
    staging = replace(tier("staging"), capacity_bytes=10**10)
    return Machine(SharedStore(Curve.flat(1e8)), (staging, *tiers), ranks)


def tier(name: str, path: str | None = None) -> StorageClass:
    return StorageClass(
        name, 10**9, 2, Curve.flat(1e9), backend="memory" if path is None else "filesystem", path=path
    )


SAMPLES = 12


def job(ranks: int = 1, tiers: int = 1, on: Machine | None = None, sample_bytes: int = 10**8) -> Job:
    on = machine(*(tier(f"ram{n}") for n in range(tiers)), ranks=ranks) if on is None else on
    plan = AccessPlan(FullShuffle(SAMPLES, 3), 4, 3, on.ranks)
    return Job(plan, np.full(SAMPLES, sample_bytes), on)


def reason_of(policy: LoadingPolicy, job: Job) -> str | None:
    """Return why the loader does not run what a policy decides, or why it decides nothing."""
    try:
        return why_not_run(policy, prepared(policy, job), job)
    except NotSupported as error:
        return str(error)


def test_the_loader_keeps_what_one_rank_reads_most_in_its_own_memory() -> None:
    frequency = policy_named("frequency")

    assert reason_of(frequency, job(tiers=0)) is None
    assert reason_of(frequency, job(tiers=1)) is None
    assert reason_of(frequency, job(tiers=0, ranks=4)) is None

    assert "other ranks" in str(reason_of(frequency, job(tiers=1, ranks=4)))
    assert reason_of(policy_named("frequency-alone"), job(tiers=1, ranks=4)) is None


def test_a_policy_of_ones_own_that_fills_each_ranks_memory_from_the_store_is_one_that_the_loader_runs() -> (
    None
):
    keeps = Keeps([(1, [1, 2, 3])])

    assert reason_of(keeps, job()) is None
    assert reason_of(keeps, job(ranks=4)) is None
    reading_peers = Keeps([(1, [1, 2, 3])], {"stages_from_peers": True})
    assert "other ranks" in str(reason_of(reading_peers, job(ranks=4)))
    assert reason_of(reading_peers, job()) is None
    assert reason_of(Keeps(options={"stages": False}), job()) == (
        "the loader does not run policy 'mine' yet, which stages nothing ahead"
    )


@pytest.mark.parametrize("name", LOADER_POLICIES)
def test_a_staging_buffer_without_space_for_three_batches_is_refused_in_the_words_of_the_loader(
    name: str, image_folder: Callable[..., Path]
) -> None:
    """The store's samples are of 10 bytes; a batch of 4 takes 40."""
    staging = replace(tier("staging"), capacity_bytes=3 * 40 + 2 * 10)

    enough, too_small = (
        reason_of(
            policy_named(name),
            job(on=Machine(SharedStore(Curve.flat(1e8)), (buffer, tier("ram"))), sample_bytes=10),
        )
        for buffer in (staging, replace(staging, capacity_bytes=3 * 40 + 2 * 10 - 1))
    )

    words = (
        r"{} is \d+ B; 3 batch slots of .*, two samples of up to .* in passing.* need .*: give more, or make"
    )
    assert enough is None
    assert re.match(words.format("storage 'staging'"), str(too_small))
    with pytest.raises(ConfigError, match=words.format("memory")):
        Loader(image_folder(), batch_size=2, epochs=1, transforms=[Resize(8), ToTensor()], memory=100)


@pytest.mark.parametrize("disk", [tier("SSD"), tier("nvme")])
def test_a_disk_that_is_in_memory_by_its_backend_can_be_asked_about_and_not_run_on(
    disk: StorageClass, image_folder: Callable[..., Path]
) -> None:
    on = machine(tier("ram"), disk)

    assert reason_of(policy_named("frequency"), job(on=on)) is None
    with pytest.raises(
        ConfigError, match=f"'{disk.name}' is a disk by its name, and in memory by its backend"
    ):
        Loader(image_folder(), batch_size=2, epochs=1, transforms=[Resize(8), ToTensor()], machine=on)


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


@for_each("name", POLICY_NAMES)
def test_the_loader_runs_the_policies_that_are_said_to_run_and_refuses_all_others(name: str) -> None:
    four = job(ranks=4, tiers=2)
    is_run_alone = name in LOADER_POLICIES or name == "first-reader"
    assert is_run_alone == (reason_of(policy_named(name), job(tiers=2)) is None)
    if name in LOADER_POLICIES:
        assert placement_of(policy_named(name), four, 2).tier_of.shape == (SAMPLES,)
    else:
        with pytest.raises(
            NotSupported, match=f"the loader does not run policy '{name.replace('+', '.')}' yet, which"
        ):
            placement_of(policy_named(name), four, 2)


def test_frequency_keeps_by_rank_what_all_ranks_together_would() -> None:
    four = job(ranks=4, tiers=1)
    alone = Job(four.plan, four.sizes_bytes, four.machine, rank=2)

    for name in ("frequency", "frequency-alone", "frequency-unordered"):
        by_all, by_one = (placement_of(policy_named(name), each, 2) for each in (four, alone))
        assert by_all.fill_order.tolist() == by_one.fill_order.tolist()
        assert by_all.tier_of.tolist() == by_one.tier_of.tolist()


@for_each("name", ["first-reader", "cover", "hash-home", "frequency"])
def test_ranks_that_share_keep_as_much_as_each_of_them_has(name: str) -> None:
    size = 10**8
    tiers_bytes = {0: [4 * size, 2 * size], 1: [size, size], 2: [2 * size, 1]}
    same = job(on=machine(tier("ram"), tier("more"), ranks=3), sample_bytes=size)
    unequal = Job(same.plan, same.sizes_bytes, same.machine, sharing=range(3), tiers_bytes=tiers_bytes)

    loading = prepared(policy_named(name), unequal)

    kept = Counter[tuple[int, int]]()
    for fill in loading.fills:
        kept[fill.rank, fill.tier] += fill.samples.size
    assert +kept == {(0, 1): 4, (0, 2): 2, (1, 1): 1, (1, 2): 1, (2, 1): 2}
    assert unequal.capacities_bytes() == [size, 1], "what a policy of one's own may take all to have"


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


@for_each(
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


def test_a_policy_that_answers_for_other_ranks_alone_is_named_with_both() -> None:
    all_ranks = job(ranks=4)
    asked_for_two = Job(all_ranks.plan, all_ranks.sizes_bytes, all_ranks.machine, rank=2)

    class Other:
        name = "other"

        def __init__(self, *ranks: int) -> None:
            self.ranks = ranks

        def prepare(self, job: Job) -> Loading:
            return Loading([Fill(rank, 1, np.arange(2)) for rank in self.ranks])

    with pytest.raises(
        ConfigError,
        match="policy 'other' was asked what rank 2 keeps and fills tier 1 of rank 0, 3 alone: answer for",
    ):
        placement_of(Other(0, 3), asked_for_two, 2)
    assert placement_of(Other(0, 1, 2, 3), asked_for_two, 2).fill_order.tolist() == [0, 1]
    assert placement_of(Other(), asked_for_two, 2).fill_order.size == 0


@for_each("ranks", [1, 2, 3])
@for_each("tier_number", [1, 2])
def test_hits_may_claim_no_more_than_a_tier_holds_at_one_time(ranks: int, tier_number: int) -> None:
    """Push decides for tiers of 300 bytes; by the obvious count it takes some less, which is what a tier must hold."""
    plan = AccessPlan(FullShuffle(60, ranks), 6, 5, ranks)
    sizes = np.random.default_rng(ranks).integers(10, 40, 60)
    hits = [decide_push(plan, rank, sizes, [300, 300]).tiers for rank in range(ranks)]
    needed = [most_waiting_bytes(plan, hits, sizes, rank, tier_number) for rank in range(ranks)]
    worst = int(np.argmax(needed))

    def prepare(capacity_bytes: int) -> Loading:
        tiers = [replace(tier(f"tier {n}"), capacity_bytes=300) for n in (1, 2)]
        tiers[tier_number - 1] = replace(tiers[tier_number - 1], capacity_bytes=capacity_bytes)
        return prepared(Keeps(options={"hits": hits}), Job(plan, sizes, machine(*tiers, ranks=ranks)))

    assert 250 < max(needed) <= 300
    assert prepare(max(needed)).hits is hits
    with pytest.raises(
        ConfigError,
        match=f"policy 'mine' has hits by which .* bytes wait in tier {tier_number} of rank {worst} before",
    ):
        prepare(max(needed) - 1)


def most_waiting_bytes(
    plan: AccessPlan, hits: Sequence[NDArray[np.int8]], sizes: NDArray[np.int64], rank: int, tier: int
) -> int:
    """Go through all steps: what a read of a later step finds, and an earlier step of any rank has read, waits."""
    steps = [
        plan.local_batch(each, epoch, step).tolist()
        for epoch in range(plan.epochs)
        for step in range(plan.steps(epoch))
        for each in range(plan.ranks)
    ]
    batches = [steps[begin : begin + plan.ranks] for begin in range(0, len(steps), plan.ranks)]
    at, waits = 0, []
    for step, batch in enumerate(batches):
        for sample in batch[rank]:
            if hits[rank][at] == tier:
                before = max(s for s in range(step) if any(sample in each for each in batches[s]))
                waits.append((before, step, int(sizes[sample])))
            at += 1
    return max(
        sum(nbytes for before, until, nbytes in waits if before < step <= until)
        for step in range(len(batches))
    )


def test_hits_cannot_claim_what_no_rank_has_read_before() -> None:
    one = job()
    first = int(one.strings[0][0])
    hits = [np.full(one.strings[0].size, SOURCE, np.int8)]
    hits[0][0] = 1

    with pytest.raises(
        ConfigError,
        match=f"policy 'mine' lets rank 0 find sample {first} in tier 1 at its read 0, and no rank has",
    ):
        prepared(Keeps(options={"hits": hits}), one)


@pytest.mark.parametrize(
    ("fills", "kind", "said"),
    [([(1, "not numbers")], ValueError, "not numbers"), ([("1", [3])], ConfigError, "tier of a Fill is '1'")],
)
def test_an_error_in_a_policys_own_code_says_whose_it_is_and_what_was_asked(
    fills: Any, kind: type[Exception], said: str, image_folder: Callable[..., Path]
) -> None:
    with pytest.raises(kind, match=said) as raised:
        Loader(
            image_folder(), batch_size=2, epochs=1, transforms=[Resize(8), ToTensor()], policy=Keeps(fills)
        )

    assert raised.value.__notes__ == [
        "while policy 'mine' decided for rank 0 of 1 what is kept where (prepare)"
    ]


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
    (said,) = [line for line in lines if f"policy {name}" in line]
    assert said.endswith(f"for later epochs (policy {name})" if kept else f"; policy {name}")


def test_a_run_without_end_chooses_by_its_first_epochs_and_drops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("homes", "placement"):
        monkeypatch.setattr(f"penstock.policy.{module}._EPOCHS_COUNTED", 32)
    bounded = job(ranks=2)
    plan = AccessPlan(bounded.plan.order, 4, ENDLESS, 2)
    endless = Job(plan, bounded.sizes_bytes, bounded.machine)
    with pytest.raises(NotSupported, match=r"frequency-cleanup.*a run without end"):
        placement_of(policy_named("frequency-cleanup"), endless, 0)
    assert placement_of(policy_named("frequency-unordered"), endless, 0).fill_order.size
    for name in ("cover", "hash-home"):
        shared = shared_by(
            policy_named(name), Job(plan, bounded.sizes_bytes, bounded.machine, sharing=(0, 1))
        )
        assert sorted(np.concatenate([kept.samples for kept in shared.kept]).tolist()) == [*range(SAMPLES)]


def test_what_is_no_policy_is_refused_by_name(image_folder: Callable[..., Path]) -> None:
    def load(policy: Any, source: Any = None) -> Loader:
        changes = () if source else (Resize(8), ToTensor())
        return Loader(source or image_folder(), batch_size=2, epochs=1, transforms=changes, policy=policy)

    with pytest.raises(ConfigError, match="policy 'frequent' is not known; 'frequency' is meant, perhaps"):
        load("frequent")
    named_alike = Keeps([(1, [1])])
    named_alike.name = "frequency"
    with pytest.raises(ConfigError, match="has the name of another, 'frequency': give it one of its own"):
        load(named_alike)
    for wrong in (Keeps, type("Named", (Keeps,), {"name": "frequency"}), 3):
        with pytest.raises(
            ConfigError, match=r"policy is .*; it is a name, such as 'frequency', or an object"
        ):
            load(wrong)
    with pytest.raises(NotSupported, match="policy 'cover' yet, which hands samples from rank to rank"):
        load("cover")
    with pytest.raises(ConfigError, match="policy is 'staging', but the data set list reads by itself"):
        load("staging", [np.zeros(3)])

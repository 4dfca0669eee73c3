"""A sweep's points, what is computed of them, and what is not computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.for_each import for_each

from penstock.errors import ConfigError
from penstock.machine import Curve, Machine, Rate, SharedStore, StorageClass
from penstock.measure import sweep as sweeps
from penstock.measure.sweep import (
    LOWER_BOUND,
    Finished,
    Outcome,
    Point,
    Sweep,
    Task,
    Work,
    model_digest,
    run_sweep,
    task_keys,
)
from penstock.policy.forms import CROP_SHARE, CropForm
from penstock.policy.loading import LowerBound
from penstock.simulate.scenario import Scenario, scenario_named
from penstock.simulate.sizes import SizeDistribution, SizesOfFolder

GB = 10**9
SCENARIO = scenario_named("scenario1")


def in_turn(tasks: Sequence[Task], work: Callable[[Task], Outcome]) -> Finished:
    for task in tasks:
        yield task, work(task)


@dataclass
class Kept:
    """A keeper that forgets with the process."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def kept(self) -> dict[str, Outcome]:
        return dict(self.outcomes)

    def keep(self, key: str, task: Task, outcome: Outcome) -> None:
        self.outcomes[key] = outcome


@dataclass
class Model:
    """Says of every scenario how much it could hold, and remembers what it was asked."""

    asked: list[tuple[Scenario, str]] = field(default_factory=list)

    def __call__(self, scenario: Scenario, policy: str) -> Outcome:
        self.asked.append((scenario, policy))
        if policy == "refuses":
            raise ConfigError("too small for this policy")
        if policy == "breaks":
            raise ZeroDivisionError("a bug")
        if policy == "stops":
            raise KeyboardInterrupt
        return Outcome(
            "done", run_seconds=float(sum(tier.capacity_bytes for tier in scenario.machine.storage))
        )


def test_every_size_is_tried_with_every_other_and_the_bound_once_per_number_of_ranks() -> None:
    sweep = Sweep(
        SCENARIO, ("frequency", "naive"), ranks=(4, 2), memory_bytes=(0, GB), local_disk_bytes=(0, 5 * GB)
    )

    points, tasks = sweep.points, sweep.tasks

    assert len(points) == 2 * 2 * 2
    assert points == sorted(points)
    assert {point.staging_bytes for point in points} == {1024 * 10**6}
    bounds = [task for task in tasks if task.policy == LOWER_BOUND]
    assert [task.point for task in bounds] == [Point(n, 1024 * 10**6, 0, 0) for n in (2, 4)]
    assert len(tasks) == 2 + 2 * len(points)


def test_what_is_not_varied_stays_as_the_scenario_has_it() -> None:
    (point,) = Sweep(SCENARIO, ("frequency",)).points

    assert point == Point(4, 1024 * 10**6, 51_200 * 10**6, 102_400 * 10**6)
    assert Sweep(SCENARIO, ("frequency",)).scenario_at(point) == SCENARIO


def _slow_decoding(**changes: Any) -> Scenario:
    """400 samples of 10 bytes at 100 bytes/s, three epochs, all of them kept; one thread decodes at 100 bytes/s."""
    classes = (
        StorageClass("staging", 800, 1, Curve.flat(1e12)),
        StorageClass("memory", 100_000, 1, Curve.flat(1e12)),
    )
    on = Machine(
        SharedStore(Curve.flat(100.0)), classes, preprocess_bytes_per_second=100.0, compute=Rate(1e9)
    )
    scenario = Scenario("small", on, SizeDistribution("constant", 400, (("loc", 10),)), 20, 3)
    return replace(scenario, **changes)


def test_readers_do_not_decode() -> None:
    """Decoding takes 3 x 40 s; a thread that read as well would need 40 s more in the first epoch."""
    sweep = Sweep(_slow_decoding(), ("frequency",))
    outcome = Work(sweep, sweeps.predict_loading, model_digest())(sweep.tasks[-1])

    assert outcome.run_seconds == pytest.approx(3 * 40, rel=0.02)
    assert outcome.stall_seconds == pytest.approx(3 * 40, rel=0.02)
    assert outcome.store_bytes == 400 * 10
    assert outcome.store_reads_share is not None
    # Some are in memory before their first use; one is on its way when the next epoch wants it as well.
    assert 0.3 < outcome.store_reads_share <= 401 / 1200


def test_what_is_kept_as_pixels_is_not_decoded_again() -> None:
    """An epoch takes 40 s to decode. Every other sample is decoded in an epoch for that and the next one: 0.4 more."""
    scenario = _slow_decoding()

    def run_seconds(form: CropForm | None, on: Scenario = scenario) -> float | None:
        sweep = Sweep(on, ("frequency",), form=form)
        (found,) = [
            outcome
            for task, outcome in run_sweep(sweep, in_turn, Kept()).items()
            if task.policy == "frequency"
        ]
        return found.run_seconds

    one_each, of_two_epochs = CropForm(25), CropForm(25, 2)
    assert run_seconds(one_each) == pytest.approx(40, rel=0.02)
    expected = 40 * (1 + 0.5 * CROP_SHARE) + 20 * (1 + CROP_SHARE) + 20
    assert run_seconds(of_two_epochs) == pytest.approx(expected, rel=0.02)
    assert run_seconds(of_two_epochs, scenario.with_ranks(2)) is None
    keys = [
        set(task_keys(Sweep(scenario, ("frequency",), form=form), "this").values())
        for form in (None, one_each)
    ]
    assert not keys[0] & keys[1]


def test_ranks_share_the_store_and_decode_each_for_itself() -> None:
    """Each of two decodes half of the 4,000 bytes of an epoch, at 100 bytes/s, which the store gives both together."""
    scenario = _slow_decoding()
    without = replace(scenario.machine, storage=scenario.machine.storage[:1], ranks=2)
    sweep = Sweep(replace(scenario, machine=without), ("staging",), ranks=(2,))
    outcome = Work(sweep, sweeps.predict_loading, model_digest())(sweep.tasks[-1])

    assert outcome.run_seconds == pytest.approx(3 * 40, rel=0.02)
    # What the next epoch needs while it is on its way is read once.
    assert outcome.store_bytes == pytest.approx(12_000, rel=0.01)
    assert outcome.store_reads_share == 1.0


def test_a_disk_beside_memory_makes_no_run_longer() -> None:
    scenario = _slow_decoding()
    disks = Sweep(scenario, ("frequency",), local_disk_bytes=(0, 100_000), local_disk_bytes_per_second=1e12)
    found = run_sweep(disks, in_turn, Kept())
    without, with_disk = (found[task].run_seconds for task in disks.tasks if task.policy != LOWER_BOUND)

    assert without is not None
    assert with_disk is not None
    assert with_disk <= 1.01 * without


def test_a_size_of_zero_leaves_the_tier_out() -> None:
    sweep = Sweep(SCENARIO, ("frequency",), memory_bytes=(0, GB), local_disk_bytes=(0, GB))

    names = [[tier.name for tier in sweep.scenario_at(point).machine.storage] for point in sweep.points]

    assert names == [["staging"], ["staging", "ssd"], ["staging", "ram"], ["staging", "ram", "ssd"]]


def test_other_ranks_and_sizes_change_nothing_else() -> None:
    point = Point(8, 2 * GB, 3 * GB, 5 * GB)

    scenario = Sweep(SCENARIO, ("frequency",)).scenario_at(point)

    assert scenario.machine.ranks == 8
    assert [tier.capacity_bytes for tier in scenario.machine.storage] == [2 * GB, 3 * GB, 5 * GB]
    assert scenario == replace(
        SCENARIO,
        machine=replace(
            SCENARIO.machine,
            ranks=8,
            storage=tuple(
                replace(tier, capacity_bytes=size)
                for tier, size in zip(SCENARIO.machine.storage, (2 * GB, 3 * GB, 5 * GB), strict=True)
            ),
        ),
    )


def test_a_disk_that_the_scenario_does_not_have_needs_to_be_told_how_fast_it_is() -> None:
    bare = replace(SCENARIO, machine=replace(SCENARIO.machine, storage=SCENARIO.machine.storage[:1]))
    with pytest.raises(
        ConfigError, match=r"scenario1 has no storage class named ssd, nvme, disk.*--local-disk-read"
    ):
        Sweep(bare, ("frequency",), local_disk_bytes=(0, GB))
    with pytest.raises(ConfigError, match="leave --local-disk-read out"):
        Sweep(bare, ("frequency",), local_disk_bytes_per_second=1e9)

    sweep = Sweep(
        bare,
        ("frequency",),
        memory_bytes=(2 * GB,),
        local_disk_bytes=(GB,),
        local_disk_bytes_per_second=500e6,
    )
    staging, ram, ssd = sweep.scenario_at(sweep.points[0]).machine.storage

    assert ram == replace(staging, name="ram", capacity_bytes=2 * GB)
    assert (ssd.name, ssd.capacity_bytes, ssd.read) == ("ssd", GB, Curve.flat(500e6))


def test_a_disk_may_be_another_one_than_the_scenarios() -> None:
    sweep = Sweep(SCENARIO, ("frequency",), local_disk_bytes_per_second=100e6)

    assert sweep.scenario_at(sweep.points[0]).machine.storage[2].read == Curve.flat(100e6)


@pytest.mark.parametrize(
    ("values", "said"),
    [({"ranks": (2, 2)}, "ranks tries 2 twice"), ({"memory_bytes": ()}, "memory_bytes has no value")],
)
def test_a_sweep_that_tries_nothing_or_twice_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Sweep(SCENARIO, ("frequency",), **values)


@for_each("values", [(0, 1, 0, 0), (1, 0, 0, 0), (1, 1, -1, 0), (1, 1, 0, True), (1, 1.5, 0, 0)])
def test_a_point_that_is_no_machine_is_refused(values: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="integer of at least"):
        Point(*values)


# What comes of a task


@pytest.fixture
def _any_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policies of these tests are names that the model knows."""
    monkeypatch.setattr(sweeps, "find_policy", lambda _name: LowerBound())


def test_what_a_policy_cannot_run_is_a_result_and_a_fault_is_one_too() -> None:
    work = Work(Sweep(SCENARIO, ("refuses", "breaks")), Model(), model_digest())
    point = Point(4, GB, GB, GB)

    refused, broken = work(Task(point, "refuses")), work(Task(point, "breaks"))

    assert (refused.status, refused.reason) == ("not supported", "too small for this policy")
    assert broken.status == "failed"
    assert broken.reason.startswith("ZeroDivisionError: a bug (test_sweep.py, line ")
    assert min(refused.took_seconds, broken.took_seconds) > 0


def test_a_split_that_is_not_for_so_many_ranks_is_a_result() -> None:
    work = Work(Sweep(replace(SCENARIO, split=(1, 1, 1, 1)), ("any",)), Model(), model_digest())

    outcome = work(Task(Point(2, GB, GB, GB), "any"))

    assert outcome.status == "not supported"
    assert "4 shares for 2 ranks" in outcome.reason


def test_another_version_of_the_model_does_not_add_its_figures() -> None:
    model = Model()

    outcome = Work(Sweep(SCENARIO, ("any",)), model, "of last year")(Task(Point(4, GB, GB, GB), "any"))

    assert outcome.status == "failed"
    assert "not the one that began the sweep" in outcome.reason
    assert model.asked == []


@pytest.mark.usefixtures("_any_policy")
def test_finished_tasks_are_not_computed_again() -> None:
    sweep, kept, model = Sweep(SCENARIO, ("one", "two"), memory_bytes=(GB, 2 * GB)), Kept(), Model()
    told: list[int] = []

    first = run_sweep(sweep, in_turn, kept, evaluate=model, done=told.append)
    asked = len(model.asked)
    again = run_sweep(sweep, in_turn, kept, evaluate=model, done=told.append)

    assert list(first) == sweep.tasks
    assert first == again
    assert len(model.asked) == asked == len(sweep.tasks) == 5
    assert told == [0, 1, 2, 3, 4, 5, 5]


@pytest.mark.usefixtures("_any_policy")
def test_a_wider_sweep_computes_only_what_is_new() -> None:
    kept, model = Kept(), Model()
    run_sweep(Sweep(SCENARIO, ("one",), memory_bytes=(GB,)), in_turn, kept, evaluate=model)
    before = len(model.asked)

    run_sweep(Sweep(SCENARIO, ("one",), memory_bytes=(GB, 2 * GB)), in_turn, kept, evaluate=model)

    assert len(model.asked) == before + 1


@pytest.mark.usefixtures("_any_policy")
def test_an_interruption_keeps_what_was_finished_and_ends_the_runner() -> None:
    ended = []

    def closing(tasks: Sequence[Task], work: Callable[[Task], Outcome]) -> Finished:
        try:
            yield from in_turn(tasks, work)
        finally:
            ended.append(True)

    kept, model = Kept(), Model()
    sweep = Sweep(SCENARIO, ("one", "stops"))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, closing, kept, evaluate=model)

    assert ended == [True]
    assert len(kept.outcomes) == 2  # the bound and the policy before


@pytest.mark.usefixtures("_any_policy")
def test_whatever_changes_an_outcome_changes_its_key(tmp_path: Path) -> None:
    def key(scenario: Scenario = SCENARIO, local_disk_read: float | None = None, model: str = "this") -> str:
        sweep = Sweep(scenario, ("one",), local_disk_bytes_per_second=local_disk_read)
        return task_keys(sweep, model)[Task(sweep.points[0], "one")]

    def of_folder(*sizes: int) -> Scenario:
        return replace(SCENARIO, data=SizesOfFolder("images", np.array(sizes * 100)))

    keys = [
        key(),
        key(replace(SCENARIO, seed=1)),
        key(replace(SCENARIO, epochs=3)),
        key(replace(SCENARIO, drop_last=False)),
        key(replace(SCENARIO, machine=replace(SCENARIO.machine, preprocess_bytes_per_second=1e9))),
        key(local_disk_read=1e8),
        key(of_folder(1, 2)),
        key(of_folder(2, 1)),
        key(model="another"),
    ]

    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_a_policy_of_ones_own_is_computed_again_when_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_policy_of_a_sweep.py").write_text("class Own:\n    name = 'own'\n")
    import own_policy_of_a_sweep  # type: ignore[import-not-found]

    monkeypatch.setattr(sweeps, "find_policy", lambda _name: own_policy_of_a_sweep.Own())
    sweep = Sweep(SCENARIO, ("own",))
    before = task_keys(sweep, "this")

    (tmp_path / "own_policy_of_a_sweep.py").write_text("class Own:\n    name = 'own'  # wiser\n")

    assert all(task_keys(sweep, "this")[task] != key for task, key in before.items())

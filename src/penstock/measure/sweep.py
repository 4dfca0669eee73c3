"""A sweep: one scenario on many machines under several policies, every point a prediction of its own.

A point that a policy cannot run is a result; what was finished before an interruption is not computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Protocol

import penstock
from penstock.errors import ConfigError
from penstock.machine import DISK_NAMES, Curve, Machine, StorageClass
from penstock.measure.own_policy import find_policy
from penstock.policy.forms import CropForm
from penstock.simulate.scenario import Scenario
from penstock.simulate.scheduled import simulate_loading

#: The policy that no other one beats; every sweep runs it once for each number of ranks.
LOWER_BOUND = "lower-bound"
#: What names a storage class as the memory or the disk of the options; the first match counts.
MEMORY_NAMES = ("ram", "memory")
#: Results are kept in 64 bits, sums of two sizes too.
MOST_BYTES = 2**62
#: The parts of the package that decide a prediction, and so the key under which it is kept.
_MODEL = ("errors.py", "units.py", "kernel.py", "trace", "plan", "machine", "policy", "simulate")


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One machine of a sweep.

    ranks: N. staging_bytes: of the staging buffer, at least 1. memory_bytes, local_disk_bytes: of tiers, per rank; 0
    leaves the tier out. Each is at most MOST_BYTES.
    """

    ranks: int
    staging_bytes: int
    memory_bytes: int
    local_disk_bytes: int

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("staging_bytes", 1), ("memory_bytes", 0), ("local_disk_bytes", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; it is an integer of at least {least}")
            if value > MOST_BYTES:
                raise ConfigError(f"{name} is {value:,}, which no machine has: at most {MOST_BYTES:,}")


@dataclass(frozen=True, slots=True)
class Task:
    """What is computed at once: one policy at one point."""

    point: Point
    policy: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task came to.

    status: "done"; "not supported", where the policy cannot run the scenario; "failed", where computing it failed,
        which is tried again the next time.
    run_seconds: of the whole run, all that follows included. initial_stall_seconds: of loading before training.
    stall_seconds, longest_stall_seconds: mean and maximum over the ranks of their waiting.
    store_reads_share: samples consumed that came straight from the shared store, over all. store_bytes: read from it
        over the run by all ranks, for their tiers too.
    took_seconds: that computing it took. reason: why there is no result. why_not_run: why the loader of this version
        does not run it; None where it does, or there is no result.
    """

    status: Literal["done", "not supported", "failed"]
    run_seconds: float | None = None
    initial_stall_seconds: float | None = None
    stall_seconds: float | None = None
    longest_stall_seconds: float | None = None
    store_reads_share: float | None = None
    store_bytes: float | None = None
    took_seconds: float = 0.0
    reason: str = ""
    why_not_run: str | None = None


Evaluate = Callable[[Scenario, str], Outcome]
Finished = Generator[tuple[Task, Outcome], None, None]
#: Called with the tasks and what does one of them; yields each task with its outcome as it finishes, in any order.
#: Closing the generator ends what is under way.
Runner = Callable[[Sequence[Task], Callable[[Task], Outcome]], Finished]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A scenario, and what is varied.

    scenario: all that is not varied; its storage classes named ram (or memory) and ssd (or nvme, disk) are the tiers.
    ranks, staging_bytes, memory_bytes, local_disk_bytes: the values to try, each with each; None keeps the scenario's.
    policies: by name.
    local_disk_bytes_per_second: of the ssd, all its readers together, however many; instead of the scenario's curve, or
        where that has none.
    form: in which memory keeps samples, and disks where that saves more; None as they are stored.
    Raises: ConfigError naming what is missing or tried twice.
    """

    scenario: Scenario
    policies: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    staging_bytes: tuple[int, ...] | None = None
    memory_bytes: tuple[int, ...] | None = None
    local_disk_bytes: tuple[int, ...] | None = None
    local_disk_bytes_per_second: float | None = None
    form: CropForm | None = None

    def __post_init__(self) -> None:
        for name in ("policies", "ranks", "staging_bytes", "memory_bytes", "local_disk_bytes"):
            values = getattr(self, name)
            if values is None:
                continue
            if not values:
                raise ConfigError(f"{name} has no value to try: give at least one")
            for index, value in enumerate(values):
                if value in values[:index]:
                    raise ConfigError(f"{name} tries {value!r} twice: leave one out")
        if self.local_disk_bytes_per_second is not None:
            Curve.flat(self.local_disk_bytes_per_second)  # checks it
        if (
            self.local_disk_bytes
            and any(self.local_disk_bytes)
            and self._disk is None
            and self.local_disk_bytes_per_second is None
        ):
            raise ConfigError(
                f"scenario {self.scenario.name} has no storage class named {', '.join(DISK_NAMES)}, so how fast the "
                "disk reads is not known: give it with --local-disk-read, as in --local-disk-read '500 MB/s'"
            )
        if self.local_disk_bytes_per_second is not None and self._disk is None and not self.local_disk_bytes:
            raise ConfigError(
                f"scenario {self.scenario.name} has no storage class named {', '.join(DISK_NAMES)}: give sizes with "
                "--local-disk, or leave --local-disk-read out"
            )

    @property
    def points(self) -> list[Point]:
        """Every combination, ascending in the order of `Point`'s fields."""
        machine = self.scenario.machine
        own = {
            "ranks": machine.ranks,
            "staging_bytes": machine.storage[0].capacity_bytes,
            "memory_bytes": 0 if self._memory is None else self._memory.capacity_bytes,
            "local_disk_bytes": 0 if self._disk is None else self._disk.capacity_bytes,
        }
        varied = [sorted(getattr(self, name) or (own[name],)) for name in own]
        return [Point(*values) for values in itertools.product(*varied)]

    @property
    def tasks(self) -> list[Task]:
        """Every policy at every point, and the lower bound once for each number of ranks, without tiers."""
        points = self.points
        staging_bytes = max(point.staging_bytes for point in points)
        ranks = sorted({point.ranks for point in points})
        bounds = [Task(Point(each, staging_bytes, 0, 0), LOWER_BOUND) for each in ranks]
        policies = [policy for policy in self.policies if policy != LOWER_BOUND]
        return bounds + [Task(point, policy) for point in points for policy in policies]

    def scenario_at(self, point: Point) -> Scenario:
        """Return the scenario on the point's machine.

        Raises: ConfigError where there can be no such machine, or the scenario's split is not for so many ranks.
        """
        return replace(self.scenario, machine=self._machine_at(point))

    def reads(self, task: Task) -> int:
        """Return how many reads of all ranks are to be predicted for a task; 0 where there is no such machine."""
        try:
            plan = self.scenario_at(task.point).plan()
        except ConfigError:
            return 0
        return 0 if task.policy == LOWER_BOUND else sum(map(plan.reads, range(plan.ranks)))

    def _machine_at(self, point: Point) -> Machine:
        machine = self.scenario.machine
        staging = machine.storage[0]
        tiers = []
        if point.memory_bytes:
            # Memory is memory: where the scenario has no such tier, it reads as the staging buffer does.
            ram = self._memory or replace(staging, name="ram")
            tiers.append(replace(ram, capacity_bytes=point.memory_bytes))
        if point.local_disk_bytes:
            ssd = self._disk
            if ssd is None:
                assert self.local_disk_bytes_per_second is not None, "checked when the sweep was made"
                read = Curve.flat(self.local_disk_bytes_per_second)
                ssd = StorageClass("ssd", point.local_disk_bytes, staging.threads, read)
            elif self.local_disk_bytes_per_second is not None:
                ssd = replace(ssd, read=Curve.flat(self.local_disk_bytes_per_second), write=None)
            tiers.append(replace(ssd, capacity_bytes=point.local_disk_bytes))
        others = [tier for tier in machine.storage[1:] if tier not in (self._memory, self._disk)]
        storage = (replace(staging, capacity_bytes=point.staging_bytes), *tiers, *others)
        return replace(machine, storage=storage, ranks=point.ranks)

    @property
    def _memory(self) -> StorageClass | None:
        return _named(self.scenario.machine, MEMORY_NAMES)

    @property
    def _disk(self) -> StorageClass | None:
        return _named(self.scenario.machine, DISK_NAMES)


def _named(machine: Machine, names: Sequence[str]) -> StorageClass | None:
    tiers = {tier.name.lower(): tier for tier in machine.storage[1:]}
    return next((tiers[name] for name in names if name in tiers), None)


def predict_loading(scenario: Scenario, policy: str, form: CropForm | None = None) -> Outcome:
    """Predict one run; what the sweep of `penstock plan` evaluates. form: as of `simulate_loading`.

    Raises: ConfigError where the policy cannot run the scenario.
    """
    result = simulate_loading(scenario, find_policy(policy), form)
    stall_seconds = result.stall_seconds
    reads = result.reads.sum(axis=0)
    # Of ORIGINS: staged from the store, and store.
    from_store = int(reads[[0, 3]].sum())
    return Outcome(
        "done",
        run_seconds=float(result.run_seconds),
        initial_stall_seconds=float(result.initial_stall_seconds),
        stall_seconds=float(stall_seconds.mean()),
        longest_stall_seconds=float(stall_seconds.max()),
        store_reads_share=from_store / max(1, int(reads.sum())),
        store_bytes=float(result.store_bytes.sum()),
        why_not_run=result.not_runnable_reason,
    )


@dataclass(frozen=True, slots=True)
class Work:
    """Does a task of a sweep, wherever it is sent to."""

    sweep: Sweep
    evaluate: Evaluate
    #: Of the code where the sweep was begun: another machine of a cluster may have another Penstock.
    model: str

    def __call__(self, task: Task) -> Outcome:
        begin = time.perf_counter()
        try:
            if _model_of_this_process() != self.model:
                raise RuntimeError("the Penstock installed here is not the one that began the sweep")
            outcome = self.evaluate(self.sweep.scenario_at(task.point), task.policy)
        except ConfigError as error:
            outcome = Outcome("not supported", reason=str(error))
        except Exception as error:
            outcome = Outcome("failed", reason=f"{type(error).__name__}: {error}{_place(error)}")
        return replace(outcome, took_seconds=time.perf_counter() - begin)


def _place(error: Exception) -> str:
    """Say where an error of ours came from: a row of a table has no traceback."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return ""
    return f" ({Path(traceback.tb_frame.f_code.co_filename).name}, line {traceback.tb_lineno})"


class Keeper(Protocol):
    """Where finished tasks outlive the process."""

    def kept(self) -> dict[str, Outcome]:
        """Return what was kept before, by key."""
        ...

    def keep(self, key: str, task: Task, outcome: Outcome) -> None:
        """Keep one more, durably when this returns."""
        ...


def run_sweep(
    sweep: Sweep,
    run: Runner,
    keeper: Keeper,
    *,
    evaluate: Evaluate | None = None,
    done: Callable[[int], None] = lambda _tasks: None,
) -> dict[Task, Outcome]:
    """Compute what is not kept yet, and keep each task as it finishes.

    evaluate: `predict_loading` in the sweep's form, unless given.
    done: called with how many tasks are done, first how many were kept.
    Returns: every task of the sweep with its outcome, in the sweep's order.
    """
    model = model_digest()
    keys = task_keys(sweep, model)
    kept = keeper.kept()
    outcomes = {task: kept[key] for task, key in keys.items() if key in kept}
    done(len(outcomes))
    pending = [task for task in keys if task not in outcomes]
    if pending:
        with contextlib.closing(
            run(pending, Work(sweep, evaluate or partial(predict_loading, form=sweep.form), model))
        ) as finished:
            for task, outcome in finished:
                keeper.keep(keys[task], task, outcome)
                outcomes[task] = outcome
                done(len(outcomes))
    return {task: outcomes[task] for task in keys}


def task_keys(sweep: Sweep, model: str) -> dict[Task, str]:
    """Return under which key each task is kept: a digest of all that its outcome depends on.

    That is the scenario, the sizes of a folder's files, the point, the policy (the file of one's own too) and the
    code of the model.

    model: its digest, of `model_digest`.
    """
    data = sweep.scenario.data
    sizes = getattr(data, "sizes", None)
    common = {
        "penstock": version("penstock"),
        "model": model,
        "scenario": sweep.scenario.to_toml(),
        "sizes": None if sizes is None else hashlib.sha256(sizes.tobytes()).hexdigest(),
        "local_disk_bytes_per_second": sweep.local_disk_bytes_per_second,
        "form": None if sweep.form is None else asdict(sweep.form),
    }
    base = hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()
    tasks = sweep.tasks
    code = {policy: _policy_digest(policy, sweep.scenario) for policy in {task.policy for task in tasks}}
    return {
        task: hashlib.sha256(
            json.dumps([base, asdict(task), code[task.policy]], sort_keys=True).encode()
        ).hexdigest()
        for task in tasks
    }


def model_digest() -> str:
    """Return a digest of the code that decides a prediction, so that a changed model never reuses old results."""
    package = Path(penstock.__file__).parent
    digest = hashlib.sha256()
    for part in _MODEL:
        place = package / part
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        for file in files:
            digest.update(f"{file.relative_to(package)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _model_of_this_process() -> str:
    """Return the digest as of the first task: what was imported does not change with its file."""
    return model_digest()


def _policy_digest(name: str, scenario: Scenario) -> str | None:
    """Return a digest of the file of a user's own policy; None for ours, which the model's digest covers."""
    file = inspect.getsourcefile(type(find_policy(name)))
    if file is None or Path(file).is_relative_to(Path(penstock.__file__).parent):
        return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()

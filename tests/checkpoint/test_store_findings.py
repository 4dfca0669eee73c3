"""What a store says, and when, where a user gave it what it cannot use or where something is not as it looks."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoint.snapshot_files import opened, same, save_all, training
from tests.for_each import for_each

from penstock.checkpoint import alone
from penstock.checkpoint.saving import BackgroundSave, Saved
from penstock.checkpoint.store import SnapshotStore
from penstock.checkpoint.sync.wire import Refresher
from penstock.checkpoint.tiers import lock
from penstock.errors import ClosedError, ConfigError, DataError, FormatError
from penstock.policy.retention import Keep

# -- Arguments -------------------------------------------------------------------------------------------------


@for_each(
    ("fields", "told"),
    [
        ({"last": "3"}, "last is '3'"),
        ({"last": 2.0}, "last is 2.0"),
        ({"every_steps": 0.5}, "every_steps is 0.5"),
        ({"max_bytes": "much"}, "much"),
        ({"max_bytes": 1e9}, r"max_bytes is 1000000000\.0; .* or text such as \"50 GB\""),
        ({"max_age_seconds": "1 h"}, "max_age_seconds is '1 h'"),
    ],
)
def test_what_to_keep_is_checked_when_it_is_said(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Keep(**fields)


def test_a_step_of_numpys_is_a_step_wherever_one_is_given(folder: Path) -> None:
    """Counters of steps often are: they are saved with the state, as numbers of NumPy."""
    with opened(folder, scheme="complete") as store:
        for step in (1, 2, 3):
            store.save(np.int64(step), training(step)).wait()  # type: ignore[arg-type]
        assert store.restore(np.int64(2)).step == 2  # type: ignore[arg-type]
        assert [one.step for one in store.verify(np.int64(2))] == [2]  # type: ignore[arg-type]
        assert list(store.refresh(np.int64(1), np.int64(2)))  # type: ignore[arg-type]
        assert store.rewind(np.int64(2)) == [3]  # type: ignore[arg-type]
        store.delete(np.int64(1))  # type: ignore[arg-type]
        assert [one.step for one in store.list()] == [2]
        for call in (store.restore, store.verify, store.rewind, store.delete, store.refresh):
            with pytest.raises(ConfigError, match=r"step is '2'; it must be an integer from 0"):
                call("2")  # type: ignore[arg-type]


def test_a_snapshot_of_a_few_bytes_does_not_keep_a_store_from_being_prepared(folder: Path) -> None:
    """It takes more in tables than it has in numbers: that share is not the training's."""
    with opened(folder) as store:
        store.save(1, {"count": np.zeros(1)}).wait()
        needed = store.prepare({"weights": np.zeros(100_000)})
        assert needed.largest_bytes < 1.01 * 800_000


def test_the_most_bytes_to_keep_may_be_given_as_text() -> None:
    assert Keep(max_bytes="50 GB") == Keep(max_bytes=50 * 10**9)
    assert Keep(max_bytes="50 GB").limit_bytes == 50 * 10**9


def test_the_distance_of_baselines_may_be_found_by_the_store(folder: Path) -> None:
    """Of what stays as it is, a difference is always worth it, beyond the ten of the default."""
    state = {"table": np.arange(100_000)}
    with opened(folder, snap_dis="auto", keep=Keep(last=None), codec="balance") as store:
        references = [store.save(step, state).wait().reference_step for step in range(13)]

    assert references == [None, *range(12)]


# -- Small tensors that come and go ----------------------------------------------------------------------------


def with_extra(step: int, *extras: str) -> dict[str, Any]:
    """Return a state of 80 kB that drifts, and some single numbers, as a list of the best models has."""
    drift = np.random.default_rng(step).normal(0, 1e-4, 20_000).astype(np.float32)
    best = {name: np.array([ord(name)], np.float32) for name in extras}
    return {"best": best, "weight": np.linspace(-1, 1, 20_000, dtype=np.float32) + drift, "twin": drift}


@pytest.mark.parametrize(("scheme", "reference"), [("progressive", "memory"), ("chain", "stored")])
def test_a_small_tensor_that_comes_or_goes_starts_no_baseline(
    folder: Path, scheme: str, reference: str
) -> None:
    states = [
        with_extra(step, *extras) for step, extras in enumerate(["a", "ab", "b", "", "ac", "c", "a", "a"])
    ]
    with opened(folder, scheme=scheme, reference=reference, keep=Keep(last=None)) as store:
        saved = [store.save(step, state).wait() for step, state in enumerate(states)]
        whole = sorted(saved, key=lambda one: one.stored_bytes)[-1]

        assert [one.reference_step is None for one in saved] == [True, *[False] * 7]
        assert whole.step == 0
        assert not any(one.note for one in saved)
        for step, state in enumerate(states):
            assert same(store.restore(step).state, state)
            # What is sent to a worker that has another of them, or none.
            for other in (None, 0, 4, 6):
                worker = {"weight": np.zeros(20_000, np.float32), "twin": np.zeros(20_000, np.float32)}
                refresher = Refresher(worker)
                if other is not None:
                    refresher.apply(store.refresh(None, other))
                refresher.apply(store.refresh(other, step))
                assert same(worker, {name: state[name] for name in worker})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"extra": np.ones(100)}, ", baseline: extra is new"),
        ({"weight": np.ones(5)}, ", baseline: weight has another shape, type or part"),
        ({"extra": np.ones(100), "more": np.ones(50)}, ", baseline: extra is new and 1 more changed"),
    ],
)
def test_what_starts_a_baseline_is_told(folder: Path, change: dict[str, Any], told: str) -> None:
    lines: list[str] = []
    with opened(folder, report=lines.append) as store:
        store.save(1, training(1))
        store.save(2, training(2) | change).wait()
        store.save(3, training(3) | {"extra": np.ones(100)})

    assert lines[1].endswith(told)
    assert not lines[0].endswith("new")


# -- Restoring into what is there ------------------------------------------------------------------------------


def of_training(lr: float, seed: int) -> tuple[torch.nn.Linear, torch.optim.Adam]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_what_is_replaced_in_a_state_dict_is_told(folder: Path) -> None:
    lines: list[str] = []
    model, optimizer = of_training(0.5, 0)
    with opened(folder, report=lines.append) as store:
        store.save(3, {"m": model.state_dict(), "o": optimizer.state_dict()}).wait()
        other, other_optimizer = of_training(0.1, 1)
        into = {"m": other.state_dict(), "o": other_optimizer.state_dict()}

        restored = store.restore(into=into)

        assert restored.replaced == ("o/param_groups",)
        assert lines[1:] == [
            "step 3: 1 value of `into` was replaced there: o/param_groups; pass what came from state_dict() on to "
            "load_state_dict()"
        ]
        other_optimizer.load_state_dict(into["o"])
        assert other_optimizer.param_groups[0]["lr"] == 0.5
        assert store.restore(into=into).replaced == ()
    assert len(lines) == 2


def test_what_was_not_loaded_and_not_found_is_told(folder: Path) -> None:
    """An optimizer that has not made a step has nowhere to put its moments."""
    lines: list[str] = []
    model, optimizer = of_training(0.5, 0)
    fresh = torch.optim.Adam(model.parameters(), lr=0.5)
    with opened(folder, report=lines.append) as store:
        store.save(3, {"o": optimizer.state_dict(), "n": 1}).wait()

        with pytest.raises(ConfigError) as refused:
            store.restore(into={"o": fresh.state_dict(), "more": 1})
        restored = store.restore(into={"o": fresh.state_dict(), "more": 1}, strict=False)

    assert repr(restored) == "<Restored step 3: o, more; 7 not loaded, 1 not found>"
    assert lines[1] == (
        "step 3: 7 values of the snapshot were not loaded: o/state/0/step, o/state/0/exp_avg, o/state/0/exp_avg_sq, "
        "o/state/1/step, o/state/1/exp_avg and 2 more; 1 value of `into` was not found in it: more"
    )
    assert str(refused.value) == (
        "`into` and the snapshot of step 3 differ in their names: missing in the snapshot: more; unexpected in the "
        "snapshot: o/state/0/step, o/state/0/exp_avg, o/state/0/exp_avg_sq, o/state/1/step, o/state/1/exp_avg and 2 "
        "more. Nothing was changed. An optimizer has no state before its first step: restore() without `into` and give "
        "it the result by load_state_dict. Else name what to restore, such as only=['model/*'], or give strict=False, "
        "which leaves out what only one of them has"
    )


def test_a_state_into_which_nothing_fits_is_refused(folder: Path) -> None:
    into = {"net": np.zeros(5)}
    with opened(folder) as store:
        store.save(1, {"model": np.ones(5), "n": 1}).wait()

        with pytest.raises(ConfigError, match=r"nothing in `into` .* has model, n, and `into` has net"):
            store.restore(into=into)
        with pytest.raises(ConfigError, match="nothing in `into`"):
            store.restore(into={})

    assert not into["net"].any()


# -- Copies on two tiers ---------------------------------------------------------------------------------------


def two_copies(folder: Path, lines: list[str]) -> SnapshotStore:
    """Return a store of three steps, of which the fast tier and the slow one have each a copy."""
    store = opened(folder / "slow", fast=folder / "fast", report=lines.append)
    for step in (1, 2, 3):
        store.save(step, training(step))
    store.drain()
    lines.clear()
    return store


def break_part(folder: Path, step: int) -> None:
    file = folder / f"step-{step:012d}" / "part-00000.pst"
    data = bytearray(file.read_bytes())
    data[40] ^= 0x10  # within the first block
    file.write_bytes(data)


@pytest.mark.parametrize("tier", ["fast", "slow"])
def test_every_copy_is_verified(folder: Path, tier: str) -> None:
    lines: list[str] = []
    other = {"fast": "slow", "slow": "fast"}[tier]
    with two_copies(folder, lines) as store:
        break_part(folder / tier, 3)

        one, two, three = store.verify()

        assert [each.condition for each in (one, two, three)] == ["intact"] * 3
        assert [each.broken_tiers for each in (one, two, three)] == [(), (), (str(folder / tier),)]
        assert three.why.startswith(f"intact on {folder / other}, damaged on {folder / tier}: ")
        assert same(store.restore().state, training(3))
    told = [line for line in lines if line.startswith("step 3 is read from another copy: ")]
    # The fast copy is the nearest: the other one is not looked at.
    assert len(told) == (tier == "fast")


def test_a_copy_without_a_manifest_is_told_of(folder: Path) -> None:
    lines: list[str] = []
    with two_copies(folder, lines) as store:
        (folder / "fast" / "step-000000000003" / "manifest.json").write_bytes(b"")

        assert same(store.restore().state, training(3))
        assert store.list()[2].broken_tiers == (str(folder / "fast"),)
    assert lines[0].startswith("step 3 is read from another copy: ")


# -- What to do about damage -----------------------------------------------------------------------------------


def test_damage_in_what_a_snapshot_needs_says_so_and_what_to_do(folder: Path) -> None:
    save_all(folder, range(10, 70, 10), snap_dis=3)  # baselines 10 and 40
    break_part(folder, 40)
    store = opened(folder, snap_dis=3)

    with pytest.raises(FormatError, match=r"^step 60 needs step 40: .*step-000000000040/part-") as told:
        store.restore()

    assert str(told.value).endswith("; step 30 is the newest intact one: restore(fallback=True) takes it")
    assert store.restore(fallback=True).step == 30
    assert [one.why[:22] for one in store.verify()[3:]] == [
        f"{folder}"[:22],
        "step 50 needs step 40:",
        "step 60 needs step 40:",
    ]


def test_where_nothing_is_intact_nothing_is_advised(folder: Path) -> None:
    save_all(folder, [1, 2])
    break_part(folder, 1)

    with pytest.raises(FormatError, match="step 2 needs step 1") as told:
        opened(folder).restore()

    assert "fallback" not in str(told.value)


# -- After the end ---------------------------------------------------------------------------------------------


def test_a_closed_store_can_be_read_and_not_written(folder: Path) -> None:
    lines: list[str] = []
    with two_copies(folder, lines) as store:
        pass
    store.close()

    assert [one.step for one in store.list()] == [1, 2, 3]
    assert same(store.restore(2).state, training(2))
    assert all(one.condition == "intact" for one in store.verify())
    assert list(store.refresh(None))
    for write in (
        lambda: store.save(4, {}),
        lambda: store.delete(1),
        lambda: store.rewind(1),
        store.drain,
        lambda: store.prepare({}),
    ):
        with pytest.raises(
            ClosedError, match=r"^the snapshot store .* was closed: it can still be read; open another"
        ):
            write()


# -- Steps -----------------------------------------------------------------------------------------------------


def test_a_lower_step_than_the_one_saved_last_is_reported_once_with_what_restore_returns(
    folder: Path,
) -> None:
    lines: list[str] = []
    save_all(folder, [7, 9])
    with opened(folder, report=lines.append) as store:
        for step in (5, 6):
            store.save(step, training(step)).wait()
        assert store.restore().step == 6

    (warning,) = [line for line in lines if "restore()" in line]
    assert re.match(
        r"step 5 is saved after step 9: restore\(\) returns .* step 5, and restore\(9\) ", warning
    )


def test_a_training_that_went_back_by_rewind_is_not_warned(folder: Path) -> None:
    lines: list[str] = []
    save_all(folder, [4, 9])
    with opened(folder, report=lines.append) as store:
        store.rewind(4)
        store.save(5, training(5)).wait()

    assert not [line for line in lines if "restore()" in line]


@pytest.mark.parametrize("step", [np.int64(77), torch.tensor(77), 2**63 - 1])
def test_a_step_may_be_any_whole_number(folder: Path, step: Any) -> None:
    with opened(folder) as store:
        assert store.save(step, training(1)).wait().step == int(step)

        assert [one.step for one in store.list()] == [int(step)]
        assert type(store.restore().step) is int


@for_each("step", [np.bool_(True), True, 1.0, np.float32(3), "3", None, 2**63, 10**19, -1])
def test_a_step_that_is_none_is_refused(folder: Path, step: Any) -> None:
    with (
        opened(folder) as store,
        pytest.raises(ConfigError, match=r"step is .*; it must be an integer from 0"),
    ):
        store.save(step, training(1)).wait()


# -- The folder ------------------------------------------------------------------------------------------------


def test_a_store_that_is_only_read_makes_no_folder(folder: Path) -> None:
    with opened(folder, fast=folder.with_name("fast")) as store:
        assert store.list() == store.verify() == []
        with pytest.raises(ConfigError, match=f"^no snapshot is there: {folder} does not exist"):
            store.restore()
        with pytest.raises(ConfigError, match=f"there is no snapshot of step 3: {folder} does not exist"):
            store.restore(3)

    assert not list(folder.parent.iterdir())


def test_a_file_system_of_the_kernel_is_no_place_for_snapshots() -> None:
    """Found when the store is opened, not after the first thousand steps; it has no space to free, either."""
    with pytest.raises(DataError, match=r"^/proc takes no folders \(.*\): keep snapshots on a disk"):
        opened(Path("/proc/penstock/runs"))


def test_a_file_system_that_does_not_say_how_large_it_is_is_written_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As file systems in user space may: nothing is known of its space, so nothing is refused."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    lines: list[str] = []
    with opened(folder, report=lines.append) as store:
        assert not list(folder.parent.iterdir())
        store.save(1, training(1)).wait()
        same(store.restore().state, training(1))

    assert not any("free" in line for line in lines)


def test_a_snapshot_that_somebody_removed_is_gone(folder: Path) -> None:
    with opened(folder, keep=Keep(last=1), scheme="complete") as store:
        store.save(1, training(1)).wait()
        shutil.rmtree(folder / "step-000000000001")
        store.save(2, training(2)).wait()

        assert [one.step for one in store.list()] == [2]


# -- What is reported ------------------------------------------------------------------------------------------


def test_the_wait_for_the_save_before_is_told() -> None:
    saved = Saved(
        20, "u", 10, 100, 50, 0.490, 2.0, "runs/a", blocked_by_previous_seconds=0.483, previous_step=10
    )

    assert str(saved).startswith("step 20: blocked 490 ms (483 ms for step 10), durable after 2 s")


def test_what_a_save_waits_for_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save of step 1 is durable no sooner than the training waits for it."""
    may_end = threading.Event()
    told: list[str] = []

    def report(line: str) -> None:
        may_end.wait()
        told.append(line)

    with opened(folder, report=report) as store:
        store.save(1, training(1))
        monkeypatch.setattr(BackgroundSave, "joined", _opening(may_end, BackgroundSave.joined))
        second = store.save(2, training(2)).wait()
        third = store.save(3, training(3)).wait()

    assert second.previous_step == 1
    assert 0 < second.blocked_by_previous_seconds <= second.blocked_seconds
    assert (third.previous_step, third.blocked_by_previous_seconds) == (None, 0.0)


def _opening(
    event: threading.Event, joined: Callable[[BackgroundSave], BaseException | None]
) -> Callable[[BackgroundSave], BaseException | None]:
    def opened_first(saving: BackgroundSave) -> BaseException | None:
        event.set()
        return joined(saving)

    return opened_first


def test_what_is_removed_because_it_is_damaged_is_told(folder: Path) -> None:
    lines: list[str] = []
    save_all(folder, range(10, 70, 10), snap_dis=3)  # baselines 10 and 40
    break_part(folder, 40)
    with opened(folder, snap_dis=3, report=lines.append) as store:
        assert store.restore(fallback=True).step == 30
        lines.clear()
        store.save(40, training(40)).wait()

    assert lines[0] == f"steps 60, 50 and 40, damaged, are removed from {folder}, for step 40 is saved anew"
    assert lines[1].startswith("step 40: blocked")


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
    ],
    ids=str,
)
def test_ranks_that_do_not_save_together_are_told_how_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    with opened(folder) as store:
        store.save(1, training(1)).wait()
        # As of another process.
        monkeypatch.setattr(lock, "_held", weakref.WeakSet())
        with pytest.raises(ConfigError, match=r"a folder of its own$"):
            opened(folder).save(2, training(2))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=r"; this is rank 1 of 2: .* leave out ranks=alone$"):
            opened(folder, ranks=alone).save(2, training(2))


def test_why_there_is_no_space_on_the_fast_tier_is_told(folder: Path) -> None:
    """Nothing is drained while the drain of the first waits: the second finds its place taken."""
    lines: list[str] = []
    state = {"a": np.random.default_rng(0).normal(size=500_000)}  # 4 MB
    may_drain = threading.Event()
    with opened(folder / "slow", fast=folder / "fast", fast_bytes="7 MB", report=lines.append) as store:
        drain = store._drainer
        assert drain is not None
        next_to_drain = store._housekeeping.next_to_drain
        store._housekeeping.next_to_drain = lambda now: may_drain.wait() and next_to_drain(now)  # type: ignore
        store.save(1, state).wait()
        store.save(2, state).wait()
        may_drain.set()

    why = (
        f"; written to {folder / 'slow'} at once: the snapshot takes up to 4.01 MB, and {folder / 'fast'} has space "
        "for 7 MB, of which snapshots that are not drained yet take 4 MB"
    )
    assert any(line.endswith(why) for line in lines)


# -- Types -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_a_type_that_numpy_lacks_is_not_given_as_integers(
    folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with opened(folder) as store:
        store.save(1, {"model": {"w": torch.ones(3, dtype=dtype), "b": torch.ones(2)}}).wait()

        with pytest.raises(
            ConfigError, match=r"^model/w is of .* \(pip install ml_dtypes\), or .*\"torch\"$"
        ):
            store.restore(framework="numpy")
        assert store.restore(framework="numpy", only=["model/b"])["model"]["b"].tolist() == [1, 1]
        assert store.restore(framework="torch")["model"]["w"].dtype == dtype


# -- A fast tier that is not named -----------------------------------------------------------------------------


def test_newer_snapshots_on_a_fast_tier_that_is_not_named_are_told_of(folder: Path) -> None:
    """As after a crash: step 2 was committed to the fast tier, and not drained."""
    lines: list[str] = []
    with opened(folder / "slow", fast=folder / "fast") as store:
        store.save(1, training(1)).wait()
        store.drain()
        store._housekeeping.next_to_drain = lambda now: None  # type: ignore[method-assign, assignment]
        store.save(2, training(2)).wait()

    alone = opened(folder / "slow", report=lines.append)
    assert alone.restore().step == 1
    assert [one.step for one in alone.list()] == [1]
    told = f"newer snapshots than in {folder / 'slow'} lie undrained in {folder / 'fast'}: name it as fast="
    assert lines == [told, told]

    with opened(folder / "slow", fast=folder / "fast", report=lines.append) as store:
        assert store.restore().step == 2
        store.drain()
    lines.clear()
    assert alone.restore().step == 2
    shutil.rmtree(folder / "fast")
    assert alone.restore().step == 2
    (folder / "slow" / ".fast-tier").write_bytes(b"\0 no JSON")
    assert alone.restore().step == 2
    assert lines == []


def test_a_full_disk_says_which_step_is_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(folder) as store:
        store.save(1, training(1)).wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", is_full)
            with pytest.raises(
                DataError, match=r"part-00000.pst: No space left on device: step 3 was not saved$"
            ):
                store.save(3, training(3)).wait()
        assert [one.step for one in store.list()] == [1]

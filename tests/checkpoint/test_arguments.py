"""What a caller gives that cannot work is refused where it is given, by the name of the argument and by what it is."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.snapshot_files import opened
from tests.for_each import for_each

from penstock.checkpoint import (
    AutoDistance,
    Shard,
    SnapshotStore,
    StopOnSignal,
    StoreConfig,
    ranks_of_this_job,
    set_random_state,
)
from penstock.checkpoint.arguments import checked_timeout
from penstock.checkpoint.state.flatten import flatten
from penstock.errors import ConfigError
from penstock.flow.recorder import Recorder
from penstock.plan.saves import EverySteps


def state(step: int) -> dict[str, Any]:
    return {"weight": np.arange(5.0) + step}


@for_each("wrong", [123, None, b"abc", 1.5, [], ""])
def test_what_is_no_folder_is_refused_by_its_name(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^folder is .*give the path of a folder"):
        SnapshotStore(wrong)


@for_each(
    ("name", "wrong", "rule"),
    [
        ("fast", 3, "give the path"),
        ("fast", b"x", "give the path"),
        ("fast", "s3://bucket/a", "the address as folder"),
        ("fast_bytes", "lots", "does not begin with a number"),
        ("drain_bytes_per_second", "lots", "does not begin with a number"),
        ("staging_bytes", "lots", "does not begin with a number"),
        ("staging_bytes", 0, "at least 1"),
        ("keep", 0, r"1 or more, or a Keep"),
        ("keep", True, r"1 or more, or a Keep"),
        ("keep", 2.0, r"1 or more, or a Keep"),
        ("codec", [], "the known ones"),
        ("schedule", 5, "1000 steps"),
        ("schedule", EverySteps, "1000 steps"),
        ("schedule", b"5 steps", "1000 steps"),
        ("schedule", "0 steps", "'0 steps': there is at least 1 step"),
        ("schedule", "0 min", "'0 min': the time between saves must be above zero"),
        ("schedule", "auto, a failure every 0 h", "the time between failures must be above zero"),
        ("ranks", lambda: 3, "ranks_of_this_job"),
        ("storage_options", "key", "by their names"),
        ("storage_options", [], "by their names"),
        ("trace", 3, "loader.recorder"),
        ("report", 3, "print"),
        ("scheme", "foo", "is 'foo'; the known ones are complete, progressive, chain"),
        ("keep", "3", r"is '3'; .* or a Keep, such as Keep\(last=3"),
        ("snap_dis", 0, "is 0"),
        ("snap_dis", "often", "is 'often'"),
        ("snap_dis", 2.5, r"is 2\.5"),
        ("snap_dis", True, "is True"),
        ("ranks", 2, "is 2; .* give ranks=ranks_of_this_job"),
        ("kept_mantissa_bits", 52, "is 52; give an integer from 0 to 51"),
        ("kept_mantissa_bits", -1, "is -1"),
        ("kept_mantissa_bits", 2.0, "is 2.0"),
        ("threads", 0, "is 0"),
        ("threads", 1.5, r"is 1\.5"),
        ("reference", "disk", "is 'disk'"),
        ("codec", "zip", "is 'zip'"),
        ("staging_bytes", 100, "give reference='stored'"),
        ("storage_options", {"key": "x"}, ""),
    ],
)
def test_an_argument_that_cannot_work_is_refused_when_the_store_is_made(
    tmp_path: Path, name: str, wrong: Any, rule: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}\b.*{rule}"):
        SnapshotStore(tmp_path / "a", **{name: wrong})

    assert not (tmp_path / "a").exists()


@for_each("name", ["fast_bytes", "drain_bytes_per_second"])
def test_what_is_of_a_fast_tier_needs_one(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {name: 10}
    with pytest.raises(ConfigError, match=r"^fast_bytes and drain_bytes_per_second are .*: give its folder"):
        SnapshotStore(tmp_path / "a", **options)


def test_what_an_argument_may_be_is_taken(tmp_path: Path) -> None:
    told: list[str] = []
    ways: list[dict[str, Any]] = [
        {"schedule": EverySteps(2), "trace": Recorder(64), "report": told.append, "storage_options": {}},
        {"schedule": None, "trace": None, "report": None, "storage_options": None},
        {"reference": "stored", "staging_bytes": "1 MB", "threads": np.int64(2), "schedule": "1_000 steps"},
    ]
    for number, way in enumerate(ways):
        with SnapshotStore(tmp_path / str(number), **way) as store:
            store.save(1, state(1))
    assert len(told) == 1


@for_each("wrong", ["a", None, [], 1.5, -1, True])
def test_whether_a_save_is_due_is_asked_of_a_step(folder: Path, wrong: Any) -> None:
    with opened(folder, schedule="3 steps") as store:
        with pytest.raises(ConfigError, match=r"^step is .*integer"):
            store.is_due(wrong)
        assert store.is_due(np.int64(3)) is True  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, 3, "text", [], [np.ones(3)], np.ones(3)])
def test_a_state_that_is_no_mapping_is_refused_and_read_where_dcp_made_a_list_of_it(
    folder: Path, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as store:
        for give in (store.prepare, lambda given: store.save(1, given)):
            with pytest.raises(
                ConfigError, match=r"^state is of type .*must be a mapping.*model.state_dict\(\)"
            ):
                give(wrong)
        assert store.list() == []
        with monkeypatch.context() as before:
            before.setattr("penstock.checkpoint.shared_state.taken_apart", flatten)
            store.save(1, wrong).wait()

        restored = store.restore()

        assert repr(restored) == f"<Restored step 1: {type(wrong).__name__}>"
        np.testing.assert_equal(restored.state, wrong)


def test_patterns_that_are_none_are_refused(folder: Path) -> None:
    with opened(folder) as store:
        store.save(1, state(1)).wait()
        asks: list[Callable[[Any], Any]] = [
            lambda only: store.restore(only=only),
            lambda only: store.refresh(None, 1, only=only),
        ]
        for ask in asks:
            for wrong in (3, b"weight"):
                with pytest.raises(ConfigError, match=r"^only is .*list of names"):
                    ask(wrong)


def test_a_refresh_names_which_of_its_steps_is_wrong(folder: Path) -> None:
    with opened(folder) as store:
        with pytest.raises(ConfigError, match=r"^from_step is 'a'"):
            store.refresh("a")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"^to_step is 'b'"):
            store.refresh(1, "b")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [3, "x", ["a"], [1.5]])
def test_the_steps_to_prepare_for_are_steps(folder: Path, wrong: Any) -> None:
    with opened(folder) as store, pytest.raises(ConfigError, match=r"^steps is .*give a range"):
        store.prepare(state(1), wrong)


@pytest.mark.parametrize("wrong", ["3", [], True, -1, float("nan")])
def test_who_waits_gives_a_time(folder: Path, wrong: Any) -> None:
    with opened(folder) as store:
        saving = store.save(1, state(1))
        with pytest.raises(ConfigError, match=r"^timeout_seconds is .*give seconds"):
            saving.wait(wrong)
        assert saving.wait(float("inf")).step == 1


def test_a_time_beyond_what_the_system_counts_is_for_ever() -> None:
    assert checked_timeout(1e300) is None
    assert checked_timeout(np.float32(0.5)) == 0.5


@for_each(("whole", "offsets"), [(4, 0), ("ab", "cd"), (None, None), ((4.5, 3), (0, 0)), ((4, "3"), (0, 0))])
def test_a_shard_says_which_numbers_it_needs(whole: Any, offsets: Any) -> None:
    with pytest.raises(ConfigError, match=r"^whole of a Shard is .*give 2 integers"):
        Shard(np.zeros((2, 3)), whole, offsets)


@for_each(
    ("name", "wrong", "rule"),
    [
        ("grace_seconds", True, "give the seconds"),
        ("signals", 3, r"\[signal.SIGTERM\]"),
        ("signals", "SIGTERM", r"\[signal.SIGTERM\]"),
        ("signals", ["SIGTERM"], r"\[signal.SIGTERM\]"),
        ("signals", [999], r"\[signal.SIGTERM\]"),
        ("signals", [signal.SIGKILL], r"\[signal.SIGTERM\]"),
        ("signals", None, r"\[signal.SIGTERM\]"),
        ("report", 3, "print"),
    ],
)
def test_what_stops_on_a_signal_is_refused_before_it_is_entered(name: str, wrong: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is .*{rule}"):
        StopOnSignal(**({"grace_seconds": 3} | {name: wrong}))


def test_what_stops_on_a_signal_is_entered_once() -> None:
    stop = StopOnSignal(grace_seconds=3)
    with stop:
        pass
    with pytest.raises(ConfigError, match="make another"), stop:
        pass


@for_each("wrong", [None, 3, [], "text", {3: 1}])
def test_what_is_no_state_of_generators_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^state is .*random_state"):
        set_random_state(wrong)
    with pytest.raises(ConfigError, match=r'"cuda" is of type int'):
        set_random_state({"cuda": 3})


@for_each(
    ("name", "wrong"),
    [
        ("restore_ratio", "x"),
        ("restore_ratio", []),
        ("most", "x"),
        ("most", 1.5),
        ("most", True),
        ("useful_bytes", True),
    ],
)
def test_a_distance_is_told_by_numbers(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is "):
        AutoDistance(**{name: wrong})


@pytest.mark.parametrize("into", [None, state(0)])
def test_an_unknown_framework_is_refused_also_where_it_would_not_count(folder: Path, into: Any) -> None:
    with opened(folder) as store:
        store.save(1, state(1)).wait()
        with pytest.raises(ConfigError, match=r"^framework is 'jax'; it is 'numpy', 'torch'"):
            store.restore(into=into, framework="jax")  # type: ignore[arg-type]


@for_each("wrong", ["60 s", None, 0, float("nan")])
def test_ranks_are_waited_for_some_seconds(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^timeout_seconds is .*(a number$|seconds above zero)"):
        ranks_of_this_job(timeout_seconds=wrong)


def test_a_configuration_opens_several_stores_and_is_equal_to_one_like_it(tmp_path: Path) -> None:
    config = StoreConfig(tmp_path / "runs", keep=2, scheme="chain", schedule="3 steps", threads=1)
    assert config == StoreConfig(tmp_path / "runs", keep=2, scheme="chain", schedule="3 steps", threads=1)
    assert config != StoreConfig(tmp_path / "runs", keep=3)

    for first in (0, 5):
        with SnapshotStore(config, report=None) as store:
            for step in range(first, first + 5):
                if store.is_due(step):
                    store.save(step, state(step)).wait()
    with SnapshotStore(config, report=None) as store:
        assert [listed.step for listed in store.list()] == [6, 9]


def test_a_configuration_stands_alone_and_unknown_arguments_are_named(tmp_path: Path) -> None:
    config = StoreConfig(tmp_path)
    with pytest.raises(ConfigError, match=r"^keep given with a StoreConfig.*dataclasses\.replace"):
        SnapshotStore(config, keep=3)
    with pytest.raises(ConfigError, match=r"^keeps is no argument of a store; they are keep, scheme, "):
        SnapshotStore(tmp_path, keeps=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^threads is 0; it must be at least 1"):
        StoreConfig(tmp_path, threads=0)

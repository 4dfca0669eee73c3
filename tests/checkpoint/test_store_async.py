"""Saving goes on beside training: what was copied is saved, what fails is told once, and nothing is left running."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.checkpoint.snapshot_files import opened, same, save_all, training
from tests.forking import Forks
from tests.interpreters import Interpreters
from tests.interrupting import interrupt_main_in

from penstock.checkpoint.saving import Saved, Saving, Waves
from penstock.checkpoint.state import staging
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes
from penstock.checkpoint.store import SnapshotStore
from penstock.checkpoint.tiers import local
from penstock.errors import ConfigError, DataError, FormatError, RankError, WaitTimeout
from penstock.policy.retention import Keep

#: Seconds to wait for what ought to happen at once.
PATIENCE = 60.0


class Held:
    """Holds every write to part files until it is let go, and fails those it is told to."""

    def __init__(self) -> None:
        self.writes_began = threading.Event()
        self.go_on = threading.Event()
        self.fails_with: list[BaseException] = []

    def before_write(self) -> None:
        self.writes_began.set()
        assert self.go_on.wait(PATIENCE), "nobody let go"
        if self.fails_with:
            raise self.fails_with.pop()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Yield what holds the disk; it is let go at the end of the test, whatever happens."""
    hold = Held()
    write = local.LocalWriter.write

    def held_write(writer: local.LocalWriter, *pieces: Bytes) -> None:
        hold.before_write()
        write(writer, *pieces)

    monkeypatch.setattr(local.LocalWriter, "write", held_write)
    yield hold
    hold.go_on.set()


# -- Beside training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["memory", "stored"])
def test_training_may_change_the_state_as_soon_as_save_returns(
    folder: Path, reference: str, held: Held
) -> None:
    state = training(1)
    with opened(folder, reference=reference) as store:
        saving = store.save(1, state)
        assert held.writes_began.wait(PATIENCE)
        assert not saving.is_done
        for value in state.values():
            if isinstance(value, np.ndarray):
                value[...] = 0
        state["step"] = -1
        held.go_on.set()
        saving.wait()

        assert same(store.restore(1).state, training(1))
        # Nor does the reference in memory change with the state.
        store.save(2, training(2))
        assert same(store.restore(2).state, training(2))


def test_save_returns_before_anything_is_written_and_wait_when_it_is_durable(
    folder: Path, held: Held
) -> None:
    told: list[str] = []
    with opened(folder, report=told.append) as store:
        saving = store.save(1, training(1))
        assert store_steps(folder) == []
        with pytest.raises(WaitTimeout, match=r"the save of step 1 is still under way after 0\.01 s"):
            saving.wait(0.01)
        assert told == []

        held.go_on.set()
        saved = saving.wait()

        assert store_steps(folder) == [1]
        assert saving.is_done
        assert saving.saved is saved
        assert saving.wait() is saved
        assert (saved.step, saved.reference_step, saved.tier) == (1, None, str(folder))
        assert 0 <= saved.blocked_seconds <= saved.durable_seconds
        assert told == [str(saved)]
        assert told[0].startswith("step 1: blocked ")
        assert told[0].endswith("%), baseline")


def store_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def test_a_store_that_nobody_closes_is_let_go_of_once_its_save_has_ended(folder: Path, held: Held) -> None:
    store = opened(folder)
    saving = store.save(1, training(1))
    assert held.writes_began.wait(PATIENCE)
    gone = weakref.ref(store)
    del store
    gc.collect()
    with opened(folder) as other, pytest.raises(ConfigError, match="this very process"):
        other.save(2, training(2))

    held.go_on.set()
    saving.wait()
    gc.collect()

    assert gone() is None, "who keeps the outcome of a save keeps no store"
    with opened(folder) as other:
        other.save(2, training(2)).wait()
    assert store_steps(folder) == [1, 2]


def test_a_copy_of_a_store_that_a_forked_child_drops_lets_go_of_nothing(folder: Path) -> None:
    store = opened(folder)
    store.save(1, training(1)).wait()
    child = os.fork()
    if child == 0:
        del store
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)

    with opened(folder) as other, pytest.raises(ConfigError, match="this very process"):
        other.save(2, training(2))
    store.close()


def test_a_forked_child_does_not_write_and_waits_for_nothing_that_its_parent_does(
    folder: Path, held: Held
) -> None:
    """The parent has the lock, and both would write the same files."""
    with opened(folder) as store:
        store.save(1, training(1))
        assert held.writes_began.wait(PATIENCE)
        held.go_on.set()
        store.save(2, training(2)).wait()
        held.go_on.clear()
        held.writes_began.clear()
        saving = store.save(3, training(3))
        assert held.writes_began.wait(PATIENCE)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with opened(folder) as other:
                outcomes = [outcome_of(lambda: other.restore().step), outcome_of(store.restore)]
            for call in (lambda: store.save(4, training(4)), lambda: store.prepare({}), store.close):
                outcomes.append(outcome_of(call))
            os.write(writing, "|".join(outcomes).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as pipe:
            restored, *refused, closed = pipe.read().split("|")
        os.waitpid(child, 0)
        held.go_on.set()
        saving.wait()
        store.save(4, training(4)).wait()

    assert (restored, closed) == ("2", "None")
    for error in refused:
        assert error.startswith(
            f"ClosedError: the snapshot store {folder} was opened by process {os.getpid()}, from which"
        )
    assert store_steps(folder) == [1, 2, 3, 4]


def outcome_of(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_the_next_save_waits_for_the_one_before(folder: Path, held: Held) -> None:
    with opened(folder) as store:
        store.save(1, training(1))
        assert held.writes_began.wait(PATIENCE)
        began = threading.Event()

        def let_go() -> None:
            began.set()
            held.go_on.set()

        timer = threading.Timer(0.05, let_go)
        timer.start()
        second = store.save(2, training(2))
        timer.join()

        assert began.is_set()
        assert store_steps(folder)[0] == 1
        assert second.wait().reference_step == 1


@pytest.mark.parametrize(
    "way", [{"reference": "stored"}, {"scheme": "complete"}, {"codec": "stored"}, {"fast": "fast"}]
)
def test_a_larger_state_is_copied_in_waves_of_so_much_memory(
    folder: Path, held: Held, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]
) -> None:
    """No state stays in memory: references are read from files, or there are none of what is saved."""
    if "fast" in way:
        way = {"fast": folder.with_name("fast")}
    reserved: list[int] = []
    reserve = staging.StagingArea.reserve

    def watched(area: staging.StagingArea, nbytes: int) -> None:
        reserved.append(nbytes)
        reserve(area, nbytes)

    monkeypatch.setattr(staging.StagingArea, "reserve", watched)
    held.go_on.set()
    state = {str(i): np.random.default_rng(i).normal(size=BLOCK_VALUES * 3 // 2) for i in range(6)}
    limit_bytes = 4 * 8 * BLOCK_VALUES
    with opened(folder, staging_bytes=limit_bytes, **way) as store:
        for step in (1, 2):
            store.save(step, state)
            assert same(store.restore(step).state, state)

    assert 0 < sum(reserved) / 2 <= limit_bytes
    assert len(reserved) == 4  # two areas, twice


@pytest.mark.parametrize("staging_bytes", [1, 1000, 8 * BLOCK_VALUES, 8 * BLOCK_VALUES + 1, 3_000_000])
def test_a_limit_of_any_size_saves_the_whole_state(folder: Path, staging_bytes: int) -> None:
    """Below two blocks a wave is one block, and takes what that needs."""
    state = {
        "a": np.arange(BLOCK_VALUES + 7.0),
        "b": np.arange(5, dtype=np.int8),
        "c": np.zeros((0, 2)),
        "d": np.arange(2 * BLOCK_VALUES, dtype=np.float32),
    }
    with opened(folder, reference="stored", staging_bytes=staging_bytes) as store:
        for step in (1, 2):
            store.save(step, state).wait(PATIENCE)
            assert same(store.restore(step).state, state)


# -- What fails ------------------------------------------------------------------------------------------------


class Broken(DataError):
    """What the disk says in these tests."""


def failing(folder: Path, held: Held, **options: Any) -> Any:
    """Return a store of one snapshot whose save of step 2 fails in the background."""
    store = opened(folder, **options)
    held.go_on.set()
    store.save(1, training(1)).wait()
    held.fails_with.append(Broken("the disk is broken"))
    store.save(2, training(2))
    return store


def test_a_failure_is_raised_by_the_next_save_once_and_the_store_goes_on(folder: Path, held: Held) -> None:
    with failing(folder, held) as store:
        with pytest.raises(Broken, match="the disk is broken"):
            store.save(3, training(3))
        assert store_steps(folder) == [1]
        assert not list(folder.glob(".unfinished*"))

        assert store.save(3, training(3)).wait().reference_step == 1
        assert store.save(2, training(2)).wait().reference_step == 3
        for step in (1, 2, 3):
            assert same(store.restore(step).state, training(step))


CALLS: dict[str, Callable[[Any], Any]] = {
    "restore": lambda store: store.restore(1),
    "verify": lambda store: store.verify(),
    "delete": lambda store: store.delete(1),
    "prepare": lambda store: store.prepare(training(1)),
    "close": lambda store: store.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_failure_is_raised_by_whatever_is_asked_next_and_not_by_the_one_after(
    folder: Path, held: Held, call: str
) -> None:
    store = failing(folder, held)

    with pytest.raises(Broken, match="the disk is broken"):
        CALLS[call](store)

    if call != "close":
        CALLS[call](store)
    store.close()
    save_all(folder, [3])


def test_a_failure_that_was_waited_for_is_not_raised_again(folder: Path, held: Held) -> None:
    store = failing(folder, held)
    saving = store._saving
    for _ in range(2):
        with pytest.raises(Broken):
            saving.wait()
    assert saving.is_done
    assert saving.saved is None

    store.save(3, training(3)).wait()
    store.close()


def test_the_end_of_a_with_block_raises_what_failed_in_the_background(folder: Path, held: Held) -> None:
    with pytest.raises(Broken), failing(folder, held):
        pass


@pytest.mark.parametrize("where", ["create", "finish", "commit", "check", "forget"])
def test_a_failure_anywhere_on_the_way_is_told_and_what_is_listed_is_whole(
    folder: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise Broken(f"no {where}")

    store = opened(folder, scheme="complete", keep=Keep(last=1))
    store.save(1, training(1)).wait()
    with monkeypatch.context() as patch:
        owner, name = {
            "create": (local.LocalDraft, "create"),
            "finish": (local.LocalWriter, "finish"),
            "commit": (local.LocalDraft, "commit"),
            "check": (local.LocalTier, "open"),
            "forget": (local.LocalTier, "delete"),
        }[where]
        patch.setattr(owner, name, fail)
        with pytest.raises(DataError, match=f"no {where}"):
            store.save(2, training(2)).wait()

    assert same(store.restore(1).state, training(1))
    for step in store_steps(folder):
        assert same(store.restore(step).state, training(step))
    store.save(3, training(3)).wait()
    assert store_steps(folder) == [3]
    store.close()


def test_a_copy_that_is_interrupted_ends_the_save(forks: Forks) -> None:
    """Ctrl-C while the state is copied: in a process of its own, which may hang."""
    script = """
    import sys, tempfile
    import numpy as np
    from penstock.checkpoint.state import staging
    from penstock.checkpoint.store import SnapshotStore

    copy = staging.StagingArea.copy
    def interrupted(*_, **__):
        staging.StagingArea.copy = copy
        raise KeyboardInterrupt
    staging.StagingArea.copy = interrupted
    with tempfile.TemporaryDirectory() as folder, SnapshotStore(folder, codec="rle4", report=None) as store:
        try:
            store.save(1, {"a": np.arange(5)})
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        store.save(2, {"a": np.arange(5)}).wait()
        print([one.step for one in store.list()], flush=True)
    """
    assert forks.run(script)[0].split("\n")[:2] == ["interrupted", "[2]"]


# -- Interrupted -----------------------------------------------------------------------------------------------


def test_a_wait_that_is_interrupted_can_be_taken_up_again(folder: Path, held: Held) -> None:
    """A join of the thread would say that it ended: then the snapshot would pass for failed, or for saved."""
    with opened(folder) as store:
        saving = store.save(1, training(1))
        assert held.writes_began.wait(PATIENCE)
        interrupter = interrupt_main_in(Saving.wait)
        with pytest.raises(KeyboardInterrupt):
            saving.wait()
        interrupter.join()

        assert not saving.is_done
        assert saving.saved is None
        held.go_on.set()
        assert saving.wait().step == 1
        assert same(store.restore(1).state, training(1))


def test_a_close_that_is_interrupted_leaves_the_save_to_end(folder: Path, held: Held) -> None:
    store = opened(folder)
    saving = store.save(1, training(1))
    assert held.writes_began.wait(PATIENCE)
    interrupter = interrupt_main_in(SnapshotStore.close)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    interrupter.join()

    held.go_on.set()
    saving.wait()
    assert same(opened(folder).restore(1).state, training(1))


# -- The end of the process -----------------------------------------------------------------------------------

END = """
import sys
import numpy as np
from penstock.checkpoint.store import SnapshotStore
store = SnapshotStore(sys.argv[1], codec=sys.argv[2], report=None, threads=2)
state = {"a": np.random.default_rng(0).normal(size=2_000_000), "step": 7}
store.save(7, state)
if sys.argv[3] == "raise":
    raise RuntimeError("the training failed")
if sys.argv[3] == "exit":
    sys.exit(3)
"""


@pytest.mark.parametrize(("end", "code"), [("return", 0), ("raise", 1), ("exit", 3)])
def test_a_save_is_finished_when_the_interpreter_ends(
    folder: Path, interpreters: Interpreters, end: str, code: int
) -> None:
    assert interpreters.run(END, str(folder), "rle4", end).returncode == code
    restored = opened(folder).restore(7)
    assert same(restored["a"], np.random.default_rng(0).normal(size=2_000_000))
    assert not list(folder.glob(".unfinished*"))


def test_a_save_that_is_interrupted_at_the_end_of_the_process_is_finished(
    folder: Path, interpreters: Interpreters
) -> None:
    """Ctrl-C while the process waits for the save: the interpreter waits for it all the same."""
    script = """
    import os, signal, sys, threading
    import numpy as np
    from penstock.checkpoint.tiers import local
    from penstock.checkpoint.store import SnapshotStore

    write = local.LocalWriter.write
    began, interrupted = threading.Event(), threading.Event()
    def held(writer, *pieces):
        began.set()
        interrupted.wait(30)
        write(writer, *pieces)
    local.LocalWriter.write = held
    store = SnapshotStore(sys.argv[1], codec="rle4", report=None)
    saving = store.save(1, {"a": np.arange(5)})
    began.wait(30)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        saving.wait()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        interrupted.set()
    """
    ended = interpreters.run(script, str(folder))

    assert ended.stdout == "interrupted\n"
    assert ended.returncode == 0
    assert same(opened(folder).restore(1).state, {"a": np.arange(5)})


# -- Nothing is left behind -----------------------------------------------------------------------------------


def test_neither_threads_nor_files_nor_memory_are_left_after_many_saves(folder: Path) -> None:
    process = psutil.Process()
    state = {"a": np.random.default_rng(0).normal(size=200_000), "n": 0}
    with opened(folder, threads=3) as store:
        store.save(0, state).wait()
        store.restore()
        threads, files = threading.active_count(), process.num_fds()
        for step in range(1, 15):
            store.save(step, state | {"n": step})
            assert store.restore()["n"] == step
            store.list()
        store.verify()
        # Python's, not the system's: libraries start threads of their own when they like.
        assert threading.active_count() <= threads
        assert process.num_fds() <= files
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]
    held_open = {file.path for file in process.open_files()}
    assert not any(str(folder) in path for path in held_open)


def test_failed_saves_and_restores_leave_no_files_open(folder: Path) -> None:
    save_all(folder, [1, 2])
    part = folder / "step-000000000002" / "part-00000.pst"
    part.write_bytes(part.read_bytes()[:-1])
    files = psutil.Process().num_fds()
    with opened(folder, threads=2) as store:
        for _ in range(5):
            with pytest.raises(FormatError):
                store.restore(2)
            store.list()
            store.verify()
    assert psutil.Process().num_fds() <= files


# -- The pieces -------------------------------------------------------------------------------------------------


def test_waves_hold_the_copy_back_until_an_area_is_free() -> None:
    waves = Waves(1, 2, 0)
    assert waves.wait_for_area()
    waves.put([])
    taken = waves.take()
    assert next(taken) == []

    def copy_on() -> None:
        waves.wait_for_area()
        waves.put([])

    waiting = threading.Thread(target=copy_on)
    waiting.start()
    assert list(taken) == [[]]  # asking for the next gives the area back
    waiting.join(PATIENCE)


def test_waves_that_nobody_writes_any_more_say_so() -> None:
    waves = Waves(1, 1, 0)
    assert waves.wait_for_area()
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(waves.wait_for_area()))
    waiting.start()
    waves.give_up()
    waiting.join(PATIENCE)
    assert found == [False]


def test_waves_that_are_left_off_are_written_as_far_as_they_came_and_then_fail() -> None:
    waves = Waves(2, 2, 0)
    waves.put([])
    waves.leave_off()
    taken = waves.take()
    assert next(taken) == []
    with pytest.raises(RankError, match="not copied to its end"):
        next(taken)


def test_a_writer_that_waits_for_a_wave_hears_that_none_will_come() -> None:
    waves = Waves(1, 1, 0)
    found: list[BaseException] = []

    def take() -> None:
        try:
            next(waves.take())
        except RankError as error:
            found.append(error)

    waiting = threading.Thread(target=take)
    waiting.start()
    waves.leave_off()
    waiting.join(PATIENCE)
    assert len(found) == 1


def test_a_line_tells_what_was_written_of_what() -> None:
    saved = Saved(300, "u", 200, 2_000_000, 500_000, 0.25, 1.5, "here", "; and more")
    line = "step 300: blocked 250 ms, durable after 1.5 s, wrote 500 kB of 2 MB (25.0%), delta to step 200; and more"
    assert str(saved) == line
    assert "baseline" in str(Saved(1, "u", None, 0, 88, 0.0, 0.0, "here"))


def test_a_report_that_fails_makes_no_failure_of_what_was_done(folder: Path) -> None:
    """Standard error may be closed, as a daemon's is."""

    def fail(_: str) -> None:
        raise ValueError("I/O operation on closed file")

    with opened(folder, report=fail) as store:
        assert store.save(1, training(1)).wait().step == 1
        store.restore(into={"new": 1, "step": 0}, strict=False)


def test_a_user_sees_of_a_save_what_there_is_to_ask() -> None:
    assert [name for name in dir(Saving) if name[0] != "_"] == ["is_done", "saved", "step", "wait"]


def test_a_process_that_is_killed_leaves_what_the_next_writer_removes(folder: Path, forks: Forks) -> None:
    script = """
    import os, signal, sys
    import numpy as np
    from penstock.checkpoint.tiers import local
    from penstock.checkpoint.store import SnapshotStore
    store = SnapshotStore(sys.argv[1], codec="rle4", report=None)
    store.save(1, {"a": np.arange(5)}).wait()
    local.LocalWriter.finish = lambda writer: os.kill(os.getpid(), signal.SIGKILL)
    store.save(2, {"a": np.arange(5)}).wait()
    """
    assert forks.run(script, str(folder)) == ("", -signal.SIGKILL)
    assert len(list(folder.glob(".unfinished*"))) == 1

    with opened(folder) as store:
        assert [one.step for one in store.list()] == [1]
        store.save(2, {"a": np.arange(6)}).wait()
        assert sorted(os.listdir(folder)) == [".lock", "step-000000000001", "step-000000000002"]

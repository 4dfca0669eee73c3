"""A loop that is broken off by an error or by Ctrl-C, wherever that may be, and begun again."""

import gc
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
from tests.interrupting import every_place
from tests.patience import patient, wait_until

from penstock.compiling import Part
from penstock.errors import ClosedError, ConfigError, DataError
from penstock.flow import waits
from penstock.loader import Loader
from penstock.loader.transforms import Resize, ToTensor
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import FullShuffle
from penstock.store import ImageFolder
from penstock.trace import read_trace

SAMPLES, BATCH = 6, 2
BROKEN = 4


class Numbers:
    """Each sample is its own number, as an array and as a word; one of them is broken."""

    def __init__(self, error: type[Exception] = ValueError) -> None:
        self.error = error

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, str]:
        if index == BROKEN:
            raise self.error("broken")
        return np.full(5, index), f"number {index}"


def make(dataset: Any, **options: Any) -> Loader:
    """Three slots and no space for more: a slot that is lost for good would soon be missed."""
    settings: dict[str, Any] = {
        "batch_size": BATCH,
        "memory": "512 B",
        "decoders": 2,
        "timeout_seconds": 20,
        "report": None,
        **options,
    }
    return Loader(dataset, **settings)


def seen_in(loader: Loader) -> list[int]:
    seen = []
    for numbers, words in loader:
        assert words == [f"number {number}" for number in numbers[:, 0]]
        seen += numbers[:, 0].tolist()
    return seen


def _is_elsewhere(code: CodeType) -> bool:
    return code.co_filename != __file__


def expected(order: FullShuffle, epoch: int, broken: int | None = BROKEN) -> list[int]:
    return [number for number in order.at(epoch, np.arange(SAMPLES)).tolist() if number != broken]


@pytest.mark.parametrize("leaves", [False, True], ids=["in a loop", "in leaving a loop"])
@pytest.mark.parametrize("stride", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_after_ctrl_c_anywhere_in_a_loop_or_in_leaving_it_the_next_loop_is_complete(
    stride: int, leaves: bool
) -> None:
    order = FullShuffle(SAMPLES, 0)
    with make(Numbers(), epochs=100_000, on_error="skip") as loader:
        for interrupter in every_place(_is_elsewhere, stride):
            passes = iter(loader) if leaves else iter([0])
            next(passes)
            with interrupter:
                try:
                    if leaves:
                        iter(loader)
                    else:
                        seen_in(loader)
                except KeyboardInterrupt:
                    assert interrupter.has_struck
                else:
                    assert leaves or not interrupter.has_struck, "the interrupt was swallowed"

            epoch = loader.position[0] + (loader.position[1] > 0)
            assert seen_in(loader) == expected(order, epoch)


@pytest.mark.parametrize("stride", [53, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_anywhere_in_close_leaves_nothing_that_a_second_close_does_not_end(
    stride: int, tmp_path: Path
) -> None:
    for interrupter in every_place(_is_elsewhere, stride):
        loader = make(Numbers(), epochs=2, on_error="skip", trace=tmp_path / "trace")
        seen_in(loader)
        with interrupter:
            try:
                loader.close()
            except KeyboardInterrupt:
                assert interrupter.has_struck
        loader.close()

        assert len(read_trace(tmp_path / "trace").spans)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # a file between open() and `with`
@pytest.mark.parametrize("stride", [701, pytest.param(7, marks=pytest.mark.slow)])
def test_ctrl_c_anywhere_in_the_construction_or_the_start_leaves_no_thread(stride: int) -> None:
    def make_and_start() -> None:
        with make(Numbers(), epochs=2, on_error="skip") as loader:
            loader.start()

    make_and_start()  # modules that the first one imports have thousands of places
    for interrupter in every_place(_is_elsewhere, stride):
        with interrupter:
            try:
                make_and_start()
            except STRUCK:
                assert interrupter.has_struck
        gc.collect()
        for thread in penstocks_threads():
            thread.join(patient(20))
            assert not thread.is_alive(), thread.name


#: What Ctrl-C may come out as: Thread.start may turn it into an error about its own lock.
STRUCK = (KeyboardInterrupt, RuntimeError, DataError)


def penstocks_threads() -> list[threading.Thread]:
    for thread in threading.enumerate():
        if thread.name.startswith("penstock") and thread.ident is None:
            # Struck within Thread.start, before there was a thread: Python goes on to list it.
            del threading._limbo[thread]  # type: ignore[attr-defined]
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("first", [(0, 0), (1, 1)])
def test_after_ctrl_c_anywhere_in_the_start_the_loop_runs_whole_from_where_it_was_to_start(
    stride: int, first: tuple[int, int]
) -> None:
    order = FullShuffle(SAMPLES, 0)
    for interrupter in every_place(_is_elsewhere, stride):
        with make(Numbers(), epochs=2, on_error="skip") as loader:
            with interrupter:
                try:
                    loader.start(*first)
                except STRUCK:
                    assert interrupter.has_struck

            # A start that had not begun when it was struck is made by the loop, at the beginning.
            epoch, step = loader.position
            assert (epoch, step) in ((0, 0), first)
            places = order.at(epoch, np.arange(step * BATCH, SAMPLES)).tolist()
            assert seen_in(loader) == [number for number in places if number != BROKEN]
        for thread in penstocks_threads():
            thread.join(patient(20))


@pytest.mark.parametrize("is_cause", [True, False])
def test_ctrl_c_that_a_data_set_wraps_into_its_own_error_ends_the_construction(is_cause: bool) -> None:
    """As data sets do whose library tells every failure of its read as one error of its own."""
    asked = []

    class Wraps(Numbers):
        def __getitem__(self, index: int) -> tuple[np.ndarray, str]:
            asked.append(index)
            try:
                try:
                    raise KeyboardInterrupt
                except KeyboardInterrupt as interrupt:
                    raise OSError("read failed") from (interrupt if is_cause else None)
            except OSError as error:
                raise ValueError("no sample") from error

    with pytest.raises(KeyboardInterrupt):
        make(Wraps(), epochs=1, on_error="skip", shuffle=False)
    assert asked == [0]


def test_an_error_in_the_first_batch_comes_again_and_again_and_costs_no_slot() -> None:
    with make(
        Numbers(), epochs=1, shuffle=FullShuffle(SAMPLES, 3), batch_size=SAMPLES, memory="2 KiB"
    ) as loader:
        for _ in range(10):
            with pytest.raises(ValueError, match="broken"):
                seen_in(loader)


def test_errors_in_later_batches_cost_no_slot_either() -> None:
    gc.disable()  # an error and what its traceback refers to must go without
    try:
        with make(Numbers(), epochs=20, shuffle=False) as loader:
            for _ in range(20):
                with pytest.raises(ValueError, match="broken"):
                    seen_in(loader)
            assert loader.memory.slots < 20
    finally:
        gc.enable()


def test_what_a_thread_that_delivers_a_batch_still_refers_to_is_not_taken_for_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is held up, as on a busy machine, right after a batch whose error the training gets, and loads on after."""
    next_epoch_is_loaded, is_seen = threading.Event(), threading.Event()
    looks = reads = 0

    class LateToBreak(Numbers):
        def __getitem__(self, index: int) -> tuple[np.ndarray, str]:
            nonlocal reads
            reads += index == BROKEN
            if index == BROKEN and reads == 1:
                assert next_epoch_is_loaded.wait(patient(20))
            return super().__getitem__(index)

    class WatchedLock:
        """Says when the training, which has no slot left, sees that a thread has it."""

        def __init__(self, lock: Any) -> None:
            self.lock, self.acquire, self.release = lock, lock.acquire, lock.release

        def locked(self) -> bool:
            nonlocal looks
            if is_locked := self.lock.locked():
                looks += 1
                is_seen.set()
            return bool(is_locked)

        def __enter__(self) -> None:
            self.acquire()

        def __exit__(self, *_: object) -> None:
            self.release()

    with make(LateToBreak(), epochs=2, shuffle=False) as loader:
        engine, deliver = loader._parts.engine, loader._parts.engine._wake_consumer

        def hold_up() -> None:
            if (1, 0) in engine._arrived:
                next_epoch_is_loaded.set()
            has_error = (0, 2) in engine._arrived
            deliver()
            if has_error:
                is_seen.wait(patient(20))

        monkeypatch.setattr(engine, "_lock", WatchedLock(engine._lock))
        monkeypatch.setattr(engine, "_wake_consumer", hold_up)
        try:
            for _ in range(2):
                with pytest.raises(ValueError, match="broken"):
                    seen_in(loader)
        finally:
            is_seen.set()
    assert looks


def test_a_sample_that_raises_stop_iteration_does_not_end_the_epoch_unnoticed() -> None:
    with (
        make(Numbers(StopIteration), epochs=1) as loader,
        pytest.raises(RuntimeError, match="StopIteration") as caught,
    ):
        seen_in(loader)

    assert isinstance(caught.value.__cause__, StopIteration)
    assert "broken" in str(caught.value)


def test_what_skipped_samples_held_in_memory_is_let_go() -> None:
    class Heavy(Numbers):
        def __getitem__(self, index: int) -> Any:
            ballast = Ballast()
            assert ballast is not None
            return super().__getitem__(index)

    alive: list[int] = [0]

    class Ballast:
        def __init__(self) -> None:
            alive[0] += 1

        def __del__(self) -> None:
            alive[0] -= 1

    with make(Heavy(), epochs=1, on_error="skip") as loader:
        seen_in(loader)
        gc.collect()

        assert len(loader.skipped) == 1
        assert alive == [0]


def test_the_wait_for_a_batch_that_is_skipped_whole_counts_as_stall() -> None:
    """A gate is opened by the very wait that is measured: its length is known, without a sleep."""
    gate = threading.Event()

    class SlowlyBroken(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index < BATCH:
                if threading.current_thread().name.startswith("penstock-decode"):
                    gate.wait(patient(20))
                raise ValueError("broken")
            return np.full(5, index), f"number {index}"

    def open_gate(line: str) -> None:
        if "the training waits" in line:
            gate.set()

    patience_seconds = 0.1
    options = {
        "on_error": "skip",
        "shuffle": False,
        "patience_seconds": patience_seconds,
        "report": open_gate,
    }
    with make(SlowlyBroken(), epochs=1, **options) as loader:
        next(iter(loader))
        (metrics,) = loader.metrics

    assert metrics.stall_seconds >= patience_seconds


# Other threads, other processes


def test_closing_in_another_thread_ends_a_wait(tmp_path: Path) -> None:
    gate = threading.Event()

    class Stuck(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index != 0:
                gate.wait(patient(20))
            return super().__getitem__(0)

    loader = make(Stuck(), epochs=1, shuffle=False, timeout_seconds=None)
    raised: list[BaseException] = []

    def consume() -> None:
        try:
            seen_in(loader)
        except ClosedError as error:
            raised.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    wait_until(lambda: "the training waits" in waits.all_waits())
    closer = threading.Thread(target=loader.close)
    closer.start()
    consumer.join(patient(20))
    gate.set()
    closer.join()

    assert [type(error) for error in raised] == [ClosedError]


def test_close_ends_though_a_worker_hangs_where_machine_code_is_kept(
    image_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home on a mount that does not answer: the threads that decode look there for compiled kernels."""
    gate, is_stuck = threading.Event(), threading.Event()

    def hang(part: Part) -> None:
        if threading.current_thread().name.startswith("penstock-decode"):
            is_stuck.set()
            gate.wait(patient(20))

    monkeypatch.setattr(Part, "ask", hang)
    monkeypatch.setattr("penstock.compiling._STOP_SECONDS", 0.05)
    monkeypatch.setattr("penstock.flow.engine._JOIN_SILENT_SECONDS", 0.05)
    monkeypatch.setattr("penstock.flow.engine._JOIN_SECONDS", 0.1)
    lines: list[str] = []
    loader = Loader(
        image_folder(images=6),
        batch_size=2,
        epochs=1,
        transforms=[Resize((8, 8)), ToTensor()],
        report=lines.append,
    )
    try:
        loader.start()
        assert is_stuck.wait(patient(20))

        with pytest.warns(RuntimeWarning, match="closed while threads hang"):
            loader.close()
    finally:
        gate.set()
        for thread in loader._parts.engine._threads:
            thread.join(patient(20))
    # It loads the code that reads, before its first sample.
    assert "closing waits for 0.1 s at most: threads that are at no sample" in lines[-1]


def test_a_second_thread_in_a_pass_is_refused_and_the_first_goes_on() -> None:
    gate = threading.Event()

    class Shut(Numbers):
        def __getitem__(self, index: int) -> Any:
            if threading.current_thread().name.startswith("penstock-decode"):
                gate.wait(patient(20))
            return np.full(5, index), f"number {index}"

    with make(Shut(), epochs=2, timeout_seconds=patient(5)) as loader:
        passes = iter(loader)
        seen: list[int] = []

        def consume() -> None:
            for numbers, _ in passes:
                seen.extend(numbers[:, 0].tolist())

        consumer = threading.Thread(target=consume, name="the consumer")
        consumer.start()
        wait_until(lambda: "the training waits for the batch" in waits.all_waits())
        for ask in (lambda: next(passes), lambda: iter(loader)):
            with pytest.raises(ConfigError, match=r"'the consumer' is inside .*queue\.Queue"):
                ask()
        gate.set()
        consumer.join(patient(20))

        assert seen == expected(FullShuffle(SAMPLES, 0), 0, broken=None)
        assert seen_in(loader) == expected(FullShuffle(SAMPLES, 0), 1, broken=None)


def test_a_second_thread_is_refused_for_the_first_one_while_the_line_of_an_ended_epoch_is_reported() -> None:
    is_reported, gate = threading.Event(), threading.Event()

    def report(line: str) -> None:
        if "epoch 0" in line:
            is_reported.set()
            gate.wait(patient(20))

    with make(Numbers(), epochs=1, on_error="skip", report=report) as loader:
        passes = iter(loader)
        consumer = threading.Thread(target=lambda: list(passes), name="the consumer")
        consumer.start()
        try:
            assert is_reported.wait(patient(20))
            with pytest.raises(ConfigError, match=r"'the consumer' is inside"):
                next(passes)
        finally:
            gate.set()
            consumer.join(patient(20))


def test_a_disk_that_is_full_at_the_end_of_a_trace_is_reported_and_the_threads_end(tmp_path: Path) -> None:
    lines: list[str] = []
    trace = tmp_path / "trace"
    with make(Numbers(), epochs=1, on_error="skip", trace=trace, report=lines.append) as loader:
        seen_in(loader)
        assert loader.metrics  # all spans are in the file
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (trace.stat().st_size, before[1]))
        try:
            loader.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert "the trace breaks off here: " in lines[-1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]
    assert not read_trace(trace).is_complete
    assert [epoch.samples for epoch in read_trace(trace).epochs()] == [SAMPLES - 1]


def test_a_disk_that_is_full_before_a_trace_begins_is_reported_and_the_training_goes_on() -> None:
    """/dev/full takes no byte, as a full disk does."""
    lines: list[str] = []
    with make(Numbers(), epochs=1, on_error="skip", trace="/dev/full", report=lines.append) as loader:
        assert len(seen_in(loader)) == SAMPLES - 1

    assert sum("the trace breaks off here; the training continues: " in line for line in lines) == 1


def test_a_worker_that_died_of_an_error_of_ours_is_told_at_every_wait_and_never_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = make(Numbers(), epochs=3, on_error="skip")
    loader.close()
    with monkeypatch.context() as patched:
        patched.setattr("penstock.loader.dataset.SampleDecoder.decode", lambda *_: 1 / 0)
        loader = make(Numbers(), epochs=3)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                seen_in(loader)
    loader.close()


def in_cycle(loader: Loader) -> None:
    """Leave a loader to the garbage collector."""
    cycle: list[Any] = [loader]
    cycle.append(cycle)


def test_a_loader_that_the_collector_takes_while_another_begins_blocks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector may run anywhere, here while the new loader holds the lock of those who wait."""
    gc.disable()
    try:
        dropped = make(Numbers(), epochs=1, on_error="skip")
        dropped.start()
        in_cycle(dropped)
        del dropped
        register = waits.register

        def collecting_register(waiter: waits.Waiter) -> None:
            with waits._board._server_lock:
                gc.collect()
            register(waiter)

        monkeypatch.setattr("penstock.flow.waits.register", collecting_register)
        with make(Numbers(), epochs=1, on_error="skip") as loader:
            assert len(seen_in(loader)) == SAMPLES - 1
    finally:
        gc.enable()


def test_the_last_reference_may_go_in_a_worker_thread_of_the_loader_itself() -> None:
    held: list[Any] = []

    class Letting(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 5 and held:
                held.clear()
            return np.full(5, index), f"number {index}"

    dataset = Letting()
    held.append(make(dataset, epochs=1, shuffle=False))
    held[0].start()
    for thread in threading.enumerate():
        if thread.name.startswith("penstock"):
            thread.join(patient(20))
    assert not held


def in_child(act: Callable[[], None]) -> int:
    """Run something in a forked child; return its exit status, 0 unless it raised."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_may_close_its_copy_and_the_parents_trace_stays_whole(tmp_path: Path) -> None:
    with make(Numbers(), epochs=1, on_error="skip", trace=tmp_path / "trace") as loader:
        passes = iter(loader)
        next(passes)

        assert in_child(loader.close) == 0
        assert in_child(lambda: print(loader.metrics)) == 0
        for _ in passes:
            pass

    assert read_trace(tmp_path / "trace").is_complete


def test_a_forked_child_may_have_a_loader_of_its_own_and_answers_for_it_alone() -> None:
    with make(Numbers(), epochs=1, on_error="skip") as loader:
        loader.start()

        def run_there() -> None:
            with make(Numbers(), epochs=1, on_error="skip") as own:
                assert len(seen_in(own)) == SAMPLES - 1
                assert f"process {os.getpid()}" in waits.ask_waits(os.getpid())

        assert in_child(run_there) == 0
        assert f"process {os.getpid()}" in waits.ask_waits(os.getpid())
        assert len(seen_in(loader)) == SAMPLES - 1


def test_a_loader_that_was_made_before_a_fork_starts_in_the_parent_alone(tmp_path: Path) -> None:
    with make(Numbers(), epochs=1, on_error="skip", trace=tmp_path / "trace") as loader:

        def begin_there() -> None:
            for begin in (loader.start, lambda: next(iter(loader))):
                with pytest.raises(ClosedError, match="make a loader of its own here"):
                    begin()
            loader.close()

        assert in_child(begin_there) == 0
        assert len(seen_in(loader)) == SAMPLES - 1
    assert read_trace(tmp_path / "trace").is_complete


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def without_tier() -> Machine:
    return Machine(
        SharedStore(None, Curve(((1, 1e8),)), 1e-3, 1),
        (StorageClass("staging", 10**6, 1, Curve(((1, 1e9),))),),
    )


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [(truncate, "has shrunk from"), (grow, "has grown"), (Path.unlink, "has vanished")],
)
def test_a_file_that_changes_while_training_is_named_from_then_on(
    image_folder: Callable[..., Path], spoil: Callable[[Path], None], complaint: str
) -> None:
    root = image_folder(images=8)
    source = ImageFolder(root)
    spoiled = Path(source.path_of(3))
    with Loader(
        source,
        batch_size=2,
        epochs=3,
        readers=1,
        transforms=[Resize((64, 64)), ToTensor()],
        memory="400 KiB",
        machine=without_tier(),
        on_error="skip",
        report=None,
        timeout_seconds=20,
    ) as loader:
        assert loader.memory.tier_bytes == 0
        assert loader.memory.slots <= len(loader), "the third epoch is not read ahead in the first"
        passes = iter(loader)
        next(passes)
        spoil(spoiled)
        kept = (
            2
            + sum(len(labels) for _, labels in passes)
            + sum(len(labels) for _ in range(2) for _, labels in loader)
        )

        assert kept == 24 - len(loader.skipped)
        assert {skip.name for skip in loader.skipped} == {str(spoiled)}
        assert all(complaint in skip.error for skip in loader.skipped)
        assert loader.skipped[-1].epoch == 2

"""decoders=0: everything in the thread that asks for batches, in the plan's order, with the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import predict
from penstock.errors import ClosedError, ConfigError, DataError
from penstock.loader import Loader, LoaderConfig
from penstock.loader.transforms import RandomHorizontalFlip, RandomResizedCrop, ToTensor
from penstock.measure.compare import compare
from penstock.trace import Kind, read_trace

COUNT = 12


class Numbers:
    """Arrays of their numbers; notes who asks for what, and raises what is planned."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.to_raise: dict[int, BaseException] = {}

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        self.asked.append((threading.get_ident(), index))
        if index in self.to_raise:
            raise self.to_raise.pop(index)
        return np.full(3, index), index


def load(source: Any, **arguments: Any) -> Loader:
    return Loader(source, **{"batch_size": 4, "epochs": 2, "report": None, "decoders": 0, **arguments})


@pytest.fixture
def threads() -> Iterator[set[str]]:
    """Return the names of the threads that were started, at the test's end."""
    started: set[str] = set()
    usual = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started.add(thread.name)
        usual(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield started


def test_a_data_set_is_asked_by_the_callers_thread_in_the_order_of_the_plan(threads: set[str]) -> None:
    dataset = Numbers()
    with load(dataset, seed=3) as loader:
        dataset.asked.clear()  # the first sample was looked at
        for epoch in range(2):
            for step, (_, numbers) in enumerate(loader):
                assert numbers.tolist() == loader.plan.local_batch(0, epoch, step).tolist()
                # Nothing is loaded ahead.
                assert len(dataset.asked) == 4 * (3 * epoch + step + 1)

    expected = loader.plan.stream(0, 0, 0, 2 * COUNT).tolist()
    assert dataset.asked == [(threading.get_ident(), sample) for sample in expected]
    assert threads == set()


@pytest.mark.parametrize("policy", ["frequency", "staging"])
def test_a_folder_gives_the_same_bits_as_with_threads(
    image_folder: Callable[..., Path], policy: str, threads: set[str]
) -> None:
    def batches(decoders: int) -> list[list[bytes]]:
        transforms = (RandomResizedCrop(8), RandomHorizontalFlip(), ToTensor())
        with load(
            image_folder(), epochs=3, transforms=transforms, policy=policy, decoders=decoders
        ) as loader:
            return [[array.tobytes() for array in batch] for _ in range(3) for batch in loader]

    alone = batches(0)

    assert threads == set()
    assert alone == batches(2)


def test_batches_that_are_kept_keep_their_slots() -> None:
    with load(Numbers(), epochs=3, batch_size=2) as loader:
        kept = [batch for _ in range(3) for batch in loader]

    numbers = [number for arrays, numbers in kept for number in numbers.tolist()]
    assert sorted(numbers) == sorted(3 * list(range(COUNT)))
    assert all((arrays == numbers[:, None]).all() for arrays, numbers in kept)


def test_a_loop_that_is_left_early_goes_on_with_the_next_epoch() -> None:
    with load(Numbers()) as loader:
        for _ in loader:
            break
        assert loader.position == (1, 0)
        assert sum(len(numbers) for _, numbers in loader) == COUNT


def test_an_error_is_raised_where_the_batch_is_asked_for_or_skipped() -> None:
    for on_error in ("raise", "skip"):
        dataset = Numbers()
        with load(dataset, shuffle=False, on_error=on_error) as loader:
            dataset.to_raise[5] = DataError("torn")
            if on_error == "raise":
                with pytest.raises(DataError, match="torn") as caught:
                    list(loader)
                assert "__getitem__" in [entry.name for entry in caught.traceback]
            else:
                assert [len(numbers) for _, numbers in loader] == [4, 3, 4]


def test_after_ctrl_c_in_a_data_set_the_loader_goes_on() -> None:
    dataset = Numbers()
    with load(dataset, shuffle=False, epochs=3) as loader:
        batches = iter(loader)
        next(batches)
        dataset.to_raise[6] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            next(batches)

        assert loader.position == (1, 0)
        assert loader.state_dict()["step"] == 1
        for _ in range(2):
            assert [numbers.tolist() for _, numbers in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_after_ctrl_c_while_memory_is_filled_every_batch_has_its_bits(
    image_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted before, in the midst of, and after the copy of a sample into the tier."""
    transforms = (RandomResizedCrop(8), RandomHorizontalFlip(), ToTensor())
    folder = image_folder(COUNT)

    def bits(loader: Loader) -> list[bytes]:
        return [images.tobytes() for _ in range(2) for images, _ in loader]

    with load(folder, epochs=3, transforms=transforms) as loader:
        for _ in loader:
            pass
        expected = bits(loader)
    for method in ("take_space", "keep"):
        with load(folder, epochs=3, transforms=transforms) as loader:
            batches = iter(loader)
            next(batches)
            tier = loader._parts.fetcher._tiers[1]  # type: ignore[attr-defined]
            usual = getattr(tier, method)

            def interrupted(*arguments: Any, usual: Callable[..., Any] = usual) -> Any:
                monkeypatch.undo()
                usual(*arguments)
                raise KeyboardInterrupt

            monkeypatch.setattr(tier, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
            del batches
            assert bits(loader) == expected


def test_after_ctrl_c_in_a_decision_the_loader_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with load(Numbers(), shuffle=False) as loader:
        batches = iter(loader)
        next(batches)
        monkeypatch.setattr(loader._parts.engine._scheduler, "loaded", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)

        monkeypatch.undo()
        with pytest.raises(
            ClosedError, match=r"KeyboardInterrupt came .*of this one, or call its start\(0, 1\)"
        ):
            next(iter(loader))


def test_a_trace_has_the_work_of_the_one_thread(tmp_path: Path) -> None:
    with load(Numbers(), trace=tmp_path / "trace") as loader:
        for _ in loader:
            pass

    spans = read_trace(tmp_path / "trace").spans
    decoded = spans[spans["kind"] == Kind.DECODE]
    assert decoded["samples"].sum() == COUNT
    assert len(set(decoded["worker"].tolist())) == 1


def test_what_threads_are_needed_for_is_refused() -> None:
    for name in ("readers", "prefetch"):
        given: dict[str, Any] = {name: 4, "transforms": [ToTensor()]}
        with pytest.raises(
            ConfigError, match=f"{name} is 4 and decoders is 0, which has the training's own thread"
        ):
            LoaderConfig("photos", batch_size=4, epochs=1, decoders=0, **given)
    with pytest.raises(ConfigError, match="decoders is -1; it must be at least 0"):
        load(Numbers(), decoders=-1)


def test_a_run_that_loads_nothing_ahead_is_not_predicted(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    config = LoaderConfig(
        image_folder(), batch_size=4, epochs=1, transforms=[RandomResizedCrop(8), ToTensor()], decoders=0
    )
    with pytest.raises(ConfigError, match="decoders is 0, so that nothing is loaded ahead"):
        predict(config, "machine.toml", step_seconds=0.1)
    lines: list[str] = []
    with Loader(config, report=lines.append, trace=tmp_path / "trace") as loader:
        next(iter(loader))
    with pytest.raises(ConfigError, match=r"trace: it loaded nothing ahead \(decoders=0\)"):
        compare(tmp_path / "trace")
    assert "loads in the training's own thread, as decoders= says; takes at most" in lines[1]


class Squares:
    """Samples of microseconds, one of which cannot be had."""

    def __init__(self, broken: int) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise ValueError("no such square")
        return np.full(16, index * index), f"square of {index}"


@pytest.mark.parametrize("decoders", [0, 2])
def test_steps_that_share_a_slot_are_batches_of_their_own(decoders: int) -> None:
    """Some kept, some dropped, a pass left in the midst of a slot, a sample that fails."""
    kept: list[tuple[list[int], Any, Any]] = []
    loader = Loader(
        Squares(broken=77), batch_size=8, epochs=4, decoders=decoders, on_error="skip", report=None
    )
    with loader:
        assert (loader._parts.setup.limits.steps > 1) == (
            decoders > 0
        )  # without threads nothing is read ahead
        for epoch in range(4):
            for step, (numbers, names) in enumerate(loader):
                wanted = [each for each in loader.plan.local_batch(0, epoch, step).tolist() if each != 77]
                assert numbers[:, 0].tolist() == [each**2 for each in wanted]
                assert names == [f"square of {each}" for each in wanted]
                if step % 20 == 7:
                    kept.append((wanted, numbers, names))
                if step == 75 and epoch % 2:
                    break
        assert len(loader.skipped) >= 2
    assert all(numbers[:, 15].tolist() == [each**2 for each in wanted] for wanted, numbers, _ in kept)

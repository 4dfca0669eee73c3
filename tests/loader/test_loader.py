"""The loader as a user meets it, on real files."""

import contextlib
import gc
import importlib.metadata
import math
import os
import pickle
import platform
import re
import socket
import threading
import time
import warnings
import weakref
from collections import Counter
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import PIL
import pytest
from tests.for_each import for_each
from tests.patience import patient, wait_until
from tests.store.test_ranged import CHUNK, Chunks

import penstock
import penstock.torch
from penstock.errors import ClosedError, ConfigError, DataError, StagingError
from penstock.flow.cpus import CpuLimit
from penstock.flow.engine import Engine
from penstock.flow.lock_use import LockUse
from penstock.flow.snapshot_spans import SnapshotSpans
from penstock.loader import FrontEnd, Loader
from penstock.loader.transforms import RandomHorizontalFlip, RandomResizedCrop, Resize, ToTensor
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.measure.slow_source import SlowSource
from penstock.plan import BundleShuffle, Explicit, FullShuffle, Sequential
from penstock.policy import ThreadFacts
from penstock.policy.loading import Fill, Job, Loading
from penstock.store import ImageFolder
from penstock.trace import NO_STEP, SOURCE, Cause, Kind, limiting, read_trace
from penstock.trace.schema import AS_PLANNED

COUNT = 23
BATCH = 4
SMALL = "32 MiB"
TO_ARRAY = (Resize((8, 8)), ToTensor())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """23 PNG pictures of 8 x 8 pixels; every pixel of picture k has the value 10 k; label k % 3."""
    for number in range(COUNT):
        place = tmp_path / "data" / f"label{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(place / f"{number:02d}.png"), np.full((8, 8, 3), 10 * number, np.uint8))
    return tmp_path / "data"


def make(folder: Any, **options: Any) -> Loader:
    settings: dict[str, Any] = {
        "batch_size": BATCH,
        "epochs": 2,
        "transforms": TO_ARRAY,
        "memory": SMALL,
        "report": None,
        **options,
    }
    return Loader(folder, **settings)


def epoch_lines(lines: list[str]) -> list[str]:
    """Those about an epoch's end, of all that a loader reported."""
    return [line for line in lines if ": epoch " in line]


def numbers(images: np.ndarray) -> list[int]:
    """Which pictures are these? Read off their pixels."""
    return [round(pixel * 255 / 10) for pixel in images[:, 0, 0, 0].tolist()]


def ids_of(source: ImageFolder, pictures: list[int]) -> list[int]:
    places = {int(Path(source.path_of(k)).stem): k for k in range(len(source))}
    return [places[picture] for picture in pictures]


def test_each_epoch_brings_every_sample_once_with_its_label_in_the_plans_order(folder: Path) -> None:
    source = ImageFolder(folder)
    order = FullShuffle(COUNT, seed=7)

    with make(folder, seed=7) as loader:
        for epoch in range(2):
            seen = []
            for images, labels in loader:
                assert images.shape[1:] == (3, 8, 8)
                assert labels.tolist() == [picture % 3 for picture in numbers(images)]
                seen += ids_of(source, numbers(images))
            assert seen == order.at(epoch, np.arange(COUNT)).tolist()


def test_preview_and_position_say_what_comes_next(folder: Path) -> None:
    source = ImageFolder(folder)
    with make(folder) as loader:
        passes = iter(loader)
        next(passes)
        assert loader.position == (0, 1)
        expected = loader.preview(2 * BATCH).tolist()
        for wrong in (-1, "3"):
            with pytest.raises(ConfigError, match=f"count is {wrong!r}; it must be"):
                loader.preview(wrong)  # type: ignore[arg-type]

        seen = ids_of(source, numbers(next(passes)[0])) + ids_of(source, numbers(next(passes)[0]))

    assert seen == expected


def test_the_last_short_batch_comes_unless_dropped_and_len_counts_alike(folder: Path) -> None:
    with make(folder) as loader, make(folder, drop_last=True) as dropping:
        sizes = [len(labels) for _, labels in loader]
        dropping_sizes = [len(labels) for _, labels in dropping]

        assert sizes == [4, 4, 4, 4, 4, 3]
        assert dropping_sizes == [4] * 5
        assert (len(loader), len(dropping)) == (6, 5)


@pytest.mark.parametrize("order", [Sequential(COUNT), BundleShuffle(COUNT, 1, 0.3)])
def test_any_order_can_be_given(folder: Path, order: Any) -> None:
    source = ImageFolder(folder)
    with make(folder, shuffle=order) as loader:
        seen = [k for images, _ in loader for k in ids_of(source, numbers(images))]

    assert seen == order.at(0, np.arange(COUNT)).tolist()


def test_ranks_share_each_batch_without_overlap(folder: Path) -> None:
    with make(folder, rank=0, world_size=2) as first, make(folder, rank=1, world_size=2) as second:
        halves = [
            sorted(numbers(images) + numbers(other))
            for (images, _), (other, _) in zip(first, second, strict=True)
        ]

    with make(folder) as alone:
        assert halves == [sorted(numbers(images)) for images, _ in alone]


def test_augmentation_does_not_depend_on_threads_memory_ranks_or_timing(folder: Path) -> None:
    transforms = [RandomResizedCrop(6), RandomHorizontalFlip(), noisy, ToTensor()]

    def run(**options: Any) -> list[np.ndarray]:
        with make(folder, transforms=transforms, **options) as loader:
            return [images.copy() for _ in range(2) for images, _ in loader]

    alone = run(decoders=1, readers=1)
    slow = SlowSource(ImageFolder(folder), 1e-3, 1e-3, 1e6)

    for other in (run(decoders=4, readers=16), run(memory="512 KiB"), run_on(slow, transforms)):
        assert all(np.array_equal(one, two) for one, two in zip(alone, other, strict=True))
    halves = [run(rank=rank, world_size=2) for rank in range(2)]
    joined = [np.concatenate(parts) for parts in zip(*halves, strict=True)]
    assert all(np.array_equal(one, two) for one, two in zip(alone, joined, strict=True))


def run_on(source: Any, transforms: list[Any]) -> list[np.ndarray]:
    with make(source, transforms=transforms) as loader:
        return [images.copy() for _ in range(2) for images, _ in loader]


def noisy(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (image // 2 + rng.integers(0, 100, image.shape)).astype(np.uint8)


# Where it starts

RANDOM = (RandomResizedCrop(6), RandomHorizontalFlip(), ToTensor())


def rest_of(loader: Loader) -> list[list[Any]]:
    """Return what is left of the run: bytes and labels of each batch, by epoch."""
    rest = []
    while loader.position[0] < loader.plan.epochs:
        rest.append([(np.asarray(images).tobytes(), labels.tolist()) for images, labels in loader])
    return rest


@pytest.mark.parametrize(
    ("front", "options"),
    [
        (penstock.torch.Loader, {}),
        pytest.param(
            Loader,
            {"shuffle": False, "drop_last": True, "policy": "staging", "readers": 1, "decoders": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Loader,
            {"shuffle": BundleShuffle(COUNT, 1, 0.3), "seed": 5, "memory": "96 KiB"},
            marks=pytest.mark.slow,
        ),
        pytest.param(Loader, {"rank": 1, "world_size": 2, "split": "strided"}, marks=pytest.mark.slow),
        pytest.param(
            Loader,
            {"rank": 2, "world_size": 3, "batch_size": 7, "split": "balanced", "drop_last": True},
            marks=pytest.mark.slow,
        ),
        (Loader, {"shuffle": Explicit([range(9), [1, 2], range(22, 3, -1)], COUNT), "drop_last": True}),
    ],
    ids=["full, torch", "in order, dropped", "bundles", "strided", "three ranks", "an empty epoch"],
)
def test_a_loader_that_starts_within_the_run_gives_the_rest_of_one_that_began_with_it(
    folder: Path, front: Any, options: dict[str, Any]
) -> None:
    settings = {
        "batch_size": BATCH,
        "epochs": 3,
        "transforms": RANDOM,
        "memory": SMALL,
        "report": None,
        **options,
    }
    with front(folder, **settings) as whole:
        plan = whole.plan
        run = rest_of(whole)

    assert sum(map(len, run)) >= 6
    begun = [epoch for epoch in range(3) if plan.steps(epoch)]
    for epoch in range(3):
        for step in {0, plan.steps(epoch) - 1, plan.steps(epoch)} & set(range(plan.steps(epoch) + 1)):
            with front(folder, **settings) as loader:
                loader.start(epoch, step)
                expected = [run[begun.index(epoch)][step:] if epoch in begun else []]
                expected += [run[begun.index(later)] for later in begun if later > epoch]
                assert (
                    loader.preview(COUNT).tolist()
                    == plan.stream(loader.config.rank or 0, epoch, step, COUNT).tolist()
                )
                assert rest_of(loader) == [batches for batches in expected if batches]


def threads_of_penstock() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]


def test_nothing_is_read_ahead_before_the_start_and_all_that_fits_after_it(folder: Path) -> None:
    counting = CountingSource(ImageFolder(folder))
    with make(counting, seed=3) as loader:
        assert threads_of_penstock() == []
        assert counting.calls == [loader.preview(1)[0]], "one, to see how large a picture is"
        loader.start()
        wait_until(lambda: set(counting.calls) == set(range(COUNT)))

        loader.start()
        assert [
            k for images, _ in loader for k in ids_of(ImageFolder(folder), numbers(images))
        ] == FullShuffle(COUNT, 3).at(0, np.arange(COUNT)).tolist()
        with pytest.raises(
            ConfigError, match=r"was started already and is at epoch 1, step 0: start\(\) comes before"
        ):
            loader.start()


def test_a_loop_that_took_no_batch_leaves_the_rest_of_the_epoch_to_the_next_and_one_that_did_ends_it(
    folder: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    with make(folder, epochs=4, shuffle=False, report=lines.append, trace=tmp_path / "trace") as loader:
        loader.start(1, 3)
        assert lines == loader.start_lines
        assert (loader.position, len(loader)) == ((1, 3), 6)
        iter(loader)
        assert loader.position == (1, 3)
        source = ImageFolder(folder)
        assert [ids_of(source, numbers(images))[0] for images, _ in loader] == [12, 16, 20]
        assert loader.position == (2, 0)
        for _ in loader:
            break
        assert loader.position == (3, 0)
    spans = read_trace(tmp_path / "trace").spans
    steps = spans[spans["kind"] == Kind.STEP]

    assert [(int(step["epoch"]), int(step["step"])) for step in steps] == [(1, 3), (1, 4), (1, 5), (2, 0)]
    assert ["epoch 1:" in line for line in epoch_lines(lines)] == [True, False]


def test_the_end_of_a_run_is_a_place_to_start_at_too(folder: Path) -> None:
    for position in ((2, 0), (1, 6)):
        with make(folder) as loader:
            loader.start(*position)
            with pytest.raises(ClosedError, match="all 2 epochs of this loader were read"):
                iter(loader)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ((3, 0), "epoch is 3; the plan has the epochs 0 to 1"),
        ((-1, 0), "epoch is -1"),
        ((1, 7), "step is 7; epoch 1 has 6 steps, from 0"),
        ((2, 1), "step is 1; epoch 2 has 0 steps"),
        ((0, 1.0), "step is 1.0"),
        (("0", 0), "epoch is '0'"),
    ],
)
def test_a_place_that_the_plan_has_not_is_refused_and_starts_nothing(
    folder: Path, position: tuple[Any, Any], message: str
) -> None:
    with make(folder) as loader:
        with pytest.raises(ConfigError, match=message):
            loader.start(*position)
        assert threads_of_penstock() == []
        assert sum(len(labels) for _, labels in loader) == COUNT
        with pytest.raises(ConfigError, match="was started already"):
            loader.start(1, 0)
    with pytest.raises(ClosedError, match="closed"):
        loader.start()


def test_where_no_thread_can_be_started_the_loop_says_so_and_can_be_begun_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with make(folder) as loader:
        with monkeypatch.context() as patched:
            patched.setattr("penstock.loader.starting._thread.start_new_thread", refuse)
            with pytest.raises(DataError, match=r"can't start new thread: .*raise `ulimit -u`"):
                next(iter(loader))
        assert sum(len(labels) for _, labels in loader) == COUNT


def test_what_a_start_failed_with_is_raised_by_every_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    with make(folder, report=lines.append) as loader:
        monkeypatch.setattr(loader._loop, "_start", lambda: 1 / 0)
        for begin in (loader.start, lambda: next(iter(loader)), lambda: next(iter(loader))):
            with pytest.raises(ZeroDivisionError):
                begin()

    assert not lines, "what has not started is not reported"


def test_a_front_end_of_ones_own_says_how_samples_come_in_and_batches_go_out() -> None:
    dates = [date(2026, 1, 1 + k) for k in range(4)]
    begun: list[str] = []
    front_end = FrontEnd(
        present=lambda batch, dtype: (dtype, [date.fromordinal(int(day)) for day in batch]),
        as_array=lambda leaf: np.array(leaf.toordinal()) if isinstance(leaf, date) else None,
        begin_thread=lambda: begun.append(threading.current_thread().name),
    )

    with Loader(dates, batch_size=3, epochs=1, shuffle=False, front_end=front_end, report=None) as loader:
        assert list(loader) == [(None, dates[:3]), (None, dates[3:])]
    with pytest.raises(ConfigError, match=r"front_end is 'torch'; .* penstock\.torch\.Loader"):
        Loader(dates, batch_size=3, epochs=1, front_end="torch")  # type: ignore[arg-type]
    assert begun
    assert all(name.startswith("penstock-decode") for name in begun)


def test_a_loader_that_was_never_started_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("of an earlier run")
    with make(folder, trace=tmp_path / "trace"):
        pass

    loader = make(folder, trace=tmp_path / "trace")
    gone = weakref.ref(loader._parts.engine)
    del loader

    def is_gone() -> bool:
        gc.collect()
        return gone() is None

    wait_until(is_gone)
    assert (tmp_path / "trace").read_text() == "of an earlier run"


# Leaving


def test_leaving_a_loop_early_ends_that_epoch_and_the_next_loop_runs_the_next(folder: Path) -> None:
    order = FullShuffle(COUNT, seed=0)
    source = ImageFolder(folder)
    with make(folder, epochs=3) as loader:
        for _ in loader:
            break
        second = [k for images, _ in loader for k in ids_of(source, numbers(images))]
        for _ in zip(range(3), loader, strict=False):
            pass

        assert second == order.at(1, np.arange(COUNT)).tolist()
        with pytest.raises(ClosedError, match="all 3 epochs"):
            iter(loader)


def test_a_loader_runs_one_epoch_at_a_time_and_the_older_pass_is_told(folder: Path) -> None:
    with make(folder) as loader:
        older = iter(loader)
        next(older)
        newer = iter(loader)
        next(newer)

        with pytest.raises(ClosedError, match="one epoch at a time"):
            next(older)


def test_training_and_validation_loaders_live_side_by_side(folder: Path) -> None:
    with make(folder, epochs=2) as training, make(folder, epochs=2, shuffle=False) as validation:
        for _ in range(2):
            assert sum(len(labels) for _, labels in training) == COUNT
            assert [k for images, _ in validation for k in sorted(numbers(images))] != []


def test_memory_for_half_of_the_data_set_halves_the_reads_as_far_as_any_cache_can(folder: Path) -> None:
    source = ImageFolder(folder)
    sizes = source.sizes_bytes
    half = int(np.cumsum(sizes)[COUNT // 2 - 1])
    memory = Curve(((1, 1e9),))
    machine = Machine(
        SharedStore(None, Curve(((1, 1e6),)), 1e-3, 8),
        (StorageClass("staging", 10**6, 1, memory), StorageClass("memory", half, 1, memory)),
    )
    epochs = 4

    counting = CountingSource(source)
    with make(counting, epochs=epochs, machine=machine) as loader:
        for _ in range(epochs):
            for _ in loader:
                pass
        traced = sum(epoch.reads_by_place.get(SOURCE, 0) for epoch in loader.metrics)

    bound = COUNT + (epochs - 1) * (COUNT - COUNT // 2)
    seen = 1  # to see how large a picture is
    assert len(counting.calls) - seen == traced <= bound
    assert sorted(Counter(counting.calls).values())[: COUNT // 2] == [1] * (COUNT // 2)


class CountingSource:
    """A source that writes down who was read."""

    def __init__(self, source: ImageFolder) -> None:
        self._source = source
        self.calls: list[int] = []
        self.sizes_bytes, self.labels, self.classes = source.sizes_bytes, source.labels, source.classes
        self.describe = source.describe

    def __len__(self) -> int:
        return len(self._source)

    def read(self, sample: int) -> bytes:
        self.calls.append(sample)
        return self._source.read(sample)

    def read_into(self, sample: int, buffer: memoryview) -> int:
        self.calls.append(sample)
        return self._source.read_into(sample, buffer)


class WithNames(CountingSource):
    """The class, a weight and two boxes of each picture."""

    def __init__(self, source: ImageFolder, is_structured: bool = False) -> None:
        super().__init__(source)
        self.class_of = source.labels.astype(np.int8)
        self.weights = np.arange(len(source)) / 4
        self.boxes = np.arange(8 * len(source), dtype=np.float32).reshape(-1, 2, 4)
        self.labels: Any = {"class": self.class_of, "weight": self.weights, "boxes": self.boxes}
        if is_structured:
            kinds = [("class", ">i2"), ("weight", "f8"), ("boxes", "f4", (2, 4))]
            rows = zip(self.class_of, self.weights, self.boxes, strict=True)
            self.labels = np.array(list(rows), kinds)


@pytest.mark.parametrize("is_structured", [False, True], ids=["a mapping", "named fields"])
def test_labels_with_names_give_dicts_with_an_array_for_each_name(folder: Path, is_structured: bool) -> None:
    source = WithNames(ImageFolder(folder), is_structured)
    spoil(Path(ImageFolder(folder).path_of(5)), "vanished")

    with make(source, on_error="skip") as loader:
        for epoch in range(2):
            ids = [k for k in loader.plan.string(0)[epoch * COUNT : (epoch + 1) * COUNT] if k != 5]
            batches = list(loader)

            assert {tuple(batch) for batch in batches} == {("images", "class", "weight", "boxes")}
            joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
            assert len(joined["images"]) == COUNT - 1
            assert joined["class"].dtype == (np.int16 if is_structured else np.int8)
            for name, expected in (
                ("class", source.class_of),
                ("weight", source.weights),
                ("boxes", source.boxes),
            ):
                assert np.array_equal(joined[name], expected[ids])


def test_labels_without_a_name_that_are_no_whole_numbers_keep_their_type_and_shape(folder: Path) -> None:
    source = CountingSource(ImageFolder(folder))
    targets = np.linspace(0, 1, 3 * COUNT, dtype=np.float32).reshape(COUNT, 3)
    source.labels = targets  # type: ignore[assignment]

    with make(source, shuffle=False, epochs=1) as loader:
        found = np.concatenate([labels for _, labels in loader])

    assert found.dtype == np.float32
    assert np.array_equal(found, targets)


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (np.zeros(COUNT - 1, np.int64), rf"labels of the source is int64\[{COUNT - 1}\]"),
        (
            np.full(COUNT, 2**63, np.uint64),
            r"labels of the source have 9,223,372,036,854,775,808, which is no int64",
        ),
        ({"name": np.array(["a"] * COUNT)}, r"labels\['name'\] of the source is <U1"),
        ({"boxes": [[1, 2]]}, r"labels\['boxes'\] of the source is int64\[1, 2\]"),
        ({"images": np.zeros(COUNT)}, r"labels\['images'\] of the source has the name of the images"),
    ],
)
def test_labels_that_are_no_numbers_for_each_sample_are_named(folder: Path, labels: Any, text: str) -> None:
    source = CountingSource(ImageFolder(folder))
    source.labels = labels

    with pytest.raises(ConfigError, match=text):
        make(source)


def test_the_parts_of_the_memory_never_exceed_what_was_given(folder: Path) -> None:
    for memory in ("64 KiB", "1 MiB", "1 GiB"):
        with make(folder, memory=memory, decoders=4) as loader:
            budget, limits = loader.memory, loader._parts.setup.limits
        used = budget.slots * budget.slot_bytes + budget.undecoded_bytes + budget.tier_bytes
        assert used <= budget.limit_bytes
        assert 0 < 4 * limits.own_bytes <= budget.undecoded_bytes - limits.undecoded_bytes


def test_keeping_every_batch_ends_with_the_reason_not_in_a_wait(folder: Path) -> None:
    kept: list[Any] = []
    with (
        make(folder, epochs=50, memory="96 KiB") as loader,
        pytest.raises(StagingError, match="copy what you keep"),
    ):
        kept.extend(batch for _ in range(50) for batch in loader)

    assert len(kept) >= 8


def test_a_batch_keeps_its_content_after_the_loader_is_gone(folder: Path) -> None:
    loader = make(folder)
    images, _ = next(iter(loader))
    before = images.copy()
    loader.close()
    del loader
    gc.collect()

    assert np.array_equal(images, before)


def test_the_end_of_an_epoch_says_in_one_line_what_limits(folder: Path) -> None:
    lines: list[str] = []
    with make(SlowSource(ImageFolder(folder), 5e-3, 5e-3, 1e4), report=lines.append) as loader:
        for _ in range(2):
            for _ in loader:
                pass

        assert lines == loader.start_lines + [
            f"SlowSource: {limiting(metrics)}" for metrics in loader.metrics
        ]
    assert len(epoch_lines(lines)) == 2
    assert "storage limits it" in epoch_lines(lines)[0]


class BreaksOff:
    """A data set whose last samples cannot be had."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, sample: int) -> np.ndarray:
        if sample >= 8:
            raise ValueError(f"sample {sample} is broken")
        return np.zeros(3)


def interrupt(_error: Exception, _sample: int) -> Literal["raise", "skip"]:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("on_error", "raised"), [("raise", ValueError), (interrupt, KeyboardInterrupt), ("skip", None)]
)
def test_a_wait_that_gets_no_batch_is_part_of_the_trace_the_sums_and_the_line(
    tmp_path: Path, on_error: Any, raised: type[BaseException] | None
) -> None:
    lines: list[str] = []
    options: dict[str, Any] = {
        "transforms": (),
        "shuffle": False,
        "on_error": on_error,
        "report": lines.append,
    }
    delivered = 0
    with (
        pytest.raises(raised) if raised else contextlib.nullcontext(),
        make(BreaksOff(), batch_size=4, trace=tmp_path / "run.trace", **options) as loader,
    ):
        for _ in loader:
            delivered += 1

    waits = [span for span in read_trace(tmp_path / "run.trace").spans if span["kind"] == Kind.WAIT]
    (metrics,) = loader.metrics
    seconds = [float(span["end"] - span["start"]) for span in waits]
    assert delivered == 2
    assert [int(span["step"]) for span in waits] == [0, 1, NO_STEP]
    assert metrics.stall_seconds == pytest.approx(sum(seconds))
    assert metrics.stall_by_cause[Cause.NO_BATCH] == pytest.approx(seconds[-1])
    assert metrics.steps == 2
    assert limiting(metrics, "the data set", "the data set") in lines[-1]


def test_an_epoch_whose_first_batch_never_came_is_told_too() -> None:
    lines: list[str] = []
    order = Explicit([[0, 1], [0, 8]], samples=12)
    with make(BreaksOff(), batch_size=2, transforms=(), shuffle=order, report=lines.append) as loader:
        assert len(list(loader)) == 1
        with pytest.raises(ValueError, match="sample 8 is broken"):
            next(iter(loader))

    assert "epoch 1: no batch was consumed in " in epoch_lines(lines)[1]


def unchanged(picture: np.ndarray) -> np.ndarray:
    return picture


@pytest.mark.parametrize(
    ("step", "kept", "is_named"), [(unchanged, 20, True), (unchanged, 2, False), (Resize((8, 8)), 20, False)]
)
def test_the_end_of_an_epoch_names_code_that_holds_the_interpreters_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: Any, kept: int, is_named: bool
) -> None:
    """A user's, not Penstock's own. One thread alone shows nothing of the lock: what was seen before still holds."""
    monkeypatch.setattr("penstock.loader.setup.cpu_limit", lambda: CpuLimit(4, "as the test has it"))
    seen = LockUse(seconds=2.0, cpu_seconds=1.94, asked=20, kept=kept)
    monkeypatch.setattr(Engine, "lock_use", property(lambda engine: seen))
    threads = ThreadFacts(1, 1, 32, waiting=0.0, more=None, fewer=None)
    monkeypatch.setattr(Engine, "threads", property(lambda engine: threads))
    lines: list[str] = []

    with make(folder, epochs=3, transforms=[step, ToTensor()], report=lines.append) as loader:
        for epoch in range(3):
            for _ in loader:
                pass
            if epoch == 1:
                threads = replace(threads, threads=4)

    named = "its Python code holds the interpreter's lock: threads that had work used 0.97 of 4 processors"
    assert [named in line for line in epoch_lines(lines)] == [is_named, is_named, False]


def test_the_trace_file_holds_the_run_and_its_sums_are_the_loaders(folder: Path, tmp_path: Path) -> None:
    with make(folder, trace=tmp_path / "run.trace") as loader:
        for _ in range(2):
            for _ in loader:
                pass
        metrics = loader.metrics
    trace = read_trace(tmp_path / "run.trace")

    assert trace.is_complete
    for ours, theirs in zip(metrics, trace.epochs(), strict=True):
        assert ours.samples == theirs.samples == COUNT
        assert ours.reads_by_place == theirs.reads_by_place
        assert ours.stall_seconds == pytest.approx(theirs.stall_seconds)
        assert ours.stall_by_cause == pytest.approx(theirs.stall_by_cause)


SLOW_MACHINE = Machine(
    SharedStore(None, Curve(((1, 1e6),)), 1e-3, 8),
    tuple(StorageClass(name, 10**7, 1, Curve(((1, 1e9),))) for name in ("staging", "memory")),
)


def test_a_prediction_has_the_reads_and_the_shape_of_the_run(folder: Path) -> None:
    with make(folder, machine=SLOW_MACHINE) as loader:
        for _ in range(2):
            for _ in loader:
                pass
        predicted = loader.predict(step_seconds=0.01).epochs()
        measured = loader.metrics

    assert [epoch.samples for epoch in predicted] == [epoch.samples for epoch in measured]
    assert [epoch.reads_by_place for epoch in predicted] == [epoch.reads_by_place for epoch in measured]
    assert all(epoch.own_seconds == pytest.approx(0.06) for epoch in predicted)


class KeepsTen:
    """A user's own policy."""

    name = "keeps-ten"

    def prepare(self, job: Job) -> Loading:
        return Loading([Fill(rank, 1, np.arange(3, 13)) for rank in job.asking])


@pytest.mark.parametrize(
    ("policy", "reads"),
    [("frequency", [23, 0, 0]), ("staging", [23, 23, 23]), (KeepsTen(), [23, 13, 13])],
    ids=["frequency", "staging", "a user's own"],
)
def test_a_run_over_a_slow_store_has_the_reads_that_were_predicted_for_its_policy(
    folder: Path, policy: Any, reads: list[int]
) -> None:
    """Fewer than 23 samples are staged at a time: a read that is under way would serve two epochs."""
    store = SlowSource(ImageFolder(folder), 1e-3, 1e-4, 1e6)
    large = (Resize((256, 256)), ToTensor())
    options: dict[str, Any] = {"policy": policy, "shuffle": False, "epochs": 3, "machine": SLOW_MACHINE}
    with make(store, transforms=large, **options) as loader:
        for _ in range(3):
            for _ in loader:
                pass
        measured = [epoch.reads_by_place for epoch in loader.metrics]
        predicted = loader.predict(step_seconds=0.01)
    store.close()

    assert predicted.meta["policy"] == getattr(policy, "name", policy)
    assert [places.get(SOURCE, 0) for places in measured] == reads
    assert [epoch.reads_by_place for epoch in predicted.epochs()] == measured


def test_a_prediction_without_the_speed_of_the_training_asks_for_it(folder: Path) -> None:
    with make(folder, machine=SLOW_MACHINE) as loader, pytest.raises(ConfigError, match="step_seconds"):
        loader.predict()


def test_nothing_is_predicted_from_a_machine_that_nobody_measured(folder: Path) -> None:
    with make(folder) as loader:
        with pytest.raises(ConfigError, match="penstock calibrate"):
            loader.predict(step_seconds=0.1)
        assert loader.predict(machine=SLOW_MACHINE, step_seconds=0.1).epochs()


def test_threads_end_when_the_last_reference_goes_even_without_close(folder: Path) -> None:
    before = threading.active_count()
    loader = make(folder)
    next(iter(loader))
    gone = weakref.ref(loader)

    del loader
    gc.collect()

    assert gone() is None
    wait_until(lambda: threading.active_count() <= before)


class Numbers:
    """A map-style data set."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise KeyError("no such thing")
        return {"row": (np.full(3, index, np.float32), index), "name": f"number {index}", "half": index / 2}


def test_a_map_style_data_set_is_read_unchanged(folder: Path) -> None:
    with make(Numbers(), transforms=()) as loader:
        for _ in range(2):
            seen = []
            for batch in loader:
                rows, ids = batch["row"]
                assert (rows == ids[:, None]).all()
                assert batch["name"] == [f"number {index}" for index in ids]
                assert batch["half"].tolist() == [index / 2 for index in ids]
                seen += ids.tolist()
            assert sorted(seen) == list(range(COUNT))


def test_an_error_of_a_data_set_comes_with_its_sample(folder: Path) -> None:
    with make(Numbers(broken=5), transforms=(), shuffle=False) as loader:
        passes = iter(loader)
        next(passes)
        with pytest.raises(KeyError, match="no such thing") as caught:
            next(passes)

    notes = " ".join(caught.value.__notes__)
    assert "while loading Numbers[5]" in notes
    assert "epoch 0, step 1" in notes


def test_samples_of_unlike_shape_are_refused_by_name(folder: Path) -> None:
    class Ragged(Numbers):
        def __getitem__(self, index: int) -> Any:
            return np.zeros(3 if index < 6 else 4)

    with (
        make(Ragged(), transforms=(), shuffle=False) as loader,
        pytest.raises(DataError, match=r"Ragged\[6\].*\[4\]"),
    ):
        for _ in loader:
            pass


# What bad input gets


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    match how:
        case "truncated":
            path.write_bytes(data[: len(data) // 2])
        case "not an image":
            path.write_bytes(b"dear diary, " * 10)
        case "zero-length":
            path.write_bytes(b"")
        case "vanished":
            path.unlink()


@pytest.mark.parametrize("how", ["truncated", "not an image", "zero-length", "vanished"])
def test_a_spoiled_file_is_named_and_can_be_skipped_with_the_others_in_order(folder: Path, how: str) -> None:
    source = ImageFolder(folder)
    spoiled = Path(source.path_of(6))
    spoil(spoiled, how)
    if how in ("truncated", "not an image"):
        source = ImageFolder(folder)

    with make(source, shuffle=False) as loader, pytest.raises(DataError, match=spoiled.name) as caught:
        for _ in loader:
            pass
    assert str(spoiled) in str(caught.value)

    with make(source, shuffle=False, on_error="skip") as loader:
        seen = [k for images, _ in loader for k in ids_of(source, numbers(images))]
        assert seen == [k for k in range(COUNT) if k != 6]
        assert [(skip.epoch, skip.step, skip.sample, skip.name) for skip in loader.skipped] == [
            (0, 1, 6, str(spoiled))
        ]


def test_a_batch_of_nothing_but_spoiled_files_is_left_out(folder: Path) -> None:
    source = ImageFolder(folder)
    for sample in range(4, 8):
        spoil(Path(source.path_of(sample)), "vanished")

    with make(source, shuffle=False, on_error="skip") as loader:
        assert [len(labels) for _, labels in loader] == [4, 4, 4, 4, 3]
        assert [skip.sample for skip in loader.skipped] == [4, 5, 6, 7]


def test_a_function_decides_what_an_error_means(folder: Path) -> None:
    source = ImageFolder(folder)
    spoil(Path(source.path_of(2)), "vanished")
    spoil(Path(source.path_of(9)), "vanished")
    asked: list[int] = []

    def decide(error: Exception, sample: int) -> Any:
        asked.append(sample)
        assert isinstance(error, DataError)
        return "skip" if sample == 2 else "raise"

    with make(source, shuffle=False, on_error=decide) as loader:
        passes = iter(loader)
        assert len(next(passes)[1]) == 3
        next(passes)
        with pytest.raises(DataError):
            next(passes)
    assert asked == [2, 9]


def test_an_error_in_a_users_transform_keeps_its_kind_and_tells_its_place(folder: Path) -> None:
    def picky(image: np.ndarray) -> np.ndarray:
        if image[0, 0, 0] == 100:
            raise ZeroDivisionError("not this one")
        return image

    with make(folder, transforms=(picky, *TO_ARRAY)) as loader, pytest.raises(ZeroDivisionError) as caught:
        for _ in loader:
            pass

    notes = " ".join(caught.value.__notes__)
    assert "10.png" in notes
    assert notes.count("sample ") == 1, "a message names its sample once"


MACHINE = """
[source]
read = "50 MB/s"
latency = "10 ms"
threads = 8

[[storage]]
name = "staging"
capacity = "100 MB"
threads = 1
read = "10 GB/s"
"""


def test_a_machine_can_be_given_by_its_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "machine.toml").write_text(MACHINE)

    with make(folder, machine=tmp_path / "machine.toml") as loader:
        assert sum(len(labels) for _, labels in loader) == COUNT
        assert loader.memory.tier_bytes == 0  # the machine names no tier


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (None, DataError, "machine.toml.*penstock calibrate"),
        (MACHINE.replace("10 ms", "10 GB"), ConfigError, "machine.toml: source.latency"),
        (
            MACHINE + '[[storage]]\nname="m"\ncapacity="10 B"\nthreads=1\nread="1 GB/s"',
            ConfigError,
            "largest sample",
        ),
        (
            MACHINE + '[[storage]]\nname="ssd"\ncapacity="1 GB"\nthreads=1\nread="1 GB/s"',
            ConfigError,
            "'ssd' is a disk by its name",
        ),
    ],
)
def test_a_machine_that_cannot_serve_is_named_with_its_fault(
    folder: Path, tmp_path: Path, text: str | None, error: type[Exception], message: str
) -> None:
    if text is not None:
        (tmp_path / "machine.toml").write_text(text)

    with pytest.raises(error, match=message):
        make(folder, machine=tmp_path / "machine.toml")


def test_transforms_beside_a_data_set_are_refused() -> None:
    with pytest.raises(ConfigError, match="makes its samples itself"):
        make(Numbers())


def test_a_closed_loader_says_so(folder: Path) -> None:
    loader = make(folder)
    batches = iter(loader)
    next(batches)
    loader.close()
    loader.close()

    with pytest.raises(ClosedError, match="closed"):
        next(batches)
    with pytest.raises(ClosedError, match="closed"):
        iter(loader)


@pytest.mark.parametrize(("batch_size", "world_size"), [(2, 4), (11, 11)])
def test_ranks_whose_epochs_would_end_at_different_steps_are_refused(
    folder: Path, batch_size: int, world_size: int
) -> None:
    """Data-parallel training would hang in its last step: the others wait for a rank that is through."""
    with pytest.raises(ConfigError, match="end its epoch early"):
        make(folder, batch_size=batch_size, rank=0, world_size=world_size)

    if batch_size == 11:
        with make(folder, batch_size=batch_size, rank=0, world_size=world_size, drop_last=True) as loader:
            assert len(list(loader)) == 2


def test_stall_causes_of_a_slow_store_are_its_reads(folder: Path) -> None:
    with make(SlowSource(ImageFolder(folder), 1e-2, 1e-2, 1e6), epochs=1, readers=1) as loader:
        for _ in loader:
            pass
        (metrics,) = loader.metrics

    assert metrics.stall_by_cause[Cause.SOURCE_READ] > 0.5 * metrics.stall_seconds


def test_spans_of_a_long_step_of_the_training_are_not_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the training validates for minutes, background fills go on and fill the threads' rings."""
    monkeypatch.setattr("penstock.flow.engine._READER_SPANS", 4)
    monkeypatch.setattr(
        "penstock.flow.collector._TOGETHER_SECONDS", math.inf
    )  # on a slow machine all is summed up
    with make(SlowSource(ImageFolder(folder), 1e-3, 1e-3, 1e6), memory="96 KiB", readers=1) as loader:
        first = iter(loader)
        next(first)
        wait_until(lambda: loader._parts.collector._unsummed)  # nobody asks for a batch, yet spans arrive
        for _ in first:
            pass
        for _ in loader:
            pass
        reads = sum(
            epoch.reads_by_place[SOURCE] for epoch in loader.metrics if SOURCE in epoch.reads_by_place
        )

        assert loader._parts.recorder.dropped == 0
        assert reads >= COUNT


def test_the_epochs_line_tells_what_was_skipped(folder: Path) -> None:
    source = ImageFolder(folder)
    spoil(Path(source.path_of(3)), "vanished")
    spoil(Path(source.path_of(8)), "vanished")
    lines: list[str] = []

    with make(source, shuffle=False, on_error="skip", epochs=1, report=lines.append) as loader:
        for _ in loader:
            pass

    assert "skipped 2 samples, the first: " + source.path_of(3) in epoch_lines(lines)[0]


def test_the_sample_that_was_skipped_is_named_with_its_error_and_the_transform(folder: Path) -> None:
    lines: list[str] = []

    with make(
        BreaksOff(), transforms=(), shuffle=False, on_error="skip", epochs=1, report=lines.append
    ) as loader:
        for _ in loader:
            pass

    assert epoch_lines(lines)[0].endswith(
        "; skipped 4 samples, the first (BreaksOff[8]): ValueError: sample 8 is broken"
    )

    def wrong(pixels: np.ndarray) -> np.ndarray:
        if round(pixels[0, 0, 0] / 10) == 5:
            pixels.resiz(8)  # type: ignore[attr-defined]
        return pixels

    with make(
        folder, transforms=[wrong, *TO_ARRAY], on_error="skip", epochs=1, report=lines.append
    ) as loader:
        for _ in loader:
            pass

    said = epoch_lines(lines)[1].partition(
        "): AttributeError: 'numpy.ndarray' object has no attribute 'resiz', "
    )
    assert said[2].startswith(f"in transform 0 ({wrong.__qualname__}), called with "), lines


def test_an_epoch_in_which_every_sample_is_skipped_is_an_error(folder: Path) -> None:
    source = ImageFolder(folder)
    for sample in range(COUNT):
        spoil(Path(source.path_of(sample)), "vanished")

    with make(source, on_error="skip") as loader, pytest.raises(DataError, match="skipped 23 samples"):
        for _ in loader:
            pass


def test_the_sums_can_be_asked_for_after_the_end(folder: Path, tmp_path: Path) -> None:
    with make(folder, trace=tmp_path / "run.trace", epochs=1) as loader:
        for _ in loader:
            pass

    assert loader.metrics[0].samples == COUNT


def test_a_trace_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    places = ("/nowhere/run.trace", "No such file"), (str(folder), "Is a directory"), ("nul\0", "null byte")
    for trace, why in places:
        with pytest.raises(
            DataError, match=rf"trace is {re.escape(repr(trace))}, which cannot be written: .*{why}"
        ):
            make(folder, trace=trace)
    (tmp_path / "gone").mkdir()
    with make(folder, trace=tmp_path / "gone" / "run.trace") as loader:
        (tmp_path / "gone").rmdir()
        for _ in range(2):
            with pytest.raises(
                DataError, match=r"gone/run\.trace.*, which cannot be written: .*No such file"
            ):
                next(iter(loader))


def test_saves_before_the_start_are_in_the_trace(folder: Path, tmp_path: Path) -> None:
    with make(folder, epochs=1, trace=tmp_path / "run.trace") as loader:
        with SnapshotSpans(loader.recorder).span(Kind.LOAD, step=7):
            pass
        assert loader.metrics == []
        loader.start(0, 2)

    trace = read_trace(tmp_path / "run.trace")
    assert trace.spans["step"][trace.spans["kind"] == Kind.LOAD].tolist() == [7]
    assert trace.meta["first_step"] == [0, 2]


def test_a_trace_is_on_the_disk_every_few_seconds_however_slow_the_steps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.loader.step_clock._DRAIN_SECONDS", 0.0)
    with make(folder, trace=tmp_path / "run.trace") as loader:
        passes = iter(loader)
        next(passes)
        next(passes)

        spans = read_trace(tmp_path / "run.trace").spans

    assert np.count_nonzero(spans["kind"] == Kind.WAIT) == 1


def test_a_trace_says_what_ran_where_and_when_and_what_its_slowest_samples_are_called(
    folder: Path, tmp_path: Path
) -> None:
    before = datetime.now(UTC)
    with make(folder, epochs=1, trace=tmp_path / "run.trace") as loader:
        for _ in loader:
            pass
        source = loader._parts.fetcher.place
        names = {sample: loader._parts.fetcher.describe(sample) for sample in range(COUNT)}
    trace = read_trace(tmp_path / "run.trace")
    meta: dict[str, Any] = dict(trace.meta)

    assert (meta["source"], meta["host"], meta["rank"]) == (source, socket.gethostname(), 0)
    assert meta["policy"] == "frequency"
    versions = meta["versions"]
    assert versions["penstock"] == importlib.metadata.version("penstock")
    assert versions["python"] == platform.python_version()
    assert (versions["numpy"], versions["pillow"]) == (np.__version__, PIL.__version__)
    started = datetime.fromisoformat(meta["started"])
    assert started.utcoffset() is not None
    assert before - timedelta(seconds=1) < started < datetime.now(UTC) + timedelta(seconds=1)
    assert trace.hosts == {0: socket.gethostname()}
    slowest = trace.slowest()
    assert set(slowest["sample"][slowest["kind"] == Kind.READ].tolist()) <= set(trace.names)
    assert trace.names.items() <= names.items()


@for_each("workers", [{"decoders": 0}, {"decoders": 1}, {"decoders": 2, "readers": 2}])
def test_a_trace_knows_the_samples_of_all_groups_and_names_none_that_the_plan_tells(
    folder: Path, tmp_path: Path, workers: dict[str, int]
) -> None:
    given: dict[tuple[int, int], list[int]] = {}
    with make(folder, epochs=4, trace=tmp_path / "run.trace", **workers) as loader:
        while loader.position[0] < 4:
            epoch = loader.position[0]
            given |= {(epoch, step): numbers(images) for step, (images, _) in enumerate(loader)}

    trace = penstock.read_trace(tmp_path / "run.trace")
    decodes = trace.spans[trace.spans["kind"] == Kind.DECODE]
    loaded: dict[tuple[int, int], list[int]] = {}
    for span in decodes:
        ids = trace.ids.get((0, int(span["flow"])), np.array([span["sample"]]))
        assert (ids.size, ids[0]) == (span["samples"], span["sample"])
        loaded.setdefault((int(span["epoch"]), int(span["step"])), []).extend(ids.tolist())
    source = ImageFolder(folder)
    by_first: dict[tuple[int, int], list[int]] = {}
    for epoch, step in sorted(given):
        first = max(key for key in loaded if key <= (epoch, step))
        by_first.setdefault(first, []).extend(ids_of(source, given[epoch, step]))
    assert {key: sorted(ids) for key, ids in loaded.items()} == {
        key: sorted(ids) for key, ids in by_first.items()
    }
    written = {flow for _, flow in read_trace(tmp_path / "run.trace").ids}
    told = {flow for flow in trace.spans["flow"].tolist() if flow & AS_PLANNED}
    assert told
    assert not told & written


def test_saves_that_are_recorded_with_the_loaders_recorder_are_in_its_trace_and_its_sums(
    folder: Path, tmp_path: Path
) -> None:
    with make(folder, epochs=1, trace=tmp_path / "run.trace") as loader:
        for step, _ in enumerate(loader):
            if step == 2:
                with SnapshotSpans(loader.recorder).span(Kind.SAVE, step=1000) as add:
                    add(5)
        (metrics,) = loader.metrics
    trace = read_trace(tmp_path / "run.trace")

    (save,) = trace.spans[trace.spans["kind"] == Kind.SAVE]
    assert (save["bytes"], save["step"]) == (5, 1000)
    assert metrics.save_seconds == pytest.approx(save["end"] - save["start"])
    assert metrics.save_seconds <= metrics.own_seconds
    assert trace.epochs()[0].save_seconds == pytest.approx(metrics.save_seconds)


def test_classes_are_the_sources(folder: Path) -> None:
    with make(folder) as loader:
        assert loader.classes == ("label0", "label1", "label2")


def test_a_loader_cannot_be_pickled_and_says_what_to_do(folder: Path) -> None:
    with make(folder) as loader, pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(loader)


def test_asking_for_fewer_than_no_samples_is_refused(folder: Path) -> None:
    with make(folder) as loader, pytest.raises(ConfigError, match="count is -1"):
        loader.preview(-1)


def test_a_child_that_is_forked_while_the_threads_start_can_close_its_copy(folder: Path) -> None:
    """A lock that some thread holds at that moment is held for ever in the child."""
    for _ in range(3):
        loader = make(folder)
        loader.start()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # Python 3.12 warns of any fork beside threads
            child = os.fork()
        if child == 0:
            loader.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        loader.close()


def test_the_line_of_an_epoch_names_the_number_of_threads_once_it_has_changed(folder: Path) -> None:
    lines: list[str] = []
    with make(folder, epochs=2, decoders=3, report=lines.append) as loader:
        assert loader._parts.ended.lines is not None
        loader._parts.ended.lines._reported_threads = 2
        for _ in range(2):
            list(loader)

    first, second = (line for line in lines if "epoch 0:" in line or "epoch 1:" in line)
    assert "; loads with 3 threads now" in first
    assert "threads now" not in second


def test_the_keys_of_a_data_sets_samples_decide_not_their_order() -> None:
    class Unordered:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, int]:
            parts = [("image", index), ("target", 100 + index)]
            return dict(parts if index % 2 else parts[::-1])

    with make(Unordered(), transforms=(), shuffle=False) as loader:
        batch = next(iter(loader))

    assert batch["image"].tolist() == [0, 1, 2, 3]
    assert batch["target"].tolist() == [100, 101, 102, 103]


def test_after_a_break_position_and_preview_are_the_next_epochs_and_the_step_has_ended(
    folder: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    with make(folder, report=lines.append, trace=tmp_path / "run.trace") as loader:
        for _ in loader:
            break
        wait_until(
            lambda: (
                loader._loop.current.departure is not None
                and loader._loop.current.departure.seconds is not None
            )
        )
        left = loader.recorder.clock() - loader.recorder.origin  # what follows, a validation, is no step
        expected = loader.preview(COUNT).tolist()
        position = loader.position
        source = ImageFolder(folder)
        seen = [k for images, _ in loader for k in ids_of(source, numbers(images))]
    spans = read_trace(tmp_path / "run.trace").spans
    (step,) = spans[(spans["kind"] == Kind.STEP) & (spans["epoch"] == 0)]

    assert position == (1, 0)
    assert seen == expected
    assert step["end"] <= left
    assert len(epoch_lines(lines)) == 2


def test_a_loop_left_in_its_last_step_leaves_the_next_epoch_whole(folder: Path) -> None:
    with make(folder) as loader:
        passes = iter(loader)
        for _ in range(len(loader)):
            next(passes)
        del passes

        assert loader.position == (1, 0)
        assert sum(len(labels) for _, labels in loader) == COUNT


def test_a_loader_that_is_closed_after_a_break_still_tells_what_limited_it(folder: Path) -> None:
    lines: list[str] = []
    with make(folder, report=lines.append) as loader:
        for _ in loader:
            break

    assert len(epoch_lines(lines)) == 1


def test_a_dropped_loader_gives_its_memory_back(folder: Path) -> None:
    loader = make(folder)
    engine, staging = weakref.ref(loader._parts.engine), weakref.ref(loader._parts.staging)
    next(iter(loader))

    del loader

    def is_gone() -> bool:
        gc.collect()
        return engine() is None and staging() is None

    wait_until(is_gone)


def test_what_a_data_set_makes_the_training_wait_for_is_called_its_own() -> None:
    """Whether its code reads or computes is not known here, so that storage is not blamed."""

    class Slow(Numbers):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.02)
            return np.zeros(3)

    lines: list[str] = []
    with make(Slow(), transforms=(), batch_size=1, epochs=1, decoders=1, report=lines.append) as loader:
        for _ in loader:
            pass

    assert "the data set limits it" in epoch_lines(lines)[0]


def test_a_prediction_for_a_data_set_is_refused() -> None:
    with make(Numbers(), transforms=()) as loader, pytest.raises(ConfigError, match="nothing can be"):
        loader.predict(step_seconds=0.1)


def test_large_samples_in_flight_stay_within_the_memory(folder: Path) -> None:
    """As many readers as are allowed would hold more than what is given for bytes in passing."""

    class Big(CountingSource):
        def __init__(self, source: ImageFolder) -> None:
            super().__init__(source)
            self.sizes_bytes = np.full(COUNT, 1 << 20)
            self.lock, self.reading, self.most = threading.Lock(), 0, 0
            self.several, self.is_known = threading.Event(), False

        def read(self, sample: int) -> bytes:
            with self.lock:
                self.reading += 1
                self.most = max(self.most, self.reading)
                if self.reading > 1:
                    self.several.set()
            if self.is_known:  # before, one sample is read alone, to see what samples are like
                self.several.wait(patient(20))
            time.sleep(0.01)  # for as many as are allowed to come
            with self.lock:
                self.reading -= 1
            return super().read(sample).ljust(1 << 20, b"\0")

        def read_into(self, sample: int, buffer: memoryview) -> int:
            buffer[:] = self.read(sample)
            return len(buffer)

    big = Big(ImageFolder(folder))
    with make(big, memory="16 MiB", readers=16, decoders=1) as loader:
        big.is_known = True
        for _ in loader:
            pass
        budget = loader.memory

    assert 1 < big.most <= budget.undecoded_bytes >> 20  # with what the worker reads by itself


def as_numbers(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


class TestChunks:
    """A source whose samples of 256 bytes lie in files of 64 each. A request takes 5 ms, and 5 on the wire."""

    SAMPLES = 16 * CHUNK

    @pytest.fixture
    def contents(self) -> list[bytes]:
        return [np.random.default_rng(sample).bytes(256) for sample in range(self.SAMPLES)]

    @pytest.fixture
    def chunks(self, tmp_path: Path, contents: list[bytes]) -> Chunks:
        return Chunks(tmp_path, contents)

    def load(self, source: Any, **options: Any) -> list[tuple[np.ndarray, ...]]:
        memory = Curve.flat(1e9)
        store = SharedStore(None, Curve.flat(100e6), 5e-3, 8, request_seconds=5e-3)
        on = Machine(store, (StorageClass("staging", 10**8, 1, memory),))
        settings = {"transforms": [as_numbers], "dtype": "uint8", "batch_size": CHUNK, "machine": on}
        with make(source, **settings | {"memory": "64 MiB"} | options) as loader:
            return [tuple(np.array(each) for each in batch) for _ in range(2) for batch in loader]

    @pytest.mark.parametrize(
        "kept",
        [pytest.param(0, marks=pytest.mark.slow), 100, pytest.param(16 * CHUNK, marks=pytest.mark.slow)],
    )
    def test_batches_are_those_of_a_source_that_is_read_one_by_one(
        self, chunks: Chunks, contents: list[bytes], kept: int
    ) -> None:
        """A tier keeps none of the samples, some, or all."""
        storage = [StorageClass("staging", 10**8, 1, Curve.flat(1e9))]
        if kept:
            storage.append(StorageClass("memory", kept * 256, 1, Curve.flat(1e9)))
        on = Machine(SharedStore(None, Curve.flat(100e6), 5e-3, 8, request_seconds=5e-3), tuple(storage))
        order = FullShuffle(self.SAMPLES, 3)

        with SlowSource(chunks, 1e-3, 0, 1e9) as slow:
            found = [self.load(source, shuffle=order, machine=on) for source in (chunks, slow)]

        ids = np.concatenate([order.at(epoch, np.arange(self.SAMPLES)) for epoch in range(2)])
        expected = np.stack([as_numbers(contents[sample]) for sample in ids])
        for batches in found:
            np.testing.assert_array_equal(np.concatenate([images for images, _ in batches]), expected)

    def test_reads_are_hardly_more_than_the_chunks_that_the_staged_batches_touch(
        self, chunks: Chunks
    ) -> None:
        order = BundleShuffle(self.SAMPLES, 5, bundle_ratio=2 / 16)
        with SlowSource(chunks, 5e-3, 5e-3, 1e9) as slow:
            self.load(slow, shuffle=order, readers=1)

        # Two chunks are a bundle, which two batches share, and which are staged one by one where the training is slow.
        touched = 2 * 32
        # Some are read one by one, to see what that takes; if all were, there would be 2,048 reads.
        assert len(chunks.reads) <= touched + 16

    def test_an_extent_beyond_its_unit_is_an_error_that_names_unit_and_offset(self, chunks: Chunks) -> None:
        chunks.offsets[65] = 10**6
        with pytest.raises(
            DataError, match=r"unit 1, offset 1,000,000, 256 bytes, but the unit ends at 16,392"
        ):
            self.load(chunks, shuffle=False)

    def test_an_extent_that_has_changed_is_an_error_that_names_unit_and_offset(self, chunks: Chunks) -> None:
        true, asked = chunks.extents, [0]

        def changing(ids: Any) -> Any:
            asked[0] += 1
            units, offsets, lengths = true(ids)
            return units, offsets - (ids == 65) * (asked[0] > 1), lengths

        chunks.extents = changing  # type: ignore[method-assign]
        # As slow as the machine says: of a quick store samples are read one by one, by what is known then.
        read_ranges = chunks.read_ranges

        def slowly(*read: Any) -> None:
            time.sleep(0.01)
            read_ranges(*read)

        chunks.read_ranges = slowly  # type: ignore[assignment, method-assign]
        with pytest.raises(
            DataError, match="unit 1, offset 263, 256 bytes, but before it said unit 1, offset 264"
        ):
            self.load(chunks, shuffle=False)


@pytest.mark.parametrize("collate_fn", [None, list])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_it_reads_as_many_batches_ahead_as_prefetch_says_and_no_more(prefetch: int, collate_fn: Any) -> None:
    asked = threading.Condition()
    latest, ahead = 0, [0]
    loaders: list[Loader] = []

    class Numbers:
        def __len__(self) -> int:
            return 10 * BATCH

        def __getitem__(self, sample: int) -> Any:
            nonlocal latest
            with asked:
                latest = max(latest, sample // BATCH)
                ahead.extend(latest - max(0, loader.position[1] - 1) for loader in loaders)
                asked.notify_all()
            return np.full(50, sample)

    given = {"epochs": 1, "transforms": (), "shuffle": False, "collate_fn": collate_fn, "prefetch": prefetch}
    with make(Numbers(), **given) as loader:
        loaders.append(loader)
        for step, _ in enumerate(loader):
            due = min(step + prefetch, 9)
            with asked:
                while latest < due:
                    assert asked.wait(60)

    assert max(ahead) == prefetch

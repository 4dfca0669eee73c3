"""The training's thread makes the same batches as the loader's threads; whichever is faster makes the rest."""

from __future__ import annotations

import gc
import itertools
import math
import threading
import weakref
from collections import UserDict
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.for_each import for_each
from tests.loader.made import Made
from torch.utils.data import default_collate

import penstock.torch
from penstock.flow.batches import MADE
from penstock.policy.turns import Given
from penstock.trace import Kind, read_trace
from penstock.trace.causes import critical_items
from penstock.trace.schema import CONSUMER

COUNT = 103


class Texts:
    """An array, a number, a text and tokens of unequal length; notes in which thread each sample is made."""

    def __init__(self, bad: int = -1, wrong: int = -1) -> None:
        self.bad, self.wrong = bad, wrong
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int, epoch: int, rng: np.random.Generator) -> Any:
        self.threads.add(threading.get_ident())
        if index == self.bad:
            raise ValueError("no such text")
        tokens = np.arange(index % 7)
        return {
            "array": rng.random(5 + (index == self.wrong)),
            "number": index + epoch,
            "text": f"text {index}",
            "tokens": tokens,
        }


class Alternating:
    """In place of `Turns`: after every third batch of threads the training makes about as many as `samples`."""

    is_trying, is_over, choice = True, False, None

    def __init__(self, samples: int = 40) -> None:
        self.samples, self.own, self.others = samples, 0, 0

    def given(self, given: Given) -> float:
        self.own += given.is_own * given.batches
        self.others += not given.is_own
        return 0 if given.is_own or self.others % 3 else self.samples


def load(data: Any, turns: Any = None, **arguments: Any) -> Any:
    given = {"batch_size": 8, "epochs": 3, "seed": 5, "report": None, "ragged": ["tokens"], **arguments}
    if given.get("collate_fn"):
        del given["ragged"]
    loader = penstock.torch.Loader(data, **given)
    if turns is not None:
        assert loader._parts.own_thread is not None
        loader._parts.own_thread._turns = turns
    return loader


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loader.setup.cpu_limit", lambda: (2, "of this test"))


@pytest.fixture(autouse=True)
def two_batches_of_eight_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More are made in pieces."""
    monkeypatch.setattr("penstock.loader.own_thread._AT_ONCE", 20)


def all_of(loader: Any) -> list[Any]:
    found = []
    while loader.position[0] < 3:
        found += [plain(batch) for batch in loader]
    return found


def plain(batch: Any) -> Any:
    return {
        name: (part.values.tolist(), part.offsets.tolist()) if name == "tokens" else copied(part)
        for name, part in batch.items()
    }


def copied(part: Any) -> Any:
    return part.tolist() if isinstance(part, torch.Tensor) else part


def listed(samples: list[Any]) -> Any:
    return default_collate([{**sample, "tokens": 0} for sample in samples])


@for_each(("arguments",), [({},), ({"collate_fn": listed},), ({"on_error": "skip", "bad": 17},)])
def test_batches_of_either_are_the_same_in_the_same_order_and_a_resumed_run_has_the_rest(
    arguments: dict[str, Any],
) -> None:
    bad = arguments.pop("bad", -1)
    read = (
        all_of
        if "collate_fn" not in arguments
        else lambda loader: [
            {name: copied(part) for name, part in batch.items()} for _ in range(3) for batch in loader
        ]
    )
    with load(Texts(bad), workers="threads", **arguments) as loader:
        expected = read(loader)
    turns = Alternating()
    with load(Texts(bad), turns, **arguments) as loader:
        assert read(loader) == expected
        assert turns.own > 10 < turns.others
        assert len(loader.skipped) == (3 if bad >= 0 else 0)
    if arguments:
        return

    with load(Texts(), Alternating()) as loader:
        batches = iter(loader)
        begun = [plain(next(batches)) for _ in range(7)]  # of which the training makes the fourth and others
        state, beside = loader.state_dict(), loader._parts.setup.beside
        assert MADE in beside._slots
        for _ in range(4):
            next(batches)
        assert MADE not in beside._slots, "threads have a turn"
    with load(Texts(), Alternating(), state=state) as loader:
        assert begun + all_of(loader) == expected


def test_long_texts_are_made_several_batches_at_once_but_two_where_one_array_holds_these() -> None:
    texts = [np.arange(1000)] * COUNT

    made_together = []
    every: list[dict[str, Any]] = [{"ragged": [""]}, {"ragged": []}, {"collate_fn": list}]
    for arguments in every:
        with load(texts, **arguments, batch_size=64) as loader:
            own = loader._parts.own_thread
            made_together.append((own._most_steps, own._steps_in_array))

    assert made_together == [(8, 8), (2, 2), (4, 1)], (
        "batches of half a megabyte: 4 MiB beside the slots, 1 MiB in one array; lists may be of any size"
    )


@for_each(("sample_bytes", "most", "in_array"), [(20_000, 6, 3), (30_000, 4, 2)])
def test_batches_of_larger_arrays_are_made_together_few_to_an_array_and_none_is_kept(
    sample_bytes: int, most: int, in_array: int
) -> None:
    """Together 1 MiB, of eight samples each; in an array 512 KiB, or two."""
    data = Made(lambda index: (np.full(sample_bytes, index, np.uint8), f"text {index}"), COUNT)
    with load(data, Alternating(10_000), ragged=(), shuffle=False, epochs=1) as loader:
        own, found, together = loader._parts.own_thread, list[Any](), list[int]()
        for images, texts in loader:
            own._sample_seconds = 1e-9
            found += zip(images[:, 0].tolist(), texts, strict=True)
            together.append(len(own._ready) + 1)
        own.forget_made()

        assert found == [(index, f"text {index}") for index in range(COUNT)]
        assert (max(together), own._most_steps, own._steps_in_array) == (4, most, in_array)
        assert not [slot for slot in loader._parts.setup.beside._slots if slot >= MADE]


def test_the_samples_of_several_lists_are_made_together_and_none_that_threads_have_made() -> None:
    turns, made = Alternating(), list[int]()

    def get(index: int) -> int:
        made.extend([index] * (threading.get_ident() == me))
        return index

    me, data = threading.get_ident(), Made(get, COUNT)
    with load(data, turns, collate_fn=list, epochs=1, shuffle=False, batch_size=4) as loader:
        own = loader._parts.own_thread
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        made.clear()
        own._sample_seconds, own._until = 1e-9, (0, 10)
        found = [next(batches) for _ in range(4)]  # the plan gives one step at first, then two, then four
        assert made == list(range(12, 40))
        found += [next(batches) for _ in range(3)]
        assert made == list(range(12, 40))
        assert found == [list(range(first, first + 4)) for first in range(12, 40, 4)]
        assert not own._ready
        assert not loader._parts.setup.decoder._made.keys() & set(range(MADE, MADE + 4))


class Padding(Made):
    """Lists as long as the longest that is asked for with them, in buffers of which a thread has a batch's."""

    def __init__(self) -> None:
        super().__init__(lambda index: [index] * (index % 7 + 1), COUNT)
        self.local = threading.local()

    def __getitems__(self, indices: list[int]) -> Any:
        if not hasattr(self.local, "buffers"):
            self.local.buffers = itertools.cycle([list[int]() for _ in range(4)])
        longest = max(index % 7 + 1 for index in indices)
        found = []
        for index in indices:
            buffer = next(self.local.buffers)
            buffer[:] = self.make(index) + [-1] * (longest - index % 7 - 1)
            found.append(buffer)
        return found


def test_several_lists_are_the_same_as_of_threads_and_what_they_took_is_not_blamed_on_the_loader(
    tmp_path: Path,
) -> None:
    def collate(samples: list[list[int]]) -> list[list[int]]:
        return [sample.copy() for sample in samples]

    arguments: Any = {"collate_fn": collate, "epochs": 1, "batch_size": 4}
    with load(Padding(), workers="threads", **arguments) as loader:
        expected = list(loader)
    with load(Padding(), Alternating(10_000), trace=tmp_path / "trace", **arguments) as loader:
        found = []
        for batch in loader:
            found.append(batch)
            loader._parts.own_thread._sample_seconds = 1e-9
    assert found == expected

    spans = read_trace(tmp_path / "trace").spans
    own = spans[(spans["worker"] == CONSUMER) & (spans["epoch"] == 0)]
    reads, decodes = (own[own["kind"] == kind] for kind in (Kind.READ, Kind.DECODE))
    assert reads["flow"].tolist() == decodes["flow"].tolist()
    assert reads["samples"].sum() == decodes["samples"].sum() == COUNT - 3 * 4
    together = decodes[decodes["bytes"] == 3]
    assert len(together) >= 4
    waits = own[(own["kind"] == Kind.WAIT) & np.isin(own["step"], together["step"])]
    critical = critical_items(spans, waits)
    assert critical.seen.all()
    assert (critical.read["step"] == waits["step"]).all()
    assert (critical.decode["bytes"] == 3).all(), "the wait for the first of them is for all"


class Slotted:
    __slots__ = ("image",)


class WithSlot(Slotted):
    def __init__(self) -> None:
        self.image, self.label = np.zeros(8 << 20, np.uint8), 3


class WithAttribute(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.image = np.zeros(8 << 20, np.uint8)


@for_each(
    ("collate", "together"),
    [
        (lambda samples: {"ids": samples, "texts": ["a"] * len(samples), "none": None}, 4),
        (lambda samples: UserDict(ids=torch.tensor(samples)), 4),
        (lambda samples: (np.zeros(3 << 19, np.uint8), torch.tensor(samples)), 2),
        (lambda samples: np.zeros(8 << 20, np.uint8), 1),
        (lambda samples: [samples] * 1001, 1),
        (lambda samples: torch.eye(4).to_sparse(), 1),
        (lambda samples: Made(int, COUNT), 1),
        (lambda samples: [Fraction(each) for each in samples], 1),
        (lambda samples: WithSlot(), 1),
        (lambda samples: WithAttribute(ids=samples), 1),
        (lambda samples: [SimpleNamespace(text="a", number=each) for each in samples], 4),
    ],
)
def test_what_a_function_returns_is_made_together_up_to_four_megabytes(collate: Any, together: int) -> None:
    with load(Made(int, COUNT), Alternating(10_000), collate_fn=collate, batch_size=4) as loader:
        own, seen = loader._parts.own_thread, list[int]()
        for number, _ in enumerate(loader):
            own._sample_seconds = 1e-9
            seen.append(len(own._ready) + 1)
            if number == 6:  # threads made three; the plan gives one step then, then two, then four
                break
        assert max(seen) == seen[-1] == together


@for_each(("begins_again",), [(False,), (True,)])
def test_an_epoch_that_is_left_keeps_nothing_that_was_made_for_it(begins_again: bool) -> None:
    made, me = list[weakref.ref[torch.Tensor]](), threading.get_ident()

    def collate(samples: list[int]) -> torch.Tensor:
        batch = torch.tensor(samples)
        if threading.get_ident() == me:
            made.append(weakref.ref(batch))
        return batch

    def get(index: int) -> int:
        if index == 30:
            raise ValueError("no such number")
        return index

    arguments: Any = {"collate_fn": collate, "batch_size": 4, "shuffle": False, "on_error": "skip"}
    with load(Made(get, COUNT), Alternating(10_000), **arguments) as loader:
        own = loader._parts.own_thread
        for number, _ in enumerate(loader):
            own._sample_seconds = 1e-9
            if number == 6:
                break
        assert [*own._failed] == [(0, 7)]
        assert [*own._ready] == [(0, 8), (0, 9)]
        del own, _
        if begins_again:
            iter(loader)
        else:
            loader.close()
        gc.collect()
        assert len(made) == 7
        assert not [batch for batch in made if batch() is not None]


@for_each(("faulty",), [({"bad": 76},), ({"wrong": 76},)])
def test_a_sample_that_fails_among_many_is_skipped_and_recorded_as_by_threads(
    tmp_path: Path, faulty: dict[str, int]
) -> None:
    arguments: Any = {"shuffle": False, "on_error": "skip", "epochs": 1}
    with load(Texts(**faulty), workers="threads", trace=tmp_path / "threads", **arguments) as loader:
        expected = [plain(batch) for batch in loader]
        skipped = loader.skipped
    assert [each.sample for each in skipped] == [76]

    with load(Texts(**faulty), Alternating(10_000), trace=tmp_path / "own", **arguments) as loader:
        found = []
        for batch in loader:
            found.append(plain(batch))
            loader._parts.own_thread._sample_seconds = 1e-9
        assert loader.skipped == skipped
    assert found == expected

    of_threads, spans = (read_trace(tmp_path / name).spans for name in ("threads", "own"))
    own = spans[spans["worker"] == CONSUMER]
    for kind in (Kind.READ, Kind.DECODE):
        counts = [int(each[each["kind"] == kind]["samples"].sum()) for each in (own, of_threads)]
        assert counts[0] == counts[1] - 3 * 8, kind
    assert own[own["kind"] == Kind.READ]["samples"].max() > 3 * 8, "steps 6 to 9 in two pieces"


def test_a_batch_that_is_asked_for_in_inference_mode_leaves_those_made_with_it_fit_for_training() -> None:
    with load(Texts(), Alternating(10_000), epochs=1) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        loader._parts.own_thread._sample_seconds = 1e-9
        with torch.inference_mode():
            next(batches)
        assert loader._parts.own_thread._ready
        assert not next(batches)["array"].is_inference()


def test_short_epochs_that_the_training_makes_are_reported_together_and_all_of_them_at_the_end() -> None:
    lines = list[str]()
    with load(Texts(), Alternating(10_000), epochs=5, report=lines.append) as loader:
        list(loader)
        assert "epoch 0" in lines[-1], "the first at once"
        lines.clear()
        loader._parts.ended._reported = math.inf  # just now
        for _ in range(3):
            list(loader)
        assert not lines
        assert [each.steps for each in loader.metrics] == [13] * 4
        loader._parts.ended._reported = -math.inf  # long ago
        next(iter(loader))
        assert [line.partition("epoch ")[2][0] for line in lines] == list("123")
    assert [line.partition("epoch ")[2][0] for line in lines] == list("1234")


def test_what_was_not_reported_yet_of_a_loader_that_is_dropped_is_reported_when_its_threads_end() -> None:
    lines = list[str]()
    loader = load(Texts(), Alternating(10_000), report=lines.append)
    list(loader)
    loader._parts.ended._reported = math.inf
    list(loader)
    assert "epoch 0" in lines[-1]
    threads = [*loader._parts.engine._threads]
    del loader
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert "epoch 1" in lines[-1]


def test_an_error_of_a_sample_that_the_training_makes_arrives_with_its_place() -> None:
    with load(Texts(bad=30), Alternating(10_000), shuffle=False, epochs=1) as loader:
        with pytest.raises(ValueError, match="no such text") as caught:
            list(loader)
        assert "while loading Texts[30]" in caught.value.__notes__
        assert "in the batch of epoch 0, step 3" in caught.value.__notes__


def test_what_the_training_makes_is_in_the_trace_and_what_it_set_for_its_thread_is_not_in_samples(
    tmp_path: Path,
) -> None:
    data, me = Texts(), threading.get_ident()
    with load(data, Alternating(10_000), trace=tmp_path / "trace", shuffle=False) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        data.threads.clear()
        with torch.autocast("cpu"):
            next(batches)
        assert me not in data.threads
        rest = sum(1 for _ in batches)
        assert me in data.threads

    spans = read_trace(tmp_path / "trace").spans
    own = spans[(spans["worker"] == CONSUMER) & (spans["epoch"] == 0)]
    for kind in (Kind.READ, Kind.DECODE):
        assert own[own["kind"] == kind]["samples"].sum() == COUNT - 3 * 8
    assert (own["kind"] == Kind.WAIT).sum() == rest + 4
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-watch"]


class Normalized:
    """Numbers divided by what PyTorch's sum over many of them says; notes how many threads had a part in it."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        self.threads.add(torch.get_num_threads())
        values = torch.rand(50_000, generator=torch.Generator().manual_seed(index))
        return ((values - values.mean()) / values.std())[:5]


def test_no_garbage_is_looked_for_while_the_training_makes_samples() -> None:
    """Of samples that are there at once more objects may live than they show, such as what a tensor is a part of."""
    found, me = set[bool](), threading.get_ident()

    def get(index: int) -> int:
        if threading.get_ident() == me:
            found.add(gc.isenabled())
        return index

    with load(Made(get, COUNT), Alternating(), ragged=()) as loader:
        found.clear()  # that of the example
        assert all(gc.isenabled() for _ in loader)
    assert found == {False}


@for_each(("is_plain",), [(True,), (False,)])
def test_a_sum_has_the_same_bits_whoever_makes_the_batch(is_plain: bool) -> None:
    usual, elsewhere, data = torch.get_num_threads(), list[int](), Normalized()
    torch.set_num_threads(4)
    try:
        with load(Normalized(), workers="threads", epochs=1, ragged=()) as loader:
            expected = [batch.tolist() for batch in loader]
        with (
            load(data, Alternating(), epochs=1, ragged=()) as loader,
            torch.autocast("cpu", enabled=not is_plain),
        ):
            data.threads.clear()  # the example's is the training's
            assert [batch.tolist() for batch in loader] == expected
        assert data.threads == {1}
        new = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        new.start()
        new.join()
        assert [torch.get_num_threads(), *elsewhere] == [4, 4]
    finally:
        torch.set_num_threads(usual)


def test_a_turn_after_the_few_samples_that_end_an_epoch_has_a_batch() -> None:
    """Of 70 samples the second batch has 6. A turn of none would tell nothing, and be begun again with each batch."""
    data = torch.utils.data.TensorDataset(torch.arange(70.0))
    with penstock.torch.Loader(data, batch_size=64, epochs=None, report=None) as loader:
        own = loader._parts.own_thread
        assert own is not None
        assert own._place_after((0, 1), 2.0 * 6) == (1, 1)
        assert own._place_after((0, 0), 1.0) == (1, 0)
        assert own._place_after((0, 1), 128.0) == (2, 0)


def test_what_the_training_does_between_batches_is_told_apart_from_what_it_waits() -> None:
    now = itertools.count()
    given = list[Given]()

    class Noting(Alternating):
        def given(self, given_: Given) -> float:
            given.append(given_)
            return super().given(given_)

    with load(Texts(), Noting(), epochs=1) as loader:
        loader._parts.recorder.clock = loader._parts.own_thread._clock = lambda: float(next(now))
        assert sum(1 for _ in loader) == 13

    assert any(each.step_seconds > 0 for each in given[1:])


def test_a_batch_that_takes_long_to_make_is_reported_by_another_thread() -> None:
    reported, goes_on = threading.Semaphore(0), threading.Event()
    lines = list[str]()

    def report(line: str) -> None:
        lines.append(line)
        if "sample 30, Slow[30]" in line:
            goes_on.set()

    class Slow(Texts):
        def __getitem__(self, index: int, epoch: int, rng: np.random.Generator) -> Any:
            if threading.current_thread() is threading.main_thread() and index == 30:
                reported.release()
                assert goes_on.wait(60)
            return super().__getitem__(index, epoch, rng)

    settings: Any = {"shuffle": False, "patience_seconds": 0.01, "report": report, "epochs": 1}
    with load(Slow(), Alternating(10_000), **settings) as loader:
        assert sum(1 for _ in loader) == 13
    assert reported.acquire(blocking=False)
    assert any("sample 30, Slow[30]" in line for line in lines)

"""What PyTorch documents of its DataLoader holds for Penstock's, too: each case runs over both, so that PyTorch says
what is true."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.for_each import for_each
from tests.forking import Forks
from tests.patience import patient, wait_until
from tests.torch.dataloader_data import COUNT as TOLD
from tests.torch.dataloader_data import Telling, Wholes, note_worker, unchanged
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from torch.utils.data import DataLoader as PyTorchs

from penstock.errors import ConfigError
from penstock.measure.explain import Reason, explain
from penstock.measure.recorded import open_run
from penstock.measure.watch import watch
from penstock.torch import DataLoader as OfPenstock
from penstock.trace import NO_STEP, Kind, read_trace
from penstock.trace.file import RUN_FOLDER
from penstock.trace.schema import join_spans

COUNT = 23
#: By threads: what PyTorch's processes do that are forked. Processes have their own tests, at the end.
Penstocks: Any = partial(OfPenstock, workers="threads")
Point = namedtuple("Point", ["x", "name"])


class Of(Dataset[Any]):
    """Samples that a function makes of their numbers."""

    def __init__(self, make: Callable[[int], Any], count: int = COUNT) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def numbers() -> Of:
    return Of(int)


@pytest.fixture(params=[PyTorchs, Penstocks], ids=["pytorch", "penstock"])
def DataLoader(request: pytest.FixtureRequest) -> Any:  # noqa: N802
    """Return each of the two classes."""
    return request.param


@pytest.fixture(params=[0, 2], ids=["no workers", "2 workers"])
def workers(request: pytest.FixtureRequest) -> int:
    """Return what num_workers is."""
    return int(request.param)


#: PyTorch says what is true; its processes say the same, and take long to start.
each_with_workers = pytest.mark.parametrize(
    ("DataLoader", "workers"),
    [
        pytest.param(PyTorchs, 0, id="pytorch-no workers"),
        pytest.param(PyTorchs, 2, id="pytorch-2 workers", marks=pytest.mark.slow),
        pytest.param(Penstocks, 0, id="penstock-no workers"),
        pytest.param(Penstocks, 2, id="penstock-2 workers"),
    ],
)


def plain(value: Any) -> Any:
    """Return a batch as something that compares, its types and number formats included."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return type(value), {key: plain(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value), [plain(part) for part in value]
    return type(value), value


def epochs(
    make: Any, dataset: Any, *, count: int = 2, leave_after: int | None = None, **arguments: Any
) -> list[Any]:
    """Return the batches of some epochs, the second of which may be left early, and what the generators are then."""
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)  # noqa: NPY002
    if "generator" in arguments:
        arguments["generator"] = torch.Generator().manual_seed(arguments["generator"])
    loader = make(dataset, **arguments)
    found = []
    for epoch in range(count):
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            found.append(plain(batch))
            if epoch == 1 and number == leave_after:
                break
    left = [torch.get_rng_state().tolist(), random.random(), np.random.rand()]  # noqa: NPY002
    if "generator" in arguments:
        left.append(arguments["generator"].get_state().tolist())
    return [*found, left]


class OfRandom(Sampler[int]):
    """Draws from the global generators, one number at a time, as long as it is asked."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(COUNT):
            of_numpy = int(np.random.randint(COUNT))  # noqa: NPY002
            yield (random.randrange(COUNT) + of_numpy + int(torch.randint(COUNT, ()))) % COUNT

    def __len__(self) -> int:
        return COUNT


class Eager(Sampler[int]):
    """Draws when it is asked for an iterator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT).tolist())

    def __len__(self) -> int:
        return COUNT


class Uneven(Sampler[list[int]]):
    """Batches of other sizes each time, far larger ones at last."""

    def __iter__(self) -> Iterator[list[int]]:
        for size in (1, 3, 2, 700, 1, 5):
            yield torch.randint(COUNT, (size,)).tolist()

    def __len__(self) -> int:
        return 6


ORDERS: dict[str, dict[str, Any]] = {
    "sequential": {"batch_size": 5},
    "one by one": {},
    "without batches": {"batch_size": None},
    "shuffled": {"batch_size": 5, "shuffle": True},
    "shuffled without batches": {"batch_size": None, "shuffle": True},
    "dropping the last": {"batch_size": 5, "shuffle": True, "drop_last": True},
    "with a generator": {"batch_size": 4, "shuffle": True, "generator": 5},
    "random with repeats": {
        "batch_size": 4,
        "sampler": RandomSampler(range(COUNT), replacement=True, num_samples=70),
    },
    "random, more than there are": {
        "batch_size": 4,
        "sampler": RandomSampler(range(COUNT), num_samples=2 * COUNT),
    },
    "weighted": {"batch_size": 6, "sampler": WeightedRandomSampler([1.0] * 5 + [9.0] * 18, 40)},
    "of a subset": {"batch_size": 4, "sampler": SubsetRandomSampler([3, 1, 20, 7, 7])},
    "of a list": {"batch_size": 2, "sampler": [3, 1, 20, 7, 7]},
    "distributed": {"batch_size": 4, "sampler": DistributedSampler(numbers(), 2, 1, seed=3)},
    "drawn from all generators": {"batch_size": 4, "sampler": OfRandom()},
    "drawn at once": {"batch_size": 4, "sampler": Eager()},
    "a batch sampler": {"batch_sampler": BatchSampler(SequentialSampler(range(COUNT)), 4, True)},
    "batches of all sizes": {"batch_sampler": Uneven()},
    "a list of batches": {"batch_sampler": [[1, 2], [3], [4, 5, 22, 0]]},
    "nothing": {"sampler": []},
}


#: A kind each of sampler, batch sampler and generator; PyTorch starts processes for each.
WITH_WORKERS = ("without batches", "drawn from all generators", "batches of all sizes")


@pytest.mark.parametrize(
    ("order", "workers"),
    [
        *((order, 0) for order in ORDERS),
        *(
            pytest.param(order, 2, marks=[] if order in WITH_WORKERS else pytest.mark.slow)
            for order in ORDERS
        ),
    ],
)
def test_batches_and_draws_are_pytorchs(order: str, workers: int) -> None:
    """The same batches in the same order; and no generator draws more or less, in an epoch that is left early, too."""
    arguments = {**ORDERS[order], "num_workers": workers, "leave_after": 1}

    assert epochs(Penstocks, numbers(), **arguments) == epochs(PyTorchs, numbers(), **arguments)


@pytest.mark.parametrize(
    "more",
    [
        {"persistent_workers": True, "count": 3},
        pytest.param({"prefetch_factor": 7}, marks=pytest.mark.slow),
        pytest.param({"prefetch_factor": 1, "generator": 4}, marks=pytest.mark.slow),
    ],
)
def test_persistent_workers_and_prefetching_draw_as_pytorchs_do(more: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"batch_size": 3, "shuffle": True, "num_workers": 2, "leave_after": 1, **more}

    assert epochs(Penstocks, numbers(), **arguments) == epochs(PyTorchs, numbers(), **arguments)


KINDS: dict[str, Callable[[int], Any]] = {
    "numbers": float,
    "booleans": lambda index: index > 3,
    "strings": str,
    "bytes": lambda index: bytes([index]),
    "tensors": lambda index: torch.full((2, 3), index, dtype=torch.int16),
    "bfloat16": lambda index: torch.full((2,), index, dtype=torch.bfloat16),
    "arrays": lambda index: np.full((2, 3), index, np.float32),
    "numpy scalars": lambda index: np.float32(index),
    "tuples": lambda index: (index, str(index), torch.tensor(index)),
    "lists": lambda index: [index, [index, float(index)]],
    "dicts": lambda index: {"a": index, "b": {"c": [index], "d": str(index)}},
    "named tuples": lambda index: Point(index, str(index)),
    "empty": lambda index: {},
}


@for_each("kind", KINDS)
def test_batches_are_of_the_types_that_default_collate_and_default_convert_give(kind: str) -> None:
    for batch_size in (4, None):
        arguments: dict[str, Any] = {"batch_size": batch_size, "num_workers": 2, "count": 1}

        assert epochs(Penstocks, Of(KINDS[kind]), **arguments) == epochs(
            PyTorchs, Of(KINDS[kind]), **{**arguments, "num_workers": 0}
        )


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.arange(COUNT), torch.arange(COUNT).float() / 2),
        Subset(numbers(), [4, 8, 15, 16, 22]),
        ConcatDataset([numbers(), numbers()]),
        random_split(numbers(), [0.5, 0.5], torch.Generator().manual_seed(1))[0],
        list(range(7)),
        [f"text {number}" for number in range(7)],
        {number: number * number for number in range(7)},
        torch.arange(12).reshape(6, 2),
    ],
    ids=[
        "TensorDataset",
        "Subset",
        "ConcatDataset",
        "random_split",
        "list",
        "list of texts",
        "dict",
        "tensor",
    ],
)
def test_data_sets_of_all_kinds_are_taken(dataset: Any, workers: int) -> None:
    arguments: dict[str, Any] = {"batch_size": 3, "num_workers": workers, "count": 1}

    assert epochs(Penstocks, dataset, **arguments) == epochs(
        PyTorchs, dataset, **{**arguments, "num_workers": 0}
    )


@each_with_workers
def test_a_sample_that_default_collate_cannot_stack_raises_its_error(DataLoader: Any, workers: int) -> None:
    loader = DataLoader(Of(lambda index: torch.ones(index + 1), 4), batch_size=4, num_workers=workers)

    batches = iter(loader)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(batches)
    assert list(batches) == []


@each_with_workers
def test_collate_fn_gets_the_samples_of_a_batch_or_the_sample_itself(DataLoader: Any, workers: int) -> None:
    of_batches = DataLoader(
        numbers(), batch_size=9, num_workers=workers, collate_fn=lambda samples: ("made of", samples)
    )
    of_samples = DataLoader(
        numbers(), batch_size=None, num_workers=workers, collate_fn=lambda sample: ("made of", sample)
    )

    assert list(of_batches)[-1] == ("made of", list(range(18, 23)))
    assert list(of_samples)[-1] == ("made of", 22)


@each_with_workers
def test_collate_fn_may_return_none(DataLoader: Any, workers: int) -> None:
    assert (
        list(DataLoader(numbers(), batch_size=12, num_workers=workers, collate_fn=lambda samples: None))
        == [None] * 2
    )


class Lists(Dataset[Any]):
    """Makes whole batches as it likes."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("lists are asked for")

    def __getitems__(self, indices: list[int]) -> Any:
        return {"rows": torch.tensor(indices) * 2}


@each_with_workers
def test_getitems_makes_what_collate_fn_gets(DataLoader: Any, workers: int) -> None:
    loader = DataLoader(Lists(), batch_size=4, num_workers=workers, collate_fn=lambda made: made)

    assert [batch["rows"].tolist() for batch in loader][-1] == [40, 42, 44]


@each_with_workers
def test_lengths_are_those_of_the_sampler(DataLoader: Any, workers: int) -> None:
    def length(**arguments: Any) -> int:
        return len(DataLoader(numbers(), num_workers=workers, **arguments))

    assert length(batch_size=5) == 5
    assert length(batch_size=5, drop_last=True) == 4
    assert length(batch_size=None) == length() == COUNT
    assert length(batch_size=2, sampler=[1, 2, 3]) == 2
    assert length(batch_sampler=[[1, 2], [3]]) == 2
    assert len(iter(DataLoader(numbers(), batch_size=5, num_workers=workers))) == 5


def test_attributes_are_what_was_given_or_follows_from_it(DataLoader: Any) -> None:
    dataset, generator = numbers(), torch.Generator()
    loader = DataLoader(
        dataset, 4, True, num_workers=2, generator=generator, timeout=9, persistent_workers=True
    )

    assert isinstance(loader, PyTorchs)
    assert loader.dataset is dataset
    assert loader.generator is generator
    assert isinstance(loader.sampler, RandomSampler)
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert loader.batch_sampler.sampler is loader.sampler
    assert (loader.batch_size, loader.num_workers, loader.drop_last, loader.timeout) == (4, 2, False, 9)
    assert (loader.prefetch_factor, loader.persistent_workers, loader.pin_memory) == (2, True, False)
    assert loader.collate_fn is torch.utils.data.default_collate
    assert loader.multiprocessing_context is None
    assert DataLoader(dataset, None).collate_fn is torch.utils.data.default_convert
    assert DataLoader(dataset).prefetch_factor is None
    assert DataLoader(dataset, batch_sampler=[[1]]).batch_size is None


@for_each("name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"])
def test_what_fixes_the_batches_cannot_be_set_later(DataLoader: Any, name: str) -> None:
    with pytest.raises(
        ValueError, match=f"{name} attribute should not be set after DataLoader is initialized"
    ):
        setattr(DataLoader(numbers()), name, None)


@for_each(
    ("arguments", "message"),
    [
        ({"num_workers": -1}, "num_workers option should be non-negative"),
        ({"timeout": -1}, "timeout option should be non-negative"),
        ({"prefetch_factor": 2}, "prefetch_factor option could only be specified in multiprocessing"),
        ({"prefetch_factor": -2, "num_workers": 2}, "prefetch_factor option should be non-negative"),
        ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
        ({"sampler": [1], "shuffle": True}, "sampler option is mutually exclusive with shuffle"),
        ({"batch_sampler": [[1]], "batch_size": 2}, "batch_sampler option is mutually exclusive"),
        ({"batch_sampler": [[1]], "shuffle": True}, "batch_sampler option is mutually exclusive"),
        ({"batch_sampler": [[1]], "sampler": [1]}, "batch_sampler option is mutually exclusive"),
        ({"batch_sampler": [[1]], "drop_last": True}, "batch_sampler option is mutually exclusive"),
        ({"batch_size": None, "drop_last": True}, "batch_size=None option disables auto-batching"),
        ({"batch_size": 0}, "batch_size should be a positive integer value"),
        ({"multiprocessing_context": "spawn"}, "multiprocessing_context can only be used with"),
        ({"multiprocessing_context": "none", "num_workers": 2}, "should specify a valid start method"),
    ],
)
def test_arguments_that_cannot_be_are_named(DataLoader: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataLoader(numbers(), **arguments)


def broken_at_five(index: int) -> int:
    if index == 5:
        raise KeyError(f"sample {index}")
    return index


@each_with_workers
def test_an_error_is_of_its_kind_and_the_batches_after_it_follow(DataLoader: Any, workers: int) -> None:
    batches = iter(DataLoader(Of(broken_at_five), batch_size=4, num_workers=workers, collate_fn=list))
    found: list[Any] = [next(batches)]

    with pytest.raises(KeyError, match="sample 5"):
        next(batches)

    found += batches
    assert found == [[0, 1, 2, 3], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22]]


@each_with_workers
def test_an_error_of_collate_fn_is_of_its_kind(DataLoader: Any, workers: int) -> None:
    def collate(samples: list[int]) -> Any:
        raise ZeroDivisionError("no batch")

    batches = iter(DataLoader(numbers(), COUNT, num_workers=workers, collate_fn=collate))
    with pytest.raises(ZeroDivisionError, match="no batch"):
        next(batches)
    assert list(batches) == []


@each_with_workers
def test_each_loop_is_an_epoch_and_may_be_left(DataLoader: Any, workers: int) -> None:
    loader = DataLoader(numbers(), batch_size=9, num_workers=workers, collate_fn=list)

    for _ in loader:
        break
    assert all(feed._ended_at is not None for _, feed in getattr(loader, "_feeds", ()))
    firsts = [next(iter(loader))[0] for _ in range(3)]
    assert firsts == [0, 0, 0]
    assert [len(batch) for _ in range(2) for batch in loader] == [9, 9, 5] * 2


@each_with_workers
def test_loops_over_one_loader_may_be_nested(DataLoader: Any, workers: int) -> None:
    loader = DataLoader(numbers(), batch_size=12, num_workers=workers, collate_fn=len)

    assert [(outer, inner) for outer in loader for inner in loader] == [
        (12, 12),
        (12, 11),
        (11, 12),
        (11, 11),
    ]


@each_with_workers
def test_a_sampler_without_end_is_asked_for_as_many_as_are_wanted(DataLoader: Any, workers: int) -> None:
    class Endless(Sampler[int]):
        asked = 0

        def __iter__(self) -> Iterator[int]:
            for number in itertools.cycle(range(COUNT)):
                Endless.asked += 1
                yield number

    batches = iter(
        DataLoader(numbers(), batch_size=2, sampler=Endless(), num_workers=workers, collate_fn=list)
    )

    assert list(itertools.islice(batches, 40)) == [[k % COUNT, (k + 1) % COUNT] for k in range(0, 80, 2)]
    assert Endless.asked == 80 + (8 if workers else 0)


@each_with_workers
def test_an_iterator_that_is_over_stays_over(DataLoader: Any, workers: int) -> None:
    batches = iter(DataLoader(numbers(), batch_size=12, num_workers=workers))

    assert len(list(batches)) == 2
    with pytest.raises(StopIteration):
        next(batches)


def test_a_profiler_sees_each_batch() -> None:
    numbers: Any = list(range(8))
    batches = iter(OfPenstock(numbers, batch_size=2))
    next(batches)
    profile: Any = torch.autograd.profiler.profile
    with profile() as profiled:
        rest = len(list(batches))

    (marked,) = [each for each in profiled.key_averages() if each.key.startswith("enumerate(DataLoader)")]
    assert (rest, marked.count) == (3, 4), "and the end of the pass"


def test_pin_memory_without_an_accelerator_warns_and_goes_on(DataLoader: Any) -> None:
    if torch.accelerator.is_available():
        return
    with pytest.warns(UserWarning, match="no accelerator is found"):
        batches = list(DataLoader(numbers(), batch_size=12, pin_memory=True))

    assert not any(batch.is_pinned() for batch in batches)


@pytest.mark.parametrize("by", ["caller", "threads", "a process"])
def test_batches_are_pinned_for_the_accelerator_by_a_thread_of_the_training(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is there for this test only, numbered 3; of a process, what it has handed over is pinned."""
    pinned: list[tuple[Any, str]] = []
    devices: list[int] = []

    def pin(batch: Any, device: str) -> Any:
        pinned.append((batch.tolist(), device))
        return batch

    monkeypatch.setattr("penstock.torch.dataloader._pinned", pin)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.append)
    if by == "a process":
        monkeypatch.setattr(
            "penstock.torch.dataloader._Collate.__call__",
            lambda self, samples: (self.function(samples), False),
        )

    list(Penstocks(numbers(), 12, pin_memory=True, num_workers=0 if by == "caller" else 1))

    assert pinned == [(list(range(12)), "cuda"), (list(range(12, 23)), "cuda")]
    assert devices == ([3, 3] if by == "threads" else [])


def test_more_workers_than_processors_warn(DataLoader: Any) -> None:
    with pytest.warns(UserWarning, match="This DataLoader will create 1000 worker processes in total"):
        DataLoader(numbers(), num_workers=1000)


def test_a_batch_that_does_not_come_is_a_runtime_error() -> None:
    """PyTorch's case needs processes that are killed at its end; the message is its own."""
    is_over, done = threading.Event(), set[int]()

    def wait(index: int) -> int:
        if index == 3:
            is_over.wait()
        done.add(index)
        return index

    loader = Penstocks(Of(wait), batch_size=2, num_workers=2, timeout=1)
    batches = iter(loader)
    wait_until(lambda: done >= {0, 1, 2})
    next(batches)
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds") as caught:
        next(batches)
    assert "sample 3, Of[3]" in str(caught.value.__cause__)

    is_over.set()
    wait_until(lambda: 3 in done)
    assert next(batches).tolist() == [2, 3], "it is waited for again"


def test_memory_of_batches_that_are_kept_is_their_own(workers: int) -> None:
    """All batches of an epoch in a list, as for an evaluation; the threads go on beyond the slots that there are."""
    loader = Penstocks(Of(lambda index: torch.full((1000,), index), 200), batch_size=1, num_workers=workers)

    kept = list(loader)

    assert [int(batch[0, 999]) for batch in kept] == list(range(200))


def test_threads_live_from_pass_to_pass_and_end_with_the_loader() -> None:
    def deciders() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("penstock-decode")}

    before = deciders()
    loader = Penstocks(numbers(), num_workers=2)
    list(loader)
    own = deciders() - before
    for _ in loader:
        break
    list(loader)
    assert deciders() - before == own
    assert len(own) == 2

    del loader
    gc.collect()
    for thread in own:
        thread.join()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_that_has_loaded_is_pickled_and_copied_without_its_threads(
    DataLoader: Any, persistent: bool
) -> None:
    loader = DataLoader(list(range(9)), 4, num_workers=1, persistent_workers=persistent, collate_fn=unchanged)
    if DataLoader is Penstocks or not persistent:
        assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]

    for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert list(other) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_forked_process_loads_by_threads_of_its_own() -> None:
    loader = Penstocks(list(range(9)), 4, num_workers=1, collate_fn=sum)
    assert list(loader) == [6, 22, 8]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        child = os.fork()
    if not child:
        signal.alarm(int(patient(60)))
        status = 1
        try:
            status = int(list(loader) != [6, 22, 8])
        finally:
            os._exit(status)

    assert os.waitpid(child, 0)[1] == 0
    assert list(loader) == [6, 22, 8]


def test_keys_that_are_no_numbers_of_samples_are_loaded_and_recorded_in_the_callers_thread(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_FOLDER, str(tmp_path))
    dataset: Any = {"a": 1, "b": 2}
    loader = Penstocks(dataset, sampler=["b", "a"], num_workers=workers)

    if workers:
        with pytest.warns(RuntimeWarning, match=r"the sampler gives \['b'\].*in the thread of the training"):
            batches = iter(loader)
    else:
        batches = iter(loader)
    assert [batch.tolist() for batch in batches] == [[2], [1]]
    del loader, batches
    gc.collect()

    (file,) = tmp_path.iterdir()
    spans = read_trace(file).spans
    for kind in (Kind.WAIT, Kind.STEP, Kind.READ, Kind.DECODE):
        of_kind = spans[(spans["kind"] == kind) & (spans["step"] != NO_STEP)]
        assert of_kind[["epoch", "step"]].tolist() == [(0, 0), (0, 1)]


@for_each("workers", [0, 2])
def test_whoever_loads_a_run_of_penstock_watch_has_waits_steps_and_samples(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    monkeypatch.setenv(RUN_FOLDER, str(tmp_path))
    loader = Penstocks(numbers(), 4, num_workers=workers, shuffle=True, collate_fn=list)

    given = list(loader)
    for batch in watch(loader, quiet=True):  # which adds no record of its own
        given.append(batch)
        break
    given.append(next(iter(loader)))
    own = set(threading.enumerate()) - before
    del loader
    gc.collect()
    for thread in own:
        thread.join()

    (file,) = tmp_path.iterdir()
    trace = read_trace(file)
    spans, ids = trace.spans, trace.ids
    assert trace.is_complete
    assert [each.steps for each in trace.epochs()] == [6, 1, 1]
    steps = spans[spans["kind"] == Kind.STEP]
    assert steps[["epoch", "step"]].tolist()[:7] == [*((0, step) for step in range(6)), (1, 0)]
    waits = spans[(spans["kind"] == Kind.WAIT) & (spans["step"] != NO_STEP)]
    assert waits["samples"].tolist() == [len(batch) for batch in given]
    reads = spans[spans["kind"] == Kind.READ]
    for wait, batch in zip(waits, given, strict=True):
        of_batch = reads[(reads["epoch"] == wait["epoch"]) & (reads["step"] == wait["step"])]
        read = [ids.get((0, int(each["flow"])), [each["sample"]]) for each in of_batch]
        assert sorted(itertools.chain(*read)) == sorted(batch)
    assert explain(trace).by_reason[Reason.UNSEEN] == 0


def test_a_pass_that_is_dropped_ends_no_step_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_FOLDER, str(tmp_path))
    loader = Penstocks(numbers(), 4)
    batches = iter(loader)
    next(batches)
    next(iter(loader))  # a look at the first batch
    list(batches)
    del loader, batches
    gc.collect()

    (file,) = tmp_path.iterdir()
    spans = read_trace(file).spans
    steps = spans[spans["kind"] == Kind.STEP]
    assert sorted(steps[["epoch", "step"]].tolist()) == [*((0, step) for step in range(6)), (1, 0)]
    assert (steps["end"] >= steps["start"]).all()


@for_each("taken", [0, 2])
@for_each("recorded_by", ["loader", "watch"])
def test_a_process_that_is_forked_within_a_pass_records_in_a_file_of_its_own(
    recorded_by: str, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_FOLDER, str(tmp_path))
    loader: Any = (
        Penstocks(numbers(), 4) if recorded_by == "loader" else watch(PyTorchs(numbers(), 4), quiet=True)
    )
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    child = os.fork()
    if child == 0:
        try:
            list(batches)
        finally:
            os._exit(0)

    assert os.waitpid(child, 0)[1] == 0
    list(batches)
    del loader, batches
    gc.collect()
    watch([], quiet=True)  # lets go of loaders that are gone
    runs = {read.meta["process"]: read for read in map(read_trace, tmp_path.iterdir())}
    assert set(runs) == {os.getpid(), child}
    for process, begin in ((os.getpid(), 0), (child, taken)):
        spans = runs[process].spans
        for kind in (Kind.WAIT, Kind.STEP):
            of_kind = spans[(spans["kind"] == kind) & (spans["step"] != NO_STEP)]
            assert of_kind[["epoch", "step"]].tolist() == [(0, step) for step in range(begin, 6)]
        assert (spans["start"] >= 0).all()
    assert runs[os.getpid()].is_complete


@pytest.mark.slow
def test_spawned_processes_record_as_ranks_of_torch_distributed_or_are_told_apart(tmp_path: Path) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()

    subprocess.run([sys.executable, Path(__file__).with_name("spawned_ranks.py"), tmp_path], check=True)

    before, after = open_run(tmp_path / "before"), open_run(tmp_path / "after")
    assert [part.outline.meta["rank"] for part in before.parts] == [0, 0]
    assert [part.outline.meta["rank"] for part in after.parts] == [0, 1]
    for run in (before, after):
        waits = join_spans(run.spans())
        waits = waits[(waits["kind"] == Kind.WAIT) & (waits["step"] != NO_STEP)]
        assert sorted(waits[["rank", "step"]].tolist()) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert ["told apart by process" in note for note in before.notes] == [True]
    assert after.notes == ()


class Asking:
    """Asks for what a data set of Penstock's may ask for."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int, rng: np.random.Generator, epoch: int) -> Any:
        return index, epoch, rng.random()


def test_a_data_set_that_asks_for_a_generator_gets_the_same_numbers_whatever_loads_it() -> None:
    runs = [epochs(Penstocks, Asking(), batch_size=4, shuffle=True, num_workers=n) for n in (0, 1, 2)]

    assert runs[0] == runs[1] == runs[2]
    of_batches = [batch for _, batch in runs[0][:-1]]
    draws = [value for _, _, (_, _, drawn) in of_batches for value in drawn]
    assert len(set(draws)) == 2 * COUNT, "others in each epoch, for each sample"
    assert [set(epoch) for _, (_, _, epoch), _ in of_batches] == [{0}] * 6 + [{1}] * 6, "as a Loader counts"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_what_cannot_be_honoured_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        ConfigError, match=r"Stream, an IterableDataset.*open_source.*keep PyTorch's DataLoader"
    ):
        Penstocks(Stream())
    for path in ("photos", Path("photos")):
        with pytest.raises(ConfigError, match=r"photos.*, a path.*penstock\.torch\.Loader\(.*photos"):
            Penstocks(path)
    with pytest.raises(ConfigError, match="worker_init_fn is for worker processes"):
        Penstocks(numbers(), num_workers=2, worker_init_fn=print)
    with pytest.raises(ConfigError, match="the training is never forked"):
        Penstocks(numbers(), num_workers=2, multiprocessing_context="spawn")
    with pytest.raises(ConfigError, match='workers is 3; it is "auto", "processes" or "threads"'):
        OfPenstock(numbers(), workers=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dataset.make is .*lambda.*which no other process can import"):
        iter(OfPenstock(Of(lambda index: index), num_workers=2, workers="processes"))


def test_threads_take_over_where_the_data_set_cannot_be_copied() -> None:
    loader = OfPenstock(Of(lambda index: index), batch_size=12, num_workers=2, collate_fn=list)

    with pytest.warns(RuntimeWarning, match=r"2 threads load in place of worker processes.*dataset.make is"):
        batches = list(loader)

    assert [len(batch) for batch in batches] == [12, 11]


def test_worker_processes_are_those_of_pytorch_and_live_from_pass_to_pass() -> None:
    """One start for all of it: get_worker_info, worker_init_fn, changes of the data set, draws, errors, a death."""
    dataset = Telling()
    torch.manual_seed(4)
    arguments: dict[str, Any] = {"shuffle": True, "num_workers": 2, "worker_init_fn": note_worker}
    loader = OfPenstock(dataset, 6, **arguments)
    passes = []
    for epoch in range(2):
        dataset.epoch = epoch
        passes.append(list(loader))
    dataset.broken = 5
    with pytest.raises(KeyError, match="sample 5"):
        list(loader)

    torch.manual_seed(4)
    theirs = PyTorchs(Telling(), 6, **arguments)
    assert [batch["index"].tolist() for batches in passes for batch in batches] == [
        batch["index"].tolist() for _ in range(2) for batch in theirs
    ]
    every = [batch for batches in passes for batch in batches]
    assert len({pid for batch in every for pid in batch["pid"].tolist()} - {os.getpid()}) == 2
    ids, counts = (torch.cat([batch["worker"][part] for batch in every]).tolist() for part in range(2))
    assert (set(ids), set(counts)) == ({0, 1}, {2})
    assert all(batch["initialised"].all() for batch in every)
    assert [set(batch["epoch"].tolist()) for batch in every] == [{0}] * 4 + [{1}] * 4
    assert all(torch.equal(batch["row"][:, 7].long(), batch["index"]) for batch in every)
    assert len(set(torch.cat([batch["drawn"] for batch in every]).flatten().tolist())) == 2 * 3 * TOLD

    dataset.broken, dataset.fatal = -1, 7
    with pytest.raises(
        RuntimeError, match=r"DataLoader worker exited unexpectedly: worker process .*exit code 3"
    ):
        list(loader)


def test_worker_processes_make_whole_batches() -> None:
    wholes = OfPenstock(Wholes(), 6, num_workers=1, collate_fn=unchanged, workers="processes")

    batches = list(wholes)

    assert [batch["rows"].tolist() for batch in batches][-1] == [36, 38, 40, 42, 44, 46]
    assert all(batch["is_own"] for batch in batches)


SCRIPT = """
import warnings
import torch
from penstock.torch import DataLoader
warnings.simplefilter("default")

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return index * index

print([batch.tolist() for batch in DataLoader(Squares(), 3, num_workers=2)])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (SCRIPT, "which has no `if __name__ == '__main__':`"),
        (
            f"if __name__ == '__main__':{textwrap.indent(SCRIPT, '    ')}",
            "Squares is defined under `if __name__ == '__main__':`",
        ),
    ],
)
def test_a_script_whose_import_does_not_define_its_data_set_alone_works_as_with_pytorchs(
    tmp_path: Path, forks: Forks, text: str, reason: str
) -> None:
    """Processes that import it would run it again, or not find the class."""
    script = tmp_path / "script.py"
    script.write_text(text)

    with forks.start(script, [[[[]]]], modules=["penstock.torch"]) as forked:
        told, ended = forked.wait()

    assert "\n[[0, 1, 4], [9, 16, 25]]\n" in told
    assert reason in told
    assert list(ended.values()) == [0]

"""The loader as a user of PyTorch meets it."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from tests.for_each import for_each
from tests.forking import Forks
from torch.utils.data import DataLoader, Dataset, TensorDataset

import penstock
from penstock.errors import ConfigError, DataError
from penstock.loader import LoaderConfig
from penstock.loader.transforms import Normalize, Resize, ToTensor
from penstock.plan import FullShuffle
from penstock.plan.torch_order import TorchShuffle
from penstock.store import Arrays, ImageFolder
from penstock.torch import Loader
from penstock.torch.loader import TORCH, cuda_event

COUNT, BATCH = 22, 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """22 PNG pictures of 8 x 6 pixels; every pixel of picture k has the value 10 k; label k % 2."""
    for number in range(COUNT):
        place = tmp_path / "data" / f"label{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(place / f"{number:02d}.png"), np.full((6, 8, 3), 10 * number, np.uint8))
    return tmp_path / "data"


def make(source: Any, **options: Any) -> Loader:
    settings: dict[str, Any] = {
        "batch_size": BATCH,
        "epochs": 2,
        "memory": "32 MiB",
        "report": None,
        "timeout_seconds": 60,
        **options,
    }
    return Loader(source, **settings)


def numbers(images: torch.Tensor, scale: float = 255) -> list[int]:
    """Which pictures are these? Read off the first element of each."""
    return (images.float().flatten(1)[:, 0] * scale / 10).round().int().tolist()


class Lists(Dataset[Any]):
    """Rows that are made a list at a time; those in `broken` cannot be."""

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        self.broken = broken
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, str, np.ndarray]:
        if index in self.broken:
            raise ValueError(f"row {index} is broken")
        return torch.full((3,), index / 2), index, f"row {index}", np.full((2, 2), index, np.int16)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        return [self[index] for index in indices]


@pytest.fixture
def large_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads as large as they may be, however long a busy machine takes for a sample."""
    monkeypatch.setattr("penstock.policy.decisions.LOAD_SECONDS", 1e6)


@pytest.mark.usefixtures("large_loads")
def test_a_data_set_that_makes_lists_is_asked_for_lists_and_gives_what_a_dataloader_gives() -> None:
    dataset = Lists()
    expected = list(DataLoader(Lists(), 40, shuffle=False))

    with make(dataset, batch_size=40, epochs=1, shuffle=False) as loader:
        batches = list(loader)

    for mine, theirs in zip(batches, expected, strict=True):
        assert mine[1].tolist() == theirs[1].tolist()
        assert mine[2] == list(theirs[2])
        for place in (0, 3):
            assert mine[place].dtype == theirs[place].dtype
            assert torch.equal(mine[place], theirs[place])
    assert all(len(indices) > 1 for indices in dataset.asked)
    assert sum(map(len, dataset.asked)) > 100, "most samples came in lists"


@pytest.mark.usefixtures("large_loads")
def test_an_error_in_a_list_is_that_of_its_sample_alone() -> None:
    with make(Lists((7, 60)), batch_size=40, epochs=1, shuffle=False, on_error="skip") as loader:
        rows = [row for batch in loader for row in batch[1].tolist()]

    assert rows == [row for row in range(200) if row not in (7, 60)]
    assert {skipped.sample: skipped.error for skipped in loader.skipped} == {
        7: "ValueError: row 7 is broken",
        60: "ValueError: row 60 is broken",
    }


class NoLists(Lists):
    """What has the method and cannot use it, as of a wrapper around a data set that has it."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        raise NotImplementedError


@pytest.mark.usefixtures("large_loads")
def test_lists_that_fail_where_no_sample_does_are_asked_for_no_more() -> None:
    dataset = NoLists()

    with (
        make(dataset, batch_size=40, epochs=1, shuffle=False, decoders=1) as loader,
        pytest.warns(
            RuntimeWarning, match=r"NoLists.__getitems__ raises NotImplementedError\(\) for .* one by one"
        ),
    ):
        assert [row for batch in loader for row in batch[1].tolist()] == list(range(200))

    assert len(dataset.asked) == 1


class OneUnlike(Dataset[Any]):
    """Numbers, but for one of another kind."""

    def __init__(self, usual: Any, unlike: Any) -> None:
        self.usual, self.unlike = usual, unlike

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return (self.unlike if index == 50 else self.usual), index


@pytest.mark.usefixtures("large_loads")
@pytest.mark.parametrize(
    ("usual", "unlike", "found"),
    [
        (1, 1.5, r"float64\[\]"),
        (1, 2**63, r"uint64\[\]"),
        (1.5, 1, r"int64\[\]"),
        (torch.ones(2), torch.ones(3), r"float32\[3\]"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), r"float64\[2\]"),
        (torch.tensor(1), torch.tensor([1]), r"int64\[1\]"),
        (torch.tensor(1), torch.tensor(1, dtype=torch.int8), r"int8\[\]"),
        (torch.tensor(True), torch.tensor([True]), r"bool\[1\]"),
        (np.ones(2), np.ones(2, np.float32), r"float32\[2\]"),
        ("a", ("a",), "a tuple of 1 parts"),
    ],
)
def test_a_sample_unlike_the_others_of_its_load_is_named(usual: Any, unlike: Any, found: str) -> None:
    with (
        make(OneUnlike(usual, unlike), batch_size=64, epochs=1, shuffle=False) as loader,
        pytest.raises(DataError, match=rf"OneUnlike\[50\].*{found}"),
    ):
        list(loader)


class ThreadsOfOperations(Dataset[int]):
    """How many threads PyTorch's operations take where a sample is made."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return torch.get_num_threads()


def test_operations_in_a_data_set_take_no_further_threads_and_all_others_as_many_as_ever() -> None:
    elsewhere: list[int] = []
    usual = torch.get_num_threads()

    with make(ThreadsOfOperations()) as loader:
        inside = {number for batch in loader for number in batch.tolist()}

    new = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert inside == {1}
    assert [torch.get_num_threads(), *elsewhere] == [usual, usual]
    with make(ThreadsOfOperations(), decoders=0) as loader:
        assert {number for batch in loader for number in batch.tolist()} == {usual}


def test_a_worker_that_starts_later_leaves_the_training_the_threads_that_it_has_chosen_since() -> None:
    """The number was that of the loader's construction."""
    usual, elsewhere = torch.get_num_threads(), []
    begin = TORCH.begin_thread
    torch.set_num_threads(usual + 1)
    try:
        for act in (begin, lambda: elsewhere.append(torch.get_num_threads())):
            thread = threading.Thread(target=act)
            thread.start()
            thread.join()
        assert elsewhere == [usual + 1]
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("free", range(7))
def test_at_the_limit_of_all_threads_a_training_goes_on_or_is_told_what_to_raise(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """The thread that sets PyTorch's number back could not be started, and all new threads had one from then on."""
    usual, elsewhere = torch.get_num_threads(), []
    start, lock, most = threading.Thread.start, threading.Lock(), threading.active_count() + free

    def start_some(thread: threading.Thread) -> None:
        with lock:
            if threading.active_count() >= most:
                raise RuntimeError("can't start new thread")
            start(thread)

    def train() -> int:
        with make(ThreadsOfOperations(), decoders=4, epochs=1) as loader:
            return sum(len(batch) for batch in loader)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_some)
        if free > 1:
            assert train() == 40
        else:
            with pytest.raises(DataError, match=r"can't start new thread: .* raise `ulimit -u`"):
                train()

    new = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert elsewhere == [usual]


# Tensors over the slots


def slots_of(loader: Loader) -> list[range]:
    """Return the addresses of each batch slot."""
    staging = loader._parts.staging
    starts = [staging.arrays(slot)[0].ctypes.data for slot in range(len(staging))]
    return [range(start, start + staging.slot_bytes) for start in starts]


def slot_of(loader: Loader, tensor: torch.Tensor) -> int:
    (slot,) = [number for number, slot in enumerate(slots_of(loader)) if tensor.data_ptr() in slot]
    return slot


@pytest.mark.parametrize(
    ("dtype", "scale", "tolerance", "layout"),
    [
        (torch.float32, 255, 1e-6, "NCHW"),
        ("float16", 255, 2**-11, "NHWC"),
        (torch.bfloat16, 255, 2**-8, "NHWC"),
        (torch.uint8, 1, 0, "NCHW"),
        (torch.uint8, 1, 0, "NHWC"),
    ],
)
def test_tensors_lie_in_the_slot_in_the_asked_type_and_layout(
    folder: Path, dtype: Any, scale: float, tolerance: float, layout: str
) -> None:
    transforms = [Resize((6, 8))] if dtype is torch.uint8 else [Resize((6, 8)), ToTensor()]
    with make(folder, transforms=transforms, dtype=dtype, layout=layout) as loader:
        for images, labels in loader:
            assert str(images.dtype).endswith(str(dtype).removeprefix("torch."))
            assert images.shape[1:] == ((3, 6, 8) if layout == "NCHW" else (6, 8, 3))
            assert images.is_contiguous()
            assert slot_of(loader, images) in range(loader.memory.slots)
            pictures = numbers(images, scale)
            assert [picture % 2 for picture in pictures] == labels.tolist()
            expected = torch.tensor(pictures)[:, None, None, None] * 10 / scale
            assert torch.allclose(images.double(), expected.double(), rtol=tolerance, atol=0)
            del images, labels


def test_bfloat16_is_the_nearest_of_what_float32_gives(folder: Path) -> None:
    transforms = [Resize((6, 8)), ToTensor(), Normalize((0.1, 0.2, 0.3), (0.7, 0.9, 1.1))]
    with (
        make(folder, transforms=transforms, dtype="float32") as precise,
        make(folder, transforms=transforms, dtype="bfloat16") as coarse,
    ):
        for (images, _), (rounded, _) in zip(precise, coarse, strict=True):
            assert torch.equal(images.to(torch.bfloat16), rounded)


def test_labels_with_names_give_dicts_of_tensors_as_a_dataloader_makes_of_dicts(folder: Path) -> None:
    class Named(ImageFolder):
        @property
        def labels(self) -> Any:
            return {"weight": np.arange(COUNT) / 4, "boxes": np.arange(4 * COUNT, dtype="i4").reshape(-1, 4)}

        @labels.setter
        def labels(self, value: Any) -> None:
            """What the folder says is not asked for."""

    samples = [
        {"weight": k / 4, "boxes": torch.arange(4 * k, 4 * k + 4, dtype=torch.int32)} for k in range(COUNT)
    ]
    theirs: DataLoader[Any] = DataLoader(samples, BATCH)  # type: ignore[arg-type]
    options: dict[str, Any] = {"transforms": [Resize((6, 8)), ToTensor()], "shuffle": False, "epochs": 1}

    with make(Named(folder), dtype="bfloat16", **options) as loader:
        for mine, expected in zip(loader, theirs, strict=True):
            assert list(mine) == ["images", "weight", "boxes"]
            assert mine["images"].dtype == torch.bfloat16
            for name in ("weight", "boxes"):
                assert mine[name].dtype == expected[name].dtype
                assert torch.equal(mine[name], expected[name])


@pytest.mark.parametrize(
    "derive",
    [
        lambda images, labels: images.detach().transpose(1, 3)[:, 2:],
        lambda images, labels: images.view(torch.int32),
        lambda images, labels: images.numpy()[2:],
        lambda images, labels: [images.unbind()[-1]],
        lambda images, labels: {"kept": (images[0], "and more")},
    ],
    ids=["transposed", "reinterpreted", "as array", "row", "nested"],
)
def test_a_slot_is_not_filled_again_while_anything_refers_to_it(
    folder: Path, derive: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    with make(folder, transforms=[Resize((6, 8)), ToTensor()], epochs=60) as loader:
        passes = iter(loader)
        images, labels = next(passes)
        slot = slot_of(loader, images)
        before = images.clone(), labels.clone()
        kept = derive(images, labels)
        del images, labels

        met = [slot_of(loader, tensors[0]) for tensors in passes]
        met += [slot_of(loader, tensors[0]) for _ in range(5) for tensors in loader]
        assert slot not in met
        inside, labels_inside = (
            torch.from_numpy(array[: len(labels)])
            for array, labels in zip(loader._parts.staging.arrays(slot), before, strict=True)
        )
        assert torch.equal(inside, before[0])
        assert torch.equal(labels_inside, before[1])
        del inside, labels_inside

        del kept
        assert any(slot_of(loader, tensors[0]) == slot for _ in range(45) for tensors in loader)


def test_kept_labels_keep_no_slot_and_their_values(folder: Path) -> None:
    """What every validation does: collect the targets of all batches."""
    kept = []
    with make(folder, transforms=[Resize((6, 8)), ToTensor()], epochs=20, memory="24 KiB") as loader:
        capacity = loader.memory.staging_bytes // loader.memory.slot_bytes
        for _ in range(20):
            kept += [(numbers(images), labels) for images, labels in loader]

    assert len(kept) > 10 * capacity
    assert all(labels.tolist() == [picture % 2 for picture in pictures] for pictures, labels in kept)


def test_a_gradient_through_a_batch_keeps_its_slot_until_the_graph_is_gone(folder: Path) -> None:
    with make(folder, transforms=[Resize((6, 8)), ToTensor()], epochs=20) as loader:
        passes = iter(loader)
        weight = torch.ones(8, requires_grad=True)
        images, _ = next(passes)
        slot, total = slot_of(loader, images), images.sum()
        loss = (images * weight).sum()
        del images, _

        met = [slot_of(loader, tensors[0]) for tensors in passes]
        loss.backward()

        assert slot not in met
        assert weight.grad is not None
        assert torch.allclose(weight.grad.sum(), total)


# Copies to a device


class FakeEvent:
    """An event on a stream whose work the test ends."""

    recorded: list[FakeEvent]

    def __init__(self, device: str, enable_timing: bool) -> None:
        assert (device, enable_timing) == ("cuda", False)
        self.is_over = False
        self.thread: threading.Thread | None = None

    def record(self) -> None:
        self.thread = threading.current_thread()
        FakeEvent.recorded.append(self)

    def query(self) -> bool:
        return self.is_over


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> type[FakeEvent]:
    """A PyTorch that believes to use a device, whose copies the test ends."""
    gc.collect()  # batches of earlier tests would be dropped by whichever thread collects them
    FakeEvent.recorded = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "Event", FakeEvent)
    return FakeEvent


def test_nothing_is_waited_for_where_no_device_is_in_use() -> None:
    assert cuda_event() is None


def test_no_frame_of_python_runs_when_a_batch_is_dropped() -> None:
    """What a signal handler raised in there would be lost."""
    assert not hasattr(torch.Event.record, "__code__")


def test_a_slot_is_not_filled_again_while_a_copy_to_the_device_may_read_it(
    folder: Path, cuda: type[FakeEvent]
) -> None:
    with make(folder, transforms=[Resize((6, 8)), ToTensor()], epochs=20, memory="40 KiB") as loader:
        slots = loader.memory.slots
        seen = set()
        passes = iter(loader)
        copied_in: list[int] = []
        for _ in range(slots - 1):
            images, labels = next(passes)
            copied_in.append(slot_of(loader, images))
            del images, labels
        images, labels = next(passes)
        seen.add(slot_of(loader, images))

        assert len(set(copied_in) | seen) == slots
        assert {event.thread for event in cuda.recorded} == {threading.current_thread()}
        assert len(cuda.recorded) == slots - 1
        # The device ends the copy out of the first slot: that one alone is filled, and the next batch lies in it.
        cuda.recorded[0].is_over = True
        images, labels = next(passes)
        assert slot_of(loader, images) == copied_in[0]
        for event in cuda.recorded:
            event.is_over = True
        del images, labels


def test_a_copy_that_ends_while_the_training_waits_ends_the_wait(folder: Path, cuda: type[FakeEvent]) -> None:
    """All slots but the one in hand are held; the copies end after the wait has begun, seen by its own report."""

    def end_copies(_: str) -> None:
        for event in list(cuda.recorded):
            event.is_over = True

    options = {"memory": "40 KiB", "patience_seconds": 0.2, "report": end_copies, "epochs": 20}
    with make(folder, transforms=[Resize((6, 8)), ToTensor()], **options) as loader:
        seen = [number for images, _ in loader for number in numbers(images)]
        end_copies("")

    assert sorted(seen) == list(range(COUNT))


# Ranks


def test_without_a_process_group_a_loader_is_alone(folder: Path) -> None:
    with make(folder, transforms=[Resize((6, 8))]) as loader:
        assert (loader.plan.ranks, len(loader)) == (1, 6)


@pytest.mark.parametrize("half", [{"rank": 0}, {"world_size": 2}])
def test_half_of_a_rank_is_refused(folder: Path, half: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="rank and world_size belong together"):
        make(folder, transforms=[Resize((6, 8))], **half)


@pytest.mark.parametrize("kind", [Loader, penstock.Loader])
def test_one_of_several_processes_must_be_told_which_data_parallel_rank_it_is(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """Its rank in the job is not that under tensor parallelism, and is never taken for it."""
    dataset = [(k,) for k in range(8)]
    arguments: dict[str, Any] = {"batch_size": 4, "epochs": 1, "memory": "1 MB"}
    config = LoaderConfig(dataset, **arguments)
    refused = (
        "so this process is one of several, and nothing says.*rank= and world_size=.*mesh=.*world_size=1"
    )

    with monkeypatch.context() as patched:
        patched.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match=f"WORLD_SIZE is 2, {refused}"):
            kind(config)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", object)
    with pytest.raises(ConfigError, match=f"torch.distributed has 2 ranks, {refused}"):
        kind(dataset, **arguments)
    for each in (replace(config, world_size=1), replace(config, rank=0, world_size=1)):
        with kind(each, report=None) as loader:
            assert (loader.plan.ranks, len(loader)) == (1, 2)


RANK = """
import json, sys
import torch
from penstock.loader.transforms import Resize, ToTensor
from penstock.torch import Loader

rank, folder, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
with Loader(
    folder, batch_size=4, epochs=2, seed=5, transforms=[Resize((6, 8)), ToTensor()], memory="32 MiB", report=None,
    rank=rank, world_size=2,
) as loader:
    for _ in range(2):
        for images, labels in loader:
            mine = (images[:, 0, 0, 0] * 25.5).round().int()
            both = [None, None]
            torch.distributed.all_gather_object(both, mine.tolist())
            if rank == 0:
                print(json.dumps(both))
torch.distributed.destroy_process_group()
"""


def test_the_ranks_of_a_process_group_share_each_batch(folder: Path, tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    with forks.start(
        tmp_path / "rank.py", [[[[rank, str(folder), str(tmp_path / "store")] for rank in "01"]]]
    ) as ranks:
        told, statuses = ranks.wait()

    assert list(statuses.values()) == [0, 0], told
    steps = [json.loads(line) for line in told.splitlines() if line.startswith("[[")]
    with make(folder, seed=5, transforms=[Resize((6, 8)), ToTensor()]) as alone:
        batches = [numbers(images) for _ in range(2) for images, _ in alone]
    assert len(steps) == len(batches) == 12
    assert [first + second for first, second in steps] == batches
    assert all(len(first) == len(second) for first, second in steps)


# Data sets of PyTorch's kind


Pair = namedtuple("Pair", ["image", "label"])


class Samples(Dataset[Any]):
    """Sample k in one of the structures that PyTorch's own loader can batch."""

    def __init__(self, shape_of: Callable[[int, torch.Tensor], Any]) -> None:
        self.shape_of = shape_of

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.shape_of(index, torch.arange(6, dtype=torch.float32).view(2, 3) + 100 * index)


STRUCTURES: dict[str, Callable[[int, torch.Tensor], Any]] = {
    "tensor": lambda k, x: x,
    "tuple": lambda k, x: (x, k),
    "list": lambda k, x: [x, k / 2],
    "dict": lambda k, x: {"image": x, "label": k, "name": f"sample {k}"},
    "ordered dict": lambda k, x: OrderedDict(b=x, a=k),
    "namedtuple": lambda k, x: Pair(x, k),
    "nested": lambda k, x: {"a": (x, [Pair(x + 1, {"b": k % 2 == 0})])},
    "arrays": lambda k, x: (x.numpy(), np.float32(k), np.int16(k), np.bool_(k % 2)),
    "number": lambda k, x: k,
    "words": lambda k, x: (k, "word", b"bytes"),
    "not contiguous": lambda k, x: x.t()[::2],
    "expanded": lambda k, x: torch.tensor(k).expand(2, 2),
    "with gradient": lambda k, x: x.clone().requires_grad_(),
    "bfloat16": lambda k, x: (x.to(torch.bfloat16), torch.tensor(k, dtype=torch.bfloat16)),
    "transposed bfloat16": lambda k, x: x.to(torch.bfloat16).t(),
    "float8": lambda k, x: (x / 100).to(torch.float8_e5m2),
    "uint16 beside bfloat16": lambda k, x: (x.to(torch.uint16), x.to(torch.bfloat16)),
    "complex": lambda k, x: torch.complex(x, -x).conj(),
    "empty": lambda k, x: (x[:0], k),
    "bool": lambda k, x: x > 1000,
}


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        as_bytes = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (ours, theirs)]
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(*as_bytes)
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(equal(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)


@for_each("structure", STRUCTURES)
def test_a_data_sets_batches_are_those_of_pytorchs_own_loader(structure: str) -> None:
    dataset = Samples(STRUCTURES[structure])
    theirs = list(DataLoader(dataset, BATCH))

    with make(dataset, shuffle=False) as loader:
        ours = [batch for batch in loader]  # noqa: C416  # list() would ask for the length

    assert len(ours) == len(theirs)
    for our_batch, their_batch in zip(ours, theirs, strict=True):
        if structure == "namedtuple":
            assert type(our_batch) is type(their_batch) is Pair
        assert equal(our_batch, their_batch), (our_batch, their_batch)


def test_batches_of_a_data_set_lie_in_the_slots_too() -> None:
    with make(Samples(STRUCTURES["bfloat16"]), shuffle=False) as loader:
        for images, labels in loader:
            assert slot_of(loader, images) == slot_of(loader, labels)


@for_each("drop_last", [False, True])
@for_each("own_generator", [True, False])
def test_a_shuffled_run_of_pytorchs_loader_is_repeated_batch_by_batch(
    own_generator: bool, drop_last: bool
) -> None:
    """The one-line migration: the order of the DataLoader that was there, from the generator's state."""
    dataset = TensorDataset(torch.arange(COUNT * 3.0).view(COUNT, 3), torch.arange(COUNT))
    generator = torch.Generator().manual_seed(11) if own_generator else None
    torch.manual_seed(12)
    state = generator.get_state() if generator is not None else torch.get_rng_state()
    their_loader = DataLoader(dataset, BATCH, shuffle=True, generator=generator, drop_last=drop_last)
    theirs = [batch for _ in range(3) for batch in their_loader]

    order = TorchShuffle(COUNT, state, is_global=not own_generator)
    with make(dataset, shuffle=order, drop_last=drop_last, epochs=3) as loader:
        ours = [[tensor.clone() for tensor in batch] for _ in range(3) for batch in loader]

    assert len(ours) == len(theirs)
    assert all(map(equal, ours, theirs))


def test_a_sample_of_another_type_than_the_first_is_refused_by_name() -> None:
    def shape_of(index: int, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16) if index == 6 else x.to(torch.float16)

    with (
        make(Samples(shape_of), shuffle=False) as loader,
        pytest.raises(OSError, match=r"Samples\[6\].*bfloat16"),
    ):
        for _ in loader:
            pass


def test_a_true_uint16_stays_one_whatever_type_is_asked_for_images() -> None:
    with make(Samples(lambda k, x: x.to(torch.uint16)), dtype="bfloat16") as loader:
        assert {batch.dtype for batch in loader} == {torch.uint16}


# Several at once


def test_training_and_validation_loaders_live_side_by_side(folder: Path) -> None:
    transforms = [Resize((6, 8)), ToTensor()]
    orders = [FullShuffle(COUNT, seed) for seed in (1, 2)]
    with (
        make(folder, transforms=transforms, seed=1, epochs=2) as train,
        make(folder, transforms=transforms, shuffle=orders[1], epochs=4, batch_size=3) as validate,
        make(Samples(STRUCTURES["number"]), shuffle=orders[0]) as third,
    ):
        for epoch in range(2):
            seen = []
            for (images, _), ids in zip(train, third, strict=True):
                assert len(images) == len(ids)
                seen += ids.tolist()
                if len(seen) == 2 * BATCH:
                    assert sum(len(labels) for _, labels in validate) == COUNT
            assert seen == orders[0].at(epoch, np.arange(COUNT)).tolist()
            assert sum(len(labels) for _, labels in validate) == COUNT


def test_a_batch_outlives_its_loader(folder: Path) -> None:
    loader = make(folder, transforms=[Resize((6, 8)), ToTensor()])
    images, _ = next(iter(loader))
    before = images.clone()
    gone = weakref.ref(loader)
    loader.close()
    del loader
    gc.collect()

    assert gone() is None
    assert torch.equal(images, before)


# -- What trainers ask of a DataLoader -----------------------------------------------------------------


class Rows:
    """24 rows that say which they are, and which were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> torch.Tensor:
        self.read.append(row)
        return torch.tensor(row)


def epoch_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.fixture
def straight() -> list[list[int]]:
    with make(Rows(), epochs=3) as loader:
        return [batch for _ in range(3) for batch in epoch_of(loader)]


def test_accelerate_skips_batches_without_reading_them(straight: list[list[int]]) -> None:
    """With or without a state, after whole epochs and after one that was left; and draws nothing from the training."""
    from accelerate.data_loader import skip_first_batches

    steps = len(straight) // 3
    state = torch.get_rng_state()
    with make(rows := Rows(), epochs=2) as loader:
        rows.read.clear()
        loader.set_epoch(1)
        rest = skip_first_batches(loader, 4)
        assert len(rest) == steps - 4
        assert epoch_of(rest) == straight[steps + 4 : 2 * steps]
    assert sorted(rows.read) == sorted(row for batch in straight[steps + 4 : 2 * steps] for row in batch)
    with make(Rows(), epochs=3) as loader:
        assert epoch_of(skip_first_batches(loader, 5)) == straight[5:steps]
        assert epoch_of(loader) == straight[steps : 2 * steps]
    with make(Rows(), epochs=3) as loader:
        assert epoch_of(skip_first_batches(loader, steps)) == []
        assert epoch_of(loader) == straight[steps : 2 * steps]
    with make(Rows(), epochs=3) as loader:
        loader.load_state_dict(loader.state_at(1, 2))
        assert epoch_of(skip_first_batches(loader, 2)) == straight[steps + 2 : 2 * steps]
    with make(Rows(), epochs=3) as loader:
        for _ in loader:
            break
        assert epoch_of(skip_first_batches(loader, 3)) == straight[steps + 3 : 2 * steps]
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_that_lie_behind_are_not_taken_for_others() -> None:
    from accelerate.data_loader import skip_first_batches

    with make(Rows(), epochs=3) as loader:
        loader.load_state_dict(loader.state_at(1, 2))
        rest = iter(skip_first_batches(loader, 1))
        with pytest.raises(
            ConfigError, match=r"epoch 1, step 1 is asked for, and the loader is at epoch 1, step 2: skip as"
        ):
            next(rest)


def test_accelerates_own_checkpoints_hold_a_loader(straight: list[list[int]], tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    with make(Rows(), epochs=3) as loader, make(Rows(), epochs=3) as again:
        accelerator.register_for_checkpointing(loader)
        batches = iter(loader)
        next(batches), next(batches)
        accelerator.save_state(str(tmp_path))
        accelerator._custom_objects[:] = [again]
        accelerator.load_state(str(tmp_path))

        assert epoch_of(again) == straight[2 : len(straight) // 3]


@for_each("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_an_array_are_tensors(tmp_path: Path, dtype: torch.dtype | None) -> None:
    rows = np.arange(24, dtype="<f8").reshape(8, 3)
    np.save(tmp_path / "a.npy", rows)
    arguments: dict[str, Any] = {} if dtype is None else {"dtype": dtype}

    with Loader(
        tmp_path / "a.npy", batch_size=8, epochs=1, shuffle=False, report=None, **arguments
    ) as loader:
        (batch,) = loader
    source = Arrays(tmp_path / "a.npy", labels=np.arange(8))
    with Loader(source, batch_size=8, epochs=1, shuffle=False, report=None, **arguments) as loader:
        ((same, labels),) = loader

    assert batch.dtype == (dtype or torch.float64)
    assert torch.equal(batch.double(), torch.from_numpy(rows))
    assert torch.equal(same, batch)
    assert labels.tolist() == list(range(8))

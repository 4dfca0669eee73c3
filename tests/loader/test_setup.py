"""What a loader is given, wrongly: each argument is named, with what it was and what it may be."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from tests.for_each import for_each
from tests.patience import patient
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from penstock.errors import ConfigError, DataError, PenstockError, WaitTimeout
from penstock.flow.cpus import memory_limit_bytes
from penstock.loader import Loader
from penstock.loader.transforms import DecodeRaw, Resize, ToTensor
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import Explicit, FullShuffle
from penstock.store.calls import Calls

COUNT, TIMEOUT_SECONDS = 10, 3600.0


class RandomApply:
    """What torchvision's is: callable, and holds the list that it was made of."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        raise AssertionError("not to be called")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(COUNT):
        cv2.imwrite(str(tmp_path / f"{number}.png"), np.full((8, 8, 3), number, np.uint8))
    return tmp_path


def make(source: Any, **options: Any) -> Loader:
    settings = {"batch_size": 2, "epochs": 1, "transforms": [Resize((8, 8)), ToTensor()], "memory": "8 MiB"}
    return Loader(source, **{"report": None, **settings, **options})


@for_each(
    ("options", "text"),
    [
        (
            {"transforms": None},
            "transforms is empty, and the samples of FlatFolder .* are bytes: name at least one",
        ),
        ({"transforms": "Resize"}, "transforms is 'Resize'; it is a list"),
        ({"transforms": Resize(8)}, r"transforms is Resize\(.*, a single one: put it into a list"),
        ({"transforms": abs}, r"transforms is <built-in function abs>, a single one"),
        ({"transforms": RandomApply([ToTensor()])}, "transforms is .*RandomApply.*chooses among.*: write a"),
        ({"transforms": [RandomApply([ToTensor()])]}, r"transform 0 \(.*RandomApply.*\) chooses among"),
        ({"shuffle": "yes"}, "shuffle is 'yes'; it is True, False or an order"),
        ({"shuffle": 1}, "shuffle is 1; it is True, False"),
        (
            {"shuffle": [3, 1]},
            r"shuffle is \[3, 1\]; .*a list of ids becomes one by .*Explicit\(ids, samples\)",
        ),
        ({"shuffle": FullShuffle}, r"shuffle is <class .*FullShuffle'>; it is True"),
        ({"shuffle": RandomSampler(range(COUNT))}, r"shuffle is <.*RandomSampler.*Explicit.from_sampler\("),
        ({"drop_last": "yes"}, "drop_last is 'yes'; it is True or False"),
        (
            {"drop_last": True, "batch_size": COUNT + 1},
            r"drop_last leaves no batch: .* 10 samples.*batch_size \(11\)",
        ),
        ({"machine": 5}, "machine is 5; give a Machine, or the path of its file"),
        ({"machine": b"machine.toml"}, "machine is b'machine.toml'; give a Machine"),
        ({"memory": "0"}, "memory: '0' has no unit"),
        ({"memory": -1}, "memory: -1 cannot be"),
        ({"memory": 0}, "memory is 0 B"),
        ({"memory": []}, r"memory: \[\] is not a quantity"),
        ({"memory": memory_limit_bytes() + 1}, "memory is .*, and this process may use .* in all"),
        ({"readers": 1025}, "readers is 1025; it must be at most 1,024"),
        ({"readers": 2.0}, "readers is 2.0; it must be an integer"),
        ({"decoders": 10**9}, "decoders is 1000000000; it must be at most 1,024"),
        ({"decoders": True}, "decoders is True; it must be an integer"),
        ({"memory": "1 KiB"}, "memory is"),
        ({"epochs": 10**12}, "epochs is 1000000000000, and the order has fewer"),
        ({"machine": {}}, r"machine is \{\}; give a Machine"),
        ({"shuffle": FullShuffle(5, 0)}, "5 samples"),
        ({"transforms": ["Resize"]}, "Resize"),
        ({"report": "stdout"}, "report is 'stdout'"),
        ({"timeout_seconds": "5"}, "timeout_seconds is '5'"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds is nan"),
    ],
)
def test_a_wrong_argument_says_what_it_is_and_may_be(
    folder: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        make(folder, **options)


@for_each(
    ("source", "text"),
    [
        (None, "source is None; it must be a folder, a list file"),
        (5, "source is 5; it must be"),
        (b"/photos", r"source is b'/photos'; a path is text: give os.fsdecode\("),
        (bytearray(3), r"source is bytearray\(.*; it must be"),
        ({"train": range(3)}, "source is of type dict, of data sets or columns: give one"),
        (iter(range(3)), "source is <range_iterator.*; it must be"),
        (TensorDataset, "source is the class TensorDataset: make an instance"),
        (Stream(), r"source is of type Stream, which can only be iterated.*length.*see penstock.open_source"),
        (
            DataLoader(TensorDataset(torch.zeros(3))),
            r"source is of type DataLoader, itself a loader: .* its \.dataset",
        ),
    ],
)
def test_what_is_no_source_says_what_it_is_instead(source: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(source, transforms=())


@for_each("fixed", [set[str](), {"readers"}, {"prefetch"}], ids=["nothing", "readers", "prefetch"])
def test_readers_and_slots_begin_with_what_a_machine_says_and_follow_their_gain_unless_given(
    folder: Path, fixed: set[str]
) -> None:
    curve = Curve.flat(1e9)
    machine = Machine(SharedStore(curve, threads=3), (StorageClass("staging", 10**8, 1, curve),))

    with make(folder, machine=machine, **dict.fromkeys(fixed, 3)) as loader:
        limits = loader._parts.setup.limits

    assert limits.readers == 3
    assert (limits.most_readers > 3) == ("readers" not in fixed)
    assert (limits.most_slots > limits.slots) == ("prefetch" not in fixed)


def test_an_empty_path_is_no_folder() -> None:
    with pytest.raises(PenstockError, match="'' is not the path of a folder"):
        make("")


def test_the_sampler_that_the_message_speaks_of_becomes_an_order(folder: Path) -> None:
    sampler = RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(1))
    expected = list(RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(1)))

    with make(folder, shuffle=Explicit.from_sampler(sampler, COUNT, 1)) as loader:
        assert loader.preview(COUNT).tolist() == expected


def test_a_plain_list_of_samples_is_a_data_set_as_it_is_for_pytorch() -> None:
    with make([(np.full(3, k), k) for k in range(4)], transforms=(), shuffle=False) as loader:
        batches = [labels.tolist() for _, labels in loader]

    assert batches == [[0, 1], [2, 3]]


def test_a_home_folder_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))

    with make(f"~/{folder.name}") as loader:
        assert loader.plan.samples == COUNT


def test_a_user_without_a_home_is_named_as_the_folder_that_is_missing() -> None:
    with pytest.raises(PenstockError, match=re.escape("~nobody-of-that-name/photos")):
        make("~nobody-of-that-name/photos")


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., bool]]:
    """A call that does not answer before the test ends; once it is made, the time for an answer is over."""
    hangs, gate = threading.Event(), threading.Event()

    def call(*_: object) -> bool:
        hangs.set()
        return gate.wait(patient(20))

    silent = property(lambda self: TIMEOUT_SECONDS if hangs.is_set() else 0.0)
    monkeypatch.setattr(Calls, "silent_seconds", silent)
    monkeypatch.setattr("penstock.store.calls._LEAVE_SECONDS", 0.01)
    yield call
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("penstock-ask"):
            thread.join(patient(20))


def test_a_data_set_whose_length_does_not_come_is_waited_for_with_patience(hang: Callable[..., bool]) -> None:
    """As one that lists its files when it is asked."""

    class Lists:
        def __len__(self) -> int:
            hang()
            return 1

        def __getitem__(self, index: int) -> int:
            return index

    with (
        pytest.warns(RuntimeWarning, match=r"left while .* the length of Lists"),
        pytest.raises(WaitTimeout, match=r"the loader has been starting .* waits for the length of Lists"),
    ):
        Loader(Lists(), batch_size=1, epochs=1, timeout_seconds=TIMEOUT_SECONDS, report=None)


@pytest.mark.parametrize(
    ("name", "hangs"),
    [("machine", "penstock.loader.setup.Path.read_text"), ("trace", "penstock.loader.loader.check_writable")],
)
def test_a_file_on_a_mount_that_does_not_answer_is_waited_for_with_patience(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hang: Callable[..., bool],
    name: str,
    hangs: str,
) -> None:
    monkeypatch.setattr(hangs, hang)
    path = tmp_path / "file"
    with (
        pytest.warns(RuntimeWarning, match=f"left while .* {name} .*{path}"),
        pytest.raises(WaitTimeout, match=f"the loader has been starting .* waits for {name} .*{path}"),
    ):
        make(folder, **{name: path}, timeout_seconds=TIMEOUT_SECONDS)


class Own:
    """Somebody's source, whose members a test replaces."""

    sizes_bytes: Any = np.full(4, 4)
    labels, classes = np.zeros(4, np.int64), ("all",)

    def __len__(self) -> int:
        return 4

    def describe(self, sample: int) -> str:
        return f"number {sample}"

    def read(self, sample: int) -> bytes:
        return bytes(4)

    def read_into(self, sample: int, buffer: memoryview) -> Any:
        buffer[:4] = bytes(4)
        return 4


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"sizes_bytes": [4] * 4}, r"sizes_bytes of Own is of type list; it is a NumPy array int64\[4\]"),
        ({"sizes_bytes": np.full(3, 4)}, r"sizes_bytes of Own is int64\[3\]; it is a NumPy array int64\[4\]"),
        ({"classes": None}, r"classes of Own is None; it is a tuple of names, \(\) without any"),
    ],
)
def test_a_member_of_a_source_that_is_of_another_kind_is_named(
    members: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in members.items():
        monkeypatch.setattr(Own, name, value)

    with pytest.raises(ConfigError, match=message):
        make(Own(), transforms=[DecodeRaw("<f4", ())])


def test_members_that_a_source_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("describe", "labels"):
        monkeypatch.delattr(Own, name)

    with pytest.raises(
        ConfigError, match="source is of type Own, which has no labels and no describe: give it"
    ):
        make(Own())


def test_a_read_that_returns_no_number_of_bytes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "read_into", lambda self, sample, buffer: None)

    with (
        make(Own(), transforms=[DecodeRaw("<f4", ())]) as loader,
        pytest.raises(DataError, match=r"number [0-3]: read_into returned None, no number of bytes"),
    ):
        next(iter(loader))

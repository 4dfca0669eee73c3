"""cache="rows": what a data set has made once is read from memory afterwards, and nothing else changes."""

from __future__ import annotations

import copy
import importlib
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.patience import patient

from penstock.errors import ConfigError, DataError
from penstock.flow.work import Request
from penstock.loader import Loader
from penstock.loader.dataset import DatasetFetcher
from penstock.loader.local_disk import KeptOnDisks
from penstock.loader.row_code import _Walk, row_code
from penstock.loader.rows import KeepingFetcher, RowPickler
from penstock.store import MemoryTier, write_behind
from penstock.store.disk import DiskTier
from penstock.store.write_behind import WriteBehind
from penstock.torch import Loader as TorchLoader
from penstock.trace.schema import Kind

COUNT = 60


class Counted:
    """What a function makes of each number, and how often it was asked."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make
        self.calls: Counter[int] = Counter()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        self.calls[index] += 1
        return self.make(index)


def row(index: int) -> dict[str, Any]:
    return {"x": torch.full((500,), index), "name": f"no. {index}", "y": np.arange(index % 3)}


def epochs_of(
    made: Counted, kind: Any = TorchLoader, **arguments: Any
) -> tuple[list[Any], list[Counter[int]], Any]:
    """Return the batches of three epochs, how often each sample was asked for in each, and the last one's metrics."""
    chosen = {"batch_size": 8, "epochs": 3, "report": None, "ragged": ["y"], "cache": "rows", **arguments}
    batches: list[Any] = []
    calls: list[Counter[int]] = []
    with kind(made, **chosen) as loader:
        made.calls.clear()  # of the constructor, which looks at some
        for _ in range(3):
            made.calls.clear()
            batches += map(copy.deepcopy, loader)  # whose slots are free then
            calls.append(made.calls.copy())
        return batches, calls, loader.metrics[-1]


def is_same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(left["x"], right["x"])
        and left["name"] == right["name"]
        and torch.equal(left["y"].values, right["y"].values)
        for left, right in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("decoders", [0, 2])
def test_each_sample_is_made_once_where_memory_holds_them_all(decoders: int) -> None:
    made = Counted(row)
    batches, calls, metrics = epochs_of(made, decoders=decoders)

    wanted, _, _ = epochs_of(Counted(row), decoders=decoders, cache=None)
    assert is_same(batches, wanted)
    assert [sum(each.values()) for each in calls[1:]] == [0, 0]
    hits = sum(stage.samples for name, stage in metrics.stages.items() if name.kind == Kind.HIT)
    assert hits == COUNT


def test_what_memory_does_not_hold_is_made_again_each_epoch_and_the_rest_is_not() -> None:
    made = Counted(row)
    batches, calls, _ = epochs_of(made, decoders=0, memory="300 KB")

    wanted, _, _ = epochs_of(Counted(row), decoders=0, cache=None)
    assert is_same(batches, wanted)
    assert sum(calls[0].values()) == COUNT
    assert calls[1] == calls[2]
    assert 0 < sum(calls[1].values()) < COUNT / 2


def test_samples_that_grow_beyond_what_the_first_ones_took_are_made_again_and_are_right() -> None:
    def make(index: int) -> dict[str, Any]:
        return row(index) | {"x": torch.full((500,), index), "y": np.full(1 if index < 20 else 4000, index)}

    made = Counted(make)
    batches, calls, _ = epochs_of(made, decoders=0, shuffle=False, memory="2 MB")

    wanted, _, _ = epochs_of(Counted(make), decoders=0, shuffle=False, cache=None)
    assert is_same(batches, wanted)
    assert 0 < sum(calls[2].values()) < COUNT


def test_collate_fn_gets_the_samples_of_a_batch_in_their_order_when_memory_has_some() -> None:
    arguments: dict[str, Any] = {"batch_size": 32, "epochs": 3, "seed": 3, "collate_fn": list, "report": None}
    found = []
    for cache in (None, "rows"):
        with Loader(range(200), cache=cache, **arguments) as loader:
            found.append([batch for _ in range(3) for batch in loader])

    assert found[0] == found[1]


def test_collate_fn_may_change_samples_in_place_and_those_that_fail_are_skipped_each_time() -> None:
    def make(index: int) -> Any:
        if index == 7:
            raise OSError("gone")
        return np.full(3, index)

    def doubled(samples: list[Any]) -> Any:
        for sample in samples:
            sample *= 2
        return np.stack(samples)

    made = Counted(make)
    arguments = {"ragged": (), "collate_fn": doubled, "on_error": "skip", "shuffle": False, "decoders": 0}
    batches, calls, _ = epochs_of(made, Loader, **arguments)

    found = np.concatenate([batch[:, 0] for batch in batches]).tolist()
    assert found == 3 * [2 * index for index in range(COUNT) if index != 7]
    assert calls[1:] == [Counter({7: 1})] * 2


class Drawing(Counted):
    def __getitem__(self, index: int, rng: Any = None) -> Any:
        return rng.random(3)


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (Drawing(row), {}, "__getitem__ of Drawing asks for rng, so that they change"),
        (Counted(lambda index: (index, threading.Lock())), {}, "keeps the samples of Counted pickled.*lock"),
        (Counted(row), {"workers": 1}, "worker processes keep no samples"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_reason(data: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(data, batch_size=4, epochs=2, cache="rows", report=None, **arguments)


def test_samples_that_differ_from_call_to_call_are_warned_about() -> None:
    random = np.random.default_rng(0)
    with pytest.warns(RuntimeWarning, match="gave other values when it was asked for twice"):
        Loader(
            Counted(lambda index: random.random(3)), batch_size=4, epochs=2, cache="rows", report=None
        ).close()


class Rows(Counted):
    """Rows whose code may be another in the next run. made_of: what a function makes them of."""

    def __init__(self, source: str = "index * 2", **state: Any) -> None:
        names: dict[str, Any] = {"__name__": "of_a_user"}
        exec(f"SCALE = 2\ndef scaled(index): return {source}\ndef make(index): return scaled(index)", names)
        super().__init__(names["make"])
        self.__dict__.update(state)


def on_disk(data: Any, folder: Path, **arguments: Any) -> tuple[list[int], list[str]]:
    """Return the numbers of an epoch, and what was reported."""
    lines: list[str] = []
    how = {"batch_size": 8, "epochs": 1, "cache": "rows", "decoders": 0, "local_disk": folder, **arguments}
    with Loader(data, report=lines.append, **how) as loader:
        return sorted(int(number) for batch in loader for number in batch), lines


def test_the_next_run_finds_rows_on_a_disk_while_data_and_code_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        write_behind, "_CLOSING_SECONDS", patient(10)
    )  # on a busy machine, too, all are written
    doubled = [2 * index for index in range(COUNT)]
    numbers, first = on_disk(Rows(), tmp_path)
    again, second = on_disk(Rows(), tmp_path)
    assert numbers == again == doubled
    assert not any("there already" in line for line in first)
    assert any(f"{COUNT} samples there already" in line for line in second)

    tripled, third = on_disk(Rows("index * 3"), tmp_path)
    assert tripled == [3 * index for index in range(COUNT)]
    assert any("made with other code: they are made anew in their place" in line for line in third)

    numbers, fourth = on_disk(Rows("index * 3", folder="elsewhere"), tmp_path)
    assert numbers == tripled
    assert any("made with other data: they are made anew, and those stay" in line for line in fourth)
    assert len(list(tmp_path.glob("*.index"))) == 2


def test_rows_that_a_disk_has_are_read_there_and_those_that_it_has_lost_are_made_and_written_again(
    tmp_path: Path,
) -> None:
    made, pickler = Counted(lambda index: 2 * index), RowPickler({})
    memory = MemoryTier(10_000)
    tier = DiskTier(tmp_path, 10_000, bytes(16), np.full(COUNT, -1))
    on_disks = KeptOnDisks({2: WriteBehind(tier, 10_000)}, {}, {2: np.ones(COUNT, bool)})
    fetcher = KeepingFetcher(DatasetFetcher(made), memory, on_disks, pickler)

    def fetch(*samples: int, origin: int, rests: tuple[int, ...] = ()) -> list[Any]:
        made.calls.clear()
        return fetcher.fetch(Request(np.array(samples), lambda sample: None, origin, rests))

    for sample in (3, 4):
        tier.put(sample, memoryview(pickler.dump(2 * sample)))

    assert (fetch(4, 5, 3, origin=2, rests=(1, 1, 2)), list(made.calls)) == ([8, 10, 6], [5])
    assert (fetch(3, 5, origin=2), list(made.calls)) == ([6, 10], [])  # waiting to be written, or written
    assert (fetch(4, origin=1), list(made.calls)) == ([8], [])
    assert (fetch(5, origin=1), list(made.calls)) == ([10], [])  # was lost on its way to memory
    assert (fetch(7, origin=-1, rests=(1,)), list(made.calls)) == ([14], [7])
    assert (fetch(7, origin=2), list(made.calls)) == ([14], [])  # a copy of what memory keeps
    fetcher.evict(np.array([4, 7]))
    assert not memory.contains(4)
    assert not tier.contains(4)
    assert memory.contains(5)
    fetcher.close()


def code_of(data: Any, optional: Any = None) -> tuple[str, str]:
    found = row_code(data, optional, {})
    return found.data, found.code


def test_rows_are_known_again_by_state_code_and_what_code_refers_to(tmp_path: Path) -> None:
    first = code_of(Rows())
    assert code_of(Rows()) == first
    assert code_of(Rows(names={0, 8})) == code_of(
        Rows(names={8, 0})
    )  # the order of a set is its process's own
    assert code_of(Rows(call=lambda: 1, lock=len))[0] == code_of(Rows(call=lambda: 2, lock=len))[0]
    for other in ("index * 3", "index * SCALE", "max(index, 2)", "index * 2 if index in {7} else 0"):
        assert code_of(Rows(other)) == code_of(Rows(other))
        assert code_of(Rows(other))[1] != first[1], other
    changed = Rows("index * SCALE")
    changed.make.__globals__["SCALE"] = 3
    assert code_of(changed)[1] != code_of(Rows("index * SCALE"))[1]
    assert code_of(Rows(call=lambda: 1))[1] != code_of(Rows(call=lambda: 2))[1]
    assert code_of(Rows(array=np.zeros(9000)))[0] != code_of(Rows(array=np.ones(9000)))[0]
    assert code_of(Rows(), {"x": 1})[0] != code_of(Rows(), {"x": 2})[0]
    # A file among the attributes counts with its size and time; a fingerprint stands for all of it.
    file = tmp_path / "table.csv"
    file.write_text("1")
    before = code_of(Rows(file=str(file)))
    file.write_text("12")
    assert code_of(Rows(file=str(file)))[0] != before[0]
    assert code_of(Rows(fingerprint="v1", lock=threading.Lock())) == code_of(Rows("9", fingerprint="v1"))
    assert code_of(Rows(fingerprint="v1")) != code_of(Rows(fingerprint="v2"))


DECORATED = """
import functools

def decorated(made):
    @functools.wraps(made)
    def call(index): return made(index) + TERM
    return call

def cached(made): return functools.lru_cache(made)

@functools.singledispatch
def written(index): raise TypeError

@written.register
def _(index: int): return index * FACTOR

@DECORATOR
def make(index): return written(index)
"""


def test_decorators_and_what_they_lead_to_are_code() -> None:
    def code(**words: str) -> str:
        source = DECORATED
        for name, word in ({"TERM": "1", "FACTOR": "2", "DECORATOR": "decorated"} | words).items():
            source = source.replace(name, word)
        names: dict[str, Any] = {"__name__": "of_a_user"}
        exec(source, names)
        return code_of(Counted(names["make"]))[1]

    assert code() == code()
    assert len({code(), code(TERM="3"), code(FACTOR="4")}) == 3
    assert code(DECORATOR="cached", FACTOR="4") != code(DECORATOR="cached")


@pytest.mark.parametrize(
    ("of_package", "of_make"),
    [
        ("import rows_package.sub", "def make(index): return rows_package.sub.scaled(index)"),
        ("", "def make(index):\n    import rows_package.sub as sub\n    return sub.scaled(index)"),
        ("", "def make(index):\n    from .sub import scaled\n    return scaled(index)"),
        ("", "def make(index):\n    from . import sub\n    return [sub.scaled(each) for each in [index]][0]"),
        ("", "def make(index):\n    import rows_lost\n    from .sub import scaled\n    return scaled(index)"),
    ],
)
@pytest.mark.parametrize("is_namespace", [False, True])
def test_code_in_modules_is_followed_however_it_is_imported(
    of_package: str, of_make: str, is_namespace: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "rows_package"
    package.mkdir()
    if not is_namespace:
        (package / "__init__.py").touch()
    (package / "data.py").write_text(f"{of_package}\n{of_make}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which is found by size and second

    def code(source: str) -> str:
        (package / "sub.py").write_text(source)
        for name in [each for each in sys.modules if each.startswith("rows_package")]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        return code_of(Counted(importlib.import_module("rows_package.data").make))[1]

    doubled = code("def scaled(index): return index * 2")
    assert doubled == code("def scaled(index): return index * 2  # again")
    assert doubled != code("def scaled(index): return index * 3")


def test_a_library_without_a_version_counts_with_that_of_its_package_or_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows_library.py"
    file.write_text("def scaled(index): return index * 2")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("penstock.loader.row_code._LIBRARIES", (str(tmp_path),))
    names: dict[str, Any] = {"__name__": "of_a_user"}
    exec("def make(index):\n    import rows_library\n    return rows_library.scaled(index)", names)
    made = Counted(names["make"])

    def versions() -> str:
        return row_code(made, None, {}).versions

    first = versions()
    assert "rows_library" not in sys.modules
    file.write_text("def scaled(index): return index * 200")
    assert versions() != first
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    second = versions()
    file.write_text("def scaled(index): return index * 3")
    assert versions() == second


def test_a_class_without_a_module_is_the_users() -> None:
    def code(value: int) -> str:
        kind = type("Rows", (Counted,), {"__module__": None, "value": value})
        return code_of(kind(row))[1]

    assert code(1) != code(2)


def test_rows_that_another_version_told_of_otherwise_differ_in_all() -> None:
    found = row_code(Rows(), None, {})

    assert found.changed_since(found.about) == []
    assert found.changed_since(found.about.replace(found.code, "0" * 16)) == ["code"]
    assert found.changed_since(f"{found.about.partition(': ')[0]}: of another form, x") == [
        "data",
        "code",
        "versions",
    ]
    assert found.changed_since("rows of others") == []


def test_code_that_lies_where_other_code_was_counts() -> None:
    walk = _Walk({})
    for _ in range(50):
        walk.to_do.append(types.FunctionType(row.__code__, {}))
        walk.add_code()

    assert len(walk.code) == 50


@pytest.mark.parametrize(
    ("error", "is_told"), [(FileNotFoundError(2, "gone"), False), (PermissionError(1, "of another"), True)]
)
def test_rows_of_other_code_that_another_rank_removes_or_that_cannot_be_are_no_error(
    error: OSError, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> bool:
        raise error

    on_disk(Rows(), tmp_path)
    monkeypatch.setattr("penstock.loader.local_disk.remove_tier", fail)
    numbers, lines = on_disk(Rows("index * 3"), tmp_path)
    assert numbers == [3 * index for index in range(COUNT)]
    assert (
        any("made with other code: they are made anew, and those stay" in line for line in lines) == is_told
    )


def test_rows_that_no_run_could_know_again_are_on_no_disk(tmp_path: Path) -> None:
    numbers, lines = on_disk(Rows(lock=threading.Lock()), tmp_path)

    assert numbers == [2 * index for index in range(COUNT)]
    assert any("no disk keeps rows of Rows: its state cannot be pickled" in line for line in lines)
    assert not list(tmp_path.iterdir())


def test_rows_are_not_taken_from_files_that_another_user_could_write_to(tmp_path: Path) -> None:
    on_disk(Rows(), tmp_path)
    (samples,) = tmp_path.glob("*.samples")
    samples.chmod(0o666)

    with pytest.raises(DataError, match="another user may write to what is there"):
        on_disk(Rows(), tmp_path)

"""A store gives back what was saved, bit for bit, however it was told to keep it, and says what it has."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoint.snapshot_files import (
    made_snapshot,
    opened,
    reseal,
    said_by,
    same,
    save_all,
    tensor,
    training,
)
from tests.interpreters import Interpreters

from penstock.checkpoint.files.manifest import NewerFormat
from penstock.checkpoint.restoring import Restored
from penstock.checkpoint.state.dtypes import DTYPES
from penstock.checkpoint.state.tensors import BLOCK_VALUES
from penstock.checkpoint.store import SnapshotStore
from penstock.errors import ConfigError, DataError, FormatError, PenstockError
from penstock.policy.retention import Keep

WAYS = [
    dict(zip(("scheme", "reference", "staging_bytes", "threads"), way, strict=True))
    for way in product(["progressive", "chain", "complete"], ["memory", "stored"], [None, 3_000_000], [1, 3])
    if not (way[0] != "complete" and way[1] == "memory" and way[2] is not None)
]


@functools.cache
def large(step: int) -> dict[str, Any]:
    """Return a state of several blocks a tensor: a part stays, a part drifts."""
    random = np.random.default_rng(step)
    weight = np.random.default_rng(0).normal(0, 1, 3 * BLOCK_VALUES + 5).astype(np.float32)
    weight[: BLOCK_VALUES // 2] += random.normal(0, 1e-4, BLOCK_VALUES // 2).astype(np.float32)
    half = weight[: BLOCK_VALUES + 1].astype(np.float16)
    return {"weight": weight, "half": half, "again": half.copy(), "step": step}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.slow] * (way["threads"] == 1 and way["scheme"] != "progressive"))
        for way in WAYS
    ],
    ids=lambda way: "-".join(map(str, way.values())),
)
def test_each_snapshot_comes_back_bit_for_bit(folder: Path, way: dict[str, Any]) -> None:
    with opened(folder, snap_dis=3, **way) as store:
        for step in range(5):
            store.save(step, large(step))
        for step in range(5):
            assert same(store.restore(step).state, large(step))
    references = [one.reference_step for one in opened(folder).list()]
    expected = {"progressive": [None, 0, 1, None, 3], "chain": [None, 0, 0, None, 3], "complete": [None] * 5}
    assert references == expected[way["scheme"]]
    for step in range(5):
        assert same(opened(folder).restore(step).state, large(step))


@pytest.mark.parametrize("codec", ["stored", "gzip", "gzip-delta", "rle4-gzip", "rle0", "dynrle"])
def test_other_codecs_come_back_too(folder: Path, codec: str) -> None:
    save_all(folder, [1, 2, 3], codec=codec)

    for step in (1, 2, 3):
        assert same(opened(folder).restore(step).state, training(step))


def test_a_store_goes_on_where_another_process_left_off(folder: Path) -> None:
    for step in range(1, 5):
        save_all(folder, [step], snap_dis=3)

    store = opened(folder, snap_dis=3)
    assert [one.reference_step for one in store.list()] == [None, 1, 2, None]
    for step in range(1, 5):
        assert same(store.restore(step).state, training(step))


def test_what_did_not_change_takes_no_bytes_and_replicas_are_stored_once(folder: Path) -> None:
    state = {"a": np.random.default_rng(0).normal(size=BLOCK_VALUES), "b": np.zeros(10 * BLOCK_VALUES)}
    state["c"] = state["a"].copy()
    with opened(folder, codec="balance") as store:
        whole = store.save(1, state).wait()
        same_again = store.save(2, state).wait()

    assert whole.stored_bytes < 8 * BLOCK_VALUES * 2 + 2_000  # `a`, a block of zeros, a table
    said = (folder / "step-000000000002" / "manifest.json").stat().st_size
    assert same_again.stored_bytes - said < 88 + 12 * 40 + 12 * 8 + 1


# -- Any state -------------------------------------------------------------------------------------------------

FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_float and hasattr(torch, name)]


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Any bits, of any type, in any shape: NumPy's where it has the type, else torch's."""
    name = draw(st.sampled_from(sorted(DTYPES)))
    dtype = DTYPES[name]
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    count = int(np.prod(shape))
    data = draw(st.binary(min_size=count * dtype.item_bytes, max_size=count * dtype.item_bytes))
    if name == "bool":
        data = bytes(byte & 1 for byte in data)
    if name in np.sctypeDict:
        return np.frombuffer(data, name).reshape(shape)
    torch_dtype = getattr(torch, name)
    raw = torch.tensor(list(data), dtype=torch.uint8)
    return (raw.view(torch_dtype) if count else torch.empty(0, dtype=torch_dtype)).reshape(shape)


STATES = st.dictionaries(
    st.text(min_size=1, max_size=4),
    st.recursive(
        st.one_of(
            arrays(), st.none(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3)
        ),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
        max_leaves=8,
    ),
    min_size=1,
    max_size=4,
)


def bits(value: Any) -> Any:
    """Return a state with its arrays and floats as bits, to be compared."""
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    if isinstance(value, list):
        return [bits(part) for part in value]
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return ("torch", str(value.dtype), tuple(value.shape), raw)
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    return (type(value).__name__, np.float64(value).tobytes() if isinstance(value, float) else value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    states=st.lists(STATES, min_size=1, max_size=4), codec=st.sampled_from(["rle4", "dynrle", "gzip-delta"])
)
def test_any_states_come_back_as_they_were(folder: Path, states: list[dict[str, Any]], codec: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    states = [*states, states[-1]]
    with opened(folder, codec=codec) as store:
        for step, state in enumerate(states):
            store.save(step, state)
        for step, state in enumerate(states):
            assert bits(store.restore(step).state) == bits(state)


@pytest.mark.parametrize("name", FLOATS)
def test_every_bit_pattern_of_a_float_of_two_bytes_or_less_comes_back(folder: Path, name: str) -> None:
    """And 65,536 of the longer ones, all exponents among them; as a baseline, and as a difference to others."""
    item = DTYPES[name].item_bytes
    patterns = (np.arange(65_536, dtype=np.uint64) << np.uint64(max(0, 8 * item - 16))).astype(f"<u{item}")
    orders = (patterns, patterns[::-1].copy(), np.roll(patterns, 1))
    dtype = getattr(torch, name)
    states = [{"a": torch.from_numpy(order.view(np.uint8)).view(dtype)} for order in orders]
    for codec in ("rle4", "dynrle"):
        with opened(folder / codec, codec=codec) as store:
            for step, state in enumerate(states):
                store.save(step, state)
            for step, state in enumerate(states):
                assert bits(dict(store.restore(step))) == bits(state)


# -- A part of it, and into what is there --------------------------------------------------------------------


def test_named_tensors_alone_are_read(folder: Path) -> None:
    with opened(folder, codec="stored") as store:
        store.save(1, {"model": {"a": np.arange(3), "b": np.arange(4.0)}, "optimizer": [np.ones(2)], "n": 7})
    part = next(folder.glob("step-*/part-*"))
    data = bytearray(part.read_bytes())
    data[32] ^= 1  # of model/a
    part.write_bytes(data)
    store = opened(folder)

    only = store.restore(only=["model/b", "opt*", "n"])

    assert set(only) == {"model", "optimizer", "n"}
    assert same(dict(only["model"]), {"b": np.arange(4.0)})
    with pytest.raises(FormatError, match="in tensor 'model/a'"):
        store.restore(only=["model"])
    with pytest.raises(ConfigError, match="'modle' in it, and no name fits it"):
        store.restore(only=["modle"])


def test_what_is_loaded_into_is_overwritten_in_place_and_the_rest_is_told(folder: Path) -> None:
    save_all(folder, [1])
    weight = np.zeros(12, np.float32)
    bias = np.full(3, 5.0)
    into = {"weight": weight, "step": 0, "bias": bias, "empty": np.zeros((0, 3), np.float16)}

    with pytest.raises(
        ConfigError, match=r"missing in the snapshot: bias; unexpected .*: moment, table, twin\."
    ):
        opened(folder).restore(into=into)
    assert not weight.any()
    restored = opened(folder).restore(into=into, strict=False)

    assert restored.state is into
    assert restored["weight"] is weight
    assert same(weight, training(1)["weight"])
    assert into["step"] == 1
    assert same(bias, np.full(3, 5.0))
    assert sorted(restored.not_loaded) == ["moment", "table", "twin"]
    assert restored.not_found == ("bias",)
    # What is asked for by name is all that has to be there.
    assert opened(folder).restore(into={"weight": weight}, only=["weight"]).not_loaded == ()


def test_what_does_not_fit_is_named_before_anything_is_changed(folder: Path) -> None:
    save_all(folder, [1])
    into = {
        "table": np.full(20, -1, np.int32),
        "weight": np.zeros(11, np.float32),
        "moment": np.zeros((2, 3), np.float32),
    }

    with pytest.raises(ConfigError, match=r"weight is float32 of shape \(12,\).*moment is float64"):
        opened(folder).restore(into=into)

    assert (into["table"] == -1).all()


def test_a_model_and_its_optimizer_go_on_exactly(folder: Path) -> None:
    def train(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        advance(model, optimizer, steps)
        return model, optimizer

    def advance(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()

    model, optimizer = train(3)
    with opened(folder) as store:
        store.save(3, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, its_optimizer = train(0)
    restored = opened(folder).restore()
    other.load_state_dict(restored["model"])
    its_optimizer.load_state_dict(restored["optimizer"])

    advance(model, optimizer, 2)
    advance(other, its_optimizer, 2)

    assert bits(other.state_dict()) == bits(dict(model.state_dict()))


def test_a_restored_state_is_a_mapping(folder: Path) -> None:
    save_all(folder, [4])
    restored = opened(folder).restore()

    assert isinstance(restored, Restored)
    assert restored.step == 4
    assert set(restored) == set(training(4))
    assert len(restored) == 6
    assert repr(restored) == "<Restored step 4: weight, moment, table, twin, empty, step>"


# -- What changes between snapshots --------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["another shape", "another type", "one more", "one less", "another name"])
@pytest.mark.parametrize("reference", ["memory", "stored"])
def test_changed_tensors_start_a_baseline(folder: Path, change: str, reference: str) -> None:
    state: dict[str, Any] = {"a": np.arange(5.0), "b": np.ones(3, np.float32)}
    other: dict[str, Any] = {
        "another shape": {"a": np.arange(6.0), "b": state["b"]},
        "another type": {"a": np.arange(5), "b": state["b"]},
        "one more": state | {"c": np.ones(1)},
        "one less": {"a": state["a"]},
        "another name": {"a": state["a"], "c": state["b"]},
    }[change]
    with opened(folder, reference=reference) as store:
        assert store.save(1, state).wait().reference_step is None
        assert store.save(2, other).wait().reference_step is None
        assert store.save(3, other).wait().reference_step == 2
        for step, saved in ((1, state), (2, other), (3, other)):
            assert same(store.restore(step).state, saved)


def test_plain_values_may_change_without_a_baseline(folder: Path) -> None:
    with opened(folder) as store:
        store.save(1, {"a": np.arange(5.0), "n": 1})
        assert store.save(2, {"a": np.arange(5.0), "n": [2, "x"], "more": None}).wait().reference_step == 1
        assert store.restore(2)["n"] == [2, "x"]


def test_another_codec_starts_a_baseline(folder: Path) -> None:
    save_all(folder, [1], codec="rle4")
    with opened(folder, codec="dynrle") as store:
        assert store.save(2, training(2)).wait().reference_step is None


@pytest.mark.parametrize("kept", [23, 10, 0])
def test_a_lossy_store_says_so_and_cuts_mantissas(folder: Path, kept: int) -> None:
    weight = np.array([1 + 2**-23, -1 - 2**-11, np.inf, -0.0, 3.0], np.float32)
    with opened(folder, kept_mantissa_bits=kept) as store:
        store.save(1, {"weight": weight, "double": np.array([1 / 3]), "count": np.arange(5)}).wait()
        restored = store.restore()

        assert [one.kept_mantissa_bits for one in store.list()] == [kept]
    mask = np.uint32(2**32 - 2 ** (23 - kept))
    assert (restored["weight"].view(np.uint32) == weight.view(np.uint32) & mask).all()
    assert restored["double"].view(np.uint64)[0] == np.array(1 / 3).view(np.uint64) & np.uint64(
        2**64 - 2 ** (52 - kept)
    )
    assert same(restored["count"], np.arange(5))


# -- Steps ---------------------------------------------------------------------------------------------------


def test_a_step_that_is_there_is_not_saved_again(folder: Path) -> None:
    with opened(folder) as store:
        store.save(1, training(1))
        with pytest.raises(ConfigError, match=r"a snapshot of step 1 in .* already: delete it first"):
            store.save(1, training(2))
        assert same(store.restore(1).state, training(1))
        store.delete(1)
        store.save(1, training(2)).wait()
        assert same(store.restore(1).state, training(2))


def test_a_step_that_retention_removed_is_told_with_the_nearest(folder: Path) -> None:
    save_all(folder, [10, 20, 30, 40, 50], keep=Keep(last=2), scheme="complete")

    store = opened(folder)
    assert [one.step for one in store.list()] == [40, 50]
    with pytest.raises(
        ConfigError,
        match=r"no snapshot of step 20 in .* removed to keep others; the nearest are of step 40 and 50",
    ):
        store.restore(20)
    with pytest.raises(ConfigError, match="the nearest are of step 40 and 50"):
        store.verify(45)


def test_an_empty_store_says_that_nothing_was_saved(folder: Path) -> None:
    folder.mkdir()
    store = opened(folder)
    with pytest.raises(ConfigError, match="nothing was saved there"):
        store.restore()
    with pytest.raises(ConfigError, match=r"no snapshot of step 3: .* has none at all"):
        store.restore(3)
    assert store.list() == []
    assert store.verify() == []


def test_a_snapshot_or_the_parent_of_stores_named_in_place_of_a_store_is_told_as_what_it_is(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        save_all(tmp_path / "runs" / name, [1])
    (tmp_path / "runs" / "logs").mkdir()

    inner = tmp_path / "runs" / "a" / "step-000000000001"
    with pytest.raises(
        ConfigError, match=rf"one snapshot of the store at {inner.parent}: .*restore\(step=1\)"
    ):
        opened(inner)  # what it saved there would go with the snapshot
    lines: list[str] = []
    for step in (None, 1):
        with pytest.raises(ConfigError, match=r"runs is no store, but contains stores: a, b$"):
            opened(tmp_path / "runs", report=lines.append).restore(step)
    assert len(lines) == 2, "one line when a store is opened"
    assert lines[0].endswith("runs is no store, but contains stores: a, b")


def test_a_number_to_keep_is_how_many_of_the_newest_stay(folder: Path) -> None:
    with opened(folder, keep=np.int64(2), scheme="complete") as store:
        for step in range(4):
            store.save(step, training(step)).wait()
        assert [one.step for one in store.list()] == [2, 3]


def test_steps_may_be_saved_in_any_order_and_the_last_saved_is_the_latest(folder: Path) -> None:
    """As after training went back to an earlier snapshot."""
    save_all(folder, [5, 9, 2])

    store = opened(folder)
    assert [one.step for one in store.list()] == [5, 9, 2]
    assert store.restore().step == 2
    assert [one.reference_step for one in store.list()] == [None, 5, 9]


def test_retention_removes_what_nothing_needs_once_the_new_one_is_there(folder: Path) -> None:
    with opened(folder, keep=Keep(last=2), snap_dis=3) as store:
        left = []
        for step in range(8):
            store.save(step, training(step)).wait()
            left.append([one.step for one in store.list()])
            for one in left[-1]:
                assert same(store.restore(one).state, training(one))
    # Progressive, three to a baseline: what the two latest need stays.
    assert left == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 4], [3, 4, 5], [3, 4, 5, 6], [6, 7]]


def test_what_others_are_differences_to_is_not_deleted(folder: Path) -> None:
    save_all(folder, [1, 2, 3])
    with opened(folder) as store:
        with pytest.raises(
            ConfigError, match="step 1 cannot be deleted: step 3, 2 are stored as differences"
        ):
            store.delete(1)
        with pytest.raises(ConfigError, match="no snapshot of step 7"):
            store.delete(7)
        for step in (3, 2, 1):
            store.delete(step)
    assert sorted(os.listdir(folder)) == [".lock"]


# -- What is not ours ----------------------------------------------------------------------------------------


def make_newer(folder: Path, step: int) -> Path:
    file = folder / f"step-{step:012d}" / "manifest.json"
    reseal(file, lambda said: said.update(version=2))
    return file


def test_a_store_of_a_newer_version_is_told_and_not_written_to(folder: Path) -> None:
    save_all(folder, [1, 2], scheme="complete")
    newer = make_newer(folder, 2).read_bytes()

    with opened(folder, keep=Keep(last=1)) as store:
        with pytest.raises(NewerFormat, match="is of version 2; this Penstock reads version 1"):
            store.restore(2)
        assert {one.step: one.condition for one in store.list()} == {1: "intact", 2: "newer"}
        assert same(store.restore(1).state, training(1))
        with pytest.raises(NewerFormat, match=r"of version 2.*: read it with the Penstock that wrote it"):
            store.restore(2)
        with pytest.raises(
            NewerFormat, match=r"^step 3 is not saved: .*version 1, so .*save to another folder, or "
        ) as told:
            store.save(3, training(3)).wait()
        assert "read it" not in str(told.value)

    assert (folder / "step-000000000002" / "manifest.json").read_bytes() == newer
    assert sorted(os.listdir(folder)) == [".lock", "step-000000000001", "step-000000000002"]


def test_a_snapshot_of_a_newer_version_is_not_replaced(folder: Path) -> None:
    save_all(folder, [1, 2], scheme="complete")
    newer = make_newer(folder, 2).read_bytes()

    with opened(folder) as store, pytest.raises(PenstockError, match=r"version 2|already"):
        store.save(2, training(2)).wait()

    assert (folder / "step-000000000002" / "manifest.json").read_bytes() == newer


def test_other_files_in_the_folder_are_left_alone(folder: Path) -> None:
    (folder / "logs").mkdir(parents=True)
    (folder / "step-1").mkdir()
    (folder / "notes").write_text("mine")
    (folder / "step-000000000009").write_text("a file")

    save_all(folder, [1, 2, 3], keep=Keep(last=1), scheme="complete")

    assert [one.step for one in opened(folder).list()] == [3]
    assert (folder / "notes").read_text() == "mine"
    assert (folder / "logs").is_dir()
    assert (folder / "step-1").is_dir()


def test_what_an_unfinished_save_left_is_removed_by_the_next_writer_alone(folder: Path) -> None:
    save_all(folder, [1])
    left = folder / ".unfinished-step-000000000002-abc"
    left.mkdir()
    (left / "part-00000.pst").write_bytes(b"half")

    opened(folder).restore()
    opened(folder).list()
    assert left.exists()

    save_all(folder, [2])
    assert not left.exists()


# -- Two writers -----------------------------------------------------------------------------------------------

WRITER = """
import sys
import numpy as np
from penstock.checkpoint.store import SnapshotStore
store = SnapshotStore(sys.argv[1], codec="stored", report=None)
store.save(1, {"a": np.arange(3)}).wait()
print("saved", flush=True)
sys.stdin.read()
store.close()
"""


def test_a_second_writer_is_told_who_writes_and_may_read(folder: Path, interpreters: Interpreters) -> None:
    with interpreters.start(WRITER, str(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdin is not None
        assert writer.stdout.readline() == b"saved\n"
        with opened(folder) as store:
            with pytest.raises(ConfigError, match=f"is being written by process {writer.pid} on"):
                store.save(2, training(2))
            with pytest.raises(ConfigError, match="one writer at a time"):
                store.delete(1)
            assert same(store.restore(1).state, {"a": np.arange(3)})

            writer.stdin.close()
            assert writer.wait() == 0
            store.save(2, training(2)).wait()


def test_a_second_store_of_the_same_process_is_refused_until_the_first_is_closed(folder: Path) -> None:
    first, second = opened(folder), opened(folder)
    first.save(1, training(1))

    with pytest.raises(ConfigError, match=f"is being written by this very process, process {os.getpid()}"):
        second.save(2, training(2))

    first.close()
    second.save(2, training(2)).wait()
    second.close()


# -- A folder that refuses -------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[SnapshotStore], Any]] = {
    "save": lambda store: store.save(2, training(2)).wait(),
    "restore": lambda store: store.restore(),
    "list": lambda store: store.list(),
    "verify": lambda store: store.verify(),
}


@pytest.mark.parametrize("is_saved_to", [False, True])
def test_a_folder_that_vanished_is_named_and_not_made_anew(folder: Path, is_saved_to: bool) -> None:
    folder.mkdir()
    with opened(folder) as store:
        if is_saved_to:
            store.save(1, training(1)).wait()
        shutil.rmtree(folder)

        for call in CALLS.values():
            with pytest.raises(DataError, match=f"^{folder} is gone: "):
                call(store)
    assert not folder.exists()


def test_a_file_in_place_of_the_folder_is_named(folder: Path) -> None:
    with opened(folder) as store:
        store.save(1, training(1)).wait()
        shutil.rmtree(folder)
        folder.write_bytes(b"")

        for call in CALLS.values():
            with pytest.raises(DataError, match=str(folder)):
                call(store)
    with pytest.raises(DataError, match=f"^{folder} is a file: name a folder"):
        opened(folder)


def test_a_snapshot_that_is_being_deleted_by_another_process_is_told(folder: Path) -> None:
    save_all(folder, [1, 2])
    store = opened(folder)
    store.list()
    shutil.rmtree(folder / "step-000000000001")

    with pytest.raises(FormatError, match="step-000000000002 is a difference to step 1, which is not there"):
        store.restore(2)


# -- What cannot be asked for ----------------------------------------------------------------------------------


def test_integers_of_numpy_are_taken_for_integers(folder: Path, tmp_path: Path) -> None:
    one, most = np.int64(1), np.uint64(1 << 20)
    numbers: dict[str, Any] = {"keep": one, "snap_dis": one, "kept_mantissa_bits": one, "threads": one}
    save_all(folder, [1, 2], **numbers, fast=tmp_path / "fast", fast_bytes=most)

    assert [one.step for one in opened(folder).list()] == [2]


class Counter:
    """Anything that says where it is, as a loader does."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def state_dict(self) -> Any:
        return self.said

    def load_state_dict(self, state: Any) -> None:
        self.said = state


def test_an_object_with_a_state_dict_is_saved_as_what_it_returns_at_the_save(folder: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    counter = Counter({"step": 3})
    with opened(folder) as store:
        store.prepare({"model": model, "parts": [optimizer, counter]})
        saving = store.save(3, {"model": model, "parts": [optimizer, counter]}, per_rank={"own": counter})
        expected = {key: value.clone() for key, value in model.state_dict().items()}
        counter.said["step"] = 4
        with torch.no_grad():
            model.weight.zero_()
        saving.wait()
        restored = store.restore()
        plain = {"model": model.state_dict(), "parts": [optimizer.state_dict(), counter.state_dict()]}
        store.save(4, plain, per_rank={"own": counter}).wait()

        assert restored["model"].keys() == expected.keys()
        assert all(torch.equal(restored["model"][key], expected[key]) for key in expected)
        assert restored["parts"] == [optimizer.state_dict(), {"step": 3}]
        assert restored.per_rank == {"own": {"step": 3}}
        # The same tree as of state_dict(), so that one is a delta to the other.
        assert [one.reference_step for one in store.list()] == [None, 3]


def test_a_state_dict_that_returns_no_mapping_is_named(folder: Path) -> None:
    with (
        opened(folder) as store,
        pytest.raises(ConfigError, match=r"^loader is a .*Counter, whose state_dict"),
    ):
        store.save(1, {"loader": Counter([1])})


def test_a_class_in_place_of_an_object_is_no_state(folder: Path) -> None:
    with opened(folder) as store, pytest.raises(ConfigError, match=r"^model is .*Linear"):
        store.save(1, {"model": torch.nn.Linear})


@pytest.mark.parametrize(
    ("value", "path"),
    [(object(), "model/a/1"), ({1, 2}, "model/a/1"), (lambda: None, "model/a/1")],
    ids=["object", "set", "function"],
)
def test_a_value_that_is_not_held_is_named_and_nothing_is_left(folder: Path, value: Any, path: str) -> None:
    with opened(folder) as store:
        with pytest.raises(ConfigError, match=f"^{path} "):
            store.save(1, {"model": {"a": [np.arange(3), value]}})
        store.save(1, training(1)).wait()
    assert sorted(os.listdir(folder)) == [".lock", "step-000000000001"]


def test_a_codec_that_looks_at_the_whole_state_says_so_where_it_is_staged_in_waves(folder: Path) -> None:
    with opened(folder, codec="dynrle", reference="stored", staging_bytes=1_000_000) as store:
        saving = store.save(1, large(1))
        with pytest.raises(ConfigError, match="'dynrle' looks at the whole state before it writes"):
            saving.wait()
    assert opened(folder).list() == []


def test_the_manifest_of_a_snapshot_by_hand_is_read_as_ours(folder: Path) -> None:
    made_snapshot(folder, [tensor("one", np.arange(3))], step=7)

    (listed,) = opened(folder).list()

    assert (listed.step, listed.condition, listed.raw_bytes, listed.codec) == (7, "intact", 24, "rle4")
    manifest = folder / "step-000000000007" / "manifest.json"
    assert listed.stored_bytes == 32 + 24 + 40 + 56 + manifest.stat().st_size
    assert listed.tiers == (str(folder),)
    assert (
        listed.created_seconds == said_by(folder / "step-000000000007" / "manifest.json")["created_seconds"]
    )


def test_what_a_snapshot_takes_is_told_with_all_its_files(folder: Path) -> None:
    with opened(folder, snap_dis=2) as store:
        saved = [store.save(step, training(step)).wait() for step in (1, 2)]
        listed = store.list()

    for one, other in zip(saved, listed, strict=True):
        files = (folder / f"step-{one.step:012d}").iterdir()
        assert one.stored_bytes == other.stored_bytes == sum(file.stat().st_size for file in files)

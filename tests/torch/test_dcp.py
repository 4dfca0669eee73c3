"""torch.distributed.checkpoint over a snapshot store: on one process, and on ranks that come, fail, and change."""

from __future__ import annotations

import functools
import gc
import pickle
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.for_each import for_each
from tests.forking import Forks
from tests.patience import brief
from tests.ranks.jobs import reports_in, torch_job, wait_for
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys, load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock import compiling
from penstock.checkpoint import due as due_module
from penstock.checkpoint import opened as opened_module
from penstock.checkpoint.config import StoreConfig
from penstock.checkpoint.store import SnapshotStore
from penstock.checkpoint.tiers.local import LocalDraft, LocalTier, LocalWriter
from penstock.checkpoint.tiers.throttle import Cap
from penstock.cli.main import main
from penstock.compiling import Part
from penstock.errors import ConfigError, DataError
from penstock.flow.recorder import Recorder
from penstock.plan.saves import Auto
from penstock.policy.retention import Keep
from penstock.ranks.exchange import Ranks, alone
from penstock.torch import Loader
from penstock.torch import dcp as dcp_module
from penstock.torch.dcp import StoreReader, StoreWriter
from penstock.trace import Kind, read_trace

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

State = dict[str, Any]


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def saved_state(step: int = 0) -> State:
    """Return a state as trainings have it; weights change a little with each step."""
    weight = numbers(1, 300, 500) + 1e-5 * step * numbers(2, 300, 500)
    return {
        "model": {
            "weight": weight,
            "bias": numbers(3, 500).bfloat16(),
            "scale": torch.tensor(2.5),
            "none": torch.zeros(0, 4),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(step)), "exp_avg": numbers(4, 300, 500) * 1e-3}},
            "param_groups": [
                {"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "name": "\udcff\u00e9"},
                {"lr": float("nan")},
            ],
        },
        "step": step,
        "device": torch.device("cpu"),
        "nothing": None,
        "history": [1.5, 2.5],
    }


def empty_like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: empty_like(part) for key, part in value.items()}
    if isinstance(value, list):
        return [empty_like(part) for part in value]
    return -1


def assert_same(one: Any, other: Any) -> None:
    """Compare states bit for bit, and types."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(
            one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
        )
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for part, other_part in zip(one, other, strict=True):
            assert_same(part, other_part)
    elif one != one:
        assert other != other
    else:
        assert one == other


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[StoreWriter]:
    with StoreWriter(tmp_path, report=None) as writer:
        yield writer


def write(writer: StoreWriter, step: int, state: State, **options: Any) -> None:
    save(state, checkpoint_id=str(step), storage_writer=writer, no_dist=True, **options)


def read(folder: Path, state: State, step: int | None = None, **options: Any) -> State:
    load(
        state,
        checkpoint_id=None if step is None else str(step),
        storage_reader=StoreReader(folder),
        no_dist=True,
        **options,
    )
    return state


def steps_in(folder: Path) -> dict[int, int | None]:
    with SnapshotStore(folder, report=None) as store:
        assert {one.condition for one in store.verify()} <= {"intact"}
        return {one.step: one.reference_step for one in store.list()}


# -- What is kept --------------------------------------------------------------------------------------


def test_a_state_comes_back_as_it_was_into_one_that_is_there(writer: StoreWriter, tmp_path: Path) -> None:
    state = saved_state()
    write(writer, 5, state)
    assert_same(read(tmp_path, empty_like(state), 5), state)


def test_a_child_may_compile_until_the_writer_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first save in a new home waits for the codec, in the training's process."""
    monkeypatch.setattr(compiling, "_LEASES", leases := weakref.WeakSet[compiling.Lease]())

    with StoreWriter(tmp_path, report=None):
        assert len(leases) == 1

    assert not leases


def test_a_loader_is_saved_and_loaded_as_what_it_says_of_itself(writer: StoreWriter, tmp_path: Path) -> None:
    """By DCP's own protocol of objects with a state."""
    rows = [torch.full((3,), float(row)) for row in range(20)]

    def loader() -> Loader:
        return Loader(rows, batch_size=4, epochs=2, seed=1, report=None)

    with loader() as first, loader() as again:
        batches = iter(first)
        next(batches), next(batches)
        write(writer, 5, {"loader": first})
        read(tmp_path, {"loader": again}, 5)

        assert again.position == (0, 2)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, batches, strict=True))
        with SnapshotStore(tmp_path, report=None) as store:
            assert store.restore()["loader"] == again.state_at(0, 2)


def test_the_snapshot_is_one_of_the_store(writer: StoreWriter, tmp_path: Path) -> None:
    """But for what DCP does to a state: keys are text."""
    state = saved_state()
    write(writer, 5, state)
    with SnapshotStore(tmp_path, report=None) as store:
        restored = dict(store.restore())
    state["optimizer"]["state"] = {"0": state["optimizer"]["state"][0]}
    assert_same(restored, state)


def test_dcp_reads_what_the_store_saved(tmp_path: Path) -> None:
    """Also views, arrays of NumPy, tied weights and what lies in memory in another order."""
    state = saved_state()
    weight = numbers(9, 4, 3, 5, 6).to(memory_format=torch.channels_last)
    odd: State = {
        "image": weight,
        "tied": weight,
        "part": weight[1:3, :, ::2],
        "array": np.arange(6).reshape(2, 3),
        "pair": (1, 2),
    }
    with SnapshotStore(tmp_path, report=None) as store:
        store.save(7, {**state, "odd": odd})
    into = {
        **empty_like(state),
        "odd": {**empty_like(odd), "array": torch.zeros(2, 3, dtype=torch.int64), "pair": None},
    }
    read(tmp_path, into)
    assert_same({key: into[key] for key in state}, state)
    for name in ("image", "tied", "part"):
        assert torch.equal(into["odd"][name], odd[name])
    assert torch.equal(into["odd"]["array"], torch.from_numpy(odd["array"]))
    assert into["odd"]["pair"] == (1, 2)


def test_what_dcp_would_take_for_one_value_with_arrays_in_it_is_not_offered(tmp_path: Path) -> None:
    with SnapshotStore(tmp_path, report=None) as store:
        store.save(1, {"w": torch.ones(2), "pair": (torch.ones(1), 2), "blob": bytes(5000)})
    assert StoreReader(tmp_path).read_metadata().state_dict_metadata.keys() == {"w"}


@pytest.mark.parametrize(
    "dtype", ["float64", "float16", "float8_e4m3fn", "int8", "uint16", "bool", "complex64"]
)
def test_every_type_is_kept_bit_for_bit(writer: StoreWriter, tmp_path: Path, dtype: str) -> None:
    own = getattr(torch, dtype)
    bits = torch.randint(
        0, 2 if dtype == "bool" else 256, (48 * own.itemsize,), generator=torch.Generator().manual_seed(1)
    )
    tensor = bits.to(torch.uint8).view(own).reshape(6, 8)
    write(writer, 1, {"t": tensor, "turned": tensor.t(), "every other": tensor[::2, 1:5]})
    into = {
        "t": torch.zeros_like(tensor),
        "turned": torch.zeros(8, 6, dtype=own),
        "every other": torch.zeros(3, 4, dtype=own),
    }
    assert_same(read(tmp_path, into, 1), {"t": tensor, "turned": tensor.t(), "every other": tensor[::2, 1:5]})


def test_what_is_still_to_be_conjugated_is(writer: StoreWriter, tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    write(writer, 1, {"t": tensor.conj(), "n": tensor.conj().imag})
    into = read(tmp_path, {"t": torch.zeros(2, dtype=torch.complex64), "n": torch.zeros(2)}, 1)
    assert torch.equal(into["t"], torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(into["n"], torch.tensor([-2.0, 4.0]))


def test_a_target_of_another_type_or_order_is_filled(writer: StoreWriter, tmp_path: Path) -> None:
    weight = numbers(1, 30, 20)
    write(writer, 1, {"w": weight})
    half = read(tmp_path, {"w": torch.zeros(30, 20, dtype=torch.bfloat16)}, 1)["w"]
    assert torch.equal(half, weight.bfloat16())
    turned = torch.zeros(20, 30).t()
    read(tmp_path, {"w": turned}, 1)
    assert torch.equal(turned, weight)


def test_tied_tensors_are_stored_once(writer: StoreWriter, tmp_path: Path) -> None:
    weight = numbers(1, 1000, 100)
    write(writer, 1, {"embedding": weight, "head": weight})
    with SnapshotStore(tmp_path, report=None) as store:
        (listed,) = store.list()
    assert listed.raw_bytes == 2 * weight.nbytes
    assert listed.stored_bytes < 1.1 * weight.nbytes


def test_a_list_with_an_empty_mapping_stays_a_list(writer: StoreWriter, tmp_path: Path) -> None:
    """DCP says nothing of the mapping, and cannot load such a list from files of its own either."""
    state = {"layers": [{}, {"w": torch.ones(2)}, {}], "empty": []}
    write(writer, 1, state)
    with SnapshotStore(tmp_path, report=None) as store:
        restored = store.restore()
    assert restored["layers"][0] == {}
    assert torch.equal(restored["layers"][1]["w"], torch.ones(2))
    assert restored["empty"] == []


def test_keys_with_slashes_and_dots_are_told_apart(writer: StoreWriter, tmp_path: Path) -> None:
    state = {
        "a/b": {"c": torch.ones(1)},
        "a": {"b/c": torch.zeros(1), "~": torch.full((1,), 2.0)},
        "x.y": torch.ones(2),
    }
    write(writer, 1, state)
    assert_same(read(tmp_path, empty_like(state), 1), state)
    with SnapshotStore(tmp_path, report=None) as store:
        assert_same(dict(store.restore()), state)


def test_two_values_of_one_name_in_dcp_are_refused(tmp_path: Path) -> None:
    with SnapshotStore(tmp_path, report=None) as store:
        store.save(1, {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    with pytest.raises(
        ConfigError, match=r"step 1 has two values of one name in DCP .*a\.b.*restore it with Snapsh"
    ):
        StoreReader(tmp_path).read_metadata()


# -- What is refused by name ---------------------------------------------------------------------------


class Unknown:
    """An object that only a pickle could keep."""


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Unknown(), r"a/b: value is a .*Unknown, which a snapshot does not hold"),
        (
            np.zeros(3),
            r"a/b is a numpy\.ndarray with an array or many bytes in it, and DCP takes it for one value",
        ),
        ((torch.ones(1), 2), r"a/b is a tuple with an array or many bytes in it"),
        (torch.zeros(2, 2).to_sparse(), r"a/b: value is a tensor of layout sparse"),
    ],
    ids=["object", "array", "tuple", "sparse"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_a_snapshot_does_not_hold_is_refused_by_name(
    writer: StoreWriter, tmp_path: Path, value: Any, told: str
) -> None:
    with pytest.raises(CheckpointException, match=told):
        write(writer, 1, {"a": {"b": value, "w": torch.ones(3)}})
    write(writer, 1, {"a": {"w": torch.ones(3)}})
    assert steps_in(tmp_path) == {1: None}


@pytest.mark.filterwarnings("ignore:.*quantiz.*:DeprecationWarning", "ignore::UserWarning")
def test_quantised_tensors_are_refused_by_name_and_type_by_saves_and_loads(
    writer: StoreWriter, tmp_path: Path
) -> None:
    """DCP describes a tensor by its type and shape; the scales are neither."""
    state = {"a": {"b": torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8), "w": torch.ones(3)}}
    with pytest.raises(CheckpointException, match=r"a/b is of qint8, .*: save it with SnapshotStore"):
        write(writer, 1, state)
    assert steps_in(tmp_path) == {}

    with SnapshotStore(tmp_path / "own", report=None) as store:
        store.save(1, state)
    with pytest.raises(CheckpointException, match=r"a/b is of qint8, .*: restore it with SnapshotStore"):
        load(state, storage_reader=StoreReader(tmp_path / "own"))


def test_bytes_of_a_planner_of_ones_own_are_refused(writer: StoreWriter) -> None:
    from torch.distributed.checkpoint.planner import SavePlanner

    class Own(SavePlanner):
        """Has another do it, and is not of DCP's."""

        default = DefaultSavePlanner()

        def set_up_planner(
            self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
        ) -> None:
            self.default.set_up_planner(state_dict, storage_meta, is_coordinator)

        def create_local_plan(self) -> Any:
            return self.default.create_local_plan()

        def create_global_plan(self, all_plans: Any) -> Any:
            return self.default.create_global_plan(all_plans)

        def finish_plan(self, new_plan: Any) -> Any:
            return self.default.finish_plan(new_plan)

        def resolve_data(self, write_item: Any) -> Any:
            return self.default.resolve_data(write_item)

    with pytest.raises(CheckpointException, match="x is bytes of a planner of your own"):
        write(writer, 1, {"x": 1}, planner=Own())


def test_a_planner_that_leaves_out_what_it_sent_before_is_refused(writer: StoreWriter) -> None:
    planner = functools.partial(DefaultSavePlanner, enable_plan_caching=True)
    write(writer, 1, {"w": torch.ones(3)}, planner=planner())
    with pytest.raises(
        CheckpointException, match="enable_plan_caching leaves out what a snapshot is made of"
    ):
        write(writer, 2, {"w": torch.ones(3)}, planner=planner())


def test_a_planner_that_does_not_flatten_gives_one_name_to_each_part(
    writer: StoreWriter, tmp_path: Path
) -> None:
    write(
        writer,
        1,
        {"a.w": torch.ones(3), "n": {"k": [1, 2]}},
        planner=DefaultSavePlanner(flatten_state_dict=False),
    )
    with SnapshotStore(tmp_path, report=None) as store:
        assert_same(dict(store.restore()), {"a.w": torch.ones(3), "n": {"k": [1, 2]}})


# -- Steps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "checkpoint_id", ["1200", 1200, "step-1200", "runs/a/step_1200/", Path("x/step-000001200")]
)
def test_the_number_at_the_end_of_an_id_is_the_step(
    writer: StoreWriter, tmp_path: Path, checkpoint_id: Any
) -> None:
    save({"w": torch.ones(1)}, checkpoint_id=checkpoint_id, storage_writer=writer, no_dist=True)
    assert list(steps_in(tmp_path)) == [1200]
    into = {"w": torch.zeros(1)}
    load(into, checkpoint_id=checkpoint_id, storage_reader=StoreReader(tmp_path), no_dist=True)
    assert into["w"] == 1
    assert StoreWriter.validate_checkpoint_id(checkpoint_id)


@pytest.mark.parametrize("checkpoint_id", ["last", "", "step-1200.pt", -5, "9" * 19, "1\u0663"])
def test_an_id_without_a_step_is_refused(writer: StoreWriter, checkpoint_id: Any) -> None:
    with pytest.raises(ConfigError, match="it must be the step, such as"):
        writer.reset(checkpoint_id)
    assert not StoreReader.validate_checkpoint_id(checkpoint_id)


def test_a_save_without_a_step_is_refused(writer: StoreWriter) -> None:
    """Also after one that had a step."""
    for step in (1, 2):
        with pytest.raises(CheckpointException, match="the step is not known: give it as checkpoint_id"):
            save({"w": torch.ones(1)}, storage_writer=writer, no_dist=True)
        write(writer, step, {"w": torch.ones(1)})


def test_a_step_that_is_there_is_refused(writer: StoreWriter) -> None:
    write(writer, 1, {"w": torch.ones(1)})
    with pytest.raises(CheckpointException, match="there is a snapshot of step 1"):
        write(writer, 1, {"w": torch.ones(1)})


def test_a_step_that_is_not_there_is_refused(writer: StoreWriter, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing was saved there"):
        StoreReader(tmp_path).reset()
    write(writer, 1, {"w": torch.ones(1)})
    with pytest.raises(ConfigError, match="the nearest are of step 1"):
        read(tmp_path, {"w": torch.zeros(1)}, 3)


def test_without_an_id_the_last_snapshot_is_loaded_each_time(writer: StoreWriter, tmp_path: Path) -> None:
    reader = StoreReader(tmp_path)
    write(writer, 3, {"w": torch.full((1,), 3.0)})
    for step, checkpoint_id, expected in ((2, "3", 3.0), (9, None, 9.0)):
        write(writer, step, {"w": torch.full((1,), float(step))})
        into = {"w": torch.zeros(1)}
        load(into, checkpoint_id=checkpoint_id, storage_reader=reader, no_dist=True)
        assert into["w"] == expected


# -- Loading less, or from names -----------------------------------------------------------------------


def test_a_part_of_the_state_is_loaded(writer: StoreWriter, tmp_path: Path) -> None:
    state = saved_state()
    write(writer, 1, state)
    into = {"model": {"bias": torch.zeros(500, dtype=torch.bfloat16)}, "step": -1}
    read(tmp_path, into, 1)
    assert torch.equal(into["model"]["bias"], state["model"]["bias"])  # type: ignore[index]
    assert into["step"] == 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [StoreReader, StoreWriter])
def test_a_wrong_report_is_refused_on_every_rank(
    kind: type[StoreReader | StoreWriter], rank: int, tmp_path: Path
) -> None:
    def ranks() -> Ranks:
        made = alone()
        made.rank = rank
        return made

    with pytest.raises(ConfigError, match="report is 'print'"):
        kind(tmp_path, ranks=ranks, report="print")  # type: ignore[arg-type]


def test_what_is_missing_is_an_error_unless_a_partial_load_is_allowed(
    writer: StoreWriter, tmp_path: Path
) -> None:
    write(writer, 1, {"w": torch.ones(2)})
    into = {"w": torch.zeros(2), "new": torch.zeros(3)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: new"):
        read(tmp_path, into, 1)
    read(tmp_path, into, 1, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert into["w"].tolist() == [1, 1]
    assert into["new"].tolist() == [0, 0, 0]


def test_a_state_is_made_from_what_the_snapshot_has(writer: StoreWriter, tmp_path: Path) -> None:
    """As the converters of torch.distributed.checkpoint do."""
    state = saved_state()
    write(writer, 1, state)
    state["optimizer"]["state"] = {"0": state["optimizer"]["state"][0]}
    assert_same(_load_state_dict_from_keys(storage_reader=StoreReader(tmp_path)), state)


def test_an_optimizer_goes_on_as_if_never_interrupted(writer: StoreWriter, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def trained(steps: int, model: Any, optimizer: Any) -> torch.Tensor:
        for step in range(steps):
            optimizer.zero_grad()
            model(numbers(step, 4, 8)).square().sum().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def made() -> tuple[Any, Any]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = made()
    trained(2, model, optimizer)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    write(writer, 2, {"model": of_model, "optimizer": of_optimizer})
    expected = trained(3, model, optimizer)

    model, optimizer = made()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = read(tmp_path, {"model": of_model, "optimizer": of_optimizer}, 2)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert torch.equal(trained(3, model, optimizer), expected)


# -- Differences, retention, restarts ------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["memory", "stored"])
def test_saves_are_differences_and_old_ones_go(tmp_path: Path, reference: Any) -> None:
    lines: list[str] = []
    with StoreWriter(
        tmp_path, reference=reference, keep=Keep(last=2), snap_dis=3, report=lines.append
    ) as writer:
        for step in range(5):
            write(writer, step, saved_state(step))
    assert steps_in(tmp_path) == {3: None, 4: 3}
    assert_same(read(tmp_path, empty_like(saved_state(4)), 4), saved_state(4))
    assert [line.rpartition(", ")[2] for line in lines] == [
        "baseline",
        "delta to step 0",
        "delta to step 1",
        "baseline",
        "delta to step 3",
    ]


def test_saves_before_the_codec_is_compiled_are_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(Part, "ask", lambda part: None)
    with StoreWriter(tmp_path, codec="balance", report=lines.append) as writer:
        for step in range(2):
            write(writer, step, saved_state(step))
    assert steps_in(tmp_path) == {0: None, 1: None}
    assert lines[1].endswith("baseline: no block is stored as a difference")


def test_a_writer_that_begins_anew_goes_on_with_differences(tmp_path: Path) -> None:
    for step in (1, 2):
        with StoreWriter(tmp_path, report=None) as writer:
            write(writer, step, saved_state(step))
    assert steps_in(tmp_path) == {1: None, 2: 1}


def test_a_writer_that_nobody_holds_lets_go_of_the_folder(tmp_path: Path) -> None:
    write(StoreWriter(tmp_path, report=None), 1, saved_state(1))
    gc.collect()
    write(StoreWriter(tmp_path, report=None), 2, saved_state(2))
    gc.collect()
    assert steps_in(tmp_path) == {1: None, 2: 1}


def test_a_pickled_writer_is_the_same_writer(writer: StoreWriter) -> None:
    assert pickle.loads(pickle.dumps(writer)) is writer


def test_metadata_is_read_without_a_pickle(writer: StoreWriter, tmp_path: Path) -> None:
    """No file of the snapshot is one; bytes that DCP unpickles are made from values that were read as JSON."""
    write(writer, 1, saved_state())
    files = sorted((tmp_path / "step-000000000001").iterdir())
    assert [path.name for path in files] == ["manifest.json", "part-00000.pst"]
    for path in files:
        with pytest.raises((pickle.UnpicklingError, KeyError, IndexError)):
            pickle.loads(path.read_bytes())


def test_a_failed_save_leaves_nothing_once_the_next_begins(
    writer: StoreWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(writer, 1, saved_state(1))
    with monkeypatch.context() as patch:
        patch.setattr(
            LocalDraft, "commit", lambda self, manifest: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
        with pytest.raises(CheckpointException, match="No space left"):
            write(writer, 2, saved_state(2))
    write(writer, 2, saved_state(2))
    assert not list(tmp_path.glob(".unfinished*"))
    assert steps_in(tmp_path) == {1: None, 2: 1}
    assert_same(read(tmp_path, empty_like(saved_state(2)), 2), saved_state(2))


def test_what_the_disk_did_not_keep_is_told_before_older_snapshots_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = LocalWriter.finish

    def lose_a_bit(self: LocalWriter) -> None:
        finish(self)
        if self._path.suffix == ".pst":
            data = bytearray(self._path.read_bytes())
            data[200] ^= 1
            self._path.write_bytes(data)

    with StoreWriter(tmp_path, keep=Keep(last=1), report=None) as writer:
        write(writer, 1, saved_state(1))
        with monkeypatch.context() as patch:
            patch.setattr(LocalWriter, "finish", lose_a_bit)
            with pytest.raises(CheckpointException, match="does not have its checksum"):
                write(writer, 2, saved_state(2))
        assert steps_in(tmp_path) == {1: None}


def test_a_save_without_a_reference_in_memory_takes_little_memory(tmp_path: Path) -> None:
    """A state of 80 MB, saved twice: whole, and as a difference; more is documented as 32 MiB and what encodes."""
    state = {"w": torch.zeros(20_000_000)}
    with StoreWriter(tmp_path, reference="stored", report=None) as writer:
        write(writer, 0, {"w": torch.zeros(1)})  # what is loaded once does not count
        for step in (1, 2):
            tracemalloc.start()
            try:
                write(writer, step, state)
                peak_bytes = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak_bytes < 64 << 20
            state["w"] += 1


@pytest.mark.slow
def test_a_codec_that_looks_first_takes_no_more_memory_where_numbers_do_not_lie_side_by_side(
    tmp_path: Path,
) -> None:
    state = {"w": torch.zeros(5000, 5000).T}
    with StoreWriter(tmp_path, reference="stored", codec="dynrle", report=None) as writer:
        write(writer, 0, {"w": torch.zeros(1)})  # what is loaded once does not count
        tracemalloc.start()
        try:
            write(writer, 1, state)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak_bytes < 64 << 20
    assert_same(read(tmp_path, {"w": torch.ones(5000, 5000)}, 1), {"w": state["w"].contiguous()})


@pytest.mark.parametrize("reference", ["memory", "stored"])
def test_a_codec_that_looks_first_is_shown_what_is_written(tmp_path: Path, reference: Any) -> None:
    states = [{"w": numbers(step, 300, 500).T, "v": numbers(step, 1000)} for step in range(3)]
    with StoreWriter(tmp_path, reference=reference, codec="dynrle", report=None) as writer:
        for step, state in enumerate(states):
            write(writer, step, state)
    for step, state in enumerate(states):
        whole = {name: tensor.contiguous() for name, tensor in state.items()}
        assert_same(read(tmp_path, empty_like(whole), step), whole)


def test_a_load_takes_little_memory_beside_what_is_loaded(writer: StoreWriter, tmp_path: Path) -> None:
    state = {"w": torch.zeros(20_000_000)}
    write(writer, 1, state)
    into = empty_like(state)
    tracemalloc.start()
    try:
        read(tmp_path, into, 1)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 40 << 20  # what is read ahead
    assert_same(into, state)


# -- As the store has it: tiers, drains, schedule, waves, space -----------------------------------------------


class Clock:
    """Time that passes only where somebody waits, or says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    monotonic = __call__

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float) -> bool:
        self.seconds += timeout
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (due_module, dcp_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


def opened(top: Path, **options: Any) -> StoreWriter:
    return StoreWriter(top / "slow", fast=top / "fast", **{"report": None, **options})


def test_saves_are_baselines_on_the_fast_tier_and_are_drained_as_differences(tmp_path: Path) -> None:
    lines: list[str] = []
    with opened(tmp_path, report=lines.append) as writer:
        for step in (1, 2):
            write(writer, step, saved_state(step))
            writer.drain()
        assert steps_in(tmp_path / "fast") == {1: None, 2: None}
    assert steps_in(tmp_path / "slow") == {1: None, 2: 1}
    assert_same(read(tmp_path / "slow", empty_like(saved_state(2)), 2), saved_state(2))
    assert [line.split(" after ")[0] for line in lines] == [
        "step 1: durable",
        "step 1: drained",
        "step 2: durable",
        "step 2: drained",
    ]


def test_what_the_fast_tier_has_no_space_for_is_written_to_the_slow_one_at_once(tmp_path: Path) -> None:
    lines: list[str] = []
    with opened(tmp_path, fast_bytes="10 kB", report=lines.append) as writer:
        write(writer, 1, saved_state(1))
    assert not (tmp_path / "fast" / "step-000000000001").exists()
    assert steps_in(tmp_path / "slow") == {1: None}
    assert f"; written to {tmp_path / 'slow'} at once: the snapshot takes up to" in lines[0]


@pytest.mark.parametrize("refuses", ["begin", "write", "commit"])
def test_a_save_that_the_fast_tier_refuses_goes_on_on_the_slow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """Of one rank: it is there with its state, and begins again."""
    kind: Any = {"begin": LocalTier, "write": LocalWriter, "commit": LocalDraft}[refuses]
    real = getattr(kind, refuses)

    def refuse(self: Any, *arguments: Any, **named: Any) -> Any:
        where = self.path if refuses == "begin" else self._path if refuses == "write" else self.final
        if (tmp_path / "fast") in (where, *where.parents):
            raise DataError("No space left on the fast tier")
        return real(self, *arguments, **named)

    lines: list[str] = []
    monkeypatch.setattr(kind, refuses, refuse)
    with opened(tmp_path, report=lines.append) as writer:
        for step in (1, 2):
            write(writer, step, saved_state(step))

    assert steps_in(tmp_path / "slow") == {1: None, 2: 1}
    assert all("at once: No space left on the fast tier" in line for line in lines)
    assert not list((tmp_path / "fast").glob(".unfinished*"))


def test_drains_write_no_more_bytes_a_second_than_they_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(opened_module, "Cap", lambda *given, stop: Cap(*given, stop=clock, clock=clock))
    with opened(tmp_path, drain_bytes_per_second="100 kB/s", codec="stored") as writer:
        write(writer, 1, saved_state(1))
        writer.drain()

    [folder] = (tmp_path / "slow").glob("step-*")
    assert clock.seconds == pytest.approx(
        sum(part.stat().st_size for part in folder.glob("part-*")) / 1e5, rel=0.1
    )


def test_what_a_drain_failed_with_is_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = LocalTier.begin

    def refuse(self: LocalTier, *arguments: Any, **named: Any) -> Any:
        if self.path == tmp_path / "slow":
            raise DataError("the slow tier is away")
        return begin(self, *arguments, **named)

    with opened(tmp_path) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(LocalTier, "begin", refuse)
            write(writer, 1, saved_state(1))
            with pytest.raises(DataError, match="the slow tier is away"):
                writer.drain()
            write(writer, 2, saved_state(2))
            wait_until_drained(writer)
        with pytest.raises(DataError, match="the slow tier is away"):
            write(writer, 3, saved_state(3))
        write(writer, 3, saved_state(3))
    assert list(steps_in(tmp_path / "slow")) == [1, 2, 3]


def wait_until_drained(writer: StoreWriter) -> None:
    drainer = writer._opened.drainer
    assert drainer is not None, "there is a fast tier"
    with drainer._changed:
        while drainer._thread is not None:
            drainer._changed.wait()


def test_saves_drains_and_loads_are_recorded(tmp_path: Path) -> None:
    saved = {"w": torch.arange(10_000.0)}
    traces = tmp_path / "saves.trace", tmp_path / "loads.trace"
    with opened(tmp_path, trace=traces[0]) as writer:
        write(writer, 1, saved)
        # As by `async_save`, for which training goes on.
        beside = threading.Thread(target=write, args=(writer, 2, saved))
        beside.start()
        beside.join()
        writer.drain()
    reader = StoreReader(tmp_path / "slow", fast=tmp_path / "fast", trace=traces[1], report=None)
    load(dict(saved), checkpoint_id="2", storage_reader=reader, no_dist=True)
    del reader
    gc.collect()

    spans = np.concatenate([read_trace(path).spans for path in traces])
    by_kind = {kind: spans[spans["kind"] == kind] for kind in (Kind.SAVE, Kind.WRITE, Kind.DRAIN, Kind.LOAD)}
    assert [(int(span["step"]), int(span["bytes"])) for span in by_kind[Kind.SAVE]] == [(1, 40_000)]
    assert by_kind[Kind.SAVE]["end"] - by_kind[Kind.SAVE]["start"] > 0
    assert sorted(set(by_kind[Kind.WRITE]["step"].tolist())) == [1, 2]
    assert sorted(set(by_kind[Kind.DRAIN]["step"].tolist())) == [1, 2]
    assert by_kind[Kind.LOAD]["step"].tolist() == [2]


def test_a_writer_that_goes_on_in_another_process_records_beside_what_was_recorded(tmp_path: Path) -> None:
    with opened(tmp_path, trace=tmp_path / "saves.trace") as writer:
        write(writer, 1, {"w": torch.ones(5)})
        pickled = pickle.dumps(writer)
    del writer
    gc.collect()  # in the other process it is none, either
    with pickle.loads(pickled) as again:
        write(again, 2, {"w": torch.ones(5)})

    for name, step in (("saves", 1), ("saves-async", 2)):
        assert set(read_trace(tmp_path / f"{name}.trace").spans["step"].tolist()) == {step}


def test_a_writer_that_records_for_a_loader_is_not_pickled(tmp_path: Path) -> None:
    with (
        StoreWriter(tmp_path, trace=Recorder(16), report=None) as writer,
        pytest.raises(ConfigError, match=r"^trace is the recorder of a loader"),
    ):
        pickle.dumps(writer)


def test_what_was_not_drained_is_loaded_from_the_fast_tier_that_is_named(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "fast", report=None) as writer:
        write(writer, 1, {"w": torch.ones(5)})
    state = {"w": torch.zeros(5)}

    reader = StoreReader(StoreConfig(tmp_path / "slow", fast=tmp_path / "fast"), report=None)
    load(state, storage_reader=reader, no_dist=True)

    assert torch.equal(state["w"], torch.ones(5))


def test_a_schedule_says_when_to_save(tmp_path: Path, clock: Clock) -> None:
    with StoreWriter(tmp_path / "a", schedule="2 steps", report=None) as writer:
        assert [writer.is_due(step) for step in range(5)] == [False, False, True, False, True]
    with StoreWriter(tmp_path / "b", schedule="10 min", report=None) as writer:
        clock.seconds = 599.0
        assert not writer.is_due(1)
        clock.seconds = 601.0
        assert writer.is_due(2)
        # Also where the save is done by another process.
        assert not writer.is_due(3)
    with StoreWriter(tmp_path / "c", report=None) as writer, pytest.raises(ConfigError, match="no schedule"):
        writer.is_due(1)


def test_an_automatic_schedule_follows_what_a_save_took(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save of 8 s and a failure an hour: by Daly's formula 235 s are best."""
    commit = LocalDraft.commit

    def commit_slowly(self: LocalDraft, manifest: bytes) -> None:
        clock.seconds += 8.0
        commit(self, manifest)

    monkeypatch.setattr(LocalDraft, "commit", commit_slowly)
    with StoreWriter(tmp_path, schedule=Auto(3600.0, least_seconds=0.0), report=None) as writer:
        assert writer.is_due(1)
        write(writer, 1, saved_state(1))
        clock.seconds = 8.0 + 230.0
        assert not writer.is_due(2)
        clock.seconds = 8.0 + 240.0
        assert writer.is_due(3)


@pytest.mark.parametrize(("staging_bytes", "most"), [("2 MB", 2_000_000), (None, 32 << 20)])
def test_no_more_of_a_state_is_staged_than_was_given(tmp_path: Path, staging_bytes: Any, most: int) -> None:
    staged: list[int] = []
    state = {"w": numbers(1, 1000, 9_000 if staging_bytes is None else 1_000)}
    with StoreWriter(tmp_path, reference="stored", staging_bytes=staging_bytes, report=None) as writer:
        for step in (1, 2):
            write(writer, step, state)
            staged += [area.nbytes for area in writer._opened.writer.areas]
    assert most - (512 << 10) < max(staged) <= most, "as many blocks as fit"
    assert_same(read(tmp_path, empty_like(state), 2), state)


def test_a_first_save_without_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTier, "free_bytes", lambda self: 900_000)
    lines: list[str] = []
    with StoreWriter(tmp_path, report=lines.append) as writer:
        with pytest.raises(
            CheckpointException, match="has 900 kB free, and the snapshot of step 1 takes up to"
        ):
            write(writer, 1, saved_state(1))
        assert not list(tmp_path.glob("*step*"))
        write(writer, 2, {"w": torch.ones(50_000)})
        assert "step 2 is saved, but space may run out later: " in lines[0]
        monkeypatch.setattr(LocalTier, "free_bytes", lambda self: 0)
        write(writer, 3, {"w": torch.ones(50_000)})
    assert list(steps_in(tmp_path)) == [2, 3]


# -- Others remove and damage ----------------------------------------------------------------------------


def replaces_by(folder: Path, step: int, state: State) -> None:
    """Save a snapshot as another process would, and keep no other."""
    with SnapshotStore(folder, keep=Keep(last=1), scheme="complete", report=None) as store:
        if step in [one.step for one in store.list()]:
            store.delete(step)
        store.save(step, state).wait()


def test_a_load_of_the_latest_takes_what_is_the_latest_by_then(tmp_path: Path) -> None:
    with SnapshotStore(tmp_path, scheme="complete", report=None) as store:
        store.save(1, saved_state(1)).wait()
    reader = StoreReader(tmp_path)
    reader.reset()
    replaces_by(tmp_path, 2, saved_state(2))

    state = empty_like(saved_state())
    load(state, storage_reader=reader, no_dist=True)

    assert_same(state, saved_state(2))
    reader.reset("2")
    replaces_by(tmp_path, 3, saved_state(3))
    with pytest.raises(
        CheckpointException, match=r"step 2 in .* was removed meanwhile.*nearest are of step 3"
    ):
        load(state, storage_reader=reader, no_dist=True)


def test_a_snapshot_that_goes_while_it_is_loaded_is_told_as_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SnapshotStore(tmp_path, scheme="complete", report=None) as store:
        store.save(1, saved_state(1)).wait()
    plan = StoreReader.prepare_global_plan

    def replace_first(self: StoreReader, plans: Any) -> Any:
        replaces_by(tmp_path, 1, saved_state(7))
        return plan(self, plans)

    monkeypatch.setattr(StoreReader, "prepare_global_plan", replace_first)
    with pytest.raises(CheckpointException, match="the snapshot of step 1 was removed meanwhile"):
        read(tmp_path, empty_like(saved_state()), 1)


def test_nothing_is_a_difference_to_what_was_damaged_when_it_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = LocalDraft.commit
    with StoreWriter(tmp_path, report=None) as writer:
        write(writer, 1, saved_state(1))

        def commit_and_damage(self: LocalDraft, manifest: bytes) -> None:
            commit(self, manifest)
            part = next(self.final.glob("part-*"))
            part.write_bytes(part.read_bytes()[:-1] + b"x")

        monkeypatch.setattr(LocalDraft, "commit", commit_and_damage)
        with pytest.raises(CheckpointException, match="is damaged in its last"):
            write(writer, 2, saved_state(2))
        monkeypatch.undo()
        write(writer, 3, saved_state(3))
    assert_same(read(tmp_path, empty_like(saved_state()), 3), saved_state(3))


# -- Ranks ---------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).with_name("dcp_ranks.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """Run a job of four ranks, then one of two in the same folder, and return it."""
    folder = tmp_path_factory.mktemp("dcp")

    def job(duty: str, size: int) -> list[list[str]]:
        return torch_job(str(folder), duty, size=size, address=f"file://{folder / duty}-ranks")

    wait_for(forks.start(SCRIPT, [[job("save", 4), job("reshard", 2)]]))
    return folder


@pytest.fixture
def reports(folder: Path) -> list[dict[str, Any]]:
    return reports_in(folder, "save", 4)


def said(reports: list[dict[str, Any]], what: str) -> Any:
    """Return what all ranks report alike."""
    values = [report[what] for report in reports]
    assert values == [values[0]] * len(values)
    return values[0]


def test_four_ranks_write_fsdp_states_as_differences(folder: Path, reports: list[dict[str, Any]]) -> None:
    references = steps_in(folder / "store")
    assert {step: references[step] for step in (2, 3, 4)} == {2: 1, 3: 2, 4: 3}
    assert steps_in(folder / "stored")[2] == 1


def test_one_process_puts_a_sharded_state_together(folder: Path) -> None:
    expected = torch.load(folder / "expected-3.pt", weights_only=True)
    with SnapshotStore(folder / "store", report=None) as store:
        restored = store.restore(3)
    for name, tensor in expected["model"].items():
        assert torch.equal(restored["model"][name], tensor), name
    for name, tensor in expected["plain"].items():
        assert torch.equal(restored["plain"][name], tensor), name
    assert restored["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.01)
    assert restored["step"] == 3


def test_replicas_are_written_once_and_by_all(folder: Path) -> None:
    """As DCP's planner deals them out: none writes more than the mean and the largest."""
    import json

    manifest = json.loads(
        (folder / "plain" / "step-000000000001" / "manifest.json").read_bytes().splitlines()[0]
    )
    names = [row[0] for row in manifest["tensors"]]
    assert len(names) == len(set(names)) == 24
    written_bytes = [0] * 4
    for _, _, shape, _, part, _ in manifest["tensors"]:
        written_bytes[part] += 4 * int(np.prod(shape))
    assert max(written_bytes) <= sum(written_bytes) / 4 + 4 * 24 * 1000


def test_async_save_goes_on_with_differences(folder: Path, reports: list[dict[str, Any]]) -> None:
    assert steps_in(folder / "store")[4] == 3
    assert said(reports, "async loaded")


def test_the_same_ranks_load_what_they_saved(reports: list[dict[str, Any]]) -> None:
    assert said(reports, "loaded")


def test_what_fails_on_one_rank_is_raised_on_all_and_leaves_nothing(
    folder: Path, reports: list[dict[str, Any]]
) -> None:
    assert "No space left on device" in said(reports, "full")
    assert "odd: value is an object, which a snapshot does not hold" in said(reports, "unsupported")
    assert said(reports, "left") == 0
    assert steps_in(folder / "store")[6] == 4


def test_after_a_rank_was_refused_by_the_fast_tier_saves_go_to_the_slow_one(
    folder: Path, reports: list[dict[str, Any]]
) -> None:
    assert "No space left on the fast tier" in said(reports, "refused")
    assert steps_in(folder / "fast") == {1: None}
    assert steps_in(folder / "slow") == {1: None, 3: 1}
    assert any("No space left on the fast tier" in line for line in reports[0]["told of tiers"])
    assert not list((folder / "fast").glob(".unfinished*"))


def test_a_rank_that_does_not_come_is_named_and_all_go_on(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["late"].startswith(
            f"WaitTimeout: rank 3 of 4 did not arrive at the beginning of a save within {brief(2):g} s"
        )
    assert said(reports, "after being late") == 1


def test_ranks_that_save_different_steps_are_told(reports: list[dict[str, Any]]) -> None:
    assert said(reports, "different") == "ConfigError: the ranks save different steps: 0, 1, 2, 3"


def test_another_number_of_ranks_loads_its_parts_and_begins_with_a_baseline(folder: Path) -> None:
    reports = reports_in(folder, "reshard", 2)
    assert said(reports, "loaded")
    assert said(reports, "plain loaded")
    references = steps_in(folder / "store")
    assert (references[7], references[8]) == (None, 7)


def test_a_sharded_snapshot_is_exported_in_one_command(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    main(
        [
            "snapshots", "export", str(folder / "store"), str(tmp_path / "out"), "--step", "3", "--part",
            "model",
        ]
    )  # fmt: skip

    expected = torch.load(folder / "expected-3.pt", weights_only=True)["model"]
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert_same(OrderedDict(sorted(exported.items())), OrderedDict(sorted(expected.items())))


@pytest.mark.slow
def test_async_save_in_a_process_of_its_own_goes_on_with_differences(tmp_path: Path) -> None:
    """The writer is sent there with each save, and is one and the same there."""
    script, address = str(Path(__file__).with_name("dcp_process_rank.py")), f"file://{tmp_path / 'ranks'}"
    command = [sys.executable, "-W", "ignore", script, str(tmp_path / "store"), address]
    ranks = [
        subprocess.Popen([*command, str(rank), "2"], stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    told = [rank.communicate()[1] for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert steps_in(tmp_path / "store") == {1: None, 2: 1, 3: 2}
    with SnapshotStore(tmp_path / "store", report=None) as store:
        assert torch.equal(store.restore()["w"], torch.arange(1000.0) + 3)


@for_each(
    ("name", "wrong"),
    [
        ("folder", 3),
        ("keep", 0),
        ("reference", "disk"),
        ("staging_bytes", 0),
        ("fast", 3),
        ("fast_bytes", "much"),
        ("drain_bytes_per_second", "fast"),
        ("threads", 0),
        ("schedule", "often"),
        ("ranks", 3),
        ("ranks", lambda: None),
        ("storage_options", "key"),
        ("report", 3),
        ("trace", 3),
    ],
)
def test_a_wrong_argument_of_a_writer_is_refused_by_its_name(tmp_path: Path, name: str, wrong: Any) -> None:
    arguments = {"folder": tmp_path} | {name: wrong}
    for kind in (StoreWriter, StoreReader):
        with pytest.raises(ConfigError, match=rf"^{name}\b"):
            kind(**arguments)


@for_each("wrong", [3.5, True, b"12", "last"])
def test_a_checkpoint_id_that_names_no_step_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint_id is "):
        StoreReader(tmp_path).reset(wrong)
    assert not StoreReader.validate_checkpoint_id(wrong)


def test_what_a_checkpoint_takes_is_told_with_all_its_files(tmp_path: Path) -> None:
    told: list[str] = []
    with StoreWriter(tmp_path, report=told.append) as writer:
        save({"weight": torch.ones(5)}, checkpoint_id="1", storage_writer=writer, no_dist=True)

    nbytes = sum(file.stat().st_size for file in (tmp_path / "step-000000000001").iterdir())
    assert f"wrote {nbytes} B of 20 B" in told[0] or f"wrote {nbytes / 1e3:.3g} kB of 20 B" in told[0]
    assert SnapshotStore(tmp_path).list()[0].stored_bytes == nbytes


@for_each(("name", "value"), [("kept_mantissa_bits", 8), ("host_copies", "copies")])
def test_what_only_a_snapshot_store_can_do_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is of a SnapshotStore"):
        StoreWriter(tmp_path, **{name: value})

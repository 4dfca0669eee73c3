"""A run that is stopped anywhere goes on exactly: the same batches, the same bits, on whatever is there then."""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.for_each import for_each
from tests.store.tar_files import write
from tests.store.tfrecord_files import Feature, write_records
from torch.utils.data import Subset

import penstock.torch
from penstock.errors import ClosedError, ConfigError
from penstock.loader import Loader, LoaderConfig, PackedDocuments, SourceSamples, TarSamples, mapped
from penstock.loader.local_disk import fingerprint_of
from penstock.loader.resume import describe_data
from penstock.loader.transforms import (
    CenterCrop,
    DecodeRaw,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
)
from penstock.plan import BundleShuffle, Explicit, FullShuffle, Order, Sequential, TorchShuffle
from penstock.plan.torch_order import TwisterState
from penstock.store import (
    ArrowFiles,
    ArrowTable,
    FlatFolder,
    Hdf5,
    Manifest,
    PackedFiles,
    ParquetFiles,
    Records,
    TarShards,
    TFRecords,
    Tokens,
)

COUNT, BATCH, EPOCHS = 22, 4, 3
STEPS = 6
TRANSFORMS = (RandomResizedCrop(8), RandomHorizontalFlip(), ToTensor())
Bits = list[list[bytes]]


class Reversed(FullShuffle):
    """An order of a user's own."""


@pytest.fixture
def folder(image_folder: Callable[..., Path]) -> Path:
    return image_folder(COUNT)


def load(source: Any, **arguments: Any) -> Loader:
    settings = {"batch_size": BATCH, "epochs": EPOCHS, "transforms": TRANSFORMS, "seed": 5, "report": None}
    return Loader(source, **{**settings, **arguments})


def rest_of(loader: Loader) -> Bits:
    """Return the bits of all batches that are left of a run, and close the loader."""
    bits: Bits = []
    with loader:
        while loader.position[0] < EPOCHS:
            bits += [[array.tobytes() for array in batch] for batch in loader]
    return bits


def stopped_after(count: int, loader: Loader) -> dict[str, Any]:
    """Return the state of a run that was stopped within the loop, as it comes out of a file."""
    with loader:
        for _ in range(count // STEPS):
            for _ in loader:
                pass
        for number, _ in enumerate(loader if count % STEPS else ()):
            if number + 1 == count % STEPS:
                state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
                return state
        return json.loads(json.dumps(loader.state_dict()))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"decoders": 0}, marks=pytest.mark.slow),
        {"decoders": 3, "memory": "16 MiB"},
        pytest.param({"policy": "staging", "readers": 2}, marks=pytest.mark.slow),
    ],
    ids=["as it was", "no threads", "little memory", "nothing kept"],
)
def test_a_run_goes_on_with_the_next_batch_wherever_it_was_stopped(
    folder: Path, changes: dict[str, Any]
) -> None:
    full = rest_of(load(folder))

    for count in (0, 3, STEPS - 1, STEPS, 3 * STEPS - 1):
        state = stopped_after(count, load(folder))
        assert (state["epoch"], state["step"]) == divmod(count, STEPS)
        assert rest_of(load(folder, state=state, **changes)) == full[count:]


def test_a_run_is_stopped_again_and_again(folder: Path) -> None:
    full, state, done = rest_of(load(folder)), None, 0
    for count in (2, 1, 5, 4):
        with load(folder, state=state) as loader:
            found: Bits = []
            while len(found) < count:
                for batch in loader:
                    found.append([array.tobytes() for array in batch])
                    if len(found) == count:
                        state = loader.state_dict()
                        break
        assert found == full[done : done + count]
        done += count


def ids_by_step(
    ranks: int, state: Any, split: str = "balanced", count: int = 10**6
) -> tuple[list[Any], list[Any]]:
    """Return the sorted ids of each global batch that all ranks read from a state on, and each rank's last state."""
    steps: list[list[int]] = []
    states = []
    for rank in range(ranks):
        arguments = {"rank": rank, "world_size": ranks, "split": split, "transforms": (), "decoders": 0}
        with load(list(range(COUNT)), state=state, **arguments) as loader:
            taken = 0
            while loader.position[0] < EPOCHS and taken < count:
                for batch in loader:
                    steps += [[] for _ in range(taken + 1 - len(steps))]
                    steps[taken] += batch.tolist()
                    taken += 1
                    if taken == count:
                        break
            states.append(loader.state_dict())
    return [sorted(step) for step in steps], states


# Epochs as people use them


@pytest.mark.parametrize(
    ("world_size", "policy"), [pytest.param(1, "staging", marks=pytest.mark.slow), (2, "frequency")]
)
def test_a_loader_without_end_gives_the_epochs_of_one_with_an_end_and_then_others(
    folder: Path, world_size: int, policy: str, tmp_path: Path
) -> None:
    ranks: dict[str, Any] = {"world_size": world_size, "rank": world_size - 1, "policy": policy}
    full = rest_of(load(folder, **ranks))
    with load(folder, epochs=None, trace=tmp_path / "run.trace", **ranks) as loader:
        assert "epochs without end of 6 steps" in loader.start_lines[0]
        for epoch in range(2 * EPOCHS):
            assert loader.position == (epoch, 0)
            found = [[array.tobytes() for array in batch] for batch in loader]
            assert len(found) == STEPS
            if epoch < EPOCHS:
                assert found == full[epoch * STEPS : (epoch + 1) * STEPS]
        state = loader.state_at(1, 2)
    assert rest_of(load(folder, state=state, **ranks)) == full[STEPS + 2 :]


def test_an_order_that_ends_is_not_repeated_without_end(folder: Path) -> None:
    for order, text in (
        (Explicit([list(range(COUNT))] * 2, COUNT), "the order lists 2 epochs: give epochs=2"),
        (Explicit(lambda epoch: range(COUNT), COUNT), "only the code of Explicit knows how long"),
    ):
        with pytest.raises(ConfigError, match=f"^epochs is None, for a run without end, and {text}"):
            load(folder, shuffle=order, epochs=None)
    with load(folder, shuffle=Explicit(range(COUNT), COUNT), epochs=None) as loader:
        assert len(loader) == STEPS


@pytest.mark.parametrize(
    "arguments",
    [{"epochs": None}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({"epochs": 9}, {}))],
)
def test_a_run_may_be_counted_in_steps_and_made_longer_later(folder: Path, arguments: dict[str, Any]) -> None:
    """The state at its end is within the epoch, whatever the plan ends with."""
    full = rest_of(load(folder))

    def make(steps: int, state: Any = None) -> Loader:
        config = LoaderConfig(
            folder, batch_size=BATCH, transforms=TRANSFORMS, seed=5, steps=steps, **arguments
        )
        return Loader(config, state=state, report=None)

    def run(loader: Loader) -> tuple[Bits, dict[str, Any]]:
        found: Bits = []
        while loader.position[0] < loader.plan.epochs:
            assert len(loader) == (2 if loader.position[0] == 1 and loader.config.steps == 8 else STEPS)
            found += [[array.tobytes() for array in batch] for batch in loader]
        return found, loader.state_dict()

    with make(8) as short:
        assert "1 epoch of 6 steps and 2 steps of one more, 4 samples" in short.start_lines[0]
        first, state = run(short)
        assert state == short.state_at(1, 2)
    with make(3 * STEPS, state) as longer:
        second, at_end = run(longer)

    assert (state["epoch"], state["step"]) == (1, 2)
    assert first + second == full
    assert (at_end["epoch"], at_end["step"]) == (3, 0)
    with make(8, state) as ended, pytest.raises(ClosedError, match=r"give a larger epochs= \(or steps=\)"):
        iter(ended)


def test_of_epochs_and_steps_the_run_ends_with_the_first(folder: Path) -> None:
    for steps, ends_at in ((8, (1, 2)), (12, (2, 0)), (100, (3, 0))):
        with load(folder, steps=steps) as loader:
            assert sum(loader.plan.steps(epoch) for epoch in range(loader.plan.epochs)) == min(steps, 18)
            loader.start(loader.plan.epochs)
            state = loader.state_dict()
            assert (state["epoch"], state["step"]) == ends_at
    with pytest.raises(ConfigError, match="steps is 0; it must be at least 1"):
        load(folder, steps=0)
    with pytest.raises(ConfigError, match=r"epochs is missing: .* or steps=, the batches of the run"):
        Loader(folder, batch_size=4)


def test_a_trainer_that_counts_epochs_sets_them(folder: Path) -> None:
    """Before the first loop, after a loop that ended, after one that was left, and too late, which changes nothing."""
    full = rest_of(load(folder))

    def epoch_of(loader: Loader) -> Bits:
        return [[array.tobytes() for array in batch] for batch in loader]

    with load(folder) as loader:
        loader.set_epoch(1)
        assert epoch_of(loader) == full[STEPS : 2 * STEPS]
        loader.set_epoch(2)
        loader.set_epoch(0)
        assert epoch_of(loader) == full[2 * STEPS :]
        with pytest.raises(ConfigError, match="epoch is 4; the plan has the epochs 0 to 2"):
            loader.set_epoch(4)
    with load(folder) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        loader.set_epoch(0)  # which it is in
        next(batches)
        loader.set_epoch(2)
        with pytest.raises(ClosedError, match=r"this pass over an epoch ended .* `set_epoch` chose another"):
            next(batches)
        assert epoch_of(loader) == full[2 * STEPS :]
    with load(folder) as loader:
        loader.load_state_dict(loader.state_at(1, 2))
        loader.set_epoch(1)
        assert epoch_of(loader) == full[STEPS + 2 : 2 * STEPS]
    with pytest.raises(ClosedError):
        loader.set_epoch(2)


def test_an_iterator_that_gave_no_batch_uses_up_nothing(folder: Path) -> None:
    full = rest_of(load(folder))
    with load(folder) as loader:
        iter(loader)
        first = iter(loader)
        again = iter(loader)
        assert loader.position == (0, 0)
        with pytest.raises(ClosedError, match="ended when another `for` loop over the same loader began"):
            next(first)
        assert [[array.tobytes() for array in batch] for batch in again] == full[:STEPS]


def test_evaluation_between_batches_and_epochs_changes_nothing(folder: Path) -> None:
    """A second loader, without end, of which a pass is left early as in a sanity check."""
    full = rest_of(load(folder))
    with load(folder) as loader, load(folder, shuffle=False, epochs=None) as validation:
        for _ in validation:
            break
        found: Bits = []
        while loader.position[0] < EPOCHS:
            for batch in loader:
                found.append([array.tobytes() for array in batch])
                if len(found) % 4 == 0:
                    assert sum(1 for _ in validation) == STEPS
    assert found == full


# Other ranks


@pytest.mark.parametrize("split", ["balanced", pytest.param("strided", marks=pytest.mark.slow)])
def test_another_number_of_ranks_reads_the_same_global_batches(split: str) -> None:
    full, _ = ids_by_step(1, None)
    for before, after in ((1, 2), (2, 1)):
        for count in (1, STEPS - 1, STEPS, STEPS + 3):
            _, states = ids_by_step(before, None, split, count)
            assert all(state == states[0] for state in states)
            assert ids_by_step(after, states[0], split)[0] == full[count:]


def test_after_a_loop_that_was_left_the_state_is_within_its_epoch_until_another_begins(folder: Path) -> None:
    with load(folder) as loader:
        for number, _ in enumerate(loader):
            if number == 1:
                break
        assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (0, 2)
        batches = iter(loader)
        assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (1, 0)
        next(batches)
        assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (1, 1)


class Failing:
    """Numbers, one of which cannot be had."""

    def __init__(self, failing: int | None = None) -> None:
        self.failing = failing

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> int:
        if number == self.failing:
            raise ZeroDivisionError(f"no sample {number}")
        return number


def numbers(failing: int | None = None, **options: Any) -> Loader:
    arguments = {"batch_size": 4, "epochs": 3, "shuffle": False, "report": None, "decoders": 1, **options}
    return Loader(Failing(failing), **arguments)


@for_each("is_kept", [False, True], ids=["dropped", "kept"])
@for_each("way", ["break", "an error of the caller", "a sample's error"])
def test_however_a_loop_is_left_position_state_and_the_next_loop_agree(way: str, is_kept: bool) -> None:
    """A sample's error comes in place of the third batch, the others with it."""
    kept: list[Exception] = []
    with numbers(8 if way == "a sample's error" else None) as loader:
        try:
            for number, _ in enumerate(loader):
                if number == 2 and way == "break":
                    break
                if number == 2:
                    raise ZeroDivisionError
        except ZeroDivisionError as error:
            kept += [error] * is_kept

        step = 2 if way == "a sample's error" else 3
        state = loader.state_dict()
        assert (state["epoch"], state["step"]) == (0, step)
        assert loader.position == (1, 0)
        assert "at epoch 1 of 3, step 0" in repr(loader)
        assert loader.preview(3).tolist() == [0, 1, 2]
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2, 3]
        assert loader.position == (1, 1)
    with numbers(state=state) as again:
        assert next(iter(again)).tolist() == [4 * step, 4 * step + 1, 4 * step + 2, 4 * step + 3]


def test_an_iterator_that_failed_is_not_taken_for_one_that_is_done() -> None:
    """Where its caller catches the error and asks on: a loop's end would pass for the epoch's."""
    with numbers(8) as loader:
        batches = iter(loader)
        assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(ZeroDivisionError):
            next(batches)
        for _ in range(2):
            with pytest.raises(ClosedError, match=r"ended with ZeroDivisionError: begin another .* on_error"):
                next(batches)

    with numbers() as loader:
        batches = iter(loader)
        assert len([*batches]) == 6
        with pytest.raises(StopIteration):
            next(batches)


def test_an_error_in_an_epochs_first_batch_uses_up_no_epoch() -> None:
    with numbers(1) as loader:
        for _ in range(2):
            assert loader.position == (0, 0)
            with pytest.raises(ZeroDivisionError):
                next(iter(loader))


def test_a_trainer_that_knows_its_step_needs_no_state_of_the_loader(folder: Path) -> None:
    full = rest_of(load(folder))
    with load(folder) as other:
        state = other.state_at(1, 2)
        assert other.state_at(1, STEPS) == other.state_at(2, 0)
        with pytest.raises(ConfigError, match="step is 7; epoch 1 has 6 steps"):
            other.state_at(1, 7)

    assert rest_of(load(folder, state=state)) == full[STEPS + 2 :]


def test_a_run_goes_on_for_more_epochs_than_it_was_planned_for(folder: Path) -> None:
    with load(folder, epochs=1) as short:
        for _ in short:
            pass
        state = short.state_dict()

    with (
        load(folder, state=state, epochs=1) as ended,
        pytest.raises(ClosedError, match="all 1 epochs of this loader were read: loop while"),
    ):
        iter(ended)
    assert rest_of(load(folder, state=state)) == rest_of(load(folder))[STEPS:]


def test_what_is_read_again_is_the_sample_that_shows_the_shape_alone(folder: Path) -> None:
    asked: list[int] = []

    class Numbers:
        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, index: int) -> int:
            asked.append(index)
            return index

    with load(Numbers(), transforms=()) as planned:
        state = planned.state_at(2, 3)
        rest = planned.plan.stream(0, 2, 3, COUNT).tolist()
    asked.clear()
    with load(Numbers(), transforms=(), state=state) as loader:
        loader.start()
        assert [number for batch in loader for number in batch.tolist()] == rest
    assert sorted(asked[1:]) == sorted(rest)


@for_each(
    "order",
    [
        FullShuffle(COUNT, 1),
        BundleShuffle(COUNT, 1, bundle_ratio=0.5),
        Sequential(COUNT),
        TorchShuffle(COUNT, TwisterState.from_seed(3)),
        Explicit(np.arange(COUNT)[::-1], COUNT),
        Explicit([list(range(COUNT))] * EPOCHS, COUNT),
        Explicit(lambda epoch: np.roll(np.arange(COUNT), epoch), COUNT),
        Reversed(COUNT, 1),
    ],
)
def test_any_order_is_told_from_others_in_a_small_state(folder: Path, order: Order) -> None:
    own = partial(load, folder, decoders=0)
    with own(shuffle=order) as loader, own(shuffle=FullShuffle(COUNT, 2)) as other:
        state = loader.state_dict()
        assert len(json.dumps(state)) < 2048
        with own(shuffle=order, state=state):
            pass
        with pytest.raises(ConfigError, match=r"plan.order was .* and is .*'seed': 2"):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"batch_size": 2}, "plan.batch_size was 4 and is 2 here"),
        ({"drop_last": True}, "plan.drop_last was False and is True"),
        ({"seed": 6}, "plan.order was .*, transforms.seed was 5 and is 6 here: batches would"),
        ({"shuffle": FullShuffle(COUNT, 5), "seed": 6}, "transforms.seed was 5 and is 6"),
        ({"transforms": [Resize(9), CenterCrop(8), ToTensor()]}, "transforms.steps was"),
        ({"dtype": "float16"}, "transforms.dtype was 'float32' and is 'float16'"),
        ({"layout": "NHWC"}, "transforms.layout"),
    ],
)
def test_what_would_change_batches_is_named_with_both_values_and_may_be_allowed(
    folder: Path, changes: dict[str, Any], name: str
) -> None:
    with load(folder, decoders=0) as loader, load(folder, decoders=0, **changes) as other:
        state = loader.state_at(1, 1)
        with pytest.raises(ConfigError, match=f"state is of another run: {name}") as refused:
            other.load_state_dict(state)
        fields = ast.literal_eval(str(refused.value).partition("allow=")[2])
        other.load_state_dict(state, allow=fields)
        assert other.position == (1, 4 // other.plan.batch_size)


def test_another_data_set_is_refused_and_the_same_one_elsewhere_is_not(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    first = image_folder(COUNT)
    with load(first) as loader:
        state = loader.state_dict()
    moved = first.rename(tmp_path / "moved")
    with load(moved, state=state):
        pass

    (moved / "cat" / "0000.jpg").rename(moved / "cat" / "zero.jpg")
    others = {
        r"data\.names_sizes_labels was": load(moved),
        r"data\.kind was": load(list(range(COUNT)), transforms=()),
    }
    others[r"plan\.samples was 22 and is 11"] = load(FlatFolder(moved / "dog"))
    for text, other in others.items():
        with other, pytest.raises(ConfigError, match=text):
            other.load_state_dict(state)


def write_numbers(folder: Path) -> Path:
    """Write files of equal sizes: tokens, and records with two features."""
    folder.mkdir()
    for number in range(2):
        np.arange(40 * number, 40 * (number + 1), dtype="<u2").tofile(folder / f"{number}.bin")
    records: list[dict[str, Feature]] = [{"one": bytes([k, 1]), "two": bytes([k, 2])} for k in range(20)]
    write_records(folder / "a.tfrecord", records)
    return folder


def tokens(folder: Path, *names: str) -> Tokens:
    return Tokens([folder / name for name in names], length=2, dtype="<u2")


def records(folder: Path, sample: str) -> TFRecords:
    return TFRecords(folder / "a.tfrecord", sample=sample)


@pytest.mark.parametrize(
    ("was", "other"),
    [
        (lambda folder: tokens(folder, "0.bin", "1.bin"), lambda folder: tokens(folder, "1.bin", "0.bin")),
        (lambda folder: tokens(folder, "0.bin"), lambda folder: tokens(folder, "1.bin")),
        (lambda folder: records(folder, "one"), lambda folder: records(folder, "two")),
    ],
    ids=["order of files", "another file", "another feature"],
)
def test_samples_that_share_files_are_told_by_the_files_and_their_places_in_them(
    tmp_path: Path, was: Callable[[Path], Any], other: Callable[[Path], Any]
) -> None:
    """All of them have as many samples, of the same sizes."""
    here, elsewhere = write_numbers(tmp_path / "here"), write_numbers(tmp_path / "elsewhere")
    raw: dict[str, Any] = {"transforms": [DecodeRaw("uint8")], "dtype": "uint8"}
    settings = raw if isinstance(was(here), TFRecords) else {"transforms": ()}
    with load(was(here), **settings) as loader:
        state = loader.state_dict()

    with load(was(elsewhere), state=state, **settings) as loader:
        assert loader.position == (0, 0)
    with pytest.raises(ConfigError, match=r"data\.names_sizes_labels was"):
        load(other(here), state=state, **settings)


def write_columns(folder: Path) -> Path:
    """Write files of two parts, whose values have equal sizes."""
    folder.mkdir()
    columns = {name: [bytes([k, number]) for k in range(20)] for number, name in enumerate(("one", "two"))}
    rows = [{name: values[k] for name, values in columns.items()} for k in range(20)]
    write_records(folder / "a.tfrecord", rows)
    table = pa.table(columns)
    pq.write_table(table, folder / "a.parquet", row_group_size=7)
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    arrays = {name: np.array([list(value) for value in values], np.uint8) for name, values in columns.items()}
    with h5py.File(folder / "a.h5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
            file.create_dataset(f"packed {name}", data=array, chunks=(7, 2), compression="gzip")
    np.column_stack([*arrays.values()]).tofile(folder / "a.bin")
    write(
        folder / "a.tar",
        {
            f"{k}.{ending}": content
            for k, row in enumerate(rows)
            for ending, content in {**row, "json": b'{"one": 1, "two": 2}'}.items()
        },
    )
    (folder / "a.csv").write_text("one,two\na.bin,a.tar\n")
    return folder


def packed(dataset: Any, **options: Any) -> PackedDocuments:
    return PackedDocuments(dataset, [2] * 20, tokens=4, too_long="split", **options)


PAIR = [("one", "u1", (2,)), ("two", "u1", (2,))]
#: Opens a part of the files that `write_columns` writes, by its name.
PARTS: dict[str, Callable[[Path, str], Any]] = {
    "tfrecord": lambda folder, name: TFRecords(folder / "a.tfrecord", sample=name),
    "parquet": lambda folder, name: ParquetFiles(folder / "a.parquet", sample=name),
    "some of parquet": lambda folder, name: ParquetFiles(folder / "a.parquet", sample=name).select([1, 2]),
    "values of parquet": lambda folder, name: SourceSamples(ParquetFiles(folder / "a.parquet", sample=name)),
    "arrow": lambda folder, name: ArrowFiles(folder / "a.arrow", sample=name),
    "table": lambda folder, name: ArrowTable(pq.read_table(folder / "a.parquet"), sample=name),
    "hdf5": lambda folder, name: Hdf5(folder / "a.h5", data=name),
    "packed hdf5": lambda folder, name: Hdf5(folder / "a.h5", data=f"packed {name}"),
    "field of records": lambda folder, name: Records(folder / "a.bin", PAIR, field=name),
    "type of records": lambda folder, name: Records(folder / "a.bin", {"one": "<u2", "two": "<i2"}[name]),
    "stride of tokens": lambda folder, name: Tokens(
        folder / "a.bin", length=4, dtype="u1", stride={"one": 20, "two": 19}[name]
    ),
    "tar": lambda folder, name: TarShards(folder / "a.tar", member=name),
    "members of tar": lambda folder, name: TarSamples(folder / "a.tar", ["json", name]),
    "names of members": lambda folder, name: TarSamples(folder / "a.tar", {name: "one"}),
    "JSON in tar": lambda folder, name: TarSamples(folder / "a.tar", {"x": f"json:{name}"}),
    "decoded from tar": lambda folder, name: TarSamples(
        folder / "a.tar", ["one"], decode={"one": {"one": "text", "two": "bytes"}[name]}
    ).map(repr),
    "documents of parquet": lambda folder, name: packed(
        SourceSamples(ParquetFiles(folder / "a.parquet", sample=name)).map(list)
    ),
    "field of documents": lambda folder, name: packed([{"one": [1, 2], "two": [3, 4]}] * 20, field=name),
    "manifest": lambda folder, name: Manifest(folder / "a.csv", file=name, labels=None),
}


@for_each("kind", PARTS)
def test_another_part_of_the_same_files_is_other_data(tmp_path: Path, kind: str) -> None:
    """A disk, other jobs, ranks and a state know data by this: they would give the samples of the one for the other."""
    here, elsewhere = write_columns(tmp_path / "here"), write_columns(tmp_path / "elsewhere")
    one, other, moved = PARTS[kind](here, "one"), PARTS[kind](here, "two"), PARTS[kind](elsewhere, "one")

    assert len(one) == len(other)
    assert describe_data(one) == describe_data(moved)
    assert describe_data(one) != describe_data(other)
    assert len(json.dumps(describe_data(one))) < 1000
    if isinstance(one, PackedFiles):
        assert fingerprint_of(one) == fingerprint_of(PARTS[kind](here, "one")) != fingerprint_of(other)


def test_a_listed_order_may_list_more_epochs_and_no_others(folder: Path) -> None:
    lists = [np.random.default_rng(epoch).permutation(COUNT) for epoch in range(4)]
    with load(folder, shuffle=Explicit(lists[:2], COUNT), epochs=2) as loader:
        state = loader.state_at(0, 3)

    with load(folder, shuffle=Explicit(lists, COUNT), epochs=4, state=state):
        pass
    with (
        load(folder, shuffle=Explicit([lists[0], lists[2]], COUNT), epochs=2) as other,
        pytest.raises(ConfigError, match=r"plan\.order was"),
    ):
        other.load_state_dict(state)


def test_with_another_batch_size_as_many_samples_of_the_epoch_are_left(folder: Path) -> None:
    with load(folder, transforms=TRANSFORMS) as loader:
        state = loader.state_at(1, 3)
    with load(folder, batch_size=6) as other:
        other.load_state_dict(state, allow=["plan.batch_size"])
        assert other.position == (1, 2)
    with (
        load(folder, batch_size=8) as other,
        pytest.raises(ConfigError, match="12 samples into epoch 1, and batches of 8"),
    ):
        other.load_state_dict(state, allow=["plan"])


def scaled(picture: Any, by: float) -> Any:
    return picture


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, picture: Any) -> Any:
        return picture

    def __repr__(self) -> str:
        return f"Scale({self.by})"


def test_arguments_of_callables_are_compared_where_they_show_them_and_those_of_subsets(folder: Path) -> None:
    changes = (
        [{"transforms": [Resize((8, 8)), partial(scaled, by=by), ToTensor()]} for by in (1, 2)],
        [{"transforms": [Resize((8, 8)), Scale(by), ToTensor()]} for by in (1, 2)],
    )
    for one, two in changes:
        with load(folder, **one) as loader, load(folder, **two) as other:
            with load(folder, **one, state=loader.state_dict()):
                pass
            with pytest.raises(ConfigError, match=r"transforms\.steps was .*by.*1|Scale\(1\)"):
                other.load_state_dict(loader.state_dict())

    numbers: Any = list(range(50))
    of_others = Subset(numbers, range(1, 23))
    with load(Subset(numbers, range(22)), transforms=()) as loader:
        state = loader.state_dict()
    with load(Subset(numbers, range(22)), transforms=(), state=state):
        pass
    with (
        load(of_others, transforms=()) as other,
        pytest.raises(ConfigError, match=r"data\.indices"),
    ):
        other.load_state_dict(state)


#: What `by_factor` refers to.
FACTOR = 2


def by_factor(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": FACTOR * sample["x"]}


def halved(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x"] // 2}


def by(factor: int, sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": factor * sample["x"]}


def load_samples(function: Any = by_factor, **options: Any) -> Loader:
    data = [{"x": np.arange(1 + number % 3)} for number in range(12)]
    arguments: dict[str, Any] = {"padded": {"x": 0}, "optional": {"x": np.zeros(1, int)}, **options}
    return Loader(mapped(data, function), batch_size=4, epochs=2, seed=0, report=None, **arguments)


@pytest.mark.parametrize(
    ("was", "changes", "name"),
    [
        (
            {},
            {"padded": {"x": 1}},
            r"samples.padded was \['x: Padding\(value=0.* and is \['x: Padding\(value=1",
        ),
        ({}, {"padded": None, "ragged": ["x"]}, r"samples.ragged was \[\] and is \['x'\]"),
        ({}, {"optional": {"x": np.ones(1, int)}}, "samples.optional was"),
        ({}, {"optional": None}, r"samples.optional was .* and is \[\] here"),
        (
            {},
            {"function": halved},
            rf"samples.functions was {__name__}\.by_factor \(test_resume.py:\d+\) with the code [0-9a-f]{{16}} and is "
            rf"{__name__}\.halved \(test_resume.py:\d+\) with the code [0-9a-f]{{16}} here",
        ),
        (
            {"function": halved},
            {"function": dict},
            r"functions was .*halved .* and is builtins.dict with the code",
        ),
    ],
)
def test_how_samples_are_made_and_joined_is_compared_where_a_state_says_it(
    was: dict[str, Any], changes: dict[str, Any], name: str
) -> None:
    with load_samples(**was) as loader, load_samples(**{**was, **changes}) as other:
        list(loader)
        state = json.loads(json.dumps(loader.state_dict()))
        with load_samples(**was, state=state) as again:
            assert again.position == (1, 0)
        with pytest.raises(ConfigError, match=f"state is of another run: .*{name}") as refused:
            other.load_state_dict(state)
        other.load_state_dict(state, allow=ast.literal_eval(str(refused.value).partition("allow=")[2]))

    with load_samples(**{**was, **changes}) as other:
        del state["samples"]  # as a Penstock wrote that did not compare these
        other.load_state_dict(state)
        assert other.position == (1, 0)


class Factor:
    """Keeps a value of its process, which cannot be pickled, and what it was called with."""

    def __init__(self, factor: int) -> None:
        self.factor, self.lock, self.seen = factor, threading.Lock(), list[int]()

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(len(sample["x"]))
        return {"x": self.factor * sample["x"]}


def of_rank(rank: int) -> Any:
    return lambda sample: by(rank, sample)


@for_each("make", [lambda rank: partial(by, rank), Factor, of_rank, lambda rank: Factor(rank).__call__])
def test_a_function_may_use_other_values_on_each_rank_and_in_each_run(make: Any) -> None:
    with load_samples(make(1)) as loader, load_samples(make(2)) as other:
        list(loader)
        state = loader.state_dict()
        assert other.state_at(1, 0) == state
        other.load_state_dict(json.loads(json.dumps(state)))
        assert other.position == (1, 0)


def test_a_variable_of_a_module_is_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with load_samples() as loader:
        state = loader.state_dict()
        monkeypatch.setattr("tests.loader.test_resume.FACTOR", 3)
        with load_samples(state=state) as other:
            assert other.state_dict() == state


def test_functions_are_looked_at_when_a_state_is_asked_for_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = list[Any]()
    monkeypatch.setattr("penstock.loader.resume.digest_of_code", lambda function: looked.append(function))
    with load_samples() as loader:
        list(loader)
        assert not looked
        loader.state_dict()
    assert looked == [by_factor]


def test_a_file_or_line_of_the_same_code_may_be_another() -> None:
    with load_samples() as loader:
        state = loader.state_dict()
        state["samples"]["function_names"] = ["before.by_factor (before.py:1)"]
        loader.load_state_dict(state)
        state["samples"]["functions"] = ["0" * 16]
        with pytest.raises(
            ConfigError, match=r"before\.by_factor \(before\.py:1\) with the code 0{16} and is "
        ):
            loader.load_state_dict(state)


@for_each(
    ("one", "other"),
    [
        (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
        (torch.zeros(3, dtype=torch.float8_e4m3fn), torch.zeros(3, dtype=torch.float8_e5m2)),
        (torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)),
        (np.zeros(3), np.zeros(3, np.float32)),
    ],
)
def test_defaults_of_any_type_that_a_loader_takes_are_compared(one: Any, other: Any) -> None:
    def load(default: Any) -> Any:
        data = [{"x": default}, {}]
        return penstock.torch.Loader(
            data, batch_size=1, epochs=1, shuffle=False, optional={"x": default}, report=None
        )

    with load(one) as loader, load(one) as same, load(other) as differing:
        list(loader)
        state = loader.state_dict()
        same.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"samples\.optional was"):
            differing.load_state_dict(state)


def test_defaults_that_are_equal_in_two_processes_are_described_alike() -> None:
    def described(*parts: int) -> Any:
        default = {"a": set(parts), "b": [Factor(1), frozenset(parts)]}
        options = {"padded": None, "collate_fn": list, "optional": {"x": np.ones(1, int), "y": default}}
        with load_samples(dict, **options) as loader:
            return loader.state_dict()["samples"]["optional"]

    assert described(0, 8) == described(8, 0), "of which each is the other's order"
    assert described(0, 8) != described(0, 9)


def damaged() -> Sequence[tuple[Any, str]]:
    good = {"format": 1, "epoch": 0, "step": 0, "plan": {"batch_size": 4}}
    circular: dict[str, Any] = {"format": 1}
    circular["again"] = circular
    return [
        (None, "state is None; it must be what a loader's state_dict"),
        ([1], "state is"),
        ({}, "state is {}"),
        ('{"format": 1}', "state is text, .* give json.loads of it"),
        ({"loader": good}, r"its 'loader' is, perhaps"),
        (circular, "Circular reference.*: it is damaged"),
        ({"format": np.ones(2)}, "not JSON serializable.*: it is damaged"),
        ({"format": True}, "format True, which must be an integer"),
        ({"format": 2, "penstock": "9.0"}, "format 2, of Penstock '9.0', and this one reads 1"),
        ({"format": 1}, "epoch None, which must be an integer of at least 0: it is damaged"),
        (good | {"epoch": -1}, "epoch -1"),
        (good | {"step": True}, "step True"),
        (good | {"plan": 7}, "batch_size None"),
        (good | {"plan": {"batch_size": 0}}, "batch_size 0"),
        (good, "plan.samples was None and is 22 here"),
    ]


def test_what_is_no_state_is_refused(folder: Path) -> None:
    with load(folder, decoders=0) as loader:
        for state, text in damaged():
            with pytest.raises(ConfigError, match=text):
                loader.load_state_dict(state)


def test_a_state_is_loaded_before_the_run_begins_and_within_its_epochs(folder: Path) -> None:
    with load(folder) as loader:
        state = loader.state_at(2, 1)
        for allow, text in (
            ("pixels", r"allow is 'pixels': give a list of names, such as \['pixels'\]"),
            (None, "allow is None: give a list"),
            (["pixel"], "allow has 'pixel'; the names there are: .*plan.order, .*pixels.decoder"),
        ):
            with pytest.raises(ConfigError, match=text):
                loader.load_state_dict(state, allow=allow)  # type: ignore[arg-type]
        with (
            load(folder, epochs=2) as short,
            pytest.raises(ConfigError, match="are there fewer epochs or samples"),
        ):
            short.load_state_dict(state)
        next(iter(loader))
        with pytest.raises(
            ConfigError, match=r"load_state_dict\(\) comes before the first batch and start\(\)"
        ):
            loader.load_state_dict(state)
    with pytest.raises(ClosedError):
        loader.load_state_dict(state)

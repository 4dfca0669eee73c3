"""One snapshot of many ranks: over torch.distributed and MPI, between processes, and in pieces of any shape."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.ranks_state import LAYERS, arrays_of
from tests.for_each import for_each
from tests.forking import Forks
from tests.patience import brief, patient
from tests.ranks.in_memory import MemoryJob, run
from tests.ranks.jobs import reports_in, start_mpi_jobs, torch_job, torchrun_job, wait_for

from penstock.checkpoint import opened as opened_module
from penstock.checkpoint import writer as writer_module
from penstock.checkpoint.state.flatten import Shard, flatten
from penstock.checkpoint.store import SnapshotStore
from penstock.checkpoint.tiers.local import LocalDraft, LocalTier
from penstock.cli.main import main
from penstock.errors import ConfigError, DataError, RankError
from penstock.ranks import Ranks

SCRIPT = Path(__file__).with_name("store_ranks.py")
#: Over MPI, whose processes take long to start, ranks do nothing here that they do not do over the other.
KINDS = ("torch", pytest.param("mpi", marks=pytest.mark.slow))

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks
) -> dict[str, Path]:
    """Run the jobs of the tests that run, and return the folder of each kind."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("torch", "mpi")}
    torch, mpi = folders["torch"], folders["mpi"]

    def job(duty: str, size: int) -> list[list[str]]:
        return torch_job(
            str(torch), duty, size=size, address=f"file://{torch / duty.partition(',')[0]}-ranks"
        )

    rows = [[job("save,tiers", 4), job("reshard", 2)], [job("killed1", 3)], [job("killed0", 2)]]
    mpi_jobs = []
    if any("[mpi" in test.nodeid for test in request.session.items if test.path == request.path):
        mpi_jobs.append(start_mpi_jobs(SCRIPT, [(4, [str(mpi), "save"]), (2, [str(mpi), "reshard"])]))
    wait_for(forks.start(SCRIPT, rows), *mpi_jobs, killed=2)
    return folders


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture
def is_delta(folder: Path, folders: dict[str, Path]) -> bool:
    """Return whether snapshots are differences: over MPI they are not, see store_ranks.py."""
    return folder == folders["torch"]


@pytest.fixture
def reports(folder: Path) -> Reports:
    return reports_in(folder, "save", 4)


def said(reports: Reports, what: str) -> Any:
    """Return what all ranks report alike."""
    values = [report[what] for report in reports]
    assert values == [values[0]] * len(values)
    return values[0]


# -- Under torchrun ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torchrun_reports(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Reports:
    folder = tmp_path_factory.mktemp("torchrun")
    with SnapshotStore(folder / "before", codec="stored", report=None) as store:
        store.save(1, {"w": np.arange(3)})
    script = Path(__file__).with_name("store_torchrun.py")
    wait_for(forks.start(script, [[torchrun_job(str(folder), size=2)]]))
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(2)]


def test_a_job_that_torchrun_started_writes_one_snapshot_without_being_told_of_its_ranks(
    torchrun_reports: Reports,
) -> None:
    assert said([{"alone": report["is alone"]} for report in torchrun_reports], "alone") is False
    assert [report["together"] for report in torchrun_reports] == [
        [5, 499_500.0, {"rank": 0}],
        [5, 499_500.0, {"rank": 1}],
    ]


def test_before_the_ranks_know_each_other_a_store_is_read_and_a_save_names_what_to_do(
    torchrun_reports: Reports,
) -> None:
    assert said(torchrun_reports, "read before") == [0, 1, 2]
    refused = said(torchrun_reports, "refused")
    for part in ("WORLD_SIZE is 2", "init_process_group first", "ranks=alone"):
        assert part in refused
    assert torchrun_reports[1]["by itself"] == [0, 1, 2]


def test_ranks_that_ask_for_different_steps_are_told_so(tmp_path: Path) -> None:
    """Where each rank reads a snapshot of its own, it opens the store alone."""
    with SnapshotStore(tmp_path, codec="stored", report=None) as store:
        for step in (1, 2):
            store.save(step, {"step": step})

    def restore(ranks: Ranks) -> int:
        with SnapshotStore(tmp_path, ranks=lambda: ranks, report=None) as store:
            return store.restore(ranks.rank + 1).step

    outcomes = run(2, restore)

    assert all(isinstance(outcome, RankError) for outcome in outcomes)
    assert "rank 0 of 2 is at the restore of step 1, rank 1 at the restore of step 2" in str(outcomes[0])


# -- What all ranks write ------------------------------------------------------------------------------


def test_all_ranks_write_one_snapshot_as_a_difference_to_the_one_before(
    reports: Reports, is_delta: bool
) -> None:
    own_bytes = 4 * 2000
    raw_bytes = sum(array.nbytes for array in arrays_of(0).values()) + own_bytes
    assert said(reports, "saved") == [3, 2 if is_delta else None, raw_bytes]


def test_one_line_is_told_for_each_save(reports: Reports) -> None:
    assert [report["lines"] for report in reports] == [3, 0, 0, 0]


def test_every_tensor_is_stored_once_and_the_ranks_write_about_as_much(folder: Path) -> None:
    """Layers that all ranks have are shared out: none writes more than the mean and the largest of them."""
    manifest = json.loads(
        (folder / "store" / "step-000000000007" / "manifest.json").read_bytes().splitlines()[0]
    )

    names = [row[0] for row in manifest["tensors"]]
    written_bytes = [0] * 4
    for _, dtype, shape, _, part, _ in manifest["tensors"]:
        written_bytes[part] += int(np.prod(shape)) * np.dtype(dtype).itemsize

    assert [names.count(f"model/{name}") for name in LAYERS] == [1] * len(LAYERS)
    # Of rows and columns the last rank has less than the others, and writes more layers for it.
    assert max(written_bytes) <= sum(written_bytes) / 4 + 4 * max(LAYERS.values())


def test_the_whole_comes_back_on_every_rank(reports: Reports) -> None:
    assert said(reports, "whole")


def test_every_rank_gets_back_what_it_had_for_itself(reports: Reports) -> None:
    assert said(reports, "per rank")


@pytest.mark.parametrize("turn", [0, 1], ids=["as it was saved", "cut another way"])
def test_each_rank_restores_its_part_and_touches_nothing_else(reports: Reports, turn: int) -> None:
    assert said(reports, f"into {turn}") == [True, True, True, True, [], 3]


def test_all_ranks_decide_alike_whether_a_save_is_due(reports: Reports) -> None:
    """The clock of rank 0 says that it is, the others' that it is not."""
    assert said(reports, "is due") is True


def test_the_snapshot_is_restored_by_one_process(folder: Path) -> None:
    with SnapshotStore(folder / "store", report=None) as store:
        restored = store.restore(7)
        assert {one.condition for one in store.verify()} == {"intact"}

    for name, array in arrays_of(7).items():
        np.testing.assert_array_equal(restored["model"][name], array)
    assert (restored["step"], restored["rates"], restored.per_rank) == (7, [0.1, 0.2], None)


def test_another_number_of_ranks_restores_its_parts_and_goes_on_with_a_baseline(
    folder: Path, is_delta: bool
) -> None:
    reports = reports_in(folder, "reshard", 2)
    assert said(reports, "rows")
    assert said(reports, "columns")
    assert said(reports, "per rank") is None
    assert said(reports, "first") == [8, None]
    assert said(reports, "second") == [9, 8 if is_delta else None]


def test_retention_counts_snapshots_of_all_ranks(folder: Path, is_delta: bool) -> None:
    """Of 1, 2, 3, 7 the two latest stay, and what they are differences to; then five of any."""
    steps = [int(path.name.partition("-")[2]) for path in sorted((folder / "store").glob("step-*"))]
    assert steps == ([1, 2, 3, 7, 8, 9] if is_delta else [3, 7, 8, 9])


def test_a_snapshot_of_many_ranks_is_exported_whole(folder: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    main(
        [
            "snapshots", "export", str(folder / "store"), str(tmp_path / "out"), "--step", "7", "--part",
            "model",
        ]
    )  # fmt: skip

    exported = load_file(tmp_path / "out" / "model.safetensors")
    expected = arrays_of(7)
    assert exported.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(exported[name], array)


# -- What fails on one rank ----------------------------------------------------------------------------


def test_a_full_disk_on_one_rank_is_raised_on_all(reports: Reports) -> None:
    kind, message = said(reports, "full")
    assert kind == "DataError"
    assert message.startswith("rank 3 of 4, the commit of step 4: ")
    assert message.endswith("part-00003.pst: No space left on device: step 4 was not saved")


def test_what_failed_in_the_background_is_raised_on_all_at_the_next_save(reports: Reports) -> None:
    kind, message = said(reports, "full at the next save")
    assert kind == "DataError"
    assert message.startswith("rank 3 of 4, the commit of step 5: ")
    assert "No space left on device" in message


def test_an_unsupported_value_on_one_rank_is_refused_by_name_on_all(reports: Reports) -> None:
    kind, message = said(reports, "unsupported")
    assert kind == "ConfigError"
    assert message.startswith(
        "rank 3 of 4, the state of step 4: x is an object, which a snapshot does not hold"
    )


def test_a_name_that_only_one_rank_has_is_refused(reports: Reports) -> None:
    """Else its numbers would be written, and no tree would speak of them."""
    kind, message = said(reports, "another name")
    assert (kind, message.partition(":")[0]) == ("ConfigError", "rank 3 has y, which rank 0 has not")


def test_parts_that_do_not_make_up_the_whole_are_refused(reports: Reports) -> None:
    assert said(reports, "gap") == ["ConfigError", "z lacks [16:17]: no rank holds that part of (17,)"]


def test_a_step_that_is_there_already_is_refused_on_all(reports: Reports) -> None:
    kind, message = said(reports, "twice")
    assert kind == "ConfigError"
    assert "there is a snapshot of step 3" in message


def test_a_step_that_is_not_there_is_refused_on_all(reports: Reports) -> None:
    kind, message = said(reports, "missing")
    assert (kind, message[-31:]) == ("ConfigError", "the nearest are of step 2 and 3")


def test_failed_saves_leave_nothing_and_the_next_is_a_difference_again(
    reports: Reports, is_delta: bool
) -> None:
    assert said(reports, "left") == []
    assert said(reports, "after failures") == [7, 3 if is_delta else None]


# -- A rank that is killed -----------------------------------------------------------------------------


@pytest.mark.parametrize(("victim", "size"), [(1, 3), (0, 2)])
def test_a_rank_that_is_killed_during_a_save_is_named_and_the_store_is_whole(
    folders: dict[str, Path], victim: int, size: int
) -> None:
    folder = folders["torch"]
    for rank in set(range(size)) - {victim}:
        report = json.loads((folder / f"report-killed{victim}-{rank}.json").read_text())
        kind, message = report["killed"]
        assert kind == "WaitTimeout"
        assert message.startswith(
            f"rank {victim} of {size} did not arrive at the commit of step 2 within {brief(3):g} s"
        )
    store_folder = folder / f"killed-{victim}"
    assert not (store_folder / "step-000000000002").exists()

    # The next job sweeps what rank 0, if it was the victim, could not.
    with SnapshotStore(store_folder, report=None) as store:
        np.testing.assert_array_equal(store.restore()["model"]["rows"], arrays_of(1)["rows"])
        store.save(2, {"again": np.zeros(3)}).wait()
        assert [one.condition for one in store.list()] == ["intact", "intact"]
    assert not list(store_folder.glob(".unfinished*"))


# -- Two tiers -----------------------------------------------------------------------------------------


def test_all_ranks_write_to_the_fast_tier_and_rank_0_drains(folders: dict[str, Path]) -> None:
    reports = reports_in(folders["torch"], "save", 4)
    assert said(reports, "from fast")
    with SnapshotStore(folders["torch"] / "slow", report=None) as store:
        restored = store.restore()
        assert restored.step == 5
        np.testing.assert_array_equal(restored["model"]["columns"], arrays_of(5)["columns"])
        assert [one.condition for one in store.verify()] == ["intact"] * len(store.list())


def test_a_drain_that_failed_on_rank_0_is_raised_on_all(folders: dict[str, Path]) -> None:
    reports = reports_in(folders["torch"], "save", 4)
    kind, message = said(reports, "drain failed")
    assert (kind, message[:24]) == ("DataError", "rank 0 of 4, the drain: ")
    kind, message = said(reports, "save after it")
    assert kind == "DataError"
    assert message.startswith("rank 0 of 4, the state of step 5: ")
    assert "No space left on device" in message


CALLS: dict[str, Callable[[SnapshotStore], Any]] = {
    "restore": lambda store: store.restore(),
    "prepare": lambda store: store.prepare({"a": np.arange(3)}, steps=[2]),
    "rewind": lambda store: store.rewind(1),
    "delete": lambda store: store.delete(1),
    "close": lambda store: store.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_a_drain_failed_with_is_raised_on_all_ranks_by_whatever_is_next(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away(LocalTier):
        def begin(self, folder: str, uid: str, *, join: bool = False) -> LocalDraft:
            raise DataError("the slow tier is away")

    monkeypatch.setattr(opened_module, "open_tier", lambda folder, options=None: Away(folder))

    def part(ranks: Ranks) -> list[str]:
        store = SnapshotStore(
            tmp_path / "slow", fast=tmp_path / "fast", ranks=lambda: ranks, report=None, threads=1
        )
        store.save(1, {"a": np.arange(3)}).wait()
        drainer = store._drainer
        assert drainer is not None
        with drainer._changed:
            assert drainer._changed.wait_for(lambda: drainer._thread is None, 60)
        with pytest.raises(DataError) as raised:
            CALLS[call](store)
        if call != "close":
            with pytest.raises(DataError, match="the end of the drain: the slow tier is away"):
                store.close()  # which tried again
        return [str(raised.value).partition(",")[0], str(raised.value).rpartition(": ")[2]]

    assert run(2, part) == [["rank 0 of 2", "the slow tier is away"]] * 2


class NeverDue:
    """A schedule that all ranks have to agree on."""

    is_known_ahead = False
    least_seconds = 0.0

    def steps(self, until: int, **_: Any) -> Any:
        raise AssertionError("nobody knows them ahead")

    def is_due(self, *_: Any) -> bool:
        return False


def test_a_failure_that_one_rank_knows_earlier_is_raised_on_all_when_they_ask_whether_to_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 0 has heard that the save failed; on rank 1 the thread that did is about to end."""
    deciding = MemoryJob(2)
    asked, may_end = threading.Event(), threading.Event()

    def part(ranks: Ranks) -> Any:
        own = [ranks, Ranks(deciding.transport(ranks.rank), timeout_seconds=patient(30))]
        store = SnapshotStore(
            tmp_path, ranks=lambda: own.pop(0), report=None, threads=1, codec="stored", schedule=NeverDue()
        )

        def fail(*_: Any, **__: Any) -> Any:
            raise DataError("the disk is full")

        monkeypatch.setattr(writer_module, "write_staged", fail)
        if ranks.rank == 1:
            store._report = lambda _: may_end.wait(60)  # type: ignore[assignment]
            together = store._due.ranks.gather_then_decide  # type: ignore[union-attr]
            store._due.ranks.gather_then_decide = lambda *those: (asked.set(), together(*those))[1]  # type: ignore
        saving = store.save(1, {"a": np.arange(5)})
        try:
            if ranks.rank == 0:
                with pytest.raises(DataError):
                    saving.wait()
                store._saving._was_reported = False  # type: ignore[union-attr]
            store.is_due(2)
        except Exception as error:
            return type(error), "the disk is full" in str(error)
        finally:
            if ranks.rank == 0:
                assert asked.wait(60)
                may_end.set()
            store.close()

    assert run(2, part) == [(DataError, True)] * 2


def test_a_copy_that_is_interrupted_on_one_rank_is_no_refusal_of_the_fast_tier(tmp_path: Path) -> None:
    def part(ranks: Ranks) -> str:
        def interrupt(*_: Any) -> Any:
            raise KeyboardInterrupt

        store = SnapshotStore(
            tmp_path / "slow",
            fast=tmp_path / "fast",
            ranks=lambda: ranks,
            report=None,
            threads=1,
            codec="stored",
        )
        with store:
            if ranks.rank == 1:
                area = store._writer.areas[0]
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(area, "copy", interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        store.save(1, {"a": np.arange(5)})
            else:
                with pytest.raises(
                    RankError, match="rank 1 of 2, the commit of step 1: the state was not copied"
                ):
                    store.save(1, {"a": np.arange(5)}).wait()
            return store.save(2, {"a": np.arange(5)}).wait().tier

    assert run(2, part) == [str(tmp_path / "fast")] * 2


def test_a_rank_without_the_memory_for_a_copy_is_named_on_all(tmp_path: Path) -> None:
    def part(ranks: Ranks) -> list[str]:
        store = SnapshotStore(tmp_path, ranks=lambda: ranks, report=None, threads=1, codec="stored")

        def refuse(nbytes: int) -> None:
            raise MemoryError(f"no {nbytes} bytes")

        if ranks.rank == 1:
            for area in store._writer.areas:
                area.reserve = refuse  # type: ignore[method-assign]
        with pytest.raises(
            RankError, match=r"rank 1 of 2, the beginning of step 1: MemoryError: no [0-9]+ bytes"
        ):
            store.save(1, {"a": np.arange(5)})
        store.close()
        return [path.name for path in tmp_path.glob(".unfinished*")]

    assert run(2, part) == [[], []]


def test_a_value_that_one_rank_cannot_save_is_named_on_all_before_the_first_step(tmp_path: Path) -> None:
    def part(ranks: Ranks) -> None:
        with SnapshotStore(tmp_path, ranks=lambda: ranks, report=None, threads=1, codec="stored") as store:
            state = {"a": np.arange(5), "b": object() if ranks.rank == 1 else 0}
            with pytest.raises(ConfigError, match="b is an object"):
                store.prepare(state)

    assert run(2, part) == [None, None]


def test_a_rank_that_fails_by_itself_waits_for_no_other_when_its_store_closes(tmp_path: Path) -> None:
    def part(ranks: Ranks) -> str:
        with SnapshotStore(
            tmp_path / "slow", fast=tmp_path / "fast", ranks=lambda: ranks, report=None, threads=1
        ) as store:
            store.save(1, {"a": np.arange(3)}).wait()
            if ranks.rank == 1:
                raise ZeroDivisionError
            failed.wait(60)
            raise KeyboardInterrupt
        raise AssertionError("an exception ends the block")

    failed = threading.Event()

    def judged(ranks: Ranks) -> str:
        try:
            return part(ranks)
        except BaseException as error:
            return type(error).__name__
        finally:
            if ranks.rank == 1:
                failed.set()

    assert run(2, judged) == ["KeyboardInterrupt", "ZeroDivisionError"]


@for_each("schedule", [None, NeverDue()], ids=["save", "is_due"])
@for_each("leaver", [0, 1])
def test_a_rank_that_leaves_the_block_by_an_exception_is_named_by_the_others_at_their_next_call(
    tmp_path: Path, leaver: int, schedule: Any
) -> None:
    deciding = MemoryJob(2)
    left = threading.Event()

    def part(ranks: Ranks) -> str:
        own = [ranks, Ranks(deciding.transport(ranks.rank), timeout_seconds=patient(30))]
        with SnapshotStore(
            tmp_path, ranks=lambda: own.pop(0), report=None, threads=1, schedule=schedule
        ) as store:
            store.save(1, {"a": np.arange(3)})
            if ranks.rank == leaver:
                raise ZeroDivisionError("no loss")
            assert left.wait(60)
            if schedule is None:
                store.save(2, {"a": np.arange(3)})
            else:
                store.is_due(2)
        raise AssertionError("an exception ends the block")

    def judged(ranks: Ranks) -> str:
        try:
            return part(ranks)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if ranks.rank == leaver:
                left.set()

    told = run(2, judged)

    assert told[leaver] == "ZeroDivisionError: no loss"
    assert told[1 - leaver] == f"RankError: rank {leaver} of 2 left the others: ZeroDivisionError: no loss"
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000000001"]


# -- Parts of any shape --------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple) | st.just((700, 401))


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[tuple[int, int]]], list[tuple[int, int]]]:
    """Return a shape, the boxes that make it up, and any box of it; a box is begin and end per dimension."""
    shape = draw(SHAPES)
    boxes = [[(0, size) for size in shape]]
    for _ in range(draw(st.integers(0, 3))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        begin, end = box[dimension]
        cut = draw(st.integers(begin, end))
        boxes += [[*box[:dimension], part, *box[dimension + 1 :]] for part in ((begin, cut), (cut, end))]
    wanted = []
    for size in shape:
        begin = draw(st.integers(0, size))
        wanted.append((begin, draw(st.integers(begin, size))))
    return shape, boxes, wanted


def part(array: Any, box: list[tuple[int, int]]) -> Shard:
    place = tuple(slice(begin, end) for begin, end in box)
    return Shard(array[place], array.shape, tuple(begin for begin, _ in box))


@settings(max_examples=20)
@given(cut=cut_arrays(), dtype=st.sampled_from(["uint8", "float16", "complex128"]), is_copy=st.booleans())
def test_any_part_is_restored_from_parts_of_any_shape(
    tmp_path_factory: pytest.TempPathFactory, cut: Any, dtype: str, is_copy: bool
) -> None:
    """Every box is held by a rank, and all by the last one's neighbour, too; then one process wants another box."""
    shape, boxes, wanted = cut
    whole = np.random.default_rng(1).integers(0, 200, shape).astype(dtype)
    folder = tmp_path_factory.mktemp("parts")

    def save(ranks: Ranks) -> None:
        own = part(whole, boxes[ranks.rank % len(boxes)])
        if is_copy:
            own = Shard(own.array.copy(), own.whole, own.offsets)
        with SnapshotStore(folder, ranks=lambda: ranks, codec="stored", report=None, threads=1) as store:
            store.save(1, {"a": {"b": own}, "c": np.arange(3)})

    assert run(len(boxes) + 1, save) == [None] * (len(boxes) + 1)

    target = np.zeros(shape, dtype)
    into = {"a": {"b": part(target, wanted)}, "c": None}
    with SnapshotStore(folder, report=None) as store:
        np.testing.assert_array_equal(store.restore()["a"]["b"], whole)
        store.restore(into=into)
    expected = np.zeros(shape, dtype)
    place = tuple(slice(begin, end) for begin, end in wanted)
    expected[place] = whole[place]
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(into["c"], np.arange(3))


def test_only_the_blocks_that_a_part_meets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of four blocks, of which rows of the second are wanted: the others may be damaged."""
    from penstock.checkpoint.files.reading import Chain

    whole = np.arange(4 * 131072, dtype=np.int32).reshape(4 * 128, 1024)
    with SnapshotStore(tmp_path, codec="stored", report=None) as store:
        store.save(1, {"w": whole})
        blocks: list[int] = []
        read = Chain.read_block

        def noted(self: Chain, stored: Any, index: int, *rest: Any) -> None:
            blocks.append(index)
            read(self, stored, index, *rest)

        monkeypatch.setattr(Chain, "read_block", noted)
        target = np.zeros((100, 10), np.int32)
        store.restore(into={"w": Shard(target, whole.shape, (130, 7))})

    assert blocks == [1]
    np.testing.assert_array_equal(target, whole[130:230, 7:17])


# -- What a Shard is, and is not -----------------------------------------------------------------------


@for_each(
    ("array", "whole", "offsets", "told"),
    [
        (np.zeros(3), (5,), (3,), r"shape \(3,\) at \(3,\) does not lie within the whole, \(5,\)"),
        (np.zeros(3), (5, 5), (0, 0), "whole of a Shard is .*give 1 integers of 0 or more"),
        (np.zeros(3), (5,), (-1,), "offsets of a Shard is"),
        ([1, 2], (5,), (0,), "a Shard is of a list; it must be a tensor or a NumPy array"),
    ],
)
def test_a_shard_that_cannot_be_is_refused(array: Any, whole: Any, offsets: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Shard(array, whole, offsets)


def test_one_process_alone_must_have_all_parts(tmp_path: Path) -> None:
    with (
        SnapshotStore(tmp_path, report=None) as store,
        pytest.raises(ConfigError, match=r"w lacks \[3:5\]: no rank holds that part of \(5,\)"),
    ):
        store.save(1, {"w": Shard(np.zeros(3), (5,), (0,))})


def test_a_shard_of_another_whole_is_refused_by_name(tmp_path: Path) -> None:
    with SnapshotStore(tmp_path, report=None) as store:
        store.save(1, {"m": {"w": np.zeros((5, 2))}})
        with pytest.raises(
            ConfigError, match=r"m/w is of shape \(5, 2\) in the snapshot and a part of shape \(6, 2\)"
        ):
            store.restore(into={"m": {"w": Shard(np.zeros((1, 2)), (6, 2), (0, 0))}})
        with pytest.raises(ConfigError, match=r"m/w is float64 of shape .* and float32"):
            store.restore(into={"m": {"w": Shard(np.zeros((1, 2), np.float32), (5, 2), (0, 0))}})


def test_two_parts_of_one_shared_array_are_filled_from_it(tmp_path: Path) -> None:
    """Tied weights, of which two layers want different rows."""
    shared = np.arange(12.0).reshape(6, 2)
    first, second = np.zeros((2, 2)), np.zeros((3, 2))
    with SnapshotStore(tmp_path, report=None) as store:
        store.save(1, {"a": shared, "b": shared, "t": shared.T})
        rows = np.zeros((1, 6))
        store.restore(
            into={
                "a": Shard(first, (6, 2), (1, 0)),
                "b": Shard(second, (6, 2), (3, 0)),
                "t": Shard(rows, (2, 6), (1, 0)),
            }
        )
    np.testing.assert_array_equal(first, shared[1:3])
    np.testing.assert_array_equal(second, shared[3:6])
    np.testing.assert_array_equal(rows, shared.T[1:2])


def test_a_part_keeps_its_flags_and_its_order_of_bytes(tmp_path: Path) -> None:
    import torch

    weight = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))
    big = np.arange(4, dtype=">i4")
    with SnapshotStore(tmp_path, report=None) as store:
        store.save(
            1,
            {
                "w": Shard(weight, (3, 2), (0, 0)),
                "t": Shard(weight.detach().T, (2, 3), (0, 0)),
                "b": Shard(big, (4,), (0,)),
            },
        )
        restored = store.restore()
    assert isinstance(restored["w"], torch.nn.Parameter)
    assert torch.equal(restored["w"], weight)
    assert torch.equal(restored["t"], weight.detach().T)
    assert restored["b"].dtype == big.dtype
    np.testing.assert_array_equal(restored["b"], big)


def test_empty_parts_of_all_ranks_are_one(tmp_path: Path) -> None:
    one = flatten({"w": Shard(np.zeros((0, 4)), (6, 4), (2, 0))}).layouts
    other = flatten({"w": Shard(np.zeros((3, 0)), (6, 4), (1, 3))}).layouts
    assert one == other

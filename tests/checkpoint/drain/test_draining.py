"""A burst buffer: what is committed to the fast tier comes to the slow one bit for bit, whatever happens on the way."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.checkpoint.boxes import save_rows
from tests.checkpoint.slow_tier import BIG, SlowTier, state_of
from tests.checkpoint.snapshot_files import steps_in
from tests.forking import Forks
from tests.interrupting import is_asleep
from tests.patience import patient

from penstock.checkpoint import Keep, SnapshotStore
from penstock.checkpoint import opened as opened_module
from penstock.checkpoint.drain.draining import Drainer
from penstock.checkpoint.housekeeping import Housekeeping
from penstock.checkpoint.recipe import RAW, EncodingConfig, check_part
from penstock.checkpoint.saving import outcome_of
from penstock.checkpoint.staged import FromChain
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Piece
from penstock.checkpoint.tiers.local import LocalDraft, LocalWriter
from penstock.checkpoint.tiers.throttle import Cap
from penstock.checkpoint.tiers.tier import MANIFEST
from penstock.errors import ConfigError, DataError, FormatError

#: Of a test's small states, as a tier counts them before they are written.
TABLES_BYTES = 16 << 10


def assert_is(restored: Any, step: int, nbytes: int = BIG) -> None:
    assert restored["step"] == step
    assert restored["weights"].tobytes() == state_of(step, nbytes)["weights"].tobytes()


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def flip(folder: Path, step: int) -> None:
    """Flip a bit in the middle of the largest file of a snapshot."""
    part = max((folder / f"step-{step:012d}").iterdir(), key=lambda path: path.stat().st_size)
    with part.open("r+b") as opened:
        opened.seek(part.stat().st_size // 3)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 4]))


Opened = Callable[..., SnapshotStore]


@pytest.fixture
def top() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder).resolve()


@pytest.fixture
def slow(top: Path) -> SlowTier:
    return SlowTier(top / "slow")


@pytest.fixture
def opened(top: Path, slow: SlowTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Return what opens a store over `slow` and a fast tier; what it reports goes to `told` of it."""
    monkeypatch.setattr(opened_module, "open_tier", lambda folder, options=None: slow)
    stores: list[SnapshotStore] = []

    def make(**settings: Any) -> SnapshotStore:
        told: list[str] = []
        arguments: dict[str, Any] = {"threads": 1, "report": told.append, "keep": Keep(last=None)} | settings
        store = SnapshotStore(top / "slow", fast=top / "fast", **arguments)
        store.told = told  # type: ignore[attr-defined]
        stores.append(store)
        return store

    yield make
    slow.let(1_000_000)
    for store in stores:
        store.close()


def told(store: SnapshotStore) -> list[str]:
    lines: list[str] = store.told  # type: ignore[attr-defined]
    return lines


# -- What is drained ---------------------------------------------------------------------------------------


def tree_of_all_types(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    words = generator.integers(0, 256, 8192, np.uint8)
    dtypes = [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ]
    dtypes += [
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.complex64,
        torch.complex128,
    ]
    shared = torch.from_numpy(words.copy()).view(torch.float32)
    return {
        "tensors": {str(dtype): torch.from_numpy(words.copy()).view(dtype) for dtype in dtypes},
        "bool": torch.from_numpy(words < 100),
        "empty": torch.empty(3, 0),
        "scalar": torch.tensor(float(seed)),
        "row": torch.arange(50.0).reshape(5, 10).T,
        "shared": [shared, shared[10:20]],
        "numpy": words[::3],
        "plain": (1, "two", 3.5, None, b"four", 2**70, float("nan")),
        "half a megabyte": np.arange(150_000, dtype=np.float32) * np.float32(seed),
    }


def raw(value: Any) -> Any:
    """Return a value as what compares bit for bit."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous()
        words = flat.reshape(-1).view(torch.uint8) if flat.numel() and flat.dtype != torch.bool else flat
        return str(value.dtype), tuple(value.shape), words.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: raw(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(raw, value)]
    return repr(value)


def test_what_is_drained_is_what_was_saved_whatever_it_is(top: Path) -> None:
    with SnapshotStore(top / "slow", fast=top / "fast", threads=2, report=None) as store:
        for step in (1, 2, 3):
            store.save(step, tree_of_all_types(step), per_rank={"random": torch.arange(step + 1)}).wait()
    shutil.rmtree(top / "fast")

    with SnapshotStore(top / "slow", report=None) as store:
        listed = store.list()
        assert listed[0].reference_step is None
        for one in listed:
            restored = store.restore(step=one.step)
            assert raw(dict(restored)) == raw(tree_of_all_types(one.step))
            assert restored.per_rank["random"].tolist() == list(range(one.step + 1))
            first, second = restored["shared"]
            assert first.data_ptr() + 40 == second.data_ptr(), "what shared memory, shares it again"
        assert [one.condition for one in store.verify()] == ["intact"] * 3


def test_on_the_slow_tier_snapshots_are_differences_and_those_on_the_fast_one_go_by_themselves(
    opened: Opened, top: Path
) -> None:
    with opened(codec="balance", snap_dis=3) as store:
        for step in range(1, 6):
            store.save(step, state_of(step)).wait()
            store.drain()
    shutil.rmtree(top / "fast")

    with SnapshotStore(top / "slow", report=None) as store:
        assert [one.reference_step for one in store.list()] == [None, 1, 2, None, 4]
        for step in range(1, 6):
            assert_is(store.restore(step=step), step)


@pytest.mark.parametrize(
    "on_fast", [EncodingConfig("complete", 1, RAW), EncodingConfig("complete", 1, "balance")]
)
def test_parts_of_a_tensor_that_is_spread_over_ranks_stay_parts(top: Path, on_fast: EncodingConfig) -> None:
    generator = np.random.default_rng(1)
    tables = [generator.normal(size=(40, 5)).astype(np.float32) for _ in range(2)]
    for step, table in enumerate(tables):
        save_rows(top / "fast", step, table, way=on_fast)

    with SnapshotStore(top / "slow", fast=top / "fast", report=None) as store:
        store.drain()
    shutil.rmtree(top / "fast")

    manifest = json.loads((top / "slow" / "step-000000000001" / "manifest.json").read_bytes().splitlines()[0])
    assert len(manifest["tensors"]) == 2
    with SnapshotStore(top / "slow", report=None) as store:
        for step, table in enumerate(tables):
            assert store.restore(step=step)["table"].tobytes() == table.tobytes()


def test_a_snapshot_larger_than_a_wave_is_drained_in_pieces(
    opened: Opened, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.checkpoint.staged._WAVE_BYTES", 1 << 20)
    nbytes = 3 * 1024 * 1024 + 20
    with opened(codec="dynrle") as store:  # which looks at everything before it writes
        for step in (1, 2):
            store.save(step, state_of(step, nbytes) | {"second": np.arange(700_000)}).wait()
    shutil.rmtree(top / "fast")

    with SnapshotStore(top / "slow", report=None) as store:
        for step in (1, 2):
            restored = store.restore(step=step)
            assert_is(restored, step, nbytes)
            assert np.array_equal(restored["second"], np.arange(700_000))


def test_a_codec_that_looks_at_everything_first_is_shown_it_block_by_block(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a drain needs as much memory as the largest tensor, which may be most of the state."""
    monkeypatch.setattr("penstock.checkpoint.staged._WAVE_BYTES", 1 << 20)
    shown: list[int] = []
    again = FromChain.again

    def counted(waves: FromChain) -> Iterator[Piece]:
        for piece in again(waves):
            shown.append(piece.data.size)
            yield piece

    monkeypatch.setattr(FromChain, "again", counted)
    nbytes = 5 * 4 * BLOCK_VALUES + 20
    with SnapshotStore(top / "slow", fast=top / "fast", codec="dynrle", threads=1, report=None) as store:
        for step in (1, 2):
            store.save(step, state_of(step, nbytes)).wait()
    with SnapshotStore(top / "in memory", codec="dynrle", threads=1, report=None) as store:
        for step in (1, 2):
            store.save(step, state_of(step, nbytes)).wait()

    assert shown == 2 * [*5 * [4 * BLOCK_VALUES], 20]
    slow, in_memory = (
        [path.stat().st_size for path in sorted((top / name).glob("step-*/part-*"))]
        for name in ("slow", "in memory")
    )
    assert slow == in_memory, "it chose what it chooses where it sees whole tensors"


def test_an_object_store_may_be_the_slow_tier(top: Path) -> None:
    address = f"memory://draining-{secrets.token_hex(6)}/runs"
    with SnapshotStore(address, fast=top / "fast", threads=1, report=None) as store:
        for step in (1, 2, 3):
            store.save(step, state_of(step)).wait()
    shutil.rmtree(top / "fast")

    with SnapshotStore(address, report=None) as store:
        assert store.list()[-1].step == 3
        for one in store.verify():
            assert one.condition == "intact"
            assert_is(store.restore(step=one.step), one.step)


# -- Where a restore reads ---------------------------------------------------------------------------------


def test_a_restore_reads_the_nearest_copy_and_the_other_where_that_is_damaged_or_torn(
    opened: Opened, top: Path
) -> None:
    with opened() as store:
        for step in (1, 2, 3, 4):
            store.save(step, state_of(step)).wait()
        store.drain()
    flip(top / "fast", 1)
    (top / "fast" / "step-000000000002" / "part-00000.pst").unlink()
    (top / "fast" / "step-000000000003" / "manifest.json").write_bytes(b"{}")
    flip(top / "slow", 4)

    with opened() as store:
        for step in (1, 2, 3, 4):
            assert_is(store.restore(step=step), step)
        assert [one.condition for one in store.verify()] == ["intact"] * 4

    flip(top / "slow", 2)
    with opened() as store:
        with pytest.raises(FormatError, match="part-00000"):
            store.restore(step=2)
        conditions = {one.step: one.condition for one in store.verify()}
        assert conditions[2] != "intact"
        assert (conditions[1], conditions[4]) == ("intact", "intact")
        assert_is(store.restore(fallback=True), 4)


@pytest.mark.parametrize("damaged", ["fast", "slow"])
def test_a_difference_on_the_slow_tier_is_made_with_whichever_copy_of_its_reference_is_good(
    opened: Opened, top: Path, damaged: str
) -> None:
    with opened() as store:
        for step in (1, 2, 3):
            store.save(step, state_of(step)).wait()
            store.drain()
    flip(top / damaged, 2)
    shutil.rmtree(top / "fast" / "step-000000000003")

    with opened() as store:
        assert [one.reference_step for one in store.list()][2] == 2
        assert_is(store.restore(step=3), 3)


# -- A full fast tier --------------------------------------------------------------------------------------


def test_what_has_no_space_on_the_fast_tier_goes_to_the_slow_one_and_its_line_says_so(
    opened: Opened, slow: SlowTier, top: Path
) -> None:
    slow.permits = 0
    store = opened(fast_bytes=TABLES_BYTES + 2 * BIG + BIG // 2)
    saved = [store.save(step, state_of(step)).wait() for step in (1, 2, 3, 4)]

    assert [one.tier for one in saved] == [str(top / "fast")] * 2 + [str(top / "slow")] * 2
    assert all("the snapshot takes up to" in line and "at once" in line for line in told(store)[2:])
    assert told(store)[0].endswith("baseline")
    assert steps_in(top / "slow") == [3, 4]
    for step in (1, 2, 3, 4):
        assert_is(store.restore(step=step), step)

    slow.let(100)
    store.drain()
    assert store.save(5, state_of(5)).wait().tier == str(top / "fast"), "what is drained made space"
    assert steps_in(top / "slow")[:4] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "state",
    [
        {"weights": np.arange(75_000.0)},
        {"model": {f"{'layer.' * 20}{number}": np.arange(3.0) for number in range(200)}},
        {"plain": {str(number): [number, "text" * 20] for number in range(500)}, "w": np.arange(10)},
    ],
    ids=["0.6 MB", "many small tensors", "much beside the tensors"],
)
def test_the_fast_tier_reserves_what_a_snapshot_takes_and_little_more(
    top: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.6 MB were refused with 1.49 MB free: a megabyte was reserved for the tables of any state."""
    reserved: list[int] = []
    why_not_fast = Housekeeping.why_not_fast

    def noted(self: Housekeeping, nbytes: int) -> Any:
        reserved.append(nbytes)
        return why_not_fast(self, nbytes)

    monkeypatch.setattr(Housekeeping, "why_not_fast", noted)
    with SnapshotStore(top / "slow", fast=top / "fast", fast_bytes="1.49 MB", report=None) as store:
        own = {"random": list(range(3_000))}
        saved = store.save(1, state, per_rank=own).wait()

    assert saved.tier == str(top / "fast")
    assert saved.stored_bytes <= reserved[0] < 1.05 * saved.stored_bytes + 20_000


def test_a_state_that_never_fits_the_fast_tier_is_saved_nevertheless(opened: Opened, top: Path) -> None:
    with opened(fast_bytes=1000) as store:
        for step in (1, 2):
            assert store.save(step, state_of(step)).wait().tier == str(top / "slow")
            assert_is(store.restore(), step)
        assert not steps_in(top / "fast")


def test_a_slow_tier_that_hangs_when_a_drain_begins_holds_up_no_save(
    opened: Opened, slow: SlowTier, monkeypatch: pytest.MonkeyPatch, top: Path
) -> None:
    begin = SlowTier.begin

    def hang(self: SlowTier, *arguments: Any, **named: Any) -> LocalDraft:
        self._wait()
        return begin(self, *arguments, **named)

    monkeypatch.setattr(SlowTier, "begin", hang)
    slow.permits = 0
    store = opened()
    for step in (1, 2, 3):
        store.save(step, state_of(step)).wait()
        slow.wait_until_quiet(store)
        assert slow.is_waiting
    assert steps_in(top / "fast") == [1, 2, 3]


# -- Failures ----------------------------------------------------------------------------------------------


def test_a_slow_tier_that_refuses_is_told_once_and_nothing_is_lost(
    opened: Opened, slow: SlowTier, top: Path
) -> None:
    slow.refusals = [DataError("the slow tier is away"), DataError("it is still away")]
    store = opened()
    store.save(1, state_of(1)).wait()
    slow.wait_until_quiet(store)

    with pytest.raises(DataError, match="the slow tier is away") as raised:
        store.save(2, state_of(2))
    assert "while step 1 was drained" in raised.value.__notes__[0]
    store.save(2, state_of(2)).wait()
    slow.wait_until_quiet(store)
    assert steps_in(top / "slow") == []
    with pytest.raises(DataError, match="it is still away"):
        store.drain()
    store.drain()

    assert steps_in(top / "slow") == [1, 2]
    store.close()
    for step in (1, 2):
        with SnapshotStore(top / "slow", report=None) as reader:
            assert_is(reader.restore(step=step), step)


def test_what_a_drain_failed_with_is_raised_by_close_if_by_nothing_before(
    opened: Opened, slow: SlowTier, top: Path
) -> None:
    slow.refusals = [DataError("the slow tier is away")]
    store = opened()
    store.save(1, state_of(1)).wait()

    with pytest.raises(DataError, match="the slow tier is away"):
        store.close()

    store.close()  # twice is harmless, and it is told once
    with opened() as store:
        store.drain()
        assert steps_in(top / "slow") == [1]


def test_a_failure_of_any_kind_is_told(opened: Opened, slow: SlowTier) -> None:
    slow.refusals = [MemoryError("no memory for a drain")]
    store = opened()
    store.save(1, state_of(1)).wait()

    with pytest.raises(MemoryError, match="no memory for a drain"):
        store.drain()

    store.drain()
    assert steps_in(slow.path) == [1]


def test_a_write_that_fails_half_way_leaves_nothing_on_the_slow_tier(
    opened: Opened, slow: SlowTier, monkeypatch: pytest.MonkeyPatch, top: Path
) -> None:
    store = opened()
    slow.permits = 0
    store.save(1, state_of(1)).wait()
    slow.wait_until_quiet(store)
    write = LocalWriter.write
    writes = itertools.count()

    def fail_at_the_second(self: LocalWriter, *pieces: NDArray[np.uint8]) -> None:
        if next(writes) == 1:
            raise DataError("no space left on the slow tier")
        write(self, *pieces)

    monkeypatch.setattr(LocalWriter, "write", fail_at_the_second)
    slow.let(100)
    with pytest.raises(DataError, match="no space left"):
        store.drain()

    assert not any((top / "slow").glob("step-*"))
    assert not any((top / "slow").glob(".unfinished*"))
    store.drain()
    assert steps_in(top / "slow") == [1]


def test_a_damaged_copy_on_the_fast_tier_is_told_and_does_not_keep_others_from_being_drained(
    opened: Opened, slow: SlowTier, top: Path
) -> None:
    slow.permits = 0
    store = opened()
    store.save(1, state_of(1)).wait()
    slow.wait_until_quiet(store)
    for step in (2, 3, 4):
        store.save(step, state_of(step)).wait()
    flip(top / "fast", 3)
    (top / "fast" / "step-000000000002" / "part-00000.pst").unlink()
    slow.let(1000)

    faults = []
    for _ in range(3):
        try:
            store.drain()
        except FormatError as error:
            faults.append(str(error))

    assert len(faults) == 2
    assert "step-000000000003/part-00000.pst is damaged" in faults[0]
    assert "step-000000000002/part-00000.pst is missing" in faults[1]
    assert steps_in(top / "slow") == [1, 4]
    for step in (1, 4):
        assert_is(store.restore(step=step), step)


@pytest.mark.parametrize("wave_bytes", [16 << 20, 64])
def test_a_damaged_reference_on_the_slow_tier_is_told_and_what_is_drained_does_not_need_it(
    opened: Opened, top: Path, monkeypatch: pytest.MonkeyPatch, wave_bytes: int
) -> None:
    """Also where the state is read in many waves: it is read once more."""
    monkeypatch.setattr("penstock.checkpoint.staged._WAVE_BYTES", wave_bytes)
    with opened(codec="balance") as store:
        store.save(1, state_of(1)).wait()
    flip(top / "slow", 1)
    shutil.rmtree(top / "fast" / "step-000000000001")
    store = opened(codec="balance")
    store.save(2, state_of(2)).wait()

    store.drain()

    assert told(store)[-1].startswith("step 2: drained")
    assert "step 1, to which it was to be a difference, is damaged" in told(store)[-1]
    listed = {one.step: one for one in store.verify()}
    assert listed[2].condition == "intact"
    assert len(listed[2].tiers) == 2
    shutil.rmtree(top / "fast" / "step-000000000002")
    store.close()
    with SnapshotStore(top / "slow", report=None) as reader:
        assert_is(reader.restore(step=2), 2)


def test_a_copy_that_is_not_what_was_written_takes_no_good_ones_place(
    opened: Opened, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow tier loses a bit of what it was given; the fast one has space for a single snapshot."""
    damaged = [1]

    def check_damaged(tier: Any, decision: Any, *arguments: Any, **named: Any) -> None:
        if tier.name == str(top / "slow") and decision.step in damaged:
            damaged.remove(decision.step)
            flip(top / "slow", decision.step)
        check_part(tier, decision, *arguments, **named)

    monkeypatch.setattr("penstock.checkpoint.writer.check_part", check_damaged)
    with opened(fast_bytes=TABLES_BYTES + 3 * BIG // 2) as store:
        store.save(1, state_of(1)).wait()
        with pytest.raises(FormatError, match=r"slow/step-000000000001/part-00000\.pst is damaged"):
            store.drain()
        assert (steps_in(top / "fast"), steps_in(top / "slow")) == ([1], [])
        store.save(2, state_of(2)).wait()
        store.drain()
        store.save(3, state_of(3)).wait()
        store.drain()
        assert [one.condition for one in store.verify()] == ["intact"] * 3
        for step in (1, 2, 3):
            assert_is(store.restore(step=step), step)


@pytest.mark.parametrize("again", ["drain", "save"])
def test_what_is_a_difference_to_a_damaged_copy_stays_where_another_copy_is_good(
    opened: Opened, top: Path, again: str
) -> None:
    """The fast tier lost one snapshot, and the slow one the beginning of what that one is made of."""
    with opened() as store:
        for step in (1, 2):
            store.save(step, state_of(step)).wait()
            store.drain()
    shutil.rmtree(top / "fast" / "step-000000000002")
    (top / "slow" / "step-000000000001" / MANIFEST).write_text("{}")
    with opened() as store:
        assert_is(store.restore(2), 2)
        if again == "drain":
            store.drain()
            assert told(store)[-2].endswith(
                f"damaged, is removed from {top / 'slow'}, for it is drained there anew"
            )
        else:
            with pytest.raises(ConfigError, match="there is a snapshot of step 1"):
                store.save(1, state_of(1))

        assert_is(store.restore(2), 2)
    if again == "drain":
        with SnapshotStore(top / "slow", report=None) as reader:
            assert_is(reader.restore(2), 2)


def test_what_is_being_drained_cannot_be_deleted(opened: Opened, slow: SlowTier, top: Path) -> None:
    """Else it would be there again once the drain is over."""
    slow.permits = 0
    store = opened()
    store.save(1, state_of(1)).wait()
    slow.wait_until_quiet(store)

    with pytest.raises(ConfigError, match=r"step 1 cannot be deleted while it is drained.*drain\(\)"):
        store.delete(1)

    slow.let(100)
    store.drain()
    store.delete(1)
    assert steps_in(top / "slow") == steps_in(top / "fast") == []


# -- Crashes and interrupts --------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, threading
from penstock.checkpoint import SnapshotStore, opened as opened_module
from penstock.checkpoint.tiers.local import LocalTier
import numpy as np
from tests.checkpoint.slow_tier import state_of

class Stuck(LocalTier):
    def begin(self, *arguments, **named):
        draft = super().begin(*arguments, **named)
        draft.create = lambda file: threading.Event().wait()
        return draft

top = sys.argv[1]
stuck = Stuck(top + "/slow")
opened_module.open_tier = lambda folder, options=None: stuck
store = SnapshotStore(top + "/slow", fast=top + "/fast", threads=1, report=None)
for step in (1, 2):
    store.save(step, state_of(step)).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_did_not_drain_the_next_store_drains_and_so_does_the_command(
    top: Path, forks: Forks
) -> None:
    from penstock.cli.main import main

    assert forks.run(KILLED, str(top)) == ("", -signal.SIGKILL)
    assert (steps_in(top / "fast"), steps_in(top / "slow")) == ([1, 2], [])
    shutil.copytree(top, top / "copy")

    with SnapshotStore(top / "slow", fast=top / "fast", report=None) as store:
        store.save(3, state_of(3)).wait()
    assert steps_in(top / "slow") == [1, 2, 3]

    copy = top / "copy"
    assert main(["snapshots", "drain", str(copy / "slow"), "--fast", str(copy / "fast")]) == 0
    assert steps_in(copy / "slow") == [1, 2]
    shutil.rmtree(copy / "fast")
    for folder, steps in ((top / "slow", (1, 2, 3)), (copy / "slow", (1, 2))):
        with SnapshotStore(folder, report=None) as store:
            for step in steps:
                assert_is(store.restore(step=step), step)


def test_ctrl_c_while_close_waits_ends_at_once_and_the_next_store_goes_on(top: Path) -> None:
    """The drain would take a quarter of an hour at this rate."""
    store = SnapshotStore(top / "slow", fast=top / "fast", drain_bytes_per_second=100, threads=1, report=None)
    store.save(1, state_of(1)).wait()
    drainer = store._drainer
    assert drainer is not None

    def interrupt() -> None:
        # Asleep, and not just about to be: a signal between the two wakes nobody.
        while not drainer._changed._waiters or not is_asleep():  # type: ignore[attr-defined]
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        store.close()
    thread.join()

    for each in threading.enumerate():
        if each.name.startswith("penstock"):  # it has ended but for its last instructions
            each.join(patient(5))
            assert not each.is_alive(), each.name
    assert steps_in(top / "slow") == []
    with SnapshotStore(top / "slow", fast=top / "fast", report=None) as store:
        assert_is(store.restore(), 1)
        store.drain()
    assert steps_in(top / "slow") == [1]
    assert not any((top / "slow").glob(".unfinished*"))


def test_close_waits_for_the_last_drain(opened: Opened, slow: SlowTier, top: Path) -> None:
    slow.permits = 0
    store = opened()
    store.save(1, state_of(1)).wait()
    slow.wait_until_quiet(store)
    drainer = store._drainer
    assert drainer is not None
    order = []

    def let_go() -> None:
        while not drainer._changed._waiters:  # type: ignore[attr-defined]
            time.sleep(0.001)
        order.append("let go")
        slow.let(1)

    thread = threading.Thread(target=let_go)
    thread.start()
    store.close()
    order.append("closed")
    thread.join()

    assert order == ["let go", "closed"]
    assert steps_in(top / "slow") == [1]


def test_a_snapshot_that_is_committed_while_the_last_look_finds_nothing_is_drained_too() -> None:
    """A drain's thread finds nothing and is about to end: just then a save is committed, and asks it to go on."""
    waiting: list[int] = []
    looks = itertools.count(1)

    def look(now_seconds: float) -> int | None:
        found = waiting[0] if waiting else None
        if next(looks) == 2:
            waiting.append(7)
            drainer.go_on()
        return found

    housekeeping: Any = SimpleNamespace(next_to_drain=look)
    drainer = Drainer(None, housekeeping, None, 1, print, threading.Event())  # type: ignore[arg-type]
    drainer._drain = waiting.remove  # type: ignore[method-assign, assignment]

    drainer.go_on()
    drainer.wait()

    assert waiting == []


def test_a_close_after_a_save_that_failed_drains_to_the_end_and_then_raises(
    opened: Opened, slow: SlowTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.permits = 0
    store = opened()
    store.save(1, state_of(1)).wait()
    slow.wait_until_quiet(store)
    store.save(2, state_of(2)).wait()

    def refuse(*_: Any) -> None:
        raise DataError("no space left on the fast tier")

    with monkeypatch.context() as patch:
        patch.setattr(LocalDraft, "commit", refuse)
        outcome_of(store.save(3, state_of(3)))
    drainer = store._drainer
    assert drainer is not None

    def let_go() -> None:
        while not drainer._changed._waiters:  # type: ignore[attr-defined]
            time.sleep(0.001)
        slow.let(100)

    thread = threading.Thread(target=let_go)
    thread.start()
    with pytest.raises(DataError, match="no space left on the fast tier"):
        store.close()
    thread.join()
    assert steps_in(slow.path) == [1, 2]


def test_a_close_tells_of_the_save_and_of_the_drain_that_failed(
    opened: Opened, slow: SlowTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow.refusals = [DataError("the slow tier is away")]
    store = opened()
    store.save(1, state_of(1)).wait()
    slow.wait_until_quiet(store)

    def refuse(*_: Any) -> None:
        raise DataError("no space left on the fast tier")

    with monkeypatch.context() as patch:
        patch.setattr(opened_module.OpenedStore, "raise_of_drain", lambda self: None)
        patch.setattr(LocalDraft, "commit", refuse)
        outcome_of(store.save(2, state_of(2)))

    with pytest.raises(DataError, match="no space left on the fast tier") as raised:
        store.close()
    assert raised.value.__notes__ == ["and then the slow tier is away"]


def test_the_line_of_a_drain_comes_after_that_of_its_save(opened: Opened, slow: SlowTier, top: Path) -> None:
    """A drain goes on with what was just committed, while the save still reads it back."""
    slow.permits = 0
    store = opened()
    store.save(1, state_of(1)).wait()
    slow.wait_until_quiet(store)
    checked, may_end = threading.Event(), threading.Event()
    forget = store._housekeeping.forget

    def held_up(now_seconds: float, tier: int) -> None:
        if tier == 0:
            checked.set()
            assert may_end.wait(60)
        forget(now_seconds, tier)

    store._housekeeping.forget = held_up  # type: ignore[method-assign]
    saving = store.save(2, state_of(2))
    assert checked.wait(60)
    slow.let(100)
    drainer = store._drainer
    assert drainer is not None
    while not drainer._changed._waiters and len(told(store)) < 3:  # type: ignore[attr-defined]
        time.sleep(0.001)
    assert steps_in(top / "slow") == [1, 2]
    may_end.set()
    saving.wait()
    store.drain()

    assert [line.partition(":")[0] + line.partition(":")[2][:5] for line in told(store)] == [
        "step 1 bloc",
        "step 1 drai",
        "step 2 bloc",
        "step 2 drai",
    ]


# -- Nobody closes it --------------------------------------------------------------------------------------


def test_a_store_that_nobody_closes_is_let_go_of_once_it_is_drained(
    opened: Opened, slow: SlowTier, top: Path
) -> None:
    slow.permits = 0
    lines: list[str] = []
    store = SnapshotStore(top / "slow", fast=top / "fast", threads=1, report=lines.append)
    store.save(1, state_of(1)).wait()
    slow.wait_until_quiet(store)
    drainer = store._drainer
    assert drainer is not None
    thread = drainer._thread
    assert thread is not None
    gone = weakref.ref(store)
    del store
    gc.collect()

    assert gone() is None, "the thread of the drain keeps it not alive"
    with opened() as other, pytest.raises(ConfigError, match="this very process"):
        other.drain()
    slow.refusals = [DataError("the slow tier is away")]
    slow.let(100)
    thread.join()

    assert lines[-1] == "step 1: NOT drained: the slow tier is away"
    with opened() as other:
        other.drain()
    assert steps_in(top / "slow") == [1]


def test_a_store_that_nobody_closes_is_let_go_of_once_what_it_still_saved_is_drained(
    opened: Opened, slow: SlowTier, top: Path
) -> None:
    """Only the thread of the save has it yet, and then only what is called once that has ended."""
    may_end, drained = threading.Event(), threading.Event()

    def report(line: str) -> None:
        if "blocked" in line:
            assert may_end.wait(60)
        elif "drained" in line:
            drained.set()

    store = SnapshotStore(top / "slow", fast=top / "fast", threads=1, report=report)
    saving = store.save(1, state_of(1))
    del store
    gc.collect()
    may_end.set()
    saving.wait()
    for thread in threading.enumerate():
        if thread.name == "penstock-drain":
            thread.join()

    assert drained.is_set()
    with opened() as other:
        other.save(2, state_of(2)).wait()


def test_a_drain_that_fails_is_told_though_nobody_asks_again(opened: Opened, slow: SlowTier) -> None:
    slow.refusals = [DataError("the slow tier is away")]
    store = opened()
    store.save(1, state_of(1)).wait()
    slow.wait_until_quiet(store)

    assert told(store)[1] == "step 1: NOT drained: the slow tier is away"
    with pytest.raises(DataError, match="the slow tier is away"):
        store.drain()


def test_a_report_that_fails_makes_no_failure_of_a_drain(opened: Opened, top: Path) -> None:
    def report(line: str) -> None:
        raise ValueError("I/O operation on closed file")

    with opened(report=report) as store:
        store.save(1, state_of(1)).wait()
        store.drain()
    assert steps_in(top / "slow") == [1]


# -- A cap -------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float) -> bool:
        self.seconds += timeout
        return False


def test_drains_write_no_more_bytes_a_second_than_they_may_and_saves_are_not_held_up(
    opened: Opened, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    monkeypatch.setattr(opened_module, "Cap", lambda *given, stop: Cap(*given, stop=clock, clock=clock))
    store = opened(drain_bytes_per_second="10 kB/s", fast_bytes=TABLES_BYTES + 3 * BIG // 2)
    store.save(1, state_of(1)).wait()
    store.drain()
    drained = bytes_in(top / "slow" / "step-000000000001")

    assert 0.9 * drained / 10_000 < clock.seconds < 1.2 * drained / 10_000 + 1
    seconds = clock.seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._housekeeping, "why_not_fast", lambda nbytes: "it is full")
        store.save(2, state_of(2)).wait()
    assert clock.seconds == seconds, "what falls through is written at full speed"


# -- Retention on both tiers -------------------------------------------------------------------------------

SAVE, DRAIN, REFUSE, REOPEN = "save", "drain", "refuse", "reopen"


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(
    keep=st.sampled_from([Keep(last=1), Keep(last=2), Keep(last=3), Keep(last=1, every_steps=3)]),
    scheme=st.sampled_from(["progressive", "chain", "complete"]),
    snap_dis=st.integers(1, 4),
    space=st.floats(1.0, 4.0),
    events=st.lists(
        st.sampled_from([SAVE, SAVE, SAVE, DRAIN, DRAIN, REFUSE, REOPEN]), min_size=4, max_size=14
    ),
)
def test_whatever_lags_or_fails_all_that_is_listed_is_restored_and_the_fast_tier_never_overflows(
    keep: Keep, scheme: Any, snap_dis: int, space: float, events: list[str]
) -> None:
    nbytes = 40_000
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        fast, slow = Path(folder) / "fast", SlowTier(Path(folder) / "slow")
        slow.permits = 0
        fast_bytes = TABLES_BYTES + int(space * nbytes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opened_module, "open_tier", lambda folder, options=None: slow)
            make = functools.partial(
                SnapshotStore,
                slow.path,
                fast=fast,
                fast_bytes=fast_bytes,
                keep=keep,
                scheme=scheme,
                snap_dis=snap_dis,
                threads=1,
                report=None,
            )
            store = make()
            step, newest = 0, 0
            for event in events:
                try:
                    if event == SAVE:
                        step += 1
                        store.save(step, state_of(step, nbytes)).wait()
                        newest = step
                    elif event == DRAIN:
                        slow.let(1)
                    elif event == REFUSE:
                        slow.refusals.append(DataError("refused"))
                    else:
                        slow.let(1_000)
                        store.close()
                        slow.permits = 0
                        store = make()
                except DataError:  # of a drain, told now
                    if event == REOPEN:
                        slow.permits = 0
                        store = make()
                slow.wait_until_quiet(store)
                assert bytes_in(fast) <= fast_bytes
                # What a drain failed with is told to the first who asks.
                with contextlib.suppress(DataError, ConfigError):
                    store.restore()
                listed = [one.step for one in store.list()]
                assert newest in listed or not newest
                for one in listed:
                    assert_is(store.restore(step=one), one, nbytes)
            slow.refusals.clear()
            slow.let(1_000)
            with contextlib.suppress(DataError):
                store.drain()
            store.drain()
            store.close()
        with SnapshotStore(slow.path, report=None) as alone:
            steps = [one.step for one in alone.list()]
            assert newest in steps or not newest
            for one in steps:
                assert_is(alone.restore(step=one), one, nbytes)


def test_restores_go_on_while_drains_commit_and_delete(opened: Opened) -> None:
    with opened(keep=Keep(last=2), snap_dis=2, fast_bytes=TABLES_BYTES + 5 * BIG // 2) as store:
        for step in range(1, 25):
            store.save(step, state_of(step))
            assert_is(store.restore(), step)
            if step > 1:
                assert_is(store.restore(step=step - 1), step - 1)
    # Two, and what they are differences to.
    assert {one.condition for one in opened(keep=Keep(last=2)).verify()} == {"intact"}

"""A study of snapshots beside counts made the plain way: bits as text, pages as slices, sizes by whole encodings."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.checkpoint.codecs import DEFAULT, codec_named
from penstock.checkpoint.codecs.codec import SLACK_BYTES, Pair
from penstock.checkpoint.files.writing import Scratch
from penstock.checkpoint.state.dtypes import DTYPES
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes, Layout, blocks_of
from penstock.checkpoint.store import SnapshotStore
from penstock.errors import ConfigError, DataError
from penstock.measure import snapshot_study
from penstock.measure.snapshot_sequences import common_layouts, open_snapshots
from penstock.measure.snapshot_study import SnapshotStudy, advise, count_blocks, drive_for, study_snapshots
from penstock.policy.delta_schemes import reference_of
from penstock.policy.retention import Keep
from penstock.simulate.snapshots import METHODS, OWN_METHOD, SNAP_DISTANCES, compare_methods, method_named

FLOAT32, BFLOAT16, INT64 = DTYPES["float32"], DTYPES["bfloat16"], DTYPES["int64"]
SHAPES = {
    # More than a block, a page and a half, less than a page: pages straddle tensors.
    "model/embedding": (FLOAT32, BLOCK_VALUES + 77),
    "model/bias": (FLOAT32, 1_500),
    "model/half": (BFLOAT16, 3_001),
    "step": (INT64, 1),
}


class InMemory:
    """Snapshots that are in memory, as a study takes them."""

    def __init__(self, states: Sequence[dict[str, Bytes]]) -> None:
        self.names = [f"step-{100 * index}" for index in range(len(states))]
        self._states = states
        self.most_bytes_at_once = 0

    def layouts(self, snapshot: int) -> list[Layout]:
        return [Layout(name, *(SHAPES[name][0], (SHAPES[name][1],))) for name in self._states[snapshot]]

    def block(self, snapshot: int, layout: Layout, number: int, scratch: Scratch) -> Bytes:
        step = BLOCK_VALUES * layout.dtype.item_bytes
        block = self._states[snapshot][layout.name][number * step : (number + 1) * step]
        self.most_bytes_at_once = max(self.most_bytes_at_once, block.size)
        return block

    def close(self) -> None:
        pass


def trained(count: int, seed: int = 0) -> list[dict[str, Bytes]]:
    """Return snapshots that change less and less, with a part that does not change at all."""
    random = np.random.default_rng(seed)
    values = {name: random.standard_normal(size) * 0.02 for name, (_, size) in SHAPES.items()}
    states = []
    for index in range(count):
        state = {}
        for name, (dtype, size) in SHAPES.items():
            moved = random.standard_normal(size) * 0.002 / (1 + index)
            moved[: size // 4] = 0.0
            values[name] = values[name] + moved
            words = values[name].astype("<f4").view("<u4")
            if dtype is BFLOAT16:
                words = (words >> np.uint32(16)).astype("<u2")
            state[name] = words.view(np.uint8)
        state["step"] = np.array([100 * index], "<i8").view(np.uint8)
        states.append(state)
    return states


FLOATS = [name for name, (dtype, _) in SHAPES.items() if dtype.is_float]


@pytest.fixture(scope="module")
def states() -> list[dict[str, Bytes]]:
    return trained(6)


TICK_SECONDS = 1 / 1024


def ticking_clock() -> Callable[[], float]:
    """Return a clock that moves by a tick whenever its thread looks: what was timed once took one tick."""
    ticks = threading.local()

    def look() -> float:
        count: int = getattr(ticks, "count", 0) + 1
        ticks.count = count
        return count * TICK_SECONDS

    return look


@pytest.fixture(scope="module")
def study(states: list[dict[str, Bytes]]) -> SnapshotStudy:
    snapshots = InMemory(states)
    layouts, _ = common_layouts(snapshots)
    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.measure.snapshot_study.time.thread_time", ticking_clock())
        found = study_snapshots(snapshots, layouts, name="trained", done=steps.append)
    assert steps == list(range(1, 2 * count_blocks(layouts) + 1))
    assert count_blocks(layouts) == 4
    return found


def words_of(state: dict[str, Bytes]) -> list[str]:
    """Return every float of a snapshot as text of zeros and ones."""
    found = []
    for name in FLOATS:
        bits = 8 * SHAPES[name][0].item_bytes
        found += [f"{word:0{bits}b}" for word in state[name].view(f"<u{bits // 8}").tolist()]
    return found


# -- How alike they are ----------------------------------------------------------------------------------


def test_equal_first_bits_and_equal_parameters_are_those_counted_in_text(
    states: list[dict[str, Bytes]], study: SnapshotStudy
) -> None:
    """Tables 1 and 7, of the first two snapshots and of the last two."""
    assert len(study.likenesses) == len(states) - 1
    for place in (0, -1):
        (earlier, later), likeness = list(pairwise(states))[place], study.likenesses[place]
        pairs = list(zip(words_of(earlier), words_of(later), strict=True))
        assert likeness.words == len(pairs)
        assert likeness.equal_words == sum(one == other for one, other in pairs)
        for bits in (0, 4, 9, 12, 16):
            alike = sum(one[:bits] == other[:bits] for one, other in pairs)
            assert likeness.share(bits) == pytest.approx(alike / len(pairs))
    assert likeness.names == ("step-400", "step-500")
    shares = [likeness.share(12) for likeness in study.likenesses]
    assert shares == sorted(shares)


def test_equal_pages_are_those_of_the_tensors_one_after_the_other(
    states: list[dict[str, Bytes]], study: SnapshotStudy
) -> None:
    """Table 6."""
    for (earlier, later), likeness in zip(pairwise(states), study.likenesses, strict=True):
        one, other = (b"".join(state[name].tobytes() for name in FLOATS) for state in (earlier, later))
        pages = range(0, len(one), 4096)
        assert likeness.pages == len(pages)
        assert likeness.equal_pages == sum(one[at : at + 4096] == other[at : at + 4096] for at in pages)
        assert 0 < likeness.equal_pages < likeness.pages


def test_exponents_are_those_of_the_last_snapshot(
    states: list[dict[str, Bytes]], study: SnapshotStudy
) -> None:
    """Figure 8; both types have 8 bits of exponent."""
    for dtype in (FLOAT32, BFLOAT16):
        names = [name for name in FLOATS if SHAPES[name][0] is dtype]
        texts = words_of({name: states[-1].get(name, np.empty(0, np.uint8)) for name in FLOATS})
        width = 8 * dtype.item_bytes
        exponents = [int(text[1:9], 2) for text in texts if len(text) == width]
        assert len(exponents) == sum(SHAPES[name][1] for name in names)
        assert study.exponents[dtype.name].tolist() == np.bincount(exponents, minlength=256).tolist()


# -- What each way of storing takes ----------------------------------------------------------------------


def encoded_bytes(codec: str, state: dict[str, Bytes], reference: dict[str, Bytes] | None) -> int:
    """Return the bytes of a whole snapshot by a codec, block by block."""
    pairs = [
        Pair(state[name][place], SHAPES[name][0], None if reference is None else reference[name][place])
        for name in FLOATS
        for place in blocks_of(state[name].size, SHAPES[name][0])
    ]
    coder = codec_named(codec).coder(lambda: iter(pairs))
    return sum(coder.encode(pair, np.empty(pair.values.size + SLACK_BYTES, np.uint8))[1] for pair in pairs)


def test_sizes_are_those_of_snapshots_encoded_as_a_whole(
    states: list[dict[str, Bytes]], study: SnapshotStudy
) -> None:
    """Figure 9: of every method, at every distance, also those whose run lengths are counted alone."""

    @functools.cache
    def encoded(codec: str, snapshot: int, earlier: int | None) -> int:
        return encoded_bytes(codec, states[snapshot], None if earlier is None else states[earlier])

    codecs = {
        "gzip": ("gzip", "gzip-delta"),
        "huffman": ("dynrle", "dynrle"),
        "rle4": ("stored", "rle4"),
        "rle4-gzip": ("gzip", "rle4-gzip"),
    }
    methods = {
        "gzip": codecs["gzip"],
        "gzip-delta": codecs["gzip"],
        "rle4": codecs["rle4"],
        "rle4-gzip": codecs["rle4-gzip"],
        "dynrle-progressive": codecs["huffman"],
        "dynrle-chain": codecs["huffman"],
        "penstock": (DEFAULT, DEFAULT),
    }
    for method in (*METHODS[1:], OWN_METHOD):
        baseline, delta = methods[method.name]
        for snap_dis in (2, *SNAP_DISTANCES):
            stored = study.sizes.stored_bytes(method, snap_dis)
            assert stored is not None
            for snapshot, size in enumerate(stored):
                earlier = reference_of(method.scheme, snapshot, snap_dis)
                whole = earlier is None
                assert size == encoded(baseline if whole else delta, snapshot, earlier), (
                    method.name,
                    snap_dis,
                    snapshot,
                )


def test_every_method_runs_on_a_drive(study: SnapshotStudy) -> None:
    drive, times = drive_for(study)

    runs = compare_methods(drive, [study.sizes], (*METHODS, OWN_METHOD), [3])

    assert times == 1
    assert all(run.result is not None and run.result.work.written_pages > 0 for run in runs)


def test_a_drive_is_as_large_as_the_snapshots_need(
    study: SnapshotStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots of 4 GB: ten of them, twice."""
    monkeypatch.setattr(SnapshotStudy, "nbytes", property(lambda _: 4 * 10**9))

    drive, times = drive_for(study)

    assert times == 4
    assert drive.ssd.exported_pages * drive.ssd.page_bytes > 80e9


def test_time_to_save_has_the_time_to_make_back_what_it_is_a_difference_to(study: SnapshotStudy) -> None:
    """Algorithm 2: progressive loads all since the baseline, a chain the baseline."""
    progressive, chain = METHODS[-2:]
    for method, read in ((progressive, [(3, 2), (2, 1), (1, 0), (0, None)]), (chain, [(3, 0), (0, None)])):
        seconds = study.seconds["dynrle"]
        own = seconds[read[0]]
        decoded = sum(seconds[each].decode for each in read[1:])
        assert study.save_seconds(method, 3, 5) == pytest.approx(own.look + own.encode + decoded)
        assert study.restore_seconds(method, 3, 5) == pytest.approx(decoded + own.decode)
    for method in (method_named("gzip-delta"), OWN_METHOD):
        assert study.restore_seconds(method, 5, 5) > 0


def test_seconds_are_those_of_each_block_timed_once(study: SnapshotStudy) -> None:
    """A codec of the paper looks at each block before; its coder is made once."""
    blocks = [2, 1, 1]
    assert study.seconds["dynrle"][1, 0].look == (sum(blocks) + 1) * TICK_SECONDS
    for codec, tensors in study.tensor_seconds.items():
        assert tensors[:, 0].tolist() == [SHAPES[name][1] for name in FLOATS]
        timed = 2 if codec == "dynrle" else 1
        assert tensors[:, 1].tolist() == [timed * count * TICK_SECONDS for count in blocks]


def test_advice_is_table_10s(study: SnapshotStudy) -> None:
    """All of the sequence fits: the largest; a little space: less."""
    progressive = METHODS[-2]
    assert advise(study, progressive).snap_dis == 6

    stored = study.sizes.stored_bytes(progressive, 3)
    assert stored is not None
    assert advise(study, progressive, max(sum(stored[:3]), sum(stored[3:]))).snap_dis == 3
    with pytest.raises(ConfigError, match="the least that can be"):
        advise(study, progressive, 1_000)


def test_a_codec_that_does_not_give_back_what_it_took_is_found(
    states: list[dict[str, Bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(kind: int, payload: Bytes, dtype: Any, reference: Bytes | None, out: Bytes) -> None:
        out[:] = 0

    monkeypatch.setattr(snapshot_study, "decode_block", wrong)
    snapshots = InMemory(states[:2])

    with pytest.raises(AssertionError, match="does not give back what it took"):
        study_snapshots(snapshots, common_layouts(snapshots)[0])


# -- Where snapshots come from ---------------------------------------------------------------------------


def read_all(folder: Path | str, only: list[str] | None = None) -> dict[str, dict[str, bytes]]:
    """Return the bytes of all tensors that would be compared, by snapshot and name."""
    snapshots = open_snapshots(folder)
    try:
        layouts, _ = common_layouts(snapshots, only)
        return {
            name: {
                layout.name: b"".join(
                    snapshots.block(index, layout, number, Scratch()).tobytes()
                    for number in range(count_blocks([layout]))
                )
                for layout in layouts
            }
            for index, name in enumerate(snapshots.names)
        }
    finally:
        snapshots.close()


def arrays(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((300, 500), np.float32)


def test_files_are_in_the_order_of_the_numbers_in_their_names(tmp_path: Path) -> None:
    for step in (1000, 900, 20):
        np.save(tmp_path / f"run2-step-{step}.npy", arrays(step))
    (tmp_path / "notes.txt").write_text("no snapshot")

    read = read_all(tmp_path)

    assert list(read) == ["run2-step-20", "run2-step-900", "run2-step-1000"]
    assert read["run2-step-900"] == {"values": arrays(900).tobytes()}


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_files_of_other_people_are_read_by_the_names_that_they_have(tmp_path: Path, ending: str) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    for step in (1, 2):
        state = {
            "model/w": torch.from_numpy(arrays(step)).bfloat16(),
            "model/n": torch.tensor([step]),
            "m": torch.ones(3),
        }
        path = tmp_path / f"{step}.{ending}"
        save_file(state, path) if ending == "safetensors" else torch.save(state, path)

    kept = torch.from_numpy(arrays(2)).bfloat16().view(torch.uint16).numpy().tobytes()
    assert [sorted(tensors) for tensors in read_all(tmp_path).values()] == 2 * [["m", "model~1w"]]
    only = read_all(tmp_path, ["model/*"])["2"]
    assert sorted(only) == ["model~1n", "model~1w"]
    assert only["model~1w"] == kept


def test_folders_of_hugging_face_are_snapshots(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from safetensors.numpy import save_file

    for step in (500, 1500):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"w": arrays(step)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")

    read = read_all(tmp_path)

    assert read == {f"checkpoint-{step}": {"w": arrays(step).tobytes()} for step in (500, 1500)}


def test_numbers_that_do_not_lie_side_by_side_are_gathered(tmp_path: Path) -> None:
    for step in (1, 2):
        np.save(tmp_path / f"{step}.npy", np.asfortranarray(arrays(step)))

    read = read_all(tmp_path)

    assert sorted(np.frombuffer(read["1"]["values"], "<f4")) == sorted(arrays(1).ravel())


def test_a_store_is_read_snapshot_by_snapshot(tmp_path: Path) -> None:
    with SnapshotStore(tmp_path / "store", scheme="progressive", snap_dis=3, report=None) as store:
        for step in (5, 10, 15, 20):
            store.save(step, {"model": {"w": arrays(step)}, "step": step}).wait()

    read = read_all(tmp_path / "store")

    assert read == {str(step): {"model/w": arrays(step).tobytes()} for step in (5, 10, 15, 20)}


def test_no_file_of_a_store_stays_open_however_deep_its_differences(tmp_path: Path) -> None:
    with SnapshotStore(tmp_path, snap_dis=6, keep=Keep(last=None), report=None) as store:
        for step in range(6):
            store.save(step, {"w": arrays(0) + np.float32(step)}).wait()
    before = sorted(os.listdir("/proc/self/fd"))

    snapshots = open_snapshots(tmp_path)

    assert sorted(os.listdir("/proc/self/fd")) == before
    (layout,) = common_layouts(snapshots)[0]
    block = snapshots.block(5, layout, 0, Scratch())
    assert block.tobytes() == (arrays(0) + np.float32(5)).ravel()[:BLOCK_VALUES].tobytes()
    shutil.rmtree(tmp_path / f"step-{5:012d}")
    with pytest.raises(DataError, match="was removed while it was read"):
        snapshots.block(5, layout, 0, Scratch())
    snapshots.close()


def test_what_only_the_fast_tier_has_is_studied_too(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    for folder, steps in ((fast, (20, 30)), (slow, (10, 20))):
        with SnapshotStore(folder, report=None) as store:
            for step in steps:
                store.save(step, {"w": arrays(step)}).wait()
    snapshots = open_snapshots(slow, fast)
    assert list(snapshots.names) == ["10", "20", "30"]
    snapshots.close()
    with pytest.raises(ConfigError, match="absent is no folder"):
        open_snapshots(slow, tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"there is no snapshot in .*empty and "):
        open_snapshots(tmp_path / "empty", tmp_path / "empty")


def test_a_store_at_an_address_is_studied(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    address = f"memory://study/{tmp_path.name}"
    with pytest.raises(ConfigError, match=r"there is no snapshot in memory://study/.*studied in a folder"):
        open_snapshots(address)
    with SnapshotStore(address, report=None) as store:
        for step in (1, 2):
            store.save(step, {"w": arrays(step)}).wait()

    assert read_all(address) == {str(step): {"w": arrays(step).tobytes()} for step in (1, 2)}


def test_tensors_that_are_not_alike_everywhere_are_left_out(states: list[dict[str, Bytes]]) -> None:
    snapshots = InMemory([states[0], {name: states[1][name] for name in ("model/embedding", "model/half")}])

    layouts, left_out = common_layouts(snapshots)

    assert [layout.name for layout in layouts] == ["model/embedding", "model/half"]
    assert left_out == ("model/bias",)
    with pytest.raises(ConfigError, match=r"no tensors that fit optimizer/\* are alike in all 2 snapshots"):
        common_layouts(snapshots, ["optimizer/*"])


def test_what_is_no_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        open_snapshots(tmp_path / "absent")
    np.save(tmp_path / "1.npy", arrays(1))
    with pytest.raises(ConfigError, match=r"has 1 file .* at least two snapshots"):
        open_snapshots(tmp_path)
    with SnapshotStore(tmp_path / "store", report=None) as store:
        store.save(1, {"w": arrays(1)}).wait()
    with pytest.raises(ConfigError, match="holds 1 snapshot, and a study needs two"):
        open_snapshots(tmp_path / "store")

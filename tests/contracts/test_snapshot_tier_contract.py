"""What every place for snapshots must do; a new one is added to `TIERS` and has all of these tests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from penstock.checkpoint.state.tensors import Bytes
from penstock.checkpoint.tiers.local import LocalTier
from penstock.checkpoint.tiers.remote import RemoteTier
from penstock.checkpoint.tiers.tier import MANIFEST, Draft, Tier
from penstock.errors import DataError, PenstockError

# The drivers' own threads and sockets outlive a test by design.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*utcnow.*:DeprecationWarning:(botocore|moto|responses)"),
    pytest.mark.usefixtures("fsspec_threads"),
]

#: A tier at the same place as others that were made with the same argument, as another process would make it.
Make = Callable[[], Tier]

#: S3 has tests of its own in the default run, tests/checkpoint/tiers/test_remote.py.
TIERS = ["local", "memory", "file", pytest.param("s3", marks=pytest.mark.slow)]


@pytest.fixture(params=TIERS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    kind = request.param
    place = secrets.token_hex(4)
    if kind == "s3":
        options = request.getfixturevalue("s3_options")
        yield lambda: RemoteTier(f"s3://bucket/{place}", **options)
    elif kind == "memory":
        yield lambda: RemoteTier(f"memory://{place}")
    elif kind == "file":
        yield lambda: RemoteTier(f"file://{tmp_path}/tier")
    else:
        yield lambda: LocalTier(tmp_path / "tier")


@pytest.fixture
def tier(make: Make) -> Tier:
    return make()


def write(draft: Draft, file: str, data: bytes) -> None:
    writer = draft.create(file)
    writer.write(as_bytes(data))
    writer.finish()


def save(tier: Tier, folder: str, uid: str = "a1", **files: bytes) -> None:
    draft = tier.begin(folder, uid)
    for file, data in files.items():
        write(draft, file, data)
    draft.commit(b"the manifest of " + folder.encode())


def as_bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def content(tier: Tier, folder: str, file: str) -> bytes:
    reader = tier.open(folder, file)
    out = np.empty(reader.nbytes, np.uint8)
    reader.read_into(0, out)
    reader.close()
    return out.tobytes()


class TestSnapshotTierContract:
    def test_a_tier_begins_empty(self, tier: Tier) -> None:
        assert tier.folders() == []
        assert tier.sweep() == []

    def test_a_tier_has_a_name_for_messages(self, tier: Tier) -> None:
        assert len(tier.name) > 3
        save(tier, "step-1")
        assert tier.where("step-1").startswith(f"{tier.name}/step-1")

    def test_what_was_committed_is_listed_in_order_and_read_again(self, tier: Tier) -> None:
        save(tier, "step-2", part=b"two", other=b"")
        save(tier, "step-1", part=b"one!")

        assert tier.folders() == ["step-1", "step-2"]
        assert tier.read("step-1", MANIFEST) == b"the manifest of step-1"
        assert tier.read("step-2", "part") == b"two"
        assert content(tier, "step-1", "part") == b"one!"
        assert content(tier, "step-2", "other") == b""

    def test_another_process_sees_at_once_what_is_committed_and_deleted(self, make: Make) -> None:
        writer, other = make(), make()
        save(writer, "step-1", part=b"one")
        assert other.folders() == ["step-1"]
        assert other.read("step-1", "part") == b"one"

        save(writer, "step-2", part=b"two")
        writer.delete("step-1")

        assert other.folders() == ["step-2"]
        assert other.read("step-2", "part") == b"two"
        with pytest.raises(FileNotFoundError):
            other.read("step-1", "part")

    def test_a_snapshot_saved_again_after_it_was_deleted_is_the_new_one_for_everybody(
        self, make: Make
    ) -> None:
        writer, other = make(), make()
        save(writer, "step-1", "a1", part=b"old")
        assert other.read("step-1", "part") == b"old"

        writer.delete("step-1")
        save(writer, "step-1", "b2", part=b"new")

        assert other.folders() == ["step-1"]
        assert other.read("step-1", "part") == b"new"

    def test_nothing_is_seen_before_it_is_committed(self, make: Make) -> None:
        tier, other = make(), make()
        draft = tier.begin("step-1", "a1")
        write(draft, "part", b"one")

        assert tier.folders() == other.folders() == []
        with pytest.raises(FileNotFoundError):
            other.read("step-1", "part")

        draft.commit(b"manifest")
        assert tier.folders() == other.folders() == ["step-1"]

    def test_an_aborted_snapshot_leaves_nothing(self, make: Make) -> None:
        tier = make()
        draft = tier.begin("step-1", "a1")
        write(draft, "part", b"one")
        unfinished = draft.create("other")
        unfinished.write(as_bytes(b"half"))
        unfinished.abandon()

        draft.abort()
        draft.abort()

        assert tier.folders() == []
        assert make().sweep() == []

    def test_a_commit_is_not_undone_by_an_abort_after_it(self, tier: Tier) -> None:
        draft = tier.begin("step-1", "a1")
        draft.commit(b"manifest")

        draft.abort()

        assert tier.folders() == ["step-1"]

    def test_an_attempt_that_died_is_never_part_of_a_later_one(self, make: Make) -> None:
        died = make().begin("step-1", "a1")
        write(died, "part", b"of the dead")
        write(died, "more", b"of the dead")

        tier = make()
        save(tier, "step-1", "b2", part=b"living")
        write(died, "late", b"sent after all")

        assert tier.read("step-1", "part") == b"living"
        for file in ("more", "late"):
            with pytest.raises(FileNotFoundError):
                make().read("step-1", file)

    def test_a_sweep_removes_what_died_and_keeps_what_was_committed(self, make: Make) -> None:
        died = make().begin("step-2", "a1")
        write(died, "part", b"of the dead")
        tier = make()
        save(tier, "step-1", part=b"living")

        swept = tier.sweep()

        assert len(swept) == 1
        assert "step-2" in swept[0]
        assert tier.sweep() == []
        assert tier.read("step-1", "part") == b"living"

    def test_ranks_write_one_snapshot_together(self, make: Make) -> None:
        draft = make().begin("step-1", "a1")
        others = [make().begin("step-1", "a1", join=True) for _ in range(2)]
        write(draft, "part-0", b"zero")
        for rank, other in enumerate(others, start=1):
            write(other, f"part-{rank}", f"rank {rank}".encode())

        draft.commit(b"manifest")

        assert make().read("step-1", "part-2") == b"rank 2"
        assert make().sweep() == []

    def test_a_snapshot_is_not_overwritten(self, tier: Tier) -> None:
        save(tier, "step-1", part=b"first")

        with pytest.raises(DataError, match="step-1"):
            save(tier, "step-1", "b2", part=b"second")

        assert tier.read("step-1", "part") == b"first"

    def test_a_deleted_snapshot_is_gone_and_leaves_nothing(self, tier: Tier) -> None:
        save(tier, "step-1", part=b"one", other=b"more")
        save(tier, "step-10", "b2", part=b"ten")

        tier.delete("step-1")

        assert tier.folders() == ["step-10"]
        assert tier.sweep() == []
        with pytest.raises(FileNotFoundError):
            tier.read("step-1", MANIFEST)
        with pytest.raises(FileNotFoundError):
            tier.delete("step-1")

    def test_any_part_of_a_file_can_be_read_by_several_threads_at_once(self, tier: Tier) -> None:
        data = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
        save(tier, "step-1", part=data.tobytes())
        reader = tier.open("step-1", "part")
        offsets = [0, 1, 65_536, 299_000, 150_000, 299_999, 300_000]

        def read(offset: int) -> Bytes:
            out = np.zeros(min(1_000, 300_000 - offset), np.uint8)
            reader.read_into(offset, out)
            return out

        with ThreadPoolExecutor(4) as pool:
            parts = list(pool.map(read, offsets))

        for offset, part in zip(offsets, parts, strict=True):
            np.testing.assert_array_equal(part, data[offset : offset + 1_000])
        reader.close()
        reader.close()

    def test_a_read_beyond_the_end_is_an_error_that_names_the_file(self, tier: Tier) -> None:
        save(tier, "step-1", part=b"12345678")
        reader = tier.open("step-1", "part")

        with pytest.raises(DataError, match=r"step-1.*part"):
            reader.read_into(6, np.zeros(3, np.uint8))

        reader.close()

    def test_what_is_absent_is_a_missing_file(self, tier: Tier) -> None:
        save(tier, "step-1", part=b"one")

        for folder, file in (("step-1", "absent"), ("step-2", "part"), ("step", "part")):
            with pytest.raises(FileNotFoundError, match=folder):
                tier.read(folder, file)
            with pytest.raises(FileNotFoundError, match=folder):
                tier.open(folder, file)

    def test_memory_that_was_written_may_be_reused(self, tier: Tier) -> None:
        memory = np.full(1_000, 7, np.uint8)
        draft = tier.begin("step-1", "a1")
        writer = draft.create("part")

        writer.write(memory)
        memory[:] = 0
        writer.write(memory)
        writer.finish()
        writer.abandon()
        draft.commit(b"manifest")

        assert tier.read("step-1", "part") == b"\7" * 1_000 + b"\0" * 1_000

    def test_files_of_many_blocks_come_back_whole(self, tier: Tier) -> None:
        data = np.random.default_rng(0).integers(0, 256, 18_000_001, np.uint8)
        draft = tier.begin("step-1", "a1")
        writer = draft.create("part")
        for start in range(0, len(data), 5_000_000):
            writer.write(data[start : start + 5_000_000])
        writer.finish()
        draft.commit(b"manifest")

        reader = tier.open("step-1", "part")
        out = np.zeros_like(data)
        reader.read_into(0, out)
        reader.close()

        np.testing.assert_array_equal(out, data)
        tier.delete("step-1")  # the S3 server keeps a file open for a large object

    def test_a_writer_that_finished_takes_no_more(self, tier: Tier) -> None:
        draft = tier.begin("step-1", "a1")
        writer = draft.create("part")
        writer.finish()

        with pytest.raises((PenstockError, OSError)):
            writer.write(as_bytes(b"late"))

        draft.abort()

    def test_free_bytes_are_a_number_or_unknown(self, tier: Tier) -> None:
        free_bytes = tier.free_bytes()

        assert free_bytes is None or free_bytes > 0

"""A tier on an fsspec target: what object stores, their drivers and other people's objects do to it."""

from __future__ import annotations

import gc
import os
import secrets
import subprocess
import sys
import tracemalloc
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.checkpoint.store import SnapshotStore
from penstock.checkpoint.tiers.remote import RemoteTier, block_bytes_after
from penstock.checkpoint.tiers.tier import MANIFEST
from penstock.errors import ConfigError, DataError, FormatError

MIB = 2**20
BLOCKS = np.zeros(9 * MIB, np.uint8)  # more than one block of an upload


def save(tier: RemoteTier, folder: str, uid: str = "a1") -> None:
    draft = tier.begin(folder, uid)
    writer = draft.create("part")
    writer.write(np.frombuffer(b"data", np.uint8))
    writer.finish()
    draft.commit(b"manifest")


@pytest.fixture
def place() -> str:
    return secrets.token_hex(4)


# -- S3 ------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.usefixtures("s3_options")


@pytest.fixture
def bucket(s3_options: dict[str, str]) -> Any:
    """Return a file system that looks at the bucket as somebody else would."""
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False, **s3_options)


def test_what_is_damaged_or_missing_is_named_by_its_key(
    s3_options: dict[str, str], place: str, bucket: Any
) -> None:
    address = f"s3://bucket/{place}"
    with SnapshotStore(address, storage_options=s3_options, report=None, threads=1) as store:
        weights = np.arange(1000.0)
        for step in (1, 2):
            store.save(step, {"weights": weights * step}).wait()
    first, second = (key for key in bucket.find(f"bucket/{place}") if key.endswith("part-00000.pst"))
    data = bytearray(bucket.cat_file(first))
    data[len(data) // 3] ^= 1
    bucket.pipe_file(first, bytes(data))

    with SnapshotStore(address, storage_options=s3_options, report=None) as store:
        with pytest.raises(FormatError, match=f"^step 2 needs step 1: s3://{first} is damaged: "):
            store.restore()
        assert [one.condition for one in store.verify()] == ["damaged", "damaged"]
        bucket.rm_file(second)
        with pytest.raises(FormatError, match=f"s3://{second} does not exist"):
            store.restore()
        assert [one.condition for one in store.list()] == ["intact", "torn"]
        manifest = second.replace("part-00000.pst", MANIFEST)
        bucket.pipe_file(manifest, bucket.cat_file(manifest)[:-9])
        assert f"s3://{manifest}" in store.list()[1].why


def test_objects_are_named_by_their_attempt_and_the_manifest_is_one_of_them(
    s3_options: dict[str, str], place: str, bucket: Any
) -> None:
    save(RemoteTier(f"s3://bucket/{place}", **s3_options), "step-1", "3f9c")

    assert bucket.find(f"bucket/{place}") == [
        f"bucket/{place}/step-1.attempt-3f9c/manifest.json",
        f"bucket/{place}/step-1.attempt-3f9c/part",
    ]


def test_a_whole_bucket_can_be_the_place_and_other_objects_in_it_are_left_alone(
    s3_options: dict[str, str], bucket: Any
) -> None:
    bucket.mkdir("shared")
    theirs = ["shared/manifest.json", "shared/data.v2/x.bin", "shared/step-1/part", "shared/a.attempt-/part"]
    for path in theirs:
        bucket.pipe_file(path, b"theirs")
    tier = RemoteTier("s3://shared", **s3_options)
    save(tier, "step-1")

    assert tier.folders() == ["step-1"]
    tier.delete("step-1")
    assert tier.folders() == tier.sweep() == []

    assert bucket.find("shared") == sorted(theirs)


def test_a_run_whose_name_begins_like_another_is_not_seen_in_it(
    s3_options: dict[str, str], place: str
) -> None:
    save(RemoteTier(f"s3://bucket/{place}/run-10", **s3_options), "step-1")

    assert RemoteTier(f"s3://bucket/{place}/run-1", **s3_options).folders() == []


def test_an_abandoned_upload_leaves_neither_an_object_nor_blocks(
    s3_options: dict[str, str], place: str, bucket: Any
) -> None:
    tier = RemoteTier(f"s3://bucket/{place}", **s3_options)
    writer = tier.begin("step-1", "a1").create("part")
    writer.write(BLOCKS)
    assert uploads(bucket, place) == 1

    writer.abandon()
    del writer

    assert uploads(bucket, place) == 0
    assert bucket.find(f"bucket/{place}") == []


def test_an_aborted_draft_gives_up_the_uploads_that_are_not_finished(
    s3_options: dict[str, str], place: str, bucket: Any
) -> None:
    draft = RemoteTier(f"s3://bucket/{place}", **s3_options).begin("step-1", "a1")
    draft.create("part").write(BLOCKS)

    draft.abort()

    assert uploads(bucket, place) == 0


def test_a_sweep_gives_up_the_uploads_of_a_writer_that_died_and_that_writer_cannot_finish_them(
    s3_options: dict[str, str], place: str, bucket: Any
) -> None:
    """The writer is only thought dead: it goes on after another process took over."""
    once = {"config_kwargs": {"retries": {"max_attempts": 0}}}
    died = RemoteTier(f"s3://bucket/{place}", **s3_options, **once).begin("step-1", "a1").create("part")
    died.write(BLOCKS)

    assert RemoteTier(f"s3://bucket/{place}", **s3_options).sweep() == ["step-1.attempt-a1"]

    assert uploads(bucket, place) == 0
    with pytest.raises(DataError, match=rf"write s3://bucket/{place}/step-1.attempt-a1/part"):
        died.finish()
    assert bucket.find(f"bucket/{place}") == []


def test_a_missing_bucket_is_an_error_that_names_the_address_and_the_bucket_is_not_made(
    s3_options: dict[str, str], bucket: Any
) -> None:
    tier = RemoteTier("s3://absent/run", **s3_options)

    with pytest.raises(DataError, match=r"list s3://absent/run: .*does the bucket exist\?"):
        tier.folders()
    with pytest.raises(DataError, match="s3://absent/run"):
        tier.begin("step-1", "a1")
    writer = tier.begin("step-1", "a1", join=True).create("part")
    with pytest.raises(DataError, match=r"s3://absent/run/step-1.attempt-a1/part"):
        writer.write(BLOCKS)

    assert not bucket.exists("absent")


@pytest.fixture
def wary(s3_options: dict[str, str]) -> Iterator[None]:
    """Let the server refuse keys that it does not know."""

    def reset(count: bytes) -> None:
        address = f"{s3_options['endpoint_url']}/moto-api/reset-auth"
        urllib.request.urlopen(urllib.request.Request(address, count, {"Content-Type": "text/plain"})).close()

    reset(b"0")
    yield
    reset(b"inf")


@pytest.mark.usefixtures("wary")
def test_refused_credentials_are_an_error_that_names_the_address_and_not_the_key(
    s3_options: dict[str, str],
) -> None:
    tier = RemoteTier("s3://bucket/run", **{**s3_options, "secret": "a-secret-of-mine"})

    for refused in (tier.folders, lambda: tier.begin("step-1", "a1"), tier.sweep):
        with pytest.raises(DataError, match="cannot list s3://bucket/run: ") as caught:
            refused()
        assert "a-secret-of-mine" not in str(caught.value)


def test_a_server_that_is_not_there_is_an_error_that_names_the_address() -> None:
    tier = RemoteTier(
        "s3://bucket/run",
        endpoint_url="http://127.0.0.1:9",
        key="me",
        secret="mine",
        config_kwargs={"connect_timeout": 1, "retries": {"max_attempts": 0}},
    )

    with pytest.raises(DataError, match="s3://bucket/run"):
        tier.folders()


def uploads(bucket: Any, place: str) -> int:
    return sum(upload["Key"].startswith(place) for upload in bucket.list_multipart_uploads("bucket"))


# -- Drivers -------------------------------------------------------------------------------------------


class FakeStore(MemoryFileSystem):  # type: ignore[misc]
    """An object store of the same objects as memory://."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.removeprefix(f"{cls.protocol[0]}://")))


class CountedStore(FakeStore):
    """An object store that counts listings and knows no other question about what there is."""

    protocol = ("counted", "memory")
    listings = 0

    def find(self, *arguments: Any, **options: Any) -> Any:
        type(self).listings += 1
        return super().find(*arguments, **options)

    def info(self, path: str, **_: Any) -> Any:
        raise AssertionError(f"asked about {path}")

    ls = exists = isfile = isdir = info


class CachingStore(FakeStore):
    """An object store whose driver remembers listings until it is told not to."""

    protocol = ("caching", "memory")
    _remembered: Any = None

    def find(self, *arguments: Any, **options: Any) -> Any:
        if self._remembered is None:
            self._remembered = super().find(*arguments, **options)
        return self._remembered

    def invalidate_cache(self, path: str | None = None) -> None:
        self._remembered = None


class StubbornStore(FakeStore):
    """An object store in blocks, whose drive is full after `space` of them."""

    protocol = ("stubborn", "memory")
    space = 0
    events: ClassVar[list[str]] = []

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **_: Any) -> Any:
        return StubbornFile(self, path, mode, block_size)


class StubbornFile(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self.fs.events.append("begin")

    def _upload_chunk(self, final: bool = False) -> bool:
        if not self.fs.space:
            raise RuntimeError("the drive is full")
        type(self.fs).space -= 1
        self.fs.events.append("finish" if final else "block")
        return True

    def discard(self) -> None:
        self.fs.events.append("discard")


class WatchedFolder(LocalFileSystem):  # type: ignore[misc]
    """A file system that tells what it is asked to write and rename."""

    protocol = "watched"
    events: ClassVar[list[str]] = []

    def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
        self.events.append(f"write {Path(path).name}")
        return super().pipe_file(path, value, **options)

    def mv(self, source: str, target: str, **options: Any) -> Any:
        assert not Path(target).exists()
        self.events.append(f"rename {Path(source).name} {Path(target).name}")
        return super().mv(source, target, **options)


for driver in (CachingStore, CountedStore, StubbornStore, WatchedFolder):
    name = driver.protocol if isinstance(driver.protocol, str) else driver.protocol[0]
    fsspec.register_implementation(name, driver, clobber=True)


def test_hundreds_of_snapshots_are_listed_by_one_request() -> None:
    for step in range(300):
        fsspec.filesystem("memory").pipe_file(f"/counted/step-{step}.attempt-a/manifest.json", b"manifest")
    CountedStore.listings = 0

    assert len(RemoteTier("counted://counted").folders()) == 300

    assert CountedStore.listings == 1


def test_a_driver_that_remembers_listings_hides_nothing_that_another_process_saved(place: str) -> None:
    tier = RemoteTier(f"caching://{place}")
    assert tier.folders() == []

    save(RemoteTier(f"caching://{place}"), "step-1")

    assert tier.folders() == ["step-1"]


def test_a_failed_write_gives_the_upload_up_and_the_file_cannot_be_finished(place: str) -> None:
    """Drivers finish an upload when their file is collected: it would be a file with a hole."""
    StubbornStore.space, StubbornStore.events[:] = 1, []
    writer = RemoteTier(f"stubborn://{place}").begin("step-1", "a1").create("part")
    writer.write(BLOCKS)

    with pytest.raises(
        DataError, match=rf"write stubborn://{place}/step-1.attempt-a1/part.*the drive is full"
    ):
        writer.write(BLOCKS)
    StubbornStore.space = 100
    with pytest.raises(DataError, match="begin another"):
        writer.finish()
    with pytest.raises(DataError, match="begin another"):
        writer.write(BLOCKS)
    writer.abandon()
    del writer

    assert StubbornStore.events == ["begin", "block", "discard"]


def test_a_writer_that_is_forgotten_does_not_finish_its_upload(place: str) -> None:
    StubbornStore.space, StubbornStore.events[:] = 100, []
    draft = RemoteTier(f"stubborn://{place}").begin("step-1", "a1")
    draft.create("part").write(BLOCKS)

    del draft
    gc.collect()

    assert StubbornStore.events == ["begin", "block", "discard"]


def test_a_forked_process_that_ends_does_nothing_to_an_upload_of_its_parent(place: str) -> None:
    StubbornStore.space, StubbornStore.events[:] = 100, []
    writer = RemoteTier(f"stubborn://{place}").begin("step-1", "a1").create("part")
    writer.write(BLOCKS)

    child = os.fork()
    if not child:
        writer._discard()  # as the interpreter does that ends
        os._exit(len(StubbornStore.events))
    _, status = os.waitpid(child, 0)
    writer.finish()

    assert os.waitstatus_to_exitcode(status) == 2
    assert StubbornStore.events == ["begin", "block", "finish"]


@pytest.mark.slow
def test_an_interpreter_that_ends_in_the_midst_of_an_upload_gives_it_up(
    s3_options: dict[str, str], place: str, bucket: Any
) -> None:
    """A training that fails: nobody finishes or abandons the file, and the process must end all the same."""
    program = f"""
import numpy as np
from penstock.checkpoint.tiers.remote import RemoteTier
writer = RemoteTier("s3://bucket/{place}", **{s3_options!r}).begin("step-1", "a1").create("part")
writer.write(np.zeros(9 * 2**20, np.uint8))
raise SystemExit(3)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert (ended.returncode, ended.stderr) == (3, "")
    assert uploads(bucket, place) == 0
    assert bucket.find(f"bucket/{place}") == []


def test_an_upload_holds_a_few_blocks_in_memory_however_much_is_written(place: str) -> None:
    StubbornStore.space = 100
    writer = RemoteTier(f"stubborn://{place}").begin("step-1", "a1").create("part")
    data = np.zeros(100 * MIB, np.uint8)

    tracemalloc.start()
    try:
        writer.write(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    writer.finish()

    assert peak_bytes < 24 * MIB


@given(st.integers(1, 480))
def test_a_file_of_hundreds_of_gigabytes_has_no_more_blocks_than_s3_allows(gib: int) -> None:
    blocks, written_bytes = 0, 0
    while written_bytes < gib * 2**30:
        size_bytes = block_bytes_after(written_bytes)
        # Sizes change at whole blocks, so that many of one size can be counted at once.
        run = 100
        assert block_bytes_after(written_bytes + run * size_bytes - 1) == size_bytes
        blocks, written_bytes = blocks + run, written_bytes + run * size_bytes

    assert blocks <= 10_000
    assert block_bytes_after(15 * 2**30) == 8 * MIB


def test_on_a_file_system_the_manifest_is_renamed_into_place(tmp_path: Path) -> None:
    WatchedFolder.events[:] = []

    save(RemoteTier(f"watched://{tmp_path}/tier"), "step-1")

    assert WatchedFolder.events == [
        f"write {MANIFEST}.unfinished",
        f"rename {MANIFEST}.unfinished {MANIFEST}",
    ]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_removal_that_breaks_off_leaves_no_snapshot_and_a_sweep_ends_it(
    kind: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{place}" if kind == "memory" else f"file://{tmp_path}/tier"
    tier = RemoteTier(url)
    save(tier, "step-1")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("not today")

    monkeypatch.setattr(tier._filesystem, "rm", refuse)

    with pytest.raises(DataError, match=r"remove .*step-1\.attempt-a1: PermissionError: not today"):
        tier.delete("step-1")

    other = RemoteTier(url)
    assert other.folders() == []
    assert other.sweep() == ["step-1.attempt-a1"]
    assert other.sweep() == []


def test_an_answer_that_is_cut_off_is_an_error_that_names_the_file(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = RemoteTier(f"memory://{place}")
    save(tier, "step-1")
    reader = tier.open("step-1", "part")
    monkeypatch.setattr(tier._filesystem, "cat_file", lambda *_, **__: b"dat")

    with pytest.raises(DataError, match=rf"memory://{place}/step-1.attempt-a1/part: .*3 of the 4 bytes"):
        reader.read_into(0, np.zeros(4, np.uint8))


def test_a_file_that_vanishes_while_it_is_read_is_an_error_that_names_it(place: str) -> None:
    tier = RemoteTier(f"memory://{place}")
    save(tier, "step-1")
    reader = tier.open("step-1", "part")
    RemoteTier(f"memory://{place}").delete("step-1")

    with pytest.raises(DataError, match=r"step-1.attempt-a1/part"):
        reader.read_into(0, np.zeros(4, np.uint8))


def test_a_snapshot_saved_again_by_another_process_is_found_without_a_new_listing(place: str) -> None:
    tier, other = RemoteTier(f"memory://{place}"), RemoteTier(f"memory://{place}")
    save(tier, "step-1", "a1")
    assert tier.read("step-1", "part") == b"data"
    other.delete("step-1")
    save(other, "step-1", "b2")

    assert tier.read("step-1", "part") == b"data"


def test_of_two_attempts_that_were_both_committed_everybody_takes_the_same_and_a_delete_removes_both(
    place: str,
) -> None:
    first, second = RemoteTier(f"memory://{place}"), RemoteTier(f"memory://{place}")
    drafts = first.begin("step-1", "a1"), second.begin("step-1", "b2")
    for draft in reversed(drafts):
        draft.commit(f"manifest {draft._attempt}".encode())

    assert first.folders() == second.folders() == ["step-1"]
    assert first.read("step-1", MANIFEST) == second.read("step-1", MANIFEST) == b"manifest step-1.attempt-a1"

    first.delete("step-1")
    assert second.folders() == second.sweep() == []


def test_a_snapshot_whose_parts_a_second_writer_swept_is_not_committed(place: str) -> None:
    """Two trainings save to one address: the second takes what the first is writing for leftovers."""
    draft = RemoteTier(f"memory://{place}").begin("step-1", "a1")
    writer = draft.create("part")
    writer.write(np.frombuffer(b"data", np.uint8))
    writer.finish()
    second = RemoteTier(f"memory://{place}")

    second.sweep()
    with pytest.raises(DataError, match=r"step-1\.attempt-a1.*part was removed.*second training"):
        draft.commit(b"manifest")

    assert second.folders() == second.sweep() == []


# -- What one can ask wrongly --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["", ".", "..", "../up", "a/b", "/etc", ".hidden", "a*", "a\n", "a b", "ä"])
def test_names_that_could_lead_elsewhere_are_refused(bad: str, place: str) -> None:
    tier = RemoteTier(f"memory://{place}")
    save(tier, "step-1")
    draft = tier.begin("step-2", "a1")

    for refused in (
        lambda: tier.read(bad, "part"),
        lambda: tier.read("step-1", bad),
        lambda: tier.open("step-1", bad),
        lambda: tier.begin(bad, "a1"),
        lambda: tier.begin("step-3", bad),
        lambda: draft.create(bad),
    ):
        with pytest.raises(ConfigError):
            refused()


def test_a_part_cannot_pass_for_the_manifest(place: str) -> None:
    with pytest.raises(ConfigError, match=MANIFEST):
        RemoteTier(f"memory://{place}").begin("step-1", "a1").create(MANIFEST)


@for_each(
    ("url", "words"),
    [
        ("runs/a", "no address"),
        ("simplecache::s3://bucket/a", "caches"),
        ("s3://bucket/*", "plain address"),
        ("s3://bucket/../other", "plain address"),
        ("nowhere://bucket/a", "nowhere"),
    ],
)
def test_an_address_that_cannot_work_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RemoteTier(url)


def test_an_option_that_the_driver_does_not_know_is_named_and_its_value_is_not() -> None:
    with pytest.raises(ConfigError, match="sekret") as caught:
        RemoteTier("s3://bucket/a", sekret="mine", key="me", username="me")

    assert "mine" not in str(caught.value)


def test_a_driver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)

    with pytest.raises(ConfigError, match=r"pip install 'penstock\[remote\]' gcsfs"):
        RemoteTier("gs://bucket/a")


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)

    with pytest.raises(ConfigError, match=r"pip install 'penstock\[remote\]'"):
        RemoteTier("s3://bucket/a")


def test_a_password_in_an_address_is_not_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = RemoteTier("stubborn://me:sesame@host/run")

    assert tier.name == "stubborn://me:***@host/run"
    assert "sesame" not in repr(tier)


# -- A store there -------------------------------------------------------------------------------------


def state(step: int) -> dict[str, Any]:
    weights = np.random.default_rng(0).normal(size=(300, 500)).astype(np.float32)
    return {"weights": weights * np.float32(1 + 1e-4 * step), "step": step}


def test_a_training_is_saved_to_s3_and_restored_by_another_process_bit_for_bit(
    s3_options: dict[str, str], place: str
) -> None:
    with SnapshotStore(f"s3://bucket/{place}", storage_options=s3_options, report=None, threads=1) as store:
        for step in range(4):
            store.save(step, state(step))

    with SnapshotStore(f"s3://bucket/{place}", storage_options=s3_options, report=None, threads=1) as other:
        assert [(listed.step, listed.condition) for listed in other.list()] == [
            (step, "intact") for step in range(4)
        ]
        for step in (3, 1):
            restored = other.restore(step)
            np.testing.assert_array_equal(restored["weights"], state(step)["weights"], strict=True)
            assert restored["step"] == step


def test_a_fast_tier_is_drained_to_s3_and_what_is_lost_with_it_is_restored_from_there(
    s3_options: dict[str, str], place: str, tmp_path: Path
) -> None:
    with SnapshotStore(
        f"s3://bucket/{place}",
        fast=tmp_path / "fast",
        drain_bytes_per_second=1e9,
        storage_options=s3_options,
        report=None,
        threads=1,
    ) as store:
        store.save(1, state(1))
        store.save(2, state(2))
        store.drain()

    with SnapshotStore(f"s3://bucket/{place}", storage_options=s3_options, report=None, threads=1) as other:
        np.testing.assert_array_equal(other.restore(2)["weights"], state(2)["weights"])


def test_an_option_that_the_driver_does_not_know_is_told_as_one_of_storage_options(
    s3_options: dict[str, Any], place: str
) -> None:
    wrong = s3_options | {"endpoint": "http://127.0.0.1"}
    store = SnapshotStore(f"s3://bucket/{place}", storage_options=wrong, report=None)

    with pytest.raises(
        ConfigError, match=r"^storage_options is of endpoint, .*does not know all of them.*'endpoint'"
    ):
        store.list()

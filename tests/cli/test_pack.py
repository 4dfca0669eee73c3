"""`penstock pack`: what is written is what was read, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.store.reads import contents
from tests.store.tar_files import write

from penstock.cli.main import INTERRUPTED, main
from penstock.errors import ConfigError, DataError
from penstock.loader import packing
from penstock.loader.packing import pack
from penstock.plan import FullShuffle
from penstock.store import (
    Arrays,
    FileList,
    ImageFolder,
    Manifest,
    MosaicShards,
    Records,
    Selection,
    TarShards,
    open_source,
)
from penstock.store.packed import PackedFiles

if TYPE_CHECKING:
    from tests.interpreters import Interpreters

JPEG = b"\xff\xd8\xff"


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def photos(samples: int = 40) -> ImageFolder:
    """An image folder of files that begin as pictures do, of 1 to 3,000 bytes."""
    random = np.random.default_rng(3)
    for number in range(samples):
        path = Path("photos", ("cat", "dog", "elk")[number % 3], f"{number:03}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(JPEG + random.bytes(int(random.integers(1, 3000))))
    return ImageFolder("photos")


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def opened() -> Iterator[list[PackedFiles]]:
    """Sources to close at the end."""
    found: list[PackedFiles] = []
    yield found
    for each in found:
        each.close()


class TestTar:
    def test_samples_names_labels_and_classes_stay(self, opened: list[PackedFiles]) -> None:
        source = photos()

        shards, how = pack(source, "out", shard_bytes=20_000)

        assert len(shards) > 3
        assert how == f"open_source({os.path.abspath('out')!r})"
        found = eval(how, {"open_source": open_source})
        opened.append(found)
        assert isinstance(found, TarShards)
        assert contents(found) == contents(source)
        assert np.asarray(found.labels).tolist() == source.labels.tolist()
        assert found.classes == ("cat", "dog", "elk")
        names = [found.describe(sample).rpartition(": ")[2] for sample in range(len(found))]
        assert names == [os.path.relpath(source.path_of(sample), "photos") for sample in range(len(source))]

    def test_other_programs_read_it(self) -> None:
        source = photos(5)
        pack(source, "out")

        with tarfile.open("out/shard-000000.tar") as tar:
            members = {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]

        assert members["cat/003.jpg"] == source.read(1)
        assert members["cat/003.cls"] == b"0"
        assert len(members) == 10
        assert os.path.getsize("out/shard-000000.tar") % 10_240 == 0

    def test_a_shuffled_order_is_that_of_a_full_shuffle(self, opened: list[PackedFiles]) -> None:
        source = photos()
        pack(source, "out", shuffle_seed=5, shard_bytes=9000)

        found = open_source("out")
        assert isinstance(found, TarShards)
        opened.append(found)
        order = FullShuffle(40, 5).at(0, np.arange(40)).tolist()
        assert contents(found) == [source.read(sample) for sample in order]
        assert np.asarray(found.labels).tolist() == source.labels[order].tolist()

    def test_a_part_keeps_the_numbers_of_its_labels(self, opened: list[PackedFiles]) -> None:
        part = photos().select(labels=["dog"])
        pack(part, "out")

        found = open_source("out")
        assert isinstance(found, TarShards)
        opened.append(found)
        assert (set(np.asarray(found.labels).tolist()), found.classes) == ({1}, ("cat", "dog", "elk"))

    NAMES = (
        "a.b.jpg", "a%2Eb.jpg", "a.b.png", "a.jpg", "a.png", ".hidden.jpg", "noending", "x.JPEG", "ü.jpg",
        "l" * 150 + ".jpg", "deep/er/a.jpg", "x.cls", "x.json", "a~.jpg~", "%.jpg", "a%x2.jpg",
    )  # fmt: skip

    def test_any_names_become_keys_that_are_read_again(self, opened: list[PackedFiles]) -> None:
        for number, name in enumerate(self.NAMES):
            path = Path("files", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(JPEG + b"%d" % number)
        listed = [*self.NAMES, "a.jpg", "../files/a.jpg", os.path.abspath("files/a.jpg")]
        lines = (f"{name}\t{number}\n" for number, name in enumerate(listed))
        Path("files/list.tsv").write_text("".join(lines), "utf-8")
        source = FileList("files/list.tsv")

        _, how = pack(source, "out")

        found = eval(how, {"TarShards": TarShards, "open_source": open_source})
        opened.append(found)
        assert contents(found) == contents(source)
        assert found.labels.tolist() == source.labels.tolist()
        with tarfile.open("out/shard-000000.tar") as tar:
            names = tar.getnames()
        assert len(set(names)) == len(names)
        assert not any(name.startswith("/") or ".." in name.split("/") for name in names)

    def test_samples_without_names_have_numbers_and_the_ending_of_their_content(
        self, opened: list[PackedFiles]
    ) -> None:
        np.save("rows.npy", np.frombuffer(JPEG + b"1" + JPEG + b"2" + b"none", np.uint8).reshape(3, 4))
        source = Arrays("rows.npy")
        opened.append(source)

        _, how = pack(source, "out")

        assert how == f"TarShards({os.path.abspath('out')!r}, member='bin;jpg')"
        found = eval(how, {"TarShards": TarShards})
        opened.append(found)
        assert contents(found) == contents(source)
        assert found.describe(2).endswith(": 000000002.bin")

    @pytest.mark.parametrize(
        ("values", "label"),
        [
            ([{"age": 0.5, "tags": ["a"]}, {"age": 2, "tags": ["a", "b"]}], {"age": 2.0, "tags": [1, 1]}),
            ([{"label": 0.5}, {"label": 1.5}], {"label": 1.5}),
            ([{"label": 2_000_000}, {"label": 3}], {"label": 3}),
        ],
    )
    def test_labels_that_are_no_class_are_json(
        self, values: list[dict[str, Any]], label: dict[str, Any], opened: list[PackedFiles]
    ) -> None:
        lines = []
        for number, each in enumerate(values):
            Path(f"{number}.jpg").write_bytes(JPEG)
            lines.append(json.dumps({"file": f"{number}.jpg"} | each))
        Path("train.jsonl").write_text("\n".join(lines))
        source = Manifest("train.jsonl", labels="label" if "label" in label else ["age", "tags"])

        _, how = pack(source, "out")

        with tarfile.open("out/shard-000000.tar") as tar:
            member = tar.extractfile("1.json")
            assert member is not None
            assert json.loads(member.read()) == label
        found = eval(how, {"TarShards": TarShards})
        opened.append(found)
        by_name = [
            each.labels if isinstance(each.labels, dict) else {"": each.labels} for each in (found, source)
        ]
        one, other = [
            {name: np.asarray(each).tolist() for name, each in labels.items()} for labels in by_name
        ]
        assert one == other

    def test_none_stays_none(self, opened: list[PackedFiles]) -> None:
        for number in range(3):
            Path(f"{number}.jpg").write_bytes(JPEG)
        Path("some.csv").write_text("0.jpg,-1\n1.jpg,2\n2.jpg,0\n")
        Path("none.csv").write_text("0.jpg\n1.jpg\n2.jpg\n")

        for name, labels in (("some", [-1, 2, 0]), ("none", [-1, -1, -1])):
            for to in ("tar", "records"):
                pack(FileList(f"{name}.csv"), f"{name}-{to}", to=to)
                found = open_source(f"{name}-{to}")
                assert isinstance(found, PackedFiles)
                opened.append(found)
                assert np.asarray(found.labels).tolist() == labels


class TestRecords:
    def test_pictures_become_mds_shards(self, opened: list[PackedFiles]) -> None:
        source = photos()

        _, how = pack(source, "out", to="records", shard_bytes=20_000)

        found = eval(how, {"open_source": open_source})
        opened.append(found)
        assert isinstance(found, MosaicShards)
        assert contents(found) == contents(source)
        assert np.asarray(found.labels).tolist() == source.labels.tolist()
        assert found.classes == source.classes
        shard = json.loads(Path("out/index.json").read_text())["shards"][1]
        data = Path("out", shard["raw_data"]["basename"]).read_bytes()
        count, first, second = struct.unpack_from("<3I", data)
        sizes = struct.unpack_from("<2I", data, first)
        assert (count, len(data)) == (shard["samples"], shard["raw_data"]["bytes"])
        assert second == first + 8 + sum(sizes) + 8
        name = data[first + 8 + sizes[0] + 8 : second].decode()
        with open(f"photos/{name}", "rb") as file:
            assert file.read() == data[first + 8 : first + 8 + sizes[0]]

    def test_rows_of_numbers_become_npy_files(self, opened: list[PackedFiles]) -> None:
        values = np.arange(600, dtype="<f4").reshape(50, 3, 4)
        values.tofile("records.bin")
        labels = np.arange(50) % 7
        source = Records("records.bin", "<f4", (3, 4), labels=labels)
        opened.append(source)

        shards, how = pack(source, "out", to="records", shard_bytes=800, shuffle_seed=1)

        order = FullShuffle(50, 1).at(0, np.arange(50))
        assert np.array_equal(
            np.concatenate([np.load(Path("out", each.name)) for each in shards]), values[order]
        )
        found = eval(how, {"Arrays": Arrays})
        opened.append(found)
        assert np.array_equal(found.labels, labels[order])
        assert found.numbers == source.numbers

    def test_labels_by_name_become_files_of_their_own(self, opened: list[PackedFiles]) -> None:
        np.save("rows.npy", np.arange(6).reshape(3, 2))
        source = Arrays("rows.npy", labels={"a": np.arange(3.0), "b/c": np.arange(6).reshape(3, 2)})
        opened.append(source)

        _, how = pack(source, "out", to="records")

        found = eval(how, {"Arrays": Arrays, "np": np})
        opened.append(found)
        assert {name: each.tolist() for name, each in found.labels.items()} == {
            "a": [0, 1, 2],
            "b/c": [[0, 1], [2, 3], [4, 5]],
        }

    def test_labels_that_records_do_not_have_are_refused(self) -> None:
        Path("0.jpg").write_bytes(JPEG)
        Path("train.csv").write_text("file,age\n0.jpg,0.5\n")

        with pytest.raises(ConfigError, match=r"not one integer for each sample.*--to tar keeps them"):
            pack(Manifest("train.csv", labels="age"), "out", to="records")

        assert not Path("out.unfinished").exists()


class TestWhatMayHappen:
    def test_the_same_source_gives_the_same_bytes(self) -> None:
        source = photos()
        for to in ("tar", "records"):
            for out in ("one", "two"):
                pack(source, f"{out}-{to}", to=to, shard_bytes=9000)

            assert files_in(Path(f"one-{to}")) == files_in(Path(f"two-{to}"))

    @pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("to", ["tar", "records"])
    def test_a_kill_at_any_moment_leaves_nothing_or_all_of_it(
        self, to: str, stride: int, interpreters: Interpreters
    ) -> None:
        """The process is killed at its n-th sync, rename or write of a file's name, for every n there is."""
        source = photos(12)
        pack(source, "expected", to=to, shard_bytes=9000)
        arguments = ["photos", "out", "--to", to, "--shard-size", "9 kB"]

        kills = 0
        while True:
            ended = interpreters.run(_KILLED, str(kills), "pack", *arguments)
            if ended.returncode == 0:
                break
            assert ended.returncode == -signal.SIGKILL, ended.stderr
            is_there = Path("out").exists()
            if not is_there:
                assert main(["pack", *arguments]) == 0
            assert files_in(Path("out")) == files_in(Path("expected")), f"killed after {kills}"
            assert not Path("out.unfinished").exists()
            shutil.rmtree("out")
            kills += stride

        assert kills > 12

    def test_what_was_killed_is_not_written_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source = photos()
        asked: list[int] = []

        def done(samples: int) -> None:
            asked.append(samples)
            if samples >= 20:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pack(source, "out", shard_bytes=9000, done=done)
        begun = {name: os.stat(Path("out.unfinished", name)).st_ino for name in os.listdir("out.unfinished")}
        asked.clear()
        shards, _ = pack(source, "out", shard_bytes=9000, done=asked.append)

        assert 0 < asked[0] <= 20
        whole = [name for name in begun if name.startswith("shard")]
        assert len(whole) > 1
        assert all(os.stat(Path("out", name)).st_ino == begun[name] for name in whole)
        assert sum(shard.samples for shard in shards) == 40
        assert not [name for name in os.listdir("out") if name.startswith(".")]

    def test_a_torn_line_or_a_shard_that_is_gone_is_made_again(self) -> None:
        source = photos()
        pack(source, "expected", shard_bytes=9000)
        for damage in ("torn", "gone", "short"):
            with pytest.raises(KeyboardInterrupt):
                pack(source, "out", shard_bytes=9000, done=_stop_at(30))
            work = Path("out.unfinished")
            if damage == "torn":
                with open(work / "journal.jsonl", "ab") as file:
                    file.write(b'{"name": "shard-0000')
            elif damage == "gone":
                (work / "shard-000001.tar").unlink()
            else:
                os.truncate(work / "shard-000000.tar", 512)
            with pytest.raises(KeyboardInterrupt):
                pack(source, "out", shard_bytes=9000, done=_stop_at(35))

            pack(source, "out", shard_bytes=9000)

            assert files_in(Path("out")) == files_in(Path("expected")), damage
            shutil.rmtree("out")

    def test_other_arguments_or_another_source_do_not_go_on(self) -> None:
        source = photos()
        with pytest.raises(KeyboardInterrupt):
            pack(source, "out", shard_bytes=9000, done=_stop_at(20))

        for other, arguments in (
            (source, {"shard_bytes": 8000}),
            (source, {"shard_bytes": 9000, "shuffle_seed": 1}),
            (Selection(source, range(39)), {"shard_bytes": 9000}),
        ):
            with pytest.raises(
                ConfigError, match=r"out\.unfinished was begun from another source, or with other"
            ):
                pack(other, "out", **arguments)  # type: ignore[arg-type]

    def test_where_no_shard_is_whole_it_begins_anew(self) -> None:
        source = photos()
        with pytest.raises(KeyboardInterrupt):
            pack(source, "out", done=_stop_at(0))

        pack(source, "out", to="records")

        assert Path("out/index.json").exists()

    def test_two_do_not_write_at_once(self) -> None:
        source = photos()

        def another(samples: int) -> None:
            with pytest.raises(ConfigError, match=r"out\.unfinished is being written by another process"):
                pack(source, "out")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pack(source, "out", done=another)

    def test_a_disk_that_does_not_keep_what_is_written_is_found(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(packing, "_digest_of_file", lambda path: "0" * 32)

        with pytest.raises(DataError, match=r"the disk does not keep what it is given"):
            pack(photos(), "out")

        assert not Path("out").exists()
        assert not Path("out.unfinished/shard-000000.tar").exists()

    def test_space_is_looked_at_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000))

        with pytest.raises(DataError, match=r"has 10 kB left, and what is to be written takes up to"):
            pack(photos(), "out")

    def test_a_full_disk_is_named_and_it_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source, real = photos(), os.fsync
        syncs = iter(range(100))

        def full(descriptor: int) -> None:
            if next(syncs) == 5:
                raise OSError(28, "No space left on device")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(
            DataError, match="No space left on device; correct that, and the same command continues"
        ):
            pack(source, "out", shard_bytes=9000)
        pack(source, "out", shard_bytes=9000)

        assert Path("out/pack.json").exists()

    def test_a_bad_sample_is_named_and_left_out_by_the_list(
        self, capsys: pytest.CaptureFixture[str], opened: list[PackedFiles]
    ) -> None:
        photos()
        Path("photos/cat/003.jpg").write_bytes(b"")

        assert main(["pack", "photos", "--to", "tar", "out"]) == 1
        error = capsys.readouterr().err
        assert "photos/cat/003.jpg is empty" in error
        assert "penstock check finds all such samples, and --skip leaves them out" in error
        head = {"penstock": "samples to skip", "version": 1, "samples": 40, "checked": 40}
        about = json.loads(Path("out.unfinished/journal.jsonl").read_text())["source"]
        Path("bad.jsonl").write_text(json.dumps(head | about) + '\n{"sample": 1}\n')
        assert main(["pack", "photos", "--to", "tar", "out", "--skip", "bad.jsonl"]) == 0
        found = open_source("out")
        assert isinstance(found, PackedFiles)
        opened.append(found)
        assert len(found) == 39

    def test_a_folder_that_exists_is_left_alone(self) -> None:
        Path("out").mkdir()
        for out, message in (("out", "out exists"), ("no/out", "there is no folder .*no: make it first")):
            with pytest.raises(ConfigError, match=message):
                pack(photos(), out)
        with pytest.raises(
            ConfigError, match='to is "zip"; it is "tar" or "records"'.replace('"zip"', "'zip'")
        ):
            pack(photos(), "new", to="zip")
        with pytest.raises(
            ConfigError, match="s3://bucket/out is an address: pack into a folder, and copy that"
        ):
            pack(photos(), "s3://bucket/out")
        with pytest.raises(ConfigError, match="shard_bytes is 0"):
            pack(photos(), "new", shard_bytes=0)


class TestCommand:
    def test_what_was_written_is_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        photos()

        assert main(["pack", "photos", "--to", "tar", "out", "--json"]) == 0

        found = json.loads(capsys.readouterr().out)
        (shard,) = found.pop("results")
        assert shard["name"] == "shard-000000.tar"
        assert (shard["samples"], shard["endings"]) == (40, ["jpg"])
        assert found == {
            "source": "photos",
            "out": "out",
            "open": f"open_source({os.path.abspath('out')!r})",
            "pays": None,
        }

    def test_after_ctrl_c_it_says_how_to_go_on(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        photos()

        def stopped(*arguments: Any, done: Callable[[int], None], **options: Any) -> None:
            pack(*arguments, done=_stop_at(10), **options)

        monkeypatch.setattr("penstock.loader.packing.pack", stopped)

        assert main(["pack", "photos", "--to", "tar", "out"]) == INTERRUPTED
        assert capsys.readouterr().err.splitlines()[-2:] == [
            "the same command continues",
            "penstock: interrupted",
        ]

    def test_it_says_in_a_line_whether_it_pays(
        self, capsys: pytest.CaptureFixture[str], opened: list[PackedFiles]
    ) -> None:
        photos()
        Path("machine.toml").write_text(
            '[source]\nclients = { 1 = "1 MB/s" }\nrandom_read = "1 kB"\nsequential = "100 MB/s"\n'
            '[[storage]]\nname = "staging"\ncapacity = "1 GB"\nthreads = 2\nread = "16 GB/s"\n'
        )

        main(["pack", "photos", "--to", "tar", "out", "--machine", "machine.toml", "--epochs", "5"])
        main(["pack", "out", "--to", "records", "again", "--machine", "machine.toml"])

        first, _, second, _ = capsys.readouterr().out.splitlines()
        assert first.startswith("Packing the samples once costs ")
        assert "pays from 2 epochs on, which this run has." in first
        assert second.startswith("Writing the data set anew in the order of the first epoch costs ")


def test_a_file_beside_shards_that_is_somebody_elses_names_no_class(opened: list[PackedFiles]) -> None:
    pack(photos(3), "out")
    ours = '{"penstock": "packed shards"'
    for text in (
        "{",
        "[1]",
        '{"penstock": "something else", "classes": ["a", "b", "c"]}',
        ours + "}",
        ours + ', "classes": ["a"]}',
        ours + ', "classes": [1, 2, 3]}',
    ):
        Path("out/pack.json").write_text(text)
        found = open_source("out")
        assert isinstance(found, PackedFiles)
        opened.append(found)
        assert found.classes == ("0", "1", "2")


def _stop_at(samples: int) -> Any:
    def done(written: int) -> None:
        if written >= samples:
            raise KeyboardInterrupt

    return done


_KILLED = """
import os, pathlib, signal, sys
from penstock.cli.main import main

left = int(sys.argv[1])

def counted(call):
    def one(*arguments, **others):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return call(*arguments, **others)
    return one

os.fsync, os.replace = counted(os.fsync), counted(os.replace)
pathlib.Path.rename, pathlib.Path.unlink = counted(pathlib.Path.rename), counted(pathlib.Path.unlink)
sys.exit(main(sys.argv[2:]))
"""


def test_members_of_tar_shards_are_packed_by_their_names(
    capsys: pytest.CaptureFixture[str], opened: list[PackedFiles]
) -> None:
    write(Path("a.tar"), {"a.jpg": b"1", "a.thumb.jpg": b"22", "a.json": b'{"kind": "cat"}'})

    assert main(["pack", "a.tar", "out", "--to", "tar", "--member", "thumb.jpg", "--label", "json:kind"]) == 0

    *_, line = capsys.readouterr().out.splitlines()
    source = eval(line.rpartition(": ")[2], {"TarShards": TarShards, "open_source": open_source})
    opened.append(source)
    assert (source.read(0), source.classes) == (b"22", ("cat",))

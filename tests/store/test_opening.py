"""What is said of paths that are of no data set that can be read, and of those that may not be read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import pytest
from tests.for_each import for_each
from tests.store.tar_files import write
from tests.store.web_server import serving

from penstock import Loader, open_source
from penstock.cache_folders import Folders
from penstock.errors import ConfigError, DataError
from penstock.loader.transforms import Resize, ToTensor
from penstock.store import ArrowFiles, Hdf5, JsonLines, Manifest, catalogs
from penstock.store.calls import Calls


@for_each(
    ("name", "message"),
    [
        ("a.mds", "MDS shards are read with index.json next to them, which is missing"),
        ("a.npy", r"open them with penstock\.store\.Arrays\('\S+/folder/\*\.npy'\), which reads their rows"),
        (
            "train-00001-of-00002",
            r"open them with penstock\.store\.TFRecords\('\S+/folder/\*-of-\*'\) if they are",
        ),
        ("a.unknown", r"pass extensions=\('\.unknown',\), or None for every file"),
        ("a.jsonl.gz", r"4 end in '\.gz': each is compressed, .*: unpack it once"),
    ],
)
def test_a_folder_of_other_files_is_answered_with_what_reads_them(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "folder").mkdir()
    for each in (name, "features.json", "dataset_info.json"):
        (tmp_path / "folder" / each).write_bytes(b"1")
    if name.endswith((".npy", ".unknown", ".gz")):  # more of these than of facts
        for number in range(3):
            (tmp_path / "folder" / f"{number}{name[1:]}").write_bytes(b"1")

    with pytest.raises(DataError, match=message):
        Loader(tmp_path / "folder", batch_size=2, epochs=1, report=None)


def test_what_is_read_otherwise_is_named_although_other_files_lie_beside_it(tmp_path: Path) -> None:
    """As `save_to_disk` of a DatasetDict leaves it."""
    (tmp_path / "train").mkdir()
    for name in ("data-00000-of-00001.arrow", "dataset_info.json", "state.json"):
        (tmp_path / "train" / name).write_bytes(b"1")

    with pytest.raises(
        DataError, match=r"1 end in '\.arrow': open them .*ArrowFiles\('\S+/train/\*\.arrow'\)"
    ):
        open_source(tmp_path)


def test_a_file_that_is_not_opened_by_its_path_alone_is_answered_with_how(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", rows=np.zeros(3))
    (tmp_path / "a.bin").write_bytes(bytes(100))
    (tmp_path / "a.tfrecord").write_bytes(b"no record")
    for name in ("a.zip", "a.pt", "a.safetensors", "a.jpg", "a.json", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(b'[{"file_name": "a.jpg"}]')

    with pytest.raises(ConfigError, match=r"a\.npz has compressed arrays, .* write each by numpy\.save"):
        open_source(tmp_path / "a.npz")
    with pytest.raises(ConfigError, match=r"a\.bin does not say what numbers .*Records\(path, dtype"):
        open_source(tmp_path / "a.bin")
    for name, message in (
        ("a.zip", "is an archive, which is not read: unpack it"),
        ("a.pt", "is not read, as what is pickled in it would be run"),
        ("a.safetensors", r"has tensors, and is not read: .* numpy\.save"),
        ("a.jpg", "is one picture: give its folder"),
        (
            "a.jsonl.gz",
            "is compressed, so that no part of it can be read without all before it: unpack it once",
        ),
        ("a.json", r"is JSON: open COCO's with penstock\.store\.CocoImages.* called \.jsonl"),
    ):
        with pytest.raises(ConfigError, match=f"{name} {message}"):
            open_source(tmp_path / name)
    with pytest.raises(ConfigError, match=r"a\.json is JSON: open COCO's"):
        Manifest(tmp_path / "a.json")
    with pytest.raises(DataError, match=r"a\.tfrecord is (cut off|damaged)"):
        open_source(tmp_path / "a.tfrecord")


def test_a_folder_that_datasets_saved_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else a progress bar leaves a thread behind
    rows = datasets.Dataset.from_dict({"text": [f"row {number}" for number in range(5)]})
    rows.select([3, 1]).save_to_disk(tmp_path / "saved")

    source = open_source(tmp_path / "saved")

    assert isinstance(source, ArrowFiles)
    assert [source.read(0), source.read(1)] == [b"row 3", b"row 1"]
    with Loader(tmp_path / "saved", batch_size=2, epochs=1, shuffle=False, report=None) as loader:
        assert next(iter(loader)) == ["row 3", "row 1"]


@pytest.mark.usefixtures("obstore_threads")
def test_a_folder_of_hdf5_files_is_opened_by_its_path(tmp_path: Path) -> None:
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["data"] = np.full((3, 2), number, np.float32)
    (tmp_path / "README.md").write_text("")

    source = open_source(tmp_path)

    assert isinstance(source, Hdf5)
    assert [np.frombuffer(source.read(sample), "<f4")[0] for sample in (0, 2, 3)] == [0, 0, 1]
    objects = {f"d/{name}": (tmp_path / name).read_bytes() for name in ("0.h5", "1.h5")}
    with serving(objects) as server:
        assert open_source(f"{server.address}/d").read(3) == source.read(3)
        assert Hdf5(f"{server.address}/d").read(3) == source.read(3)
    with pytest.raises(
        DataError, match=r"is a folder without HDF5 files, or with pictures or folders next to them"
    ):
        Hdf5(tmp_path.parent)
    with Loader(tmp_path, batch_size=6, epochs=1, shuffle=False, report=None) as loader:
        (batch,) = loader
        assert batch[:, 1].tolist() == [0, 0, 0, 1, 1, 1]


@for_each(
    ("name", "options", "message"),
    [
        (
            "a.tar",
            {"sample": "png"},
            "options has 'sample', and .*a.tar is opened by TarShards, which takes member, label",
        ),
        (
            "a.h5",
            {"catalog": None},
            "options has 'catalog', and .*a.h5 is opened by Hdf5, which takes data, labels, memory",
        ),
        (
            "pictures",
            {"label": "a"},
            r"options \(label\) are of shards, tables and arrays, and .*pictures is none",
        ),
    ],
)
def test_options_of_another_class_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    write(tmp_path / "a.tar", {"x.jpg": b"1"})
    (tmp_path / "a.h5").write_bytes(b"")
    (tmp_path / "pictures").mkdir()

    with pytest.raises(ConfigError, match=message):
        open_source(tmp_path / name, options=options)


def test_options_go_to_the_class_that_opens_a_path(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"x.dat": b"12", "x.json": b'{"kind": "cat"}'})
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"], file["other"] = np.zeros((3, 2)), np.zeros((4, 1), np.uint8)

    tars = open_source(tmp_path / "a.tar", options={"member": "dat", "label": "json:kind"})

    assert (tars.read(0), tars.classes) == (b"12", ("cat",))
    assert len(open_source(tmp_path / "a.h5", options={"data": "other"})) == 4


class TestJsonLines:
    """Of a path alone, the first line says whether JSON lines are a table of files, or samples themselves."""

    def opened(self, path: Path | str | list[Path], **options: Any) -> tuple[Any, list[str]]:
        """Return what is opened, and what is reported of it."""
        lines: list[str] = []
        return open_source(path, calls=Calls(report=lines.append), **options), lines

    @for_each(
        ("first", "kind"),
        [
            ('{"file_name": "a.jpg", "label": 1}', Manifest),
            ('{"label": 1, "Path": "a.dat"}', Manifest),
            ('{"id": 7}', Manifest),
            ('\ufeff\n \n{"image": "a.jpg"}', Manifest),
            ('{"id": 8, "text": "a"}', JsonLines),
            ('{"path": "src/main.py", "text": "a"}', JsonLines),
            ('{"image": null, "text": "a"}', JsonLines),
            ('{"path": "https://example.com/page", "text": "a"}', JsonLines),
            ('{"id": "https://example.com/page.html", "text": "a"}', JsonLines),
            ('{"text": "a"}', JsonLines),
            ('["a.jpg"]', JsonLines),
            ('{"file_name"', JsonLines),
            ('{"file_name": "a.jpg", "more": "' + 2_000_000 * "a" + '"}', JsonLines),
        ],
    )
    def test_a_table_names_a_file_in_its_first_line(self, tmp_path: Path, first: str, kind: type) -> None:
        for name in ("a.jpg", "a.dat", "7"):
            (tmp_path / name).write_bytes(b"12")
        path = tmp_path / "x.jsonl"
        path.write_text(first + "\n")

        source, lines = self.opened(path)

        assert type(source) is kind
        (line,) = lines
        assert f"({kind.__name__})" in line
        assert f"penstock.store.{'JsonLines' if kind is Manifest else 'Manifest'}(path" in line

    def test_what_is_taken_is_said_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = tmp_path / "kept"
        kept.mkdir()
        monkeypatch.setattr(catalogs, "_folders", lambda: Folders((kept,), kept, ""))
        monkeypatch.setattr(catalogs, "LEAST_SAMPLES", 1)
        (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')

        assert [len(self.opened(tmp_path / "x.jsonl")[1]) for _ in range(2)] == [1, 0]

    def test_a_picture_that_is_missing_makes_no_text_of_a_table(self, tmp_path: Path) -> None:
        (tmp_path / "x.jsonl").write_text('{"file_name": "missing.jpg"}\n')

        with pytest.raises(DataError, match=r"x\.jsonl, line 1: .*missing\.jpg"):
            open_source(tmp_path / "x.jsonl")

    def test_folders_and_patterns_of_lines_are_samples_and_a_table_is_named_by_itself(
        self, tmp_path: Path
    ) -> None:
        for number in range(2):
            (tmp_path / f"{number}.jsonl").write_text(f'{{"text": "{number}"}}\n')

        for path in (tmp_path, tmp_path / "*.jsonl", [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]):
            source, lines = self.opened(path)
            assert isinstance(source, JsonLines)
            assert [source.read(sample) for sample in range(2)] == [b'{"text": "0"}', b'{"text": "1"}']
            assert len(lines) == 1
        with Loader(tmp_path, batch_size=2, epochs=1, shuffle=False, report=None) as loader:
            assert next(iter(loader)) == {"text": ["0", "1"]}
        with pytest.raises(ConfigError, match=r"transforms .* lines of JSON: .*Manifest"):
            Loader(tmp_path, batch_size=2, epochs=1, transforms=[Resize((4, 4)), ToTensor()], report=None)
        with pytest.raises(
            ConfigError, match=r"options has 'label', and .* opened by JsonLines, which takes none"
        ):
            open_source(tmp_path, options={"label": "text"})
        (tmp_path / "0.jsonl").write_text('{"file": "1.jsonl"}\n')
        for path in (tmp_path, tmp_path / "*.jsonl"):
            with pytest.raises(ConfigError, match=r"0\.jsonl names a file, 1\.jsonl, .*give that path"):
                open_source(path)

    @pytest.mark.usefixtures("obstore_threads")
    def test_at_an_address_the_file_is_looked_for_there(self) -> None:
        objects = {
            "a.dat": b"12",
            "a.jpg": b"123",
            "text.jsonl": b'{"id": "b-1", "path": "b.dat"}\n',
            "table.jsonl": b'{"path": "a.dat"}\n',
        }

        with serving(objects) as server:
            server.objects["pictures.jsonl"] = b'{"image": "%s/a.jpg"}\n' % server.address.encode()
            text, _ = self.opened(f"{server.address}/text.jsonl")
            table, _ = self.opened(f"{server.address}/table.jsonl")
            pictures, _ = self.opened(f"{server.address}/pictures.jsonl")

            assert isinstance(text, JsonLines)
            assert isinstance(table, Manifest)
            assert table.read(0) == b"12"
            assert isinstance(pictures, Manifest)
            assert pictures.read(0) == b"123"
            for each in (text, table, pictures):
                each.close()


def test_an_empty_list_and_a_file_that_is_listed_twice_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2)))

    with pytest.raises(ConfigError, match="the list of paths is empty"):
        Loader([], batch_size=2, epochs=1, transforms=[ToTensor()], report=None)
    with pytest.raises(ConfigError, match=r"/a\.npy is listed twice in \S+/a\.npy and 1 more"):
        open_source([tmp_path / "a.npy", tmp_path / "*.npy"])


class TestWhatMayNotBeRead:
    """The user of these tests may read everything, so that the call which would be refused is replaced."""

    def refuse(self, monkeypatch: pytest.MonkeyPatch, target: Any, name: str, place: str) -> None:
        call = getattr(target, name)

        def refused(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path).startswith(place):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *args, **kwargs)

        monkeypatch.setattr(target, name, refused)

    def test_arrays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "a.npy"
        np.save(file, np.zeros((3, 2)))
        self.refuse(monkeypatch, np.lib.format, "open_memmap", str(file))

        with pytest.raises(DataError, match=r"/a\.npy may not be read by user"):
            open_source(file)

    def test_hdf5_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "a.h5"
        with h5py.File(file, "w") as out:
            out["data"] = np.zeros((3, 2))
        self.refuse(monkeypatch, h5py, "File", str(file))

        with pytest.raises(DataError, match=r"/a\.h5 may not be read by user"):
            open_source(file)

    @pytest.mark.parametrize("name", ["a.arrow", "a.parquet", "a.tfrecord", "a.tar"])
    def test_files_that_are_indexed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        file = tmp_path / name
        file.write_bytes(b"1")
        self.refuse(monkeypatch, os, "open", str(file))

        with pytest.raises(DataError, match=rf"/{name} may not be read by user"):
            open_source(file)

    def test_the_folder_of_a_pattern(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuse(monkeypatch, os, "scandir", str(tmp_path))

        with pytest.raises(DataError, match=r"no file fits \S+/\*\.tar: \S+ may not be listed by user"):
            open_source(tmp_path / "*.tar")

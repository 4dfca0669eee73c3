"""Tables that name the file of each sample, and its labels."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.cache_folders import Folders
from penstock.errors import ConfigError, DataError
from penstock.loader import Loader
from penstock.loader.resume import describe_data
from penstock.loader.transforms import DecodeRaw
from penstock.store import FileList, Manifest, catalogs, listing, open_source
from penstock.store.calls import Calls
from penstock.store.catalog import Catalog


def write(folder: Path, name: str, text: str | bytes, files: int = 3) -> Path:
    """Write a table, and files 0.jpg, 1.jpg ... beside it."""
    for number in range(files):
        (folder / f"{number}.jpg").write_bytes(b"%d" % number)
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def write_json(folder: Path, *records: dict[str, Any]) -> Path:
    lines = [json.dumps({"file_name": f"{number}.jpg"} | each) for number, each in enumerate(records)]
    return write(folder, "train.jsonl", "\n".join(lines), len(records))


def labels_of(manifest: Manifest) -> np.ndarray:
    assert isinstance(manifest.labels, np.ndarray)
    return manifest.labels


class TestNumbers:
    @pytest.mark.parametrize("number", [2**63, 2**64 + 1, -(2**63) - 1])
    def test_an_integer_of_more_than_64_bits_is_named_by_its_line(self, tmp_path: Path, number: int) -> None:
        lines = f"file_name,label\n0.jpg,1\n1.jpg,{number}\n2.jpg,1\n"

        with pytest.raises(
            DataError, match=rf"a\.csv, line 3: label is '{number}': an integer has at most 64 bits"
        ):
            Manifest(write(tmp_path, "a.csv", lines))
        with pytest.raises(DataError, match=rf"line 2: label is {number}: an integer has at most 64 bits"):
            Manifest(write_json(tmp_path, {"label": 1}, {"label": number}))

    def test_no_integer_changes_among_numbers_with_fractions(self, tmp_path: Path) -> None:
        for values in ([2**24 + 1, 1.5], [[2**24 + 1, 2], [0.5, 1]]):
            labels = labels_of(Manifest(write_json(tmp_path, *({"label": each} for each in values))))
            assert labels.dtype == np.float64
            assert labels.tolist() == values
        lines = "file_name,label,other\n0.jpg,16777216,0.5\n1.jpg,1.5,2\n2.jpg,2,3\n"
        assert labels_of(Manifest(write(tmp_path, "a.csv", lines))).dtype == np.float32
        with pytest.raises(DataError, match=r"line 1: label is 9007199254740993, which no float64 holds"):
            Manifest(write_json(tmp_path, {"label": 2**53 + 1}, {"label": 1.5}))

    def test_columns_of_integers_and_of_fractions_become_float32_unless_one_would_change(
        self, tmp_path: Path
    ) -> None:
        for number, dtype in ((3, np.float32), (2**24 + 1, np.float64)):
            lines = f"file_name,a,b\n0.jpg,1,0.1\n1.jpg,{number},0.5\n"
            labels = Manifest(write(tmp_path, "a.csv", lines), labels={"t": ["a", "b"]}).labels["t"]
            assert labels.dtype == dtype
            assert labels.tolist() == [[1, float(np.float32(0.1))], [number, 0.5]]

    def test_classes_called_nan_and_inf_are_names(self, tmp_path: Path) -> None:
        source = Manifest(write(tmp_path, "a.csv", "file_name,label\n0.jpg,nan\n1.jpg,inf\n"))

        assert source.classes == ("inf", "nan")
        assert labels_of(source).tolist() == [1, 0]


class TestTables:
    @for_each(
        ("name", "text"),
        [
            ("metadata.csv", "file_name,label\n0.jpg,cat\n1.jpg,dog\n2.jpg,cat\n"),
            ("train.tsv", "path\tclass\n0.jpg\tcat\n1.jpg\tdog\n2.jpg\tcat\n"),
            ("train.csv", '\ufeff"Label", Image\r\ncat,0.jpg\r\n\r\n"dog","1.jpg"\r\ncat,2.jpg'),
            ("a.jsonl", '{"file_name": "0.jpg", "label": "cat"}\n{"label": "dog", "file_name": "1.jpg"}\n'
             '\n{"file_name": "2.jpg", "label": "cat", "more": null}'),
        ],
    )  # fmt: skip
    def test_the_usual_ones_are_opened_in_one_line(self, tmp_path: Path, name: str, text: str) -> None:
        for source in (Manifest(write(tmp_path, name, text)), open_source(tmp_path / name)):
            assert isinstance(source, Manifest)
            assert [source.read(sample) for sample in range(3)] == [b"0", b"1", b"2"]
            assert (labels_of(source).tolist(), source.classes) == ([0, 1, 0], ("cat", "dog"))
            assert source.describe(1) == str(tmp_path / "1.jpg")

    def test_names_without_an_ending_are_found_in_a_folder_of_their_own(self, tmp_path: Path) -> None:
        """As in many of Kaggle's data sets."""
        (tmp_path / "images").mkdir()
        write(tmp_path / "images", "unused", "")
        table = tmp_path / "train.csv"
        table.write_text("id_code,diagnosis\n2,4\n0,0\n")

        source = Manifest(
            table, file="id_code", labels="diagnosis", folder=tmp_path / "images", ending=".jpg"
        )

        assert [source.read(0), source.read(1)] == [b"2", b"0"]
        assert labels_of(source).tolist() == [4, 0]

    def test_a_list_of_paths_and_labels_stays_a_list_of_files(self, tmp_path: Path) -> None:
        assert type(open_source(write(tmp_path, "list.csv", "0.jpg,1\n"))) is FileList
        assert type(open_source(write(tmp_path, "list.csv", "path,label\n0.jpg,1\n"))) is FileList

    def test_labels_that_are_not_wanted_are_none(self, tmp_path: Path) -> None:
        table = write(tmp_path, "a.csv", "file,label\n0.jpg,cat\n")

        assert (labels_of(Manifest(table, labels=None)).tolist(), Manifest(table, labels=None).classes) == (
            [-1],
            (),
        )
        table.write_text("file,text\n0.jpg,a cat\n")
        assert labels_of(Manifest(table)).tolist() == [-1]


class TestLabels:
    @for_each(
        ("values", "expected", "classes"),
        [
            ([1, 0, 2], np.array([1, 0, 2]), ("0", "1", "2")),
            ([-1, 0, 2], np.array([-1, 0, 2]), ("0", "1", "2")),
            ([2_000_000, 0, 1], np.array([2_000_000, 0, 1]), ()),
            ([True, False, True], np.array([1, 0, 1]), ("0", "1")),
            ([1, 0.5, 2], np.array([1, 0.5, 2], np.float32), ()),
            (["b", "a", "b"], np.array([1, 0, 1]), ("a", "b")),
            (["1_0", "2_0", "1_0"], np.array([0, 1, 0]), ("1_0", "2_0")),
            ([[1, 2], [3, 4], [5, 6]], np.array([[1, 2], [3, 4], [5, 6]]), ()),
            ([[0.5], [1], [2]], np.array([[0.5], [1], [2]], np.float32), ()),
            ([[[1], [2]]] * 3, np.array([[[1], [2]]] * 3), ()),
            ([["b"], [], ["a", "b"]], np.array([[0, 1], [0, 0], [1, 1]], np.uint8), ("a", "b")),
        ],
    )
    def test_they_have_the_type_and_shape_that_is_written(
        self, tmp_path: Path, values: list[Any], expected: np.ndarray, classes: tuple[str, ...]
    ) -> None:
        source = Manifest(write_json(tmp_path, *({"label": value} for value in values)))

        found = labels_of(source)
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())
        assert source.classes == classes

    def test_csv_has_numbers_where_all_of_a_column_are(self, tmp_path: Path) -> None:
        table = write(tmp_path, "a.csv", "file,i,f,t\n0.jpg,1,0.5,1\n1.jpg,-2,1e-3,a\n")
        source = Manifest(table, labels=["i", "f", "t"])

        assert isinstance(source.labels, dict)
        assert {name: (each.dtype.name, each.tolist()) for name, each in source.labels.items()} == {
            "i": ("int64", [1, -2]),
            "f": ("float32", [0.5, np.float32(1e-3)]),
            "t": ("int64", [0, 1]),
        }
        assert source.label_classes == {"t": ("1", "a")}

    def test_columns_are_named_and_joined(self, tmp_path: Path) -> None:
        table = write(tmp_path, "a.csv", "file,x,y,kind\n0.jpg,1,2,b\n1.jpg,3,4.5,a\n")

        source = Manifest(table, labels={"target": ["x", "y"], "class": "kind"})

        assert isinstance(source.labels, dict)
        assert source.labels["target"].tolist() == [[1, 2], [3, 4.5]]
        assert source.labels["class"].tolist() == [1, 0]

    def test_a_field_within_a_field_is_named_by_a_dot(self, tmp_path: Path) -> None:
        source = Manifest(write_json(tmp_path, {"a": {"b": 3}}, {"a": {"b": 4}}), labels="a.b")

        assert labels_of(source).tolist() == [3, 4]

    def test_classes_of_the_training_number_those_of_the_validation(self, tmp_path: Path) -> None:
        table = write(tmp_path, "val.csv", "file,label\n0.jpg,dog\n")

        assert labels_of(Manifest(table, classes=("cat", "dog"))).tolist() == [1]
        with pytest.raises(
            DataError, match=r"val\.csv, line 2: label is 'dog', which classes= does not have"
        ):
            Manifest(table, classes=("cat", "elk"))

    def test_a_loader_gives_them_by_name(self, tmp_path: Path) -> None:
        table = write_json(tmp_path, {"age": 3.5, "tags": ["a"]}, {"age": 1, "tags": ["b", "a"]})
        source = Manifest(table, labels=["age", "tags"])

        with Loader(
            source, batch_size=2, epochs=1, shuffle=False, transforms=[DecodeRaw("u1", (1,))], report=None
        ) as loader:
            (batch,) = [{name: each.copy() for name, each in batch.items()} for batch in loader]

        assert batch["images"].tolist() == [[48], [49]]
        assert (batch["age"].tolist(), batch["tags"].tolist()) == ([3.5, 1.0], [[1, 0], [1, 1]])


NAMES = st.text(
    st.characters(exclude_characters="/\0\\", exclude_categories=["Cs"]), min_size=1, max_size=8
).filter(lambda name: name.strip() == name and name not in (".", ".."))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(names=st.lists(NAMES, min_size=1, max_size=5, unique=True), is_json=st.booleans())
def test_what_others_write_is_read(tmp_path: Path, names: list[str], is_json: bool) -> None:
    """Python's own writers quote as they need."""
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(b"%d" % number)
    text = io.StringIO()
    if is_json:
        text.write("".join(json.dumps({"file": name, "label": name}) + "\n" for name in names))
    else:
        csv.writer(text).writerows([("file", "label"), *((name, name) for name in names)])
    table = tmp_path / ("table.jsonl" if is_json else "table.csv")
    table.write_bytes(text.getvalue().encode())

    source = Manifest(table, classes=names)

    assert [source.read(sample) for sample in range(len(names))] == [b"%d" % n for n in range(len(names))]
    assert labels_of(source).tolist() == list(range(len(names)))
    for name in names:
        (tmp_path / name).unlink()


class TestBadTables:
    @for_each(
        ("text", "message"),
        [
            (b"file,label\n0.jpg,caf\xe9\n", r"a\.csv, line 2: is no text in UTF-8"),
            ("file,label\n0.jpg,1\n9.jpg,1\n", r"line 3: .*/9\.jpg cannot be found"),
            ("file,label\n0.jpg,1\n1.jpg\n", "line 3: has 1 fields, and the heading 2"),
            ("file,label\n0.jpg,1\n1.jpg,1,2\n", "line 3: has 3 fields"),
            ("file,label\n0.jpg,1\n1.jpg,\n", "line 3: label is empty"),
            ("file,label\n0.jpg,1\n0.jpg,1\n", r"line 3: 0\.jpg is there already .*line 2"),
            ("file,label\n,1\n", "line 2: file is ''; it is the path of the sample's file$"),
            ("file,file\n0.jpg,1\n", "line 1: .* names a column twice"),
            ("file,label\n", "lists no files"),
            ("", "lists no files"),
            ('file,label\n"0.jpg,1\n', "line 2: unexpected end of data"),
            ("file,label\n.,1\n", "line 2: .* is not a regular file"),
        ],
    )
    def test_csv_is_refused_with_its_line(self, tmp_path: Path, text: str | bytes, message: str) -> None:
        with pytest.raises(DataError, match=message):
            Manifest(write(tmp_path, "a.csv", text))

    @for_each(
        ("text", "message"),
        [
            ('{"file": "0.jpg"}\n{"file": "1.jpg"', r"a\.jsonl, line 2: is no JSON"),
            ("[1]", "line 1: is .1.; a line is an object"),
            ("[" * 100_000, "line 1: is no JSON"),
            ('{"file": "0.jpg"}\n{"f": "1.jpg"}', r"line 2: file is None; .* by penstock\.store\.JsonLines\(path\)"),
            ('{"file": ["0.jpg"]}', r"line 1: file is \['0.jpg'\]"),
            ('{"file": "0\\u0000.jpg"}', "line 1: .* has a zero byte"),
            ('{"file": "0.jpg", "label": 1}\n{"file": "1.jpg"}', "line 2: has no label, unlike the first"),
            ('{"file": "0.jpg", "label": 1}\n{"file": "1.jpg", "label": "a"}', "line 2: label is 'a', unlike 1"),
            ('{"file": "0.jpg", "label": [1, 2]}\n{"file": "1.jpg", "label": [1]}', r"line 2: label is \[1\], of ano"),
            ('{"file": "0.jpg", "label": ["a"]}\n{"file": "1.jpg", "label": [1]}', "line 2: .* have lists of texts"),
            ('{"file": "0.jpg", "label": {}}', r"line 1: label is \{\}; it is a number"),
            ('{"file": "0.jpg", "label": null}', "line 1: label is empty"),
            ('{"file": "0.jpg", "label": [[1], [1, 2]]}', "line 1: label is .*; it is a number"),
        ],
    )  # fmt: skip
    def test_json_lines_are_refused_with_their_line(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(DataError, match=message):
            Manifest(write(tmp_path, "a.jsonl", text))

    @for_each(
        ("arguments", "message"),
        [
            ({"file": "img"}, r"file is 'img', and .*a\.csv has 'name', 'label'"),
            ({}, "no column of .* is called file_name, filename, file or alike; there are 'name', 'label'"),
            ({"file": "name", "labels": "kind"}, "labels names 'kind', and .* has 'name', 'label'"),
            ({"file": "name", "labels": []}, "labels is .*; it names columns"),
            ({"file": "name", "classes": ["a"]}, "classes"),
        ],
    )
    def test_columns_that_there_are_not_are_refused(
        self, tmp_path: Path, arguments: dict[str, Any], message: str
    ) -> None:
        with pytest.raises((ConfigError, DataError), match=message):
            Manifest(write(tmp_path, "a.csv", "name,label\n0.jpg,1\n"), **arguments)

    def test_a_table_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"nothing\.csv cannot be read: No such file"):
            Manifest(tmp_path / "nothing.csv")

    def test_more_tags_than_memory_is_for_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.store.manifest._MOST_TAGS_BYTES", 3)
        with pytest.raises(ConfigError, match="2 classes, of which each of 2 samples"):
            Manifest(write_json(tmp_path, {"label": ["a"]}, {"label": ["b"]}))


class TestCatalogs:
    @pytest.fixture(autouse=True)
    def keep_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = tmp_path / "kept"
        kept.mkdir()
        monkeypatch.setattr(catalogs, "_folders", lambda: Folders((kept,), kept, ""))
        monkeypatch.setattr(catalogs, "LEAST_SAMPLES", 1)
        monkeypatch.setattr(listing, "_RACY_NS", -(10**18))

    @pytest.mark.parametrize(
        "labels", ["label", ["age", "tags"], {"both": ["age", "size"], "t": "tags"}, None, "age"], ids=str
    )
    def test_it_is_listed_once_with_labels_of_any_kind(self, tmp_path: Path, labels: Any) -> None:
        (tmp_path / "data").mkdir()
        records = [
            {"age": n / 3, "size": n, "tags": ["a", "b"][: n % 3], "label": "xy"[n % 2]} for n in range(5)
        ]
        table = write_json(tmp_path / "data", *records)
        first = Manifest(table, labels=labels)
        os.chmod(tmp_path / "data" / "0.jpg", 0o600)

        again = Manifest(table, labels=labels)

        assert again.catalog.listed_seconds == first.catalog.listed_seconds, "it is the catalog"
        assert describe_data(again) == describe_data(first)
        assert (again.classes, again.label_classes) == (first.classes, first.label_classes)
        sent = Catalog.from_bytes(first.catalog.to_bytes())
        assert describe_data(Manifest(table, catalog=sent)) == describe_data(first)
        assert sent.digest() == first.catalog.digest()
        assert describe_data(pickle.loads(pickle.dumps(first))) == describe_data(first)

    def test_another_question_is_another_catalog(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        table = write(tmp_path / "data", "a.csv", "file,x,y\n0.jpg,1,5\n1.jpg,2,6\n")

        found = [labels_of(Manifest(table, labels=name)).tolist() for name in ("x", "y", "x")]

        assert found == [[1, 2], [5, 6], [1, 2]]

    def test_a_table_that_changed_is_read_anew(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        table = write(tmp_path / "data", "a.csv", "file,label\n0.jpg,1\n")
        assert labels_of(Manifest(table)).tolist() == [1]
        replaced = tmp_path / "data" / "new"
        replaced.write_text("file,label\n0.jpg,2\n")
        replaced.rename(table)

        lines: list[str] = []
        assert labels_of(Manifest(table, calls=Calls(report=lines.append))).tolist() == [2]

    def test_damaged_labels_are_found(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        table = write_json(tmp_path / "data", {"label": 0.5}, {"label": 1.5})
        data = bytearray(Manifest(table).catalog.to_bytes())
        data[-20] ^= 1

        with pytest.raises(Exception, match="is damaged"):
            Catalog.from_bytes(bytes(data))

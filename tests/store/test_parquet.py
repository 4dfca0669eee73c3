"""Which samples Parquet files have, how often row groups are decoded, and every way a file can be wrong."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq
from tests.for_each import for_each
from tests.store.reads import contents, labels_of

from penstock import BundleShuffle, Loader, open_source
from penstock.cache_folders import Folders
from penstock.errors import ConfigError, DataError
from penstock.loader.transforms import DecodeRaw
from penstock.store import ArrowFiles, ParquetFiles, catalogs, listing, parquet, read_group
from penstock.store.calls import Calls
from penstock.store.decoded import Turns

GOLDEN = Path(__file__).parents[1] / "golden" / "parquet"


def write(file: Path, table: Any, rows: int = 3, **how: Any) -> Path:
    pq.write_table(table, file, row_group_size=rows, **how)
    return file


def write_for(opener: Any, file: Path, table: Any, rows: int = 3) -> Path:
    if opener is ParquetFiles:
        return write(file, table, rows)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table, max_chunksize=rows)
    return file


def pictures(contents: Sequence[bytes | None], labels: Sequence[Any], kind: Any = None) -> Any:
    return pa.table({"image": pa.array(contents, kind or pa.binary()), "label": labels})


def numbers(count: int, size: int = 100) -> list[bytes]:
    """Return samples of a size, each with its number in every byte."""
    return [bytes([number]) * size for number in range(count)]


def keep_catalogs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have catalogs kept in a folder of the test's, for data that has just been written, too."""
    kept = tmp_path.with_name(f"{tmp_path.name} kept")
    kept.mkdir()
    monkeypatch.setattr(catalogs, "_folders", lambda: Folders((kept,), kept, ""))
    monkeypatch.setattr(listing, "_RACY_NS", -(10**18))


def decodings(source: ParquetFiles, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of units that are decoded from here on."""
    found: list[int] = []
    decode = source._decode

    def decode_and_count(unit: int, descriptor: int) -> Any:
        found.append(unit)
        return decode(unit, descriptor)

    monkeypatch.setattr(source, "_decode", decode_and_count)
    return found


def read_all(source: ParquetFiles, ids: Sequence[int]) -> list[bytes]:
    which = np.array(ids, np.int64)
    begins = np.concatenate(([0], np.cumsum(source.sizes_bytes[which])))
    into = np.empty(begins[-1], np.uint8)
    assert read_group(source, which, into, begins) == []
    return [into[begin:end].tobytes() for begin, end in pairwise(begins)]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(st.binary(min_size=1, max_size=200), st.integers(0, 20)), min_size=1, max_size=12
    ),
    at_once=st.integers(1, 12),
    how=st.sampled_from([{}, {"compression": "zstd"}, {"compression": "none", "use_dictionary": False}]),
    version=st.sampled_from(["1.0", "2.0"]),
    data=st.data(),
)
def test_samples_and_labels_are_those_that_pyarrow_reads(
    tmp_path: Path,
    kind: Any,
    rows: list[tuple[bytes, int]],
    at_once: int,
    how: dict[str, Any],
    version: str,
    data: Any,
) -> None:
    images, labels = (list(column) for column in zip(*rows, strict=True))
    file = write(
        tmp_path / "a.parquet", pictures(images, labels, kind), at_once, data_page_version=version, **how
    )

    source = ParquetFiles(file)

    ids = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=30))
    assert read_all(source, ids) == [images[sample] for sample in ids]
    assert contents(source) == images
    assert labels_of(source) == labels
    assert source.describe(len(rows) - 1) == f"{file}: row {len(rows) - 1}"


@for_each("codec", ["zstd", "snappy", "lz4", "gzip", "uncompressed"])
def test_files_of_another_program_are_read(codec: str) -> None:
    """tests/golden/parquet was written by polars 2.1.0, whose writer is its own, in row groups of 7."""
    source = open_source(GOLDEN / f"{codec}.parquet")

    assert isinstance(source, ParquetFiles)
    assert contents(source) == [bytes([number]) * (50 + number) for number in range(20)]
    assert labels_of(source) == [number % 4 for number in range(20)]
    assert source.decoded_units is not None
    assert source.decoded_units.sizes_bytes.tolist() == [371, 420, 399]
    assert contents(ParquetFiles(GOLDEN / f"{codec}.parquet", sample="text"))[19] == b"row 19"


def test_pictures_and_class_names_as_datasets_writes_them_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else a progress bar leaves a thread behind
    features = datasets.Features(
        {"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=["wolf", "cat"])}
    )
    for number in range(2):
        rows = {
            "image": [{"bytes": b"%d %d" % (number, row), "path": None} for row in range(5)],
            "label": [1, 0, 1, 1, 0],
        }
        written = datasets.Dataset.from_dict(rows, features=features)
        written.to_parquet(tmp_path / f"train-{number:05}-of-00002.parquet", batch_size=2)

    source = open_source(tmp_path)

    assert isinstance(source, ParquetFiles)
    assert contents(source) == [b"%d %d" % (number, row) for number in range(2) for row in range(5)]
    assert (labels_of(source), source.classes) == ([1, 0, 1, 1, 0] * 2, ("wolf", "cat"))


def test_a_catalog_is_kept_and_a_changed_file_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_catalogs(tmp_path, monkeypatch)
    names = {
        b"huggingface": b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["b", "a"]}}}}'
    }
    for number in range(2):
        table = pictures(numbers(200)[100 * number :] * 6, [number] * 6 * (200 - 100 * number))
        write(tmp_path / f"{number}.parquet", table.replace_schema_metadata(names), 50)
    before = ParquetFiles(tmp_path)

    write(tmp_path / "1.parquet", pictures(numbers(7), [0] * 7))
    indexed = list[str]()
    index = parquet._index

    def index_and_note(columns: Any, asking: Any, turns: Any, file: Any) -> Any:
        indexed.append(file.path)
        return index(columns, asking, turns, file)

    monkeypatch.setattr(parquet, "_index", index_and_note)
    after = ParquetFiles(tmp_path)

    assert indexed == [str(tmp_path / "1.parquet")]
    assert (len(before), len(after)) == (1800, 1207)
    assert contents(after)[-8:] == [numbers(200)[-1], *numbers(7)]
    assert labels_of(after) == [0] * 1207
    assert before.classes == after.classes == ("b", "a")


def with_measures(contents: Sequence[bytes], first: int = 0) -> Any:
    """Return a table whose columns of numbers have the number of the row in them."""
    rows = np.arange(first, first + len(contents))
    boxes = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(rows, 4).astype("f4")), 4)
    is_odd = pa.array((rows % 2).astype(bool))
    return pa.table({"image": contents, "weight": rows / 2, "count": rows, "box": boxes, "odd": is_odd})


@pytest.mark.parametrize("opener", [ParquetFiles, ArrowFiles])
def test_several_columns_of_numbers_are_labels_by_name(
    tmp_path: Path, opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_catalogs(tmp_path, monkeypatch)
    for number in range(2):
        table = with_measures(numbers(200)[: 100 + number] * 6, 600 * number)
        write_for(opener, tmp_path / f"{number}.table", table, 50)
    names = ["weight", "count", "box", "odd"]

    for opening in range(3):  # the second time by the catalog, the third in part
        if opening == 2:
            os.utime(tmp_path / "0.table", ns=(10**18, 10**18))
        source = opener([tmp_path / "0.table", tmp_path / "1.table"], label=names)
        assert isinstance(source.labels, dict)
        rows = np.arange(1206)
        assert {name: each.dtype.str for name, each in source.labels.items()} == {
            "weight": "<f8",
            "count": "<i8",
            "box": "<f4",
            "odd": "|b1",
        }
        assert (source.labels["weight"] == rows / 2).all()
        assert (source.labels["box"] == rows[:, None]).all()
        assert (source.labels["odd"] == rows % 2).all()
    with pytest.raises(ConfigError, match=r"label is \['weight', 'image'\]; its columns are"):
        opener(tmp_path / "0.table", label=["weight", "image"])


def test_one_column_of_numbers_or_lists_is_the_label(tmp_path: Path) -> None:
    """Lists as pandas writes them, whose type says no length."""
    table: dict[str, Any] = {
        "image": [b"x"] * 5,
        "weight": [k / 2 for k in range(5)],
        "box": [[k, 1] for k in range(5)],
    }
    file = write(tmp_path / "a.parquet", pa.table(table), 2)

    weight: Any = ParquetFiles(file, label="weight").labels
    box: Any = ParquetFiles(file, label="box").labels

    assert (weight.dtype, weight.tolist()) == (np.float64, table["weight"])
    assert (box.dtype, box.tolist()) == (np.int64, table["box"])
    for wrong, message in (
        ([1], r"row 3 of 'box' has 1 numbers, and row 2 2: give lists"),
        ([None, 1], "missing"),
    ):
        write(file, pa.table(table | {"box": [*table["box"][:3], wrong, [4, 1]]}), 2)
        with pytest.raises(DataError, match=message):
            ParquetFiles(file, label="box")


def test_labels_of_another_type_in_one_file_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", with_measures(numbers(5)))
    table = with_measures(numbers(5))
    other = table.set_column(1, "weight", table["weight"].cast(pa.float32()))
    write(tmp_path / "1.parquet", other)

    with pytest.raises(
        DataError, match=r"1\.parquet has weight of float32\[\], unlike \S+/0\.parquet, float64\[\]"
    ):
        ParquetFiles(tmp_path, label=["weight", "box"])


def _with_names(file: Path, names: list[str] | None) -> Path:
    import datasets

    feature = datasets.Value("int64") if names is None else datasets.ClassLabel(names=names)
    features = datasets.Features({"image": datasets.Value("binary"), "label": feature})
    rows = datasets.Dataset.from_dict({"image": [b"x"] * 2, "label": [0, 1]}, features=features)
    if file.suffix == ".parquet":
        pq.write_table(rows.data.table, file)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, rows.data.table.schema) as writer:
            writer.write_table(rows.data.table)
    return file


@pytest.mark.parametrize(("opener", "ending"), [(ParquetFiles, "parquet"), (ArrowFiles, "arrow")])
def test_class_names_that_differ_between_files_are_an_error(tmp_path: Path, opener: Any, ending: str) -> None:
    """Else the numbers of one file would get the names of another."""
    first = _with_names(tmp_path / f"a.{ending}", ["cat", "dog"])
    for names in (["dog", "cat"], ["ape", "cat", "dog"]):
        other = _with_names(tmp_path / f"b.{ending}", names)
        with pytest.raises(
            DataError, match=rf"b\.{ending} has \['.*, and .*a\.{ending} has \['cat', 'dog'\]"
        ):
            opener([first, other])
    without = _with_names(tmp_path / f"c.{ending}", None)
    assert opener([first, without]).classes == ("cat", "dog")
    with pytest.raises(DataError, match=rf"a\.{ending} has .* and .*c\.{ending} has no names for it"):
        opener([without, first])


def test_integers_in_one_file_and_names_in_another_are_an_error(tmp_path: Path) -> None:
    """Else the integers would be numbered anew, in the order of their digits."""
    first = write(tmp_path / "a.parquet", pictures([b"x"] * 12, range(12)))
    other = write(tmp_path / "b.parquet", pictures([b"x"] * 2, ["1", "cat"]))

    for files in ([first, other], [other, first]):
        with pytest.raises(DataError, match=r"a\.parquet: row 0 has 0, and .*b\.parquet: row 1 has 'cat'"):
            ParquetFiles(files)
    assert ParquetFiles(other).classes == ("1", "cat")
    third = write(tmp_path / "c.parquet", pictures([b"x"], [0.5]))
    with pytest.raises(DataError, match=r"c\.parquet has 'label' of double; labels are integers or text"):
        ParquetFiles([first, third])


def test_a_batch_of_several_labels_is_a_dict(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", with_measures(numbers(20, 4)), 7)
    source = ParquetFiles(file, label=["weight", "box"])

    with Loader(
        source, batch_size=20, epochs=1, transforms=[DecodeRaw("uint8", (4,))], report=None
    ) as loader:
        (batch,) = [{name: array.copy() for name, array in batch.items()} for batch in loader]

    samples = next(array for name, array in batch.items() if name not in ("weight", "box"))
    assert (samples[:, 0] == batch["weight"] * 2).all()
    assert (batch["box"][:, 3] == batch["weight"] * 2).all()


def test_a_shard_that_the_names_of_the_others_tell_of_is_reported(tmp_path: Path) -> None:
    """A copy that broke off would be trained on in silence."""
    lines: list[str] = []
    for number in (0, 2, 3):
        write(tmp_path / f"train-{number:05}-of-00005.parquet", pictures([b"1"], [0]))

    ParquetFiles(tmp_path, calls=Calls(report=lines.append))

    assert lines == [f"2 shards of 5 left out or missing, the first {tmp_path}/train-00001-of-00005.parquet"]
    for number in (1, 4):
        write(tmp_path / f"train-{number:05}-of-00005.parquet", pictures([b"1"], [0]))
    ParquetFiles(tmp_path, calls=Calls(report=lines.append))
    assert len(lines) == 1


def test_splits_in_one_folder_are_not_mixed(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"{split}-00000-of-00001.parquet", pictures([b"1"], [0]))

    with pytest.raises(
        ConfigError, match=r"has the splits test, train: give one, such as \S+/train-\*\.parquet"
    ):
        open_source(tmp_path)
    assert len(open_source(tmp_path / "train-*.parquet")) == 1


class TestDecoding:
    """Row groups of 3 rows of 100 bytes."""

    def opened(self, tmp_path: Path, memory: int) -> ParquetFiles:
        return ParquetFiles(
            write(tmp_path / "a.parquet", pictures(numbers(30), [0] * 30)), memory=f"{memory} B"
        )

    def test_a_group_decodes_each_row_group_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = self.opened(tmp_path, memory=300)
        found = decodings(source, monkeypatch)

        assert read_all(source, [28, 1, 27, 0, 29, 1]) == [
            numbers(30)[sample] for sample in (28, 1, 27, 0, 29, 1)
        ]

        assert sorted(found) == [0, 9]

    def test_row_groups_are_kept_as_long_as_memory_lasts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = self.opened(tmp_path, memory=650)
        found = decodings(source, monkeypatch)

        for sample in (0, 3, 1, 4, 2):
            source.read(sample)
        assert found == [0, 1]
        source.read(6)
        source.read(0)
        assert found == [0, 1, 2]
        source.read(5)
        assert found == [0, 1, 2, 1]
        # What is there is read first, though it is numbered behind.
        read_all(source, [0, 27, 5, 9])
        assert found == [0, 1, 2, 1, 3, 9]
        source.close()
        source.read(27)
        assert found[-1] == 9

    def test_what_is_expected_to_be_decoded_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = self.opened(tmp_path, memory=950)
        found = decodings(source, monkeypatch)
        order = np.random.default_rng(0).permutation(30).reshape(30, 1)

        expected_bytes = source.decoded_bytes_of(list(order))
        for group in order.tolist():
            read_all(source, group)

        assert expected_bytes == 300 * len(found)
        assert 10 < len(found) < 30

    def test_a_row_group_that_does_not_fit_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"memory is 299 B, and row group 0 of \S+/a\.parquet has 300 B"
        ):
            self.opened(tmp_path, memory=299)

    def test_a_pickled_source_decodes_for_itself(self, tmp_path: Path) -> None:
        source = self.opened(tmp_path, memory=600)
        source.read(3)

        copy = pickle.loads(pickle.dumps(source))

        assert contents(copy) == numbers(30)


def test_a_loader_reads_every_sample_once(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", pictures(numbers(40, 4), range(40)), 7)

    with Loader(
        file, batch_size=8, epochs=2, transforms=[DecodeRaw("uint8", (4,))], dtype="uint8", report=None
    ) as loader:
        batches = [(rows.copy(), labels.copy()) for _ in range(2) for rows, labels in loader]

    rows, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
    assert (rows[:, 0] == labels).all()
    assert sorted(labels[:40].tolist()) == sorted(labels[40:].tolist()) == list(range(40))


@for_each(("is_selection", "disk"), [(False, None), (True, "disk")])
@for_each("shuffle", [True, BundleShuffle(1000, bundle_ratio=0.05)])
def test_a_loader_reports_an_order_that_decodes_again_and_again(
    tmp_path: Path, shuffle: Any, is_selection: bool, disk: str | None
) -> None:
    table = pictures([bytes(100)] * 1000, [0] * 1000)
    source = ParquetFiles(write(tmp_path / "a.parquet", table, 10), memory="10 kB")

    with Loader(
        source.select(range(1000)) if is_selection else source,
        batch_size=10,
        epochs=1,
        shuffle=shuffle,
        seed=3,
        transforms=[DecodeRaw("uint8", (100,))],
        local_disk=disk and tmp_path / disk,
        report=None,
    ) as loader:
        lines = [line for line in loader.start_lines if "row groups" in line]

    if shuffle is not True:
        assert lines == []
        return
    (line,) = lines
    assert re.search(
        rf"row groups are decoded (8|9)\.\d times over in this order{' of the first epoch' * bool(disk)}, "
        r"as \S+ \S+ hold 10 % of",
        line,
    )
    assert ("local_disk= keeps them for later epochs" in line) != bool(disk)
    assert "shuffle=penstock.BundleShuffle(1000, seed=3, bundle_ratio=0.05) needs each about once" in line


@for_each(
    ("table", "message"),
    [
        (pictures([b"1", None], [1, 2]), "row 1 of 'image' has no value"),
        (pictures([b"1", b"2"], [None, 2]), "row 0 of 'label' has no value"),
        (
            pa.table({"image": [{"bytes": b"1", "path": ""}, {"bytes": None, "path": "x.jpg"}]}),
            "row 1 of 'image.bytes' has no bytes in it, but the path of a file",
        ),
        (
            pictures([], [], pa.binary()).cast(pa.schema([("image", pa.binary()), ("label", pa.int64())])),
            "has no rows",
        ),
    ],
)
def test_a_row_without_a_value_is_named(tmp_path: Path, table: Any, message: str) -> None:
    file = write(tmp_path / "a.parquet", table)

    with pytest.raises(DataError, match=message) as caught:
        ParquetFiles(file)

    assert str(caught.value).startswith(str(file))


def test_a_file_that_is_cut_off_or_none_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", pictures(numbers(9, 500), [0] * 9))
    data = file.read_bytes()
    for content in (
        b"",
        b"no Parquet file",
        data[: len(data) // 2],
        data[:100],
        b"PAR1" + b"\xff" * 50 + b"PAR1",
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match="is no complete Parquet file") as caught:
            ParquetFiles(file)
        assert str(caught.value).startswith(str(file))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), compression=st.sampled_from(["none", "zstd"]))
def test_a_damaged_file_is_an_error_or_read_as_far_as_it_says(
    tmp_path: Path, place: int, byte: int, compression: str
) -> None:
    file = write(tmp_path / "a.parquet", pictures(numbers(9), range(9)), compression=compression)
    data = bytearray(file.read_bytes())
    data[place % len(data)] = byte
    file.write_bytes(data)

    problem = str(file)
    try:
        source = ParquetFiles(file)
        for sample in range(len(source)):
            assert len(source.read(sample)) == source.sizes_bytes[sample]
    except (DataError, ConfigError) as error:
        problem = str(error)

    assert problem.startswith(str(file))


def test_what_is_damaged_or_replaced_later_is_an_error_of_its_samples(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", pictures(numbers(9), range(9)))
    source = ParquetFiles(file)
    assert source.read(0) == numbers(1)[0]
    before = file.stat()

    with file.open("r+b") as out:
        out.write(b"PAR1" + b"\xff" * 400)
    with pytest.raises(DataError, match=r"a\.parquet was written again since its samples were listed"):
        source.read(0)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match=r"a\.parquet"):
        source.read(4)


def test_an_encrypted_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    # What an encrypted footer begins and ends with.
    file.write_bytes(b"PARE" + bytes(100) + (50).to_bytes(4, "little") + b"PARE")

    with pytest.raises(DataError, match=r"a\.parquet is encrypted"):
        ParquetFiles(file)


@pytest.mark.parametrize("opener", [ParquetFiles, ArrowFiles])
def test_columns_that_do_not_do_are_named(tmp_path: Path, opener: Any) -> None:
    table = pa.table({"one": [b"1"], "two": [b"2"], "n": [{"of": 1.5}]})
    file = write_for(opener, tmp_path / "a.table", table)

    with pytest.raises(ConfigError, match=r"sample is None; its columns are one \(binary\), two \(binary\)"):
        opener(file)
    with pytest.raises(ConfigError, match=r"sample is 'n'; its columns are .* give sample= to penstock"):
        opener(file, sample="n")
    with pytest.raises(ConfigError, match="label is 'n'; its columns are"):
        opener(file, sample="one", label="n")
    other = write_for(opener, tmp_path / "b.table", pa.table({"two": [b"2"]}))
    with pytest.raises(DataError, match=r"b\.table has no column 'one', unlike the first file"):
        opener([file, other], sample="one", label=None)
    third = write_for(opener, tmp_path / "c.table", pa.table({"one": [3]}))
    with pytest.raises(DataError, match=r"c\.table has int64 where the first file has bytes"):
        opener([file, third], sample="one", label=None)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.parquet")
    (tmp_path / "empty").mkdir()

    with pytest.raises(DataError, match=r"a\.parquet is not a regular file"):
        ParquetFiles(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no\.parquet cannot be opened"):
        ParquetFiles(tmp_path / "no.parquet")
    with pytest.raises(DataError, match="is a folder without Parquet files"):
        ParquetFiles(tmp_path / "empty")


def test_row_groups_are_indexed_within_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another writer may have one row group of a GB; those of all threads would be decoded at once."""
    asked: list[int] = []
    made: list[int] = []

    class Counted(Turns):
        def __init__(self, capacity_bytes: int) -> None:
            made.append(capacity_bytes)
            super().__init__(capacity_bytes)

        def of(self, nbytes: int) -> Any:
            asked.append(nbytes)
            return super().of(nbytes)

    monkeypatch.setattr("penstock.store.parquet.Turns", Counted)
    table = pictures(numbers(7, 1000), range(7)).append_column("other", [[b"x" * 10**6] * 7])
    write(tmp_path / "a.parquet", table, rows=4, use_dictionary=False, write_statistics=False)
    ParquetFiles(tmp_path / "a.parquet", sample="image", memory="5 kB")

    assert made == [5000]
    assert [round(nbytes, -3) for nbytes in asked] == [4000, 3000]

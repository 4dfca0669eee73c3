"""Rows of arrays, records and windows of tokens: what a sample is, what a loader makes of it, and what is refused."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock import Loader, LoaderConfig, open_source, predict
from penstock.errors import ConfigError, DataError
from penstock.loader.transforms import DecodeRaw
from penstock.machine import Curve, Machine, SharedStore, StorageClass
from penstock.plan import Sequential
from penstock.store import Arrays, Numbers, Records, Tokens, extents_of, open_files, packed, read_group

CIFAR = np.dtype([("label", "u1"), ("image", "u1", (3, 4, 4))])


def save(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


def epoch(source: Any, **options: Any) -> list[Any]:
    arguments: dict[str, Any] = {"batch_size": 8, "epochs": 1, "memory": "10 MB", "report": None, **options}
    with Loader(source, **arguments) as loader:
        return [
            tuple(part.copy() for part in batch) if isinstance(batch, tuple) else batch.copy()
            for batch in loader
        ]


# -- What a loader makes of them -----------------------------------------------------------------------


@for_each(
    ("dtype", "shape"),
    [
        *((dtype, (2, 5)) for dtype in ("<f4", ">f4", "f8", "u1", "<u2", ">i4", "i8", "?", "f2")),
        ("<f4", ()),
        (">i4", (3,)),
    ],
)
def test_rows_of_an_array_are_batches_without_another_argument(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    rows = np.random.default_rng(0).integers(0, 2, (20, *shape)).astype(dtype)
    save(tmp_path / "a.npy", rows)

    batches = epoch(tmp_path / "a.npy", shuffle=False)

    assert [len(batch) for batch in batches] == [8, 8, 4]
    assert np.array_equal(np.concatenate(batches), rows)
    assert {batch.dtype for batch in batches} == {np.dtype(dtype).newbyteorder("=")}


@pytest.mark.parametrize("form", ["mapped", "read", "plain"])
def test_a_shuffled_epoch_has_every_row_once_with_its_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    if form == "plain":
        monkeypatch.setattr(type(packed.READ_PIECES), "ask", lambda part: None)
    else:
        packed.READ_PIECES.wait()
        monkeypatch.delattr(packed, "read_one_by_one")  # the loop finds all of them
    if form == "read":
        monkeypatch.setattr(open_files, "map_file", lambda descriptor, nbytes: None)
    rows = np.arange(1000 * 6, dtype="f4").reshape(1000, 6)
    for number, part in enumerate(np.split(rows, [100, 100, 550])):  # one of them has no rows
        save(tmp_path / f"part-{number}.npy", part)
    save(tmp_path / "labels.npy", np.arange(1000) % 7)

    source = Arrays(tmp_path / "part-*.npy", labels=tmp_path / "labels.npy")
    found = epoch(source, seed=3)

    numbers, labels = (np.concatenate(part) for part in zip(*found, strict=True))
    order = np.argsort(numbers[:, 0])
    assert np.array_equal(numbers[order], rows)
    assert np.array_equal(labels[order], np.arange(1000) % 7)
    assert not np.array_equal(order, np.arange(1000))
    assert source.classes == tuple("0123456")


def test_a_field_of_records_is_the_sample_and_another_its_label(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    records = np.zeros(30, CIFAR)
    records["label"], records["image"] = random.integers(0, 10, 30), random.integers(0, 256, (30, 3, 4, 4))
    for number in range(3):
        (tmp_path / f"batch_{number + 1}.bin").write_bytes(
            b"head" + records[10 * number : 10 * number + 10].tobytes()
        )
    save(tmp_path / "all.npy", records)

    for source in (
        Records(tmp_path / "batch_{1..3}.bin", CIFAR, header_bytes=4, field="image", labels="label"),
        Arrays(tmp_path / "all.npy", field="image", labels="label"),
    ):
        ((images, labels),) = epoch(source, batch_size=30, shuffle=False)
        assert images.dtype == np.uint8
        assert np.array_equal(images, records["image"])
        assert labels.tolist() == records["label"].tolist()
        ((floats, _),) = epoch(source, batch_size=30, shuffle=False, dtype="float32")
        assert np.array_equal(floats, records["image"].astype(np.float32))


def test_records_of_one_type_have_the_given_shape(tmp_path: Path) -> None:
    digits = np.random.default_rng(0).integers(0, 256, (12, 28, 28), np.uint8)
    (tmp_path / "images-idx3-ubyte").write_bytes(bytes(16) + digits.tobytes())

    source = Records(tmp_path / "images-idx3-ubyte", "u1", (28, 28), header_bytes=16)
    (batch,) = epoch(source, batch_size=12, shuffle=False)

    assert repr(source).endswith(": 12 samples of uint8[28, 28]")
    assert np.array_equal(batch, digits)


def test_several_labels_are_a_dict(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", np.arange(8, dtype="f4"))
    labels = {"weight": np.arange(8) / 2, "box": np.ones((8, 2), "f4")}

    with Loader(
        Arrays(tmp_path / "a.npy", labels=labels), batch_size=8, epochs=1, shuffle=False, report=None
    ) as loader:
        (batch,) = loader

    assert sorted(batch) == ["box", "images", "weight"]
    assert batch["weight"].tolist() == (np.arange(8) / 2).tolist()


# -- Windows of tokens ---------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=3),
    st.integers(1, 12),
    st.none() | st.integers(1, 15),
    st.integers(0, 3),
)
def test_windows_are_slices_of_their_file(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], length: int, stride: int | None, ahead: int
) -> None:
    folder, begin = tmp_path_factory.mktemp("tokens"), 0
    expected, step, width = [], stride or length, length + ahead
    for number, size in enumerate(sizes):
        tokens = np.arange(begin, begin + size, dtype="<u2")
        tokens.tofile(folder / f"{number}.bin")
        expected += [tokens[first : first + width].tolist() for first in range(0, size - width + 1, step)]
        begin += size
    paths = [folder / f"{number}.bin" for number in range(len(sizes))]
    if not expected:
        with pytest.raises(DataError, match=f"fewer than a window of {width}"):
            Tokens(paths, length=length, dtype="<u2", stride=stride, ahead=ahead)
        return

    source = Tokens(paths, length=length, dtype="<u2", stride=stride, ahead=ahead)

    assert [np.frombuffer(source.read(sample), "<u2").tolist() for sample in range(len(source))] == expected


def test_batches_of_tokens_are_int64_and_one_wider_than_the_input(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 1000).astype("uint16")
    tokens.tofile(tmp_path / "train.bin")
    save(tmp_path / "train.npy", tokens)
    expected = np.stack([tokens[first : first + 17] for first in range(0, 1000 - 16, 16)])

    for source in (
        Tokens(tmp_path / "train.bin", length=16, dtype="uint16"),
        Tokens(tmp_path / "train.npy", length=16),
    ):
        batches = epoch(source)
        assert {(batch.dtype.name, batch.shape[1]) for batch in batches} == {("int64", 17)}
        found = np.concatenate(batches)
        assert not np.array_equal(found, expected)
        assert sorted(found.tolist()) == sorted(expected.tolist())
    assert epoch(source, dtype="int32", shuffle=False)[0].dtype == np.int32
    stored = epoch(source, dtype="uint16", shuffle=False)
    assert np.array_equal(np.concatenate(stored), expected)
    assert source.describe(3) == f"{tmp_path}/train.npy: tokens from 48 on"


def test_tokens_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    np.zeros(100, "<u2").tofile(tmp_path / "train.bin")

    with pytest.raises(ConfigError, match="reads uint16, which dtype='uint8' cannot hold"):
        epoch(Tokens(tmp_path / "train.bin", length=8, dtype="<u2"), dtype="uint8")


# -- As a source ---------------------------------------------------------------------------------------


def test_transforms_that_are_given_are_taken(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", np.arange(8, dtype="<f4").reshape(4, 2))

    (batch,) = epoch(
        tmp_path / "a.npy", shuffle=False, transforms=[DecodeRaw("<f4", (2,)), lambda row: row[::-1]]
    )

    assert batch.tolist() == [[1, 0], [3, 2], [5, 4], [7, 6]]


def test_a_configuration_of_numbers_is_predicted_without_reading_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a.npy", np.zeros((64, 1000), "f4"))

    def refuse(*_: object) -> None:
        raise AssertionError("a sample is read")

    monkeypatch.setattr(packed.PackedFiles, "read", refuse)
    monkeypatch.setattr(packed.PackedFiles, "read_group", refuse)
    machine = Machine(
        SharedStore(None, Curve(((1, 1e8),)), 1e-3),
        (StorageClass("staging", 1 << 20, 1, Curve(((1, 1e9),))),),
    )
    config = LoaderConfig(str(tmp_path / "a.npy"), batch_size=8, epochs=2, memory="10 MB")

    assert len(predict(config, machine, step_seconds=0.001).epochs()) == 2


def test_a_source_of_ones_own_may_say_what_its_samples_are(tmp_path: Path) -> None:
    class Mine:
        sizes_bytes, labels, classes = np.full(4, 8), {}, ()  # type: ignore[var-annotated]
        numbers = Numbers("<f4", (2,), "float64")

        def __len__(self) -> int:
            return 4

        def read(self, sample: int) -> bytes:
            return np.full(2, sample, "<f4").tobytes()

        def read_into(self, sample: int, buffer: memoryview) -> int:
            buffer[:8] = self.read(sample)
            return 8

        def describe(self, sample: int) -> str:
            return f"sample {sample}"

    (batch,) = epoch(Mine(), shuffle=False)

    assert (batch.dtype, batch.tolist()) == (np.float64, [[0, 0], [1, 1], [2, 2], [3, 3]])


def test_a_run_resumes_and_another_window_is_refused(tmp_path: Path) -> None:
    np.arange(2000, dtype="<u2").tofile(tmp_path / "t.bin")
    options: dict[str, Any] = {"batch_size": 8, "epochs": 1, "report": None}
    expected = epoch(Tokens(tmp_path / "t.bin", length=16, dtype="<u2"))
    with Loader(Tokens(tmp_path / "t.bin", length=16, dtype="<u2"), **options) as loader:
        next(iter(loader))
        state = loader.state_dict()

    with Loader(Tokens(tmp_path / "t.bin", length=16, dtype="<u2"), state=state, **options) as loader:
        assert np.array_equal(next(iter(loader)), expected[1])
    with pytest.raises(ConfigError, match="state is of another run"):
        Loader(Tokens(tmp_path / "t.bin", length=16, dtype="<u2", ahead=0, stride=16), state=state, **options)


def test_extents_are_where_rows_lie(tmp_path: Path) -> None:
    save(tmp_path / "0.npy", np.arange(6, dtype="u1").reshape(3, 2))
    save(tmp_path / "1.npy", np.arange(6, 10, dtype="u1").reshape(2, 2))
    source = Arrays(tmp_path / "*.npy")

    found = extents_of(source, np.arange(5))

    assert found is not None
    extents, failed = found
    assert failed == []
    assert (extents.units.tolist(), extents.offsets.tolist()) == ([0, 0, 0, 1, 1], [128, 130, 132, 128, 130])
    into = np.zeros(10, np.uint8)
    assert read_group(pickle.loads(pickle.dumps(source)), np.arange(5), into, np.arange(0, 11, 2)) == []
    assert into.tolist() == list(range(10))


def test_rows_in_order_are_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.npy", np.arange(4000, dtype="f4").reshape(1000, 4))
    asked: list[int] = []
    read_ranges = Arrays.read_ranges

    def noted(source: Any, unit: int, ranges: Any, into: Any) -> None:
        asked.append(len(ranges))
        read_ranges(source, unit, ranges, into)

    monkeypatch.setattr(Arrays, "read_ranges", noted)

    rows = np.concatenate(epoch(tmp_path / "a.npy", batch_size=50, shuffle=Sequential(1000)))

    assert np.array_equal(rows, np.arange(4000, dtype="f4").reshape(1000, 4))
    assert 0 < len(asked) < 100


def test_an_array_that_changes_while_it_is_read_is_an_error_of_its_samples(tmp_path: Path) -> None:
    save(tmp_path / "0.npy", np.zeros((4, 2)))
    save(tmp_path / "1.npy", np.ones((4, 2)))
    source = Arrays(tmp_path / "*.npy")
    os.truncate(tmp_path / "0.npy", 130)

    batches = epoch(source, batch_size=8, shuffle=False, on_error="skip")

    assert [batch.tolist() for batch in batches] == [np.ones((4, 2)).tolist()]
    with pytest.raises(
        DataError, match=r"0\.npy has shrunk from 192 to 130 bytes since its samples were listed"
    ):
        source.read(2)


# -- What is refused -----------------------------------------------------------------------------------


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@for_each(
    ("content", "kind", "message"),
    [
        (b"", DataError, "is no complete .npy file"),
        (b"garbage" * 40, DataError, "is no complete .npy file"),
        (npy(np.zeros((9, 9)))[:-1], DataError, "is no complete .npy file"),
        (
            npy(np.zeros((9, 9))).replace(b"(9, 9)", b"(9, 9,"),
            DataError,
            "is no complete .npy file of numbers",
        ),
        (
            npy(np.zeros((9, 9))).replace(b"(9, 9)", b"(-9,9)"),
            DataError,
            "is no complete .npy file of numbers",
        ),
        (npy(np.array([{}, []], object)), DataError, "is no complete .npy file of numbers"),
        (npy(np.zeros((9, 9), order="F")), ConfigError, "is in Fortran's order"),
        (npy(np.zeros((), "f4")), ConfigError, "is a single number"),
        (npy(np.zeros((3, 0))), ConfigError, "has samples of float64[0]"),
        (npy(np.zeros(3, "c8")), ConfigError, "has samples of complex64[]"),
        (npy(np.array(["a", "b"])), ConfigError, "has samples of <U1[]"),
        (npy(np.zeros(3, CIFAR)), ConfigError, "have label, image: name the sample's"),
    ],
)
def test_what_is_no_array_of_rows_is_named(
    tmp_path: Path, content: bytes, kind: type[Exception], message: str
) -> None:
    (tmp_path / "a.npy").write_bytes(content)

    with pytest.raises(kind) as caught:
        open_source(tmp_path / "a.npy")
    assert f"{tmp_path}/a.npy" in str(caught.value)
    assert message in str(caught.value)


def test_an_array_that_is_missing_empty_or_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.npy cannot be opened: No such file"):
        Arrays(tmp_path / "a.npy")
    save(tmp_path / "0.npy", np.zeros((3, 2)))
    save(tmp_path / "1.npy", np.zeros((3, 4)))
    with pytest.raises(DataError, match=r"1\.npy has rows of float64\[4\], unlike .*0\.npy, float64\[2\]"):
        Arrays(tmp_path / "*.npy")
    with pytest.raises(ConfigError, match=r"field is 'x', and the numbers of .* have no fields"):
        Arrays(tmp_path / "0.npy", field="x")
    with pytest.raises(
        ConfigError, match=r"labels of the source is .*\[4\]; it is an array of numbers with a row for"
    ):
        Arrays(tmp_path / "0.npy", labels=np.zeros(4))
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(DataError, match="is not a regular file"):
        Arrays(tmp_path / "folder.npy")


def test_a_file_that_is_no_whole_number_of_records_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(103))

    with pytest.raises(
        DataError, match=r"a\.bin has 103 bytes, which are no whole number of records of 50 behind a"
    ):
        Records(tmp_path / "a.bin", "u1", 50)
    assert len(Records(tmp_path / "a.bin", "u1", 50, header_bytes=3)) == 2
    with pytest.raises(DataError, match="behind a header of 200"):
        Records(tmp_path / "a.bin", "u1", 50, header_bytes=200)
    with pytest.raises(DataError, match="has no rows"):
        Records(tmp_path / "a.bin", "u1", 50, header_bytes=103)
    with pytest.raises(DataError, match="no whole number of uint16"):
        Tokens(tmp_path / "a.bin", length=4, dtype="u2")


@for_each(
    ("arguments", "message"),
    [
        ({"dtype": "nothing"}, "dtype is 'nothing'; it is a type of numbers"),
        ({"dtype": "V0"}, "which takes no bytes"),
        ({"dtype": "u1", "shape": (3, 0)}, "shape is"),
        ({"dtype": "u1", "shape": "3"}, "shape is '3'"),
        ({"dtype": "u1", "header_bytes": -1}, "header_bytes is -1"),
        ({"dtype": "u1", "header_bytes": 0.5}, "header_bytes is 0.5"),
    ],
)
def test_records_that_cannot_be_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(30))

    with pytest.raises(ConfigError, match=message):
        Records(tmp_path / "a.bin", **arguments)


@for_each(
    ("arguments", "message"),
    [
        ({"length": 0}, "length is 0; it must be at least 1"),
        ({"length": 4, "stride": 0}, "stride is 0"),
        ({"length": 4, "ahead": -1}, "ahead is -1"),
        ({"length": 4.5}, "length is 4.5"),
        ({"length": 4}, "dtype is missing: .* does not say of which type"),
        ({"length": 4, "dtype": "f4"}, "has float32, and tokens are integers"),
    ],
)
def test_tokens_that_cannot_be_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(40))

    with pytest.raises(ConfigError, match=message):
        Tokens(tmp_path / "a.bin", **arguments)


def test_tokens_of_npy_files_name_their_type_and_have_one_axis(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", np.zeros((4, 4), "i4"))
    save(tmp_path / "b.npy", np.zeros(40, "i4"))

    with pytest.raises(ConfigError, match="has more than one axis"):
        Tokens(tmp_path / "a.npy", length=2)
    with pytest.raises(ConfigError, match="has int32, and dtype is uint16: leave dtype out"):
        Tokens(tmp_path / "b.npy", length=2, dtype="uint16")
    assert len(Tokens(tmp_path / "b.npy", length=3, dtype="i4")) == 13


def test_a_folder_still_needs_transforms(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"1")
    with pytest.raises(
        ConfigError, match=r"transforms is empty, and the samples of FlatFolder \S+ are bytes"
    ):
        Loader(tmp_path, batch_size=8, epochs=1, report=None)
    assert LoaderConfig("a.npy", batch_size=8, epochs=1).transforms == ()

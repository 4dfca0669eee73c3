"""Which samples TFRecord files have, where they lie, and every way a file can be wrong."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.for_each import for_each
from tests.store.reads import contents
from tests.store.tfrecord_files import Feature, example_class, masked, write_records

from penstock import Loader, open_source
from penstock.errors import ConfigError, DataError
from penstock.loader.transforms import DecodeRaw
from penstock.store import TFRecords, tfrecords

GOLDEN = Path(__file__).parents[1] / "golden" / "five.tfrecord"


def test_checksums_are_those_of_the_standard() -> None:
    def unmasked(content: bytes) -> int:
        rotated = (masked(content) - 0xA282EAD8) & 0xFFFFFFFF
        return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF

    assert unmasked(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4
    assert unmasked(b"\xff" * 32) == 0x62A8AB43
    assert unmasked(bytes(range(32))) == 0x46DD794E


def test_files_of_another_program_are_read() -> None:
    """tests/golden/five.tfrecord was written by the PyPI package tfrecord 1.14.6."""
    source = TFRecords(GOLDEN)

    assert contents(source) == [bytes(range(i, i + 20)) * (1 + 40 * i) for i in range(5)]
    assert isinstance(source.labels, np.ndarray)
    assert source.labels.tolist() == [1, 2, 3, 1, 2]
    assert source.describe(3) == f"{GOLDEN}: record 3"
    assert repr(source) == f"TFRecords({str(GOLDEN)!r}): 5 samples, 1 shard, 4 classes"


FEATURES = st.one_of(
    st.binary(max_size=300),
    st.lists(st.binary(max_size=5000), max_size=3),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40),
    st.lists(st.floats(width=32), max_size=40),
)


@pytest.mark.parametrize("is_compiled", [pytest.param(False, marks=pytest.mark.slow), True])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(st.dictionaries(st.text(max_size=8), FEATURES, max_size=4), min_size=1, max_size=6),
    labels=st.lists(st.integers(0, 999_999), min_size=6, max_size=6),
    window=st.integers(1, 300),
)
def test_samples_and_labels_are_those_that_protobuf_reads(
    tmp_path: Path, records: list[dict[str, Feature]], labels: list[int], window: int, is_compiled: bool
) -> None:
    """Whatever lies between them, and wherever a window of the file ends."""
    loop = tfrecords.INDEX_EXAMPLES.wait() if is_compiled else None
    pictures = [b"picture %d" % number * (1 + 100 * number) for number in range(len(records))]
    for record, picture, label in zip(records, pictures, labels, strict=False):
        record |= {"image/encoded": picture, "the label": [label]}
    file = write_records(tmp_path / "a", records)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfrecords, "_WINDOW_BYTES", window)
        patch.setattr(type(tfrecords.INDEX_EXAMPLES), "ask", lambda part: loop)
        source = TFRecords(file, sample="image/encoded", label="the label")

    parsed = [example_class().FromString(bytes(content)) for content in _frames(file.read_bytes())]
    expected = [each.features.feature["image/encoded"].byteslist.value[0] for each in parsed]
    assert contents(source) == expected == pictures
    assert isinstance(source.labels, np.ndarray)
    assert source.labels.tolist() == labels[: len(records)]


def _frames(data: bytes) -> list[bytes]:
    found = []
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(data[12 : 12 + size])
        data = data[16 + size :]
    return found


@for_each(
    ("record", "sample", "label"),
    [
        ({"image": b"1", "text": b"2", "label": [3]}, b"1", 3),
        ({"image": b"1", "image/encoded": b"2", "image/class/label": [3], "label": [4]}, b"2", 3),
        ({"whatever": b"1", "label": b"cat"}, b"1", 0),
        ({"whatever": b"1", "cls": [4]}, b"1", 4),
        ({"whatever": b"1", "size": [4]}, b"1", -1),
    ],
)
def test_features_are_found_by_their_usual_names(
    tmp_path: Path, record: dict[str, Feature], sample: bytes, label: int
) -> None:
    source = TFRecords(write_records(tmp_path / "a", [record]))

    assert contents(source) == [sample]
    assert isinstance(source.labels, np.ndarray)
    assert source.labels.tolist() == [label]


def test_names_are_numbered_over_all_files(tmp_path: Path) -> None:
    for number, names in enumerate((["dog", "cat"], ["bird", "dog"])):
        records: list[dict[str, Feature]] = [
            {"image": name.encode(), "label": name.encode()} for name in names
        ]
        write_records(tmp_path / f"train-{number:05}-of-00002", records)

    source = open_source(tmp_path / "train-*-of-00002")

    assert isinstance(source, TFRecords)
    assert contents(source) == [b"dog", b"cat", b"bird", b"dog"]
    assert source.classes == ("bird", "cat", "dog")
    assert isinstance(source.labels, np.ndarray)
    assert source.labels.tolist() == [2, 1, 0, 2]


def test_a_folder_of_one_set_is_taken_and_one_of_several_is_not(tmp_path: Path) -> None:
    """As TensorFlow Datasets leaves it."""
    for name in ("features.json", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    for number in range(2):
        write_records(tmp_path / f"x-train.tfrecord-{number:05}-of-00002", [{"image": b"%d" % number}])

    for source in (open_source(tmp_path), TFRecords(tmp_path)):
        assert isinstance(source, TFRecords)
        assert contents(source) == [b"0", b"1"]

    write_records(tmp_path / "x-test.tfrecord-00000-of-00001", [{"image": b"2"}])
    message = rf"several sets .*\(x-test\.tfrecord, x-train\.tfrecord\): .*'{tmp_path}/x-train\.tfrecord-\*'"
    with pytest.raises(ConfigError, match=message):
        open_source(tmp_path)


def test_a_loader_takes_a_pattern(tmp_path: Path) -> None:
    for number in range(3):
        records: list[dict[str, Feature]] = [
            {"image": bytes([number, each]), "label": [each]} for each in range(4)
        ]
        write_records(tmp_path / f"{number}.tfrecord", records)

    with Loader(
        str(tmp_path / "{0..2}.tfrecord"),
        batch_size=6,
        epochs=1,
        seed=3,
        transforms=[DecodeRaw("uint8")],
        dtype="uint8",
        report=None,
    ) as loader:
        batches = [(images.tolist(), labels.tolist()) for images, labels in loader]
    found = sorted(
        (*row, label) for rows, numbers in batches for row, label in zip(rows, numbers, strict=True)
    )

    assert found == sorted((number, each, each) for number in range(3) for each in range(4))


def _cut(data: bytes) -> bytes:
    return data[:-3]


def _flipped(data: bytes) -> bytes:
    return data[:2] + bytes([data[2] ^ 1]) + data[3:]


@for_each(
    ("change", "message"),
    [
        (_cut, "is cut off: a record begins at byte 34 that does not end"),
        (lambda data: data[:35], "is cut off: a record begins at byte 34"),
        (_flipped, "is damaged, or no TFRecord: at byte 0 begins no record"),
        (lambda data: b"", "is empty"),
        (lambda data: b"some text that is no record at all", "at byte 0 begins no record"),
        (gzip.compress, "is compressed, so that no record can be read without all before it"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_what_is_wrong(tmp_path: Path, change: Any, message: str) -> None:
    file = write_records(tmp_path / "a", [{"image": b"1"}, {"image": b"2"}])
    file.write_bytes(change(file.read_bytes()))

    with pytest.raises(DataError, match=message) as caught:
        TFRecords(file)

    assert str(caught.value).startswith(str(file))


@for_each("content", [b"\xff" * 20, b"\x0a\xff", b"\x0b\x01", b"\x0a\x02\x0a\x05abc", b"\x80"])
def test_a_record_that_is_no_example_is_an_error(tmp_path: Path, content: bytes) -> None:
    file = write_records(tmp_path / "a", [{"image": b"1"}, content])

    with pytest.raises(DataError, match="has a record at byte 34 that is no tf"):
        TFRecords(file)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60), tail=st.binary(max_size=30))
def test_any_bytes_are_an_error_or_samples_within_the_file(
    tmp_path: Path, content: bytes, tail: bytes
) -> None:
    file = write_records(tmp_path / "a", [{"image": b"1"}, b"\x0a" + bytes([len(content)]) + content, tail])
    try:
        source = TFRecords(file, sample="image", label=None)
    except DataError:
        return
    assert all(len(each) < file.stat().st_size for each in contents(source))


def test_features_that_are_not_there_are_named(tmp_path: Path) -> None:
    file = write_records(tmp_path / "a", [{"one": b"1", "two": b"2", "n": [1]}, {"one": b"3"}])

    with pytest.raises(ConfigError, match="does not tell which feature is the sample: it has n, one, two;"):
        TFRecords(file)
    with pytest.raises(DataError, match="record 1 has no feature 'two' with one string of bytes"):
        TFRecords(file, sample="two")
    with pytest.raises(DataError, match="record 0 has no feature 'n' with one string of bytes"):
        TFRecords(file, sample="n")
    with pytest.raises(DataError, match="record 1 has no label 'n', an integer, a name, or"):
        TFRecords(file, sample="one", label="n")
    with pytest.raises(ConfigError, match="sample is 7; it is a name"):
        TFRecords(file, sample=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("several", [[3, 7], [b"cat", b"dog"]])
def test_a_label_of_several_values_is_an_error(tmp_path: Path, several: Any) -> None:
    file = write_records(
        tmp_path / "a", [{"image": b"1", "label": several[:1]}, {"image": b"2", "label": several}]
    )

    with pytest.raises(DataError, match="record 1 has several values as its label 'label'"):
        TFRecords(file)


def test_as_many_numbers_in_each_record_are_labels(tmp_path: Path) -> None:
    def unpacked(name: bytes, numbers: bytes) -> bytes:
        inside = b"\x0a" + bytes([len(name)]) + name + b"\x12" + bytes([len(numbers)]) + numbers
        return b"\x0a" + bytes([len(inside)]) + inside

    features = unpacked(b"image", b"\x0a\x03\x0a\x011") + unpacked(b"label", b"\x1a\x04\x08\x03\x08\x07")
    features += unpacked(b"weight", b"\x12\x05\x0d" + struct.pack("<f", 0.5))
    records: list[dict[str, Feature]] = [
        {"image": b"2", "label": [-1, 300], "weight": [2.0]},
        {"image": b"3", "label": [0, 2**62], "weight": [0.1]},
    ]
    file = write_records(tmp_path / "a", [b"\x0a" + bytes([len(features)]) + features, *records])

    several: Any = TFRecords(file, label=["label", "weight"]).labels
    one: Any = TFRecords(file).labels

    assert (one.dtype, one.tolist()) == (np.int64, [[3, 7], [-1, 300], [0, 2**62]])
    assert np.array_equal(several["label"], one)
    assert several["weight"].dtype == np.float32
    assert several["weight"].tolist() == [0.5, 2.0, np.float32(0.1)]
    write_records(file, [*records, {"image": b"4", "label": [1, 2, 3]}])
    with pytest.raises(
        DataError, match="record 2 has 3 numbers as its label 'label', and the first 2: write as many"
    ):
        TFRecords(file)
    write_records(file, [*records, {"image": b"4", "label": [0.5, 1.0]}])
    with pytest.raises(DataError, match=r"record 2 has no label 'label', .* as the first record has"):
        TFRecords(file)


def test_a_label_that_the_first_record_lacks_is_an_error(tmp_path: Path) -> None:
    others: list[dict[str, Feature]] = [{"image": b"2", "label": [1]}] * 5
    file = write_records(tmp_path / "a", [{"image": b"1"}, *others])

    with pytest.raises(DataError, match="record 0 has no label 'label', an integer, a name, or"):
        TFRecords(file)


def test_an_empty_list_is_no_label_and_the_record_an_example(tmp_path: Path) -> None:
    """As TensorFlow writes a feature of a record that has none."""
    without = example_class()()
    without.features.feature["image"].byteslist.value.append(b"2")
    without.features.feature["label"].int64list.SetInParent()
    file = write_records(tmp_path / "a", [{"image": b"1", "label": [0]}, bytes(without.SerializeToString())])

    with pytest.raises(DataError, match="record 1 has no label 'label', an integer, a name, or"):
        TFRecords(file)
    assert contents(TFRecords(file, label=None)) == [b"1", b"2"]


def test_integers_in_one_record_and_names_in_another_are_an_error(tmp_path: Path) -> None:
    records: list[dict[str, Feature]] = [{"image": b"1", "label": [2]}, {"image": b"2", "label": b"cat"}]

    with pytest.raises(DataError, match=r"record 0 has 2, and .*: record 1 has 'cat'"):
        TFRecords(write_records(tmp_path / "a", records))

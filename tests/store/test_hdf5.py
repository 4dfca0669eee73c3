"""Which rows HDF5 files have, where they lie, and what is refused."""

from __future__ import annotations

import fcntl
import pickle
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.for_each import for_each

from penstock import Loader, open_source
from penstock.errors import ConfigError, DataError
from penstock.store import Hdf5, read_group

ROWS = np.random.default_rng(3).integers(0, 60_000, (23, 4, 3)).astype("<u2")
LABELS = np.arange(23) % 5


def write(
    file: Path, rows: NDArray[Any] = ROWS, name: str = "data", *, userblock: int = 0, **how: Any
) -> Path:
    with h5py.File(file, "w", userblock_size=userblock) as out:
        out.create_dataset("filler", data=np.arange(100))
        out.create_dataset(name, data=rows, **how)
        out["labels"] = LABELS[: len(rows)]
    return file


def rows_of(source: Hdf5) -> NDArray[Any]:
    return np.array(
        [np.frombuffer(source.read(sample), "<u2").reshape(4, 3) for sample in range(len(source))]
    )


@for_each("how", [{}, {"chunks": (5, 4, 3)}, {"chunks": (1, 4, 3)}, {"chunks": (23, 4, 3)}])
@for_each("userblock", [0, 1024])
def test_rows_are_those_that_h5py_reads(tmp_path: Path, how: dict[str, Any], userblock: int) -> None:
    source = Hdf5(write(tmp_path / "a.h5", userblock=userblock, **how), data="data")

    assert (rows_of(source) == ROWS).all()
    assert isinstance(source.labels, np.ndarray)
    assert (source.labels == LABELS).all()
    assert source.describe(7) == f"{tmp_path}/a.h5: row 7"
    assert repr(source) == f"Hdf5('{tmp_path}/a.h5'): 23 samples of uint16[4, 3]"


def test_files_follow_each_other(tmp_path: Path) -> None:
    write(tmp_path / "0.h5", ROWS[:10], chunks=(3, 4, 3))
    write(tmp_path / "1.h5", ROWS[10:])
    with h5py.File(tmp_path / "1.h5", "a") as file:
        file["labels"][:] = LABELS[10:]
    source = Hdf5(tmp_path / "*.h5", data="data")
    ids = np.array([22, 0, 10, 9, 3])
    into = np.empty(ids.size * 24, np.uint8)

    assert read_group(source, ids, into, 24 * np.arange(ids.size + 1)) == []

    assert (into.view("<u2").reshape(-1, 4, 3) == ROWS[ids]).all()
    assert isinstance(source.labels, np.ndarray)
    assert (source.labels == LABELS).all()


def test_a_loader_takes_the_path(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"], file["y"] = ROWS, LABELS

    with Loader(tmp_path / "a.h5", batch_size=8, epochs=1, report=None) as loader:
        batches = [(rows.copy(), labels.copy()) for rows, labels in loader]
    rows, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
    order = np.lexsort(rows.reshape(23, -1).T[::-1])

    assert rows.dtype == np.uint16
    assert (rows[order] == ROWS[np.lexsort(ROWS.reshape(23, -1).T[::-1])]).all()
    assert all(
        (ROWS[label == LABELS] == row).all((1, 2)).any() for row, label in zip(rows, labels, strict=True)
    )


def test_labels_may_be_of_ones_own_or_none(tmp_path: Path) -> None:
    file = write(tmp_path / "a.h5")

    own = Hdf5(file, data="data", labels={"weight": np.linspace(0, 1, 23)})
    none = Hdf5(file, data="data", labels=None)

    assert isinstance(own.labels, dict)
    assert own.labels["weight"][-1] == 1
    assert none.labels == {}


#: How rows are written so that they have to be decoded.
DECODED: list[dict[str, Any]] = [
    {"compression": "gzip"},
    {"compression": "gzip", "chunks": (5, 4, 3), "shuffle": True, "fletcher32": True},
    {"compression": "lzf", "chunks": (1, 4, 3)},
    {"compression": "lzf", "chunks": (4, 2, 2), "shuffle": True},
    {"chunks": (5, 2, 3)},
    {"chunks": (6, 4, 3), "fletcher32": True},
]


@for_each("how", DECODED)
def test_rows_that_are_compressed_or_cut_are_those_that_h5py_reads(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    source = Hdf5(write(tmp_path / "a.h5", **how), data="data")
    ids = np.array([22, 0, 5, 22, 4, 9, 21])
    into = np.empty(ids.size * 24, np.uint8)

    assert read_group(source, ids, into, 24 * np.arange(ids.size + 1)) == []

    assert (into.view("<u2").reshape(-1, 4, 3) == ROWS[ids]).all()
    assert (rows_of(source) == ROWS).all()
    assert (rows_of(pickle.loads(pickle.dumps(source))) == ROWS).all()
    source.close()


def test_files_that_are_compressed_in_part_follow_each_other(tmp_path: Path) -> None:
    write(tmp_path / "0.h5", ROWS[:10], chunks=(3, 4, 3), compression="gzip")
    write(tmp_path / "1.h5", ROWS[10:])
    source = Hdf5(tmp_path / "*.h5", data="data")

    assert (rows_of(source) == ROWS).all()
    assert source.describe(12) == f"{tmp_path}/1.h5: row 2"
    source.close()


def test_chunks_are_decoded_once_for_what_is_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Hdf5(write(tmp_path / "a.h5", chunks=(5, 4, 3), compression="gzip"), data="data", memory="240 B")
    decoded: list[int] = []
    decode = source._decode

    def decode_and_count(unit: int, descriptor: int) -> NDArray[np.uint8]:
        decoded.append(unit)
        return decode(unit, descriptor)

    monkeypatch.setattr(source, "_decode", decode_and_count)
    into = np.empty(6 * 24, np.uint8)

    read_group(source, np.array([0, 20, 4, 21, 3, 22]), into, 24 * np.arange(7))
    source.read(1)

    assert sorted(decoded) == [0, 4]
    source.close()


def test_a_chunk_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.h5", chunks=(5, 4, 3), compression="gzip")

    with pytest.raises(
        ConfigError, match=r"memory is 119 B, and the chunk from row 0 on of \S+/a\.h5 has 120 B"
    ):
        Hdf5(file, data="data", memory="119 B")


def test_a_damaged_chunk_is_an_error_of_its_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "a.h5", chunks=(5, 4, 3), compression="gzip")
    with h5py.File(file, "r") as read:
        place = read["data"].id.get_chunk_info(1).byte_offset
    with file.open("r+b") as out:
        out.seek(place)
        out.write(b"\xff" * 20)
    source = Hdf5(file, data="data")

    assert source.read(0) == ROWS[0].tobytes()
    with pytest.raises(DataError, match=r"a\.h5: the chunk from row 5 on cannot be decoded"):
        source.read(7)
    source.close()


def test_chunks_that_were_never_written_are_an_error(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        array = file.create_dataset("data", (20, 2), "f4", chunks=(5, 2))
        array[:7] = 1

    with pytest.raises(DataError, match=r"/data was never written from row 10 on") as caught:
        Hdf5(tmp_path / "a.h5")
    assert "no complete HDF5 file" not in str(caught.value)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.h5", name="one")

    with pytest.raises(
        ConfigError, match=r"does not tell which array has the samples: it has filler \[100\]"
    ):
        Hdf5(file)
    with pytest.raises(DataError, match=r"^\S+/a\.h5 has no array 'two': it has filler"):
        Hdf5(file, data="two")
    with pytest.raises(
        DataError, match="has no array 'one more'; labels are an array with 23 rows, one for each"
    ):
        Hdf5(file, data="one", labels="one more")
    with pytest.raises(DataError, match=r"/no\.h5 cannot be opened"):
        Hdf5(tmp_path / "no.h5")


def test_a_file_that_is_cut_off_or_none_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.h5")
    data = file.read_bytes()
    for content in (b"", b"no HDF5", data[: len(data) // 2]):
        file.write_bytes(content)
        with pytest.raises(DataError, match="is no complete HDF5 file") as caught:
            Hdf5(file, data="data")
        assert str(caught.value).startswith(str(file))


def test_files_of_other_rows_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "0.h5")
    write(tmp_path / "1.h5", ROWS.astype("f4"))

    with pytest.raises(DataError, match=r"1\.h5 has rows of float32\[4, 3\], unlike .*0\.h5, uint16\[4, 3\]"):
        Hdf5(tmp_path / "{0,1}.h5", data="data")


def test_a_path_of_another_kind_of_file_is_no_hdf5(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        open_source(tmp_path / "missing.h5")


def test_a_file_that_another_process_writes_is_not_called_damaged(tmp_path: Path) -> None:
    """Written again, as for a damaged one, it would be lost to whoever writes it."""
    file = write(tmp_path / "a.h5")
    with open(file, "r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)  # as HDF5 does
        with pytest.raises(DataError, match=r"a\.h5 is open for writing in another process: wait"):
            Hdf5(file, data="data")


def test_labels_of_another_length_are_named_with_their_shape(tmp_path: Path) -> None:
    file = write(tmp_path / "a.h5")
    with h5py.File(file, "r+") as out:
        del out["labels"]
        out["labels"] = LABELS[:-1]

    with pytest.raises(DataError, match=r"has 'labels' of shape \[22\]; labels are an array with 23 rows"):
        Hdf5(file, data="data")


@pytest.mark.parametrize("data", [None, "data"])
def test_a_link_to_another_file_is_named(tmp_path: Path, data: str | None) -> None:
    write(tmp_path / "a.h5")
    with h5py.File(tmp_path / "b.h5", "w") as out:
        out["data"] = h5py.ExternalLink("a.h5", "data")

    with pytest.raises(ConfigError, match=r"b\.h5: data lies in another file, a\.h5: give that"):
        Hdf5(tmp_path / "b.h5", data=data)


@pytest.mark.parametrize("how", [{"compression": "gzip", "chunks": (5, 2, 3)}, {"chunks": (5, 4, 3)}])
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=5))
def test_damage_is_a_data_error_or_other_numbers(
    tmp_path: Path, how: dict[str, Any], changes: list[tuple[int, int]]
) -> None:
    content = bytearray(write(tmp_path / "a.h5", **how).read_bytes())
    for place, byte in changes:
        content[place % len(content)] = byte
    (tmp_path / "b.h5").write_bytes(content)

    try:
        source = Hdf5(tmp_path / "b.h5", data="data", labels=None)
    except (DataError, ConfigError):
        return
    count = min(len(source), 23)
    into = np.empty(count * source.sample_bytes, np.uint8)
    failed = read_group(source, np.arange(count), into, np.arange(count + 1) * source.sample_bytes)
    source.close()

    assert all(isinstance(error, DataError) for _, error in failed)

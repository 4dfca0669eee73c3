"""The record of a watched command: readable to the last chunk before a cut, bounded, honest about what was gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.errors import ConfigError, FormatError
from penstock.recordings.devices import FILE, GONE, DeviceWriter, check_new, read_devices

COLUMNS = ("nanoseconds", "disk:sda:read_bytes")


def rows_of(count: int, first: int = 0) -> NDArray[np.int64]:
    """A row every second; 1,000 bytes are read between two."""
    number = np.arange(first, first + count, dtype=np.int64)
    return np.stack([number * 10**9, number * 1000], axis=1)


def test_a_record_cut_at_any_byte_is_read_up_to_the_last_intact_chunk(tmp_path: Path) -> None:
    with DeviceWriter(tmp_path / FILE, COLUMNS, {"command": ["train", "\udcff\n"]}) as writer:
        ends = []
        for part in range(3):
            writer.append(rows_of(10, 10 * part))
            ends.append((tmp_path / FILE).stat().st_size)
        writer.close(3)
    whole = (tmp_path / FILE).read_bytes()

    record = read_devices(tmp_path)
    assert record.exit_status == 3
    assert record.rows.tolist() == rows_of(30).tolist()
    assert record.meta["command"] == ["train", "\udcff\n"]
    assert record.grown("disk:sda:read_bytes") == 29_000
    begin = len(whole) - sum(len(whole) - end for end in ends[-1:]) - (ends[2] - ends[0])
    for length in range(begin, len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        cut = read_devices(tmp_path / "cut")
        assert cut.exit_status is None
        assert cut.rows.shape[0] == 10 * sum(end <= length for end in ends)
    (tmp_path / "cut").write_bytes(whole[: ends[0] - 1] + bytes([whole[ends[0] - 1] ^ 1]) + whole[ends[0] :])
    with pytest.raises(FormatError, match="is damaged at offset"):
        read_devices(tmp_path / "cut")


def test_a_long_record_loses_rows_of_its_older_half_and_no_byte_of_its_counters(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rows = np.cumsum(generator.integers(1, 10**9, (4000, 2)), axis=0)
    with DeviceWriter(tmp_path / FILE, COLUMNS, {}, most_bytes=20_000) as writer:
        for first in range(0, 4000, 20):
            writer.append(rows[first : first + 20])
            assert (tmp_path / FILE).stat().st_size < 21_000
        writer.close(0)

    record = read_devices(tmp_path / FILE)

    assert record.rows.shape[0] < 2500
    assert record.rows[0].tolist() == rows[0].tolist()
    assert record.rows[-500:].tolist() == rows[-500:].tolist()
    assert record.grown("disk:sda:read_bytes") == rows[-1, 1] - rows[0, 1]


def test_what_a_device_did_while_it_was_gone_is_no_rate(tmp_path: Path) -> None:
    rows = rows_of(5)
    rows[2, 1] = GONE
    rows[4, 1] = 10  # put back: it counts anew
    with DeviceWriter(tmp_path / FILE, COLUMNS, {}) as writer:
        writer.append(rows)

    assert read_devices(tmp_path).rate("disk:sda:read_bytes").tolist() == [1000.0, 0.0, 0.0, 0.0]


def test_a_folder_is_of_one_run(tmp_path: Path) -> None:
    check_new(tmp_path)
    (tmp_path / FILE).write_bytes(b"")

    with pytest.raises(ConfigError, match="has the record of another run"):
        check_new(tmp_path)

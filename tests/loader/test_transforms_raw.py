"""Stored numbers on their way into a slot of another type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.for_each import for_each

from penstock.flow.pieces import Pieces
from penstock.loader import Loader
from penstock.loader.transforms import DecodeRaw, raw
from penstock.loader.transforms.raw import place_of, write_group
from penstock.store import FlatFolder, Tokens

PAIRS = [
    ("<u2", "<i8"),
    (">u2", "<i8"),
    ("u1", "f4"),
    ("<i4", "f4"),
    ("<f4", "f8"),
    ("<f4", "<f4"),
    ("<i8", "<i8"),
]


@for_each(("stored", "held"), PAIRS)
@for_each("width", [1, 3, 64])
@for_each("form", ["views", "one piece"])
def test_numbers_read_to_the_end_of_their_place_are_widened_there(
    stored: str, held: str, width: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "_WIDENED_AT_ONCE", 7)
    values = np.random.default_rng(width).integers(0, 120, (5, width)).astype(stored)
    out, rows = np.full((9, width), 77, held), range(2, 7)
    place = place_of(np.dtype(stored), out, rows)
    assert place.nbytes == values.nbytes
    place[:] = values.view(np.uint8).ravel()
    views, piece = list(place.reshape(5, -1)), Pieces(place, np.arange(6) * (values.nbytes // 5))
    data = views if form == "views" else piece

    assert write_group(data, np.dtype(stored), out, rows) == []

    assert np.array_equal(out[2:7], values)
    assert (out[[0, 1, 7, 8]] == 77).all()


@for_each(("stored", "held"), PAIRS)
def test_those_whose_neighbours_failed_are_moved_before_they_are_written_over(stored: str, held: str) -> None:
    values = np.random.default_rng(0).integers(0, 120, (6, 8)).astype(stored)
    out = np.full((6, 8), 77, held)
    place = place_of(np.dtype(stored), out, range(6))
    place[:] = values.view(np.uint8).ravel()
    data = list(place.reshape(6, -1))
    had = [0, 1, 3, 5]

    assert write_group([data[index] for index in had], np.dtype(stored), out, had) == []

    assert np.array_equal(out[had], values[had])


def test_tokens_are_read_into_the_slot(tmp_path: object) -> None:
    """As int64, which a model wants, of uint16, as they are stored."""
    tokens = np.arange(50_000, dtype="<u2")
    tokens.tofile(f"{tmp_path}/tokens.bin")
    with Loader(
        Tokens(f"{tmp_path}/tokens.bin", length=100, dtype="<u2"), batch_size=64, epochs=1, report=None
    ) as loader:
        assert loader._parts.setup.decoder.place_of(range(4), (np.empty((8, 101), "<i8"),)) is not None
        order = loader.plan.order.at(0, np.arange(loader.plan.samples))
        batches = [batch.copy() for batch in loader]

    expected = order[:, None] * 100 + np.arange(101)
    assert np.array_equal(np.concatenate(batches), expected)


def test_a_sample_of_another_shape_is_told_which_one_sets_it(tmp_path: Path) -> None:
    for number, size in enumerate((6, 40, 40)):
        (tmp_path / f"{number}.bin").write_bytes(bytes(size))
    with Loader(
        FlatFolder(tmp_path, extensions=None),
        batch_size=3,
        epochs=1,
        shuffle=False,
        transforms=[DecodeRaw("u1")],
        on_error="skip",
        report=None,
    ) as loader:
        list(loader)

        assert [skip.sample for skip in loader.skipped] == [1, 2]
        for skip in loader.skipped:
            assert f"has space for (6,), the shape of {tmp_path}/0.bin: all must have one shape" in skip.error

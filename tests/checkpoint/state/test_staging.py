"""The staging area: a state cut into waves between blocks, copied, and found again whole."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.for_each import for_each

from penstock.checkpoint.state import staging
from penstock.checkpoint.state.flatten import Shard, flatten
from penstock.checkpoint.state.staging import Cut, StagingArea, space_of, waves_of
from penstock.checkpoint.state.tensors import Layout, Piece
from penstock.flow.ordered import Workers


@pytest.fixture(autouse=True)
def blocks_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut tensors into blocks of eight values, so that small ones have many."""
    monkeypatch.setattr(staging, "BLOCK_VALUES", 8)


def cut_bytes(cut: Cut) -> range:
    """Return the places of a cut's bytes in its tensor."""
    return range(cut.source.layout.nbytes)[cut.place]


def put_together(waves: list[list[Cut]], workers: Workers | None = None) -> dict[Layout, bytes]:
    """Stage one wave after the other in the same area, and join the pieces."""
    area = StagingArea()
    area.reserve(max(map(space_of, waves)))
    found: dict[Layout, bytes] = {}
    for wave in waves:
        pieces: list[Piece] = area.copy(wave, workers)
        for piece in pieces:
            assert piece.data.size == 0 or piece.data.ctypes.data % 8 == 0
            before = found.setdefault(piece.layout, b"")
            assert piece.first * 8 * piece.layout.dtype.item_bytes == len(before)
            found[piece.layout] = before + piece.data.tobytes()
    return found


ARRAYS = st.lists(
    st.tuples(st.sampled_from(["float64", "float32", "int16", "bool"]), st.integers(0, 70)),
    min_size=1,
    max_size=6,
)


@given(shapes=ARRAYS, limit_bytes=st.one_of(st.none(), st.integers(1, 1000)))
def test_waves_put_together_are_the_state_and_none_is_larger_than_the_limit(
    shapes: list[tuple[str, int]], limit_bytes: int | None
) -> None:
    random = np.random.default_rng(0)
    state = {str(i): random.integers(0, 2, n).astype(dtype) for i, (dtype, n) in enumerate(shapes)}
    sources = flatten(state).sources

    waves = waves_of(sources, limit_bytes)

    assert put_together(waves) == {source.layout: state[source.layout.name].tobytes() for source in sources}
    for wave in waves:
        filled = [cut for cut in wave if cut.source.layout.nbytes]
        is_one_block = (
            len(filled) == 1 and len(cut_bytes(filled[0])) <= 8 * filled[0].source.layout.dtype.item_bytes
        )
        assert limit_bytes is None or space_of(wave) <= limit_bytes or is_one_block
    assert limit_bytes is not None or len(waves) == 1


def test_what_does_not_lie_side_by_side_is_staged_as_it_is_stored() -> None:
    grid = np.arange(60, dtype=np.int32).reshape(6, 10)
    state = {
        "columns": grid[:, ::2],
        "backwards": np.arange(20.0)[::-1],
        "torch": torch.arange(40.0).reshape(5, 8).t(),
        "bfloat16": torch.arange(30).to(torch.bfloat16)[::3],
    }
    sources = flatten(state).sources
    whole = {source.layout: source.data().tobytes() for source in sources}

    assert put_together(waves_of(sources, 64)) == whole
    assert put_together(waves_of(sources, None)) == whole
    with Workers(2, "test-copy") as workers:
        assert put_together(waves_of(sources, 64), workers) == whole
        assert put_together(waves_of(sources, None), workers) == whole


@pytest.mark.parametrize("where", ["numpy", "torch", "device"])
def test_a_wave_costs_no_more_memory_than_it_has_space_for_however_the_numbers_lie(where: str) -> None:
    """What is made whole, be it once, needs the tensor's size beyond the waves that were to bound it."""
    grid = np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, 1 << 10)
    whole = torch.from_numpy(grid)[:, ::2] if where != "numpy" else grid[::-1, ::-2]
    (source,) = flatten({"x": Shard(whole, tuple(whole.shape), (0, 0))}).sources
    source = replace(source, is_on_host=where != "device")
    waves = waves_of([source], 32 << 10)
    area = StagingArea()
    area.reserve(max(map(space_of, waves)))
    expected = np.asarray(whole).tobytes()
    assert source.address is None
    assert len(waves) == 64

    tracemalloc.start()
    try:
        for wave in waves:
            (piece,) = area.copy(wave)
            place = wave[0].place
            assert expected[place] == piece.data.tobytes()
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < grid.nbytes // 16


def test_several_threads_copy_every_byte_of_a_large_tensor() -> None:
    random = np.random.default_rng(0)
    state = {
        name: random.integers(0, 256, size, np.uint8)
        for name, size in (("a", 40_000_003), ("b", 17), ("c", 9_000_000))
    }
    sources = flatten(state).sources

    with Workers(3, "test-copy") as workers:
        assert put_together(waves_of(sources, None), workers) == {
            source.layout: state[source.layout.name].tobytes() for source in sources
        }


@for_each("limit_bytes", [1, 63, 64, 65, 100])
def test_a_limit_below_a_block_makes_waves_of_one_block_each(limit_bytes: int) -> None:
    """Blocks of eight doubles have 64 bytes; the last one of the first tensor is shorter."""
    state = {"a": np.arange(20.0), "b": np.arange(8.0)}
    sources = flatten(state).sources

    waves = waves_of(sources, limit_bytes)

    assert [[len(cut_bytes(cut)) for cut in wave] for wave in waves] == [[64], [64], [32], [64]]
    assert put_together(waves) == {source.layout: state[source.layout.name].tobytes() for source in sources}


def test_what_threads_copy_stays_though_nobody_waits_for_them_any_more() -> None:
    """As where a second Ctrl-C ends the wait: they have addresses."""

    class Leaving(Workers):
        def map(self, work: Any, things: Any, ahead: int = 2) -> Iterator[Any]:
            left.extend((work, list(things)))
            raise KeyboardInterrupt

    left: list[Any] = []
    state = {"a": np.arange(20), "b": np.arange(8)}
    seen = weakref.ref(state["b"])
    area = StagingArea()
    area.reserve(1000)
    with Leaving(0, "test") as workers, pytest.raises(KeyboardInterrupt):
        area.copy(waves_of(flatten(state).sources, None)[0], workers)
    del area, state

    work, groups = left
    for group in groups:
        work(group)
    assert seen() is not None
    left.clear()
    del work
    assert seen() is None


def test_an_empty_state_is_one_empty_wave() -> None:
    assert waves_of([], None) == [[]]
    assert waves_of([], 100) == [[]]


def test_an_area_grows_and_never_shrinks() -> None:
    area = StagingArea()
    (source,) = flatten({"a": np.arange(100, dtype=np.uint8)}).sources
    area.reserve(200)
    first = area.copy([Cut(source, 0, slice(0, 100))])[0].data
    area.reserve(50)
    second = area.copy([Cut(source, 0, slice(0, 100))])[0].data

    assert first.ctypes.data == second.ctypes.data
    assert second.tobytes() == bytes(range(100))

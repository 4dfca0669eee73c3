"""The codec for baselines as a stream in DCP's own files: any bytes in any pieces come back, and damage is told."""

from __future__ import annotations

import io
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.for_each import for_each
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.errors import ConfigError, FormatError
from penstock.torch.stream import PenstockStream, with_penstock

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
FRAME_BYTES = 1 << 18


class Kept(io.BytesIO):
    """A stream whose bytes are still there once it is closed, as DCP closes it."""

    def __init__(self, data: bytes = b"") -> None:
        super().__init__(data)
        self.kept = data

    def close(self) -> None:
        self.kept = self.getvalue()
        super().close()


def encoded(*pieces: bytes) -> bytes:
    kept = Kept()
    stream = PenstockStream().transform_to(kept)
    for piece in pieces:
        assert stream.write(piece) == len(piece)
    stream.close()
    assert kept.closed
    return kept.kept


def decoded(data: bytes) -> bytes:
    return PenstockStream().transform_from(io.BytesIO(data)).read()


def floats(count: int, dtype: str, seed: int = 0) -> bytes:
    """Return numbers as weights have them."""
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02
    return numbers.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Return what might be written: floats of any type, noise, zeros, of any length, around that of a frame too."""
    length = draw(
        st.integers(0, 2000)
        | st.sampled_from([FRAME_BYTES + extra for extra in (-1, 0, 1, 3)] + [3 * FRAME_BYTES])
    )
    kind = draw(st.sampled_from(["bfloat16", "float16", "float32", "float64", "noise", "zeros", "text"]))
    if kind == "noise":
        return np.random.default_rng(draw(st.integers(0, 9))).bytes(length)
    if kind in ("zeros", "text"):
        return (bytes(length) if kind == "zeros" else b"text " * length)[:length]
    return floats(length // 2 + 1, kind, draw(st.integers(0, 9)))[:length]


def in_pieces(draw: Any, data: bytes) -> list[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    bounds = [0, *cuts, len(data)]
    return [data[begin:end] for begin, end in pairwise(bounds)]


@settings(max_examples=60, deadline=None)
@given(draw=st.data(), parts=st.lists(contents(), max_size=3))
def test_any_bytes_written_in_any_pieces_are_read_in_any_pieces(
    draw: st.DataObject, parts: list[bytes]
) -> None:
    data = b"".join(parts)
    stored = encoded(*in_pieces(draw.draw, data))

    stream = PenstockStream().transform_from(io.BytesIO(stored))
    read = [stream.read(draw.draw(st.integers(0, 5000))) for _ in range(draw.draw(st.integers(0, 4)))]
    assert b"".join(read) + stream.read() == data
    assert stream.read(1) == b""


@settings(max_examples=60, deadline=None)
@given(draw=st.data(), data=contents().filter(lambda data: len(data) < 4000))
def test_every_flipped_bit_is_told(draw: st.DataObject, data: bytes) -> None:
    stored = bytearray(encoded(data))
    place = draw.draw(st.integers(0, 8 * len(stored) - 1))
    stored[place // 8] ^= 1 << place % 8

    with pytest.raises(FormatError, match="a stream of the checkpoint"):
        decoded(bytes(stored))


def test_every_cut_is_told() -> None:
    stored = encoded(floats(100, "float32"), bytes(500))
    for length in range(len(stored)):
        with pytest.raises(FormatError, match="ends early"):
            decoded(stored[:length])


def test_frames_that_changed_places_are_told() -> None:
    stored = encoded(floats(FRAME_BYTES // 4, "float32", 1), floats(FRAME_BYTES // 4, "float32", 2))
    head, frames = stored[:12], stored[12:-18]
    first = 10 + int.from_bytes(frames[6:10], "little") + 8
    assert decoded(stored)[:10] == floats(FRAME_BYTES // 4, "float32", 1)[:10]

    with pytest.raises(FormatError, match="a stream of the checkpoint is damaged"):
        decoded(head + frames[first:] + frames[:first] + stored[-18:])


def test_what_follows_the_end_is_told() -> None:
    with pytest.raises(FormatError, match="there are bytes after its end"):
        decoded(encoded(b"abc") + b"x")


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200), is_begun=st.booleans())
def test_a_stream_made_by_somebody_else_is_refused(data: bytes, is_begun: bool) -> None:
    begin = encoded()[:12] if is_begun else b""
    with pytest.raises(FormatError):
        decoded(begin + data)


@for_each(("dtype", "most"), [("bfloat16", 0.72), ("float32", 0.86), ("float16", 0.92), ("float64", 0.98)])
def test_weights_take_less_space(dtype: str, most: float) -> None:
    data = floats(300_000, dtype)
    assert len(encoded(data)) < most * len(data)


def test_noise_takes_a_thousandth_more_at_most() -> None:
    data = np.random.default_rng(1).bytes(3 * FRAME_BYTES)
    assert len(encoded(data)) < 1.001 * len(data)


def test_a_stream_takes_a_few_frames_of_memory() -> None:
    """Writing 16 MiB in one call, and reading them in small ones."""

    class Counting(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            return len(data)

    data = floats(1 << 22, "float32")
    encoded(data[:1000])  # what is loaded once does not count
    tracemalloc.start()
    try:
        stream = PenstockStream().transform_to(cast(Any, Counting()))
        stream.write(data)
        stream.close()
        written_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written_bytes < 4 << 20

    stored = encoded(data)
    tracemalloc.start()
    try:
        stream = PenstockStream().transform_from(io.BytesIO(stored))
        while stream.read(100_000):
            pass
        read_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read_bytes < len(stored) + (4 << 20)


def test_a_later_version_is_refused() -> None:
    assert PenstockStream().get_descriptor() == "stream.penstock/1"
    assert isinstance(PenstockStream.from_descriptor("1"), PenstockStream)
    assert isinstance(PenstockStream.from_descriptor("1.2"), PenstockStream)
    with pytest.raises(ConfigError, match=r"written by stream\.penstock 2; this Penstock reads 1"):
        PenstockStream.from_descriptor("2")


# -- In DCP's files ------------------------------------------------------------------------------------


def state() -> dict[str, Any]:
    """Return tensors of many types, and a value that DCP pickles."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=generator)
    dtypes = (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int8", "uint8",
        "complex64",
    )  # fmt: skip
    tensors = {name: bits.view(getattr(torch, name)).clone() for name in dtypes}
    return {
        **tensors,
        "weights": torch.randn(700, 300, generator=generator),
        "scalar": torch.tensor(3.0),
        "none": torch.zeros(0),
        "plain": [1, "x"],
    }


def empty() -> dict[str, Any]:
    return {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in state().items()
    }


def write(folder: Path) -> None:
    save(state(), storage_writer=FileSystemWriter(folder, _extensions=[PenstockStream()]), no_dist=True)


def test_dcps_own_files_are_smaller_and_read_back(tmp_path: Path) -> None:
    write(tmp_path / "ours")
    save(state(), storage_writer=FileSystemWriter(tmp_path / "plain"), no_dist=True)
    into = empty()
    load(
        into,
        storage_reader=FileSystemReader(tmp_path / "ours", _extension_registry=with_penstock()),
        no_dist=True,
    )

    for name, value in state().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(
                into[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
            ), name
        else:
            assert into[name] == value
    ours, plain = (
        sum(file.stat().st_size for file in (tmp_path / kind).glob("*.distcp")) for kind in ("ours", "plain")
    )
    assert ours < 0.88 * plain


def test_damage_in_dcps_own_files_is_told_before_a_value_is_returned(tmp_path: Path) -> None:
    """Which DCP itself does not see."""
    write(tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointException, match="a stream of the checkpoint is damaged"):
        load(
            empty(),
            storage_reader=FileSystemReader(tmp_path, _extension_registry=with_penstock()),
            no_dist=True,
        )


def test_without_the_registry_dcp_says_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(CheckpointException, match=r"stream\.penstock"):
        load(empty(), storage_reader=FileSystemReader(tmp_path), no_dist=True)

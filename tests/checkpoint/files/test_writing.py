"""Writing a part: what it takes of memory while blocks are encoded and written."""

from __future__ import annotations

import numpy as np
from tests.checkpoint.files.test_parts import Memory
from tests.checkpoint.snapshot_files import UID

from penstock.checkpoint.codecs import codec_named
from penstock.checkpoint.files.parts import PartWriter
from penstock.checkpoint.files.writing import Scratch, TensorWriter
from penstock.checkpoint.state.dtypes import dtype_named
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes, Layout, Piece
from penstock.flow.ordered import Workers


class Decoded:
    """A reference whose blocks are decoded into scratches, which it remembers."""

    def __init__(self) -> None:
        self.scratches: list[Scratch] = []

    def block(self, layout: Layout, number: int, scratch: Scratch) -> Bytes:
        if scratch not in self.scratches:
            self.scratches.append(scratch)
        first = number * BLOCK_VALUES
        out = scratch.buffer(0, min(BLOCK_VALUES, layout.nbytes - first))
        out[:] = number
        return out


def test_each_thread_decodes_what_blocks_are_differences_to_in_a_buffer_of_its_own() -> None:
    """Not each group of blocks that waits to be written, of which there are many more."""
    blocks, threads = 200, 2
    layout = Layout("x", dtype_named("uint8"), (blocks * BLOCK_VALUES,))
    references, file = Decoded(), Memory()
    data = np.repeat(np.arange(blocks).astype(np.uint8), BLOCK_VALUES)
    part = PartWriter(file, "part-00000.pst", 0, bytes.fromhex(UID))
    with Workers(threads, "test") as workers:
        coder = codec_named("balance").coder(lambda: iter(()))
        writer = TensorWriter(part, 0, references, coder, workers, lambda _: None)
        writer.write([Piece(layout, 0, data)])
    written = part.finish()

    assert 1 <= len(references.scratches) <= threads
    assert written.nbytes < data.size / 100, "each block was what it was a difference to"

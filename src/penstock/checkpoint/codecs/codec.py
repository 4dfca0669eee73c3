"""What a codec is: values in, bytes out, block by block; and what the bytes are called that it leaves.

Each block of a tensor (`penstock.checkpoint.state.tensors`) is stored alone: with its kind, its length and checksums in
the part's index (`penstock.checkpoint.files.parts`), and can be read alone, given the reference's block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import NamedTuple, Protocol

from penstock.checkpoint.state.dtypes import DType
from penstock.checkpoint.state.tensors import Bytes

#: What `out` must offer beyond the block's own bytes.
SLACK_BYTES = 1 << 16


class Kind(IntEnum):
    """How a block's bytes are stored. Numbers are for ever: they are in files."""

    #: As it is.
    STORED = 0
    #: The reference's block, bit for bit: no bytes.
    EQUAL = 1
    #: Another block of the same part, bit for bit: 8 bytes, its index in the part's table, little-endian.
    REPLICA = 2
    #: Ours: entropy-coded exponents beside what is left (no reference), entropy-coded differences to the reference.
    PLANE = 16
    DIFFERENCE = 17
    #: The delta-snapshot paper's: Huffman-coded exponents beside the rest; XOR with run-length-coded heading zeros.
    HUFFMAN_EXPONENTS = 32
    HEADING_ZEROS = 33
    #: What the paper compares with: gzip of the values, of the XOR, of the run-length code.
    GZIP = 34
    GZIP_XOR = 35
    GZIP_HEADING_ZEROS = 36


#: Kinds that are made back with the reference's block.
NEEDS_REFERENCE = frozenset(
    {Kind.EQUAL, Kind.DIFFERENCE, Kind.HEADING_ZEROS, Kind.GZIP_XOR, Kind.GZIP_HEADING_ZEROS}
)


class Pair(NamedTuple):
    """A block and the block that it may be stored as a difference to."""

    values: Bytes
    dtype: DType
    reference: Bytes | None


class Coder(Protocol):
    """Encodes the blocks of one snapshot. Called from several threads at once."""

    def encode(self, pair: Pair, out: Bytes) -> tuple[Kind, int]:
        """Encode a block.

        pair: its values, uint8[n] with n > 0, at most `BLOCK_VALUES` values; the reference is of the same size.
        out: uint8[n + SLACK_BYTES], overwritten from its beginning.
        Returns: the kind, which `decode_block` takes, and how many bytes of `out` are the block; never more than n.
            For STORED the values are the block, and nobody looks at `out`.
        """
        ...


class Codec(Protocol):
    """A way of storing snapshots."""

    @property
    def name(self) -> str:
        """Return what it is called in files and by users."""
        ...

    def coder(self, blocks: Callable[[], Iterator[Pair]]) -> Coder:
        """Return what encodes a snapshot's blocks.

        blocks: iterates over all of the snapshot's blocks, for a codec that chooses one setting for all of them;
            what it yields is valid until the next. A codec that does not look first never calls it.
        """
        ...


class Decoder(Protocol):
    """Decodes blocks of one kind."""

    def __call__(self, payload: Bytes, dtype: DType, reference: Bytes | None, out: Bytes) -> None:
        """Decode a block: the inverse of `Coder.encode`.

        payload: uint8[m], which may be damaged or hostile: nothing outside payload, reference and out is touched,
            and nothing loops longer than they are.
        reference: uint8[n] or None. out: uint8[n], all of it overwritten.
        Raises: FormatError if payload is no such block.
        """
        ...

"""Penstock's own codec, the default: per block the cheapest of what it can be, through an entropy coder.

A block is equal to its reference, a plane (floats: exponents coded, the rest beside them), a difference of ordered
integers to the reference, or stored as it is. Which, is chosen from a sample of its values. `_words_kernels` says what
numbers become, `_tans_kernels` how these are coded; docs/decisions/0012-own-codec.md has what was measured.

A payload, all numbers little-endian:

    u8 table_log · u8 shift · u8 contexts · u8 groups - 1 · u16 symbols · u16 runs · u16 lead
    u16 per context but the last: the lowest of the reference's exponents that stands in it, falling
    u16 per group but the first: the first symbol in it, rising. A value's group is that of the value before it in its
        lane (four states take the values in turn), the first's that of a lane's first value; within a context each
        group has a table of its own
    (u8 rest, u8 count) per run: so many symbols in turn have so many bits beside them. The first symbol's values begin
        at lead << rest, each next one's where the last one's end. Escapes follow, one in each group, with the whole
        word beside them
    per context and group, frequencies of all symbols and the escapes, summing to 2 ** table_log: one byte below 128;
        128 + high byte and low byte; 0 and how many more zeros follow it
    u16 x 4 states · u32 bits · the stream of so many bits · 8 zero bytes
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.checkpoint.codecs import kernel_sizes as sizes
from penstock.checkpoint.codecs.codec import Codec, Coder, Decoder, Kind, Pair
from penstock.checkpoint.state.dtypes import DTYPES, DType
from penstock.checkpoint.state.tensors import Bytes
from penstock.compiling import Part
from penstock.errors import FormatError

_KINDS = {int(kind): kind for kind in Kind}


class _Form(NamedTuple):
    """How the loops see a type; all but the last are their arguments.

    item: bytes of a value. exponent_at, exponent_mask: what of a reference's word is a context. word: a type of 32 or
        64 bits, at whose upper end the value stands.
    """

    item: int
    exponent_bits: int
    mantissa_bits: int
    exponent_at: int
    exponent_mask: int
    word: str


def _form_of(dtype: DType) -> _Form:
    # A complex number is two floats.
    parts = {"complex64": "float32", "complex128": "float64"}
    dtype = DTYPES[parts.get(dtype.name, dtype.name)]
    bits = 8 * dtype.item_bytes
    up = max(32 - bits, 0)
    exponents, mantissa = dtype.exponent_bits, dtype.mantissa_bits
    if bits == 8:
        exponents, mantissa = 0, 0
        at, mask = up + 4, 15
    elif exponents:
        at, mask = up + mantissa, (1 << exponents) - 1
    else:
        at, mask = 0, 0
    return _Form(bits // 8, exponents, mantissa, at, mask, "u8" if bits == 64 else "u4")


FORMS = {dtype: _form_of(dtype) for dtype in DTYPES.values()}


class _Scratch(threading.local):
    """What the loops write to in addition to their results, kept by each thread that encodes or decodes."""

    def __init__(self) -> None:
        self.buffers = {"u4": np.empty(sizes.BUFFER, "u4"), "u8": np.empty(sizes.BUFFER, "u8")}
        self.shorts = np.empty(sizes.SCRATCH, np.uint16)
        self.counts = np.empty(sizes.COUNTS, np.uint32)
        self.states = np.empty(sizes.STATES, np.uint16)
        self.steps = np.empty(sizes.STEPS, np.uint64)
        self.table = np.empty(sizes.TABLE, np.uint64)
        self._second = np.empty(0, np.uint8)

    def second(self, nbytes: int) -> Bytes:
        """Return uint8[nbytes] for a second encoding of the same block."""
        if self._second.size < nbytes:
            self._second = np.empty(nbytes, np.uint8)
        return self._second[:nbytes]


_NOTHING = np.empty(0, np.uint8)


#: The loops by what they do and the words they do it with.
KERNELS = {
    (what, word): Part(
        "penstock.checkpoint.codecs._ours_kernels",
        f"{what} {word}",
        sizes.SIGNATURES[f"{what} {word}"],
        f"how snapshots are {what}d ({8 * int(word[1])} bits)",
        meanwhile,
    )
    for what, meanwhile in (("encode", "blocks are stored as they are"), ("decode", ""))
    for word in ("u4", "u8")
}


_scratch = functools.cache(_Scratch)


@dataclass(frozen=True, slots=True)
class OwnCodec:
    """Penstock's own codec at one setting, which encodes blocks of any type.

    most_contexts, most_groups: that a block may have. stride: one run of values in so many is looked at to choose.
    """

    name: str
    most_contexts: int
    most_groups: int
    stride: int

    def coder(self, blocks: Callable[[], Iterator[Pair]]) -> Coder:
        """Return what encodes a snapshot's blocks: each is looked at alone."""
        return self

    def encode(self, pair: Pair, out: Bytes) -> tuple[Kind, int]:
        """Encode a block, as `Coder` says; STORED while another process compiles the loops."""
        form = FORMS[pair.dtype]
        loop = KERNELS["encode", form.word].ask()
        if loop is None:
            # Not even EQUAL: a snapshot of which hardly any block is encoded would keep the one before it.
            return Kind.STORED, pair.values.size
        scratch = _scratch()

        values = np.ascontiguousarray(pair.values)
        numbers = *form[:5], self.most_contexts, self.most_groups, self.stride
        buffers = scratch.buffers[form.word], scratch.shorts, scratch.counts, scratch.states, scratch.steps
        reference = _NOTHING if pair.reference is None else np.ascontiguousarray(pair.reference)
        kind, length, alone_bytes = loop(values, reference, *numbers, *buffers, out)
        if kind in (Kind.DIFFERENCE, Kind.STORED) and alone_bytes * (1 - sizes.NEARLY_EQUAL) < length:
            # By the estimate it may be smaller without a reference: that is known once both are encoded.
            second = scratch.second(out.size)
            other_kind, other_length, _ = loop(values, _NOTHING, *numbers, *buffers, second)
            if other_length < length:
                kind, length = other_kind, other_length
                out[:length] = second[:length]
        if kind == Kind.STORED:
            out[:length] = pair.values
        return _KINDS[kind], length


CODECS: tuple[Codec, ...] = (
    OwnCodec("speed", most_contexts=4, most_groups=1, stride=16),
    OwnCodec("balance", most_contexts=16, most_groups=4, stride=4),
)


def _decode_as(kind: Kind) -> Decoder:
    def decode(payload: Bytes, dtype: DType, reference: Bytes | None, out: Bytes) -> None:
        form = FORMS[dtype]
        loop = KERNELS["decode", form.word].wait()
        scratch = _scratch()
        if kind == Kind.DIFFERENCE:
            if reference is None or reference.size != out.size:
                raise FormatError(
                    "a block is a difference to a reference that is not given: restore that first"
                )
            old = np.ascontiguousarray(reference)
        else:
            old = _NOTHING
        buffers = scratch.buffers[form.word], scratch.shorts, scratch.table
        status = loop(np.ascontiguousarray(payload), int(kind), old, *form[:5], *buffers, out)
        if status:
            raise FormatError(f"a block of {dtype.name} is damaged: {_WRONG[status]}")

    return decode


_WRONG = (
    "",
    "its header is none",
    "its symbols are none of this type",
    "its frequencies do not fill their tables",
    "it is not of the length that its header says",
    "its stream does not end where it should",
)

DECODERS: dict[Kind, Decoder] = {kind: _decode_as(kind) for kind in (Kind.PLANE, Kind.DIFFERENCE)}

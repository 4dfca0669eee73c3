"""A snapshot's tensors as they come, from a training or from another tier, and how a part is written of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain as chained
from operator import itemgetter
from typing import Protocol

from penstock.checkpoint.codecs import codec_named
from penstock.checkpoint.codecs.codec import Coder
from penstock.checkpoint.files.catalog import Catalog, open_links
from penstock.checkpoint.files.manifest import Stored
from penstock.checkpoint.files.parts import Part, PartWriter
from penstock.checkpoint.files.reading import Chain
from penstock.checkpoint.files.writing import References, Scratch, TensorWriter, pairs_of
from penstock.checkpoint.recipe import RAW, EncodingConfig, SnapshotDecision, WrittenPart
from penstock.checkpoint.state.staging import Cut, StagingArea, cut_waves, space_of
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes, Layout, Piece, blocks_of
from penstock.checkpoint.tiers.throttle import Cap, CappedWriter
from penstock.checkpoint.tiers.tier import Draft, Writer
from penstock.errors import ConfigError, DataError, FormatError
from penstock.flow.ordered import Workers

#: Read from a tier at a time.
_WAVE_BYTES = 16 << 20


class Held:
    """A snapshot that is still in memory, in the area where it was staged: a reference of which nothing is read."""

    def __init__(self, uid: str, pieces: Iterable[Piece], area: StagingArea) -> None:
        """pieces: its tensors, each in one piece."""
        self.uid, self.area = uid, area
        self._data: dict[Layout, Bytes] = dict(map(itemgetter(0, 2), pieces))

    def block(self, layout: Layout, number: int, scratch: Scratch) -> Bytes | None:
        """Return a view of the tensor's block; None if there is no tensor of this layout."""
        data = self._data.get(layout)
        if data is None:
            return None
        step = BLOCK_VALUES * layout.dtype.item_bytes
        return data[number * step : (number + 1) * step]


class Staged(Protocol):
    """Where the pieces of a part come from: `Waves` of a training, or another tier."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all pieces."""
        ...

    @property
    def is_damaged(self) -> bool:
        """Return whether the state itself cannot be read: it is damaged where it comes from, or was not copied."""
        ...

    def take(self) -> Iterator[Sequence[Piece]]:
        """Yield the tensors in pieces; what was yielded is not looked at once the next is asked for."""
        ...

    def again(self) -> Iterator[Piece] | None:
        """Yield the tensors in pieces once more, each valid until the next; None if they come only once."""
        ...

    def give_up(self) -> None:
        """Take nothing more."""
        ...


class PartProcess(Protocol):
    """Writes the part of a drain in place of this process."""

    def write(self, decision: SnapshotDecision) -> WrittenPart:
        """Write a part into a draft that was begun. Raises: FormatError, DataError, ProcessEnded."""
        ...

    def check(self, decision: SnapshotDecision, part: Part) -> None:
        """Read a committed part back, as `check_part` does. Raises: FormatError, DataError."""
        ...

    def give_up(self, error: BaseException) -> None:
        """Begin no other process, for one has ended, and report that. error: how."""
        ...


class ProcessEnded(DataError):
    """The process that drains has ended before it answered."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process that drains has ended, with code {code}")
        self.was_killed = code == -signal.SIGKILL


class CopiedInTurn:
    """A state that is copied wave by wave as it is written, while training waits."""

    is_damaged = False

    def __init__(self, waves: Sequence[Sequence[Cut]], area: StagingArea) -> None:
        """area: a wave is copied there."""
        self._waves = waves
        self._area = area

    @property
    def nbytes(self) -> int:
        return sum(place.stop - place.start for wave in self._waves for _, _, place in wave)

    def take(self) -> Iterator[Sequence[Piece]]:
        self._area.reserve(max(map(space_of, self._waves)))
        return map(self._area.copy, self._waves)

    def again(self) -> Iterator[Piece]:
        """Yield the tensors once more, in the same area, where the first wave lies again at the end."""
        try:
            for wave in self._waves:
                yield from self._area.copy(wave)
        finally:
            self._area.copy(self._waves[0])

    def give_up(self) -> None:
        """Nobody waits."""


class FromChain:
    """The tensors of a stored snapshot in waves, each read when it is asked for."""

    def __init__(self, chain: Chain, interrupt: threading.Event) -> None:
        """interrupt: once set, nothing more is read."""
        self._chain = chain
        self._interrupt = interrupt
        self._scratch = Scratch()
        #: Whether it was found to be damaged.
        self.is_damaged = False

    @property
    def nbytes(self) -> int:
        return self._chain.manifest.raw_bytes

    def take(self) -> Iterator[Sequence[Piece]]:
        """Yield the tensors in pieces, valid until the next are asked for.

        Raises: FormatError, DataError; the latter also if it is interrupted.
        """
        scratch = Scratch()
        tensors = self._chain.manifest.tensors
        for cuts in cut_waves([stored.layout for stored in tensors], _WAVE_BYTES):
            self._check_interrupt()
            area = scratch.buffer(0, sum(place.stop - place.start for _, place in cuts))
            pieces = []
            used = 0
            for index, place in cuts:
                stored = tensors[index]
                block_bytes = BLOCK_VALUES * stored.layout.dtype.item_bytes
                data = area[used : used + place.stop - place.start]
                for begin in range(0, data.size, block_bytes):
                    number = (place.start + begin) // block_bytes
                    out = data[begin : begin + block_bytes]
                    self._read(stored, number, out)
                pieces.append(Piece(stored.layout, place.start // block_bytes, data))
                used += data.size
            yield pieces

    def again(self) -> Iterator[Piece]:
        """Yield the tensors once more, block by block, each valid until the next. Raises: as `take`."""
        scratch = Scratch()
        for stored in self._chain.manifest.tensors:
            for number, place in enumerate(blocks_of(stored.layout.nbytes, stored.layout.dtype)):
                self._check_interrupt()
                out = scratch.buffer(0, place.stop - place.start)
                self._read(stored, number, out)
                yield Piece(stored.layout, number, out)

    def _check_interrupt(self) -> None:
        if self._interrupt.is_set():
            raise DataError("a drain was broken off: the store is closed")

    def _read(self, stored: Stored, number: int, out: Bytes) -> None:
        try:
            self._chain.read_block(stored, number, out, self._scratch)
        except FormatError:
            self.is_damaged = True
            raise

    def give_up(self) -> None:
        """Nothing is read ahead."""


def write_staged(
    draft: Draft,
    decision: SnapshotDecision,
    number: int,
    encoding: EncodingConfig,
    staged: Staged,
    catalog: Catalog,
    workers: Workers,
    *,
    cap: Cap | None = None,
    held: Held | None = None,
    began: Callable[[Sequence[Piece]], None] = lambda _: None,
    written: Callable[[int], None] = lambda _: None,
) -> WrittenPart:
    """Write a rank's part of tensors as they come, and return once it would outlive a loss of power.

    number: of the part. cap: on what is written. catalog: where the reference is found, unless it is `held` in memory.
    began: is called with the first wave. written: is called with bytes as they are written.
    Raises: DataError, FormatError; ConfigError if the codec has to read all of them first, and they can be read only
        once. The file is closed in any case.
    """
    references: References | None = None
    with ExitStack() as opened:
        if decision.reference is not None and held is not None and held.uid == decision.reference.uid:
            references = held
        elif decision.reference is not None:
            references = opened.enter_context(closing(open_links(catalog, decision.chain)))
        waves = staged.take()
        first = next(waves, ())
        began(first)
        coder: Coder | None = None
        if encoding.codec != RAW:
            coder = codec_named(encoding.codec).coder(
                lambda: pairs_of(_looked_at(encoding, staged, first), references)
            )
        all_waves = chained([first], waves)
        if encoding.kept_mantissa_bits is not None:
            all_waves = chained(_cut_short(all_waves, encoding.kept_mantissa_bits))
        file = f"part-{number:05d}.pst"
        writer: Writer = draft.create(file)
        if cap is not None:
            writer = CappedWriter(writer, cap)
        try:
            part = PartWriter(writer, file, number, bytes.fromhex(decision.uid))
            tensors = TensorWriter(part, number, references, coder, workers, written)
            for pieces in all_waves:
                tensors.write(pieces)
            return WrittenPart(
                part.finish(), tensors.stored, tensors.refers, tensors.encode_seconds, tensors.encoded_bytes
            )
        except BaseException:
            writer.abandon()
            raise


def _looked_at(encoding: EncodingConfig, staged: Staged, first: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the whole state, for a codec that looks at it before it writes. Raises: ConfigError if it cannot be."""
    if staged.nbytes <= sum(piece.data.size for piece in first):
        yield from first
        return
    again = staged.again()
    if again is None:
        raise ConfigError(
            f"codec {encoding.codec!r} looks at the whole state before it writes, and staging_bytes is less "
            "than that: leave staging_bytes out, or choose another codec"
        )
    yield from again


def _cut_short(waves: Iterable[Sequence[Piece]], kept_mantissa_bits: int) -> Iterator[Sequence[Piece]]:
    """Yield waves whose floats have lost the last bits of their mantissas, where they are staged."""
    for pieces in waves:
        for piece in pieces:
            dtype = piece.layout.dtype
            lost = dtype.mantissa_bits - kept_mantissa_bits
            if dtype.is_float and dtype.item_bytes > 1 and lost > 0:
                words = piece.data.view(f"<u{dtype.item_bytes}")
                exponent = ((1 << dtype.exponent_bits) - 1) << dtype.mantissa_bits
                lowest = words.dtype.type((1 << dtype.mantissa_bits) - 1)
                # Cut to nothing, the mantissa of a NaN would be that of infinity: its first bit stays, or is set.
                is_nan = (words & exponent == exponent) & (words & lowest != 0)
                words &= words.dtype.type(-1 << lost & (1 << 8 * dtype.item_bytes) - 1)
                words[is_nan] |= words.dtype.type(1 << (dtype.mantissa_bits - 1))
        yield pieces

"""What a sequence of snapshots would take under each way of storing it: the delta-snapshot paper's evaluation.

Every number is of real blocks, encoded by the codecs of `penstock.checkpoint.codecs` and compared with the original
after decoding, but for the sizes of run-length-coded deltas, which are known from how many zeros head them.

Snapshots are read a block of each at a time, two times over: a first look counts what is alike, a second encodes. So
memory is a few blocks of each snapshot, whatever their size (the paper's section 5.6.3).

Source: Wang, Boukhobza and Shao, "Preserving SSD lifetime in deep learning applications with delta snapshots",
Journal of Parallel and Distributed Computing 133, 2019: "the paper" below.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.codecs import DEFAULT, codec_named, decode_block
from penstock.checkpoint.codecs.codec import SLACK_BYTES, Coder, Kind, Pair
from penstock.checkpoint.codecs.paper import (
    Looked,
    PaperCodec,
    best_heading_bits,
    codec_of,
    delta_block_bytes,
)
from penstock.checkpoint.files.writing import Scratch
from penstock.checkpoint.state.dtypes import DType
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes, Layout
from penstock.flow.cpus import available_cpus
from penstock.flow.ordered import Workers
from penstock.machine.ssd import Drive, Ssd
from penstock.measure.snapshot_sequences import Snapshots
from penstock.policy.delta_schemes import needed_to_restore, needed_to_save, reference_of
from penstock.policy.snap_distance import Advice, best_snap_dis, useful_bytes
from penstock.simulate.snapshots import (
    OWN_METHOD,
    SNAP_DISTANCES,
    TIMED_SNAP_DIS,
    Baseline,
    Delta,
    Method,
    SnapshotSizes,
)
from penstock.simulate.wear import warm_drive

PAGE_BYTES = 4096
#: Widths of headings whose sizes are counted, as many as suit any word.
_WIDTHS = range(7)

#: A snapshot and the one to which it is stored as a difference, None where it is stored alone.
Reference = tuple[int, int | None]
#: One that is stored as a difference.
Pairing = tuple[int, int]


class Seconds(NamedTuple):
    """Time of one processor. look: at all of a snapshot, to choose a width or a code."""

    look: float
    encode: float
    decode: float


@dataclass(frozen=True, slots=True, eq=False)
class Likeness:
    """How alike two snapshots that follow each other are.

    names: of the earlier and the later one. zeros: by bits of a word, words by how many heading bits are the same.
    pages: of 4 KiB, the snapshot's tensors one after the other.
    """

    names: tuple[str, str]
    zeros: Mapping[int, NDArray[np.int64]]
    equal_pages: int
    pages: int

    @property
    def words(self) -> int:
        """Return how many words there are: numbers, each part of a complex one counted."""
        return sum(int(zeros.sum()) for zeros in self.zeros.values())

    @property
    def equal_words(self) -> int:
        """Return how many are equal, bit for bit."""
        return sum(int(zeros[-1]) for zeros in self.zeros.values())

    def share(self, same_heading_bits: int) -> float:
        """Return the share of words whose so many first bits are the same (Table 1)."""
        alike = sum(int(zeros[same_heading_bits:].sum()) for zeros in self.zeros.values())
        return alike / self.words


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotStudy:
    """What was found.

    exponents: of the last snapshot, by type, floats by their exponent (Figure 8).
    sizes: in bytes, as the codecs store blocks, one's own width and code in each. All pairs that any distance needs
        are there for dynrle; for the other codecs those of the progressive scheme.
    seconds: by codec and reference, where measured. heading_bits: of dynrle, by bits of a word.
    tensor_seconds: by codec, float64[tensors, 2]: parameters, and what a snapshot's encoding takes on average.
    """

    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    likenesses: tuple[Likeness, ...]
    exponents: Mapping[str, NDArray[np.int64]]
    sizes: SnapshotSizes
    seconds: Mapping[str, Mapping[Reference, Seconds]]
    heading_bits: Mapping[Pairing, Mapping[int, int]]
    tensor_seconds: Mapping[str, NDArray[np.float64]]

    @property
    def nbytes(self) -> int:
        """Return the bytes of one snapshot."""
        return sum(layout.nbytes for layout in self.layouts)

    def save_seconds(self, method: Method, snapshot: int, snap_dis: int) -> float:
        """Return the processor time to save a snapshot: what it is a difference to is made first (Algorithm 2)."""
        own = self._seconds(method, snapshot, snap_dis)
        reads = needed_to_save(method.scheme, snapshot, snap_dis)
        return own.look + own.encode + sum(self._seconds(method, each, snap_dis).decode for each in reads)

    def restore_seconds(self, method: Method, snapshot: int, snap_dis: int) -> float:
        """Return the processor time to make a snapshot back."""
        reads = needed_to_restore(method.scheme, snapshot, snap_dis)
        return sum(self._seconds(method, each, snap_dis).decode for each in reads)

    def _seconds(self, method: Method, snapshot: int, snap_dis: int) -> Seconds:
        reference = reference_of(method.scheme, snapshot, snap_dis)
        codec = codec_for(method)
        if reference is None and method.baseline == "gzip":
            codec = "gzip"
        return self.seconds[codec][snapshot, reference]


def advise(study: SnapshotStudy, method: Method, storage_bytes: int | None = None) -> Advice:
    """Return the distance to use with a method, of all that the snapshots allow, as the paper's Table 10 advises.

    Raises: ConfigError naming the least storage where none fits, or for a method without deltas.
    """
    written, useful = {}, {}
    for snap_dis in range(1, len(study.names) + 1):
        stored = study.sizes.stored_bytes(method, snap_dis)
        assert stored is not None, f"a study has the sizes of {method.name}"
        written[snap_dis] = sum(stored)
        useful[snap_dis] = max(useful_bytes(method.scheme, stored, snap_dis))
    return best_snap_dis(method.scheme, written, useful, storage_bytes)


def drive_for(study: SnapshotStudy) -> tuple[Drive, int]:
    """Return the paper's drive, warm, and how many times as large as the paper's it had to be for the snapshots."""
    ssd = Ssd.paper()
    times = 1
    # Twice what the largest need at once: a new baseline is written before the old snapshots go.
    while times * ssd.exported_pages * ssd.page_bytes < 2 * study.nbytes * max(SNAP_DISTANCES):
        times *= 2
    return warm_drive(replace(ssd, blocks_per_chip=times * ssd.blocks_per_chip)), times


def codec_for(method: Method) -> str:
    """Return the name of the codec by which a method's snapshots are stored, as `SnapshotStore(codec=...)` takes it."""
    return DEFAULT if method is OWN_METHOD else codec_of(method)


def stored_as(method: Method) -> str:
    """Return what to give a store for a method, for people: codec and scheme."""
    return f"{codec_for(method)}, {method.scheme}"


def count_blocks(layouts: Sequence[Layout]) -> int:
    """Return how many blocks tensors have: twice as many steps has a study of them."""
    return sum(-(-layout.values // BLOCK_VALUES) for layout in layouts)


def study_snapshots(
    snapshots: Snapshots,
    layouts: Sequence[Layout],
    *,
    name: str = "snapshots",
    done: Callable[[int], None] = lambda _: None,
) -> SnapshotStudy:
    """Compare snapshots with each other, and encode them in every way.

    layouts: tensors that all snapshots have. done: called with the number of steps done, of 2 * `count_blocks`.
    Raises: FormatError, DataError where a snapshot cannot be read.
    """
    with Workers(available_cpus(), "penstock-study") as workers:
        study = _Study(snapshots, tuple(layouts), workers, done)
        study.warm_up()
        study.look()
        study.encode()
    return study.found(name)


class _Block(NamedTuple):
    """A block of every snapshot. begin: of its first byte in the snapshot, tensors one after the other."""

    tensor: int
    number: int
    begin: int
    nbytes: int


class _Job(NamedTuple):
    """A snapshot to be encoded."""

    codec: str
    reference: Reference


@dataclass(frozen=True, slots=True)
class _Looks:
    """What the first look at a block found."""

    looked: dict[Reference, Looked] = field(default_factory=dict)
    seconds: dict[Reference, float] = field(default_factory=dict)
    #: By reference and bits of a word: int64[of `_WIDTHS`], bytes of the delta as it is stored.
    delta_bytes: dict[tuple[Reference, int], NDArray[np.int64]] = field(default_factory=dict)
    #: By later snapshot: bool of the pages that the block touches, whether they differ from the earlier one's.
    differs: dict[int, NDArray[np.bool_]] = field(default_factory=dict)


class _Study:
    """The state of a study: sums over blocks, added up by the thread that asked for it."""

    def __init__(
        self, snapshots: Snapshots, layouts: tuple[Layout, ...], workers: Workers, done: Callable[[int], None]
    ) -> None:
        self._snapshots, self._layouts, self._workers, self._done = snapshots, layouts, workers, done
        self._count = len(snapshots.names)
        self._nbytes = sum(layout.nbytes for layout in layouts)
        self._local = threading.local()
        self._steps = 0
        self._alone: list[Reference] = [(snapshot, None) for snapshot in range(self._count)]
        self._progressive = [(later, later - 1) for later in range(1, self._count)]
        chained = {
            snap_dis: [
                (snapshot, reference)
                for snapshot in range(self._count)
                if (reference := reference_of("chain", snapshot, snap_dis)) is not None
            ]
            for snap_dis in range(1, max(self._count, TIMED_SNAP_DIS) + 1)
        }
        #: Those of chains at every distance are many: their run lengths are counted, and encoded at one distance.
        self._deltas: list[Pairing] = sorted({*self._progressive, *chain.from_iterable(chained.values())})
        measured = sorted({*self._progressive, *chained[TIMED_SNAP_DIS]})
        self._jobs = [
            *(_Job(codec, reference) for codec in ("gzip", "dynrle", DEFAULT) for reference in self._alone),
            *(
                _Job(codec, reference)
                for codec in ("gzip-delta", "rle4", "rle4-gzip", DEFAULT)
                for reference in self._progressive
            ),
            *(_Job("dynrle", reference) for reference in measured),
        ]
        tensors = len(layouts)
        self._looked: dict[Reference, Looked] = {
            reference: Looked() for reference in (*self._alone, *self._deltas)
        }
        self._look_seconds = {reference: np.zeros(tensors) for reference in self._looked}
        self._delta_bytes: dict[tuple[Reference, int], NDArray[np.int64]] = {}
        self._differs = np.zeros((self._count, -(-self._nbytes // PAGE_BYTES)), np.bool_)
        #: By job: bytes; seconds until its coder was ready; seconds to encode and to decode, by tensor.
        self._bytes = np.zeros(len(self._jobs), np.int64)
        self._ready_seconds = np.zeros(len(self._jobs))
        self._seconds = np.zeros((len(self._jobs), tensors, 2))

    def _blocks(self) -> Iterator[_Block]:
        begin = 0
        for tensor, layout in enumerate(self._layouts):
            step = BLOCK_VALUES * layout.dtype.item_bytes
            for number, offset in enumerate(range(0, layout.nbytes, step)):
                yield _Block(tensor, number, begin + offset, min(step, layout.nbytes - offset))
            begin += layout.nbytes

    def _read(self, block: _Block) -> list[Bytes]:
        """Return the block of each snapshot, valid until this thread reads the next."""
        scratches = getattr(self._local, "scratches", None)
        if scratches is None:
            scratches = self._local.scratches = [Scratch() for _ in range(self._count)]
        layout = self._layouts[block.tensor]
        return [
            self._snapshots.block(snapshot, layout, block.number, scratch)
            for snapshot, scratch in enumerate(scratches)
        ]

    def _step(self) -> None:
        self._steps += 1
        self._done(self._steps)

    def warm_up(self) -> None:
        """Encode a block of each type, so that nothing that is compiled or loaded at its first use is timed."""
        seen = set()
        for block in self._blocks():
            dtype = self._layouts[block.tensor].dtype
            if dtype in seen:
                continue
            seen.add(dtype)
            data = self._read(block)
            for codec in dict.fromkeys(job.codec for job in self._jobs):
                for reference in (self._alone[-1], self._progressive[-1]):
                    pair = _pair(data, dtype, reference)
                    coder = codec_named(codec).coder(lambda pair=pair: iter([pair]))  # type: ignore[misc]
                    _timed(coder, pair, *_buffers(block.nbytes))

    # -- What is alike ---------------------------------------------------------------------------------

    def look(self) -> None:
        for block, found in self._workers.map(self._look_at, self._blocks()):
            for reference, looked in found.looked.items():
                self._looked[reference].add(looked)
                self._look_seconds[reference][block.tensor] += found.seconds[reference]
            for key, delta_bytes in found.delta_bytes.items():
                self._delta_bytes[key] = self._delta_bytes.get(key, 0) + delta_bytes
            first = block.begin // PAGE_BYTES
            for later, differs in found.differs.items():
                self._differs[later, first : first + differs.size] |= differs
            self._step()

    def _look_at(self, block: _Block) -> tuple[_Block, _Looks]:
        data, dtype = self._read(block), self._layouts[block.tensor].dtype
        looks = _Looks()
        for reference in self._looked:
            pair = _pair(data, dtype, reference)
            looked = looks.looked[reference] = Looked()
            begin = time.thread_time()
            looked.look(pair)
            looks.seconds[reference] = time.thread_time() - begin
            for bits, zeros in looked.zeros.items():
                sizes = [delta_block_bytes(zeros, width, block.nbytes) for width in _WIDTHS]
                looks.delta_bytes[reference, bits] = np.array(sizes, np.int64)
        for later, earlier in self._progressive:
            looks.differs[later] = _differing_pages(data[later], data[earlier], block.begin % PAGE_BYTES)
        return block, looks

    # -- What it takes ---------------------------------------------------------------------------------

    def encode(self) -> None:
        coders = []
        for index, job in enumerate(self._jobs):
            begin = time.thread_time()
            coders.append(self._coder(job))
            self._ready_seconds[index] = time.thread_time() - begin

        def encode(block: _Block) -> tuple[_Block, NDArray[np.float64]]:
            return block, self._encode(block, coders)

        for block, found in self._workers.map(encode, self._blocks()):
            self._bytes += found[:, 0].astype(np.int64)
            self._seconds[:, block.tensor] += found[:, 1:]
            self._step()

    def _coder(self, job: _Job) -> Coder:
        codec = codec_named(job.codec)
        if isinstance(codec, PaperCodec):
            return codec.coder_for(self._looked[job.reference])
        return codec.coder(lambda: self._pairs(job.reference))

    def _pairs(self, reference: Reference) -> Iterator[Pair]:
        snapshot, earlier = reference
        scratch, other = Scratch(), Scratch()
        for block in self._blocks():
            layout = self._layouts[block.tensor]
            yield Pair(
                self._snapshots.block(snapshot, layout, block.number, scratch),
                layout.dtype,
                None if earlier is None else self._snapshots.block(earlier, layout, block.number, other),
            )

    def _encode(self, block: _Block, coders: Sequence[Coder]) -> NDArray[np.float64]:
        """Return float64[jobs, 3]: bytes, seconds to encode, seconds to decode."""
        data, dtype = self._read(block), self._layouts[block.tensor].dtype
        out, back = _buffers(block.nbytes)
        found = np.empty((len(coders), 3))
        for row, job, coder in zip(found, self._jobs, coders, strict=True):
            pair = _pair(data, dtype, job.reference)
            row[:] = _timed(coder, pair, out, back)
            assert np.array_equal(back, pair.values), f"{job.codec} does not give back what it took"
        return found

    # -- What comes of it ------------------------------------------------------------------------------

    def found(self, name: str) -> SnapshotStudy:
        names = tuple(self._snapshots.names)
        likenesses = tuple(
            Likeness(
                (names[earlier], names[later]),
                self._looked[later, earlier].zeros,
                int((~self._differs[later]).sum()),
                self._differs.shape[1],
            )
            for later, earlier in self._progressive
        )
        heading_bits = {
            reference: {
                bits: best_heading_bits(zeros) for bits, zeros in self._looked[reference].zeros.items()
            }
            for reference in self._deltas
        }
        return SnapshotStudy(
            names,
            self._layouts,
            likenesses,
            self._looked[self._count - 1, None].exponents,
            self._sizes(name, heading_bits),
            self._seconds_by_codec(),
            heading_bits,
            self._tensor_seconds(),
        )

    def _sizes(self, name: str, heading_bits: Mapping[Pairing, Mapping[int, int]]) -> SnapshotSizes:
        measured = {job: int(size) for job, size in zip(self._jobs, self._bytes, strict=True)}

        def alone(codec: str) -> tuple[int, ...]:
            return tuple(measured[_Job(codec, reference)] for reference in self._alone)

        def deltas(codec: str) -> dict[Pairing, int]:
            return {pair: measured[_Job(codec, pair)] for pair in self._progressive}

        dynrle = {
            reference: sum(int(self._delta_bytes[reference, bits][width]) for bits, width in widths.items())
            for reference, widths in heading_bits.items()
        }
        for pair, counted in dynrle.items():
            size = measured.get(_Job("dynrle", pair), counted)
            assert size == counted, f"{pair} takes {size} bytes, counted: {counted}"
        baselines: dict[Baseline, tuple[int, ...]] = {
            "complete": (self._nbytes,) * self._count,
            "gzip": alone("gzip"),
            "huffman": alone("dynrle"),
            "penstock": alone(DEFAULT),
        }
        differences: dict[Delta, dict[Pairing, int]] = {
            "gzip": deltas("gzip-delta"),
            "rle4": deltas("rle4"),
            "rle4_gzip": deltas("rle4-gzip"),
            "dynrle": dynrle,
            "penstock": deltas(DEFAULT),
        }
        return SnapshotSizes(name, "", sum(layout.values for layout in self._layouts), baselines, differences)

    def _seconds_by_codec(self) -> dict[str, dict[Reference, Seconds]]:
        seconds: dict[str, dict[Reference, Seconds]] = {}
        for job, ready, spent in zip(self._jobs, self._ready_seconds, self._seconds.sum(axis=1), strict=True):
            look = float(ready)
            if job.codec == "dynrle":
                look += float(self._look_seconds[job.reference].sum())
            seconds.setdefault(job.codec, {})[job.reference] = Seconds(look, *map(float, spent))
        return seconds

    def _tensor_seconds(self) -> dict[str, NDArray[np.float64]]:
        parameters = np.array([layout.values for layout in self._layouts], np.float64)
        found = {}
        for codec in dict.fromkeys(job.codec for job in self._jobs):
            spent = [
                self._seconds[index, :, 0] + (self._look_seconds[job.reference] if codec == "dynrle" else 0.0)
                for index, job in enumerate(self._jobs)
                if job.codec == codec and job.reference in self._progressive
            ]
            if spent:
                found[codec] = np.column_stack([parameters, np.mean(spent, axis=0)])
        return found


def _pair(data: Sequence[Bytes], dtype: DType, reference: Reference) -> Pair:
    snapshot, earlier = reference
    return Pair(data[snapshot], dtype, None if earlier is None else data[earlier])


def _buffers(nbytes: int) -> tuple[Bytes, Bytes]:
    return np.empty(nbytes + SLACK_BYTES, np.uint8), np.empty(nbytes, np.uint8)


def _timed(coder: Coder, pair: Pair, out: Bytes, back: Bytes) -> tuple[int, float, float]:
    """Encode a block into `out` and decode it into `back`; return its bytes, and seconds of this thread for each."""
    begin = time.thread_time()
    kind, length = coder.encode(pair, out)
    encoded = time.thread_time()
    payload = pair.values if kind is Kind.STORED else out[:length]
    decode_block(kind, payload, pair.dtype, pair.reference, back)
    return length, encoded - begin, time.thread_time() - encoded


def _differing_pages(values: Bytes, reference: Bytes, begin: int) -> NDArray[np.bool_]:
    """Return for each page that the bytes touch whether they differ. begin: of the first byte in its page."""
    starts = [0, *range(PAGE_BYTES - begin, values.size, PAGE_BYTES)]
    differs: NDArray[np.bool_] = np.logical_or.reduceat(values != reference, starts)
    return differs

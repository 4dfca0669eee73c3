"""Keyed permutations of consecutive blocks of [0, samples), in both directions.

A block of fewer than 65,536 ids is shuffled by sorting its ids by keyed random 64-bit words: as uniform as
any shuffle can be, at the price of a table that is made once per epoch and kept for the last few epochs.

A larger block passes through a generalised Feistel network (Black & Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002, method 3) over rows x columns >= size with even rows near sqrt(size): constant memory,
the same cost at every position, and an inverse. Because rows * columns exceeds size by less than a row, a
result falls outside and is sent through again (cycle walking) less than once in sqrt(size) positions; a
domain of a power of two would send up to half of them again. A round is two 32 x 32 -> 64 bit
multiplications as in Philox (Salmon et al., SC'11). Too few rounds shuffle badly: see Mitchell, Stokes,
Frank & Holmes, "Bandwidth-optimal random shuffling for GPUs", ACM TOPC 2022. Quality and speed by number of
rounds: docs/decisions/0003-full-shuffle-bijection.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError
from penstock.plan._recent import Recent
from penstock.plan.random import derive_key, draw_words

Ids = NDArray[np.int64]

#: Blocks below this size are sorted by random words, larger ones go through the Feistel network.
FEISTEL_FROM = 65_536
#: Rounds of the network; even, so that both halves are mixed alike. Measured: decisions/0003.
ROUNDS = 24
#: Halves of the network must fit 32 bits with space for one addition.
LARGEST_SAMPLES = 2**62

_TABLES_KEPT = 16
#: A cache of keys outlasts a run's epochs: 384 bytes each against 60 us to draw them.
_KEYS_KEPT = 256
_INDEX_BITS = np.uint64(0xFFFF)
_HALF = np.uint64(32)
#: Runs of one block shorter than this on average are worth sorting together.
_LONG_RUNS = 64

#: Shuffles a block in place of NumPy, once there is such a function: see `use`.
_shuffle: Callable[[int, int, int, NDArray[np.uint64], NDArray[np.uint64]], int] | None = None
#: See `most_shuffled`.
_most_shuffled = 0


def use(shuffle: Callable[[int, int, int, NDArray[np.uint64], NDArray[np.uint64]], int]) -> None:
    """Shuffle small blocks by another function from here on, in all of this process: compiled, with the same bits.

    shuffle: `shuffle(key, epoch, begin, out, other)` writes the ids of a block, less its first one, in the order of
        their words to uint64[n]; 0 where it cannot tell that. other: uint64[n], for it to use.
    """
    global _shuffle
    _shuffle = shuffle


def most_shuffled() -> int:
    """Return the size of the largest block that this process has shuffled by what `use` replaces; 0 for none."""
    return _most_shuffled


@dataclass(frozen=True, slots=True)
class BlockShuffle:
    """Shuffle within each of the consecutive blocks of [0, samples), anew each epoch.

    samples: F, the size of the whole domain, 1 to 2**62.
    block: ids per block, the last one may be shorter; 1 to samples.
    seed: the same seed gives the same permutations, and one block of all samples the same as no blocks.
    """

    samples: int
    block: int
    seed: int
    _sort_key: int = field(init=False, repr=False, compare=False)
    _round_key: int = field(init=False, repr=False, compare=False)
    #: By epoch, first id, and whether it is an inverse.
    _tables: Recent[tuple[int, int, bool], Ids] = field(
        default_factory=lambda: Recent(_TABLES_KEPT), init=False, repr=False, compare=False
    )
    _keys: Recent[tuple[int, int], NDArray[np.uint64]] = field(
        default_factory=lambda: Recent(_KEYS_KEPT), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sort_key", derive_key(self.seed, "order"))
        object.__setattr__(self, "_round_key", derive_key(self.seed, "order: rounds"))

    def forward(self, epoch: int, positions: Ids) -> Ids:
        """Return the id at each position: int64, the shape of positions, in the same block."""
        return self._apply(epoch, positions, is_inverse=False)

    def inverse(self, epoch: int, ids: Ids) -> Ids:
        """Return the position of each id: int64, the shape of ids, in the same block."""
        return self._apply(epoch, ids, is_inverse=True)

    def _apply(self, epoch: int, values: Ids, *, is_inverse: bool) -> Ids:
        flat = values.ravel()
        feistel_end = self._feistel_end()
        if feistel_end == 0 and self._span >= self.samples:
            return self._table(epoch, 0, is_inverse).take(flat).reshape(values.shape)
        out = np.empty(flat.size, np.int64)
        if feistel_end == 0:
            self._by_tables(epoch, flat, out, is_inverse)
        elif feistel_end == self.samples:
            self._by_network(epoch, flat, out, is_inverse)
        else:
            short = flat >= feistel_end
            for part, run in ((~short, self._by_network), (short, self._by_tables)):
                chosen = flat[part]
                done = np.empty(chosen.size, np.int64)
                run(epoch, chosen, done, is_inverse)
                out[part] = done
        return out.reshape(values.shape)

    def _feistel_end(self) -> int:
        """Ids below this are in blocks large enough for the network; at most the last block is not."""
        if self.block < FEISTEL_FROM:
            return 0
        rest = self.samples % self.block
        return self.samples - rest if rest < FEISTEL_FROM else self.samples

    def _by_tables(self, epoch: int, values: Ids, out: Ids, is_inverse: bool) -> None:
        for index, members in _groups(values // self._span):
            begin = index * self._span
            out[members] = self._table(epoch, begin, is_inverse)[values[members] - begin] + begin

    @property
    def _span(self) -> int:
        """Ids of whole blocks that share a table."""
        return self.block * max(1, (FEISTEL_FROM - 1) // self.block)

    def _table(self, epoch: int, begin: int, is_inverse: bool) -> Ids:
        """The permutation of ids begin... within their blocks, or its inverse, less `begin`."""

        def make() -> Ids:
            if not is_inverse:
                return self._sorted(epoch, begin, min(begin + self._span, self.samples))
            forward = self._table(epoch, begin, False)
            inverse = np.empty_like(forward)
            inverse[forward] = np.arange(forward.size)
            return inverse

        return self._tables.get((epoch, begin, is_inverse), make)

    def _sorted(self, epoch: int, begin: int, end: int) -> Ids:
        global _most_shuffled
        if end - begin > self.block:
            blocks = np.arange(begin, end) // self.block
            return np.lexsort((self._words(epoch, begin, end), blocks)).astype(np.int64, copy=False)
        _most_shuffled = max(_most_shuffled, end - begin)
        if _shuffle is not None:
            found, other = np.empty(end - begin, np.uint64), np.empty(end - begin, np.uint64)
            if _shuffle(self._sort_key, epoch & 0xFFFFFFFF, begin, found, other):
                return found.view(np.int64)
        # Words with their index in the lower 16 bits: NumPy sorts numbers in a fifth of the time of sorting indices.
        words = self._words(epoch, begin, end)
        packed = words & ~_INDEX_BITS | np.arange(words.size, dtype=np.uint64)
        packed.sort()
        if ((packed[1:] ^ packed[:-1]) <= _INDEX_BITS).any():  # two that differ in their index alone
            return np.argsort(words, kind="stable").astype(np.int64, copy=False)
        return (packed & _INDEX_BITS).view(np.int64)

    def _words(self, epoch: int, begin: int, end: int) -> NDArray[np.uint64]:
        """The word that each id from begin on is sorted by."""
        upper, lower = draw_words(self._sort_key, epoch, np.arange(begin, end), 2).T
        words: NDArray[np.uint64] = upper.astype(np.uint64) << _HALF | lower
        return words

    def _by_network(self, epoch: int, values: Ids, out: Ids, is_inverse: bool) -> None:
        if values.size == 0:
            return
        if self.block == self.samples:
            self._run_network(
                epoch, values, out, np.array([0, values.size]), np.zeros(1, np.int64), is_inverse
            )
            return
        blocks = values // self.block
        run_starts = _run_starts(blocks)
        if run_starts.size > _LONG_RUNS and run_starts.size * _LONG_RUNS > values.size:
            by_block = _sorting(blocks)
            run_starts = _run_starts(blocks[by_block])
            done = np.empty_like(out)
            run_blocks = blocks[by_block][run_starts[:-1]]
            self._run_network(epoch, values[by_block], done, run_starts, run_blocks, is_inverse)
            out[by_block] = done
        else:
            self._run_network(epoch, values, out, run_starts, blocks[run_starts[:-1]], is_inverse)

    def _run_network(
        self, epoch: int, values: Ids, out: Ids, run_starts: Ids, run_blocks: Ids, is_inverse: bool
    ) -> None:
        """Permute values whose run r, from run_starts[r] to run_starts[r + 1], is in block run_blocks[r]."""
        from penstock.plan import _kernels  # loads numba, which small data sets never need

        begins = run_blocks * self.block
        sizes = np.minimum(self.block, self.samples - begins)
        rows, columns = np.array([sides(int(size)) for size in sizes], np.int64).T.copy()
        if run_blocks.size == 1:
            keys = self._keys.get(
                (epoch, int(run_blocks[0])), partial(round_keys, self._round_key, epoch, run_blocks)
            )
        else:
            keys = round_keys(self._round_key, epoch, run_blocks)
        _kernels.permute_runs(values, out, run_starts, begins, sizes, rows, columns, keys, is_inverse)


def round_keys(key: int, epoch: int, blocks: Ids) -> NDArray[np.uint64]:
    """Draw each block's keys: uint64[blocks, ROUNDS, 2], a 32-bit key and an odd multiplier a round."""
    words = draw_words(key, epoch, blocks, 2 * ROUNDS).astype(np.uint64).reshape(-1, ROUNDS, 2)
    words[:, :, 1] |= np.uint64(1)
    return words


def sides(size: int) -> tuple[int, int]:
    """Return rows and columns of the network, rows * columns >= size by less than a row.

    Rows are even: a round of additions moves values in cycles as long as a side, so with two odd sides every
    round, and so the whole permutation, would be an even one.
    """
    rows = math.isqrt(size - 1) + 1
    rows += rows % 2
    return rows, -(-size // rows)


def _run_starts(labels: Ids) -> Ids:
    """Where equal neighbours begin, and the end: int64[runs + 1]."""
    return np.concatenate(([0], np.flatnonzero(np.diff(labels)) + 1, [labels.size]))


def _groups(labels: Ids) -> Iterator[tuple[int, Ids]]:
    """Yield each label that occurs, and the indices where it does."""
    if labels.size == 0:
        return
    if labels[0] == labels[-1] and (labels == labels[0]).all():
        yield int(labels[0]), np.arange(labels.size)
        return
    by_label = _sorting(labels)
    for members in np.split(by_label, np.flatnonzero(np.diff(labels[by_label])) + 1):
        yield int(labels[members[0]]), members


def _sorting(labels: Ids) -> Ids:
    """Indices that sort the labels; NumPy sorts 16-bit numbers by radix, 10 times as fast."""
    smallest = labels.min()
    is_narrow = labels.max() - smallest < 2**16
    return np.argsort((labels - smallest).astype(np.uint16) if is_narrow else labels, kind="stable")


def as_ids(values: object, below: int, name: str) -> Ids:
    """Return values as int64 after checking that they are integers in [0, below).

    Raises: ConfigError that names the first offender.
    """
    array = np.asarray(values)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ConfigError(f"{name} have dtype {array.dtype}; they are integers: convert them to int64")
    if array.min() < 0 or array.max() >= below:
        offender = array[(array < 0) | (array >= below)].flat[0]
        raise ConfigError(
            f"{name} contain {offender}, which is outside [0, {below}): check where it comes from"
        )
    return array.astype(np.int64, copy=False)

"""Batches of so many tokens, or bytes, or of so many samples that are alike in length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan._recent import Recent
from penstock.plan.bijection import _groups, as_ids
from penstock.plan.orders import FullShuffle, OfOrder, Order, RepeatingOrder, Sequential, check_seed
from penstock.plan.random import derive_key, draw_words
from penstock.units import format_count
from penstock.validate import check_count

Ids = NDArray[np.int64]
#: One length, or several.
T = TypeVar("T", int, Ids)

#: Samples handled at once where none are sorted.
_CHUNK = 1 << 16
#: Lengths looked at together: their arrays stay in the processor's cache.
_LOOKED_AT = 1 << 20
_POOLS_KEPT = 8
_EPOCHS_KEPT = 2
_MOST_TOKENS = 1 << 31
#: More than any batch has.
_ANY = (1 << 63) - 1


class Padding(NamedTuple):
    """What the batches of an epoch hold: tokens, and how many places they take when each batch is padded."""

    tokens: int
    places: int

    @property
    def share(self) -> float:
        """The share of the places that is padding."""
        return 1 - self.tokens / self.places


class _Pool(NamedTuple):
    """Some samples that stand next to each other in the order, arranged into batches.

    ids: int64[n], by position. places: int64[n], where each stood before.
    """

    ids: Ids
    places: Ids


class _Cuts(NamedTuple):
    bounds: Ids
    padding: Padding


@dataclass(frozen=True, slots=True, eq=False)
class TokenBudget(OfOrder):
    """Batches of samples that are alike in length: of at most so many tokens each, or of so many samples.

    Samples come in the order that shuffle= says; each pool of them is sorted by length and cut into batches, which
    then come in a random order. Every sample is read once an epoch. All of it follows from lengths, seed and epoch:
    each rank plans the same, and has the same number of steps (where batches are left over, the last ones are cut in
    two).

    lengths: int[F], of each sample in tokens (or bytes, or frames); an array or memory map, which is not copied.
    tokens: of a batch of one rank at most, padding included. None: any number, so that batches have `largest` samples,
        all but one of an epoch (and those that are cut in two).
    largest: samples of a batch at most. Give it where some samples are very short: a slot has space for as many as
        fit.
    padded: True counts the longest sample times their number, what a padded batch takes; False counts their sum.
    multiple_of: lengths count as the next multiple of this.
    shuffle: True, False for the stored order, or an `Order` that reads no sample twice. Unless it is False, batches of
        a pool are shuffled too.
    seed: of both.
    pool: samples that are sorted together; 1 sorts none, so that batches are cut from the order as it comes. Without
        tokens, rounded to full batches.

    Time: 50 ns a sample, when an epoch is first asked for and again as its pools are. Memory: 8 bytes a batch.
    Raises: ConfigError for a sample that is longer than the budget, naming it; for lengths that are no integers.

    >>> from penstock.plan import AccessPlan
    >>> plan = AccessPlan.of_batches(TokenBudget([3, 9, 4, 8, 2], tokens=18, shuffle=False), epochs=1)
    >>> [plan.local_batch(rank=0, epoch=0, step=step).tolist() for step in range(plan.steps(0))]
    [[4, 0, 2], [3, 1]]
    """

    lengths: ArrayLike = field(repr=False)
    tokens: int | None = None
    _: KW_ONLY
    largest: int | None = None
    padded: bool = True
    multiple_of: int = 1
    shuffle: bool | Order = True
    seed: int = 0
    pool: int = 1 << 16
    order: Order = field(init=False, repr=False)
    #: No batch has more samples, whatever the epoch.
    _most: int = field(init=False, repr=False)
    _total: int = field(init=False, repr=False)
    _pools: Recent[tuple[int, int], _Pool] = field(
        default_factory=lambda: Recent(_POOLS_KEPT), init=False, repr=False
    )
    _cuts: Recent[int, _Cuts] = field(default_factory=lambda: Recent(_EPOCHS_KEPT), init=False, repr=False)
    _shared: Recent[tuple[int, int], Ids] = field(
        default_factory=lambda: Recent(_EPOCHS_KEPT), init=False, repr=False
    )

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("tokens", "multiple_of", "pool", "largest"):
            value = getattr(self, name)
            if value is not None or name not in ("tokens", "largest"):
                check_count(name, value, most=_MOST_TOKENS - 1)
        if self.tokens is None:
            if self.largest is None:
                raise ConfigError(
                    "tokens and largest are left out: give one, the tokens or the samples of a batch at most"
                )
            if self.pool > 1:
                object.__setattr__(self, "pool", -(-self.pool // self.largest) * self.largest)
        lengths = self.lengths if isinstance(self.lengths, np.ndarray) else np.asarray(self.lengths)
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not lengths.size:
            raise ConfigError(
                f"lengths is {lengths.dtype} of shape {lengths.shape}; it holds an integer for each sample"
            )
        object.__setattr__(self, "lengths", lengths)
        order = self.shuffle
        if isinstance(order, bool):
            order = FullShuffle(lengths.size, self.seed) if order else Sequential(lengths.size)
        if not isinstance(order, Order) or isinstance(order, RepeatingOrder):
            raise ConfigError(
                f"shuffle is {self.shuffle!r:.80}; it is True, False or an order that reads each sample at most once"
            )
        if order.samples != lengths.size:
            raise ConfigError(
                f"lengths is of {format_count(lengths.size, 'sample')} and shuffle an order over {order.samples:,}"
            )
        object.__setattr__(self, "order", order)
        most, total = self._look_through(lengths)
        object.__setattr__(self, "_most", most)
        object.__setattr__(self, "_total", total)

    def _look_through(self, lengths: NDArray[Any]) -> tuple[int, int]:
        """Return the most samples that fit into a batch, and all tokens. Raises: ConfigError for a wrong length."""
        counts, total = np.zeros(1, np.int64), 0
        for begin in range(0, lengths.size, _LOOKED_AT):
            part = lengths[begin : begin + _LOOKED_AT]
            total += int(part.sum(dtype=np.int64))
            if part.min() < 0:
                sample = begin + int(np.argmin(part >= 0))
                raise ConfigError(
                    f"lengths has {lengths[sample]} for sample {sample:,}; a length is 0 or more"
                )
            if self.tokens is None:
                continue
            if (counted := self._counted(int(part.max()))) > self.tokens:
                sample = begin + int(np.argmax(part))
                raise ConfigError(
                    f"tokens is {self.tokens:,}, and sample {sample:,} has {int(lengths[sample]):,}"
                    f"{f', which count as {counted:,}' if self.multiple_of > 1 else ''}: give more "
                    "tokens, or leave it out or cut it off in the data set"
                )
            more = np.bincount(part.astype(np.int64), minlength=counts.size)
            more[: counts.size] += counts
            counts = more
        if self.tokens is None:
            assert self.largest is not None, "one of the two was given"
            return min(self.largest, lengths.size), total
        found = np.flatnonzero(counts)
        lengths_found, counts = self._counted(found), counts[found]
        up_to = np.cumsum(counts)
        if self.padded:
            most = int(np.minimum(up_to, self.tokens // lengths_found).max())
        else:
            used = np.cumsum(counts * lengths_found)
            which = int(np.searchsorted(used, self.tokens, side="right"))
            most = int(up_to[which - 1]) if which else 0
            if which < used.size:
                most += (self.tokens - (int(used[which - 1]) if which else 0)) // int(lengths_found[which])
        return min(most, self.largest or most), total

    def _counted(self, lengths: T) -> T:
        counted: T = np.maximum(1, -(-lengths // self.multiple_of) * self.multiple_of)
        return counted

    @property
    def most(self) -> int:
        """See `CutOrder.most`."""
        return self._most

    @property
    def is_sorted(self) -> bool:
        """Whether samples of like length are put together."""
        return self.pool > 1

    def at(self, epoch: int, positions: ArrayLike) -> Ids:
        wanted = as_ids(positions, self.length(epoch), "positions")
        if not self.is_sorted:
            return self.order.at(epoch, wanted)
        return self._by_pool(epoch, wanted, lambda pool, offsets: pool.ids[offsets])

    def position_of(self, epoch: int, samples: ArrayLike) -> Ids:
        before = self.order.position_of(epoch, samples)
        if not self.is_sorted:
            return before

        def place(pool: _Pool, offsets: Ids) -> Ids:
            after = np.empty_like(pool.places)
            after[pool.places] = np.arange(after.size)
            return after[offsets]

        found = before >= 0
        after = np.full(before.shape, -1, np.int64)
        begins = before[found] // self.pool * self.pool
        after[found] = begins + self._by_pool(epoch, before[found], place)
        return after

    def bounds(self, epoch: int, ranks: int) -> Ids:
        """See `CutOrder.bounds`: a multiple of the ranks, unless there are fewer samples."""
        return self._shared.get((epoch, ranks), lambda: _shared_out(self._cut(epoch).bounds, ranks))

    def padding(self, epoch: int) -> Padding:
        """Return how much of the epoch's batches is padding where each is padded to its longest sample."""
        return self._cut(epoch).padding

    def describe(self) -> dict[str, Any]:
        """See `DescribedOrder.describe`."""
        from penstock.plan.serialise import write_order

        lengths = np.ascontiguousarray(self.lengths)
        digest = xxhash.xxh3_128(lengths.dtype.str.encode())
        digest.update(lengths.view(np.uint8).data)
        return {
            "kind": "TokenBudget",
            "lengths": digest.hexdigest(),
            "tokens": None if self.tokens is None else int(self.tokens),
            "largest": None if self.largest is None else int(self.largest),
            "padded": bool(self.padded),
            "multiple_of": int(self.multiple_of),
            "is_shuffled": self.shuffle is not False,
            "seed": int(self.seed),
            "pool": int(self.pool),
            "order": write_order(self.order) or repr(self.order),
        }

    def _by_pool(self, epoch: int, positions: Ids, answer: Callable[[_Pool, Ids], Ids]) -> Ids:
        """Ask each pool that the positions lie in."""
        flat = positions.ravel()
        answers = np.empty(flat.size, np.int64)
        for number, members in _groups(flat // self.pool):
            pool = self._pools.get((epoch, number), partial(self._arrange, epoch, number))
            answers[members] = answer(pool, flat[members] - number * self.pool)
        return answers.reshape(positions.shape)

    def _lengths_at(self, epoch: int, begin: int, end: int) -> tuple[Ids, Ids]:
        ids = self.order.at(epoch, np.arange(begin, end))
        return ids, np.asarray(self.lengths)[ids].astype(np.int64, copy=False)

    def _arrange(self, epoch: int, number: int) -> _Pool:
        """Sort a pool by length, cut it into batches and shuffle these."""
        from penstock.plan import _budget_kernels as kernels  # loads numba

        ids, lengths = self._pool_of(epoch, number)
        # One sort of numbers, which NumPy does with vector instructions, in place of a stable sort of indices.
        keys = lengths << 32 | np.arange(ids.size)
        keys.sort()
        by_length = keys & 0xFFFFFFFF
        sizes, _ = self._cut_up(keys >> 32, np.zeros(4, np.int64), is_last=True)
        places = np.empty_like(by_length)
        kernels.deal(by_length, sizes, self._batches(epoch, number, sizes.size), places)
        return _Pool(ids[places], places)

    def _pool_of(self, epoch: int, number: int) -> tuple[Ids, Ids]:
        begin = number * self.pool
        return self._lengths_at(epoch, begin, min(begin + self.pool, self.length(epoch)))

    def _batches(self, epoch: int, number: int, count: int) -> Ids:
        """Return in which order the batches of a pool come."""
        from penstock.plan._kernels import shuffle_by_swaps  # loads numba

        batches = np.arange(count)
        if self.shuffle is not False:
            words = draw_words(derive_key(self.seed, "order of batches"), epoch, [number], count)
            shuffle_by_swaps(batches, words[0].astype(np.uint64), 0)
        return batches

    def _cut_up(self, lengths: Ids, open_batch: Ids, *, is_last: bool) -> tuple[Ids, int]:
        """Return the sizes of the batches that were closed, and the places that all closed so far take."""
        from penstock.plan import _budget_kernels as kernels

        sizes = np.empty(lengths.size + 1, np.int64)
        largest = self.largest or lengths.size + int(open_batch[0])
        tokens = _ANY if self.tokens is None else self.tokens
        closed = kernels.cut(lengths, tokens, largest, self.multiple_of, self.padded, open_batch, sizes)
        if is_last and open_batch[0]:
            sizes[closed] = open_batch[0]
            open_batch[3] += open_batch[0] * open_batch[1]
            closed += 1
        return sizes[:closed].copy(), int(open_batch[3])

    def _cut(self, epoch: int) -> _Cuts:
        return self._cuts.get(epoch, lambda: self._cut_epoch(epoch))

    def _cut_epoch(self, epoch: int) -> _Cuts:
        length = self.length(epoch)
        sizes, places = [], 0
        for part, taken in self._parts(epoch, length):
            sizes.append(part)
            places = places + taken if self.is_sorted else taken
        bounds = np.zeros(sum(part.size for part in sizes) + 1, np.int64)
        np.cumsum(np.concatenate(sizes), out=bounds[1:])
        read = (
            self._total
            if length == self.samples
            else int(np.asarray(self.lengths)[self.order.at(epoch, np.arange(length))].sum())
        )
        return _Cuts(bounds, Padding(read, places))

    def _parts(self, epoch: int, length: int) -> Iterator[tuple[Ids, int]]:
        if self.is_sorted:
            for number in range(-(-length // self.pool)):
                _, lengths = self._pool_of(epoch, number)
                lengths.sort()  # which samples these are is not asked
                sizes, taken = self._cut_up(lengths, np.zeros(4, np.int64), is_last=True)
                yield sizes[self._batches(epoch, number, sizes.size)], taken
            return
        open_batch = np.zeros(4, np.int64)
        for begin in range(0, length, _CHUNK):
            end = min(begin + _CHUNK, length)
            yield self._cut_up(self._lengths_at(epoch, begin, end)[1], open_batch, is_last=end == length)


def _shared_out(bounds: Ids, ranks: int) -> Ids:
    """Return bounds of a multiple of `ranks` batches: as many as are missing are made by cutting the last in two.

    Not so many where every batch is of one sample.
    """
    missing = -(bounds.size - 1) % ranks
    while missing:
        sizes = np.diff(bounds)
        divisible = np.flatnonzero(sizes > 1)[-missing:]
        if not divisible.size:
            break
        middle = bounds[divisible] + sizes[divisible] // 2
        bounds = np.sort(np.concatenate((bounds, middle)))
        missing -= divisible.size
    return bounds

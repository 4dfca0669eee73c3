"""Who reads which sample at which step: an order, cut into batches and shared out over ranks.

Every question is answered from the order alone, so that any rank can ask about any other without a message,
at any size and in constant memory. *Position* counts the samples of one epoch over all ranks, *step* counts
its batches: batch `step` is positions [step * batch_size, (step + 1) * batch_size), unless the order says itself where
its epochs are cut (`CutOrder`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan.arranged import arranged
from penstock.plan.bijection import as_ids
from penstock.plan.growing import Growing
from penstock.plan.orders import ENDLESS, LARGEST_EPOCH, CutOrder, Order, RepeatingOrder, even_from
from penstock.plan.splits import Balanced, Local, Split, as_split
from penstock.units import format_count, is_integer
from penstock.validate import check_count

Ids = NDArray[np.int64]
Counts = NDArray[np.signedinteger[Any]]

#: Samples handled at once where a whole run is listed: bounds the memory needed in addition to the result.
_CHUNK = 1 << 20
#: Samples whose first reads are found at once: 100 MB. An order that is a table may make it anew for each block.
_FIRST_AT_ONCE = 1 << 22
#: Samples that `AccessPlan.batches` asks the order for at once.
_AHEAD = 1 << 14
#: Where one rank's samples are gone through: arrays of so many stay in the cache, and their memory is used again.
_PIECE = 1 << 17
#: Reads that NumPy takes longer to count than numba to be loaded.
_WORTH_COMPILING_READS = 1 << 24
#: Of more ranks, one reads so few samples of an epoch that to look at all of them takes longer than to count these.
_FEW_RANKS = 16
#: Epochs in which the first reader of a sample is looked for: a sample that is read in none may be in no epoch.
_FIRST_EPOCHS = 16
#: Batch size, epochs and ranks: lists of them are refused by the memory, not by what 64 bits can count.
MOST_COUNT = 1 << 48


@dataclass(frozen=True, slots=True)
class AccessPlan:
    """The reads of a whole training run.

    order: which sample stands at which position of an epoch.
    batch_size: B, samples of a global batch, over all ranks. With an order that cuts its epochs itself, the most that
        one may have; then make the plan with `of_batches`.
    epochs: E.
    ranks: N, processes of the job.
    split: "balanced", "uniform", "strided", "replicated", "imbalanced", "local", one share per rank, a function (see
        `penstock.plan.splits.Assigned`) or a `Split`. Kept as a `Split`.
    drop_last: leave out an epoch's last batch if it is short; or those that are no step of all ranks, where the order
        cuts its epochs itself.
    last_steps: of the run's last epoch, how many steps it has; None: all. See `epochs_of_steps`.
    Raises: ConfigError for a size that cannot work, and what the split or the order raise.

    >>> from penstock.plan import Sequential
    >>> AccessPlan(Sequential(10), batch_size=4, epochs=1, ranks=2).local_batch(rank=1, epoch=0, step=2)
    array([9])
    """

    order: Order
    batch_size: int
    epochs: int
    ranks: int = 1
    split: Split | str | Sequence[int] | Callable[[int, int], ArrayLike] = "balanced"
    drop_last: bool = False
    last_steps: int | None = None
    #: The order, if it cuts its epochs itself.
    _cut: CutOrder | None = field(init=False, repr=False, compare=False)
    #: The order, within whose batches samples are where the split "local" wants them.
    _arranged: Order = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "ranks"):
            check_count(name, getattr(self, name), most=MOST_COUNT)
        if not isinstance(self.drop_last, bool):
            raise ConfigError(f"drop_last is {self.drop_last!r}; it is True or False")
        object.__setattr__(self, "split", as_split(self.split, self.ranks))
        self._split.size(self.ranks - 1, self.ranks, self.batch_size)
        object.__setattr__(self, "_cut", self.order if isinstance(self.order, CutOrder) else None)
        if self._cut is not None:
            self._check_cut(self._cut)
        try:
            if self._cut is None or even_from(self.order) != LARGEST_EPOCH:  # which cuts epochs as they come
                self.order.length(self.epochs - 1)
        except ConfigError as error:
            raise ConfigError(f"epochs is {self.epochs}, and the order has fewer: {error}") from error
        if (last_steps := self.last_steps) is not None:
            check_count("last_steps", last_steps, most=MOST_COUNT)
            object.__setattr__(self, "last_steps", None)
            if last_steps > (steps := self.steps(self.epochs - 1)):
                raise ConfigError(f"last_steps is {last_steps}, and the last epoch has {steps}: lower it")
            object.__setattr__(self, "last_steps", last_steps if last_steps < steps else None)
        object.__setattr__(self, "_arranged", self.order)
        if isinstance(self.split, Local) and self.ranks > 1:
            split = Balanced()
            held = partial(first_readers, replace(self.of_first(_FIRST_EPOCHS), split=split))
            order = arranged(self.order, self.batch_size, self.ranks, split, held)
            object.__setattr__(self, "_arranged", order)

    @classmethod
    def of_batches(
        cls,
        order: CutOrder,
        epochs: int,
        ranks: int = 1,
        drop_last: bool = False,
        last_steps: int | None = None,
    ) -> AccessPlan:
        """Return the plan of an order that cuts its epochs into batches itself, dealt to the ranks in turn.

        >>> from penstock.plan import Batches
        >>> plan = AccessPlan.of_batches(Batches([[3, 1, 2], [0]], samples=4), epochs=1, ranks=2)
        >>> [plan.local_batch(rank, epoch=0, step=0).tolist() for rank in range(2)]
        [[3, 1, 2], [0]]
        """
        check_count("ranks", ranks, most=MOST_COUNT)
        return cls(order, order.most * ranks, epochs, ranks, drop_last=drop_last, last_steps=last_steps)

    def _check_cut(self, order: CutOrder) -> None:
        if self.batch_size != order.most * self.ranks:
            raise ConfigError(
                f"batch_size is {self.batch_size}, and {type(order).__name__} says itself where its epochs are cut "
                "into batches: give it as batch_sampler= of a loader, or to AccessPlan.of_batches"
            )
        if self._split != Balanced():
            raise ConfigError(
                f"split is {self.split!r}, and {type(order).__name__} deals its batches to the ranks in turn: leave "
                "split out"
            )

    def of_first(self, epochs: int) -> AccessPlan:
        """Return the plan of the first epochs alone; of all where there are no more."""
        if epochs >= self.epochs:
            return self
        return replace(self, epochs=epochs, last_steps=None)

    @property
    def is_cut_by_order(self) -> bool:
        """Whether the order says where batches begin and end, so that their sizes are any."""
        return self._cut is not None

    @property
    def is_endless(self) -> bool:
        """Whether the run has as many epochs as can be counted."""
        return self.epochs >= ENDLESS

    @property
    def samples(self) -> int:
        """F, the number of samples that ids are drawn from."""
        return self.order.samples

    @property
    def _split(self) -> Split:
        return cast(Split, self.split)  # which __post_init__ made it

    def length(self, epoch: int) -> int:
        """Return the number of positions that the epoch reads, over all ranks."""
        self._check_epoch(epoch)
        is_cut_short = self.last_steps is not None and epoch == self.epochs - 1
        if self._cut is not None and (is_cut_short or (self.drop_last and self.ranks > 1)):
            return int(self._bounds(epoch)[-1])
        length = self.order.length(epoch)
        if self._cut is None and self.drop_last:
            length -= length % self.batch_size
        if self.last_steps is not None and is_cut_short:
            length = min(length, self.last_steps * self.batch_size)
        return length

    def epochs_by_length(self) -> dict[int, tuple[int, int]]:
        """Return the lengths that epochs have: for each, the first epoch that has it and how many do.

        One call of `Order.length` for each epoch that may differ, see `EvenOrder`, whatever the number of epochs.
        """
        is_cut = self.last_steps is not None
        complete = self.epochs - is_cut
        even = min(even_from(self.order), complete - 1)
        found: dict[int, tuple[int, int]] = {}
        for epoch in [*range(even + 1), *([self.epochs - 1] if is_cut else [])]:
            length = self.length(epoch)
            first, count = found.get(length, (epoch, 0))
            found[length] = first, count + (complete - even if epoch == even else 1)
        return found

    def steps(self, epoch: int) -> int:
        """Return the number of batches of the epoch, a short last one included unless dropped."""
        if self._cut is not None:
            return (self._bounds(epoch).size - 1) // self.ranks
        return -(-self.length(epoch) // self.batch_size)

    def steps_alike(self, epoch: int) -> int:
        """Return how many of the epoch's steps, from the first on, give every rank as much as its split may.

        All but a short last one; all where the order says where batches end, none of which is empty.
        """
        return self.steps(epoch) if self._cut is not None else self.length(epoch) // self.batch_size

    def first_position(self, epoch: int, step: int) -> int:
        """Return where a step begins; the length of the epoch for the step after its last one."""
        if self._cut is not None:
            return int(self._bounds(epoch)[step * self.ranks])
        return min(step * self.batch_size, self.length(epoch))

    def batch_length(self, epoch: int, step: int) -> int:
        """Return the number of samples in the global batch: batch_size, or fewer in the last step."""
        if self._cut is not None:
            bounds = self._bounds(epoch)
            self._check_step(epoch, step, (bounds.size - 1) // self.ranks)
            return int(bounds[(step + 1) * self.ranks] - bounds[step * self.ranks])
        length = self.length(epoch)
        if not 0 <= step * self.batch_size < length:
            self._check_step(epoch, step, self.steps(epoch))
        return min(self.batch_size, length - step * self.batch_size)

    def sample_at(self, epoch: int, positions: ArrayLike) -> Ids:
        """Return the sample at each position of the epoch: int64, the shape of positions."""
        return self._arranged.at(epoch, as_ids(positions, self.length(epoch), "positions"))

    def position_of(self, epoch: int, samples: ArrayLike) -> Ids:
        """Return the (first) position of each sample, -1 where the epoch does not read it."""
        length = self.length(epoch)
        positions = self._arranged.position_of(epoch, samples)
        return np.where(positions < length, positions, -1)

    def reader_of(self, epoch: int, samples: ArrayLike) -> tuple[Ids, Ids]:
        """Return the rank that reads each sample in the epoch, and at which step.

        Returns: two int64 arrays in the shape of samples, -1 where nobody reads it. With repeats the first
        read counts; where several ranks read a batch together (split "replicated"), the lowest of them.
        """
        return self.reader_at(epoch, self.position_of(epoch, samples))

    def reader_at(self, epoch: int, positions: Ids) -> tuple[Ids, Ids]:
        """Return the rank that reads each position of the epoch, and at which step; see `reader_of`.

        positions: int64, -1 where there is none.
        """
        if self._cut is not None:
            batches = np.searchsorted(self._bounds(epoch), positions, side="right") - 1
            steps, ranks = np.divmod(batches, self.ranks)
            return np.where(positions < 0, -1, ranks), np.where(positions < 0, -1, steps)
        steps = positions // self.batch_size  # of divmod, NumPy would divide one by one
        offsets = positions - steps * self.batch_size
        length = self.length(epoch)
        full_end = length - length % self.batch_size
        ranks = self._readers(self.batch_size, offsets)
        is_short = positions >= full_end
        if is_short.any():
            ranks[is_short] = self._readers(length - full_end, offsets[is_short])
        ranks[positions < 0] = -1
        return ranks, steps  # -1 of itself

    def _readers(self, batch: int, offsets: Ids) -> Ids:
        """Return the rank that reads each offset of batches of a size, as the split says: a new array."""
        if offsets.size < batch:
            return np.array(self._split.reader(self.ranks, batch, offsets))
        return np.asarray(self._split.reader(self.ranks, batch, np.arange(batch))[offsets])

    def local_positions(self, rank: int, epoch: int, step: int) -> Ids:
        """Return the positions of the rank's share of the batch, in its order: int64[local batch]."""
        self._check_rank(rank)
        batch = self.batch_length(epoch, step)
        if self._cut is not None:
            begin, end = self._bounds(epoch)[step * self.ranks + rank :][:2]
            return np.arange(begin, end)
        return step * self.batch_size + self._split.offsets(rank, self.ranks, batch)

    def local_batch(self, rank: int, epoch: int, step: int) -> Ids:
        """Return the samples of the rank's share of the batch, in its order: int64[local batch]."""
        if isinstance(self.order, Growing):
            return self.order.batch(epoch, step)
        return self._arranged.at(epoch, self.local_positions(rank, epoch, step))

    def local_batch_size(self, rank: int, epoch: int, step: int) -> int:
        """Return how many samples the rank reads in the step; 0 where its share is nothing."""
        self._check_rank(rank)
        if self._cut is not None:
            return self.local_positions(rank, epoch, step).size
        return self._split.size(rank, self.ranks, self.batch_length(epoch, step))

    def local_batch_sizes(self, rank: int, epoch: int) -> Ids:
        """Return how many samples the rank reads in each step of the epoch: int64[steps]."""
        self._check_rank(rank)
        if self._cut is not None:
            return np.diff(self._bounds(epoch))[rank :: self.ranks]
        sizes = np.zeros(self.steps(epoch), np.int64)
        if sizes.size:  # a full step and the last one stand for all
            sizes[:] = self.local_batch_size(rank, epoch, 0)
            sizes[-1] = self.local_batch_size(rank, epoch, sizes.size - 1)
        return sizes

    def local_steps(self, rank: int, epoch: int) -> int:
        """Return the number of the epoch's steps in which the rank reads anything.

        Fewer than `steps` only where a short last batch leaves nothing for it, or its share is nothing.
        """
        steps = self.steps(epoch)
        if self._cut is not None:
            return steps
        return sum(
            count
            for step, count in ((0, steps - 1), (steps - 1, 1))
            if count > 0 and self.local_batch_size(rank, epoch, step)
        )

    def check_equal_steps(self) -> None:
        """Make sure that all ranks take part in every step, as training in step with each other demands.

        Raises: ConfigError naming a step and a rank that reads nothing in it, with what avoids that, or if there is
            no step. Of an order that cuts its epochs itself the first epoch is looked at: it has no empty batch.
        """
        if self._cut is not None:
            if not self.steps(0):
                raise ConfigError(
                    f"drop_last leaves no batch: the order has fewer batches than {format_count(self.ranks, 'rank')}: "
                    "make them smaller, or use fewer ranks"
                )
            return
        lengths = self.epochs_by_length()
        if not any(lengths):
            samples = format_count(self.order.length(0), "sample")
            raise ConfigError(
                f"drop_last leaves no batch: an epoch reads {samples}, fewer than batch_size "
                f"({self.batch_size:,}): make batch_size smaller, or leave drop_last out"
            )
        for epoch in (epoch for length, (epoch, _) in lengths.items() if length):
            for step in sorted({0, self.steps(epoch) - 1}):
                sizes = [self.local_batch_size(rank, epoch, step) for rank in range(self.ranks)]
                if not all(sizes):
                    samples = format_count(self.batch_length(epoch, step), "sample")
                    raise ConfigError(
                        f"the batch of epoch {epoch}, step {step} has {samples} and leaves none for rank "
                        f"{sizes.index(0)} of {self.ranks}, which would end its epoch early, while the others "
                        f"wait for it forever: use {self._remedies()} (batch_size counts the samples "
                        "of all ranks)"
                    )

    def _remedies(self) -> str:
        """The arguments that give every rank samples in every step, each by itself."""
        lengths = replace(self, drop_last=False).epochs_by_length()

        def is_remedy_for(
            lengths: dict[int, tuple[int, int]], batch_size: int, split: Split, drop_last: bool
        ) -> bool:
            batches = _batch_sizes(lengths, batch_size, drop_last)
            return bool(batches) and all(
                split.size(rank, self.ranks, batch) for batch in batches for rank in range(self.ranks)
            )

        is_remedy = partial(is_remedy_for, lengths)

        found = []
        if is_remedy(self.batch_size, self._split, True):
            found.append("drop_last=True")
        if is_remedy(self.batch_size, Balanced(), self.drop_last):
            found.append('split="balanced"')
        least = max(self.batch_size, self.ranks)
        larger = range(least, min(least + 2 * self.ranks, max(lengths)) + 1)
        for size in (size for size in larger if is_remedy(size, self._split, self.drop_last)):
            found.append(f"batch_size={size}")
            break
        padded = -(-max(lengths) // self.ranks) * self.ranks
        if max(lengths) >= self.ranks and is_remedy_for(
            {padded: (0, 1)}, self.batch_size, self._split, self.drop_last
        ):
            found.append(
                "an order that repeats samples so that ranks get equally many, as TorchDistributed does"
            )
        return " or ".join(found) or 'fewer ranks, or split="balanced" with more samples in a batch'

    def first_read_from(self, rank: int, epoch: int, step: int) -> tuple[int, int]:
        """Return the first (epoch, step) at or after the given one in which the rank reads anything.

        Returns: (epochs, 0) where there is none any more.
        """
        for later in range(epoch, self.epochs):
            first = step if later == epoch else 0
            for candidate in (first, self.steps(later) - 1):
                if first <= candidate < self.steps(later) and self.local_batch_size(rank, later, candidate):
                    return later, candidate
        return self.epochs, 0

    def first_of_run(self, rank: int, epoch: int, step: int) -> tuple[int, int]:
        """Return (epoch, step) of the rank's first batch in a run that begins at a step.

        epoch, step: a step after the last one of an epoch is the first of the next; epochs, 0 is the end of the run.
        Raises: ConfigError if there is no such step.
        """
        if not is_integer(epoch) or not 0 <= epoch <= self.epochs:
            raise ConfigError(f"epoch is {epoch!r}; the plan has the epochs 0 to {self.epochs - 1}")
        steps = self.steps(epoch) if epoch < self.epochs else 0
        if not is_integer(step) or not 0 <= step <= steps:
            raise ConfigError(f"step is {step!r}; epoch {epoch} has {format_count(steps, 'step')}, from 0")
        return self.first_read_from(rank, int(epoch), int(step))

    def max_local_batch(self, rank: int) -> int:
        """Return the most samples that the rank reads in one step of the run."""
        self._check_rank(rank)
        if self._cut is not None:
            return self._cut.most
        batches = _batch_sizes(self.epochs_by_length(), self.batch_size, self.drop_last)
        return max((self._split.size(rank, self.ranks, batch) for batch in batches), default=0)

    def reads(self, rank: int) -> int:
        """Return the number of samples that the rank reads in the run, repeats included."""
        self._check_rank(rank)
        if self._cut is not None:
            of_all = self.ranks == 1 and even_from(self.order) == 0 and self.last_steps is None
            if of_all:
                return self.epochs * self.length(0)
            return sum(int(self.local_batch_sizes(rank, epoch).sum()) for epoch in range(self.epochs))
        reads = 0
        for length, (_, epochs) in self.epochs_by_length().items():
            steps, rest = divmod(length, self.batch_size)
            reads += epochs * steps * self._split.size(rank, self.ranks, self.batch_size)
            reads += epochs * self._split.size(rank, self.ranks, rest) if rest else 0
        return reads

    def stream(self, rank: int, epoch: int, step: int, count: int) -> Ids:
        """Return the rank's next `count` samples from the start of a step on, over epoch ends.

        Returns: int64[count], fewer where the run ends before.
        """
        self._check_rank(rank)
        self._check_epoch(epoch)
        pieces = list(self._pieces(rank, epoch, step, count))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def batches(self, rank: int, epoch: int, step: int) -> Iterator[tuple[int, int, Ids]]:
        """Iterate over the rank's batches from a step on, several of one size at a time, none of them empty.

        The order is asked for one batch at first, and for twice as many each time: together they cost it a tenth.
        Yields: the epoch, the first step, and the samples of that step and those behind it, int64[steps, local batch].
        """
        self._check_rank(rank)
        if isinstance(self.order, Growing):
            return self.order.batches(epoch, step)
        if self._cut is not None:
            return self._cut_batches(rank, epoch, step)
        return self._even_batches(rank, epoch, step)

    def _even_batches(self, rank: int, epoch: int, step: int) -> Iterator[tuple[int, int, Ids]]:
        """See `batches`, of an order that is cut every batch_size positions."""
        offsets = self._split.offsets(rank, self.ranks, self.batch_size)
        size, at_once = offsets.size, 1
        for later in range(epoch, self.epochs):
            full_steps, rest = divmod(self.length(later), self.batch_size)
            number = step if later == epoch else 0
            while size and number < full_steps:
                steps = min(full_steps - number, at_once)
                ids = self._arranged.at(later, self._positions(number, steps, offsets))
                yield later, number, ids.reshape(steps, size)
                number += steps
                at_once = min(2 * at_once, max(1, _AHEAD // size))
            if rest and number <= full_steps and self._split.size(rank, self.ranks, rest):
                yield later, full_steps, self.local_batch(rank, later, full_steps)[None]

    def _cut_batches(self, rank: int, epoch: int, step: int) -> Iterator[tuple[int, int, Ids]]:
        """See `batches`, of an order that cuts its epochs itself: neighbours of one size come together."""
        at_once = 1
        for later in range(epoch, self.epochs):
            sizes = self.local_batch_sizes(rank, later)
            number = step if later == epoch else 0
            while number < sizes.size:
                end = min(sizes.size, number + at_once)
                ids = self._arranged.at(later, self._cut_positions(rank, later, number, end))
                runs = np.flatnonzero(np.diff(sizes[number:end])) + 1
                ends = np.cumsum(sizes[number:end])
                for begin, stop in zip([0, *runs.tolist()], [*runs.tolist(), end - number], strict=True):
                    size = int(sizes[number + begin])
                    last = int(ends[stop - 1])
                    yield later, number + begin, ids[last - (stop - begin) * size : last].reshape(-1, size)
                number = end
                at_once = min(2 * at_once, max(1, _AHEAD // max(1, ids.size // at_once)))

    def string(self, rank: int) -> Ids:
        """Return the rank's access sequence, every sample it reads in the run: int64[reads].

        Takes 8 bytes per read: for plans that fit. R of the thesis, section 3.1.
        """
        return self.stream(rank, 0, 0, self.reads(rank))

    def strings(self, ranks: Sequence[int] | None = None) -> list[Ids]:
        """Return the access strings of some ranks, all unless given: what `string` returns for each of them.

        Each position of the order is asked for once and dealt out, instead of N times over where an order arranges
        whole batches (`penstock.plan.arranged.Arranged`).
        Time: O(E F + N) and a call of NumPy per rank and about a million positions. Memory: 8 bytes per read of these
        ranks, for plans that fit, and 8 MB or one global batch.
        """
        wanted = range(self.ranks) if ranks is None else ranks
        if self._cut is not None:
            return [self.string(rank) for rank in wanted]
        shares: dict[int, tuple[Ids, list[Ids]]] = {}
        strings = [np.empty(self.reads(rank), np.int64) for rank in wanted]
        begins = [0] * len(strings)
        for epoch, step, steps, batch in self._even_steps(_CHUNK):
            if batch not in shares:
                of_each = [self._split.offsets(rank, self.ranks, batch) for rank in wanted]
                offsets, at = np.unique(np.concatenate(of_each), return_inverse=True)
                shares[batch] = offsets, np.split(at, np.cumsum([each.size for each in of_each[:-1]]))
            offsets, columns = shares[batch]
            found = self._arranged.at(epoch, self._positions(step, steps, offsets)).reshape(steps, -1)
            for index, own in enumerate(columns):
                end = begins[index] + steps * own.size
                strings[index][begins[index] : end] = found[:, own].ravel()
                begins[index] = end
        return strings

    def uses(self, rank: int) -> tuple[Counts, Counts]:
        """Return how often the rank reads each sample over the run, and when first.

        Returns: two int32[F], int64 for 2^31 reads or more; the latter as indices into its access string, -1 for
        samples that it never reads.
        """
        self._check_rank(rank)
        repeats = isinstance(self.order, RepeatingOrder)
        kind: type[np.signedinteger[Any]] = np.int32 if self.reads(rank) < 1 << 31 else np.int64
        first = np.full(self.samples, -1, kind)
        begin = found = 0
        if self.ranks == 1 and not repeats and set(self.epochs_by_length()) == {self.samples}:
            for ids in self._pieces(rank, 0, 0, self.samples):  # each once an epoch, as in most runs
                first[ids] = np.arange(begin, begin + ids.size)
                begin += ids.size
            return np.full(self.samples, self.epochs, kind), first
        counts = np.zeros(self.samples, kind)
        if not repeats and self.ranks <= _FEW_RANKS and self.reads(rank) >= _WORTH_COMPILING_READS:
            self._count(rank, counts, first)
            return counts, first
        for ids in self._pieces(rank, 0, 0, self.reads(rank)):
            if found < self.samples:
                # Of several assignments to one sample the last holds: backwards, that is its first read.
                new = np.flatnonzero(counts[ids] == 0)[::-1]
                first[ids[new]] = begin + new
                found += 0 if repeats else new.size  # which may have a sample twice
            np.add.at(counts, ids, kind(1))  # of another type it takes ten times as long
            begin += ids.size
        return counts, first

    def _count(self, rank: int, counts: Counts, first: Counts) -> None:
        """Do what `uses` does, of an order that repeats no sample within an epoch."""
        from penstock.plan import _kernels as kernels  # loads numba

        begin, words = 0, -(-self.samples // 64)
        marks, known = np.zeros(words, np.uint64), np.zeros(words, np.uint64)
        for epoch in range(self.epochs):
            for ids in self._pieces_of_epoch(rank, epoch, 0, self.length(epoch)):
                kernels.mark_reads(ids, begin, marks, known, first)
                begin += ids.size
            kernels.count_marks(marks, counts)

    def _pieces(self, rank: int, epoch: int, step: int, count: int) -> Iterator[Ids]:
        """Yield the rank's next `count` samples in order, about _PIECE or one step at once."""
        for later in range(epoch, self.epochs):
            for ids in self._pieces_of_epoch(rank, later, step if later == epoch else 0, count):
                count -= ids.size
                yield ids
            if count <= 0:
                return

    def _pieces_of_epoch(self, rank: int, epoch: int, step: int, count: int) -> Iterator[Ids]:
        """Yield the same of one epoch alone."""
        for positions in self._position_pieces(rank, epoch, step, count):
            yield self._arranged.at(epoch, positions)

    def _position_pieces(self, rank: int, epoch: int, step: int, count: int) -> Iterator[Ids]:
        if self._cut is not None:
            ends = np.cumsum(self.local_batch_sizes(rank, epoch)[step:])
            begin = done = 0
            while begin < ends.size and count > 0:
                end = max(begin + 1, int(np.searchsorted(ends, done + min(count, _PIECE), side="left")) + 1)
                end = min(end, ends.size)
                positions = self._cut_positions(rank, epoch, step + begin, step + end)[:count]
                yield positions
                begin, done, count = end, int(ends[end - 1]), count - positions.size
            return
        full_steps, rest = divmod(self.length(epoch), self.batch_size)
        offsets = self._split.offsets(rank, self.ranks, self.batch_size)
        while offsets.size and step < full_steps and count > 0:
            steps = min(full_steps - step, -(-min(count, _PIECE) // offsets.size))
            positions = self._positions(step, steps, offsets)[:count]
            yield positions
            count -= positions.size
            step += steps
        if rest and step <= full_steps and count > 0:
            yield (full_steps * self.batch_size + self._split.offsets(rank, self.ranks, rest))[:count]

    def _positions(self, step: int, steps: int, offsets: Ids) -> Ids:
        """The positions of some steps from one on, of which a rank reads these offsets in each."""
        starts = np.arange(step, step + steps) * self.batch_size
        return (starts[:, None] + offsets).ravel()

    def _cut_positions(self, rank: int, epoch: int, begin: int, end: int) -> Ids:
        """The positions that the rank reads in the steps from `begin` up to `end`, the order being what cuts them."""
        bounds = self._bounds(epoch)
        starts = bounds[begin * self.ranks + rank : end * self.ranks : self.ranks]
        sizes = bounds[begin * self.ranks + rank + 1 : end * self.ranks + 1 : self.ranks] - starts
        before = np.cumsum(sizes) - sizes
        return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))

    def _bounds(self, epoch: int) -> Ids:
        """Where the local batches of the epoch begin and end, by step and then rank: int64[steps * ranks + 1]."""
        self._check_epoch(epoch)
        assert self._cut is not None, "the order cuts its epochs itself"
        bounds = self._cut.bounds(epoch, self.ranks)
        batches = bounds.size - 1
        if (rest := batches % self.ranks) and not self.drop_last:
            raise ConfigError(
                f"epoch {epoch} has {format_count(batches, 'batch')} for {self.ranks} ranks, so that the "
                f"last step has none for rank {rest}: list a multiple of {self.ranks}, or give drop_last=True, which "
                f"leaves {rest} out"
            )
        steps = batches // self.ranks
        if self.last_steps is not None and epoch == self.epochs - 1:
            steps = min(steps, self.last_steps)
        return bounds[: steps * self.ranks + 1]

    def _even_steps(self, positions: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the run's steps, some at once with so many positions: epoch, first step, steps, length of a batch."""
        at_once = max(1, positions // self.batch_size)
        for epoch in range(self.epochs):
            full_steps, rest = divmod(self.length(epoch), self.batch_size)
            for step in range(0, full_steps, at_once):
                yield epoch, step, min(at_once, full_steps - step), self.batch_size
            if rest:
                yield epoch, full_steps, 1, rest

    def _check_epoch(self, epoch: int) -> None:
        if not is_integer(epoch) or not 0 <= epoch < self.epochs:
            raise ConfigError(
                f"epoch is {epoch!r}; the plan's epochs are [0, {self.epochs}): plan more epochs"
            )

    def _check_step(self, epoch: int, step: int, steps: int) -> None:
        if not 0 <= step < steps:
            raise ConfigError(f"step {step} of epoch {epoch} is outside [0, {steps}): ask for less")

    def _check_rank(self, rank: int) -> None:
        check_rank(rank, self.ranks)


def first_steps(plan: AccessPlan) -> Ids:
    """Return the number of steps before each epoch, and of all: int64[epochs + 1]."""
    steps = [plan.steps(epoch) for epoch in range(plan.epochs)]
    return np.concatenate(([0], np.cumsum(steps))).astype(np.int64)


def counted_ranks(plan: AccessPlan, among: Sequence[int] | None) -> NDArray[np.bool_]:
    """Return which ranks count, all unless given: bool[ranks + 1], the last, of nobody (-1), does not."""
    counts = np.zeros(plan.ranks + 1, bool)
    counts[list(range(plan.ranks) if among is None else among)] = True
    return counts


def first_readers(
    plan: AccessPlan,
    steps: Ids | None = None,
    *,
    among: Sequence[int] | None = None,
    first: tuple[int, int] = (0, 0),
) -> NDArray[np.int32]:
    """Return the rank that reads each sample first: int32[F], -1 where nobody does.

    steps: int64[F], gets the step of that read, counted over the epochs before it too, where there is one.
    among: the ranks that count, all unless given. first: (epoch, step) from which on reads count. With either, use
        `penstock.plan.frequency.first_reads` for an order that repeats samples within an epoch: `AccessPlan.reader_of`
        tells an epoch's first read alone.
    """
    counts = counted_ranks(plan, among)
    ranks = np.full(plan.samples, -1, np.int32)
    begins = None if steps is None else first_steps(plan)
    for begin in range(0, plan.samples, _FIRST_AT_ONCE):
        pending = np.arange(begin, min(begin + _FIRST_AT_ONCE, plan.samples))
        for epoch in range(first[0], plan.epochs):
            readers, in_epoch = plan.reader_of(epoch, pending)
            found = counts[readers]
            if epoch == first[0]:
                found &= in_epoch >= first[1]
            ranks[pending[found]] = readers[found]
            if steps is not None and begins is not None:
                steps[pending[found]] = begins[epoch] + in_epoch[found]
            pending = pending[~found]
            if not pending.size:
                break
    return ranks


def epochs_of_steps(
    order: Order, batch_size: int, steps: int, drop_last: bool = False, ranks: int = 1
) -> tuple[int, int]:
    """Return how many epochs so many steps take, and how many of them are in the last one: for `AccessPlan`.

    One call of `Order.length` for each epoch that may differ, see `EvenOrder`; or each epoch's batches, which an order
    that cuts its epochs itself deals to so many ranks.
    Raises: ConfigError if the order lists fewer, or has no step.

    >>> from penstock.plan import Sequential
    >>> epochs_of_steps(Sequential(10), batch_size=4, steps=7)
    (3, 1)
    """
    check_count("batch_size", batch_size, most=MOST_COUNT)
    check_count("steps", steps, most=MOST_COUNT)
    even, epoch, rest = even_from(order), 0, steps
    if isinstance(order, CutOrder):
        plan = AccessPlan.of_batches(order, 1, ranks, drop_last)
        plan.check_equal_steps()
        while rest > (of_epoch := replace(plan, epochs=epoch + 1).steps(epoch)):
            epoch, rest = epoch + 1, rest - of_epoch
        return epoch + 1, rest

    def length_of(epoch: int) -> int:
        try:
            return order.length(epoch)
        except ConfigError as error:
            raise ConfigError(f"steps is {steps:,}, and the order has fewer: {error}") from error

    while True:
        length = length_of(epoch)
        of_epoch = length // batch_size if drop_last else -(-length // batch_size)
        if epoch == even:
            if not of_epoch:
                raise ConfigError(
                    f"drop_last leaves no batch: an epoch reads {format_count(length, 'sample')}, fewer than "
                    f"batch_size ({batch_size:,}): make batch_size smaller, or leave drop_last out"
                )
            epochs, last = divmod(rest - 1, of_epoch)
            length_of(epoch + epochs)
            return epoch + epochs + 1, last + 1
        if rest <= of_epoch:
            return epoch + 1, rest
        epoch, rest = epoch + 1, rest - of_epoch


def check_rank(rank: object, ranks: int) -> None:
    """Raise ConfigError unless there is such a rank among so many."""
    if not is_integer(rank) or not 0 <= rank < ranks:
        raise ConfigError(f"rank is {rank!r}; the plan's ranks are [0, {ranks}): check the world size")


def _batch_sizes(lengths: Collection[int], batch_size: int, drop_last: bool) -> set[int]:
    """Return how many samples the global batches of epochs of such lengths have: batch_size, or the rest."""
    full = {batch_size for length in lengths if length >= batch_size}
    return full if drop_last else full | {length % batch_size for length in lengths} - {0}

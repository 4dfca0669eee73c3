"""How many reads of N ranks are local, come from a peer or go to the shared store, counted exactly.

Time is logical here: a read is served by what is held at that moment, however long fetching takes. What is counted is
therefore what no faster network can change. `penstock.simulate` on a machine says what it costs.

Epoch by epoch and rank by rank, a read finds its sample in one of three places:

- *local*: in a tier of its own rank;
- *moved*: with a peer, which sends it while the reader waits;
- *store*: nowhere but in the shared store.

Beside these, samples travel *ahead* of the reads that want them: *handed* from rank to rank, and *filled* from the
store into a tier. So the store is read `store + filled` times, and `moved + handed` samples cross the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan import AccessPlan, Order, RepeatingOrder, split_locally
from penstock.plan.frequency import first_steps, readers_of_epoch, steps_of_reads
from penstock.policy.homes import Homes, place_by_hash, place_cover, place_frequency
from penstock.policy.push import decide_min, decide_push
from penstock.units import is_integer

Ids = NDArray[np.int64]

HASH, FREQUENCY, COVER, PUSH, LOCAL, MIN = (
    "hash",
    "frequency",
    "cover",
    "push",
    "cover + local",
    "MIN per rank",
)
#: Every scheme by its name, in the order in which they are shown.
SCHEMES = {
    HASH: "one home per sample, by a hash of its id",
    FREQUENCY: "each rank keeps what it reads most often (the thesis)",
    MIN: "each rank keeps what it reads soonest (Belady), peers are asked for what they happen to have",
    COVER: "one home per sample, near its readers, then copies by frequency",
    PUSH: "each sample is handed to its next user ahead of time",
    LOCAL: "cover, and ranks read the samples of the global batch that they hold (changes local batches)",
}

#: An epoch's order is remembered for all schemes where all epochs take no more than this.
_REMEMBERED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """Where reads are served from: counts, each int64[epochs, ranks].

    local, moved, store: of reads, by where the sample is when it is read; together all reads.
    handed: samples sent to another rank ahead of a read there (a first reader's, to the home; push's), counted at the
        rank and in the epoch of the read that sends it for homes, of the read that it is for with push.
    filled: samples fetched from the store into a tier ahead of their first read there, which then is local.
    """

    local: Ids
    moved: Ids
    store: Ids
    handed: Ids
    filled: Ids

    @property
    def reads(self) -> Ids:
        """int64[epochs, ranks], all reads."""
        return self.local + self.moved + self.store

    @property
    def store_reads(self) -> Ids:
        """int64[epochs, ranks], times that the shared store is read, ahead or not."""
        return self.store + self.filled

    @property
    def peer_reads(self) -> Ids:
        """int64[epochs, ranks], samples that cross from rank to rank, ahead or not."""
        return self.moved + self.handed

    def share(self, counts: Ids) -> float:
        """Return these counts of all epochs and ranks relative to all reads."""
        return float(counts.sum() / self.reads.sum())


def count_shares(plan: AccessPlan, homes: Homes) -> ReadCounts:
    """Count the reads of a plan on ranks that keep what `homes` says.

    plan: perhaps that of `split_locally`.
    Where the ranks agree (`Homes.is_agreed`), a sample's first reader takes it from the store and hands it to its home,
    and a copy is made at its own rank's first read. Otherwise each rank has filled what it keeps before it is used,
    by one read of the store each.
    Time: O(E F); memory: O(F + kept).
    Raises: ConfigError for homes of another number of ranks or samples, or a split by which ranks share samples.
    """
    if (homes.ranks, homes.samples) != (plan.ranks, plan.samples):
        raise ConfigError(
            f"homes are of {homes.samples:,} samples on {homes.ranks} ranks, the plan has {plan.samples:,} on "
            f"{plan.ranks}: place for this plan"
        )
    from penstock.simulate import _sharing_kernels as kernels  # loads numba

    samples = np.concatenate([kept.samples for kept in homes.keeps])
    keepers = np.repeat(np.arange(homes.ranks, dtype=np.int32), [kept.samples.size for kept in homes.keeps])
    starts = np.zeros(plan.samples + 1, np.int64)
    by_sample = np.empty(samples.size, np.int32)
    kernels.group_by_sample(samples, keepers, homes.rank_of, starts, by_sample)
    has_it = np.zeros(samples.size, np.bool_)
    shares = _none(plan)
    for epoch in range(plan.epochs):
        for ids, readers, _ in _reads(plan, epoch):
            kernels.count_epoch(
                ids,
                readers,
                starts,
                by_sample,
                has_it,
                homes.is_agreed,
                shares.local[epoch],
                shares.moved[epoch],
                shares.store[epoch],
                shares.handed[epoch],
                shares.filled[epoch],
            )
    return shares


def count_push(plan: AccessPlan, sizes_bytes: ArrayLike, capacities_bytes: ArrayLike) -> ReadCounts:
    """Count the reads of a plan whose samples are handed on as `decide_push` says.

    Time: O(E F log(E F / N)), memory: that of one rank's reads.
    """
    shares = _none(plan)
    begins = first_steps(plan)
    for rank in range(plan.ranks):
        handed = decide_push(plan, rank, sizes_bytes, capacities_bytes)
        epochs = np.searchsorted(begins, steps_of_reads(plan, rank), side="right") - 1
        for counts, chosen in (
            (shares.local, handed.tiers > 0),
            (shares.store, handed.tiers <= 0),
            (shares.handed, handed.is_sent),
        ):
            counts[:, rank] = np.bincount(epochs[chosen], minlength=plan.epochs)
    return shares


def count_min(plan: AccessPlan, sizes_bytes: ArrayLike, capacities_bytes: ArrayLike) -> ReadCounts:
    """Count the reads of a plan on ranks that each keep by `decide_min` what is best for themselves alone.

    A rank asks its peers for what it has not kept, and finds there what they happen to have kept.
    Memory: O(E F), 17 bytes a read.
    """
    from penstock.simulate import _sharing_kernels as kernels

    is_local, kept_until = [], []
    for rank, string in enumerate(plan.strings()):
        kept = decide_min(plan, rank, sizes_bytes, capacities_bytes)
        steps = steps_of_reads(plan, rank)
        order = np.argsort(string, kind="stable")
        again = np.flatnonzero(string[order[1:]] == string[order[:-1]])
        later = order[again + 1]
        until = np.full(string.size, -1, np.int64)
        given_up, arrives = kept.given_up[later], kept.arrives[later]
        until[order[again]] = np.where(given_up < 0, steps[later], np.where(given_up > arrives, given_up, -1))
        is_local.append(kept.tiers > 0)
        kept_until.append(until)
    next_read = np.cumsum([0, *(part.size for part in is_local)])[:-1]
    of_all, until_of_all = np.concatenate(is_local), np.concatenate(kept_until)
    held_until = np.full(plan.samples, -1, np.int64)
    shares = _none(plan)
    begins = first_steps(plan)
    for epoch in range(plan.epochs):
        for ids, readers, begin in _reads(plan, epoch):
            kernels.count_epoch_of_loners(
                ids,
                readers,
                int(begins[epoch]) + begin // plan.batch_size,
                plan.batch_size,
                next_read,
                of_all,
                until_of_all,
                held_until,
                shares.local[epoch],
                shares.moved[epoch],
                shares.store[epoch],
            )
    return shares


def least_store_reads(plan: AccessPlan, samples_held: int) -> int:
    """Return a bound that no scheme can beat: F + (E - 1) max(0, F - N C) reads of the shared store.

    samples_held: N C, as many as all ranks together can keep at once.
    In the first epoch all samples are new. In a later one each is read once, so that at most those kept at its start
    can be spared. Holds for orders that read a sample once an epoch, F being the reads of the epoch.
    Raises: ConfigError for an order that repeats samples, or less than no samples.
    """
    if isinstance(plan.order, RepeatingOrder):
        raise ConfigError(
            f"order is {type(plan.order).__name__}, whose epochs may repeat samples: the bound counts each once"
        )
    check_samples_held(samples_held)
    lengths = [plan.length(epoch) for epoch in range(plan.epochs)]
    return lengths[0] + sum(max(0, length - samples_held) for length in lengths[1:])


def compare_schemes(
    plan: AccessPlan, samples_held: int, schemes: Sequence[str] = tuple(SCHEMES)
) -> dict[str, ReadCounts]:
    """Count the reads under each scheme with samples of equal size.

    samples_held: N C, shared out evenly over the ranks, the first ones taking what is left over. More than N F, all of
        it on every rank, is as good as that.
    schemes: names of `SCHEMES`.
    Raises: ConfigError for an unknown scheme or less than no samples.
    """
    unknown = [scheme for scheme in schemes if scheme not in SCHEMES]
    if unknown:
        raise ConfigError(f"scheme is {unknown[0]!r}; it is one of {', '.join(map(repr, SCHEMES))}")
    check_samples_held(samples_held)
    plan = in_memory(plan)
    sizes = np.broadcast_to(np.int64(1), plan.samples)
    share, rest = divmod(min(samples_held, plan.ranks * plan.samples), plan.ranks)
    room = share + (np.arange(plan.ranks) < rest)[:, None].astype(np.int64)
    cover = place_cover(plan, sizes, room) if {COVER, LOCAL} & set(schemes) else None
    counted = {}
    for scheme in schemes:
        if scheme == PUSH:
            counted[scheme] = count_push(plan, sizes, room)
        elif scheme == MIN:
            counted[scheme] = count_min(plan, sizes, room)
        elif scheme == HASH:
            counted[scheme] = count_shares(plan, place_by_hash(sizes, room, plan.ranks))
        elif scheme == FREQUENCY:
            counted[scheme] = count_shares(plan, place_frequency(plan, sizes, room))
        else:
            assert cover is not None, "placed above"
            read_by = plan if scheme == COVER else split_locally(plan, cover.rank_of)
            counted[scheme] = count_shares(read_by, cover)
    return counted


def check_samples_held(samples_held: int) -> None:
    """Raise ConfigError unless ranks can hold so many samples."""
    if not is_integer(samples_held) or samples_held < 0:
        raise ConfigError(
            f"samples_held is {samples_held!r}; ranks hold a whole number of samples, 0 or more"
        )


def in_memory(plan: AccessPlan) -> AccessPlan:
    """Return the plan with its epochs listed where they take little memory, so that asking again costs nothing.

    Orders that repeat samples, and plans of more than about 100 million reads, come back as they are.
    """
    if isinstance(plan.order, RepeatingOrder | _Remembered) or plan.samples >= 2**31:
        return plan
    if plan.epochs * plan.order.length(0) * 8 > _REMEMBERED_BYTES:
        return plan
    return replace(plan, order=_Remembered(plan.order))


@dataclass(frozen=True, slots=True)
class _Remembered:
    """An order that keeps each epoch's permutation and its inverse, 8 bytes a position."""

    order: Order
    _epochs: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def samples(self) -> int:
        return self.order.samples

    def length(self, epoch: int) -> int:
        return self.order.length(epoch)

    def at(self, epoch: int, positions: ArrayLike) -> Ids:
        return _as_ids(self._listed(epoch)[0][np.asarray(positions)])

    def position_of(self, epoch: int, samples: ArrayLike) -> Ids:
        return _as_ids(self._listed(epoch)[1][np.asarray(samples)])

    def _listed(self, epoch: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        if epoch not in self._epochs:
            samples = self.order.at(epoch, np.arange(self.length(epoch))).astype(np.int32)
            positions = np.full(self.samples, -1, np.int32)
            positions[samples] = np.arange(samples.size, dtype=np.int32)
            self._epochs[epoch] = samples, positions
        return self._epochs[epoch]


def _as_ids(values: NDArray[np.int32]) -> Ids:
    return values.astype(np.int64)


#: Reads gone through at once: bounds the memory beside the state.
_READS_AT_ONCE = 1 << 22


def _reads(plan: AccessPlan, epoch: int) -> Iterator[tuple[Ids, Ids, int]]:
    """Yield samples and readers of whole batches, and the position of the first."""
    block = plan.batch_size * max(1, _READS_AT_ONCE // plan.batch_size)
    for begin in range(0, plan.length(epoch), block):
        yield *readers_of_epoch(plan, epoch, begin, begin + block), begin


def _none(plan: AccessPlan) -> ReadCounts:
    return ReadCounts(*(np.zeros((plan.epochs, plan.ranks), np.int64) for _ in range(5)))

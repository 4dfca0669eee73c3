"""An order over several sources: whose turn it is at each position, in exact proportions, and with which sample."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from functools import partial
from itertools import pairwise
from numbers import Real
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan._recent import Recent
from penstock.plan.bijection import LARGEST_SAMPLES, BlockShuffle, _groups, as_ids
from penstock.plan.orders import check_epoch, check_samples, check_seed
from penstock.plan.random import derive_key
from penstock.units import format_count, is_integer

Ids = NDArray[np.int64]

#: What happens when a source has given all of its samples.
AtEnd = Literal["stop", "repeat", "drop"]
#: A number for each source; or several of these, each with the step of the run from which on it holds, or from which
#: on they change linearly to the next.
Weights: TypeAlias = "Sequence[float] | Sequence[tuple[int, Sequence[float]]] | LinearWeights"

#: A linear change of weights is one of so many stairs at most, whose turns repeat after so many positions.
_STAIRS, _STAIR_PERIOD = 1 << 10, 1 << 16
#: The turns of all sources repeat after so many positions at most: 10 bytes each.
LONGEST_PERIOD = 1 << 20
_MOST_SOURCES = 1 << 12
#: Weights are those of fractions that are so near to them.
_NEAR = Fraction(1, 10**12)
_PATTERNS_KEPT = 8
_number_of = attrgetter("number")
#: Turns, times sources, that are dealt without numba, which takes longer to load; fewer where weights are so many.
_FEW, _MANY = 1 << 16, 64
_ENDS = {
    "stop": "the epoch ends before a source is asked for more than it has",
    "repeat": "the epoch ends when every source was read to its end; shorter ones begin anew",
    "drop": "sources that were read to their end are left out until all were",
}


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """Weights of a mixture whose shares change linearly over the steps of a run, from each row to the next.

    rows: (step, a number for each source), the first of step 0; from the step of the last one on its weights stay.
    Step t between two rows has their shares in between, the earlier row's at its own step. A change over more than
    1,024 steps is one in 1,024 stairs, each with the mean of its steps. At the end of a stair no source is further than
    1 from the sum of its shares, or than one in 65,536 of the stair's samples.

    >>> order = Mixture([100, 100], LinearWeights([(0, [1, 0]), (4, [1, 1])]), at_end="stop", batch_size=8)
    >>> order.source_at(0, range(40)).reshape(5, 8).sum(axis=1)
    array([0, 1, 2, 3, 4])
    """

    rows: Sequence[tuple[int, Sequence[float]]]


class _Pattern(NamedTuple):
    """The turns of one period. weights: integers, whose sum is the period.

    sources: uint16[period], whose turn it is. turns: int32[period], how many the source has had in the period before.
    places: int32[period], where the turns of the first source are, then those of the second, and so on.
    begins: int64[sources + 1], where those of each begin in `places`.
    """

    weights: Ids
    sources: NDArray[np.uint16]
    turns: NDArray[np.int32]
    places: NDArray[np.int32]
    begins: Ids

    def turns_at(self, positions: Ids) -> tuple[NDArray[np.uint16], Ids]:
        """Return whose turn it is at each position, and how many that source has had before."""
        periods, within = np.divmod(positions, self.sources.size)
        sources = self.sources[within]
        return sources, periods * self.weights[sources] + self.turns[within]

    def place_of(self, source: int, turns: ArrayLike) -> Ids:
        """Return the positions of a source's turns, numbered from 0."""
        periods, within = np.divmod(np.asarray(turns, np.int64), self.weights[source])
        found: Ids = periods * self.sources.size + self.places[self.begins[source] + within]
        return found

    def counts(self, length: int) -> Ids:
        """Return how many turns each source has in so many positions."""
        periods, rest = divmod(length, self.sources.size)
        return periods * self.weights + np.bincount(self.sources[:rest], minlength=self.weights.size)


class _Stage(NamedTuple):
    """Positions of an epoch over which the same sources take turns by the same weights.

    begin: its first position. sources: int64[n], those that have turns. weights: integers, of these.
    given: int64[sources of the mixture], samples that each gave in the epoch before.
    """

    begin: int
    sources: Ids
    weights: tuple[int, ...]
    given: Ids


class _Epoch(NamedTuple):
    """An epoch that begins a row of epochs which are alike.

    number: of the first of them. stages: in their order. given: samples that each source gives. before: those of all
    epochs before the first.
    """

    number: int
    stages: tuple[_Stage, ...]
    length: int
    given: tuple[int, ...]
    before: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Draw from several sources by turns, in exact proportions: after n samples each has given within 1 of its share.

    Nothing is drawn at random but the order within each source: whose turn it is follows from the weights, at any
    position without those before. Ids are those of the sources end to end. A source that was read to its end begins
    anew, in another order; where an epoch ends before, the next one continues where it stopped.

    sizes: samples of each source.
    weights: a number for each source; their proportions count. Or a schedule: [(0, weights), (10_000, weights)] are
        those from so many steps of the run on; `LinearWeights` of the same change from each to the next.
    at_end: "stop": an epoch ends before a source is asked for more than it has. "repeat": it ends when every source was
        read to its end, shorter ones begin anew. "drop": sources that were read to their end are left out, so that an
        epoch reads each sample once. A source whose weight stays 0 from some step on does not count.
    shuffle: each source by itself; False keeps its own order. seed: of that.
    batch_size, drop_last: of the run, for a schedule, which counts in its steps.

    Weights are taken as integers with a sum of at most 2**20: proportions such as 0.15 or 1/3 are exact, others are
    rounded to one in a million.
    Time: 0.1 us a sample. Memory: 10 bytes for each of these integers' sum.
    Source of the turns: Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980), 323-330, whose
        bound is 1 - 1 / (2n - 2) for n sources.
    Raises: ConfigError for weights or sizes that cannot work, naming the source.

    >>> Mixture([6, 2], [3, 1], at_end="repeat", shuffle=False).at(0, range(8))
    array([0, 1, 6, 2, 3, 4, 7, 5])
    """

    repeats: ClassVar[bool] = True
    sizes: tuple[int, ...]
    weights: Weights
    _: KW_ONLY
    at_end: AtEnd
    shuffle: bool = True
    seed: int = 0
    batch_size: int = 1
    drop_last: bool = False
    #: From which step on which weights hold, and which sources have turns by later ones.
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _rows: NDArray[np.float64] = field(init=False, repr=False, compare=False)
    _later: NDArray[np.bool_] = field(init=False, repr=False, compare=False)
    #: The epochs that are not like the one before; all later ones are as the last of them.
    _epochs: tuple[_Epoch, ...] = field(init=False, repr=False, compare=False)
    #: Where the ids of each source begin, and the end of all.
    _begins: Ids = field(init=False, repr=False, compare=False)
    _shuffles: tuple[BlockShuffle, ...] = field(init=False, repr=False, compare=False)
    _patterns: Recent[tuple[int, ...], _Pattern] = field(
        default_factory=lambda: Recent(_PATTERNS_KEPT), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_seed(self.seed)
        object.__setattr__(self, "sizes", _checked_sizes(self.sizes))
        schedule = _checked_weights(self.weights, len(self.sizes))
        if isinstance(self.weights, LinearWeights):
            object.__setattr__(self, "weights", LinearWeights(schedule))
            schedule = _stairs_of(schedule, self.batch_size)
        else:
            object.__setattr__(self, "weights", schedule)
        rows = np.array([row for _, row in schedule], np.float64)
        object.__setattr__(self, "_starts", tuple(step for step, _ in schedule))
        object.__setattr__(self, "_rows", rows)
        has_turns = np.logical_or.accumulate(rows[::-1] > 0)[::-1]
        object.__setattr__(self, "_later", np.concatenate((has_turns[1:], np.zeros_like(has_turns[:1]))))
        if self.at_end not in get_args(AtEnd):
            ways = "; ".join(f'"{name}": {what}' for name, what in _ENDS.items())
            raise ConfigError(f"at_end is {self.at_end!r}; choose what happens then. {ways}")
        object.__setattr__(self, "_begins", np.concatenate(([0], np.cumsum(self.sizes))))
        check_samples(int(self._begins[-1]))
        object.__setattr__(self, "_shuffles", tuple(map(self._shuffle_of, range(len(self.sizes)))))
        object.__setattr__(self, "_epochs", tuple(self._plan_epochs()))

    def _shuffle_of(self, source: int) -> BlockShuffle:
        """What a source gives is a stream: its own first epoch, its second one, ..., each a block."""
        size = self.sizes[source]
        key = derive_key(self.seed, f"source {source} of a mixture")
        return BlockShuffle(LARGEST_SAMPLES // size * size, size, key)

    @property
    def samples(self) -> int:
        """F, those of all sources."""
        return int(self._begins[-1])

    @property
    def even_from(self) -> int:
        """See `EvenOrder.even_from`: 0, unless weights change."""
        return self._epochs[-1].number

    def length(self, epoch: int) -> int:
        """Return the number of positions, which `at_end` fixes."""
        return self._of(epoch).length

    def given(self, epoch: int) -> tuple[int, ...]:
        """Return how many samples the epoch reads from each source."""
        return self._of(epoch).given

    def source_at(self, epoch: int, positions: ArrayLike) -> Ids:
        """Return the number of the source that each position reads from, int64 in the shape of positions."""
        wanted = as_ids(positions, self.length(epoch), "positions")
        return self._turns(self._of(epoch), wanted.ravel())[0].reshape(wanted.shape)

    def at(self, epoch: int, positions: ArrayLike) -> Ids:
        plan = self._of(epoch)
        wanted = as_ids(positions, plan.length, "positions")
        sources, turns = self._turns(plan, wanted.ravel())
        found = np.empty(sources.size, np.int64)
        for source, members in _groups(sources):
            size, stream = self.sizes[source], self._stream(epoch, source) + turns[members]
            if self.shuffle:
                stream = self._shuffles[source].forward(0, stream)
            found[members] = self._begins[source] + stream % size
        return found.reshape(wanted.shape)

    def position_of(self, epoch: int, samples: ArrayLike) -> Ids:
        plan = self._of(epoch)
        wanted = as_ids(samples, self.samples, "samples")
        flat = wanted.ravel()
        found = np.full(flat.size, -1, np.int64)
        sources = np.searchsorted(self._begins, flat, side="right") - 1
        for source, members in _groups(sources):
            size, begin = self.sizes[source], self._stream(epoch, source)
            own = begin // size * size + flat[members] - self._begins[source]
            # Read in what is left of the source's own epoch, or else in the next one.
            turns, later = (self._place(source, each) - begin for each in (own, own + size))
            turns = np.where(turns < 0, later, turns)
            is_read = turns < plan.given[source]
            found[members[is_read]] = self._positions(plan, source, turns[is_read])
        return found.reshape(wanted.shape)

    def _place(self, source: int, ids: Ids) -> Ids:
        return self._shuffles[source].inverse(0, ids) if self.shuffle else ids

    def _of(self, epoch: int) -> _Epoch:
        check_epoch(epoch)
        return self._epochs[bisect_right(self._epochs, epoch, key=_number_of) - 1]

    def _stream(self, epoch: int, source: int) -> int:
        """Return how many samples the source gave in the epochs before, less what makes no difference."""
        plan = self._of(epoch)
        given = plan.before[source] + (int(epoch) - plan.number) * plan.given[source]
        # Half of what can be counted, in full epochs of its own.
        return given % (LARGEST_SAMPLES // 2 // self.sizes[source] * self.sizes[source])

    def _turns(self, plan: _Epoch, positions: Ids) -> tuple[Ids, Ids]:
        """Return the source of each position, and how many samples of the epoch it gave before."""
        sources, turns = np.empty_like(positions), np.empty_like(positions)
        begins = [stage.begin for stage in plan.stages]
        for number, members in _groups(np.searchsorted(begins, positions, side="right") - 1):
            stage = plan.stages[number]
            which, given = self._pattern(stage.weights).turns_at(positions[members] - stage.begin)
            sources[members] = stage.sources[which]
            turns[members] = given + stage.given[sources[members]]
        return sources, turns

    def _positions(self, plan: _Epoch, source: int, turns: Ids) -> Ids:
        """Return where in the epoch a source gives its samples, numbered from 0."""
        stages = [stage for stage in plan.stages if source in stage.sources]
        found = np.empty_like(turns)
        firsts = [int(stage.given[source]) for stage in stages]
        for number, members in _groups(np.searchsorted(firsts, turns, side="right") - 1):
            stage = stages[number]
            which = int(np.flatnonzero(stage.sources == source)[0])
            places = self._pattern(stage.weights).place_of(which, turns[members] - firsts[number])
            found[members] = stage.begin + places
        return found

    def _pattern(self, weights: tuple[int, ...]) -> _Pattern:
        few = _FEW if len(self._starts) < _MANY else _FEW // _MANY
        return self._patterns.get(weights, partial(_pattern_of, weights, few))

    # Planning the epochs

    def _plan_epochs(self) -> Iterator[_Epoch]:
        """Yield the epochs that are unlike those before, up to the first one after the last change of weights."""
        number, step, before = 0, 0, (0,) * len(self.sizes)
        while True:
            stages, length, given = self._plan_epoch(step)
            yield _Epoch(number, stages, length, tuple(given.tolist()), before)
            if step >= self._starts[-1]:
                return
            steps = max(1, length // self.batch_size if self.drop_last else -(-length // self.batch_size))
            change = self._starts[bisect_right(self._starts, step)]
            alike = max(1, (change - step) // steps)
            before = tuple(a + alike * b for a, b in zip(before, given.tolist(), strict=True))
            number, step = number + alike, step + alike * steps

    def _plan_epoch(self, step: int) -> tuple[tuple[_Stage, ...], int, Ids]:
        """Return the stages of an epoch that begins at a step of the run, its length, and what each source gives."""
        sizes = np.array(self.sizes, np.int64)
        given = np.zeros(sizes.size, np.int64)
        stages: list[_Stage] = []
        position, row = 0, bisect_right(self._starts, step) - 1
        last = len(self._starts) - 1
        while True:
            weights = self._rows[row]
            change = (self._starts[row + 1] - step) * self.batch_size if row < last else math.inf
            has_turns = weights > 0
            if self.at_end == "drop":
                has_turns &= given < sizes
            if not has_turns.any():  # all that have turns now are read to their end
                if row == last:
                    return tuple(stages), position, given
                row += 1
                continue
            sources = np.flatnonzero(has_turns)
            stage = _Stage(position, sources, _as_integers(weights[sources]), given.copy())
            pattern = self._pattern(stage.weights)
            end = self._stage_length(pattern, sources, sizes - given, self._later[row])
            is_cut = end is None or change < position + end
            until = int(change) if end is None or is_cut else position + end
            given[sources] += pattern.counts(until - position)
            if until > position:
                stages.append(stage)
            position = until
            if is_cut:
                row += 1
            elif self.at_end != "drop":
                return tuple(stages), position, given

    def _stage_length(
        self, pattern: _Pattern, sources: Ids, left: Ids, later: NDArray[np.bool_]
    ) -> int | None:
        """Return after how many positions a stage ends, if weights stay; None where they have to change before.

        left: samples that each source has not given yet. later: whether it has turns after the weights have changed.
        """
        own = left[sources].tolist()
        if self.at_end == "stop":
            return min(int(pattern.place_of(which, count)) for which, count in enumerate(own))
        ends = [
            int(pattern.place_of(which, count - 1)) + 1 if count > 0 else 0 for which, count in enumerate(own)
        ]
        if self.at_end == "drop":
            return min(ends)
        waits = (left > 0) & later
        waits[sources] = False
        return None if waits.any() else max(ends)


def _pattern_of(weights: tuple[int, ...], few: int) -> _Pattern:
    """Return a period's turns. few: of turns times sources, that are dealt without numba."""
    counts = np.array(weights, np.int64)
    if counts.sum() * counts.size <= few:
        sources = np.array(take_turns(weights), np.uint16)
    else:
        from penstock.plan._mixing_kernels import take_turns as compiled  # loads numba

        sources = np.empty(int(counts.sum()), np.uint16)
        compiled(counts, sources)
    begins = np.concatenate(([0], np.cumsum(counts)))
    places = np.argsort(sources, kind="stable").astype(np.int32)
    turns = np.empty(sources.size, np.int32)
    turns[places] = np.arange(sources.size) - np.repeat(begins[:-1], counts)
    return _Pattern(counts, sources, turns, places, begins)


def take_turns(weights: Sequence[int]) -> list[int]:
    """Return whose turn it is at each position of a period: of each source as often as its weight says.

    Of the sources that lag far enough behind their share, the one comes that could wait least; the first of several.
    After n turns none is further from its share than 1 - 1 / (2s - 2), for s sources.
    Source: Tijdeman 1980, as in `Mixture`.

    >>> take_turns([3, 1])
    [0, 0, 1, 0]
    """
    period, parts = sum(weights), max(2, 2 * len(weights) - 2)
    best_wait = 0
    lags, found = [0] * len(weights), []  # shares less turns, times the period
    for _ in range(period):
        best = -1
        for source, weight in enumerate(weights):
            lags[source] += weight
            if lags[source] * parts < period:
                continue
            # How long it could wait, (period * (parts - 1) - parts * lag) / weight, compared without a division.
            wait = period * (parts - 1) - parts * lags[source]
            if best < 0 or wait * weights[best] < best_wait * weight:
                best, best_wait = source, wait
        lags[best] -= period
        found.append(best)
    return found


def _as_integers(weights: NDArray[np.float64]) -> tuple[int, ...]:
    """Return integers in the proportions of weights above 0: exactly, or rounded to a sum of LONGEST_PERIOD."""
    shares = _shares_of(weights.tolist())
    near = [share.limit_denominator(LONGEST_PERIOD) for share in shares]
    period = math.lcm(*(share.denominator for share in near))
    if (
        period <= LONGEST_PERIOD
        and sum(near) == 1
        and all(abs(a - b) < _NEAR for a, b in zip(near, shares, strict=True))
    ):
        return tuple(int(share * period) for share in near)
    counts = [max(1, math.floor(share * LONGEST_PERIOD)) for share in shares]
    missing = LONGEST_PERIOD - sum(counts)
    by_rest = sorted(range(len(counts)), key=lambda source: counts[source] - shares[source] * LONGEST_PERIOD)
    for source in by_rest[: max(0, missing)]:
        counts[source] += 1
    counts[counts.index(max(counts))] += min(0, missing)
    divisor = math.gcd(*counts)
    return tuple(count // divisor for count in counts)


def _stairs_of(
    rows: Sequence[tuple[int, Sequence[float]]], batch_size: int
) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Return linear changes as weights that hold for some steps each: integers, the turns of a period.

    What a stair's integers are off its share by, the following ones make up for.
    """
    stairs: list[tuple[int, tuple[float, ...]]] = []
    owed = [Fraction(0)] * len(rows[0][1])
    for (begin, first), (end, last) in pairwise(rows):
        low, high = _shares_of(first), _shares_of(last)
        count = min(end - begin, _STAIRS)
        starts = [begin + number * (end - begin) // count for number in range(count + 1)]
        for start, until in pairwise(starts):
            middle = Fraction(start + until - 1 - 2 * begin, 2 * (end - begin))
            shares = [a + (b - a) * middle for a, b in zip(low, high, strict=True)]
            positions = (until - start) * batch_size
            period = min(positions, _STAIR_PERIOD)
            repeats = Fraction(positions, period)
            wanted = [
                max(Fraction(0), share * period + debt / repeats)
                for share, debt in zip(shares, owed, strict=True)
            ]
            turns = _rounded(wanted, period)
            owed = [
                debt + share * positions - each * repeats
                for debt, share, each in zip(owed, shares, turns, strict=True)
            ]
            stairs.append((start, tuple(turns)))
    return (*stairs, (rows[-1][0], tuple(rows[-1][1])))


def _shares_of(weights: Sequence[float]) -> list[Fraction]:
    """Return weights as shares of 1. The decimals that were written count, not the binary number next to them."""
    given = [Fraction(repr(float(weight))) for weight in weights]
    return [weight / sum(given) for weight in given]


def _rounded(wanted: Sequence[Fraction], total: int) -> list[int]:
    """Return integers that sum to a total: wanted numbers rounded down, those with the largest rests up."""
    scale = total / sum(wanted)
    scaled = [each * scale for each in wanted]
    found = list(map(math.floor, scaled))
    by_rest = sorted(range(len(found)), key=lambda source: found[source] - scaled[source])
    for source in by_rest[: total - sum(found)]:
        found[source] += 1
    return found


def _checked_sizes(sizes: object) -> tuple[int, ...]:
    found = tuple(sizes) if isinstance(sizes, (Sequence, np.ndarray)) else ()
    if not 1 <= len(found) <= _MOST_SOURCES:
        raise ConfigError(
            f"a mixture has {format_count(len(found), 'source')}; it is of 1 to {_MOST_SOURCES:,} sources"
        )
    for source, size in enumerate(found):
        if not is_integer(size) or size < 1:
            raise ConfigError(f"source {source} of the mixture has {size!r} samples: leave out what is empty")
    return tuple(map(int, found))


def _checked_weights(weights: Any, sources: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Return weights as a schedule. Raises: ConfigError."""
    is_linear = isinstance(weights, LinearWeights)
    weights = weights.rows if is_linear else weights
    given = list(weights) if isinstance(weights, (Sequence, np.ndarray)) and len(weights) else None
    if given is None or isinstance(weights, str):
        raise ConfigError(
            f"weights is {weights!r:.80}; it is a number for each source, such as [3, 1], or a schedule of these, "
            "[(0, [3, 1]), (10_000, [1, 1])]"
        )
    is_schedule = all(
        isinstance(each, (tuple, list)) and len(each) == 2 and np.ndim(each[1]) == 1 for each in given
    )
    if is_linear and (not is_schedule or len(given) < 2):
        raise ConfigError(
            f"rows of LinearWeights are {weights!r:.80}; they are weights by the step, two at least, such as "
            "[(0, [3, 1]), (10_000, [1, 1])]"
        )
    schedule = given if is_schedule else [(0, given)]
    checked: list[tuple[int, tuple[float, ...]]] = []
    for number, (step, of_step) in enumerate(schedule):
        name = f"weights[{number}]" if is_schedule else "weights"
        before = checked[-1][0] if checked else -1
        if not is_integer(step) or step <= before or (number == 0 and step != 0):
            raise ConfigError(
                f"{name} begins at step {step!r}; the first begins at step 0, and each later one at a later step"
            )
        checked.append((int(step), _checked_row(name, list(of_step), sources)))
    return tuple(checked)


def _checked_row(name: str, weights: list[Any], sources: int) -> tuple[float, ...]:
    if len(weights) != sources:
        raise ConfigError(
            f"{name} has {format_count(len(weights), 'number')} for {format_count(sources, 'source')}: give one for "
            "each"
        )
    for source, weight in enumerate(weights):
        if (
            isinstance(weight, (bool, np.bool_))
            or not isinstance(weight, Real)
            or not 0 <= float(weight) < math.inf
        ):
            raise ConfigError(
                f"{name} has {weight!r} for source {source}; a weight is a number, 0 or more: how much of the mixture "
                "is from it, next to the others"
            )
    total = float(sum(weights))
    if not 0 < total < math.inf:
        raise ConfigError(f"{name} sum to {total:g}: give one source at least a weight above 0")
    least = min(weight for weight in weights if weight > 0)
    if least * LONGEST_PERIOD < total:
        raise ConfigError(
            f"{name} has {least!r} for source {weights.index(least)}, less than a millionth of their sum: raise it, or "
            "leave the source out"
        )
    return tuple(int(weight) if is_integer(weight) else float(weight) for weight in weights)

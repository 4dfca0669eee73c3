"""PyTorch's own orders, bit for bit, without PyTorch: to switch a run without changing what it reads.

PyTorch shuffles by drawing from a Mersenne Twister (Matsumoto & Nishimura 1998, MT19937) in a fixed
sequence. These orders draw the same words in the same sequence. They are tables by nature: an epoch costs a
shuffle of F and 8 to 16 bytes a sample while it is kept, and epochs that share a generator must be counted
through.

Checked against PyTorch 2.13 (`tests/plan/test_torch_order.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ConfigError
from penstock.plan._recent import Recent
from penstock.plan.bijection import FEISTEL_FROM, as_ids
from penstock.plan.orders import check_epoch, check_samples
from penstock.units import is_integer

Ids = NDArray[np.int64]
Table = NDArray[np.signedinteger[Any]]

#: From this n on torch.randperm draws 64 bits a step (ATen/native/TensorFactories.cpp, randperm_cpu).
_RANDPERM_64_FROM = (2**32 - 1) // 20
_EPOCHS_KEPT = 3
_WORDS_AT_ONCE = 1 << 20
_STATE_BYTES = 5056
_STATE_WORDS = 624


@dataclass(frozen=True, slots=True, eq=False)
class TwisterState:
    """The state of an MT19937 generator.

    words: uint32[624].
    used: how many of the words have been drawn since the last twist, 0 to 624.
    """

    words: NDArray[np.uint32]
    used: int

    @classmethod
    def from_seed(cls, seed: int) -> TwisterState:
        """Return the state of ``torch.Generator().manual_seed(seed)``, of which 32 bits count."""
        words = [seed & 0xFFFFFFFF]
        for index in range(1, _STATE_WORDS):
            words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + index) & 0xFFFFFFFF)
        return cls(np.array(words, np.uint32), _STATE_WORDS)

    @classmethod
    def from_torch(cls, state: ArrayLike) -> TwisterState:
        """Return the state that ``torch.Generator.get_state()`` or ``torch.get_rng_state()`` returns.

        state: uint8[5056], a tensor or an array. Its layout is that of ATen's legacy generator state: seed,
        words left and whether seeded, next word, 624 words of 8 bytes each, then what normal draws keep.
        Raises: ConfigError for anything else, such as the state of a GPU's generator.
        """
        raw = np.asarray(state)
        if raw.dtype != np.uint8 or raw.shape != (_STATE_BYTES,):
            raise ConfigError(
                f"generator state is {raw.dtype} of shape {raw.shape}; a CPU generator's is uint8 of shape "
                f"({_STATE_BYTES},): pass generator.get_state() of a CPU generator"
            )
        fields = np.ascontiguousarray(raw).view("<u8")
        left, used = int(fields[1] & 0xFFFFFFFF), int(fields[2])
        words = fields[3 : 3 + _STATE_WORDS].astype(np.uint32)
        return cls(words, _STATE_WORDS if left == 1 else used)


class _Twister:
    """A generator that draws as torch's CPU generator does, from a state on."""

    def __init__(self, state: TwisterState) -> None:
        self._bits = np.random.MT19937(0)
        self._bits.state = {
            "bit_generator": "MT19937",
            "state": {"key": state.words, "pos": state.used},
        }

    def state(self) -> TwisterState:
        inner = self._bits.state["state"]
        return TwisterState(inner["key"], inner["pos"])

    def skip(self, words: int) -> None:
        self._bits.random_raw(words, output=False)

    def words(self, count: int) -> NDArray[np.uint64]:
        drawn: NDArray[np.uint64] = self._bits.random_raw(count)
        return drawn

    def words_64(self, count: int) -> NDArray[np.uint64]:
        halves = self.words(2 * count)
        return halves[0::2] << np.uint64(32) | halves[1::2]

    def random(self) -> int:
        """``torch.empty((), dtype=torch.int64).random_()``: 63 bits."""
        return int(self.words_64(1)[0]) & (2**63 - 1)

    def randperm(self, n: int) -> Ids:
        """``torch.randperm(n)``."""
        if n < FEISTEL_FROM:
            return self._randperm_small(n)
        from penstock.plan import _kernels  # loads numba, which small data sets never need

        table = np.arange(n)
        if n < _RANDPERM_64_FROM:
            for begin in range(0, n - 1, _WORDS_AT_ONCE):
                _kernels.shuffle_by_swaps(table, self.words(min(_WORDS_AT_ONCE, n - 1 - begin)), begin)
        else:
            for begin in range(0, n, _WORDS_AT_ONCE):
                _kernels.shuffle_inside_out(table, self.words_64(min(_WORDS_AT_ONCE, n - begin)), begin)
        return table

    def _randperm_small(self, n: int) -> Ids:
        table = list(range(n))
        positions = np.arange(max(n - 1, 0))
        others = positions + (self.words(positions.size) % (n - positions).astype(np.uint64)).astype(np.int64)
        for position, other in enumerate(others.tolist()):
            table[position], table[other] = table[other], table[position]
        return np.array(table, np.int64)


def randperm_words(n: int) -> int:
    """Return how many 32-bit words ``torch.randperm(n)`` draws."""
    return max(n - 1, 0) if n < _RANDPERM_64_FROM else 2 * n


def _table(permutation: Ids) -> tuple[Table, Table]:
    """The permutation and its inverse, in 4 bytes a sample where they fit."""
    narrow: Table = permutation.astype(np.int32) if permutation.size <= 2**31 else permutation
    inverse = np.empty_like(narrow)
    inverse[permutation] = np.arange(permutation.size)
    return narrow, inverse


@dataclass(frozen=True, slots=True)
class TorchDistributed:
    """The order of ``torch.utils.data.DistributedSampler`` over all its replicas, padding included.

    Position p is read by rank p mod ranks: plan it with ``split="strided"`` and a batch size of `ranks` times
    the DataLoader's, and every rank gets the DataLoader's batches.

    samples: F. ranks: num_replicas. seed: as given to the sampler, the same on all ranks; epochs are those of
    ``set_epoch``. shuffle, drop_last: as given to the *sampler*: without drop_last the order is padded with
    its beginning until all ranks have equally many, with it the tail is left out.

    The batches of ``DataLoader(dataset, 2, sampler=DistributedSampler(dataset, 2, rank=1))`` over ten samples, in the
    second epoch (``set_epoch(1)``); a loader takes the same by ``shuffle=order, split="strided", batch_size=4``:

    >>> from penstock.plan import AccessPlan
    >>> order = TorchDistributed(samples=10, ranks=2, seed=0)
    >>> plan = AccessPlan(order, batch_size=2 * 2, epochs=90, ranks=2, split="strided")
    >>> [plan.local_batch(1, 1, step).tolist() for step in range(plan.steps(1))]
    [[6, 2], [8, 3], [4]]
    """

    repeats: ClassVar[bool] = True
    samples: int
    ranks: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    _tables: Recent[int, tuple[Table, Table]] = field(
        default_factory=lambda: Recent(_EPOCHS_KEPT), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_samples(self.samples)
        if not is_integer(self.ranks) or self.ranks < 1:
            raise ConfigError(f"ranks is {self.ranks!r}; a job has at least 1: pass num_replicas")
        if not is_integer(self.seed) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed!r}; it is from 0 to 2**63 - 1: pass the sampler's")

    @property
    def even_from(self) -> int:
        """0: all epochs read equally many."""
        return 0

    def length(self, epoch: int) -> int:
        """Return the positions of the epoch: F padded, or with drop_last cut, to a multiple of ranks."""
        check_epoch(epoch)
        per_rank = self.samples // self.ranks if self.drop_last else -(-self.samples // self.ranks)
        return per_rank * self.ranks

    def at(self, epoch: int, positions: ArrayLike) -> Ids:
        within = as_ids(positions, self.length(epoch), "positions") % self.samples
        return self._permutation(epoch)[0][within].astype(np.int64) if self.shuffle else within

    def position_of(self, epoch: int, samples: ArrayLike) -> Ids:
        wanted = as_ids(samples, self.samples, "samples")
        first = self._permutation(epoch)[1][wanted].astype(np.int64) if self.shuffle else wanted
        return np.where(first < self.length(epoch), first, -1)

    def _permutation(self, epoch: int) -> tuple[Table, Table]:
        def make() -> tuple[Table, Table]:
            return _table(_Twister(TwisterState.from_seed(self.seed + epoch)).randperm(self.samples))

        return self._tables.get(epoch, make)


@dataclass(frozen=True, slots=True, eq=False)
class TorchShuffle:
    """The order of ``DataLoader(dataset, shuffle=True)``, from a generator's state on.

    Each epoch the DataLoader draws a seed for its workers from its generator, then its RandomSampler draws
    the permutation: from the same generator if the user gave one, else from a new generator that it seeds
    from the global one. At an epoch's end RandomSampler draws one more permutation of which it uses nothing.
    Epochs are taken to run to their end, and nobody else to draw from the generator meanwhile. Where somebody
    does (the global generator also serves weight initialisation and dropout), capture the state again at each
    ``iter(loader)`` and make a new order with `first_epoch`.

    samples: F.
    state: of the generator when ``iter(loader)`` is called for `first_epoch`: ``generator.get_state()``, or
        ``torch.get_rng_state()`` with is_global, a uint8 tensor or array; or a `TwisterState`, such as
        ``TwisterState.from_seed(seed)`` for ``torch.manual_seed(seed)``.
    is_global: the DataLoader was given no generator.
    persistent_workers: as given to the DataLoader (with workers): it then draws its workers' seed only once.
    first_epoch: the epoch that the state belongs to; earlier ones cannot be asked for.
    Raises: ConfigError if state is not that of a CPU generator.

    The order of ``DataLoader(dataset, shuffle=True, generator=torch.Generator().manual_seed(3))`` over five samples, in
    its first two epochs; a loader takes it by ``shuffle=order``. With a generator at hand, its state is
    ``generator.get_state()``, before the first ``iter(loader)``:

    >>> order = TorchShuffle(samples=5, state=TwisterState.from_seed(3))
    >>> [order.at(epoch, range(5)).tolist() for epoch in (0, 1)]
    [[2, 4, 3, 0, 1], [0, 2, 1, 4, 3]]

    Without a generator of its own, a DataLoader draws from PyTorch's global one: after ``torch.manual_seed(3)`` and
    nothing else that draws,

    >>> TorchShuffle(5, TwisterState.from_seed(3), is_global=True).at(0, range(5)).tolist()
    [1, 4, 3, 0, 2]
    """

    samples: int
    state: ArrayLike | TwisterState = field(repr=False)
    is_global: bool = False
    persistent_workers: bool = False
    first_epoch: int = 0
    _tables: Recent[int, tuple[Table, Table]] = field(
        default_factory=lambda: Recent(_EPOCHS_KEPT), init=False, repr=False
    )
    #: The generator's state at the beginning of each epoch passed so far, 2.5 kB each.
    _starts: dict[int, TwisterState] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_samples(self.samples)
        check_epoch(self.first_epoch)
        state = self.state if isinstance(self.state, TwisterState) else TwisterState.from_torch(self.state)
        object.__setattr__(self, "state", state)
        self._starts[self.first_epoch] = state

    @property
    def even_from(self) -> int:
        """0: all epochs read F samples."""
        return 0

    def length(self, epoch: int) -> int:
        """Return F."""
        self._check_epoch(epoch)
        return self.samples

    def at(self, epoch: int, positions: ArrayLike) -> Ids:
        self._check_epoch(epoch)
        within = as_ids(positions, self.samples, "positions")
        return self._permutation(epoch)[0][within].astype(np.int64)

    def position_of(self, epoch: int, samples: ArrayLike) -> Ids:
        self._check_epoch(epoch)
        wanted = as_ids(samples, self.samples, "samples")
        return self._permutation(epoch)[1][wanted].astype(np.int64)

    def _permutation(self, epoch: int) -> tuple[Table, Table]:
        return self._tables.get(epoch, partial(self._make, epoch))

    def _make(self, epoch: int) -> tuple[Table, Table]:
        twister = _Twister(self._start(epoch))
        self._skip_worker_seed(twister, epoch)
        if self.is_global:
            twister = _Twister(TwisterState.from_seed(twister.random()))
        return _table(twister.randperm(self.samples))

    def _start(self, epoch: int) -> TwisterState:
        known = epoch
        while known not in self._starts:
            known -= 1
        twister = _Twister(self._starts[known])
        for passed in range(known, epoch):
            self._skip_worker_seed(twister, passed)
            twister.skip(2 if self.is_global else 2 * randperm_words(self.samples))
            self._starts[passed + 1] = twister.state()
        return self._starts[epoch]

    def _skip_worker_seed(self, twister: _Twister, epoch: int) -> None:
        if epoch == self.first_epoch or not self.persistent_workers:
            twister.skip(2)

    def _check_epoch(self, epoch: int) -> None:
        check_epoch(epoch)
        if epoch < self.first_epoch:
            raise ConfigError(
                f"epoch {epoch} is before {self.first_epoch}, the first that the generator's state gives: "
                "pass the state captured at an earlier iter(loader)"
            )

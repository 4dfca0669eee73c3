"""Batches that a function makes of all samples of a step, in the worker that has loaded them."""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.flow.staging import ROW
from penstock.flow.work import Brought
from penstock.loader.asked import SampleCode
from penstock.loader.global_draws import drawn_since, global_states
from penstock.loader.user_code import name_of_code
from penstock.policy import Load

#: What makes a batch of the samples of a step; it may ask for `epoch` and `rng`, see `penstock.loader.asked`.
Collate = Callable[..., Any]

#: What the generators of batches are for; another text is other numbers.
DRAWS = "collate_fn"
# So many batches all draw from a global generator, before it is said: during one, the training may have drawn.
_WATCHED = 2

_NAMED_SAMPLES = 8
# Of a batch, so many parts are looked at to know what it takes.
_MOST_PARTS = 1000
_PLAIN = {dict, list, tuple, int, float, bool, str, bytes, type(None)}
# Slots that hold no parts of an object, or those that `vars` tells.
_TOLD = {"__dict__", "__weakref__"}


class CollatingDecoder:
    """A `Decoder` that keeps what a function makes of a step's samples, for slots of one step and Loads that are steps.

    collate: gets a list of the samples in the order of the batch.
    leaves_out: whether samples that failed are left out of that list, where there are others. Otherwise the function
        is not called for a step that has such samples.
    seed: of the generator that the function may ask for, which belongs to the epoch and the batch's first sample.
    on_global_draws: called once, with the libraries whose global generators it draws from; None where it may.
    """

    fields = (ROW,)

    def __init__(
        self,
        collate: Collate,
        *,
        leaves_out: bool,
        seed: int = 0,
        on_global_draws: Callable[[set[str]], None] | None = None,
    ) -> None:
        self._collate = collate
        self._leaves_out = leaves_out
        self._seed = seed
        self._make = SampleCode(collate, seed, DRAWS)
        self._on_global_draws = on_global_draws
        #: What each of the first batches drew from.
        self._drawn: list[set[str]] = []
        self._drawn_lock = threading.Lock()
        #: Batches that are made and not finished, by slot; and the one that was finished last.
        self._made: dict[int, Any] = {}
        self._latest: Any = None

    def __reduce__(self) -> Any:
        """Pickle what it was made of: in a worker process, global generators are seeded for each sample."""
        return partial(CollatingDecoder, leaves_out=self._leaves_out, seed=self._seed), (self._collate,)

    @property
    def draws(self) -> bool:
        """Whether the function asks for a generator."""
        return "rng" in self._make.asks

    def place_of(self, rows: range, arrays: tuple[NDArray[Any], ...]) -> None:
        """Samples are objects, whose bytes lie elsewhere."""

    def decode(
        self, load: Load, brought: Brought, arrays: tuple[NDArray[Any], ...], at: Callable[[int], None]
    ) -> list[tuple[int, Exception]]:
        """Make the batch; see `Decoder`. All of its samples fail if the function does."""
        rows, ids, data, _ = brought
        if len(rows) < load.samples.size and not self._leaves_out:
            return []
        if not isinstance(rows, range):  # as where some come from a tier
            order = sorted(range(len(rows)), key=rows.__getitem__)
            ids, data = ids[order], [data[index] for index in order]
        try:
            made = self._made_of(list(data), load.epoch, int(ids[0]))
            if made is None:
                raise DataError(f"collate_fn {name_of_code(self._collate)} returned None: return the batch")
        except Exception as error:
            named = ", ".join(map(str, ids[:_NAMED_SAMPLES]))
            more = f", ... {ids.size} in all" if ids.size > _NAMED_SAMPLES else ""
            error.add_note(
                f"while collate_fn {name_of_code(self._collate)} made a batch of samples {named}{more}"
            )
            return [(index, error) for index in range(len(rows))]
        self._made[load.slot] = made
        return []

    def _made_of(self, data: list[Any], epoch: int, first: int) -> Any:
        """Return the batch of some samples. first: of them."""
        if self._on_global_draws is None or len(self._drawn) >= _WATCHED:
            return self._make(data, epoch, first)
        before = global_states()
        made = self._make(data, epoch, first)
        drawn = drawn_since(before)
        with self._drawn_lock:
            self._drawn.append(drawn)
            is_last = len(self._drawn) == _WATCHED
        if is_last and (by_all := set.intersection(*self._drawn)):
            self._on_global_draws(by_all)
        return made

    def finish(self, slot: int, arrays: tuple[NDArray[Any], ...], rows: Sequence[int]) -> Any:
        """Return the batch; the same again, if it is asked for again before another one, as after Ctrl-C."""
        if slot < 0:
            raise ConfigError(
                f"a batch without samples is asked for, and collate_fn {name_of_code(self._collate)} makes batches of "
                "samples only: leave collate_fn out here"
            )
        kept = self._made
        if slot in kept:
            # Another thread may finish the next one meanwhile: for one that is asked once, what it finds is returned.
            made = self._latest = kept[slot]
            del kept[slot]
            return made
        return self._latest

    def forget_latest(self) -> None:
        """Keep no batch for one who asks again: what was finished last is not wanted."""
        self._latest = None

    def forget_all(self) -> None:
        """Keep no batch: nobody asks for one any more."""
        self._made, self._latest = {}, None

    def apart(self) -> CollatingDecoder:
        """See `MovableDecoder`."""
        return copy.copy(self)

    def take(self, slot: int, rows: Sequence[int]) -> Any:
        """See `MovableDecoder`: the batch."""
        return self._made.pop(slot, None)

    def put(self, slot: int, rows: Sequence[int], what: Any) -> None:
        """See `MovableDecoder`."""
        if what is not None:
            self._made[slot] = what


def nbytes_of(batch: Any) -> float:
    """Return what arrays, tensors, numbers and texts take, in lists, dicts and objects; infinity if not known."""
    left, nbytes, parts = [batch], 0.0, 1
    try:
        while left:
            if parts > _MOST_PARTS:
                return math.inf
            what = left.pop()
            if type(what) not in _PLAIN and any(map(_has_slots, type(what).__mro__)):
                return math.inf
            if isinstance(what, dict | list | tuple):
                attributes = getattr(what, "__dict__", {})
                parts += len(what) + len(attributes)
                left += what if isinstance(what, list | tuple) else what.values()
                left += attributes.values()
            elif what is None or isinstance(what, int | float | str | bytes):
                nbytes += sys.getsizeof(what)
            elif hasattr(what, "nbytes"):
                nbytes += int(what.nbytes)
            else:
                parts += len(vars(what))
                left += vars(what).values()
    except Exception:  # somebody else's object, or a tensor that is sparse
        return math.inf
    return nbytes


def _has_slots(kind: type) -> bool:
    """Whether objects of a class have parts that `vars` does not tell."""
    slots = kind.__dict__.get("__slots__", ())
    return not {slots} <= _TOLD if isinstance(slots, str) else not {*slots} <= _TOLD

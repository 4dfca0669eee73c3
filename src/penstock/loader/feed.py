"""Batches that a caller asks for one after the other, loaded ahead of it: for a run whose future is not known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ClosedError
from penstock.loader.failed_samples import judge
from penstock.loader.loader import Loader
from penstock.plan.growing import Growing

Ids = NDArray[np.int64]
Place = tuple[int, int]

#: Batches of a custom size have space for so many times what was asked for first, and this many samples at least.
_ROOM, _LEAST_ROOM = 4, 256


class Feed:
    """Loads lists of samples in the order in which they are asked for; each is taken once, in that order.

    Places, (epoch, step), only grow; a step of a later epoch may follow any. One thread asks and takes. Nothing is
    loaded before the first is taken, or `start`.

    make: makes the loader of an order, with collate_fn= and threads.
    samples: F. most: samples that a batch may have; a larger one is loaded by another loader, when all before it were
        taken. None: chosen by what was asked for.
    ahead: batches that may be loaded and not taken.
    """

    def __init__(
        self, make: Callable[[Growing], Loader], samples: int, *, most: int | None, ahead: int
    ) -> None:
        self._make, self._samples, self._most, self._ahead = make, samples, most, ahead
        self._order: Growing | None = None
        self._loader: Loader | None = None
        #: What was asked for and is in no loader's order yet.
        self._waiting: deque[tuple[Place, Ids]] = deque()
        #: Of the loader's order, what is not taken.
        self._left: deque[Place] = deque()
        #: When the caller left a pass; see `note_end`.
        self._ended_at: float | None = None

    def ask(self, place: Place, ids: Sequence[int]) -> None:
        """Have a batch loaded: ids of samples, one at least."""
        batch = np.array(ids, np.int64)
        if self._order is None or self._loader is None or self._waiting or batch.size > self._order.most:
            self._waiting.append((place, batch))
            return
        self._add(self._order, place, batch)
        self._loader._parts.engine.extend()

    def start(self) -> None:
        """Load what was asked for, as far as it can be loaded now. Raises: as a loader does."""
        if self._left or not self._waiting:
            return
        self.close()
        sizes = [ids.size for _, ids in self._waiting]
        most = max(_LEAST_ROOM, _ROOM * max(sizes)) if self._most is None else max(self._most, *sizes)
        self._order = order = Growing(self._samples, most, self._waiting[0][1])
        while self._waiting:
            self._add(order, *self._waiting.popleft())
        self._loader = loader = self._make(order)
        for _ in range(self._ahead - loader._parts.setup.limits.slots):
            loader._parts.engine.add_slot()
        loader._loop.ensure_started(reports=False)

    def renew(self) -> None:
        """Have worker processes begin anew with what is asked for next, where they must; see `Processes.renew`."""
        if self._loader is not None and self._loader._parts.processes is not None:
            self._loader._parts.processes.renew()

    def take(self, place: Place) -> tuple[Any, Exception | None]:
        """Return the next batch that was asked for, or why it cannot be had; the one after it comes next.

        Raises: WaitTimeout, after which it can be called again; ClosedError after `close`; what no sample is to
            blame for.
        """
        self.start()
        loader = self._loader
        if loader is None:
            raise ClosedError("what loads these batches has ended: ask for others")
        assert self._left[0] == place, "batches are taken in their order"
        self._ended_at = None
        parts, clock = loader._parts, loader._parts.clock
        clock.begin_wait()
        try:
            staged = parts.engine.take(*place)
            places, _, error = judge(staged, loader.config.on_error, parts.fetcher.describe)
            batch = None
            if error is None:
                batch = parts.setup.decoder.finish(staged.slot, staged.keep(places), staged.rows(places))
            self._left.popleft()
            self._forget_in_plan((place[0], place[1] + 1))
            parts.engine.let_go(*place)
            clock.end_wait(*place, len(places), staged.fitted)
        except BaseException:
            clock.end_wait_in_vain(place[0])
            raise
        return batch, error

    def end_step(self) -> None:
        """Note that the caller has done with the last batch, as at the end of its epoch."""
        self.note_end()
        self._end_left_step()

    def note_end(self) -> None:
        """Note when the caller left a pass before its end, from whatever thread: its last step ended then."""
        if self._loader is not None:
            self._ended_at = self._loader._parts.recorder.clock()

    def _end_left_step(self) -> None:
        ended, self._ended_at = self._ended_at, None
        if self._loader is not None and ended is not None:
            self._loader._parts.clock.end_step(ended)

    def forget_before(self, place: Place) -> None:
        """Give up what was asked for before a place."""
        self._end_left_step()
        while self._waiting and self._waiting[0][0] < place:
            self._waiting.popleft()
        if self._left and self._left[0] < place and self._loader is not None:
            self._loader._parts.clock.end_wait_in_vain(self._left[0][0])
            self._loader._parts.engine.seek(*place)
        while self._left and self._left[0] < place:
            self._left.popleft()
        self._forget_in_plan(place)

    def close(self) -> None:
        """End the loader's threads, and forget what was asked for. What is asked for next begins new ones."""
        self._end_left_step()
        if self._loader is not None:
            self._loader.close()
        self._loader = self._order = None
        self._left.clear()

    def _forget_in_plan(self, place: Place) -> None:
        if self._order is not None:
            self._order.forget_before(place)

    def _add(self, order: Growing, place: Place, ids: Ids) -> None:
        order.ask(place, ids)
        self._left.append(place)

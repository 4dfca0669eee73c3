"""The steps of a loader's epoch, as a DataLoader has its batch sampler and its data set.

Accelerate's `skip_first_batches` makes a new DataLoader of the data set of one and the rest of its batch sampler. What
is drawn here is a place, (epoch, step): a step that is skipped is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock import loader
from penstock.errors import ConfigError


class BatchSteps:
    """Places of the epoch that comes next."""

    def __init__(self, of: loader.Loader) -> None:
        self._loader = of

    def set_epoch(self, epoch: int) -> None:
        """See `penstock.Loader.set_epoch`; the Trainer of Hugging Face asks for it here."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the places of the epoch that the loader is at, or begins next, from its first step on."""
        epoch = self._loader.position[0]
        for step in range(len(self._loader)):
            yield epoch, step
        self._loader.set_epoch(epoch + 1)  # all of it may have been skipped


class BatchesAt:
    """The batches at such places."""

    def __init__(self, of: loader.Loader) -> None:
        self._loader = of
        self._pass: Iterator[Any] | None = None

    def __len__(self) -> int:
        plan = self._loader.plan
        return plan.length(min(self._loader.position[0], plan.epochs - 1))

    def __getitems__(self, place: tuple[int, int]) -> Any:
        """Return the batch at a place. Raises: ConfigError if the loader is further."""
        if self._pass is None or self._loader.position != place:
            self._loader._loop.go_to(place)
            if (at := self._loader.position) != place:
                raise ConfigError(
                    f"the batch of epoch {place[0]}, step {place[1]} is asked for, and the loader is at epoch {at[0]}, "
                    f"step {at[1]}: skip as many batches as its state had consumed, or load no state"
                )
            self._pass = iter(self._loader)
        return next(self._pass)

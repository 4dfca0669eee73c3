"""What code of a user asks for by the names of its parameters: the epoch, and a random generator for each sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.plan.random import derive_key, generator_for

#: By which a function asks for them.
NAMES = ("epoch", "rng")
#: And one of several samples.
_LIST_NAMES = ("epoch", "rng", "rngs")


def asked_by(function: Callable[..., Any] | None) -> frozenset[str]:
    """Return which parameters a callable has; none where it is a built-in without a signature, or there is none."""
    try:
        return frozenset() if function is None else frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


class SampleCode:
    """Code of a user that is called for one sample, with what it asks for.

    A generator's stream depends on seed, purpose, epoch and sample alone: not on the thread, process, rank or moment.

    function: called with a value, and with `epoch=` and `rng=`, a NumPy generator, where its signature has them.
    purpose: what it draws for.
    """

    def __init__(self, function: Callable[..., Any], seed: int, purpose: str) -> None:
        self._function = function
        self._key = derive_key(seed, purpose)
        self.asks = asked_by(function).intersection(NAMES)

    def __call__(self, value: Any, epoch: int, sample: int) -> Any:
        """Return what the code makes of a value for a sample of an epoch."""
        if not self.asks:
            return self._function(value)
        given: dict[str, Any] = {}
        if "epoch" in self.asks:
            given["epoch"] = epoch
        if "rng" in self.asks:
            given["rng"] = generator_for(self._key, epoch, sample)
        return self._function(value, **given)


class ListCode:
    """A data set's `__getitems__`: called with a list of samples, and `epoch=` and `rngs=`, a generator for each."""

    def __init__(self, function: Callable[..., Any], seed: int, purpose: str) -> None:
        self._function = function
        self._key = derive_key(seed, purpose)
        self.asks = asked_by(function).intersection(_LIST_NAMES)

    def __call__(self, samples: list[int], epoch: int) -> Any:
        """Return what the code makes of some samples of an epoch."""
        if not self.asks:
            return self._function(samples)
        given: dict[str, Any] = {}
        if "epoch" in self.asks:
            given["epoch"] = epoch
        if "rngs" in self.asks:
            given["rngs"] = [generator_for(self._key, epoch, sample) for sample in samples]
        return self._function(samples, **given)


def list_code(
    function: Callable[..., Any], one: SampleCode, seed: int, purpose: str, place: str
) -> ListCode | None:
    """Return the code that makes several samples; None where it does not ask for what `one`, which makes one, does.

    place: the data set, for messages.
    Raises: ConfigError for one generator, which several samples cannot share; for what `one` does not ask for.
    """
    several = ListCode(function, seed, purpose)
    if "rng" in several.asks:
        raise ConfigError(
            f"{place}.__getitems__ has a parameter rng, and each sample has a generator of its own: name it rngs, a "
            "list with a generator for each sample"
        )
    wanted = listed(one.asks)
    if more := sorted(several.asks - wanted):
        raise ConfigError(
            f"{place}.__getitems__ has a parameter {more[0]}, and __getitem__ has no {more[0].removesuffix('s')}: "
            "either may be asked for a sample, so let both take it"
        )
    return several if several.asks == wanted else None


def listed(asks: frozenset[str]) -> frozenset[str]:
    """Return what is asked for with several samples, where these are asked for with one."""
    return frozenset("rngs" if name == "rng" else name for name in asks)


class AskedDataset:
    """A data set inside of another one: called with what its code asks for, of what the outer one was given."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        #: What `__getitem__` asks for.
        self.asks = asked_by(getattr(dataset, "__getitem__", None)).intersection(NAMES)
        get_list = getattr(dataset, "__getitems__", None)
        #: Whether several samples are asked for at once, for what one sample asks for.
        self._has_list = get_list is not None and (
            asked_by(get_list).intersection(_LIST_NAMES) == listed(self.asks)
        )

    def one(self, sample: int, given: Mapping[str, Any]) -> Any:
        """Return a sample. given: epoch and rng, those at least that it asks for."""
        return self._dataset.__getitem__(sample, **{name: given[name] for name in self.asks})

    def several(self, samples: Sequence[int], given: Mapping[str, Any]) -> list[Any]:
        """Return several samples. given: epoch and rngs, those at least that they ask for."""
        if self._has_list:
            names = listed(self.asks)
            return list(self._dataset.__getitems__(samples, **{name: given[name] for name in names}))
        rngs = given["rngs"] if "rng" in self.asks else [None] * len(samples)
        return [
            self.one(sample, {"epoch": given.get("epoch"), "rng": rng})
            for sample, rng in zip(samples, rngs, strict=True)
        ]

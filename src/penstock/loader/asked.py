"""What code of a user asks for by the names of its parameters: the epoch, and a random generator for each sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.plan.random import derive_key, generator_for

#: By which a function asks for them.
NAMES = ("epoch", "rng")
#: And one of several samples.
_LIST_NAMES = ("epoch", "rng", "rngs")


def asked_by(function: Callable[..., Any] | None) -> frozenset[str]:
    """Return which parameters a callable has; none where it is a built-in without a signature, or there is none."""
    return frozenset(parameters_of(function))


def parameters_of(function: Callable[..., Any] | None) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable; none where it is a built-in without a signature, or there is none."""
    try:
        return {} if function is None else inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


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


def known(**given: Any) -> dict[str, Any]:
    """Return what is given, of what may be asked for: outside of a loader there may be nothing."""
    return {name: value for name, value in given.items() if value is not None}


def each_of(given: Mapping[str, Any], samples: int) -> Iterator[Mapping[str, Any]]:
    """Yield what each of several samples is given, of what they are given together: one of the rngs, as rng."""
    shared = {name: value for name, value in given.items() if name != "rngs"}
    for number in range(samples):
        yield {**shared, "rng": given["rngs"][number]} if "rngs" in given else shared


#: How a user gives them.
_GIVEN = {"epoch": "epoch=0", "rng": "rng=np.random.default_rng(0)"}


class InnerCode:
    """Code of a user inside of a data set: called with what it asks for, of what that data set was given.

    place: what has it, for errors. names: by which it may ask.
    """

    def __init__(self, function: Callable[..., Any] | None, place: str, names: Sequence[str] = NAMES) -> None:
        parameters = parameters_of(function)
        self._place = place
        self.asks = frozenset(parameters).intersection(names)
        #: What has no default.
        self.needs = frozenset(
            name for name in self.asks if parameters[name].default is inspect.Parameter.empty
        )

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what it is called with. Raises: ConfigError where it needs what is not given."""
        if not self.needs <= given.keys():
            missing = sorted(self.needs - given.keys())
            raise ConfigError(
                f"{self._place} asks for {' and '.join(missing)}, which a penstock.Loader gives: to look at a sample "
                f"without one, call data.__getitem__(number, {', '.join(_GIVEN[name] for name in missing)})"
            )
        return {name: given[name] for name in self.asks if name in given}


class AskedDataset:
    """A data set inside of another one: called with what its code asks for, of what the outer one was given."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        place = type(dataset).__name__
        self._one = InnerCode(getattr(dataset, "__getitem__", None), place)
        get_list = getattr(dataset, "__getitems__", None)
        several = InnerCode(get_list, place, _LIST_NAMES)
        #: Makes several samples; None where it does not ask for what a sample does.
        self._several = several if get_list is not None and several.asks == listed(self.asks) else None

    @property
    def asks(self) -> frozenset[str]:
        """What `__getitem__` asks for."""
        return self._one.asks

    def one(self, sample: int, given: Mapping[str, Any]) -> Any:
        """Return a sample. given: epoch and rng, as far as there are. Raises: ConfigError where it needs more."""
        return self._dataset.__getitem__(sample, **self._one.arguments(given))

    def several(self, samples: Sequence[int], given: Mapping[str, Any]) -> list[Any]:
        """Return several samples. given: epoch and rngs, as far as there are. Raises: as `one`."""
        if self._several is not None and self._several.needs <= given.keys():
            return list(self._dataset.__getitems__(samples, **self._several.arguments(given)))
        return [
            self.one(sample, own) for sample, own in zip(samples, each_of(given, len(samples)), strict=True)
        ]
